"""What plans are made of, and packed documents as calls: as many in one as can be.

Each step of a training has new documents, and the host must not be late with its kernels. So there
is no loop over documents here: each line is about all pairs of a part of the queries' documents and
a part of the keys', as tensors of the host. There are few lines, since each costs microseconds
however few documents there are. Only chains of such pairs are looked at one by one, a few for
each step of a ring.

A part of the queries and one of the keys are the same rows or have none in common, as a sharding
has them; or the part of the keys is the whole document.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .on_device import HOST, Numbers, bytes_of, kept, numbers
from .sharding import FEW_SPANS, Documents, Sharding, Span, cells_of, documents_of, dtype_of

# ------------------------------------------------------------------------------------------- calls
# What a plan is made of: the mask of the whole sequence, and calls of the local op.


@dataclass(frozen=True)
class Mask:
    """The mask of the whole sequence."""

    left: int | None = None
    """How many keys before its own a query sees; None: all."""

    right: int | None = None
    """How many after its own; None: all. Causal is 0."""

    documents: Sequence[int] | None = None
    """cu_seqlens: nothing is visible beyond a document, nor in rows after the last."""

    @staticmethod
    def of(causal: bool, window: tuple[int, int], documents: Sequence[int] | None) -> Mask:
        """From the options of `flash_ext.attention`."""
        left, right = (None if side == -1 else side for side in window)
        return Mask(left, 0 if causal else right, documents)

    def documents_of(self, rows: int) -> Documents:
        """The documents, a sequence without any being one."""
        return documents_of((0, rows) if self.documents is None else self.documents)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return bytes_of(self.documents)


class Packed(NamedTuple):
    """Several sequences in one call, counted from the first rows of its q and k: which of a plan's
    numbers are theirs."""

    numbers: Numbers
    q: slice
    """Of cu_seqlens_q, (sequences + 1)."""

    k: slice
    used: slice | None
    """Of seqused_k, (sequences); None: all keys are used."""

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """As options of the op, int32 on a device."""
        every = self.numbers.on(device)
        found = {"cu_seqlens_q": every[self.q], "cu_seqlens_k": every[self.k]}
        return found if self.used is None else found | {"seqused_k": every[self.used]}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return 12 * int(self.q.stop - self.q.start)


class Call(NamedTuple):
    """One call of the local op: rows of the rank's queries against rows of the keys at hand."""

    q: Span
    k: Span

    window: tuple[int, int] = (-1, -1)
    """As the op has it: bottom-right aligned, -1 is unlimited."""

    own: bool = False
    """Whether the keys at the queries' own positions are among the keys. Over all calls of a
    forward pass that is so exactly once for every query: this call takes the sink."""

    packed: Packed | None = None

    batch_step: int | None = None
    """Of two halves of q as a batch of two, in one call: the second half's keys begin this number
    of rows after the first's; k is from the first half's first key to the second half's last."""

    used: tuple[int, int] | None = None
    """How many keys each of the halves has."""

    aligned: bool = True
    """Whether the last query and the last key of each sequence have one position: then distances,
    of ALiBi, count in the whole sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return 512 + (0 if self.packed is None else self.packed.nbytes)


# -------------------------------------------------------------------------------- packed documents
Q, K, Q_END, K_END, ALIGNED, ALL_ALIGNED, ALL_USED, SIDES = range(8)
"""The facts of a pair: the rows [Q, Q_END) of the rank's queries that see a key, and [K, K_END)
of the source's keys that a query sees; whether the last query and the last key have one position;
how often that is so up to this pair, and how many keys there are up to it; and, from SIDES on, the
sides of the window that the mask limits, as the op has them, and one more: 0 is unlimited. It is -1
throughout if there is nothing to compute."""


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
    every = torch.broadcast_tensors(*ends, aligned, aligned, used, *sides)
    found = torch.stack(every).bitwise_or_(-unseen.to(shift.dtype)).flatten(1)
    found[ALL_ALIGNED:SIDES].cumsum_(1)
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
    """The source, whether the keys are others than the queries' own, and the window: equal
    throughout a call."""

    pairs: int
    gapless: bool
    """Whether each key from the first to the last is used."""

    aligned: bool
    """Whether all pairs are."""

    at: tuple[int, int, int, int]
    """Where the first pair's rows are among the numbers of the plan: where its queries begin and
    where they end, and so of its keys. The other pairs' follow."""

    q: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    """The rows of all pairs, [first, last)."""


