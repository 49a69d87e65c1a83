"""The transport whose transfers are copies between GPUs: copy engines move them, not SMs.

For ranks of one host that can read and write each other's memory. A collective of NCCL has kernels,
which take SMs from the attention kernel beside them, or wait for it where it fills the GPU. Here a
rank writes what others want into its own memory (`Staging`), all ranks meet in a barrier, and the
copies from the others' memory run on a stream beside the kernels. They follow one another: two
streams would share one engine, and early data would wait for late data. Only
what no kernel hides, the first keys of an all-gather, is written into the others' memory.

The barrier and the writes come before the attention kernel that is enqueued next: beside one
that fills the GPU they could not begin.

Tensors of the whole sequence travel span by span, each to its place. If ranks have many spans,
as of packed documents, the host could not enqueue all copies in time: there such tensors lie in
the order of ranks while they travel, one copy from each, and a kernel brings the rows from one
order to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .on_device import Lanes
from .sharding import FEW_SPANS, Sharding, Span, joined
from .transport import (
    Begin,
    Parts,
    Pending,
    Rows,
    add_in_place,
    apart,
    copy,
    copy_to_all,
    narrowed,
    pick,
    sections,
    total,
    widest,
)

# ----------------------------------------------------------------------------------------- staging
# Memory that other ranks read and write, and when it may be written again.
#
# Most transfers pull: every rank writes what the others want into a region of its memory, all
# ranks meet, and then each copies from the regions of the others. Some push: every rank writes into
# the regions of all, and once they have met each reads its own. All ranks do the same in the same
# order, so their regions have the same places, and no rank has to tell another where.
#
# A region may be written again, by any rank, when no rank reads it any more. What a rank knows of
# others it knows by barriers: each lets its stream wait for its pulls of a region, and enqueues
# what reads its own, before a later barrier; so after that barrier all of it is done. Hence
#
#     1. a region is closed once this rank's stream waits for its pulls (and nothing enqueued after
#        the next barrier reads this rank's own part), at the same call on every rank;
#     2. it is free once a barrier was enqueued after it was closed. `take` may enqueue one.
#
# Every transfer has its own barrier, so a free region costs none: a forward pass uses two
# regions in turn.

ALIGNMENT = 256
"""Of regions and of the blocks in them, in bytes."""

GRAIN = 1 << 21
"""Memory is taken in multiples of this number of bytes, the driver's pages."""

LARGE = 1 << 30
"""Bytes from which an extra barrier is cheaper than more memory: it frees closed regions."""

Copy = tuple[Tensor, Tensor]
"""Where to and where from: contiguous, of one shape and dtype."""


class Window(Protocol):
    """Memory of all ranks that this rank can read and write."""

    rank: int
    buffers: Sequence[Tensor]
    """Of every rank, uint8 (capacity)."""

    def follow(self) -> None:
        """What the current stream does next comes after all that earlier transfers enqueued."""

    def drain(self) -> None:
        """The current stream waits for all pulls that were begun."""

    def meet(self) -> None:
        """A barrier, enqueued on the current stream: what the ranks enqueued before it is done, and
        seen by all, when what they enqueue after it begins."""

    def mark(self) -> Callable[[Sequence[Copy]], Callable[[], object]]:
        """A function that begins copies, once the work now enqueued on the current stream is done,
        and returns their wait: of the stream that is then the current one."""


@dataclass
class Region:
    """Bytes [first, last) of a window on every rank, of one transfer."""

    window: Window
    first: int
    last: int
    closed: int | None = None
    """How many barriers had been enqueued when it was closed."""

    kept: list[object] = field(default_factory=list)
    """Where pulls write: alive until they are done, even if no stream waits."""


