"""What the functions of `flash_ext.flash_attn` share: checks, options, and flash-attn's lse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..functional import attention, attention_varlen
from ..ops.call import AS_IT_IS, no_autocast
from ..ops.checks import Pair, require_number, require_pair, require_tensors


def rows_contiguous(x: Tensor) -> Tensor:
    """x, copied where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refuse_given(**unsupported: object) -> None:
    """Raise NotImplementedError, unless all are None."""
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(f"flash_ext: {name} is not supported: it must be None")


def unpack(name: str, x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """The q, k and v, or k and v, that are stacked along a dimension."""
    require_tensors(**{name: x})
    if x.dim() != dim + 3 or x.shape[dim] != parts:
        before = "batch, seqlen" if dim == 2 else "total"
        wanted = f"of shape ({before}, {parts}, heads, head_dim)"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(x.shape)}")
    return x.unbind(dim)


def _one_half_type(*tensors: Tensor) -> bool:
    """Whether all are float16, or all bfloat16."""
    return {x.dtype for x in tensors} in ({torch.float16}, {torch.bfloat16})


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    return_lse: bool,
    options: Mapping[str, Any],
) -> Any:
    """`flash_ext.attention`, or with cu_seqlens `attention_varlen`, with flash-attn's rules for
    columns that are not contiguous and for autocast."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    with no_autocast(q) if ops.autocasts(q) and _one_half_type(q, k, v) else AS_IT_IS:
        if cu_seqlens is None:
            return attention(q, k, v, return_lse=return_lse, **options)
        return attention_varlen(q, k, v, *cu_seqlens, return_lse=return_lse, **options)


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Pair,
    softcap: float,
    alibi_slopes: Tensor | None,
    seqlen_k: int | None,
) -> dict[str, Any]:
    """The options of flash_ext. A side of the window of at least seqlen_k is unlimited."""
    if type(window_size) is not tuple or window_size != (-1, -1):
        left, right = require_pair("window_size", window_size)
        if left < 0 or (seqlen_k is not None and left >= seqlen_k):
            left = -1
        if right < 0 or (seqlen_k is not None and right >= seqlen_k):
            right = -1
        window_size = left, right
    require_number("softmax_scale", softmax_scale)
    require_number("softcap", softcap)
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": 0.0 if softcap < 0 else softcap,
        "alibi_slopes": alibi_slopes,
    }


def _lse_shift(
    lse: Tensor,
    seqlen_k: int | Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """By how much flash-attn's lse is larger, see `flash_ext.flash_attn`; None is nowhere."""
    slopes: Tensor | None = options["alibi_slopes"]
    left, right = options["window"]
    if slopes is None or left >= 0 or not (options["causal"] or right == 0):
        return None
    slopes = slopes.to(lse.dtype)
    rows = torch.arange(lse.shape[-1], dtype=torch.int32, device=lse.device)
    if cu_seqlens is None:
        last = seqlen_k[:, None, None] if isinstance(seqlen_k, Tensor) else seqlen_k
        return slopes[..., None] * (rows - lse.shape[-1] + last)
    cu_q, cu_k = cu_seqlens
    if cu_q.numel() < 2:  # no sequences
        return None
    lengths = seqlen_k if isinstance(seqlen_k, Tensor) else cu_k.diff()
    sequence = torch.searchsorted(cu_q[1:], rows, right=True).clamp(max=cu_q.numel() - 2)
    slopes = slopes[sequence].T if slopes.dim() == 2 else slopes[:, None]
    return slopes * (rows - cu_q[1:][sequence] + lengths[sequence])


def to_flash_attn_lse(
    lse: Tensor,
    seqlen_k: int | Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    options: Mapping[str, Any],
) -> Tensor:
    """lse with flash-attn's values, see `flash_ext.flash_attn`.

    Args:
        lse: (B, Hq, Sq), or with cu_seqlens (Hq, total_q).
        seqlen_k: one for all sequences, or (B); with cu_seqlens an int is not looked at.
        options: as `options_of` returns them.
    """
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    shift = _lse_shift(lse, seqlen_k, cu_seqlens, options)
    return lse if shift is None else lse + shift


def from_flash_attn_lse(
    lse: Tensor,
    seqlen_k: int | Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    options: Mapping[str, Any],
) -> Tensor:
    """The inverse of `to_flash_attn_lse`, contiguous."""
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    shift = _lse_shift(lse, seqlen_k, cu_seqlens, options)
    return (lse if shift is None else lse - shift).contiguous()