def _chains(pairs: Tensor, begins: Tensor, each: int, own: int | None, mask: Mask) -> list[_Chain]:
    """In the order of their first pairs.

    Args:
        pairs: as `_pairs` gives them.
        begins: which of them are first ones, as `_begins` does.
        each: how many are of a source.
        own: the source whose keys are the queries' own in aligned pairs; None: in all pairs.
        mask: of the pairs.
    """
    seen, total = pairs[Q] >= 0, pairs.shape[1]
    ends = [(x & seen).nonzero().squeeze(1) for x in (begins[:-1], begins[1:])]
    places = (x.tolist() for x in ends)
    columns = (pairs.index_select(1, x).T.tolist() for x in ends)
    found = []
    for i, j, x, y in zip(*places, *columns, strict=True):
        source, count, q, k = i // each, j - i + 1, (x[Q], y[Q_END]), (x[K], y[K_END])
        others = own is not None and not (source == own and x[ALIGNED])
        limits = iter(x[SIDES:])
        left, right = (-1 if x is None else next(limits) - 1 for x in (mask.left, mask.right))
        used = y[ALL_USED] - x[ALL_USED] + x[K_END] - x[K]
        aligned = y[ALL_ALIGNED] - x[ALL_ALIGNED] + x[ALIGNED] == count
        at = i + Q * total, i + Q_END * total, i + K * total, i + K_END * total
        group = source, others, left, right
        found.append(_Chain(group, count, used == k[1] - k[0], aligned, at, q, k))
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
    """As `_plan_of`.

    Args:
        q: the rank's parts, (3, m, documents).
        k: the keys' offsets, (3, sources, m, documents).
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
    return pairs.view(-1), _runs(sorted(chains, key=lambda x: (*x.group[:2], x.q[: 1 + cut], x.k)))


def _calls(flat: Tensor, runs: list[list[_Chain]]) -> list[Call]:
    """A call for each run; all have one tensor of numbers: cu_seqlens_q of every call, then
    cu_seqlens_k and seqused_k, each with one number more than pairs. `flat`: the plan's numbers."""
    if not runs:
        return []
    pieces, edges = [], [0]
    for run in runs:
        begin, first = edges[-1], (run[0].q[0], run[0].k[0])
        for chain in run:
            q, q_end, k, k_end = (x - begin for x in chain.at)
            pieces.append((chain.pairs, q, k, k_end, *first))
            begin += chain.pairs
        # Then the ends of the last pair. No kernel reads the field of its number of used keys.
        pieces.append((1, q_end - 1, k_end - 1, k_end - 1, *first))
        edges.append(begin + 1)
    table = numbers([*itertools.chain(*zip(*pieces, strict=True))], flat.dtype).view(6, -1)
    piece = torch.repeat_interleave(table[0], output_size=edges[-1])
    skips, firsts = table[1:].index_select(1, piece).split((3, 2))
    skips += torch.arange(edges[-1], dtype=flat.dtype, device=HOST)
    found = flat.index_select(0, skips.view(-1)).view(3, -1)
    q_and_k, used = found.split((2, 1))
    used -= q_and_k[1]
    q_and_k -= firsts
    every = Numbers(found.int().view(-1))
    bounds = zip(runs, itertools.pairwise(edges), strict=True)
    return [_call(every, edges[-1], run, *of_run) for run, of_run in bounds]


def _call(every: Numbers, width: int, run: list[_Chain], first: int, last: int) -> Call:
    """Of a run, whose numbers are [first, last) of each `width`."""
    q, k = (run[0].q[0], run[-1].q[1]), (run[0].k[0], run[-1].k[1])
    packed = None
    if last - first > 2:  # not of one pair alone
        complete = all(x.k[1] == y.k[0] for x, y in itertools.pairwise(run))
        complete = complete and all(chain.gapless for chain in run)
        used = None if complete else slice(2 * width + first, 2 * width + last - 1)
        packed = Packed(every, slice(first, last), slice(width + first, width + last), used)
    _, others, left, right = run[0].group
    aligned = all(chain.aligned for chain in run)
    return Call(q, k, (left, right), not others, packed, aligned=aligned)


class _Block(NamedTuple):
    """Rows of a rank that are parts of documents [first, last), of each some."""

    row: int
    """The first one, of the whole sequence."""

    stop: int
    """The one after the last."""

    shift: int
    """As in `Sharding.parts`."""

    first: int
    last: int

    def rows(self, documents: Documents, first: int, last: int) -> Span:
        """The rank's rows of some documents."""
        a, b = max(self.row, documents[first]), min(self.stop, documents[last])
        return a + self.shift, b + self.shift


