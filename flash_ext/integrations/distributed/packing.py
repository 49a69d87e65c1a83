"""Packed documents as calls: as many in one call of packed sequences as can be.

Each step of a training has new documents, and the host must not be late with its kernels. So there
is no loop over documents here: each line is about all pairs of a part of the queries' documents and
a part of the keys', as tensors of the host. There are few lines, since each takes microseconds
however few documents there are. What is looked at one by one are chains of such pairs, a few for
each step of a ring.

A part of the queries and one of the keys are the same rows or have none in common, as a sharding
has them; or the part of the keys is the whole document.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import Call, Mask, Packed
from .kept import kept
from .on_device import HOST, Numbers, numbers
from .sharding import Documents, Sharding, Span, cells_of, documents_of, dtype_of, sharding

Q, K, Q_END, K_END, USED, ALIGNED, ALL_USED, ALL_ALIGNED, SIDES = range(9)
"""What is known of a pair: the rows [Q, Q_END) of the rank's queries that see a key, and [K, K_END)
of the source's keys that a query sees; how many keys that are; whether the last query and the last
key have one position; the sums of both up to this pair; and, from SIDES on, the sides of the window
that the mask limits, as the op has them, and one more: 0 is unlimited. It is -1 throughout where
there is nothing to compute."""


def _visible(q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    """The queries [a, b) that see a key, the keys [c, d) that one of them sees, and whether there
    are none: of parts of one document each."""
    (a, b, _), (c, d, _) = q.unbind(), k.unbind()
    if mask.right is not None:
        a = torch.maximum(a, c - mask.right if mask.right else c)
    if mask.left is not None:
        b = torch.minimum(b, d + mask.left)
        c = torch.maximum(c, a - mask.left)
    if mask.right is not None:
        d = torch.minimum(d, b + mask.right if mask.right else b)
    return a, b, c, d, (a >= b) | (c >= d)


def _pairs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """All pairs of parts (3, …) of the queries and, of the same documents, parts (3, sources, m, …)
    of the keys, both in the order of rows: (fields, pairs)."""
    a, b, c, d, unseen = _visible(q, k, mask)
    shift, used = d - b, d - c
    aligned = (shift == 0).to(shift.dtype)

    def side(wanted: int, moved: Tensor, most: Tensor) -> Tensor:
        """A side that hides nothing is unlimited, which spares the kernel its mask. Of aligned
        pairs all have the mask's own, so that they can be in one call."""
        limit = moved + (wanted + 1)
        return limit * (aligned | (limit < most))

    sides = [] if mask.left is None else [side(mask.left, shift, used)]
    if mask.right is not None:  # a causal mask hides nothing of earlier rows
        sides.append(side(mask.right, -shift, b - a) if mask.right else aligned)
    at_q, at_k = q[2], k[2]
    ends = a + at_q, c + at_k, b + at_q, d + at_k
    every = torch.broadcast_tensors(*ends, used, aligned, used, aligned, *sides)
    found = torch.stack(every).bitwise_or_(-unseen.to(shift.dtype)).flatten(1)
    found[ALL_USED:SIDES].cumsum_(1)
    return found


def _begins(pairs: Tensor, sources: int, m: int, cut: bool) -> Tensor:
    """Which pairs do not follow the one before in a call: bool (pairs + 1), True at last.

    A pair goes to the first call, of those with its window, that ends where the pair begins. That
    is the call of the pair before, unless one of a lower index of m, which ends there too, is free.
    `cut`: in some pairs not all queries see a key; then none is taken to follow another.
    """
    begins = torch.ones(pairs.shape[1] + 1, dtype=torch.bool, device=HOST)
    if cut:
        return begins
    inner = torch.ne(pairs[Q_END, :-1], pairs[Q, 1:], out=begins[1:-1])
    inner |= pairs[K_END, :-1] > pairs[K, 1:]
    for side in range(SIDES, len(pairs)):
        inner |= pairs[side, :-1] != pairs[side, 1:]
    of_parts = begins[:-1].view(sources, m, -1)
    for i in range(1, m):
        of_parts[:, i] |= of_parts[:, :i].any(1)
    return begins


