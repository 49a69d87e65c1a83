"""Packed documents as calls: as many in one call of packed sequences as can be.

Each step of a training has new documents, and the host must not be late with its kernels. So there
is no loop over documents here: each line is about all pairs of a part of the queries' documents and
a part of the keys', as tensors of the host. What is looked at one by one are chains of such pairs,
a few for each step of a ring.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .calls import Call, Mask, Packed
from .kept import kept
from .on_device import Numbers, numbers
from .sharding import Cells, Sharding, cells_of, dtype_of


class _Pairs(NamedTuple):
    """Parts of the queries' documents, each with the parts of the same document in several sources
    of keys: (sources, m, parts of the queries). Parts are in the order of rows."""

    q: Tensor
    """The first row of the rank's queries that sees a key of the pair."""

    q_end: Tensor
    k: Tensor
    """The first row of the source's keys that a query sees."""

    k_end: Tensor
    left: Tensor | None
    right: Tensor | None
    """The window, as the op has it, and one more: 0 is unlimited. None: all are."""

    own: Tensor
    """bool: the keys at the queries' own positions are among the keys."""

    aligned: Tensor
    """bool: the last query and the last key have one position."""

    sees: Tensor
    """bool: there is anything to compute."""

    def map(self, function: Callable[[Tensor], Tensor]) -> _Pairs:
        """The same of each tensor."""
        found: Any = (None if x is None else function(x) for x in self)
        return _Pairs(*found)


def _visible(q: Cells, k: Cells, mask: Mask) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The queries [a, b) that see a key, the keys [c, d) that one of them sees, and whether there
    are any: of parts of one document each."""
    a, b, c, d = q.first, q.last, k.first, k.last
    if mask.right is not None:
        a = torch.maximum(a, c - mask.right)
    if mask.left is not None:
        b = torch.minimum(b, d + mask.left)
    sees = a < b
    if mask.left is not None:
        c = torch.maximum(c, a - mask.left)
    if mask.right is not None:
        d = torch.minimum(d, b + mask.right)
    return a, b, c, d, sees & (c < d)


def _pairs(q: Cells, k: Cells, mask: Mask, own: int | None) -> _Pairs:
    """Of parts (…) of the queries, and (sources, m, …) of the keys of the same documents; `own` is
    the source that may have the keys at the queries' own positions."""
    a, b, c, d, sees = _visible(q, k, mask)
    shift = d - b
    aligned = shift == 0

    def side(wanted: int | None, moved: Tensor, most: Tensor) -> Tensor | None:
        """A side that hides nothing is unlimited, which spares the kernel its mask. Of aligned
        pairs all have the mask's own, so that they can be in one call."""
        if wanted is None:
            return None
        limit = moved + (wanted + 1)
        return limit * (aligned | (limit < most))

    left, right = side(mask.left, shift, d - c), side(mask.right, -shift, b - a)
    is_own = torch.zeros_like(sees)
    if own is not None:
        is_own[own] = (k.first[own] <= q.first) & (q.last <= k.last[own])
    at_q, at_k = q.at - q.first, k.at - k.first
    found = _Pairs(at_q + a, at_q + b, at_k + c, at_k + d, left, right, is_own, aligned, sees)
    return found.map(lambda x: x.expand_as(sees).flatten(2))


def _chained(pairs: _Pairs) -> Tensor:
    """Which pairs follow the one before, of the same parts of documents, in one call: bool
    (sources, m, parts - 1).

    A pair goes to the first call, of those with its window, that ends where the pair begins. That
    is the call of the pair before, unless one of a lower index, which ends there too, is free.
    """
    x, y = pairs.map(lambda x: x[..., :-1]), pairs.map(lambda x: x[..., 1:])
    chained = x.sees & y.sees & (x.own == y.own) & (x.q_end == y.q) & (x.k_end <= y.k)
    for before, after in ((x.left, y.left), (x.right, y.right)):
        if before is not None:
            chained &= before == after
    neither = ~(x.sees | y.sees)
    for i in range(1, pairs.sees.shape[1]):
        chained[:, i] &= (chained[:, :i] | neither[:, :i]).all(1)
    return chained


_INT32: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}


def _numbers(values: Sequence[int]) -> Tensor:
    return numbers(values, torch.int32)


class _Chain(NamedTuple):
    """Pairs that follow one another in one call."""

    group: tuple[int, bool, int, int]
    """The source, whether the keys are others than the queries' own, and the window: what is one
    in a call."""

    first: int
    """The first pair, all of them counted one after the other."""

    pairs: int
    q: tuple[int, int]
    k: tuple[int, int]


