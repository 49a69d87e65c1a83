"""The functions of `flash_attn.flash_attn_interface`; `flash_ext.flash_attn` describes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import ops
from ..functional import attention, attention_options, attention_varlen
from ..ops.checks import require_tensors
from .low_level import _flash_attn_backward as _flash_attn_backward
from .low_level import _flash_attn_forward as _flash_attn_forward
from .low_level import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from .low_level import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from .shared import (
    AS_IT_IS,
    check_rows,
    no_autocast,
    options_of,
    refuse_given,
    rows_contiguous,
    to_flash_attn_lse,
)


def _unpack(name: str, x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
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
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    given = options | {"dropout_p": dropout_p, "deterministic": deterministic or None}
    given["return_lse"] = return_attn_probs
    with no_autocast(q) if ops.autocasts(q) and _one_half_type(q, k, v) else AS_IT_IS:
        if cu_seqlens is None:
            result = attention(q, k, v, **given)
        else:
            result = attention_varlen(q, k, v, *cu_seqlens, **given)
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): (B, Sq, Hq, Dv).

    Differentiable in q, k and v. The options are those of `flash_ext.flash_attn`.
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor kv (B, Sk, 2, Hk, D)."""
    k, v = _unpack("kv", kv, 2, dim=2)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, k.shape[1])
    return _run(q, k, v, None, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor qkv (B, S, 3, H, D)."""
    q, k, v = _unpack("qkv", qkv, 3, dim=2)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, k.shape[1])
    return _run(q, k, v, None, dropout_p, deterministic, return_attn_probs, options)


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
    window_size: tuple[int, int] = (-1, -1),
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
        block_table: a paged cache is not supported: anything but None raises NotImplementedError.
    """
    refuse_given(block_table=block_table)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen_k)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, Hk, D)."""
    k, v = _unpack("kv", kv, 2, dim=1)
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, H, D)."""
    q, k, v = _unpack("qkv", qkv, 3, dim=1)
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen)
    both = (cu_seqlens, cu_seqlens)
    return _run(q, k, v, both, dropout_p, deterministic, return_attn_probs, options)


def _append(cache: Tensor, new: Tensor, cache_seqlens: Tensor) -> None:
    """Write new (B, S, H, D) into cache (B, Sk, H, D), from each sequence's length on."""
    batch, seqlen = new.shape[:2]
    elements = torch.arange(batch, device=cache.device)[:, None]
    rows = cache_seqlens.long()[:, None] + torch.arange(seqlen, device=cache.device)
    cache.index_put_((elements, rows), new)


def _check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> int:
    """Check the tensors of `flash_attn_with_kvcache`. Returns how many keys are new.

    The op's own checks would name k and v, which mean other tensors to the caller.
    """
    check_rows("q", q, ("batch", "seqlen_q", "heads_q", "head_dim"), q)
    batch, head_dim = q.shape[0], q.shape[-1]
    rows: tuple[int | str, ...] = ("batch_cache", "seqlen_k", "heads_k", head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rows(name, cache, rows, q)
        rows = (*cache.shape[:3], "head_dim_v")
        if cache.shape[0] < batch:
            wanted = f"of a batch of at least {batch}, like q's"
            raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(cache.shape)}")
        if cache.shape[-1] > 1 and cache.stride(-1) != 1:
            wanted, got = "contiguous in its last dimension", f"strides {cache.stride()}"
            raise ValueError(f"flash_ext: {name} must be {wanted}, got {got}")
    if (k is None) != (v is None):
        raise ValueError("flash_ext: k and v must be given together, got one of them")
    if k is None or v is None:
        return 0
    check_rows("k", k, (batch, "seqlen_new", *k_cache.shape[2:]), q)
    check_rows("v", v, (batch, k.shape[1], *v_cache.shape[2:]), q)
    return k.shape[1]


def _cache_lengths(
    cache_seqlens: int | Tensor | None, q: Tensor, capacity: int, new: int | None
) -> Tensor | None:
    """Check and return cache_seqlens as a contiguous int32 (B), with room for the new keys."""
    batch, room = q.shape[0], capacity - (new or 0)
    if cache_seqlens is None:
        if new is not None:
            raise ValueError("flash_ext: cache_seqlens must be given with k and v, got None")
        return None
    wanted = f"0 to {room}, of a cache of {capacity} for {new or 0} new keys"
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= room:
            raise ValueError(f"flash_ext: cache_seqlens must be {wanted}, got {cache_seqlens}")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    require_tensors(cache_seqlens=cache_seqlens)
    x = cache_seqlens
    if x.dtype != torch.int32 or tuple(x.shape) != (batch,) or x.device != q.device:
        wanted = f"int32 of shape ({batch},), on {q.device}"
        got = f"{x.dtype} of shape {tuple(x.shape)}, on {x.device}"
        raise ValueError(f"flash_ext: cache_seqlens must be {wanted}, got {got}")
    readable = not x.is_cuda and not is_compiling() and ops.is_real(x)
    if readable and not all(0 <= n <= room for n in x.tolist()):
        raise ValueError(f"flash_ext: cache_seqlens must be {wanted}, got {x.tolist()}")
    return x.contiguous()


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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (B, Sq, Hq, D) to a cache, into which k and v are written first. No gradients.

    Args:
        k_cache, v_cache: (Bc, Sc, Hk, D) and (Bc, Sc, Hk, Dv), Bc at least B: the first B are used.
        k, v: (B, S_new, Hk, D) and (B, S_new, Hk, Dv), both or neither: written in place after the
            first cache_seqlens keys, and seen by q. On CUDA rows past Sc fail in the device. A call
            that raises has written nothing, unless it was compiled.
        cache_seqlens: how many keys the cache holds: an int, or int32 (B). None is all, without k.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table: not supported.
        rotary_interleaved, num_splits: have no effect: nothing is rotated, and the number of
            splits of the keys is chosen for each call.

    Returns:
        out (B, Sq, Hq, Dv), with return_softmax_lse (out, softmax_lse), softmax_lse (B, Hq, Sq).

    Raises:
        NotImplementedError: an argument that is not supported is given.
        ValueError, RuntimeError: an argument is wrong.
    """
    refuse_given(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
    )
    new = _check_cache(q, k_cache, v_cache, k, v)
    batch, capacity = q.shape[0], k_cache.shape[1]
    k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    lengths = _cache_lengths(cache_seqlens, q, capacity, None if k is None else new)
    used = lengths if lengths is None or k is None else lengths + new
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, capacity)
    q = rows_contiguous(q)
    with no_autocast(q):
        given = attention_options(q, **options, seqused_k=used)
        if k is not None and v is not None and lengths is not None:
            if not is_compiling() and ops.is_real(q):  # where the device can be read
                ops.check(q, k_cache, v_cache, **given)
            _append(k_cache, k, lengths)
            _append(v_cache, v, lengths)
        out, lse = ops.forward(q, k_cache, v_cache, **given)
    if not return_softmax_lse:
        return out
    return out, to_flash_attn_lse(lse, capacity if used is None else used, None, options)
