"""From a mask of the whole sequence to local calls: the only place that knows about positions.

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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .sharding import Sharding, Span


@dataclass(frozen=True)
class Mask:
    """What is visible in the whole sequence."""

    left: int | None = None
    """How many keys before its own a query sees; None: all."""

    right: int | None = None
    """How many after its own; None: all. Causal is 0."""

    documents: tuple[int, ...] | None = None
    """cu_seqlens: nothing is visible beyond a document, nor in rows after the last."""

    @staticmethod
    def of(causal: bool, window: tuple[int, int], documents: tuple[int, ...] | None) -> Mask:
        """From the options of `flash_ext.attention`."""
        left, right = (None if side == -1 else side for side in window)
        return Mask(left, 0 if causal else right, documents)


@dataclass(frozen=True)
class Call:
    """One call of the local op: rows of the rank's queries against rows of the keys at hand."""

    q: Span
    k: Span

    window: tuple[int, int] = (-1, -1)
    """As the op has it: bottom-right aligned, -1 is unlimited."""

    own: bool = False
    """Whether the keys at the queries' own positions are among the keys. Over all calls of a
    forward pass that is so exactly once for every query: this call takes the sink."""

    cu_seqlens_q: tuple[int, ...] | None = None
    """Of several sequences in one call, counted from the first row of q."""

    cu_seqlens_k: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None

    batch_step: int | None = None
    """Of two halves of q as a batch of two, in one call: the second half's keys begin so many rows
    after the first's. seqused_k are their numbers of keys; k is from the first half's first key to
    the second half's last."""

    aligned: bool = True
    """Whether the last query and the last key of each sequence have one position: then distances,
    of ALiBi, are those of the whole sequence."""


@dataclass(frozen=True)
class _Segment:
    """A part of a span within one document: its rows here, and those of the whole sequence."""

    at: int
    first: int
    last: int
    document: int


def _segments(spans: Sequence[Span], documents: tuple[int, ...] | None) -> Iterator[_Segment]:
    at = 0
    for a, b in spans:
        bounds = documents if documents is not None else (min(a, 0), b)
        number = max(bisect_right(bounds, a) - 1, 0)  # the document of row a
        while number + 1 < len(bounds) and bounds[number] < b:
            low, high = max(a, bounds[number]), min(b, bounds[number + 1])
            if low < high:
                yield _Segment(at + low - a, low, high, number)
            number += 1
        at += b - a


def visible_pairs(shards: Sharding, mask: Mask) -> list[int]:
    """How many pairs (query, key) are visible to each rank's queries."""
    bounds = (0, shards.rows) if mask.documents is None else mask.documents

    def of_first(queries: int, length: int) -> int:  # of a document of this length
        after = _before(length, mask.right) - _before(length - queries, mask.right)
        return queries + _before(queries, mask.left) + after

    lengths = (b - a for a, b in itertools.pairwise(bounds))
    whole = [0, *itertools.accumulate(of_first(length, length) for length in lengths)]

    def until(row: int) -> int:  # of all queries before this row
        number = bisect_right(bounds, row) - 1
        if number == len(bounds) - 1:
            return whole[-1]
        start, end = bounds[number], bounds[number + 1]
        return whole[number] + of_first(row - start, end - start)

    return [sum(until(b) - until(a) for a, b in spans) for spans in shards.spans]


def _before(queries: int, side: int | None) -> int:
    """Pairs of a document's first queries with keys before their own, at most `side` for each."""
    if side is None or queries <= side:
        return queries * (queries - 1) // 2
    return side * (side + 1) // 2 + (queries - side - 1) * side


def _meet(q: _Segment, k: _Segment, mask: Mask) -> Call | None:
    """The call of two segments of one document; None where nothing is visible."""
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
    if x.window != (-1, -1) or y.window != (-1, -1) or x.cu_seqlens_q or y.cu_seqlens_q:
        return None
    aligned = x.aligned and y.aligned
    if x.q == y.q and x.k[1] == y.k[0]:
        return replace(x, k=(x.k[0], y.k[1]), own=x.own or y.own, aligned=aligned)
    if x.k == y.k and x.q[1] == y.q[0] and x.own == y.own:
        return replace(x, q=(x.q[0], y.q[1]), aligned=aligned)
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