class Staging:
    """The regions of one group of ranks."""

    def __init__(self, open_window: Callable[[int], Window]) -> None:
        """`open_window` makes a window of a number of bytes; all ranks call it together."""
        self._open = open_window
        self._window: Window | None = None
        self._capacity = 0
        self._met = 0
        self._regions: list[Region] = []  # of the window that are not known to be free, in order

    @property
    def capacity(self) -> int:
        """Bytes that this rank holds for others."""
        return self._capacity

    def take(self, size: int) -> Region:
        """A region of `size` bytes, which this rank may write from now on."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        if self._window is not None:
            self._window.follow()
        self._forget_free()
        place = self._place(size)
        if place is None and self._window is not None and self._capacity + size > LARGE:
            self.meet(self._window)
            self._forget_free()
            place = self._place(size)
        if place is None:
            self._grow(size)
            place = 0
        assert self._window is not None
        region = Region(self._window, place, place + size)
        self._regions = sorted([*self._regions, region], key=lambda region: region.first)
        return region

    def _grow(self, size: int) -> None:
        """A new window, empty, with `size` bytes more. Open regions keep the old one.

        Every window costs all ranks a while: so memory is doubled as long as it is small.
        """
        more = size if self._capacity + size > LARGE else max(size, self._capacity)
        capacity = -(-(self._capacity + more) // GRAIN) * GRAIN
        if capacity > LARGE and all(region.closed is not None for region in self._regions):
            self._window, self._capacity = None, 0  # there may not be memory for both
            self._regions = []
        self._window = self._open(capacity)
        self._window.follow()
        self._capacity, self._regions = capacity, []

    def meet(self, window: Window) -> None:
        """Enqueue a barrier."""
        window.meet()
        self._met += 1

    def close(self, region: Region) -> None:
        """The current stream waits for this rank's pulls of the region."""
        region.closed = self._met
        region.kept.clear()

    def abandon(self) -> None:
        """A new call begins: what an earlier one, which raised, left open is closed."""
        for region in self._regions:
            if region.closed is None:
                region.window.drain()
                self.close(region)

    def _forget_free(self) -> None:
        self._regions = [
            region
            for region in self._regions
            if region.closed is None or region.closed >= self._met
        ]

    def _place(self, size: int) -> int | None:
        """The first gap that is long enough."""
        at = 0
        for region in self._regions:
            if region.first - at >= size:
                return at
            at = region.last
        return at if at + size <= self._capacity else None


# ------------------------------------------------------------------------------------ copy engines
Like = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a block."""


def _layout(blocks: Sequence[Like]) -> tuple[list[int], int]:
    """Where blocks lie, one after the other, and how many bytes they need."""
    offsets, end = [], 0
    for shape, dtype in blocks:
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


class _Parcel:
    """Blocks in a region, as this rank sees them in every rank's memory."""

    def __init__(self, staging: Staging, blocks: Sequence[Like]) -> None:
        self._staging, self._blocks = staging, blocks
        self._offsets, size = _layout(blocks)
        self.region: Region = staging.take(size)
        self.window: Window = self.region.window

    def block(self, rank: int, i: int) -> Tensor:
        """A rank's block i: a view of its memory."""
        shape, dtype = self._blocks[i]
        first = (self.region.first + self._offsets[i]) // dtype.itemsize
        strides = [math.prod(shape[dim:]) for dim in range(1, len(shape) + 1)]
        # Two views, where a section of the bytes, of this type and shape, would be three.
        memory = self.window.buffers[rank].view(dtype)
        return memory.as_strided(shape, strides, memory.storage_offset() + first)

    def of(self, rank: int) -> Rows:
        """A rank's blocks."""
        return tuple(self.block(rank, i) for i in range(len(self._blocks)))

    @property
    def mine(self) -> Rows:
        """This rank's blocks, to be written before the ranks meet."""
        return self.of(self.window.rank)

    def meet(self) -> None:
        """Everything is written: the barrier of this transfer."""
        self._staging.meet(self.window)

    def close(self) -> None:
        """Everything has been waited for."""
        self._staging.close(self.region)


def _rows_first(x: Tensor, count: int) -> Like:
    """The block of a tensor (B, rows, H, ...) with `count` rows: (count, B, H, ...)."""
    return (count, x.shape[0], *x.shape[2:]), x.dtype


def _side_by_side(tensors: Rows, count: int) -> Like:
    """The block of tensors (B, rows, H, D) of one dtype: (count, B, H, ΣD)."""
    (*shape, _), dtype = _rows_first(tensors[0], count)
    return (*shape, sum(x.shape[-1] for x in tensors)), dtype