@kept()
def _blocks(shards: Sharding, mask: Mask, ranks: Sequence[int]) -> dict[int, list[_Block]] | None:
    """Of ranks, if there is no window, every document has rows, and ranks have few spans; then of a
    block's queries and another one's keys all documents are alike."""
    documents = mask.documents_of(shards.rows)
    count = len(documents) - 1
    if mask.left is not None or mask.right or documents.shortest < 1:
        return None
    if shards.documents is not None or shards.most_spans > FEW_SPANS:
        return None

    def block(a: int, b: int, shift: int) -> _Block:
        first, last = bisect_right(documents, a) - 1, min(bisect_left(documents, b), count)
        return _Block(a, b, shift, first, last if a < b else first)

    first, last, shift = shards.parts.tolist()
    return {x: list(map(block, first[x], last[x], shift[x])) for x in ranks}


def _between_blocks(
    blocks: dict[int, list[_Block]],
    rank: int,
    sources: Sequence[int],
    documents: Documents,
    causal: bool,
) -> Iterator[_Chain]:
    """Of each block of the rank with each of the sources', which have a number for each offset."""
    m, width = len(blocks[rank]), len(documents)
    for number, source in enumerate(sources):
        pairs = itertools.product(enumerate(blocks[rank]), enumerate(blocks[source]))
        for (i, q), (j, k) in pairs:
            first, last, own = max(q.first, k.first), min(q.last, k.last), k is q
            if first < last and not (causal and k.row > q.row):
                at_q, at_k = (rank * m + i) * width + first, (source * m + j) * width + first
                group = number, not own, -1, 0 if own and causal else -1
                at = at_q, at_q + 1, at_k, at_k + 1
                rows = (x.rows(documents, first, last) for x in (q, k))
                yield _Chain(group, last - first, True, own, at, *rows)


def _of_blocks(
    shards: Sharding,
    rank: int,
    sources: Sequence[int] | None,
    mask: Mask,
    blocks: dict[int, list[_Block]],
) -> tuple[Tensor, list[list[_Chain]]]:
    """As `_plan_of`, if there are blocks: each is a chain with each other one."""
    documents, causal = mask.documents_of(shards.rows), mask.right == 0
    parts = shards.parts if sources is not None else shards.parts.narrow(1, rank, 1)
    first, last, shift = parts.unsqueeze(3).unbind()
    edges, width = documents.offsets.clamp(first, last), len(documents)
    flat = (edges + shift).view(-1)
    if sources is not None:
        chains = list(_between_blocks(blocks, rank, sources, documents, causal))
    else:
        chains = []
        for i, q in enumerate(blocks[rank]):
            if q.first < q.last:
                at_q, at_k = i * width + q.first, len(flat) + q.first
                at = at_q, at_q + 1, at_k, at_k + 1 + (width + i * width if causal else 0)
                k_end = documents[q.last]
                ends, k = (
                    k_end <= q.stop,
                    (documents[q.first], min(k_end, q.stop) if causal else k_end),
                )
                group, rows = (
                    (0, False, -1, 0 if causal else -1),
                    q.rows(documents, q.first, q.last),
                )
                chains.append(_Chain(group, q.last - q.first, True, causal or ends, at, rows, k))
        flat = torch.cat([flat, documents.offsets, edges.view(-1)])
    return flat, _runs(sorted(chains, key=lambda x: (*x.group[:2], x.q[0], x.k)))


FIRST, SECOND, BOTH = range(3)
"""Of a rank's two chunks of every document."""


def _by_chunks(shards: Sharding, mask: Mask) -> bool:
    """Whether there is no window, and every rank has rows in two chunks of each document, and no
    others. Then calls are of whole chunks, and have their numbers in common."""
    cut, documents = shards.documents, mask.documents_of(shards.rows)
    if mask.left is not None or mask.right or cut is None or cut.shortest < 2 * shards.ranks:
        return False
    return len(cut) == len(documents) and shards.by(documents)


@cache
def _chunks_met(ranks: int, rank: int, source: int, causal: bool) -> list[tuple[int, int]]:
    """Which chunks of the rank see which of the source's, in the order of their calls."""
    q, k = ((x, 2 * ranks - 1 - x) for x in (rank, source))
    met = [(i, j) for i in range(2) for j in range(2) if not causal or k[j] <= q[i]]
    if (FIRST, FIRST) in met and (SECOND, SECOND) in met:  # follow one another
        met = [(BOTH, BOTH), *((i, j) for i, j in met if i != j)]
    return met


