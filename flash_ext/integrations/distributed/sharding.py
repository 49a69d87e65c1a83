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
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...ops.checks import refuse
from .on_device import AN_INTEGER, HOST, KeptOnDevices, kept, moved, numbers

LAYOUTS = ("zigzag", "contiguous", "document_zigzag")
"""The names of the layouts; the first is the default."""

FEW_SPANS = 4
"""Of a rank: up to this number are copied one by one. With more, as of packed documents, a pass
over the rows costs less than the host's work for each."""

Span = tuple[int, int]
"""Rows [first, last) of the whole sequence."""


class Documents(tuple[int, ...]):
    """cu_seqlens, numbers of the host."""

    def __init__(self, values: Sequence[int]) -> None:
        offsets = numbers(values)
        self.sizes = offsets.diff()
        """Rows of each: int64 (documents)."""

        self.shortest = int(self.sizes.min()) if len(values) > 1 else 0
        """The rows of the smallest."""

        self.offsets = offsets.to(dtype_of(values[-1] if values else 0))
        """(documents + 1), of `dtype_of`."""

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
        return (AN_INTEGER + 16) * len(self)


@kept()
def _documents(offsets: tuple[int, ...]) -> Documents:
    return Documents(offsets)


def documents_of(offsets: Sequence[int]) -> Documents:
    """One object for equal numbers, while they are in use."""
    return offsets if isinstance(offsets, Documents) else _documents(tuple(offsets))