class _Chain(NamedTuple):
    """Pairs that follow one another in one call."""

    group: tuple[int, bool, int, int]
    """The source, whether the keys are others than the queries' own, and the window: what is one
    in a call."""

    first: int
    """The first pair, all of them counted one after the other."""

    pairs: int
    q: Span
    k: Span

    used: int
    """How many keys are."""

    aligned: bool
    """Whether all pairs are."""


def _chains(pairs: Tensor, begins: Tensor, each: int, own: int | None, mask: Mask) -> list[_Chain]:
    """In the order of their first pairs.

    Args:
        pairs: as `_pairs` gives them.
        begins: which of them are first ones, as `_begins` does.
        each: how many are of a source.
        own: the source whose keys are the queries' own in aligned pairs; None: in all pairs.
        mask: of the pairs.
    """
    seen = pairs[Q] >= 0
    ends = [(x & seen).nonzero().squeeze(1) for x in (begins[:-1], begins[1:])]
    places = (x.tolist() for x in ends)
    columns = (pairs.index_select(1, x).T.tolist() for x in ends)
    found = []
    for i, j, x, y in zip(*places, *columns, strict=True):
        source, count = i // each, j - i + 1
        others = own is not None and not (source == own and x[ALIGNED])
        limits = iter(x[SIDES:])
        left, right = (-1 if x is None else next(limits) - 1 for x in (mask.left, mask.right))
        used = y[ALL_USED] - x[ALL_USED] + x[USED]
        aligned = y[ALL_ALIGNED] - x[ALL_ALIGNED] + x[ALIGNED] == count
        group = source, others, left, right
        found.append(_Chain(group, i, count, (x[Q], y[Q_END]), (x[K], y[K_END]), used, aligned))
    return found


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


