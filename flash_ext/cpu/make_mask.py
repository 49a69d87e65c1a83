"""The CPU kernels of the ops that make masks of blocks (`flash_ext.ops.mask`), in torch.

Their checks are also the words with which the CUDA kernels refuse (csrc/api/mask.cpp has the same
conditions). The lists are the CUDA kernels', run by run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.checks import refuse, require_device, require_ints
from ..ops.mask import HEADER, INTERVAL_RUNS, blocks_of, capacity_of
from ..ops.options import MASK_BLOCK, MOST_MASK_BLOCKS
from ..ops.schemas import library
from .documents import intervals_of
from .tile_mask import FULL, PARTIAL, pack_bits

_NONE = MOST_MASK_BLOCKS
"""Where a range of no blocks begins and ends: past all others."""


def _require_input(name: str, x: Tensor, dtype: torch.dtype, layout: str) -> None:
    if x.dtype != dtype:
        refuse(name, str(dtype).removeprefix("torch."), x.dtype)
    if x.dim() != 4 or (layout.endswith("4)") and x.shape[3] != 4):
        refuse(name, f"of shape {layout}", tuple(x.shape))


def _require_sizes(name: str, matrices: torch.Size, blocks_q: int, blocks_k: int) -> None:
    if max(blocks_q, blocks_k) > MOST_MASK_BLOCKS:
        most = f"for at most {MOST_MASK_BLOCKS} blocks of {MASK_BLOCK} queries, and of keys"
        refuse(name, most, f"{blocks_q} and {blocks_k}")
    count = math.prod(matrices)
    pairs = max(*matrices, count, count * max(blocks_q * blocks_k, blocks_q + blocks_k))
    if pairs >= 2**31:
        refuse(name, "of fewer than 2^31 blocks of all heads", pairs)


def check_mask_from_dense(mask: Tensor) -> None:
    """Check the argument of `mask_from_dense`."""
    _require_input("mask", mask, torch.bool, "(batch, heads, seqlen_q, seqlen_k)")
    _require_sizes("mask", mask.shape[:2], *map(blocks_of, mask.shape[2:]))


def check_mask_from_intervals(intervals: Tensor, seqlen_k: int) -> None:
    """Check the arguments of `mask_from_intervals`."""
    _require_input("intervals", intervals, torch.int32, "(batch, heads, seqlen_q, 4)")
    if seqlen_k < 0:
        refuse("seqlen_k", "at least 0", seqlen_k)
    _require_sizes(
        "intervals", intervals.shape[:2], blocks_of(intervals.shape[2]), blocks_of(seqlen_k)
    )


def check_mask_from_documents(
    first_keys: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    *,
    ids: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window_left: int,
    window_right: int,
    first_keys_in_window: bool,
) -> None:
    """Check the arguments of `mask_from_documents`."""
    if first_keys.dtype != torch.int32:
        refuse("first_keys", "int32", first_keys.dtype)
    if first_keys.dim() != 1:
        refuse("first_keys", "of one dimension", tuple(first_keys.shape))
    for name, value, least in (
        ("seqlen_q", seqlen_q, 0),
        ("seqlen_k", seqlen_k, 0),
        ("window_left", window_left, -1),
        ("window_right", window_right, -1),
    ):
        if value < least:
            refuse(name, f"at least {least}", value)
    batch = first_keys.shape[0]
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if ids is not None:
        for name, x in offsets.items():
            if x is not None:
                refuse(name, "None with ids", "a tensor")
        if ids.dtype not in (torch.int32, torch.int64):
            refuse("ids", "int32 or int64", ids.dtype)
        require_device("ids", ids, first_keys)
        if ids.dim() != 2 or ids.shape[1] != seqlen_q:
            refuse("ids", f"of shape (batch, seqlen_q = {seqlen_q})", tuple(ids.shape))
        if seqlen_k != seqlen_q:
            refuse("seqlen_k", f"seqlen_q = {seqlen_q} with ids", seqlen_k)
        if batch != 1:
            refuse("first_keys", "one number with ids", batch)
        batch = ids.shape[0]
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        for name, x in offsets.items():
            if x is None:
                refuse(name, "given, as is the other of cu_seqlens_q and cu_seqlens_k", None)
            count = x.numel() if cu_seqlens_q is None else cu_seqlens_q.numel()
            require_ints(name, x, (count,), first_keys)
            if count == 0 or not x.is_contiguous():
                got = f"shape {tuple(x.shape)} and strides {x.stride()}"
                refuse(name, "contiguous, of shape (n + 1)", got)
            if batch not in (1, count - 1):
                refuse("first_keys", f"of 1 or n = {count - 1} numbers", batch)
        batch = 1
    _require_sizes("the mask", torch.Size((batch, 1)), blocks_of(seqlen_q), blocks_of(seqlen_k))


def check_mask_from_kinds(kinds: Tensor) -> None:
    """Check the argument of `mask_from_kinds`."""
    layout = "(batch, heads, blocks of queries, blocks of keys)"
    _require_input("kinds", kinds, torch.uint8, layout)
    _require_sizes("kinds", kinds.shape[:2], *kinds.shape[2:])


def check_mask_from_blocks(kinds: Tensor, intervals: Tensor) -> None:
    """Check the arguments of `mask_from_blocks`."""
    check_mask_from_kinds(kinds)
    _require_input("intervals", intervals, torch.int32, "(batch or 1, heads or 1, seqlen_q, 4)")
    require_device("intervals", intervals, kinds)
    for dim in (0, 1):
        if intervals.shape[dim] not in (1, kinds.shape[dim]):
            wanted = f"1 or {kinds.shape[dim]} in dimension {dim}, as kinds"
            refuse("intervals", wanted, tuple(intervals.shape))
    if blocks_of(intervals.shape[2]) != kinds.shape[2]:
        wanted = f"for {kinds.shape[2]} blocks of {MASK_BLOCK} queries, as kinds"
        refuse("intervals", wanted, f"{intervals.shape[2]} queries")


def _exists(rows: int, seqlen_q: int, device: torch.device) -> Tensor:
    """Whether each row of the blocks is a query, (nQ, 128)."""
    return (torch.arange(rows, device=device) < seqlen_q).view(-1, MASK_BLOCK)


# --- Lists of kinds ---


def rows_of_runs(kinds: Tensor) -> Tensor:
    """Kinds (…, blocks) as rows of runs (…, R), of neighbors as one run."""
    blocks = kinds.shape[-1]
    capacity = capacity_of(blocks)
    rows = kinds.new_zeros((*kinds.shape[:-1], HEADER + capacity + 1), dtype=torch.int64)
    position = torch.arange(blocks, device=kinds.device)
    runs = rows.new_zeros((*kinds.shape[:-1], 1))
    for which, kind in enumerate((FULL, PARTIAL)):
        found = kinds == kind
        starts = found & ~F.pad(found, (1, 0))[..., :-1]
        ends = found & ~F.pad(found, (0, 1))[..., 1:]
        index = HEADER + runs + starts.cumsum(-1) - 1
        # A run is its first block | the number of its blocks << 16; the last place is for the rest.
        last = HEADER + capacity
        for edge, value in ((starts, position - (position << 16)), (ends, position + 1 << 16)):
            rows.scatter_add_(-1, torch.where(edge, index, last), value.expand_as(index))
        runs = runs + starts.sum(-1, keepdim=True)
        rows[..., which] = found.sum(-1)
    rows[..., 2] = runs[..., 0]
    return rows[..., :-1].to(torch.int32)


def in_order(rows: Tensor) -> Tensor:
    """Rows of runs (…, n, R) with their order.

    By the exponent and two bits of the mantissa of their numbers of blocks.
    """
    length = rows[..., 0] + rows[..., 1]
    by_class = length.float().view(torch.int32) >> 21
    rows[..., 3] = by_class.clamp(max=570).argsort(stable=True, dim=-1, descending=True)
    return rows


def _lists(kinds: Tensor) -> tuple[Tensor, Tensor]:
    return in_order(rows_of_runs(kinds)), in_order(rows_of_runs(kinds.mT))


def _rows_of_ranges(ranges: list[tuple[Tensor, Tensor, int]], capacity: int) -> Tensor:
    """Rows of runs (…, R) of ranges of blocks (begin, end, kind), empty ones left out."""
    begin, end = (torch.stack(x, -1) for x in list(zip(*ranges, strict=True))[:2])
    kind = torch.tensor([x[2] for x in ranges], device=begin.device)
    count = (end - begin).clamp(min=0)
    found = count > 0
    rows = begin.new_zeros((*begin.shape[:-1], HEADER + capacity + 1), dtype=torch.int64)
    index = torch.where(found, HEADER + found.cumsum(-1) - 1, HEADER + capacity)
    rows.scatter_(-1, index, begin | count << 16)
    rows[..., 0] = (count * (kind == FULL)).sum(-1)
    rows[..., 1] = (count * (kind == PARTIAL)).sum(-1)
    rows[..., 2] = found.sum(-1)
    return rows[..., :-1].to(torch.int32)


# --- Intervals ---


def tidy(intervals: Tensor, seqlen_k: int) -> Tensor:
    """Within seqlen_k keys, in ascending order, one if they touch; an empty one is 0, 0."""
    x = intervals.clamp(0, seqlen_k)
    begin_0, end_0, begin_1, end_1 = x.unbind(-1)
    has_0, has_1 = begin_0 < end_0, begin_1 < end_1
    low, high = torch.minimum(begin_0, begin_1), torch.maximum(end_0, end_1)
    touch = has_0 & has_1 & (torch.maximum(begin_0, begin_1) <= torch.minimum(end_0, end_1))
    swap = has_1 & (~has_0 | (begin_1 < begin_0))
    two = has_0 & has_1 & ~touch
    first = torch.stack(
        (
            torch.where(touch, low, torch.where(swap, begin_1, begin_0)),
            torch.where(touch, high, torch.where(swap, end_1, end_0)),
        ),
        -1,
    )
    second = torch.stack((torch.where(swap, begin_0, begin_1), torch.where(swap, end_0, end_1)), -1)
    first = first * (has_0 | has_1).unsqueeze(-1)
    return torch.cat((first, second * two.unsqueeze(-1)), -1)


_Range = tuple[Tensor, Tensor]
"""Blocks begin to end - 1, of each block of queries."""


def _range(begin: Tensor, end: Tensor) -> _Range:
    empty = end <= begin
    return begin.masked_fill(empty, _NONE), end.masked_fill(empty, _NONE)


def _join(a: _Range, b: _Range) -> tuple[_Range, _Range]:
    """Two ranges in ascending order, and one if they touch."""
    ordered = a[0] <= b[0]
    low = tuple(torch.where(ordered, x, y) for x, y in zip(a, b, strict=True))
    high = tuple(torch.where(ordered, y, x) for x, y in zip(a, b, strict=True))
    touch = high[0] <= low[1]
    end = torch.where(touch, torch.maximum(low[1], high[1]), low[1])
    return (low[0], end), (high[0].masked_fill(touch, _NONE), high[1].masked_fill(touch, _NONE))


def _hulls(words: Tensor, seqlen_q: int) -> tuple[tuple[_Range, _Range], tuple[_Range, _Range]]:
    """The blocks of keys that each block of queries sees, and those it sees in full.

    All blocks of which any query sees a key are among the first (and maybe others between them). Of
    the others every query sees all.
    """
    x = words.unflatten(2, (-1, MASK_BLOCK)).long()
    exists = _exists(words.shape[2], seqlen_q, words.device)
    seen, full = [], []
    most = MASK_BLOCK * MOST_MASK_BLOCKS
    for begin, end in ((x[..., 0], x[..., 1]), (x[..., 2], x[..., 3])):
        some = begin < end
        first = begin.masked_fill(~some, most).amin(-1) // MASK_BLOCK
        seen.append(_range(first, blocks_of(end.masked_fill(~some, 0).amax(-1))))
        latest_begin = begin.masked_fill(~exists, 0).amax(-1)
        earliest_end = end.masked_fill(~exists, most).amin(-1)
        full.append(_range(blocks_of(latest_begin), earliest_end // MASK_BLOCK))
    return _join(*seen), _join(*full)


def _rows_of_hulls(seen: tuple[_Range, _Range], full: tuple[_Range, _Range]) -> Tensor:
    (begin_0, end_0), (begin_1, end_1) = full
    ranges = [(*x, FULL) for x in full]
    for begin, end in seen:
        ranges += [
            (begin, torch.minimum(end, begin_0), PARTIAL),
            (torch.maximum(begin, end_0), torch.minimum(end, begin_1), PARTIAL),
            (torch.maximum(begin, end_1), end, PARTIAL),
        ]
    return _rows_of_ranges(ranges, capacity_of(INTERVAL_RUNS[0]))


def _kinds(seen: tuple[_Range, _Range], full: tuple[_Range, _Range], blocks_k: int) -> Tensor:
    """(Bm, Hm, nQ, nK)."""
    block = torch.arange(blocks_k, device=seen[0][0].device)

    def has(ranges: tuple[_Range, _Range]) -> Tensor:
        (b0, e0), (b1, e1) = (tuple(x.unsqueeze(-1) for x in y) for y in ranges)
        return ((block >= b0) & (block < e0)) | ((block >= b1) & (block < e1))

    kinds = has(seen).to(torch.uint8) * PARTIAL
    return kinds.masked_fill(has(full), FULL)


def _rows_of_columns(kinds: Tensor) -> Tensor:
    """For each block of keys all blocks of queries from the first to the last one that see it, but
    for the longest gap, and the longest run of full ones as such: (Bm, Hm, nK, R)."""
    kinds = kinds.mT
    blocks = kinds.shape[-1]
    capacity = capacity_of(INTERVAL_RUNS[1])
    if blocks == 0:
        return kinds.new_zeros((*kinds.shape[:-1], HEADER + capacity), dtype=torch.int32)
    position = torch.arange(blocks, device=kinds.device)
    seen, full = kinds != 0, kinds == FULL
    begin = torch.where(seen, position, blocks).amin(-1)
    end = torch.where(seen, position + 1, 0).amax(-1)

    def longest(length: Tensor, last: int) -> _Range:
        """Of runs that end at position + last, of equal ones the first; an empty one is at end."""
        best = (length * blocks - position).argmax(-1, keepdim=True)
        length = length.gather(-1, best)[..., 0]
        run_end = torch.where(length > 0, best[..., 0] + last, end)
        return run_end - length, run_end

    run_begin, run_end = longest(position - torch.where(full, -1, position).cummax(-1).values, 1)
    previous = F.pad(torch.where(seen, position, -1).cummax(-1).values, (1, 0), value=-1)[..., :-1]
    gap_begin, gap_end = longest((position - previous - 1) * (seen & (previous >= 0)), 0)
    ranges = [(run_begin, run_end, FULL)]
    for first, last in ((begin, gap_begin), (gap_end, end)):
        ranges += [
            (first, torch.minimum(last, run_begin), PARTIAL),
            (torch.maximum(first, run_end), last, PARTIAL),
        ]
    return _rows_of_ranges(ranges, capacity)


# --- The ops ---


def _mask_from_dense_cpu(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_mask_from_dense(mask)
    seqlen_q, seqlen_k = mask.shape[2:]
    padding = (0, -seqlen_k % MASK_BLOCK, 0, -seqlen_q % MASK_BLOCK)
    blocks = F.pad(mask, padding).unflatten(3, (-1, MASK_BLOCK)).unflatten(2, (-1, MASK_BLOCK))
    blocks = blocks.transpose(3, 4)  # (Bm, Hm, nQ, nK, 128, 128)
    exists = _exists(blocks.shape[2] * MASK_BLOCK, seqlen_q, mask.device)[:, None, :, None]
    some = blocks.flatten(-2).any(-1)
    full = (blocks | ~exists).flatten(-2).all(-1) & some
    kinds = (some.to(torch.uint8) * PARTIAL).masked_fill(full, FULL)
    return *_lists(kinds), pack_bits(blocks)


def _words(intervals: Tensor, seqlen_k: int) -> Tensor:
    words = tidy(intervals, seqlen_k)
    return F.pad(words, (0, 0, 0, -words.shape[2] % MASK_BLOCK))


def _mask_from_documents_cpu(
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
) -> tuple[Tensor, Tensor, Tensor]:
    given: dict[str, Any] = {
        "ids": ids,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "window_left": window_left,
        "window_right": window_right,
        "first_keys_in_window": first_keys_in_window,
    }
    check_mask_from_documents(first_keys, seqlen_q, seqlen_k, **given)
    found = intervals_of(first_keys, seqlen_q, seqlen_k, **given)
    return _mask_from_intervals_cpu(found, seqlen_k)


def _mask_from_intervals_cpu(intervals: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    check_mask_from_intervals(intervals, seqlen_k)
    words = _words(intervals, seqlen_k)
    hulls = _hulls(words, intervals.shape[2])
    q_tiles = _rows_of_columns(_kinds(*hulls, blocks_of(seqlen_k)))
    return in_order(_rows_of_hulls(*hulls)), in_order(q_tiles), words


def _mask_from_blocks_cpu(kinds: Tensor, intervals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_mask_from_blocks(kinds, intervals)
    intervals = intervals.expand(*kinds.shape[:2], -1, -1)
    words = _words(intervals, kinds.shape[3] * MASK_BLOCK)
    of_intervals = _kinds(*_hulls(words, intervals.shape[2]), kinds.shape[3])
    return *_lists(of_intervals.masked_fill(kinds == 0, 0)), words


def _mask_from_kinds_cpu(kinds: Tensor) -> tuple[Tensor, Tensor]:
    check_mask_from_kinds(kinds)
    return _lists(kinds)


library.impl("mask_from_dense", _mask_from_dense_cpu, "CPU")
library.impl("mask_from_intervals", _mask_from_intervals_cpu, "CPU")
library.impl("mask_from_documents", _mask_from_documents_cpu, "CPU")
library.impl("mask_from_blocks", _mask_from_blocks_cpu, "CPU")
library.impl("mask_from_kinds", _mask_from_kinds_cpu, "CPU")
