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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ...ops.checks import refuse

LAYOUTS = ("zigzag", "contiguous", "document_zigzag")
"""The names of the layouts; the first is the default."""

Span = tuple[int, int]
"""Rows [first, last) of the whole sequence."""


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


@dataclass(frozen=True)
class Sharding:
    """The rows of every rank."""

    rows: int
    """S, of the whole sequence."""

    spans: tuple[tuple[Span, ...], ...]
    """For each rank its spans, none empty, in the order of its rows."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.spans))

    def __hash__(self) -> int:
        """Found once: caches ask for it in every call, and there may be thousands of spans."""
        return self._hash

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.spans)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many rows each rank holds."""
        return tuple(sum(b - a for a, b in spans) for spans in self.spans)

    @cached_property
    def most(self) -> int:
        """The most rows of a rank: what collectives send of each."""
        return max(self.lengths)

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' rows, one rank after the other, are the whole sequence in order."""
        return all(a <= b for (_, a), (b, _) in itertools.pairwise(itertools.chain(*self.spans)))

    @cached_property
    def _pieces(self) -> list[tuple[int, int, int, int]]:
        """(first global row, rank, first local row, rows) of each span, in the sequence's order."""
        found = []
        for rank, spans in enumerate(self.spans):
            at = 0
            for a, b in spans:
                found.append((a, rank, at, b - a))
                at += b - a
        return sorted(found)

    @cached_property
    def one_by_one(self) -> Sharding:
        """The ranks of as many rows each, where the ranks' rows, one rank after the other, are the
        sequence: one span each."""
        bounds = itertools.pairwise((0, *itertools.accumulate(self.lengths)))
        return Sharding(self.rows, tuple(tuple(joined([span])) for span in bounds))

    def positions(self, rank: int) -> list[int]:
        """The row of the whole sequence of each of a rank's rows."""
        return [row for a, b in self.spans[rank] for row in range(a, b)]

    def of_rank(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's rows of the whole sequence x; a view where they are one span."""
        parts = [x.narrow(dim, a, b - a) for a, b in self.spans[rank]]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Tensor) -> Tensor:
        """The whole sequence (S, …) from all ranks' rows (n, most, …), the rest being padding."""
        if self.in_order and self.rows == self.ranks * self.most:
            return parts.reshape(self.rows, *parts.shape[2:])
        if self.rows == 0:
            return parts.new_empty((0, *parts.shape[2:]))
        return torch.cat([parts[rank, at : at + rows] for _, rank, at, rows in self._pieces])

    def split(self, x: Tensor) -> Tensor:
        """All ranks' rows (n, most, …) of the whole sequence x (S, …), padded with anything."""
        whole = self.rows == self.ranks * self.most
        if self.in_order and whole:
            return x.view(self.ranks, self.most, *x.shape[1:])
        padding = None if whole else x.new_zeros((self.most, *x.shape[1:]))
        parts = []
        for spans, length in zip(self.spans, self.lengths, strict=True):
            parts += [x[a:b] for a, b in spans]
            if padding is not None and length < self.most:
                parts.append(padding[length:])
        return torch.cat(parts).view(self.ranks, self.most, *x.shape[1:])

    def nested(self, inner: int) -> Sharding:
        """The rows of n · inner ranks: rank (i, j) has part j of what rank i has here."""
        return Sharding(
            self.rows,
            tuple(
                tuple(_section(spans, a, b))
                for spans, length in zip(self.spans, self.lengths, strict=True)
                for a, b in itertools.pairwise(edges(length, inner, equal=False))
            ),
        )


def _section(spans: Sequence[Span], first: int, last: int) -> Iterator[Span]:
    """Rows [first, last), counted along the spans."""
    at = 0
    for a, b in spans:
        low, high = max(first - at, 0), min(last - at, b - a)
        if low < high:
            yield a + low, a + high
        at += b - a


@lru_cache(maxsize=256)
def sharding(
    rows: int, ranks: int, layout: str = "zigzag", documents: tuple[int, ...] | None = None
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
    if layout == "contiguous" or ranks == 1:
        spans = [[chunk] for chunk in _cut((0, rows), ranks, equal=False)]
    else:
        bounds = (0, rows) if layout == "zigzag" or documents is None else (*documents, rows)
        cuts = [_cut(document, 2 * ranks, equal=True) for document in itertools.pairwise(bounds)]
        spans = [[cut[i] for i in (r, 2 * ranks - 1 - r) for cut in cuts] for r in range(ranks)]
    return Sharding(rows, tuple(tuple(joined(x)) for x in spans))


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