def _plan(
    q: Tensor, k: Tensor, mask: Mask, rows: int, own: int | None
) -> tuple[Tensor, list[list[_Chain]]]:
    """All pairs, and the chains of each call, sources one after the other.

    Args:
        q: the rank's parts, (3, m, documents).
        k: those of the keys, (3, sources, m, documents).
        mask: with the documents.
        rows: of the whole sequence.
        own: as in `_chains`.
    """
    room = dtype_of(rows + max(mask.left or 0, mask.right or 0))
    q, k = q.to(room), k.to(room)
    has_rows = q[0] < q[1]
    if has_rows.all():
        k = k.unsqueeze(3)
    else:
        place = has_rows.flatten().nonzero().squeeze(1)
        k = k.index_select(3, place % q.shape[2])
        q = q.flatten(1).index_select(1, place)
    _, sources, m, *_ = k.shape
    pairs = _pairs(q, k, mask)
    if pairs.shape[1] == 0:
        return pairs, []
    cut = False
    if mask.left or mask.right:
        fewer = (pairs[Q_END] - pairs[Q]).view(sources * m, -1) < (q[1] - q[0]).flatten()
        cut = bool((fewer.flatten() & (pairs[Q] >= 0)).any())
    begins = _begins(pairs, sources, m, cut)
    chains = _chains(pairs, begins, pairs.shape[1] // sources, own, mask)
    return pairs, _runs(sorted(chains, key=lambda x: (*x.group[:2], x.q[: 1 + cut], x.k)))


def _calls(pairs: Tensor, runs: list[list[_Chain]]) -> list[Call]:
    """A call for each run; all have one tensor of numbers: cu_seqlens_q of every call, then
    cu_seqlens_k and seqused_k, each with one number more than pairs."""
    if not runs:
        return []
    count, pieces, edges = pairs.shape[1], [], [0]
    for run in runs:
        at, q, k = edges[-1], run[0].q[0], run[0].k[0]
        for chain in run:
            pieces.append((chain.pairs, chain.first - at, q, k))
            at += chain.pairs
        # Then the ends of the last pair. What is its number of used keys nobody reads.
        pieces.append((1, Q_END * count + run[-1].first + run[-1].pairs - 1 - at, q, k))
        edges.append(at + 1)
    width = edges[-1]
    sizes, *of_pieces = zip(*pieces, strict=True)
    piece = torch.repeat_interleave(numbers(sizes), output_size=width)
    skip, *firsts = (numbers(x, pairs.dtype).index_select(0, piece) for x in of_pieces)
    place = skip.add_(torch.arange(width, dtype=pairs.dtype, device=HOST))
    index = torch.cat([place + field * count for field in (Q, K, USED)])
    found = pairs.view(-1).index_select(0, index)
    for x, first in zip(found.view(3, -1).unbind(), firsts, strict=False):
        x -= first
    every = Numbers(found.int())
    bounds = zip(runs, itertools.pairwise(edges), strict=True)
    return [_call(every, width, run, *of_run) for run, of_run in bounds]


def _call(every: Numbers, width: int, run: list[_Chain], first: int, last: int) -> Call:
    """Of a run, whose numbers are [first, last) of each `width`."""
    q, k = (run[0].q[0], run[-1].q[1]), (run[0].k[0], run[-1].k[1])
    packed = None
    if last - first > 2:  # not of one pair alone
        complete = sum(chain.used for chain in run) == k[1] - k[0]
        used = None if complete else slice(2 * width + first, 2 * width + last - 1)
        packed = Packed(every, slice(first, last), slice(width + first, width + last), used)
    _, others, *window = run[0].group
    aligned = all(chain.aligned for chain in run)
    return Call(q, k, (window[0], window[1]), not others, packed, aligned=aligned)


@kept()
def _of_sources(
    shards: Sharding, rank: int, sources: tuple[int, ...], mask: Mask
) -> list[tuple[Call, ...]]:
    """`of_sources`, of any documents."""
    cells = cells_of(shards, mask.documents_of(shards.rows), [rank, *sources])
    own = sources.index(rank) if rank in sources else len(sources)
    pairs, runs = _plan(cells[:, 0], cells[:, 1:], mask, shards.rows, own)
    found: list[list[Call]] = [[] for _ in sources]
    for run, call in zip(runs, _calls(pairs, runs), strict=True):
        found[run[0].group[0]].append(call)
    return list(map(tuple, found))


@kept()
def _of_the_whole(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """`of_the_whole`, of any documents."""
    documents = mask.documents_of(shards.rows)
    q = cells_of(shards, documents, [rank])[:, 0]
    pairs, runs = _plan(q, documents.parts[:, None, None], mask, shards.rows, None)
    return tuple(_calls(pairs, runs))


def _form(shards: Sharding, mask: Mask) -> tuple[Sharding, Mask] | None:
    """Two documents whose plans have the form of these documents' plans, or None.

    If every rank has rows of both its chunks of each document, and there is no window, plans differ
    in their numbers alone: in each call, what is of one document and the next is of all of them.
    Each chunk of the two documents is a row.
    """
    documents, chunks = shards.documents, 2 * shards.ranks
    if documents is None or documents.shortest < chunks or documents != mask.documents:
        return None
    if mask.left is not None or mask.right:
        return None
    two = documents_of((0, chunks, 2 * chunks))
    return sharding(two[-1], shards.ranks, "document_zigzag", two), replace(mask, documents=two)


class _Offsets:
    """Offsets of the chunks that ranks have of each document, where plans have a `_form`."""

    def __init__(self, parts: Tensor) -> None:
        """`parts`: (3, ranks, 2 · documents), of a sharding."""
        _, last, shift = parts.unbind()
        self.documents = last.shape[1] // 2
        both = torch.cat([last.new_zeros(len(last), 1), last + shift], 1)
        second = both[:, self.documents :]
        self.numbers = torch.cat([both, second - second[:, :1]], 1)
        """Of both, and of the second ones counted from their first row: (ranks, numbers)."""

        self.edges: list[list[int]] = both[:, :: self.documents].tolist()
        """For each rank where the first and the second ones begin and end, (3)."""

    def of(self, rank: int, span: Span) -> tuple[Span, slice]:
        """The rows that are `span` in the plan of two documents, and which numbers are theirs."""
        first, last = (x // 2 for x in span)
        begin = rank * self.numbers.shape[1] + first * (2 * self.documents + 1)
        rows = self.edges[rank][first], self.edges[rank][last]
        return rows, slice(begin, begin + (last - first) * self.documents + 1)


def of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> list[tuple[Call, ...]]:
    """A rank's calls against the keys that each of these ranks holds."""
    form = _form(shards, mask)
    if form is None:
        return _of_sources(shards, rank, tuple(sources), mask)
    offsets = _Offsets(shards.parts)
    every = Numbers(offsets.numbers.int().view(-1))

    def scaled(call: Call, source: int) -> Call:
        (q, of_q), (k, of_k) = offsets.of(rank, call.q), offsets.of(source, call.k)
        return call._replace(q=q, k=k, packed=Packed(every, of_q, of_k, None))

    steps = zip(sources, _of_sources(form[0], rank, tuple(sources), form[1]), strict=True)
    return [tuple(scaled(call, source) for call in calls) for source, calls in steps]


def _of_all_rows(documents: Documents, mask: Mask) -> Call:
    """All queries with all keys: the documents as they are."""
    window = (-1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right)
    rows, every = (0, documents[-1]), slice(0, len(documents))
    packed = Packed(Numbers(documents.offsets.int()), every, every, None)
    return Call(rows, rows, window, True, packed)


def of_the_whole(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence."""
    form, documents = _form(shards, mask), mask.documents_of(shards.rows)
    if shards.ranks == 1 and documents.shortest > 0 and len(documents) > 2:
        return (_of_all_rows(documents, mask),)
    if form is None:
        return _of_the_whole(shards, rank, mask)
    parts = shards.parts[:, rank : rank + 1]
    offsets, count = _Offsets(parts), len(documents) - 1
    # Of both chunks' calls the documents' first rows, the last key's end, and the keys of each.
    first, last, _ = documents.parts.unbind()
    ends = (last if mask.right is None else parts[1].view(2, -1)).expand(2, -1)
    keys = torch.cat([first.expand(2, -1), ends[:, -1:], ends - first], 1)
    every = Numbers(torch.cat([offsets.numbers.view(-1), keys.view(-1)]).int())
    last_keys = keys[:, count].tolist()

    def scaled(call: Call) -> Call:
        q, of_q = offsets.of(0, call.q)
        half = call.q[0] // 2
        begin = offsets.numbers.numel() + half * keys.shape[1]
        end = begin + count + 1
        assert call.packed is not None
        used = None if call.packed.used is None else slice(end, end + count)
        packed = Packed(every, of_q, slice(begin, end), used)
        return call._replace(q=q, k=(0, last_keys[half]), packed=packed)

    return tuple(map(scaled, _of_the_whole(form[0], rank, form[1])))


def count_calls(shards: Sharding, rank: int, source: int, mask: Mask) -> int:
    """How many they are against the keys of one."""
    shards, mask = _form(shards, mask) or (shards, mask)
    return len(_of_sources(shards, rank, (source,), mask)[0])


def ring_steps(shards: Sharding, mask: Mask) -> int:
    """How many steps of a ring see anything."""
    cells = cells_of(shards, mask.documents_of(shards.rows), range(shards.ranks))
    cells = cells.to(dtype_of(shards.rows + max(mask.left or 0, mask.right or 0)))
    for t in range(shards.ranks - 1, 0, -1):
        unseen = _visible(cells[:, :, None], cells.roll(t, 1)[:, :, :, None], mask)[-1]
        if not unseen.all():
            return t + 1
    return 1


@kept()
def share(rows: int, mask: Mask) -> float:
    """Of the pairs (query, key) of the whole sequence, those that are visible."""
    size = mask.documents_of(rows).sizes
    pairs = size + _pairs_before(size, mask.left)
    if mask.right != 0:
        pairs += _pairs_before(size, mask.right)
    return int(pairs.sum()) / max(rows**2, 1)


def visible_pairs(shards: Sharding, mask: Mask) -> list[int]:
    """How many pairs (query, key) are visible to each rank's queries."""
    documents = mask.documents_of(shards.rows)
    cells = cells_of(shards, documents, range(shards.ranks))
    # Of each document, queries before the part and up to its end; and pairs of those, less the
    # pairs of all queries with keys after their own.
    queries = cells[:2].long() - documents.parts[0]
    pairs = queries + _pairs_before(queries, mask.left)
    if mask.right != 0:
        pairs -= _pairs_before(documents.sizes - queries, mask.right)
    found: list[int] = (pairs[1] - pairs[0]).flatten(1).sum(1).tolist()
    return found


def _pairs_before(queries: Tensor, side: int | None) -> Tensor:
    """Pairs of documents' first queries with keys before their own, at most `side` for each."""
    if side is None:
        return queries * (queries - 1) >> 1
    inner = queries.clamp(max=side)
    return (inner * (inner - 1) >> 1) + (queries - inner) * side
