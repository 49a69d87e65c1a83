"""From a mask of the whole sequence to local calls: here alone, and in `packing` for documents,
positions are known.

A rank has some rows of the queries and some of the keys, all of them spans of one sequence. The
plan is a list of calls of the local op that together compute every visible pair once. It is plain
Python on a few numbers per span, so it is tested against a dense mask without any process.

Query i of the whole sequence sees keys i - left to i + right of its document. The op's masks align
bottom-right, so for rows [a, b) of the queries and [c, d) of the keys its window is

    left + (d - b), right - (d - b)

Keys that no query sees, and queries that see no key, are cut off first: then neither is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from . import packing
from .on_device import kept
from .packing import Call as Call
from .packing import Mask as Mask
from .packing import share as share
from .packing import visible_pairs as visible_pairs
from .sharding import Sharding, Span


@dataclass(frozen=True)
class _Segment:
    """A span: its first row here, and its rows of the whole sequence."""

    at: int
    first: int
    last: int


def _segments(spans: Sequence[Span]) -> list[_Segment]:
    starts = itertools.accumulate((b - a for a, b in spans), initial=0)
    return [_Segment(at, a, b) for at, (a, b) in zip(starts, spans, strict=False)]


def _meet(q: _Segment, k: _Segment, mask: Mask) -> Call | None:
    """The call of two segments; None if nothing is visible."""
    a, b, c, d = q.first, q.last, k.first, k.last
    if mask.right is not None:
        a = max(a, c - mask.right)
    if mask.left is not None:
        b = min(b, d + mask.left)
    if a >= b:
        return None
    if mask.left is not None:
        c = max(c, a - mask.left)
    if mask.right is not None:
        d = min(d, b + mask.right)
    if c >= d:
        return None
    # A side that hides nothing is unlimited, which spares the kernel its mask.
    left = -1 if mask.left is None else mask.left + d - b
    right = -1 if mask.right is None else mask.right - (d - b)
    if left >= d - c - 1:
        left = -1
    if right >= b - a - 1:
        right = -1
    q_rows, k_rows = (
        (s.at + x - s.first, s.at + y - s.first) for s, x, y in ((q, a, b), (k, c, d))
    )
    own = k.first <= q.first and q.last <= k.last
    return Call(q_rows, k_rows, (left, right), own, aligned=b == d)


def _as_one(x: Call, y: Call) -> Call | None:
    """Two calls that hide nothing as one, where their rows are next to each other."""
    if x.window != (-1, -1) or y.window != (-1, -1):
        return None
    aligned = x.aligned and y.aligned
    if x.q == y.q and x.k[1] == y.k[0]:
        return x._replace(k=(x.k[0], y.k[1]), own=x.own or y.own, aligned=aligned)
    if x.k == y.k and x.q[1] == y.q[0] and x.own == y.own:
        return x._replace(q=(x.q[0], y.q[1]), aligned=aligned)
    return None


def _fold(calls: list[Call]) -> list[Call]:
    """Fewer calls, where two can be one."""
    folded: list[Call] = []
    for call in calls:
        one = _as_one(folded[-1], call) if folded else None
        if one is not None:
            folded[-1] = one
        else:
            folded.append(call)
    return folded if len(folded) == len(calls) else _fold(folded)


def _same_order(calls: list[Call], mask: Mask, rows: int) -> list[Call]:
    """A rank's own spans under a causal mask: their rows in order have a causal mask again."""
    if mask.left is None and mask.right == 0 and len(calls) > 1:
        return [Call((0, rows), (0, rows), (-1, 0), True, aligned=False)]
    return calls


def calls_of(q: Sequence[Span], k: Sequence[Span], mask: Mask) -> tuple[Call, ...]:
    """The calls for queries and keys that are these spans, one after the other; of one document."""
    met = (_meet(x, y, mask) for x in _segments(q) for y in _segments(k))
    calls = [call for call in met if call is not None]
    if tuple(q) == tuple(k) and list(q) == sorted(q):
        calls = _same_order(calls, mask, sum(b - a for a, b in q))
    return tuple(_fold(calls))


@kept()
def gathered(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence. Every query is in at most one."""
    if mask.documents is not None:
        return packing.of_the_whole(shards, rank, mask)
    return calls_of(shards.spans[rank], [(0, shards.rows)] if shards.rows else [], mask)


def as_batch(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The two chunks of a zigzag under a causal mask, with a window or without, as one call: a
    batch of two with its numbers of keys, so that one grid has all tiles. Other calls as they are.
    """
    if len(calls) != 2:
        return calls
    x, y = calls
    if (
        x.packed is not None
        or y.packed is not None
        or x.own != y.own
        or x.q[1] != y.q[0]
        or x.q[1] - x.q[0] != y.q[1] - y.q[0]
    ):
        return calls
    used = x.k[1] - x.k[0], y.k[1] - y.k[0]
    window = _one_window(x, used[0], y, used[1])
    step = y.k[0] - x.k[0]
    if window is None or step < 0 or used[0] > used[1]:
        return calls
    q, k = (x.q[0], y.q[1]), (x.k[0], y.k[1])
    aligned = x.aligned and y.aligned
    return (Call(q, k, window, x.own, batch_step=step, used=used, aligned=aligned),)


def _one_window(x: Call, keys_x: int, y: Call, keys_y: int) -> tuple[int, int] | None:
    """A window that is right for two calls of equally many queries; None if there is none.

    A side that is unlimited may get any number that hides nothing.
    """
    rows = x.q[1] - x.q[0]
    found = []
    for a, b, enough_x, enough_y in zip(
        x.window, y.window, (keys_x - 1, rows - 1), (keys_y - 1, rows - 1), strict=True
    ):
        if a != b and not (a == -1 and b >= enough_x) and not (b == -1 and a >= enough_y):
            return None
        found.append(max(a, b))
    return found[0], found[1]


def step(shards: Sharding, rank: int, source: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys that `source` holds."""
    if mask.documents is not None:
        return packing.of_sources(shards, rank, [source], mask)[0]
    return calls_of(shards.spans[rank], shards.spans[source], mask)


def calls_in_a_step(shards: Sharding, mask: Mask) -> int:
    """How many calls a step of a ring has: as many as the last rank with the first's keys."""
    if mask.documents is not None:
        return packing.count_calls(shards, shards.ranks - 1, 0, mask)
    return len(step(shards, shards.ranks - 1, 0, mask))


@kept()
def ring(shards: Sharding, rank: int, mask: Mask) -> list[tuple[Call, ...]]:
    """A rank's calls in each step of a ring: of all that see anything on any rank."""
    sources = [(rank - t) % shards.ranks for t in range(shards.ranks)]
    if mask.documents is not None:
        steps = packing.of_sources(shards, rank, sources, mask)
    else:
        steps = [step(shards, rank, source, mask) for source in sources]
    return steps if steps[-1] else steps[: ring_steps(shards, mask)]


@kept()
def ring_steps(shards: Sharding, mask: Mask) -> int:
    """How many steps of a ring see anything: all of them, but where windows are short."""
    if mask.documents is not None:
        return packing.ring_steps(shards, mask)
    n = shards.ranks
    for t in range(n - 1, 0, -1):
        if any(step(shards, rank, (rank - t) % n, mask) for rank in range(n)):
            return t + 1
    return 1
