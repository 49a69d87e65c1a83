"""Which rows of the sequence each rank holds, and cutting and joining tensors by it.

A layout is a cut of the S rows of the whole sequence into chunks, and a rule that gives chunks to
ranks. A rank's rows are its chunks one after the other.

    contiguous        n chunks; rank r holds chunk r, as `torch.chunk` and DTensor's Shard cut
    zigzag            2n chunks; rank r holds chunks r and 2n - 1 - r, so that under a causal mask
                      every rank has the same work (the head-tail balance of Llama 3,
                      arXiv 2407.21783, section 3.3.2)
    document_zigzag   the zigzag of every document: rank r holds chunk r of each, then chunk
                      2n - 1 - r of each

S need not be divisible (`edges`): the 2n chunks of a zigzag differ by at most a row, and contiguous
chunks are torch.chunk's. So ranks may hold unequal numbers of rows, and of a short sequence none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...ops.checks import refuse
from .kept import AN_INTEGER, bytes_of, kept
from .on_device import ON_HOST, for_stream, moved, numbers

LAYOUTS = ("zigzag", "contiguous", "document_zigzag")
"""The names of the layouts; the first is the default."""

FEW_SPANS = 4
"""Of a rank: so many are copied one by one. With more of them, as of packed documents, a pass over
the rows costs less than the host's work for each."""

Span = tuple[int, int]
"""Rows [first, last) of the whole sequence."""


