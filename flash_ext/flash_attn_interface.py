"""The names and signatures of FlashAttention-3's module `flash_attn_interface`.

    from flash_ext.flash_attn_interface import flash_attn_func  # was: from flash_attn_interface

(`flash_ext.flash_attn.flash_attn_interface` is flash-attn 2's module of this name.) The functions
run whichever variant is fastest, as `flash_ext.attention` does, so on other GPUs and on CPUs too.
Shapes, dtypes and options are as in `flash_ext.attention` and `flash_ext.attention_varlen`, with
FlashAttention-3's names:

    softmax_scale: the factor of the scores; None is 1 / sqrt(D).
    causal: aligned bottom-right, as everywhere in flash_ext.
    window_size: (left, right), any two integers, both included; below 0 is unlimited, and so is a
        side that reaches every key. (flash-attn 2 takes a side of at least Sk as unlimited, which
        shows more keys where Sq > Sk.)
    softcap: 0 or less is none.
    q_descale, k_descale, v_descale: float32 (B, Hk), of inputs in float8_e4m3fn, whose out is
        bfloat16; or finer, as `flash_ext.attention` has them. FP8 is forward only, without softcap.
    deterministic: False follows `torch.are_deterministic_algorithms_enabled()`.
    num_splits, pack_gqa, sm_margin, scheduler_metadata, max_seqlen_q, max_seqlen_k: have no effect
        on the result, except num_splits of a cache. flash_ext plans each call, and uses all SMs.
    return_attn_probs: return (out, softmax_lse) instead of out, which older FlashAttention-3 always
        did. softmax_lse is float32, (B, Hq, Sq), or (Hq, total_q) of packed sequences; −inf where a
        query sees no key. Here it is differentiable.
    qv, attention_chunk: not supported: they must be None and 0.

A last dimension that is not contiguous is copied, and autocast casts neither a cache nor inputs
that are all float16 or all bfloat16. An unsupported argument raises NotImplementedError before
anything runs; wrong arguments raise ValueError or RuntimeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .cache import run_with_cache
from .flash_attn.cache import checked_call, with_splits
from .flash_attn.shared import attend, refuse_given, unpack
from .ops.checks import (
    Pair,
    dtype_name,
    refuse,
    refuse_gradients,
    require_dtype,
    require_ints,
    require_number,
    require_pair,
    require_tensors,
    statistics_dtype,
)
from .ops.sum_rows import MOST_PARTS

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


def _options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Pair,
    attention_chunk: int,
    softcap: float,
    descales: _Descales,
    seqlen_q: int | None,
    seqlen_k: int | None,
) -> dict[str, Any]:
    """The options of flash_ext. A side of the window that reaches every key is unlimited."""
    if attention_chunk != 0:
        raise NotImplementedError("flash_ext: attention_chunk is not supported: it must be 0")
    if type(window_size) is not tuple or window_size != (-1, -1):
        left, right = require_pair("window_size", window_size)
        if left < 0 or (seqlen_k is not None and left >= seqlen_k - 1):
            left = -1
        if right < 0 or (seqlen_q is not None and right >= seqlen_q - 1):
            right = -1
        window_size = left, right
    require_number("softmax_scale", softmax_scale)
    require_number("softcap", softcap)
    q_descale, k_descale, v_descale = descales
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": 0.0 if softcap < 0 else softcap,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): (B, Sq, Hq, Dv).

    Differentiable in q, k and v. The options are as in `flash_ext.flash_attn_interface`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # (2, 8, 4, 16) each
        >>> from flash_ext.flash_attn_interface import flash_attn_func
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 8, 4, 16])
    """
    refuse_given(qv=qv)
    if not (type(q) is type(k) is type(v) is Tensor):
        require_tensors(q=q, k=k, v=v)
    options = _options_of(
        softmax_scale, causal, window_size, attention_chunk, softcap,
        (q_descale, k_descale, v_descale), q.shape[1], k.shape[1],
    )  # fmt: skip
    options["deterministic"] = deterministic or None
    return attend(q, k, v, None, return_attn_probs, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D); or (B, S, Hq + 2 Hk, D), heads of q, of k and of v in this order.
        num_heads_q: Hq, of the second form.

    Examples:
        >>> from flash_ext.flash_attn_interface import flash_attn_qkvpacked_func
        >>> qkv = torch.randn(2, 8, 4 + 2 + 2, 16)  # 4 heads of q, 2 of k, 2 of v
        >>> flash_attn_qkvpacked_func(qkv, num_heads_q=4).shape
        torch.Size([2, 8, 4, 16])
    """
    require_tensors(qkv=qkv)
    if qkv.dim() != 4:
        q, k, v = unpack("qkv", qkv, 3, dim=2)
    else:
        heads = qkv.shape[2] - (num_heads_q or 0)
        if num_heads_q is None or not 0 < num_heads_q < qkv.shape[2] or heads % 2 != 0:
            wanted = f"given with qkv of 4 dimensions, {qkv.shape[2]} less an even number"
            refuse("num_heads_q", wanted, num_heads_q)
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of packed sequences: q (total_q, Hq, D), out (total_q, Hq, Dv).

    Args:
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), the bounds of the sequences.
        max_seqlen_q, max_seqlen_k: only window_size is compared with them.
        seqused_q: int32 (B): how many of its queries a sequence uses, its first ones. Others have
            out = 0 and softmax_lse = −inf.
        seqused_k: int32 (B): how many of its keys a sequence uses, its first ones.

    Examples:
        >>> from flash_ext.flash_attn_interface import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 8, 4, 16)  # sequences of 3 and 5 tokens
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True).shape
        torch.Size([8, 4, 16])
    """
    refuse_given(qv=qv)
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = _options_of(
        softmax_scale, causal, window_size, attention_chunk, softcap,
        (q_descale, k_descale, v_descale), max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    options |= {"deterministic": deterministic or None, "seqused_k": seqused_k}
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    if seqused_q is not None:
        cu_seqlens, options = _with_used_queries(q, cu_seqlens, seqused_q, options)
    return attend(q, k, v, cu_seqlens, return_attn_probs, options)


def _with_used_queries(
    q: Tensor, cu_seqlens: tuple[Tensor, Tensor], seqused_q: Tensor, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Each sequence as two, the second of the unused queries, without keys."""
    (bounds, bounds_k), batch = cu_seqlens, cu_seqlens[0].numel() - 1
    require_ints("seqused_q", seqused_q, (batch,), q)
    require_ints("cu_seqlens_k", bounds_k, (batch + 1,), q)
    ends = torch.minimum(bounds[:-1] + seqused_q.clamp(min=0), bounds[1:])
    bounds = torch.cat((torch.stack((bounds[:-1], ends), 1).flatten(), bounds[-1:]))
    options = dict(options)
    if (used := options["seqused_k"]) is not None:
        require_ints("seqused_k", used, (batch,), q)
        options["seqused_k"] = torch.stack((used, torch.zeros_like(used)), 1).flatten()
    for name in ("q_descale", "k_descale", "v_descale"):
        if isinstance(x := options[name], Tensor) and x.dim() > 1:
            options[name] = x.repeat_interleave(2, 0)
    return (bounds, bounds_k.repeat_interleave(2)[1:].contiguous()), options


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to a cache, into which k and v are written first. No gradients.

    The tensors are as of `flash_ext.attention_with_cache`, where rotary_seqlens, cu_seqlens_q and
    cu_seqlens_k_new have these names too. num_splits = 1 is batch_invariant there, except with 8
    bits. max_seqlen_q is not needed. With page_table cos and sin
    have a position for each key that the table has room for.

    Returns:
        out (B, Sq, Hq, Dv), or packed. With return_softmax_lse (out, softmax_lse, out_accum,
        softmax_lse_accum), softmax_lse (B, Hq, Sq); the last two, FlashAttention-3's results of
        splits, are always of shape (0,).

    Raises:
        NotImplementedError: qv or attention_chunk is given.
        ValueError, RuntimeError: an argument is wrong.

    Examples:
        >>> from flash_ext.flash_attn_interface import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 32, 4, 16)  # room for 32 keys each
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # a new token each
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7).shape
        torch.Size([2, 1, 4, 16])
    """
    refuse_given(qv=qv)
    # FlashAttention-3 looks at these only with k and with cos, and engines always give them.
    of_new = {} if k is None else {"cu_seqlens_k_new": cu_seqlens_k_new}
    of_cos = {} if rotary_cos is None else {"rotary_seqlens": rotary_seqlens}
    call = checked_call(
        q, k_cache, v_cache, k, v, all_angles=page_table is not None, cache_seqlens=cache_seqlens,
        page_table=page_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, **of_new, **of_cos,
    )  # fmt: skip
    seqlen_q = max_seqlen_q if cu_seqlens_q is not None else q.shape[1]
    options = _options_of(
        softmax_scale, causal, window_size, attention_chunk, softcap,
        (q_descale, k_descale, v_descale), seqlen_q, call.capacity,
    )  # fmt: skip
    options = with_splits(options, num_splits, k_cache)
    out, lse, _ = run_with_cache(call, options)
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to all keys, from that to some keys each. No gradients.

    Args:
        out_partial: (splits, B, S, H, D), float32, contiguous in its last dimension. What a row
            without a key has (lse_partial = −inf) is not looked at.
        lse_partial: (splits, B, S, H), float32.
        out: (B, S, H, D), contiguous in its last dimension: written and returned. None makes one.
        out_dtype: float32, float16 or bfloat16; None is out's, or without it float32.

    Returns:
        out (B, S, H, D) and lse (B, S, H), float32; 0 and −inf in rows without any key.

    Examples:
        >>> from flash_ext.flash_attn_interface import flash_attn_combine
        >>> out_partial, lse_partial = torch.randn(3, 2, 8, 4, 16), torch.randn(3, 2, 8, 4)
        >>> out, lse = flash_attn_combine(out_partial, lse_partial)
        >>> torch.allclose(lse, lse_partial.logsumexp(0), atol=1e-5)
        True
    """
    require_tensors(out_partial=out_partial, lse_partial=lse_partial)
    refuse_gradients(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 5 or out_partial.shape[0] == 0:
        refuse("out_partial", "of shape (splits, batch, seqlen, heads, head_dim)",
               tuple(out_partial.shape))  # fmt: skip
    if out is None:
        dtype = out_partial.dtype if out_dtype is None else require_dtype("out_dtype", out_dtype)
        out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    require_tensors(out=out)
    statistics = statistics_dtype(out_partial.dtype)
    for name, x, shape, dtype in (
        ("lse_partial", lse_partial, out_partial.shape[:4], statistics),
        ("out", out, out_partial.shape[1:], out_dtype or out.dtype),
    ):
        if x.shape != shape or x.dtype != dtype:
            wanted = f"{dtype_name(dtype)} of shape {tuple(shape)}"
            refuse(name, wanted, f"{dtype_name(x.dtype)} of shape {tuple(x.shape)}")
    parts, lses = [*out_partial], [*lse_partial.transpose(2, 3).contiguous()]
    lse, more = torch.empty_like(lses[0]), MOST_PARTS - 1
    total = out if len(parts) <= more else torch.empty_like(parts[0])
    before: tuple[list[Tensor], list[Tensor]] = [], []
    for i in range(0, len(parts), more):
        o, of_o = [*before[0], *parts[i : i + more]], [*before[1], *lses[i : i + more]]
        last = i + more >= len(parts)
        ops.combine_parts(out if last else total, lse, o, of_o, [0] * len(o))
        before = [total], [lse]
    return out, lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty tensor: calls plan by themselves, on the device. For engines that always ask for it.

    Examples:
        >>> from flash_ext.flash_attn_interface import get_scheduler_metadata
        >>> lengths = torch.tensor([7, 20], dtype=torch.int32)
        >>> get_scheduler_metadata(2, 1, 32, 8, 2, 64, lengths).shape
        torch.Size([0])
    """
    require_tensors(cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
