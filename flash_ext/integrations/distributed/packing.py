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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .calls import Call, Mask, Packed
from .kept import kept
from .on_device import HOST, Numbers, numbers
from .sharding import Sharding, Span, cells_of, dtype_of

Q, K, Q_END, K_END, USED, ALIGNED, ALL_USED, ALL_ALIGNED, SIDES = range(9)
"""What is known of a pair: the rows [Q, Q_END) of the rank's queries that see a key, and [K, K_END)
of the source's keys that a query sees; how many keys that are; whether the last query and the last
key have one position; the sums of both up to this pair; and, from SIDES on, the sides of the window
that the mask limits, as the op has them, and one more: 0 is unlimited. It is -1 throughout where
there is nothing to compute."""


def _visible(q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    """The queries [a, b) that see a key, the keys [c, d) that one of them sees, and whether there
    are none: of parts of one document each."""
    (a, b, _), (c, d, _) = q, k
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
    ends = a + q[2], c + k[2], b + q[2], d + k[2]
    every = torch.broadcast_tensors(*ends, used, aligned, used, aligned, *sides)
    found = torch.stack(every).masked_fill_(unseen, -1).flatten(1)
    found[ALL_USED:SIDES].cumsum_(1)
    return found


def _begins(pairs: Tensor, sources: int, m: int) -> Tensor:
    """Which pairs do not follow the one before in a call: bool (pairs + 1), True at last.

    A pair goes to the first call, of those with its window, that ends where the pair begins. That
    is the call of the pair before, unless one of a lower index of m, which ends there too, is free.
    """
    begins = torch.ones(pairs.shape[1] + 1, dtype=torch.bool, device=HOST)
    before, after = pairs[:, :-1].unbind(), pairs[:, 1:].unbind()
    inner = torch.ne(before[Q_END], after[Q], out=begins[1:-1])
    inner |= before[K_END] > after[K]
    for x, y in zip(before[SIDES:], after[SIDES:], strict=True):
        inner |= x != y
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
    ends = begins.unfold(0, pairs.shape[1], 1) & (pairs[Q] >= 0)
    index = ends.nonzero()[:, 1]
    columns, places = pairs.index_select(1, index).T.tolist(), index.tolist()
    half = len(places) // 2
    found = []
    for i, j, x, y in zip(
        places[:half], places[half:], columns[:half], columns[half:], strict=True
    ):
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
    # Where not all queries of a pair see a key, each pair is a chain.
    every = torch.ones(pairs.shape[1] + 1, dtype=torch.bool, device=HOST)
    begins = every if cut else _begins(pairs, sources, m)
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
            pieces.append((chain.first - at, chain.pairs, q, k))
            at += chain.pairs
        # Then the ends of the last pair. What is its number of used keys nobody reads.
        pieces.append((Q_END * count + run[-1].first + run[-1].pairs - 1 - at, 1, q, k))
        edges.append(at + 1)
    width = edges[-1]
    skips, sizes, *firsts = zip(*pieces, strict=True)
    places = (skip + field * count for field in (Q, K, USED) for skip in skips)
    small = numbers([*places, *itertools.chain(*firsts), *(len(skips) * [0])], pairs.dtype)
    wide = small.view(6, -1).repeat_interleave(numbers(sizes), 1, output_size=width)
    index = wide[:3] + torch.arange(width, dtype=pairs.dtype, device=HOST)
    found = pairs.view(-1).index_select(0, index.view(-1)).sub_(wide[3:].view(-1))
    every = Numbers(found.int())
    return [
        _call(every, width, run, *edge)
        for run, edge in zip(runs, itertools.pairwise(edges), strict=True)
    ]


def _call(every: Numbers, width: int, run: list[_Chain], first: int, last: int) -> Call:
    """Of a run, whose numbers are [first, last) of each `width`."""
    q, k = ((getattr(run[0], x)[0], getattr(run[-1], x)[1]) for x in "qk")
    packed = None
    if last - first > 2:  # not of one pair alone
        complete = sum(chain.used for chain in run) == k[1] - k[0]
        used = None if complete else slice(2 * width + first, 2 * width + last - 1)
        packed = Packed(every, slice(first, last), slice(width + first, width + last), used)
    _, others, *window = run[0].group
    aligned = all(chain.aligned for chain in run)
    return Call(q, k, (window[0], window[1]), not others, packed, aligned=aligned)


def _of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> tuple[Tensor, list[list[_Chain]]]:
    """As `_plan`, against the keys that each of these ranks holds."""
    documents = mask.documents_of(shards.rows)
    # Of the rank itself too: the first.
    cells = cells_of(shards, documents, [rank, *sources])
    own = sources.index(rank) if rank in sources else len(sources)
    return _plan(cells[:, 0], cells[:, 1:], mask, shards.rows, own)


def of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> list[tuple[Call, ...]]:
    """A rank's calls against the keys that each of these ranks holds."""
    pairs, runs = _of_sources(shards, rank, sources, mask)
    found: list[list[Call]] = [[] for _ in sources]
    for run, call in zip(runs, _calls(pairs, runs), strict=True):
        found[run[0].group[0]].append(call)
    return list(map(tuple, found))


def count_calls(shards: Sharding, rank: int, source: int, mask: Mask) -> int:
    """How many they are against the keys of one."""
    return len(_of_sources(shards, rank, [source], mask)[1])


def of_the_whole(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence."""
    documents = mask.documents_of(shards.rows)
    q = cells_of(shards, documents, [rank])[:, 0]
    k = pad(documents.bounds, (0, 0, 0, 1))[:, None, None]  # they lie where they are
    return tuple(_calls(*_plan(q, k, mask, shards.rows, None)))


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
    pairs = size + _pairs_before(size, mask.left) + _pairs_before(size, mask.right)
    return int(pairs.sum()) / max(rows**2, 1)


def visible_pairs(shards: Sharding, mask: Mask) -> list[int]:
    """How many pairs (query, key) are visible to each rank's queries."""
    documents = mask.documents_of(shards.rows)
    cells = cells_of(shards, documents, range(shards.ranks))
    # Of each document, queries before the part and up to its end; and pairs of those, less the
    # pairs of all queries with keys after their own.
    queries = cells[:2].long() - documents.bounds[0]
    after = _pairs_before(documents.sizes - queries, mask.right)
    pairs = queries + _pairs_before(queries, mask.left) - after
    found: list[int] = (pairs[1] - pairs[0]).flatten(1).sum(1).tolist()
    return found


def _pairs_before(queries: Tensor, side: int | None) -> Tensor | int:
    """Pairs of documents' first queries with keys before their own, at most `side` for each."""
    if side == 0:
        return 0
    if side is None:
        return queries * (queries - 1) >> 1
    inner = queries.clamp(max=side)
    return (inner * (inner - 1) >> 1) + (queries - inner) * side
