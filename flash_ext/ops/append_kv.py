"""The op `torch.ops.flash_ext.append_kv`, which writes new keys and values into a cache.

    append_kv(k_cache!, v_cache!, k, v, cache_seqlens, *, options) -> (q_rotated, seqused_k)

k_cache is (pages, page size, Hk, D), v_cache (pages, page size, Hk, Dv), both in any strides with a
contiguous last dimension. Row i of sequence b becomes row cache_seqlens[b] + i of its keys. These
are the rows of its pages, page_table[b, 0], page_table[b, 1] and so on; without page_table (int32,
(B, pages of a sequence)) sequence b has page b alone. A row whose page is not in the cache, for
example -1, or whose position is not in the table, is not written. If two rows have one place, one
of them is there.

k and v are (B, S_new, Hk, D) and (…, Dv), or with cu_seqlens_k (int32, (B + 1)) packed. They have
the caches' dtypes: float16 or bfloat16 (on a CPU also float32 and float64), or 8 bits each.
cache_seqlens is int32 (B).

A cache of 8 bits, float8_e4m3fn or int8, also accepts k and v in more bits. They are quantized: a
number x is written as x / descale in float32, to the nearest (ties to even) and at most 448 or 127
in magnitude; 0 if the descale is 0. A NaN becomes e4m3's, and in int8 0. The descales are those
with which attention reads the cache: float32, one number, (B, Hk), or of k (B, Hk, blocks of 128
keys) and of v (B, Hk, Dv); None is 1.

With rotary_cos and rotary_sin (positions, R / 2), float32 or of q's dtype, the first R columns of k
are rotated on the way, and of q, (B, Sq, Hq, D) or with cu_seqlens_q packed; q_rotated is q then,
contiguous, and otherwise an empty tensor (0). Pairs are columns i and i + R / 2, with
rotary_interleaved 2 i and 2 i + 1. Row i of a sequence has the position cache_seqlens[b] + i, or
rotary_seqlens[b] + i; with q_at_one_position all its queries have the first one's. A position that
cos and sin do not have makes NaN. Products and sums are rounded to float32 (float64 for float64)
one by one, and the result to the dtype, or k's quantized as it is: CUDA and CPU give the same bits.
No gradient.

seqused_k, int32 (B), is how many keys the sequences have then. On a Hopper GPU the keys that they
hold begin to move to L2, as many as it keeps, since attention to them follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import require_device, require_one_device
from .schemas import library
from .torch_private import register_in_place, register_no_gradient

library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, *,"
    " Tensor? q=None, Tensor? page_table=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,"
    " Tensor? rotary_seqlens=None, bool rotary_interleaved=False, bool q_at_one_position=False,"
    " Tensor? k_descale=None, Tensor? v_descale=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
append_kv: Any = torch.ops.flash_ext.append_kv.default
register_no_gradient(library, append_kv)
register_in_place(library, append_kv, 2)


def _append_kv_fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    tensors = {"v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens, **options}
    require_one_device(k_cache, **tensors)
    used = cache_seqlens.new_empty(cache_seqlens.shape)
    if q is None:
        return k.new_empty(0), used
    require_device("q", q, k_cache)
    return q.new_empty(q.shape), used


register_fake("flash_ext::append_kv", _append_kv_fake, lib=library)
