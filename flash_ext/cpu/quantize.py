"""The CPU kernels of quantization to FP8 or int8, as csrc/kernels/fp8/ has them for CUDA.

Their checks are also the words with which the CUDA kernels refuse (csrc/api/quantize.cpp has the
same conditions).

Every operation is rounded to float32 in the same order, so x_8bit and descale equal the CUDA
kernels' bit by bit (but for the bits of a NaN). Sums of means are in another order.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.checks import refuse
from ..ops.options import FP8
from ..ops.quantize import (
    SCALE_ROWS,
    batch_of,
    check_dtype,
    check_scales,
    descale_shape,
    quantize_qkv_by,
)
from ..ops.schemas import library
from . import transposed_v
from .checks import check_offsets, require_plain

MAX_FLOAT8 = 448.0
"""The largest number of e4m3."""

MAX_INT8 = 127.0

# Numbers are multiplied by powers of two, as in csrc/problem/quantize.h.

SUM_DIVISOR = 512.0
"""Of sums of up to 256 numbers, each less a mean, which may exceed float32's; and of maxima."""

DIFFERENCE_DIVISOR = 2.0
"""Of a number less a mean."""

MOST_FACTOR = 2.0**126
"""From a number to its result. A smaller maximum counts as the one with this factor."""

INT8_UNIT = 2.0**-12
"""In which int8 results are rounded. Otherwise bfloat16 numbers would need a larger factor."""


def hadamard_dim(dim: int) -> int:
    """The largest power of two that divides dim: the size of the blocks of the rotation."""
    return dim & -dim


def butterflies(x: Tensor) -> Tensor:
    """x H over the last dimension, where the Hadamard matrix H has entries 1 and -1."""
    block = hadamard_dim(x.shape[-1])
    distance = 1
    while distance < block:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance *= 2
    return x


def _check_cuda_rows(x: Tensor, batch: int, signs: Tensor | None, mean: Tensor | None) -> None:
    """The limits of the CUDA kernels, which read several elements at a time."""
    length, heads, dim = x.shape[-3:]
    if dim % 16 != 0:
        refuse("x's head dimension", "a multiple of 16 up to 256 on CUDA", dim)
    if length >= 2**29:
        refuse("x's sequence length", "below 2^29", length)
    tiles = (max(batch, 1) if x.dim() == 4 else 1) * (length // SCALE_ROWS + 1) + batch + 2
    if heads * tiles >= 2**31:
        refuse("x", "of fewer than 2^31 tiles of 128 rows", tuple(x.shape))
    for name, tensor, alignment in (("signs", signs, 8), ("mean", mean, 16)):
        if tensor is not None and tensor.numel() > 0 and tensor.data_ptr() % alignment != 0:
            got = f"a tensor that starts {tensor.data_ptr() % alignment} bytes after"
            refuse(name, f"aligned to {alignment} bytes", got)


def check_rows(
    x: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    signs: Tensor | None = None,
    mean: Tensor | None = None,
) -> None:
    """Check what quantization and means have in common."""
    if cu_seqlens is None and x.dim() != 4:
        hint = "(packed sequences come with cu_seqlens)"
        refuse("x", f"of shape (batch, seqlen, heads, head_dim) {hint}", tuple(x.shape))
    if cu_seqlens is not None and x.dim() != 3:
        refuse("x", "of shape (total, heads, head_dim) with cu_seqlens", tuple(x.shape))
    if x.dtype not in (torch.float16, torch.bfloat16):
        refuse("x", "float16 or bfloat16", x.dtype)
    *_, heads, dim = x.shape
    if not 1 <= dim <= 256:
        refuse("x's head dimension", "1 to 256", dim)
    if x.numel() > 0 and dim > 1 and x.stride(-1) != 1:
        refuse("x", "contiguous in its last dimension", f"strides {x.stride()}")
    if heads == 0:
        refuse("x's number of heads", "at least 1", heads)
    if cu_seqlens is not None and cu_seqlens.numel() < 1:
        refuse("cu_seqlens", "of shape (batch + 1)", tuple(cu_seqlens.shape))
    batch = batch_of(x, cu_seqlens)
    require_plain("cu_seqlens", cu_seqlens, x, torch.int32, (batch + 1,), "(batch + 1)")
    require_plain("seqused", seqused, x, torch.int32, (batch,), "(batch)")
    layout = "(batch, heads, head_dim)"
    require_plain("mean", mean, x, torch.float32, (batch, heads, dim), layout)
    require_plain("signs", signs, x, torch.int8, (dim,), "(head_dim)")
    if x.device.type == "cuda":
        _check_cuda_rows(x, batch, signs, mean)
    elif cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, x.shape[0])


