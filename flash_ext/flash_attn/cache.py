"""The KV cache of `flash_attn_with_kvcache`, in flash-attn 2's form and in 3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import ops
from ..functional import attention_options
from ..ops.checks import require_tensors
from .shared import check_rows, no_autocast, rows_contiguous


def _append(cache: Tensor, new: Tensor, cache_seqlens: Tensor) -> None:
    """Write new (B, S, H, D) into cache (B, Sk, H, D), from each sequence's length on."""
    if cache.element_size() == 1:  # of which index_put_ knows only uint8
        cache, new = cache.view(torch.uint8), new.contiguous().view(torch.uint8)
    batch, seqlen = new.shape[:2]
    elements = torch.arange(batch, device=cache.device)[:, None]
    rows = cache_seqlens.long()[:, None] + torch.arange(seqlen, device=cache.device)
    cache.index_put_((elements, rows), new)


def check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> None:
    """Check the tensors of `flash_attn_with_kvcache`.

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
    if k is not None and v is not None:
        check_rows("k", k, (batch, "seqlen_new", *k_cache.shape[2:]), q)
        check_rows("v", v, (batch, k.shape[1], *v_cache.shape[2:]), q)


def _lengths(
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


def attend_to_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Write k and v into the cache and attend to it, after `check_cache`.

    Returns:
        out, lse, and how many keys the sequences have: of all, or (B).
    """
    batch, capacity = q.shape[0], k_cache.shape[1]
    new = None if k is None else k.shape[1]
    k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    lengths = _lengths(cache_seqlens, q, capacity, new)
    used = lengths if lengths is None or new is None else lengths + new
    q = rows_contiguous(q)
    with no_autocast(q):
        given = attention_options(q, **options, seqused_k=used)
        if k is not None and v is not None and lengths is not None:
            if not is_compiling() and ops.is_real(q):  # where the device can be read
                ops.check(q, k_cache, v_cache, **given)
            _append(k_cache, k, lengths)
            _append(v_cache, v, lengths)
        out, lse = ops.forward(q, k_cache, v_cache, **given)
    return out, lse, capacity if used is None else used