def _pack(calls: list[Call]) -> Call:
    """Calls on consecutive rows, with one window, as one call of packed sequences."""
    if len(calls) == 1:
        return calls[0]
    q, k = (calls[0].q[0], calls[-1].q[1]), (calls[0].k[0], calls[-1].k[1])
    starts = [x.k[0] - k[0] for x in calls]
    used = tuple(x.k[1] - x.k[0] for x in calls)
    offsets = (*starts, k[1] - k[0])
    complete = all(b - a == n for (a, b), n in zip(itertools.pairwise(offsets), used, strict=True))
    return Call(
        q,
        k,
        calls[0].window,
        calls[0].own,
        (*(x.q[0] - q[0] for x in calls), q[1] - q[0]),
        offsets,
        None if complete else used,
        aligned=all(x.aligned for x in calls),
    )


def _packed(calls: list[Call]) -> list[Call]:
    """Calls of many documents as few calls of packed sequences."""
    runs: list[list[Call]] = []
    for call in calls:
        for run in runs:
            last = run[-1]
            alike = (last.window, last.own) == (call.window, call.own)
            if alike and last.q[1] == call.q[0] and last.k[1] <= call.k[0]:
                run.append(call)
                break
        else:
            runs.append([call])
    return [_pack(run) for run in runs]


def _same_order(calls: list[Call], mask: Mask, rows: int) -> list[Call]:
    """A rank's own spans under a causal mask: their rows in order have a causal mask again."""
    if mask.left is None and mask.right == 0 and len(calls) > 1:
        return [Call((0, rows), (0, rows), (-1, 0), True, aligned=False)]
    return calls


def calls_of(q: Sequence[Span], k: Sequence[Span], mask: Mask) -> tuple[Call, ...]:
    """The calls for queries and keys that are these spans, one after the other."""
    by_document: dict[int, list[_Segment]] = {}
    for segment in _segments(k, mask.documents):
        by_document.setdefault(segment.document, []).append(segment)
    met = (
        _meet(x, y, mask)
        for x in _segments(q, mask.documents)
        for y in by_document.get(x.document, [])
    )
    calls = [call for call in met if call is not None]
    if mask.documents is not None:
        # Windows that hide nothing differ by segment; in one call of packed sequences the mask's
        # own does for all whose keys end with their queries.
        calls = [_general(call, mask) for call in calls]
        calls.sort(key=lambda call: (not call.own, call.q, call.k))
        return tuple(_packed(calls))
    if tuple(q) == tuple(k) and list(q) == sorted(q):
        calls = _same_order(calls, mask, sum(b - a for a, b in q))
    return tuple(_fold(calls))


def _general(call: Call, mask: Mask) -> Call:
    if not call.aligned:
        return call
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return replace(call, window=(left, right))


@lru_cache(maxsize=1024)
def gathered(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence. Every query is in at most one."""
    return calls_of(shards.spans[rank], [(0, shards.rows)] if shards.rows else [], mask)


@lru_cache(maxsize=1024)
def as_batch(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The two chunks of a zigzag under a causal mask, with a window or without, as one call: a
    batch of two with its numbers of keys, so that one grid has all tiles. Other calls as they are.
    """
    if len(calls) != 2:
        return calls
    x, y = calls
    if (
        x.cu_seqlens_q is not None
        or y.cu_seqlens_q is not None
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
    return (Call(q, k, window, x.own, seqused_k=used, batch_step=step, aligned=aligned),)


def _one_window(x: Call, keys_x: int, y: Call, keys_y: int) -> tuple[int, int] | None:
    """A window that is right for two calls of equally many queries; None where there is none.

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


@lru_cache(maxsize=4096)
def step(shards: Sharding, rank: int, source: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys that `source` holds."""
    return calls_of(shards.spans[rank], shards.spans[source], mask)


@lru_cache(maxsize=256)
def ring_steps(shards: Sharding, mask: Mask) -> int:
    """How many steps of a ring see anything: all of them, but where windows are short."""
    n = shards.ranks
    for t in range(n - 1, 0, -1):
        if any(step(shards, rank, (rank - t) % n, mask) for rank in range(n)):
            return t + 1
    return 1
