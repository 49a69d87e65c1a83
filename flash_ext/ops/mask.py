"""The ops that make masks of blocks, and their fake kernels.

    mask_from_dense(mask) -> (kv_tiles, q_tiles, words)

makes one of a bool tensor (Bm, Hm, Sq, Sk), True where the query sees the key.

    mask_from_intervals(intervals, seqlen_k) -> (kv_tiles, q_tiles, words)

makes one of int32 (Bm, Hm, Sq, 4): two half-open intervals of keys for each query, begin, end,
begin, end, of which only what lies within seqlen_k keys counts. The words have them in ascending
order, and as one where they touch.

    mask_from_documents(
        first_keys, seqlen_q, seqlen_k, *, ids, cu_seqlens_q, cu_seqlens_k, window_left,
        window_right, first_keys_in_window
    ) -> (kv_tiles, q_tiles, words)

makes one of documents, each with its own queries and keys: equal neighbors in ids, int32 or int64
(Bm, S), where negative ones see nothing; sequences by offsets, int32 (n + 1); or without both one
document of all. A query sees a window about its position, bottom-right, and the first keys of its
document: their number is int32 (1), or one of each document (n), or of each matrix (Bm). With
first_keys_in_window none of them is beyond the window's right side.

    mask_from_blocks(kinds, intervals) -> (kv_tiles, q_tiles, words)

makes one of uint8 (Bm, Hm, nQ, nK): of a block of 128 queries and 128 keys that is not 0 a query
sees what its intervals show, int32 (Bm or 1, Hm or 1, Sq, 4), as above; of the others nothing.

    mask_from_kinds(kinds) -> (kv_tiles, q_tiles)

makes the lists of uint8 (Bm, Hm, nQ, nK): 0 is a hidden block, 1 a full and 2 a partial one.

`flash_ext.cpu.tile_mask` has the format. Inputs may have any strides, 0 too. On CUDA nothing waits
for the device, and entries that the format leaves unused hold anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import require_one_device
from .options import MASK_BLOCK
from .schemas import library
from .torch_private import register_no_gradient

_TAGS = (torch.Tag.pt2_compliant_tag,)
_LISTS = "Tensor kv_tiles, Tensor q_tiles"

library.define(f"mask_from_dense(Tensor mask) -> ({_LISTS}, Tensor words)", tags=_TAGS)
library.define(
    f"mask_from_intervals(Tensor intervals, SymInt seqlen_k) -> ({_LISTS}, Tensor words)",
    tags=_TAGS,
)
library.define(
    "mask_from_documents(Tensor first_keys, SymInt seqlen_q, SymInt seqlen_k, *, Tensor? ids=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt window_left=-1,"
    f" SymInt window_right=-1, bool first_keys_in_window=False) -> ({_LISTS}, Tensor words)",
    tags=_TAGS,
)
library.define(
    f"mask_from_blocks(Tensor kinds, Tensor intervals) -> ({_LISTS}, Tensor words)", tags=_TAGS
)
library.define(f"mask_from_kinds(Tensor kinds) -> ({_LISTS})", tags=_TAGS)
mask_from_dense: Any = torch.ops.flash_ext.mask_from_dense.default
mask_from_intervals: Any = torch.ops.flash_ext.mask_from_intervals.default
mask_from_documents: Any = torch.ops.flash_ext.mask_from_documents.default
mask_from_blocks: Any = torch.ops.flash_ext.mask_from_blocks.default
mask_from_kinds: Any = torch.ops.flash_ext.mask_from_kinds.default
for _op in (
    *(mask_from_dense, mask_from_intervals, mask_from_documents, mask_from_blocks, mask_from_kinds),
):
    register_no_gradient(library, _op)

HEADER = 4
"""The ints of a row before its runs."""

INTERVAL_RUNS = (6, 4)
"""The most runs of a block of queries, and of a block of keys, of a mask of intervals."""


def blocks_of(length: Any) -> Any:
    """The number of blocks of 128."""
    return (length + MASK_BLOCK - 1) // MASK_BLOCK


def capacity_of(blocks: Any) -> Any:
    """The runs for which a row of this many blocks has places."""
    return (blocks + 3) // 4 * 4 + (4 if blocks == 0 else 0)


def _lists(x: Tensor, matrices: tuple[Any, ...], sizes: Any, runs: Any) -> tuple[Tensor, Tensor]:
    kv_tiles, q_tiles = (
        x.new_empty((*matrices, size, HEADER + capacity_of(most)), dtype=torch.int32)
        for size, most in zip(sizes, runs, strict=True)
    )
    return kv_tiles, q_tiles


def _dense_fake(mask: Tensor) -> tuple[Tensor, ...]:
    matrices, (blocks_q, blocks_k) = mask.shape[:2], map(blocks_of, mask.shape[2:])
    lists = _lists(mask, tuple(matrices), (blocks_q, blocks_k), (blocks_k, blocks_q))
    words = (*matrices, blocks_q, blocks_k, MASK_BLOCK, 4)
    return *lists, mask.new_empty(words, dtype=torch.int32)


def _of_intervals(
    like: Tensor, matrices: tuple[Any, ...], seqlen_q: Any, seqlen_k: Any
) -> tuple[Tensor, ...]:
    blocks_q = blocks_of(seqlen_q)
    lists = _lists(like, matrices, (blocks_q, blocks_of(seqlen_k)), INTERVAL_RUNS)
    return *lists, like.new_empty((*matrices, blocks_q * MASK_BLOCK, 4))


def _intervals_fake(intervals: Tensor, seqlen_k: int) -> tuple[Tensor, ...]:
    *matrices, seqlen_q, _ = intervals.shape
    return _of_intervals(intervals, tuple(matrices), seqlen_q, seqlen_k)


def _documents_fake(
    first_keys: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    *,
    ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    first_keys_in_window: bool = False,
) -> tuple[Tensor, ...]:
    given = {"ids": ids, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    require_one_device(first_keys, **given)
    batch = first_keys.shape[0] if cu_seqlens_q is None else 1
    batch = batch if ids is None else ids.shape[0]
    return _of_intervals(first_keys, (batch, 1), seqlen_q, seqlen_k)


def _kinds_fake(kinds: Tensor) -> tuple[Tensor, Tensor]:
    *matrices, blocks_q, blocks_k = kinds.shape
    return _lists(kinds, tuple(matrices), (blocks_q, blocks_k), (blocks_k, blocks_q))


def _blocks_fake(kinds: Tensor, intervals: Tensor) -> tuple[Tensor, ...]:
    require_one_device(kinds, intervals=intervals)
    words = (*kinds.shape[:2], kinds.shape[2] * MASK_BLOCK, 4)
    return *_kinds_fake(kinds), kinds.new_empty(words, dtype=torch.int32)


register_fake("flash_ext::mask_from_dense", _dense_fake, lib=library)
register_fake("flash_ext::mask_from_intervals", _intervals_fake, lib=library)
register_fake("flash_ext::mask_from_documents", _documents_fake, lib=library)
register_fake("flash_ext::mask_from_blocks", _blocks_fake, lib=library)
register_fake("flash_ext::mask_from_kinds", _kinds_fake, lib=library)