class CopyEngines:
    """The transport by copies, for one group of ranks and one call."""

    needs_sms = False

    def __init__(self, staging: Staging, shards: Sharding, rank: int) -> None:
        self.staging, self.shards, self.rank, self.ranks = staging, shards, rank, shards.ranks
        # Every rank reads what others have laid out: all have one order, whoever has many spans.
        self._reordered = shards.most_spans > FEW_SPANS
        self._spans = shards.one_by_one if self._reordered else shards.spans
        staging.abandon()

    def _travelling_order(self, out: Tensor, x: Tensor, span: Span) -> None:
        """Rows `span`, as they lie while they travel, of the sequence x (S, …)."""
        a, b = span
        if self._reordered:
            pick(out, x, self.shards.orders(x.device)[0][a:b])
        else:
            copy(out, x[a:b])

    def _inverse(self, device: torch.device) -> Tensor | None:
        """Where rows of the sequence lie while they travel; None: at their places in it."""
        return self.shards.orders(device)[1] if self._reordered else None

    @staticmethod
    def _sequence_order(x: Tensor, inverse: Tensor | None) -> Tensor:
        """The sequence, from its rows (S, …) as they lie while they travel."""
        if inverse is None:
            return x
        out = torch.empty_like(x)
        pick(out, x, inverse)
        if x.is_cuda:  # of another stream, maybe, and nothing keeps it
            x.record_stream(torch.cuda.current_stream(x.device.index))
        return out

    def gather(self, tensors: Rows, pieces: Sequence[int], what: str) -> Begin:
        """As `Transport` says. The tensors of a piece lie side by side, so they are half as many
        copies. Nothing hides the first piece: a kernel writes it to its place on every rank, which
        costs less time than copies, while the SMs have nothing else to do.
        """
        x, *_ = tensors
        dtype, device, batch = x.dtype, x.device, x.shape[0]
        wide = widest(*tensors)  # in which copies and kernels move elements
        dims, wide_dims = [x.shape[-1] for x in tensors], []
        first, *others = zip(*(x.split(pieces, 2) for x in tensors), strict=True)
        blocks: list[Like] = [_side_by_side(first, self.shards.rows)]
        if others:
            seen = [x.view(wide).transpose(0, 1) for x in tensors]
            wide_dims = [x.shape[-1] for x in seen]
            others = list(zip(*(x.split(pieces, 2)[1:] for x in seen), strict=True))
            blocks += [((self.shards.most, batch, n, sum(wide_dims)), wide) for n in pieces[1:]]
        parcel = _Parcel(self.staging, blocks)
        inverse = self._inverse(device)
        whole: list[Tensor | None] = [parcel.block(self.rank, 0)]
        for shape, _ in blocks[1:]:
            whole.append(x.new_empty((self.shards.rows, *shape[1:]), dtype=wide))
        parcel.region.kept.append(whole)
        left = len(pieces)
        with Lanes(device, beside=left > 1) as lanes:
            with lanes.of(0):
                of_ranks = [parcel.block(rank, 0).split(dims, -1) for rank in self._every()]
                for j, part in enumerate(first):
                    copy_to_all([block[j] for block in of_ranks], self._spans[self.rank], part)
            with lanes.of(1):
                for i, piece in enumerate(others, 1):
                    here = narrowed(parcel.block(self.rank, i), (0, x.shape[1]))
                    for part, place in zip(piece, here.split(wide_dims, -1), strict=True):
                        place.copy_(part)
        parcel.meet()
        # Whichever piece: its copies need not wait for the kernels before it.
        begin_copies = parcel.window.mark()

        def begin(i: int) -> Pending[Rows]:
            waits: list[Callable[[], object]] = []
            found = whole[i]
            assert found is not None, "each is begun once"
            if i > 0:
                of_ranks = {rank: parcel.block(rank, i) for rank in self._every()}
                waits.append(begin_copies(self._into_place(found, of_ranks)))

            def finish() -> Rows:
                nonlocal left
                whole[i] = None
                left -= 1
                if left == 0:
                    parcel.close()
                return apart(self._sequence_order(found, inverse).view(dtype), dims)

            return Pending(f"{what}, piece {i + 1} of {len(pieces)}", waits, finish)

        return begin

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with its next: so that not all read from one."""
        return [(self.rank + t) % self.ranks for t in range(1, self.ranks)]

    def _every(self) -> list[int]:
        """All ranks, this one the last."""
        return [*self._peers(), self.rank]

    def _into_place(self, whole: Tensor, blocks: Mapping[int, Tensor]) -> list[Copy]:
        """Copies of the others' rows, from a block (most, …) each, to the sequence (S, …)."""
        copies: list[Copy] = []
        for peer, block in blocks.items():
            at = 0
            for a, b in self._spans[peer]:
                here = narrowed(whole, (a, b)), narrowed(block, (at, at + b - a))
                copies.append(here)
                at += b - a
        return copies

    def _place_own(self, whole: Tensor, x: Tensor) -> None:
        """This rank's rows x (rows, …) to their places in the sequence (S, …)."""
        for place, span in sections(whole, self._spans[self.rank]):
            copy(place, x[slice(*span)].view(place.shape))

    def rotate(self, tensors: Rows, steps: int, what: str) -> Begin:
        """As `Transport` says. Every rank reads its rank - t directly."""
        if steps > 1:
            parcel = _Parcel(self.staging, [_rows_first(x, self.shards.most) for x in tensors])
            for x, block in zip(tensors, parcel.mine, strict=True):
                copy(block[: x.shape[1]], x.transpose(0, 1))
            parcel.meet()

        def begin(t: int) -> Pending[Rows]:
            source = (self.rank - t) % self.ranks
            found = [x.new_empty(_rows_first(x, self.shards.lengths[source])[0]) for x in tensors]
            copies = [
                (out, block[: out.shape[0]])
                for out, block in zip(found, parcel.of(source), strict=True)
            ]
            parcel.region.kept.append(found)
            wait = parcel.window.mark()(copies)

            def finish() -> Rows:
                parcel.region.kept.clear()
                if t == steps - 1:
                    parcel.close()
                return tuple(x.transpose(0, 1) for x in found)

            return Pending(f"{what}, step {t}", [wait], finish)

        return begin

    def scatter(self, into: Rows, what: str) -> tuple[Rows, Callable[[Parts], Pending[None]]]:
        """As `Transport` says: what this rank adds is written where the others read it."""
        dims = [x.shape[-1] for x in into]
        parcel = _Parcel(self.staging, [_side_by_side(into, self.shards.rows)])
        (mine,) = parcel.mine
        written = torch.empty_like(mine) if self._reordered else mine

        def begin(parts: Parts) -> Pending[None]:
            nonlocal written
            places = apart(mine, dims)
            if self._reordered:
                total(parts, places, self.shards.orders(mine.device)[0])
            else:
                add_in_place(parts, places)
            written = mine  # what was another tensor is free
            parcel.meet()
            count = self.shards.lengths[self.rank]
            shape, _ = _side_by_side(into, count)
            received = mine.new_empty((self.ranks, *shape))
            copies = self._own_rows(parcel, [received])
            parcel.region.kept.append(received)
            wait = parcel.window.mark()(copies)

            def finish() -> None:
                self._add_up(received, mine, into)
                parcel.close()

            return Pending(what, [wait], finish)

        return apart(written, dims), begin

    def _add_up(self, received: Tensor, mine: Tensor, into: Rows) -> None:
        """Each of `into` (B, rows, H, D) from the others' parts (n, rows, B, H, ΣD) and this rank's
        (S, B, H, ΣD), in the order of ranks."""
        dims = [out.shape[-1] for out in into]
        at = 0
        for a, b in self._spans[self.rank]:
            here, whole = (at, at + b - a), (0, b - a)
            parts = [narrowed(x, here) for x in received.unbind()]
            parts[self.rank] = mine.narrow(0, a, b - a)
            of_into = tuple(narrowed(x, here, 1) for x in into)
            total([(whole, apart(x, dims)) for x in parts], of_into)
            at += b - a

    def _own_rows(self, parcel: _Parcel, received: Sequence[Tensor]) -> list[Copy]:
        """Copies of this rank's rows of the others' blocks (S, …) to received (n, rows, …)."""
        copies: list[Copy] = []
        for peer in self._peers():
            for i, out in enumerate(received):
                block, at = parcel.block(peer, i), 0
                for a, b in self._spans[self.rank]:
                    here = narrowed(out[peer], (at, at + b - a))
                    copies.append((here, block.narrow(0, a, b - a)))
                    at += b - a
        return copies

    def shift(self, parts: Parts, like: Rows, by: int, what: str) -> Pending[Rows]:
        """As `Transport` says."""
        to, source = (self.rank + by) % self.ranks, (self.rank - by) % self.ranks
        count = self.shards.lengths
        parcel = _Parcel(self.staging, [_rows_first(x, self.shards.most) for x in like])
        total(parts, tuple(x[: count[to]].transpose(0, 1) for x in parcel.mine))
        parcel.meet()
        found = [x.new_empty(_rows_first(x, count[self.rank])[0]) for x in like]
        parcel.region.kept.append(found)
        wait = parcel.window.mark()(
            [(out, x[: out.shape[0]]) for out, x in zip(found, parcel.of(source), strict=True)]
        )

        def finish() -> Rows:
            parcel.close()
            return tuple(x.transpose(0, 1) for x in found)

        return Pending(what, [wait], finish)

    def to_heads(self, tensors: Rows, what: str) -> Pending[Rows]:
        """As `Transport` says."""
        by_rank = [x.transpose(0, 1).unflatten(2, (self.ranks, -1)).movedim(2, 0) for x in tensors]
        parcel = _Parcel(
            self.staging,
            [((self.ranks, self.shards.most, *x.shape[2:]), x.dtype) for x in by_rank],
        )
        for x, block in zip(by_rank, parcel.mine, strict=True):
            for others in (slice(0, self.rank), slice(self.rank + 1, self.ranks)):
                copy(block[others, : x.shape[1]], x[others])
        parcel.meet()
        whole = [x.new_empty((self.shards.rows, *x.shape[2:])) for x in by_rank]
        copies: list[Copy] = []
        for i, out in enumerate(whole):
            blocks = {peer: parcel.block(peer, i)[self.rank] for peer in self._peers()}
            copies += self._into_place(out, blocks)
        parcel.region.kept.append(whole)
        wait = parcel.window.mark()(copies)
        for x, out in zip(by_rank, whole, strict=True):
            self._place_own(out, x[self.rank])

        def finish() -> Rows:
            parcel.close()
            inverse = self._inverse(whole[0].device)
            return tuple(self._sequence_order(x, inverse).transpose(0, 1) for x in whole)

        return Pending(what, [wait], finish)

    def to_rows(self, tensors: Rows, into: Rows, what: str) -> Pending[None]:
        """As `Transport` says."""
        seqlen, count = self.shards.rows, self.shards.lengths[self.rank]
        parcel = _Parcel(self.staging, [_rows_first(x, seqlen) for x in tensors])
        own = self._spans[self.rank]
        edges = sorted(((0, 0), *own, (seqlen, seqlen)))
        others = joined([(a, b) for (_, a), (b, _) in zip(edges, edges[1:], strict=False)])
        for x, block in zip(tensors, parcel.mine, strict=True):
            for a, b in others:
                self._travelling_order(block[a:b], x.transpose(0, 1), (a, b))
        parcel.meet()
        received = [x.new_empty((self.ranks, *_rows_first(x, count)[0])) for x in tensors]
        parcel.region.kept.append(received)
        wait = parcel.window.mark()(self._own_rows(parcel, received))
        of_ranks = [x.transpose(0, 1).unflatten(2, (self.ranks, -1)) for x in into]
        for x, out in zip(tensors, of_ranks, strict=True):
            at = 0
            for a, b in own:
                here = out[at : at + b - a, :, self.rank]
                self._travelling_order(here, x.transpose(0, 1), (a, b))
                at += b - a

        def finish() -> None:
            for x, out in zip(received, of_ranks, strict=True):
                for ranks in (slice(0, self.rank), slice(self.rank + 1, self.ranks)):
                    copy(out[:, :, ranks], x[ranks].movedim(0, 2))
            parcel.close()

        return Pending(what, [wait], finish)
