"""The names and signatures of the package flash-attn 2.8, on flash_ext's kernels.

    from flash_ext.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

Shapes, dtypes and options are those of `flash_ext.attention` and `flash_ext.attention_varlen`, with
flash-attn's names for them:

    softmax_scale: the factor of the scores; None is 1 / sqrt(D).
    causal: aligned bottom-right, as everywhere in flash_ext.
    window_size: (left, right), both included; below 0 is unlimited.
    softcap: 0 or less is none.
    alibi_slopes: (Hq) or (B, Hq).
    dropout_p: the masks are drawn from torch's generator, but are other ones than flash-attn's.
    deterministic: False follows `torch.are_deterministic_algorithms_enabled()`.
    max_seqlen, max_seqlen_q, max_seqlen_k: not needed, and not looked at.
    return_attn_probs: return (out, softmax_lse, S_dmask) instead of out. softmax_lse is float32,
        (B, Hq, Sq), or (Hq, total_q) of packed sequences; it is +inf where a query sees no key, as
        flash-attn has it, and differentiable, as it is not there. S_dmask, which flash-attn gives
        for its own tests, is always empty, of shape (0,).

Like there, a last dimension that is not contiguous is copied. What is not supported raises
NotImplementedError before anything runs; wrong arguments raise ValueError or RuntimeError.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .bert_padding import index_first_axis, pad_input, unpad_input
from .functional import attention, attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
]


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _refuse_given(**unsupported: object) -> None:
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(f"flash_ext: {name} is not supported: it must be None")


def _unpack(name: str, x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """The q, k and v, or k and v, that lie stacked along a dimension."""
    if x.dim() != dim + 3 or x.shape[dim] != parts:
        before = "batch, seqlen" if dim == 2 else "total"
        wanted = f"of shape ({before}, {parts}, heads, head_dim)"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {tuple(x.shape)}")
    return x.unbind(dim)


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    left, right = window_size
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (max(left, -1), max(right, -1)),
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
    }


def _with_infinite_lse(lse: Tensor) -> Tensor:
    """flash-attn's logarithm of nothing is +inf."""
    return lse.masked_fill(lse == -math.inf, math.inf)


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
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic or None}
    options["return_lse"] = return_attn_probs
    if cu_seqlens is None:
        result = attention(q, k, v, **options)
    else:
        result = attention_varlen(q, k, v, *cu_seqlens, **options)
    if not return_attn_probs:
        return result
    out, lse = result
    return out, _with_infinite_lse(lse), q.new_empty(0)


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

    Differentiable in q, k and v. The options are those at the head of this module.
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    _refuse_given(block_table=block_table)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    both = (cu_seqlens, cu_seqlens)
    return _run(q, k, v, both, dropout_p, deterministic, return_attn_probs, options)


def _append(cache: Tensor, new: Tensor, cache_seqlens: Tensor) -> None:
    """Write new (B, S, H, D) into cache (B, Sk, H, D), from each sequence's length on."""
    batch, seqlen = new.shape[:2]
    elements = torch.arange(batch, device=cache.device)[:, None]
    rows = cache_seqlens.long()[:, None] + torch.arange(seqlen, device=cache.device)
    cache.index_put_((elements, rows), new)


def _check_new(name: str, new: Tensor, cache: Tensor, seqlen: int) -> None:
    shape = (cache.shape[0], seqlen, *cache.shape[2:])
    if tuple(new.shape) != shape or new.dtype != cache.dtype or new.device != cache.device:
        wanted = f"of shape {shape}, {cache.dtype}, on {cache.device}, like its cache"
        got = f"{tuple(new.shape)}, {new.dtype}, on {new.device}"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {got}")


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
        k, v: (B, S_new, Hk, D) and (B, S_new, Hk, Dv), both or neither: written in place behind the
            cache_seqlens first keys, and seen by q. On CUDA rows past Sc fail in the device.
        cache_seqlens: how many keys the cache holds: an int, or int32 (B). None is all, without k.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table: not supported.
        rotary_interleaved, num_splits: have no effect: nothing is rotated, the keys are not split.

    Returns:
        out (B, Sq, Hq, Dv), with return_softmax_lse (out, softmax_lse), softmax_lse (B, Hq, Sq).

    Raises:
        NotImplementedError: an argument that is not supported is given.
        ValueError, RuntimeError: an argument is wrong.
    """
    _refuse_given(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
    )
    batch, capacity = q.shape[0], k_cache.shape[1]
    if q.dtype != k_cache.dtype:
        raise ValueError(f"flash_ext: q must be of k_cache's dtype {k_cache.dtype}, got {q.dtype}")
    k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    new = 0
    if (k is None) != (v is None):
        raise ValueError("flash_ext: k and v must be given together, got one of them")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError("flash_ext: cache_seqlens must be given with k and v, got None")
        new = k.shape[1]
        _check_new("k", k, k_cache, new)
        _check_new("v", v, v_cache, new)
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= capacity - new:
            wanted = f"0 to {capacity - new}, for what is new to fit"
            raise ValueError(f"flash_ext: cache_seqlens must be {wanted}, got {cache_seqlens}")
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None and (
        cache_seqlens.dtype != torch.int32 or tuple(cache_seqlens.shape) != (batch,)
    ):
        got = f"{cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)}"
        raise ValueError(f"flash_ext: cache_seqlens must be int32 of shape ({batch},), got {got}")
    elif cache_seqlens is not None and not cache_seqlens.is_cuda:
        lengths = cache_seqlens.tolist()
        if not all(0 <= n <= capacity - new for n in lengths):
            raise ValueError(
                f"flash_ext: cache_seqlens must be 0 to {capacity - new}, got {lengths}"
            )
    if k is not None and v is not None and cache_seqlens is not None:
        _append(k_cache, k, cache_seqlens)
        _append(v_cache, v, cache_seqlens)
        cache_seqlens = cache_seqlens + new
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    used = None if cache_seqlens is None else cache_seqlens.contiguous()
    options |= {"seqused_k": used, "return_lse": True}
    out, lse = attention(_rows_contiguous(q), k_cache, v_cache, **options)
    return (out, _with_infinite_lse(lse)) if return_softmax_lse else out