class _Chunks:
    """The chunks that some ranks have of each document.

    Attributes:
        numbers: of each rank cu_seqlens of both, which begin with the first ones', and
            then cu_seqlens of the second ones.
    """

    def __init__(self, shards: Sharding, ranks: slice) -> None:
        _, last, shift = shards.parts[:, ranks].unbind()
        ends, self._lengths = last + shift, shards.lengths[ranks]
        self._count = ends.shape[1] // 2
        *_, seconds = ends.split((self._count - 1, self._count + 1), 1)
        begins = seconds[:, :1]
        self._begins: list[int] = begins.flatten().tolist()
        seconds = seconds - begins
        self.numbers = torch.cat([seconds[:, :1], ends, seconds], 1).view(-1)

    def of(self, rank: int, which: int) -> tuple[Span, slice]:
        """The rows of a rank, and which of the numbers are their cu_seqlens."""
        begin, length, both = self._begins[rank], self._lengths[rank], 2 * self._count + 1
        first = rank * (both + self._count + 1) + (both if which == SECOND else 0)
        span = ((0, begin), (begin, length), (0, length))[which]
        return span, slice(first, first + (both if which == BOTH else self._count + 1))


def _of_chunks(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> list[tuple[Call, ...]]:
    """`of_sources`, if `_by_chunks`."""
    chunks, causal = _Chunks(shards, slice(None)), mask.right == 0
    every, of = Numbers(chunks.numbers.int()), cache(chunks.of)

    def call(source: int, i: int, j: int) -> Call:
        (q, of_q), (k, of_k) = of(rank, i), of(source, j)
        own = source == rank and i == j
        window = (-1, 0 if own and causal else -1)
        return Call(q, k, window, own, Packed(every, of_q, of_k, None), aligned=own)

    met = ((x, _chunks_met(shards.ranks, rank, x, causal)) for x in sources)
    return [tuple([call(source, *pair) for pair in pairs]) for source, pairs in met]


def _whole_of_chunks(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """`of_the_whole`, if `_by_chunks`: the keys of each document, under a causal mask up to the
    chunk's end."""
    chunks, documents = _Chunks(shards, slice(rank, rank + 1)), mask.documents_of(shards.rows)
    width, count, at, ends = len(documents), len(documents) - 1, len(chunks.numbers), rank == 0
    begins = documents.offsets[:-1]
    keys: tuple[Tensor, ...] = documents.offsets, documents.offsets
    if mask.right is None:
        last = [documents[-1], documents[-1]]
        used = begins[:0]
    else:
        of_chunks = shards.parts[1, rank].view(2, -1)
        last = of_chunks[:, -1].tolist()
        keys = begins, of_chunks[0, -1:], begins, of_chunks[1, -1:]
        used = (of_chunks - begins).view(-1)
    every = Numbers(torch.cat([chunks.numbers, *keys, used]).int())
    found = []
    for i in (FIRST, SECOND):
        q, of_q = chunks.of(0, i)
        k, at_used = slice(at + i * width, at + (i + 1) * width), at + 2 * width + i * count
        all_keys = mask.right is None or (ends and i == SECOND)
        packed = Packed(every, of_q, k, None if all_keys else slice(at_used, at_used + count))
        aligned = mask.right == 0 or (ends and i == SECOND)
        window = -1, -1 if mask.right is None else 0
        found.append(Call(q, (0, last[i]), window, True, packed, aligned=aligned))
    return tuple(found)


def _plan_of(
    shards: Sharding, rank: int, sources: Sequence[int] | None, mask: Mask
) -> tuple[Tensor, list[list[_Chain]]]:
    """The numbers of a plan, and the chains of each call, sources one after the other. Without
    sources the keys are the whole sequence's."""
    ranks = (rank,) if sources is None else tuple(range(shards.ranks))
    blocks, documents = _blocks(shards, mask, ranks), mask.documents_of(shards.rows)
    if blocks is not None:
        return _of_blocks(shards, rank, sources, mask, blocks)
    q = cells_of(shards, documents, [rank])[:, 0]
    if sources is None:
        first, last = documents.offsets.unfold(0, len(documents) - 1, 1)
        k = torch.stack([first, last, torch.zeros_like(first)])[:, None, None]
        return _plan(q, k, mask, shards.rows, None)
    own = sources.index(rank) if rank in sources else len(sources)
    return _plan(q, cells_of(shards, documents, sources), mask, shards.rows, own)


def of_sources(
    shards: Sharding, rank: int, sources: Sequence[int], mask: Mask
) -> list[tuple[Call, ...]]:
    """A rank's calls against the keys that each of these ranks holds."""
    if _by_chunks(shards, mask):
        return _of_chunks(shards, rank, sources, mask)
    flat, runs = _plan_of(shards, rank, sources, mask)
    found: list[list[Call]] = [[] for _ in sources]
    for run, call in zip(runs, _calls(flat, runs), strict=True):
        found[run[0].group[0]].append(call)
    return list(map(tuple, found))


def count_calls(shards: Sharding, rank: int, source: int, mask: Mask) -> int:
    """How many they are against the keys of one; a few more, where blocks would be in one call."""
    if _by_chunks(shards, mask):
        return len(_chunks_met(shards.ranks, rank, source, mask.right == 0))
    blocks, documents = _blocks(shards, mask, (rank, source)), mask.documents_of(shards.rows)
    if blocks is not None:
        return len(list(_between_blocks(blocks, rank, [source], documents, mask.right == 0)))
    return len(_plan_of(shards, rank, [source], mask)[1])


def of_the_whole(shards: Sharding, rank: int, mask: Mask) -> tuple[Call, ...]:
    """A rank's calls against the keys of the whole sequence."""
    documents = mask.documents_of(shards.rows)
    if shards.ranks == 1 and documents.shortest > 0 and len(documents) > 2:
        # The documents as they are.
        rows, every = (0, documents[-1]), slice(0, len(documents))
        left, right = (-1 if side is None else side for side in (mask.left, mask.right))
        packed = Packed(Numbers(documents.offsets.int()), every, every, None)
        return (Call(rows, rows, (left, right), True, packed),)
    if _by_chunks(shards, mask):
        return _whole_of_chunks(shards, rank, mask)
    return tuple(_calls(*_plan_of(shards, rank, None, mask)))


def ring_steps(shards: Sharding, mask: Mask) -> int:
    """How many steps of a ring see anything."""
    cells = cells_of(shards, mask.documents_of(shards.rows), range(shards.ranks))
    cells = cells.to(dtype_of(shards.rows + max(mask.left or 0, mask.right or 0)))
    for t in range(shards.ranks - 1, 0, -1):
        unseen = _visible(cells[:, :, None], cells.roll(t, 1)[:, :, :, None], mask)[-1]
        if not unseen.all():
            return t + 1
    return 1


def share(rows: int, mask: Mask) -> float:
    """Of the pairs (query, key) of the whole sequence, those that are visible."""
    documents = mask.documents_of(rows)
    size = documents.sizes
    if mask.left is None and mask.right == 0:  # in one op, of any number of documents
        return (int(size.dot(size)) + documents[-1]) // 2 / max(rows**2, 1)
    return int(_pairs_of(size, size, mask).sum()) // 2 / max(rows**2, 1)


def visible_pairs(shards: Sharding, mask: Mask) -> list[int]:
    """How many pairs (query, key) are visible to each rank's queries."""
    documents = mask.documents_of(shards.rows)
    starts, sizes = documents.offsets, documents.sizes
    if shards.by(documents):  # of each chunk, less the ones of the chunk before
        ends = cells_of(shards, documents, range(shards.ranks))[1] - starts[:-1]
        firsts, seconds = _pairs_of(ends.long(), sizes, mask).sum(2).T.tolist()
        each = [b - a for a, b in itertools.pairwise((0, *firsts, *reversed(seconds)))]
        return [a + b >> 1 for a, b in zip(each[: shards.ranks], reversed(each), strict=False)]
    # Up to an edge are whole documents, and a part of one, or of none after the last.
    sizes = torch.cat([sizes, sizes.new_zeros(1)])
    edges = shards.parts[:2].long().clamp(max=documents[-1])
    at = torch.searchsorted(starts, edges, right=True).sub_(1)
    whole = _pairs_of(sizes, sizes, mask)
    before = whole.cumsum(0).sub_(whole)
    pairs = _pairs_of(edges - starts[at], sizes[at], mask).add_(before[at])
    return [x >> 1 for x in (pairs[1] - pairs[0]).sum(1).tolist()]


def _pairs_of(queries: Tensor, sizes: Tensor, mask: Mask) -> Tensor:
    """Twice the visible pairs of the first queries of documents of these sizes; int64."""
    pairs = _pairs_before(queries, mask.left).add_(queries, alpha=2)
    if mask.right != 0:  # of all queries with keys after their own, less the last queries' pairs
        pairs += _pairs_before(sizes, mask.right)
        pairs -= _pairs_before(sizes - queries, mask.right)
    return pairs


def _pairs_before(queries: Tensor, side: int | None) -> Tensor:
    """Twice the pairs of first queries with keys before their own, at most `side` for each."""
    inner = queries if side is None else queries.clamp(max=side)
    pairs = (inner - 1).mul_(inner)
    return pairs if side is None else pairs.add_((queries - inner).mul_(side), alpha=2)