def _chains(pairs: _Pairs, cut: bool) -> list[_Chain]:
    """In the order of their first pairs: those of one call are in the order of their queries.
    `cut`: not all queries of a part see a key; then each pair is a chain."""
    first = last = pairs.sees
    if not cut:
        chained, alone = _chained(pairs), torch.zeros_like(first[..., :1])
        first = first & ~torch.cat([alone, chained], -1)
        last = last & ~torch.cat([chained, alone], -1)
    begin, end = (x.flatten().nonzero().squeeze(1) for x in (first, last))
    columns = [
        torch.zeros_like(begin) if x is None else x.flatten().index_select(0, index)
        for index, of in ((begin, (pairs.own, pairs.left, pairs.right, pairs.q, pairs.k)),
                          (end, (pairs.q_end, pairs.k_end))) for x in of
    ]  # fmt: skip
    each = first[0].numel()
    found = [
        _Chain((i // each, not own, left - 1, right - 1), i, j - i + 1, (q, q_end), (k, k_end))
        for i, j, own, left, right, q, k, q_end, k_end in zip(
            *(x.tolist() for x in (begin, end, *columns)), strict=True
        )
    ]
    return sorted(found, key=lambda x: (*x.group[:2], x.q[: 1 + cut], x.k))


def _runs(chains: Sequence[_Chain]) -> list[list[_Chain]]:
    """Chains that follow one another in one call: each goes to the first that it can follow."""
    runs: list[list[_Chain]] = []
    ends: dict[tuple[object, int], list[int]] = defaultdict(list)  # runs, by group and last query
    for chain in chains:
        waiting = ends[chain.group, chain.q[0]]
        found = next((i for i in waiting if runs[i][-1].k[1] <= chain.k[0]), len(runs))
        if found == len(runs):
            runs.append([])
        else:
            waiting.remove(found)
        runs[found].append(chain)
        insort(ends[chain.group, chain.q[1]], found)
    return runs


def _calls(pairs: _Pairs, runs: list[list[_Chain]]) -> list[Call]:
    """A call for each run; all have one tensor of numbers."""
    chains = list(itertools.chain(*runs))
    edges = [0, *itertools.accumulate(sum(chain.pairs for chain in run) for run in runs)]
    count, width = edges[-1], edges[-1] + len(runs)
    # Which of all pairs are in the calls, one call after the other.
    sizes = _numbers([chain.pairs for chain in chains])
    firsts = _numbers([chain.first for chain in chains])
    ends = sizes.cumsum(0, dtype=torch.int32)
    skipped = (firsts - ends + sizes).repeat_interleave(sizes, output_size=count)
    place = torch.arange(count, **_INT32) + skipped
    q, k, k_end = (
        x.flatten().index_select(0, place).int() for x in (pairs.q, pairs.k, pairs.k_end)
    )
    aligned = pairs.aligned.flatten().index_select(0, place)
    # Offsets from the first rows of each call, and then its number of rows.
    at = _numbers(edges)
    number = torch.arange(len(runs), **_INT32)
    call = number.repeat_interleave(at.diff() + 1, output_size=width)
    source = (torch.arange(width, **_INT32) - call).clamp_(max=count - 1)
    spans = [(run[0].q[0], run[-1].q[1], run[0].k[0], run[-1].k[1]) for run in runs]
    bounds = torch.stack([_numbers(x) for x in zip(*spans, strict=True)])
    found = torch.empty(2 * width + count, **_INT32)
    for i, x in enumerate((q, k)):
        begin, end = bounds[2 * i : 2 * i + 2]
        out = found[i * width : (i + 1) * width]
        torch.sub(x.index_select(0, source), begin.index_select(0, call), out=out)
        out.index_copy_(0, (at[1:] + number).long(), end - begin)
    torch.sub(k_end, k, out=found[2 * width :])
    # How many keys of each call are used, and how many of its pairs are aligned.
    used, alike = (
        x.cumsum(0, dtype=torch.int32).index_select(0, at[1:] - 1).diff(prepend=at[:1])
        for x in (found[2 * width :], aligned)
    )
    complete = (used == bounds[3] - bounds[2]).tolist()
    all_aligned = (alike == at.diff()).tolist()
    every = Numbers(found)
    return [
        Call(
            (span[0], span[1]),
            (span[2], span[3]),
            run[0].group[2:],
            not run[0].group[1],
            _packed(every, width, i, edges[i], edges[i + 1], complete[i]),
            aligned=all_aligned[i],
        )
        for i, (run, span) in enumerate(zip(runs, spans, strict=True))
    ]


def _packed(
    every: Numbers, width: int, number: int, first: int, last: int, complete: bool
) -> Packed | None:
    """Where the numbers of a call of the pairs [first, last) are; None for one pair."""
    if last - first == 1:
        return None
    a, b = first + number, last + number + 1
    used = None if complete else slice(2 * width + first, 2 * width + last)
    return Packed(every, slice(a, b), slice(width + a, width + b), used)


def _plan(q: Cells, k: Cells, mask: Mask, own: int | None) -> tuple[_Pairs, list[list[_Chain]]]:
    """All pairs, and those of each call, sources one after the other.

    Args:
        q: the rank's (parts, documents).
        k: (sources, parts, documents).
        mask: with the documents.
        own: the source that has the rank's own keys, if one does.
    """
    has_rows = q.first < q.last
    if has_rows.all():
        k = k.map(lambda x: x[:, :, None])
    else:
        documents = has_rows.nonzero()[:, 1]
        k = k.map(lambda x: x.index_select(2, documents))
        q = q.map(lambda x: x[has_rows])
    pairs = _pairs(q, k, mask, own)
    # Whether a pair sees anything, but not all of its queries do.
    cut = mask.right is not None and (pairs.sees & (pairs.q != q.at.flatten())).any()
    if mask.left is not None:
        ends = q.at + q.last - q.first
        cut = cut or (pairs.sees & (pairs.q_end != ends.flatten())).any()
    return pairs, _runs(_chains(pairs, bool(cut)))


def _of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> tuple[_Pairs, list[list[_Chain]]]:
    """As `_plan`, against the keys that each of these ranks holds."""
    cells = _cells(shards, mask)
    index = numbers(sources)
    own = sources.index(rank) if rank in sources else None
    q, k = cells.map(lambda x: x[rank]), cells.map(lambda x: x.index_select(0, index))
    return _plan(q, k, mask, own)


def of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> list[tuple[Call, ...]]:
    """A rank's calls against the keys that each of these ranks holds."""
    pairs, runs = _of_sources(shards, rank, sources, mask)
    found: list[list[Call]] = [[] for _ in sources]
    for run, call in zip(runs, _calls(pairs, runs) if runs else [], strict=True):
        found[run[0].group[0]].append(call)
    return list(map(tuple, found))


def count_calls(shards: Sharding, rank: int, source: int, mask: Mask) -> int:
    """How many they are against the keys of one."""
    return len(_of_sources(shards, rank, [source], mask)[1])


def of_the_whole(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence."""
    cells = _cells(shards, mask)
    offsets = mask.documents_of(shards.rows).offsets.to(cells.first.dtype)
    first, last = offsets[None, None, :-1], offsets[None, None, 1:]
    pairs, runs = _plan(cells.map(lambda x: x[rank]), Cells(first, last, first), mask, 0)
    return tuple(_calls(pairs, runs)) if runs else ()


def _cells(shards: Sharding, mask: Mask) -> Cells:
    """Of the mask's documents, of a type that has room for its sides."""
    cells = cells_of(shards, mask.documents_of(shards.rows))
    most = shards.rows + max(mask.left or 0, mask.right or 0)
    return cells.map(lambda x: x.to(dtype_of(most)))


def ring_steps(shards: Sharding, mask: Mask) -> int:
    """How many steps of a ring see anything."""
    cells, n = _cells(shards, mask), shards.ranks

    def sees(t: int, ranks: range) -> bool:
        index = numbers([(rank - t) % n for rank in ranks])
        q = cells.map(lambda x: x[ranks.start : ranks.stop, :, None])
        k = cells.map(lambda x: x.index_select(0, index)[:, None])
        return bool(_visible(q, k, mask)[-1].any())

    for t in range(n - 1, 0, -1):
        if sees(t, range(1)) or sees(t, range(1, n)):  # the first rank mostly tells
            return t + 1
    return 1


@kept()
def share(rows: int, mask: Mask) -> float:
    """Of the pairs (query, key) of the whole sequence, those that are visible."""
    size = mask.documents_of(rows).offsets.diff()
    pairs = size + _pairs_before(size, mask.left) + _pairs_before(size, mask.right)
    return int(pairs.sum()) / max(rows**2, 1)


def visible_pairs(shards: Sharding, mask: Mask) -> list[int]:
    """How many pairs (query, key) are visible to each rank's queries."""
    documents = mask.documents_of(shards.rows)
    cells = cells_of(shards, documents).map(Tensor.long)
    start, size = documents.offsets[:-1], documents.offsets.diff()
    whole = _pairs_before(size, mask.right)

    def of_first(queries: Tensor) -> Tensor:  # of each document
        after = whole - _pairs_before(size - queries, mask.right)
        return queries + _pairs_before(queries, mask.left) + after

    pairs = of_first(cells.last - start) - of_first(cells.first - start)
    found: list[int] = pairs.flatten(1).sum(1).tolist()
    return found


def _pairs_before(queries: Tensor, side: int | None) -> Tensor:
    """Pairs of documents' first queries with keys before their own, at most `side` for each."""
    if side == 0:
        return queries.new_zeros(())
    if side is None:
        return queries * (queries - 1) >> 1
    inner = queries.clamp(max=side)
    return (inner * (inner - 1) >> 1) + (queries - inner) * side