class Documents(tuple[int, ...]):
    """cu_seqlens, numbers of the host."""

    def __init__(self, values: Sequence[int]) -> None:
        self.offsets = numbers(values)
        """int64 (documents + 1)."""

        self._hash = super().__hash__()

    def __hash__(self) -> int:
        """Found once: caches ask for it in every call."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """To other ranks go the numbers alone."""
        return tuple, (tuple(self),)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return (AN_INTEGER + 8) * len(self)


@kept()
def _documents(offsets: tuple[int, ...]) -> Documents:
    return Documents(offsets)


def documents_of(offsets: Sequence[int]) -> Documents:
    """One object for equal numbers, while they are in use."""
    return offsets if isinstance(offsets, Documents) else _documents(tuple(offsets))


def dtype_of(rows: int) -> torch.dtype:
    """Of numbers of rows: int32 if that is enough, which is half of the memory to go through."""
    return torch.int32 if rows < 2**30 else torch.int64


class Cells:
    """The parts of spans that are in one document each: rows [first, last) of the whole sequence,
    and `at`, the row of the rank where they begin; (ranks, m, documents), of `dtype_of`.

    Where a rank has fewer than m parts of a document the others have first = last. Along a rank's
    rows all parts with a lower index come first, and of one index those of earlier documents.
    """

    def __init__(self, first: Tensor, last: Tensor, at: Tensor) -> None:
        self.first, self.last, self.at = first, last, at

    def map(self, function: Callable[[Tensor], Tensor]) -> Cells:
        """The same of each of the three."""
        return Cells(*map(function, (self.first, self.last, self.at)))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return bytes_of((self.first, self.last, self.at))


def edges(rows: int, chunks: int, equal: bool) -> list[int]:
    """Where chunks begin and end: the rule for lengths that do not divide.

    Args:
        rows: the number of rows.
        chunks: the number of chunks.
        equal: chunks differ by at most a row: chunk i begins at ⌊i · rows / chunks⌋. Otherwise they
            have ⌈rows / chunks⌉ rows and the last ones fewer or none, as torch.chunk's.

    Returns:
        chunks + 1 numbers from 0 to rows.
    """
    size = -(-rows // chunks)
    return [i * rows // chunks if equal else min(i * size, rows) for i in range(chunks + 1)]


def _cut(span: Span, chunks: int, equal: bool) -> list[Span]:
    bounds = edges(span[1] - span[0], chunks, equal)
    return [(span[0] + a, span[0] + b) for a, b in itertools.pairwise(bounds)]


class Sharding:
    """The rows of every rank.

    Attributes:
        rows: S, of the whole sequence.
        first, last: (spans), of the spans of all ranks, one rank's after the other's, and of a rank
            in the order of its rows. None is empty.
        begins: (spans), where they begin in the rows of all ranks, one after the other.
        counts: how many spans each rank has.
        lengths: how many rows each rank has.
        outer: where several ranks share what one rank of another Sharding has: that one.
        documents, cells: of a layout by documents, those, and the parts of them; rows after the
            last one, if there are any, are one more.
    """

    outer: Sharding | None = None
    documents: Documents | None = None
    cells: Cells | None = None

    def __init__(self, rows: int, first: Tensor, last: Tensor, counts: Sequence[int]) -> None:
        self.rows, self.first, self.last, self.counts = rows, first, last, tuple(counts)
        ends = torch.cat([first.new_zeros(1), (last - first).cumsum(0, dtype=first.dtype)])
        self.begins = ends[:-1]
        reached: list[int] = ends[[0, *itertools.accumulate(counts)]].tolist()
        self.lengths = tuple(b - a for a, b in itertools.pairwise(reached))

    @staticmethod
    def of_spans(rows: int, spans: Sequence[Sequence[Span]]) -> Sharding:
        """With the spans of each rank."""
        flat = list(itertools.chain(*spans))
        first, last = (numbers([span[i] for span in flat]) for i in (0, 1))
        return Sharding(rows, first, last, [len(of_rank) for of_rank in spans])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharding):
            return NotImplemented
        return self is other or (
            (self.rows, self.counts) == (other.rows, other.counts)
            and bool(((self.first == other.first) & (self.last == other.last)).all())
        )

    def __hash__(self) -> int:
        return hash((self.rows, self.lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return bytes_of((self.first, self.last, self.begins, self.cells))

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.counts)

    @cached_property
    def most(self) -> int:
        """The most rows of a rank: what collectives send of each."""
        return max(self.lengths)

    @cached_property
    def most_spans(self) -> int:
        """The most spans of a rank."""
        return max(self.counts)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank its spans: for where they are few."""
        every = iter(zip(self.first.tolist(), self.last.tolist(), strict=True))
        return tuple(tuple(itertools.islice(every, count)) for count in self.counts)

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' rows, one rank after the other, are the whole sequence in order."""
        return bool((self.last[:-1] <= self.first[1:]).all())

    @cached_property
    def one_by_one(self) -> Sharding:
        """The ranks of as many rows each, where the ranks' rows, one rank after the other, are the
        sequence: one span each."""
        bounds = itertools.pairwise((0, *itertools.accumulate(self.lengths)))
        return Sharding.of_spans(self.rows, [list(joined([span])) for span in bounds])

    def positions(self, rank: int) -> Tensor:
        """The row of the whole sequence of each of a rank's rows: int64 (rows), of the host."""
        before = sum(self.counts[:rank])
        first, last, begins = (
            x[before : before + self.counts[rank]] for x in (self.first, self.last, self.begins)
        )
        at = torch.arange(self.lengths[rank], **ON_HOST) + sum(self.lengths[:rank])
        return at + (first - begins).repeat_interleave(last - first)

    def orders(self, device: torch.device, padded: bool = False) -> tuple[Tensor, Tensor]:
        """The row of the sequence of each row of all ranks, one rank after the other, and the
        inverse: where each row of the sequence is then. int32, on a device, which the host does not
        wait for. With `padded` each rank has as many rows as the longest, the last of them any."""
        return for_stream(_orders, self, device)[padded]

    def of_rank(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's rows of the whole sequence x; a view where they are one span."""
        if self.counts[rank] > FEW_SPANS:
            order, _ = self.orders(x.device)
            return x.index_select(dim, order.split(self.lengths)[rank])
        parts = [x.narrow(dim, a, b - a) for a, b in self.spans[rank]]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def nested(self, inner: int) -> Sharding:
        """The rows of n · inner ranks: rank (i, j) has part j of what rank i has here."""
        return _nested(self, inner)


@kept(most_bytes=32 << 20)
def _orders(
    shards: Sharding, device: torch.device, stream: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Without padding, and padded."""
    starts = [0, *itertools.accumulate(shards.lengths)][:-1]
    paddings = [rank * shards.most - start for rank, start in enumerate(starts)]
    of_spans = shards.first - shards.begins, shards.last - shards.first
    host = torch.cat([*of_spans, numbers(paddings), numbers(shards.lengths)])
    sizes = [x.numel() for x in of_spans] + 2 * [shards.ranks]
    shift, size, padding, length = moved(host.int(), device).split(sizes)
    count = shards.rows  # or else the device would be asked
    at = torch.arange(count, dtype=torch.int32, device=device)
    rows = at + shift.repeat_interleave(size, output_size=count)
    index = rows.long()
    found = rows, torch.empty_like(rows).scatter_(0, index, at)
    if count == shards.ranks * shards.most:
        return found, found
    at = at + padding.repeat_interleave(length, output_size=count)
    every = rows.new_zeros(shards.ranks * shards.most).scatter_(0, at.long(), rows)
    return found, (every, torch.empty_like(rows).scatter_(0, index, at))


@kept()
def _nested(shards: Sharding, inner: int) -> Sharding:
    starts = (0, *itertools.accumulate(shards.lengths))
    cuts = [
        start + edge
        for start, length in zip(starts, shards.lengths, strict=False)
        for edge in edges(length, inner, equal=False)[:-1]
    ]
    begins, new, firsts = shards.begins.long(), numbers([]), len(cuts) * [0]
    if starts[-1] > 0:
        # A cut within a span makes two of it. Where the cuts are among all these parts:
        of_cuts = torch.searchsorted(begins, numbers(cuts), right=True) - 1
        inserted: dict[int, int] = {}
        for i, (cut, span, begin) in enumerate(
            zip(cuts, of_cuts.tolist(), begins[of_cuts].tolist(), strict=True)
        ):
            if begin < cut < starts[-1]:
                inserted.setdefault(cut, span + 1 + len(inserted))
            firsts[i] = inserted.get(cut, span + (cut == starts[-1]) + len(inserted))
        new = numbers(list(inserted.values()))
    span = torch.arange(len(begins) + len(new), **ON_HOST)
    span -= torch.zeros_like(span).index_fill_(0, new, 1).cumsum(0)
    at = begins[span]
    at[new] = numbers(list(inserted)) if len(new) else new
    size = torch.cat([at[1:], numbers(starts[-1:])]) - at if len(at) else at
    first = shards.first[span] + at - begins[span]
    counts = [b - a for a, b in itertools.pairwise((*firsts, len(at)))]
    found = Sharding(shards.rows, first, first + size, counts)
    found.outer = shards
    return found


def cells_of(shards: Sharding, documents: Documents) -> Cells:
    """The parts of these documents that each rank has."""
    if shards.cells is not None and shards.documents == documents:
        return shards.cells.map(lambda x: x[..., : len(documents) - 1])
    return _cut_by_documents(shards, documents)


@kept()
def _cut_by_documents(shards: Sharding, documents: Documents) -> Cells:
    """Every span by every document: for layouts whose ranks have few spans."""
    most = shards.most_spans
    places = [rank * most + i for rank, count in enumerate(shards.counts) for i in range(count)]
    starts = numbers([0, *itertools.accumulate(shards.lengths)][:-1])
    of_spans = torch.stack([shards.first, shards.last, shards.begins]).long()
    dense = torch.zeros(3, shards.ranks * most, **ON_HOST).index_copy_(1, numbers(places), of_spans)
    first, last, begins = dense.view(3, shards.ranks, most, 1)
    low = torch.maximum(first, documents.offsets[:-1])
    high = torch.minimum(last, documents.offsets[1:])
    at = begins - starts.view(-1, 1, 1) + low - first
    return Cells(low, torch.maximum(low, high), at).map(lambda x: x.to(dtype_of(shards.rows)))


def sharding(
    rows: int, ranks: int, layout: str = "zigzag", documents: Sequence[int] | None = None
) -> Sharding:
    """The rows of every rank in a layout.

    Args:
        rows: S, of the whole sequence.
        ranks: n.
        layout: one of LAYOUTS.
        documents: cu_seqlens of the whole packed sequence, for "document_zigzag". Rows that belong
            to no document are cut as one more.

    Raises:
        ValueError: an unknown layout, or one that lacks the documents.
    """
    if layout not in LAYOUTS:
        refuse("layout", " or ".join(map(repr, LAYOUTS)), repr(layout))
    if layout == "document_zigzag" and documents is None:
        refuse("cu_seqlens", "given with layout='document_zigzag'", None)
    if layout != "document_zigzag" or ranks == 1:
        return _of_one_sequence(rows, ranks, layout)
    assert documents is not None
    return _of_documents(rows, ranks, documents_of(documents))


@kept()
def _of_one_sequence(rows: int, ranks: int, layout: str) -> Sharding:
    if layout == "contiguous" or ranks == 1:
        spans = [[chunk] for chunk in _cut((0, rows), ranks, equal=False)]
    else:
        cut = _cut((0, rows), 2 * ranks, equal=True)
        spans = [[cut[i] for i in (r, 2 * ranks - 1 - r)] for r in range(ranks)]
    return Sharding.of_spans(rows, [list(joined(x)) for x in spans])


@kept()
def _of_documents(rows: int, ranks: int, documents: Documents) -> Sharding:
    bounds = documents.offsets
    if documents[-1] < rows:
        bounds = torch.cat([bounds, numbers([rows])])
    chunks = torch.arange(2 * ranks + 1, **ON_HOST)[:, None]
    # Rounded down; exact, since these are below 2^53. (Integers take three times as long.)
    cuts = (chunks * bounds.diff()).double().div_(2 * ranks).to(dtype_of(rows))
    cuts += bounds[:-1]
    of_ranks = numbers([chunk for r in range(ranks) for chunk in (r, 2 * ranks - 1 - r)])
    shape = ranks, 2, len(bounds) - 1
    first, last = (cuts.index_select(0, of_ranks + i).view(shape) for i in (0, 1))
    found = Sharding(rows, *_joined_cells(first, last))
    size = (last - first).view(ranks, -1)
    at = (size.cumsum(1, dtype=size.dtype) - size).view(shape)
    found.documents, found.cells = documents, Cells(first, last, at)
    return found


def _joined_cells(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """The spans of every rank, and how many each has, from parts of documents (ranks, 2, documents)
    as `joined` makes them. Two adjacent parts of one document become one there, too."""
    a, b = first.flatten(), last.flatten()
    place = torch.arange(len(a), **ON_HOST)
    ends = torch.arange(1, len(first) + 1, **ON_HOST) * first[0].numel()
    has_rows = a < b
    if not has_rows.all():
        place = has_rows.nonzero().squeeze(1)
        a, b = a.index_select(0, place), b.index_select(0, place)
        ends = torch.searchsorted(place, ends)
    begins = torch.ones(len(place) + 1, dtype=torch.bool, device="cpu")  # a span; one more at last
    begins[1:-1] = b[:-1] != a[1:]
    begins[ends] = True  # of the next rank
    if not begins.all():
        pairs = (~begins).nonzero().squeeze(1)
        x, y = place[pairs - 1], place[pairs]
        same = (y - x) % first.shape[2] == 0
        last.view(-1)[x[same]] = last.view(-1)[y[same]]
        first.view(-1)[y[same]] = last.view(-1)[y[same]]
        a, b = a[begins[:-1]], b[begins[1:]]
        ends = torch.cat([torch.zeros(1, **ON_HOST), begins[:-1].cumsum(0)])[ends]
    return a, b, ends.diff(prepend=ends.new_zeros(1)).tolist()


def joined(spans: Sequence[Span]) -> Iterator[Span]:
    """The same rows in the same order, without empty spans, and with adjacent ones as one."""
    held: Span | None = None
    for a, b in spans:
        if a == b:
            continue
        if held is not None and held[1] == a:
            held = (held[0], b)
            continue
        if held is not None:
            yield held
        held = (a, b)
    if held is not None:
        yield held
