"""The ops `torch.ops.flash_ext.fp8_quantize`, `fp8_token_mean` and `fp8_quantize_qkv`, and their
fake kernels.

    fp8_quantize(x, scales, *, signs, mean, cu_seqlens, seqused, blocks, dtype, transposed)
        -> (x_8bit, descale)
    fp8_token_mean(x, *, cu_seqlens, seqused) -> mean
    fp8_quantize_qkv(q, k, v, *, options) -> (q_8bit, q_descale, k_8bit, k_descale, v_8bit,
        v_descale, mean)

x is (B, S, H, D), or (total, H, D) with cu_seqlens. `blocks` is the last dimension of the descales
of scales="block": ceil(S / 128), or with cu_seqlens at least the longest sequence's. dtype is
float8_e4m3fn if it is None. The rest is as in `flash_ext.fp8`. None of them has a gradient.

`fp8_quantize_qkv` is the others before a call of attention, faster than they are one by one: q and
k by blocks, v by channels and transposed. With mean_rows a mean is subtracted from k, of this
number of rows or more, evenly spaced, or of all if sequences may differ in length. Otherwise the
mean has shape (0).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import refuse, require_one_device
from .options import DESCALE_ROWS, FP8, QK_8_BITS
from .schemas import library
from .torch_private import register_no_gradient

SCALES = ("tensor", "head", "block", "channel")
"""What shares a scale: the tensor; a head's rows; 128 rows of a head; a column of a head."""

SCALE_ROWS = DESCALE_ROWS
"""Rows of a block scale."""


def check_scales(scales: str) -> None:
    """Refuse an unknown name."""
    if scales not in SCALES:
        refuse("scales", " or ".join(map(repr, SCALES)), repr(scales))


def check_dtype(dtype: torch.dtype | None, scales: str) -> torch.dtype:
    """The result's dtype: float8_e4m3fn if it is None. int8 has scales of blocks only."""
    if dtype is None:
        return FP8
    if dtype not in QK_8_BITS:
        refuse("dtype", "float8_e4m3fn or int8", dtype)
    if dtype == torch.int8 and scales != "block":
        refuse("dtype", "float8_e4m3fn unless scales='block'", dtype)
    return dtype


def batch_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """B."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def descale_shape(
    x: Tensor, scales: str, cu_seqlens: Tensor | None, blocks: int
) -> tuple[int, ...]:
    """(), (B, H), (B, H, blocks) or (B, H, D)."""
    if scales == "tensor":
        return ()
    heads = (batch_of(x, cu_seqlens), x.shape[-2])
    return heads + {"head": (), "block": (blocks,), "channel": (x.shape[-1],)}[scales]


KEY_GROUP = 16
"""The keys that `flash_ext.cpu.transposed_v` puts in another order, and a sequence is filled up
to."""


def transposed_shape(rows: int, heads: int, dim: int, batch: int, packed: bool) -> tuple[int, ...]:
    """(B, H, D, keys), or (H, D, keys) of packed sequences, each of which begins with a group."""
    groups = rows + (batch + 2 if packed else 1) * (KEY_GROUP - 1)
    shape = (heads, dim, groups // KEY_GROUP * KEY_GROUP)
    return shape if packed else (batch, *shape)


def _define(signature: str, returns: str) -> Any:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define(f"{signature} -> {returns}", tags=tags)
    return getattr(torch.ops.flash_ext, signature.partition("(")[0]).default


fp8_quantize = _define(
    "fp8_quantize(Tensor x, str scales, *, Tensor? signs=None, Tensor? mean=None,"
    " Tensor? cu_seqlens=None, Tensor? seqused=None, SymInt blocks=0, ScalarType? dtype=None,"
    " bool transposed=False)",
    "(Tensor x_8bit, Tensor descale)",
)
fp8_token_mean = _define(
    "fp8_token_mean(Tensor x, *, Tensor? cu_seqlens=None, Tensor? seqused=None)", "Tensor"
)
fp8_quantize_qkv = _define(
    "fp8_quantize_qkv(Tensor q, Tensor k, Tensor v, *, Tensor? signs=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_k=None,"
    " SymInt blocks_q=0, SymInt blocks_k=0, ScalarType? dtype=None, int mean_rows=0)",
    "(Tensor q_8bit, Tensor q_descale, Tensor k_8bit, Tensor k_descale, Tensor v_8bit,"
    " Tensor v_descale, Tensor mean)",
)

register_no_gradient(library, fp8_quantize_qkv)
register_no_gradient(library, fp8_quantize)
register_no_gradient(library, fp8_token_mean)


def _fp8_quantize_fake(
    x: Tensor,
    scales: str,
    *,
    blocks: int = 0,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_scales(scales)
    dtype = check_dtype(dtype, scales)
    require_one_device(x, **tensors)
    cu_seqlens = tensors.get("cu_seqlens")
    descale = x.new_empty(descale_shape(x, scales, cu_seqlens, blocks), dtype=torch.float32)
    shape: tuple[int, ...] = x.shape
    if transposed:
        rows, heads, dim = x.shape[-3:]
        batch = batch_of(x, cu_seqlens)
        shape = transposed_shape(rows, heads, dim, batch, packed=cu_seqlens is not None)
    return x.new_empty(shape, dtype=dtype), descale


def _fp8_token_mean_fake(x: Tensor, **tensors: Tensor | None) -> Tensor:
    require_one_device(x, **tensors)
    shape = (batch_of(x, tensors.get("cu_seqlens")), x.shape[-2], x.shape[-1])
    return x.new_empty(shape, dtype=torch.float32)


register_fake("flash_ext::fp8_quantize", _fp8_quantize_fake, lib=library)
register_fake("flash_ext::fp8_token_mean", _fp8_token_mean_fake, lib=library)


def quantize_qkv_by(
    quantize: Callable[..., tuple[Tensor, Tensor]],
    mean_of_some: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    signs: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    blocks_q: int = 0,
    blocks_k: int = 0,
    dtype: torch.dtype | None = None,
    mean_rows: int = 0,
) -> tuple[Tensor, ...]:
    """`fp8_quantize_qkv` by the others, of the CPU or of fake tensors."""
    of_k: dict[str, Any] = {"cu_seqlens": cu_seqlens_k, "seqused": seqused_k}
    of_qk: dict[str, Any] = {"signs": signs, "dtype": dtype}
    mean = mean_of_some(k, mean_rows, **of_k) if mean_rows > 0 else None
    return (
        *quantize(q, "block", cu_seqlens=cu_seqlens_q, blocks=blocks_q, **of_qk),
        *quantize(k, "block", mean=mean, blocks=blocks_k, **of_k, **of_qk),
        *quantize(v, "channel", transposed=True, **of_k),
        q.new_empty((0,), dtype=torch.float32) if mean is None else mean,
    )


register_fake(
    "flash_ext::fp8_quantize_qkv",
    partial(
        quantize_qkv_by, _fp8_quantize_fake, lambda k, _, **of_k: _fp8_token_mean_fake(k, **of_k)
    ),
    lib=library,
)
