"""Triangle attention of structure prediction, with cuEquivariance's interface.

The module's name differs from the function's, so that `flash_ext.triangle_attention` is the
function.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .functional import attention
from .ops.checks import (
    INTEGERS,
    check_rows,
    refuse,
    require_number,
    require_tensors,
    statistics_dtype,
)
from .ops.options import KERNEL_DIMS

_HIDDEN = {torch.float16: -(2.0**15)}
"""What hides a key, in each of one to eight columns; -2^60 in wider dtypes. Not -inf: kernels
multiply it by zeros, in rows that only fill a tile."""

_COLUMNS = 8
"""Rows stay multiples of 16 bytes, which TMA needs, with columns up to a multiple of this."""


class _Widened(torch.autograd.Function):
    """x (N, S, H, D) with columns of one number a row, tail (N, S), until D is a multiple of 8.

    torch.cat is several times slower, and so is a copy of 2 bytes at a time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, tail: Tensor) -> Tensor:
        dim = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], (dim // _COLUMNS + 1) * _COLUMNS)
        out[..., dim:] = tail[..., None, None]
        wide = out[..., :dim]
        if x.dtype.itemsize == 2 and not is_compiling():
            places = (dim, x.storage_offset(), *x.stride()[:-1])
            if all(n % _COLUMNS == 0 for n in places):
                x, wide = x.view(torch.complex128), wide.view(torch.complex128)
        wide.copy_(x)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dim = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[..., : ctx.dim], None


def _with_hidden_keys(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> list[Tensor]:
    """q (N, Q, H, D) and k (N, K, H, D) with more columns: 1, and 0 or for hidden keys _HIDDEN.

    So a kernel with one bias for all rows hides other keys in each. A bias that hides them would be
    N times as large. float16 holds no number that is large enough at every scale: there q has a
    power of two in place of 1, so that hidden keys score about -2^26, and at small scales less.
    """
    factor = 1.0
    if q.dtype in _HIDDEN:
        columns = _COLUMNS - q.shape[-1] % _COLUMNS
        power = 26 - 15 - math.log2(scale * columns)
        factor = 2.0 ** min(max(math.floor(power), 0), 15)
    ones = q.new_full((1,), factor).expand(q.shape[:2])
    hidden = torch.where(visible, 0.0, _HIDDEN.get(k.dtype, -(2.0**60)))
    return [_Widened.apply(x, y) for x, y in ((q, ones), (k, hidden))]  # type: ignore[no-untyped-call]


@torch.no_grad()
def _largest_scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    """(N, H, Q) of q (N, Q, H, D), k (N, K, H, D) and bias (1, H, Q, K), a row of N at a time."""
    dtype = statistics_dtype(q.dtype)
    if 0 in (q.shape[0], k.shape[1]):
        return q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=dtype)
    rows = [
        torch.einsum("qhd,khd->hqk", q_row.to(dtype), k_row.to(dtype)).mul_(scale).add_(bias[0])
        for q_row, k_row in zip(q, k, strict=True)
    ]
    return torch.stack([x.amax(-1) for x in rows])


def _visible(k: Tensor, mask: Tensor | None, kv_lengths: Tensor | None, dims: int) -> Tensor | None:
    """bool (B, N, K), or None: all. A row that would see no key sees all, as if nothing was hidden:
    its scores stay ordinary numbers."""
    batch, rows, _, keys, _ = k.shape
    found: Tensor | None = None
    for name, x, size in (("mask", mask, keys), ("kv_lengths", kv_lengths, 1)):
        if x is None:
            continue
        require_tensors(**{name: x})
        shape = (batch, rows, 1, 1, size)[5 - dims :]
        if x.shape != shape or x.device != k.device:
            got = f"{tuple(x.shape)}, on {x.device}"
            refuse(name, f"of shape {shape}, on {k.device}", got)
        if name == "kv_lengths" and x.dtype not in INTEGERS:
            refuse(name, "integers", x.dtype)
        x = x.reshape(batch, rows, size)
        sees = x.bool() if name == "mask" else torch.arange(keys, device=k.device) < x
        found = sees if found is None else found & sees
    return None if found is None else found | ~found.any(-1, keepdim=True)


@overload
def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None,
    scale: float | None = None, return_aux: Literal[False] = False, *,
    kv_lengths: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None,
    scale: float | None = None, *, return_aux: Literal[True],
    kv_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None,
    scale: float | None = None, return_aux: bool = False, *, kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of N rows with one bias for all: softmax(scale · q kᵀ + bias) v.

    `cuequivariance_torch.triangle_attention` has these names, shapes and meanings. Differentiable
    in q, k, v and bias, whose gradient is summed over the rows; it repeats bit by bit. On Hopper
    GPUs "fa3" runs it, with a float32 bias up to D = 64 (with mask below 64).

    Args:
        q: (B, N, H, Q, D), any strides with a contiguous last dimension. Where B is 1 all tensors
            may be without it.
        k, v: (B, N, H, K, D) and (B, N, H, K, Dv), of q's dtype.
        bias: (B, 1, H, Q, K), float32 or q's dtype; others, bool too, become float32.
        mask: (B, N, 1, 1, K): True, or not 0, is a key that the queries of a row see. It needs
            copies of q and k, and D below 256.
        scale: the factor of the scores; None is 1 / sqrt(D). Above 0 with mask.
        return_aux: return (out, lse, max). max is not from the kernels but computed from scores
            of a row at a time, which is slow.
        kv_lengths: int (B, N, 1, 1, 1): the queries of a row see this number of keys, its first
            ones.

    Returns:
        out (B, N, H, Q, Dv). A row that would see no key sees all (in cuEquivariance it has the
        mean of v). lse and max, of the scores, are float32 (B, N, H, Q).

    Raises:
        ValueError, RuntimeError: an argument is wrong.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 5, 2, 5, 16)  # a pair representation of 5 tokens, 2 heads
        >>> bias = torch.randn(1, 1, 2, 5, 5)
        >>> mask = torch.tensor([True, True, True, True, False]).expand(1, 5, 1, 1, 5)
        >>> flash_ext.triangle_attention(q, k, v, bias, mask=mask).shape
        torch.Size([1, 5, 2, 5, 16])
    """
    require_tensors(q=q, k=k, v=v, bias=bias)
    dims = q.dim()
    if dims not in (4, 5):
        refuse("q", "of shape (B, N, H, Q, D), or (N, H, Q, D)", tuple(q.shape))
    names = ("B", "N", "H", "Q", "D")[5 - dims :]
    before = q.shape[:-2]
    check_rows("k", k, (*before, "K", q.shape[-1]), q)
    check_rows("v", v, (*before, k.shape[-2], "Dv"), q)
    check_rows(
        "bias", bias, (*before[: len(names) - 4], 1, *before[-1:], q.shape[-2], k.shape[-2]), q,
        bias.dtype,
    )  # fmt: skip
    require_number("scale", scale)
    if dims == 4:
        q, k, v, bias = (x[None] for x in (q, k, v, bias))
    visible = _visible(k, mask, kv_lengths, dims)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if visible is not None:
        if not scale > 0:
            refuse("scale", "above 0 with mask", scale)
        if q.shape[-1] >= max(KERNEL_DIMS)[0]:
            refuse("q", f"of D below {max(KERNEL_DIMS)[0]} with mask", q.shape[-1])
    if bias.dtype != q.dtype:
        bias = bias.to(statistics_dtype(q.dtype))
    found: list[tuple[Tensor, ...]] = []
    for b in range(q.shape[0]):
        q_b, k_b, v_b = (x[b].transpose(1, 2) for x in (q, k, v))
        if visible is not None:
            q_b, k_b = _with_hidden_keys(q_b, k_b, visible[b], scale)
        options: dict[str, Any] = {"bias": bias[b], "scale": scale}
        if return_aux:
            out, lse = attention(q_b, k_b, v_b, return_lse=True, **options)
            largest = _largest_scores(q_b, k_b, bias[b], scale)
            found.append((out.transpose(1, 2), lse, largest))
        else:
            found.append((attention(q_b, k_b, v_b, **options).transpose(1, 2),))
    if not found:  # no batch element: rows of one call, for shapes and gradients
        every = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))
        out, lse = attention(*every, return_lse=True)
        out = out.transpose(1, 2).reshape(*q.shape[:-1], v.shape[-1])
        lse = lse.reshape(q.shape[:-1])
        return (out, lse, lse.detach()) if return_aux else out
    results = [x[0][None] if len(x) == 1 else torch.stack(x) for x in zip(*found, strict=True)]
    return (results[0], results[1], results[2]) if return_aux else results[0]
