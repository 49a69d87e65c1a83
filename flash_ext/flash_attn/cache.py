"""The KV cache of flash-attn 2's functions, and of 3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..cache_call import CacheCall
from ..ops.checks import refuse, require_tensors
from ..ops.options import QK_8_BITS
from .shared import rows_contiguous


def checked_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    all_angles: bool,
    **more: Any,
) -> CacheCall:
    """The arguments of `flash_attn_with_kvcache`, checked, with q, k and v of contiguous rows.

    Args:
        all_angles: refuse rotary_cos with fewer positions than the cache has keys.
        more: the other arguments, by their names in `CacheCall`.
    """
    given: dict[str, Any] = {"q": q} | {
        name: x for name, x in (("k", k), ("v", v)) if x is not None
    }
    require_tensors(**given)
    given = {name: rows_contiguous(x) if x.dim() > 0 else x for name, x in given.items()}
    call = CacheCall(k_cache=k_cache, v_cache=v_cache, **given, **more)
    call.check()
    cos = call.rotary_cos
    if all_angles and cos is not None and cos.shape[0] < call.capacity:
        wanted = f"of at least the {call.capacity} positions of the cache"
        refuse("rotary_cos", wanted, tuple(cos.shape))
    return call


def with_splits(options: Mapping[str, Any], num_splits: int, k_cache: Tensor) -> dict[str, Any]:
    """The options with num_splits: the results of one split do not depend on the batch."""
    invariant = num_splits == 1 and k_cache.dtype not in QK_8_BITS
    return {**options, "batch_invariant": True} if invariant else dict(options)