def dtype_of(rows: int) -> torch.dtype:
    """Of numbers of rows: int32 if that is enough, which is half of the memory to go through."""
    return torch.int32 if rows < 2**30 else torch.int64


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
        parts: (3, ranks, parts), of `dtype_of`. The rows [first, last) of the whole sequence that a
            rank has, one part after the other, and `shift`: row i of the sequence is row i + shift
            of the rank. Ranks have as many parts each, some of them empty.
        lengths: how many rows each rank has.
        outer: if several ranks share what one rank of another Sharding has: that one.
        documents: of a layout by documents, those. Its parts are two of each document, the first
            ones first; rows after the last document, if there are any, are one more.

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> shards = cp.sharding(rows=10, ranks=2)
        >>> shards.lengths, shards.positions(1)
        ((5, 5), tensor([2, 3, 4, 5, 6]))
    """

    outer: Sharding | None = None
    documents: Documents | None = None

    def __init__(self, rows: int, parts: Tensor, lengths: Sequence[int]) -> None:
        self.rows, self.parts, self.lengths = rows, parts, tuple(lengths)

    @staticmethod
    def of_spans(rows: int, spans: Sequence[Sequence[Span]]) -> Sharding:
        """With the spans of each rank, none of them empty."""
        most, parts, lengths = max(1, *map(len, spans)), [], []
        for of_rank in spans:
            *starts, length = itertools.accumulate((b - a for a, b in of_rank), initial=0)
            parts += [(a, b, at - a) for (a, b), at in zip(of_rank, starts, strict=True)]
            parts += (most - len(of_rank)) * [(0, 0, length)]
            lengths.append(length)
        flat = list(itertools.chain(*zip(*parts, strict=True)))
        return Sharding(rows, numbers(flat, dtype_of(rows)).view(3, len(spans), most), lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharding):
            return NotImplemented
        same = (self.rows, self.lengths) == (other.rows, other.lengths)
        return self is other or same and torch.equal(self.parts, other.parts)

    def __hash__(self) -> int:
        return hash((self.rows, self.lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.parts.nbytes

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.lengths)

    @cached_property
    def most(self) -> int:
        """The most rows of a rank: what collectives send of each."""
        return max(self.lengths)

    @property
    def most_spans(self) -> int:
        """How many spans a rank may have."""
        return self.parts.shape[2]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank its spans, none of them empty: for few spans."""
        first, last, _ = self.parts.tolist()
        of_ranks = (zip(*of_rank, strict=True) for of_rank in zip(first, last, strict=True))
        return tuple(tuple((a, b) for a, b in spans if a < b) for spans in of_ranks)

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' rows, one rank after the other, are the whole sequence in order."""
        every = itertools.pairwise(itertools.chain(*self.spans))
        return all(last <= first for (_, last), (first, _) in every)

    @cached_property
    def one_by_one(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank the span that it has of its rows, one rank after the other."""
        bounds = itertools.pairwise((0, *itertools.accumulate(self.lengths)))
        return tuple(tuple(joined([span])) for span in bounds)

    def by(self, documents: Documents) -> bool:
        """Whether this is a layout by these documents, and maybe others after them."""
        own = self.documents
        return own is documents or own is not None and own[: len(documents)] == documents

    def positions(
        self, rank: int, documents: Documents | None = None, device: torch.device = HOST
    ) -> Tensor:
        """The row of the whole sequence of each of a rank's rows, or with documents of its
        document, rows after the last being one more: int64 (rows), on a device."""
        first, last, shift = self.parts[:, rank]
        if documents is not None:
            if documents[-1] < self.rows:
                documents = documents_of((*documents, self.rows))
            starts = documents.offsets
            if self.most_spans > FEW_SPANS:  # each a part of a document
                shift = shift + starts[torch.searchsorted(starts, first, right=True) - 1]
            else:
                first, last, shift = cells_of(self, documents, [rank])[:, 0]
                shift = shift + starts[:-1]
        host = torch.stack([shift, last - first]).long().view(2, -1)
        shift, size = moved(host, device)
        count = self.lengths[rank]  # or else the device would be asked
        shift = shift.repeat_interleave(size, output_size=count)
        return torch.arange(count, dtype=torch.int64, device=device).sub_(shift)

    def orders(self, device: torch.device, padded: bool = False) -> tuple[Tensor, Tensor]:
        """The row of the sequence of each row of all ranks, one rank after the other, and the
        inverse: where each row of the sequence is then. int32, on a device, which the host does not
        wait for. With `padded` each rank has as many rows as the longest, the last of them any."""
        padded = padded and self.rows < self.ranks * self.most
        order, inverse = _orders.on((self, padded), device)
        return order, inverse

    def of_rank(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's rows of the whole sequence x; a view where they are one span."""
        if self.most_spans > FEW_SPANS:
            order, _ = self.orders(x.device)
            before = sum(self.lengths[:rank])
            return x.index_select(dim, order[before : before + self.lengths[rank]])
        parts = [x.narrow(dim, a, b - a) for a, b in self.spans[rank]]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def nested(self, inner: int) -> Sharding:
        """The rows of n · inner ranks: rank (i, j) has part j of what rank i has here."""
        return _nested(self, inner)


def _make_orders(key: tuple[Sharding, bool], device: torch.device) -> tuple[Tensor, ...]:
    """`Sharding.orders`, by it and `padded`."""
    shards, padded = key
    rows, most, (first, last, shift) = shards.rows, shards.most, shards.parts.unbind()
    lengths = shards.ranks * (most,) if padded else shards.lengths
    *starts, count = itertools.accumulate(lengths, initial=0)  # or else the device would be asked
    start = numbers(starts, shift.dtype).view(-1, 1)
    size, shift = last - first, shift + start
    if padded:  # each rank has one part more, of rows after the sequence
        length = numbers(shards.lengths, shift.dtype).view(-1, 1)
        size = torch.cat([size, most - length], 1)
        shift = torch.cat([shift, start + length - rows], 1)
    size, shift = moved(torch.stack([size, shift]).int().view(2, -1), device)
    at = torch.arange(count, dtype=torch.int32, device=device)
    found = at - shift.repeat_interleave(size, output_size=count)
    inverse = torch.empty_like(at).scatter_(0, found.long(), at)[:rows]
    return found.clamp_(max=rows - 1) if padded else found, inverse


_orders = KeptOnDevices(_make_orders, 32 << 20)


@kept()
def _nested(shards: Sharding, inner: int) -> Sharding:
    cuts = torch.stack([numbers(edges(x, inner, equal=False)) for x in shards.lengths])
    low, high = cuts[:, :-1, None], cuts[:, 1:, None]
    first, last, shift = shards.parts[:, :, None]
    parts = [x.clamp(low - shift, high - shift) for x in (first, last)]
    every = torch.stack([*parts, shift - low]).to(shards.parts.dtype)
    found = Sharding(shards.rows, every.flatten(1, 2), cuts.diff().flatten().tolist())
    found.outer = shards
    return found


def cells_of(shards: Sharding, documents: Documents, ranks: Sequence[int]) -> Tensor:
    """The parts of documents that ranks have, as in `Sharding.parts`: (3, ranks, m, documents).
    Along a rank's rows all parts with a lower index of m come first, and of one index the parts of
    earlier documents. Some may be empty."""
    count, parts = len(documents) - 1, shards.parts
    if len(ranks) == 1:
        parts = parts.narrow(1, ranks[0], 1)
    elif list(ranks) != list(range(shards.ranks)):
        parts = parts.index_select(1, numbers(ranks))
    if shards.by(documents):
        return parts.view(3, len(ranks), 2, -1)[..., :count]
    first, last, shift = parts.unsqueeze(3).unbind()
    spans = documents.offsets.unfold(0, count, 1)[:, None, None].clamp(first, last)
    return torch.cat([spans, shift.expand(1, -1, -1, count)])


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

    Examples:
        >>> from flash_ext.integrations import distributed as cp
        >>> cp.sharding(rows=16, ranks=2, layout="zigzag").spans
        (((0, 4), (12, 16)), ((4, 12),))
    """
    if layout not in LAYOUTS:
        refuse("layout", " or ".join(map(repr, LAYOUTS)), repr(layout))
    if layout == "document_zigzag" and documents is None:
        refuse("cu_seqlens", "given with layout='document_zigzag'", None)
    if layout != "document_zigzag" or ranks == 1 or documents is None:
        return _of_one_sequence(rows, ranks, layout)
    return _of_documents(rows, ranks, documents_of(documents))


@kept()
def _of_one_sequence(rows: int, ranks: int, layout: str) -> Sharding:
    if layout == "contiguous" or ranks == 1:
        spans = [[chunk] for chunk in _cut((0, rows), ranks, equal=False)]
    else:
        cut = _cut((0, rows), 2 * ranks, equal=True)
        spans = [[cut[i] for i in (r, 2 * ranks - 1 - r)] for r in range(ranks)]
    return Sharding.of_spans(rows, [joined(x) for x in spans])


@kept()
def _of_documents(rows: int, ranks: int, documents: Documents) -> Sharding:
    if documents[-1] < rows:
        documents = documents_of((*documents, rows))
    if len(documents) <= 2:
        return _of_one_sequence(rows, ranks, "zigzag")
    places, chunks = _chunks(ranks)
    # To be rounded down: halfway between fractions, far from what floating-point numbers round.
    starts = documents.offsets[:-1].double().add_(1 / (4 * ranks))
    cuts = torch.addcmul(starts, places, documents.sizes.double()).to(dtype_of(rows))
    parts = cuts.new_empty((3, ranks, 2 * len(documents) - 2))
    torch.index_select(cuts, 0, chunks, out=parts[:2].view(4 * ranks, -1))
    first, last, shift = parts.unbind()
    ends = torch.sub(last, first, out=shift).cumsum(1, dtype=parts.dtype)
    torch.sub(ends, last, out=shift)
    found = Sharding(rows, parts, ends[:, -1].tolist())
    found.documents = documents
    return found


@kept()
def _chunks(ranks: int) -> tuple[Tensor, Tensor]:
    """Where the chunks of a document of one row meet, (2 ranks + 1, 1); and at which of these
    places each rank's two chunks begin, and then where they end: (2 * ranks * 2)."""
    first = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    places = torch.arange(2 * ranks + 1, dtype=torch.float64, device=HOST).div_(2 * ranks)
    return places.view(-1, 1), numbers([*first, *(chunk + 1 for chunk in first)])


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same rows in the same order, without empty spans, and with adjacent ones as one."""
    found: list[Span] = []
    for a, b in spans:
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        elif a < b:
            found.append((a, b))
    return found