def _sequences(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[Tensor]:
    """The rows in use of each sequence, (n, H, D), as views."""
    if cu_seqlens is None:
        found = list(x.unbind(0))
    else:
        edges = cu_seqlens.tolist()
        found = [x[edges[b] : edges[b + 1]] for b in range(len(edges) - 1)]
    if seqused is not None:
        for b, used in enumerate(seqused.tolist()):
            if not 0 <= used <= found[b].shape[0]:
                refuse(f"seqused[{b}]", f"from 0 to the sequence's {found[b].shape[0]} rows", used)
            found[b] = found[b][:used]
    return found


def _amax(x: Tensor, scales: str, keeps_nan: bool) -> Tensor:
    """Of one sequence (n, H, D): (), (H), (H, ceil(n / 128)) or (H, D).

    NaN has no part in it, unless keeps_nan.
    """
    x = x.abs() if keeps_nan else x.abs().nan_to_num(0.0)
    x = x.transpose(0, 1)
    if scales == "block":
        padded = -(-x.shape[1] // SCALE_ROWS) * SCALE_ROWS
        x = F.pad(x, (0, 0, 0, padded - x.shape[1])).unflatten(1, (-1, SCALE_ROWS))
    dims = {"tensor": (0, 1, 2), "head": (1, 2), "block": (2, 3), "channel": (1,)}[scales]
    if x.shape[1] == 0:  # no rows: no maximum
        return x.new_zeros([n for dim, n in enumerate(x.shape) if dim not in dims])
    return x.amax(dims)


def _by_row(scale: Tensor, scales: str, rows: int) -> Tensor:
    """One sequence's part of a scale, so that it broadcasts to (n, H, D)."""
    if scales == "tensor" or scales == "channel":
        return scale
    if scales == "head":
        return scale[:, None]
    block = torch.arange(rows, device=scale.device) // SCALE_ROWS
    return scale[:, block].mT[..., None]


def _finite(x: Tensor) -> Tensor:
    """x, with NaN where it is not finite."""
    return torch.where(x.isfinite(), x, torch.nan)


def _rotated(rows: Tensor, signs: Tensor | None, mean: Tensor | None) -> tuple[Tensor, float]:
    """The numbers of a sequence (n, H, D), less their mean, rotated but for the factor sqrt(D).

    Returns:
        The numbers in float32, NaN if they are not finite, and what they are divided by.
    """
    y = rows.float()
    if signs is None:
        divisor = 1.0 if mean is None else DIFFERENCE_DIVISOR
        return _finite(y if mean is None else y / divisor - mean / divisor), divisor
    # Both have signs before one is subtracted: that decides signs of 0.
    y = torch.where(signs < 0, -y, y) / SUM_DIVISOR
    if mean is not None:
        y = y - torch.where(signs < 0, -mean, mean) / SUM_DIVISOR
    return _finite(butterflies(y)), SUM_DIVISOR


def check_quantize(
    x: Tensor,
    scales: str,
    *,
    signs: Tensor | None = None,
    mean: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    blocks: int = 0,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> None:
    """Check the arguments of `fp8_quantize`."""
    check_scales(scales)
    check_dtype(dtype, scales)
    check_rows(x, cu_seqlens=cu_seqlens, seqused=seqused, signs=signs, mean=mean)
    if signs is not None and scales == "channel":
        wanted = "None with scales='channel' (a rotation mixes the channels)"
        refuse("signs", wanted, "a tensor")
    if mean is not None and scales == "channel":
        refuse("mean", "None with scales='channel', which is for v", "a tensor")
    if transposed and (scales == "block" or signs is not None or mean is not None):
        wanted = "False with scales='block', signs or mean (it is for v, which has none of them)"
        refuse("transposed", wanted, True)
    of_rows = -(-x.shape[-3] // SCALE_ROWS)
    if scales == "block" and cu_seqlens is None and blocks != of_rows:
        refuse("blocks", f"ceil(seqlen / 128) = {of_rows}", blocks)
    if not 0 <= blocks < 2**31:
        refuse("blocks", "at least 0 and below 2^31", blocks)


def _quantize_cpu(
    x: Tensor,
    scales: str,
    *,
    signs: Tensor | None = None,
    mean: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    blocks: int = 0,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    check_quantize(
        x,
        scales,
        signs=signs,
        mean=mean,
        cu_seqlens=cu_seqlens,
        seqused=seqused,
        blocks=blocks,
        dtype=dtype,
        transposed=transposed,
    )
    dtype = dtype or FP8
    to_int8 = dtype == torch.int8
    rotated, divisors = [], []
    for b, rows in enumerate(_sequences(x, cu_seqlens, seqused)):
        y, divisor = _rotated(rows, signs, None if mean is None else mean[b])
        rotated.append(y)
        divisors.append(divisor)

    longest = max((-(-y.shape[0] // SCALE_ROWS) for y in rotated), default=0)
    if scales == "block" and blocks < longest:
        refuse("blocks", f"at least the longest sequence's, {longest}", blocks)
    shape = descale_shape(x, scales, cu_seqlens, blocks)
    amax = torch.zeros(shape, dtype=torch.float32, device=x.device)
    for b, y in enumerate(rotated):
        of_sequence = _amax(y, scales, keeps_nan=to_int8) * (divisors[b] / SUM_DIVISOR)
        if scales == "tensor":
            amax = torch.maximum(amax, of_sequence)
        elif scales == "block":
            amax[b, :, : of_sequence.shape[1]] = of_sequence
        else:
            amax[b] = of_sequence

    largest, unit = (MAX_INT8, INT8_UNIT) if to_int8 else (MAX_FLOAT8, 1.0)
    numerator = largest * unit / SUM_DIVISOR
    divisor = 1.0 if mean is None else DIFFERENCE_DIVISOR if signs is None else SUM_DIVISOR
    clamped = amax.clamp_min(numerator / (MOST_FACTOR / divisor))
    factors = torch.full_like(clamped, numerator) / clamped
    norm = 1.0 if signs is None else 1 / math.sqrt(hadamard_dim(x.shape[-1]))
    descale = (clamped.double() * (SUM_DIVISOR * norm / largest)).float()
    descale = torch.where(amax == 0, 1.0, descale)

    x_8bit = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for b, (y, target) in enumerate(
        zip(rotated, _sequences(x_8bit, cu_seqlens, seqused), strict=True)
    ):
        factor = _by_row(factors if scales == "tensor" else factors[b], scales, y.shape[0])
        y = y * factor * (divisors[b] / unit)
        y = y.nan_to_num().round() if to_int8 else y
        target.copy_(y.clamp(-largest, largest).to(dtype))
    return transposed_v.from_rows(x_8bit, cu_seqlens) if transposed else x_8bit, descale


def _token_mean_cpu(
    x: Tensor, *, cu_seqlens: Tensor | None = None, seqused: Tensor | None = None
) -> Tensor:
    check_rows(x, cu_seqlens=cu_seqlens, seqused=seqused)
    shape = (batch_of(x, cu_seqlens), *x.shape[-2:])
    mean = torch.zeros(shape, dtype=torch.float32, device=x.device)
    for b, rows in enumerate(_sequences(x, cu_seqlens, seqused)):
        if rows.shape[0] > 0:
            mean[b] = rows.mean(0, dtype=torch.float64)  # the sum may exceed float32's numbers
    return mean


def _mean_of_some(
    k: Tensor, rows: int, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Tensor:
    if cu_seqlens is None and seqused is None and k.dim() == 4:
        k = k[:, :: max(k.shape[1] // rows, 1)]
    return _token_mean_cpu(k, cu_seqlens=cu_seqlens, seqused=seqused)


library.impl("fp8_quantize", _quantize_cpu, "CPU")
library.impl("fp8_token_mean", _token_mean_cpu, "CPU")
library.impl("fp8_quantize_qkv", partial(quantize_qkv_by, _quantize_cpu, _mean_of_some), "CPU")
