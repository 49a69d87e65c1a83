"""The functions of `flash_attn.flash_attn_interface`; `flash_ext.flash_attn` describes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache import run_with_cache
from ..cache_call import CacheCall
from ..ops.checks import Pair, refuse, require_ints, require_tensors
from .cache import checked_call, with_splits
from .low_level import _flash_attn_backward as _flash_attn_backward
from .low_level import _flash_attn_forward as _flash_attn_forward
from .low_level import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from .low_level import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from .shared import attend, options_of, to_flash_attn_lse, unpack


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    options: dict[str, Any],
) -> Any:
    given = options | {"dropout_p": dropout_p, "deterministic": deterministic or None}
    result = attend(q, k, v, cu_seqlens, return_attn_probs, given)
    if not return_attn_probs:
        return result
    out, lse = result
    return out, to_flash_attn_lse(lse, k.shape[1], cu_seqlens, options), q.new_empty(0)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): (B, Sq, Hq, Dv).

    Differentiable in q, k and v. The options are as in `flash_ext.flash_attn`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # (2, 8, 4, 16) each
        >>> from flash_ext.flash_attn import flash_attn_func
        >>> flash_attn_func(q, k, v, dropout_p=0.1, causal=True).shape
        torch.Size([2, 8, 4, 16])
    """
    if not (type(q) is type(k) is type(v) is Tensor):
        require_tensors(q=q, k=k, v=v)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, k.shape[1])
    return _run(q, k, v, None, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor kv (B, Sk, 2, Hk, D).

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_kvpacked_func
        >>> q, kv = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 4, 16)
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 8, 4, 16])
    """
    k, v = unpack("kv", kv, 2, dim=2)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, k.shape[1])
    return _run(q, k, v, None, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor qkv (B, S, 3, H, D).

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 8, 3, 4, 16)).shape
        torch.Size([2, 8, 4, 16])
    """
    q, k, v = unpack("qkv", qkv, 3, dim=2)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, k.shape[1])
    return _run(q, k, v, None, dropout_p, deterministic, return_attn_probs, options)


class _WithoutBackward(torch.autograd.Function):
    """out of a call with pages, whose backward raises: flash-attn refuses no earlier."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("flash_ext: no variant has a backward with a page table")


def _call_of_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor
) -> CacheCall:
    require_tensors(q=q, cu_seqlens_q=cu_seqlens_q)
    batch = cu_seqlens_q.numel() - 1
    require_ints("block_table", block_table, (batch, "pages"), q)
    require_ints("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q)
    return checked_call(
        q, k, v, None, None, all_angles=False, cu_seqlens_q=cu_seqlens_q, page_table=block_table,
        cache_seqlens=cu_seqlens_k.diff(),
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences: q (total_q, Hq, D), out (total_q, Hq, Dv).

    Args:
        k, v: (total_k, Hk, D) and (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), the bounds of the sequences.
        block_table: int32 (B, pages of a sequence): k and v are pages, as of
            `flash_ext.attention_with_cache`, and of cu_seqlens_k only the differences count. The
            backward raises then, and there is no dropout.

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 8, 4, 16)  # sequences of 3 and 5 tokens
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True).shape
        torch.Size([8, 4, 16])
    """
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen_k)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        if dropout_p != 0:
            refuse("dropout_p", "0 with block_table", dropout_p)
        with torch.no_grad():
            call = _call_of_pages(q, k, v, *cu_seqlens, block_table)
            out, lse, keys = run_with_cache(call, options)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out = _WithoutBackward.apply(out, q, k, v)  # type: ignore[no-untyped-call]
        if not return_attn_probs:
            return out
        return out, to_flash_attn_lse(lse, keys, cu_seqlens, options), q.new_empty(0)
    return _run(q, k, v, cu_seqlens, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, Hk, D).

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_varlen_kvpacked_func
        >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 4, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 5, 5).shape
        torch.Size([8, 4, 16])
    """
    k, v = unpack("kv", kv, 2, dim=1)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen_k)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    return _run(q, k, v, cu_seqlens, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, H, D).

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(8, 3, 4, 16), cu_seqlens, 5).shape
        torch.Size([8, 4, 16])
    """
    q, k, v = unpack("qkv", qkv, 3, dim=1)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen)
    both = (cu_seqlens, cu_seqlens)
    return _run(q, k, v, both, dropout_p, deterministic, return_attn_probs, options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to a cache, into which k and v are written first. No gradients.

    Args:
        k_cache, v_cache: (Bc, Sc, Hk, D) and (Bc, Sc, Hk, Dv), Bc at least B: the first B are used.
            With block_table pages, (pages, page size, Hk, D) and (…, Dv), of any page size.
        k, v: (B, S_new, Hk, D) and (B, S_new, Hk, Dv), both or neither: written in place after the
            first cache_seqlens keys, and seen by q. On CUDA rows without a place in the cache are
            not written. A call that raises has written nothing, unless it was compiled.
        cache_seqlens: how many keys the cache holds: an int, or int32 (B). None is all, without k.
        rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx, cache_leftpad: as of
            `flash_ext.attention_with_cache`; rotary_dim may be any even number. cos and sin have a
            position for each key of the cache.
        block_table: page_table there; not with cache_batch_idx or cache_leftpad.
        num_splits: 1 is batch_invariant of `flash_ext.attention`, unless the caches have 8 bits.
            Otherwise the number of splits of the keys is chosen for each call.

    Returns:
        out (B, Sq, Hq, Dv), with return_softmax_lse (out, softmax_lse), softmax_lse (B, Hq, Sq).

    Raises:
        ValueError, RuntimeError: an argument is wrong.

    Examples:
        >>> from flash_ext.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 32, 4, 16)  # room for 32 keys each
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # a new token each
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7)
        >>> out.shape, torch.equal(k_cache[:, 7:8], k)
        (torch.Size([2, 1, 4, 16]), True)
    """
    if block_table is not None:
        for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if x is not None:
                refuse(name, "None with block_table", "a tensor")
        require_tensors(q=q)
        require_ints("block_table", block_table, (q.shape[0], "pages"), q)
    call = checked_call(
        q, k_cache, v_cache, k, v, all_angles=True, cache_seqlens=cache_seqlens,
        page_table=block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
    )  # fmt: skip
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, call.capacity)
    options = with_splits(options, num_splits, k_cache)
    out, lse, keys = run_with_cache(call, options)
    if not return_softmax_lse:
        return out
    return out, to_flash_attn_lse(lse, keys, None, options)
