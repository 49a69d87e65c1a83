"""The methods: all-gather, ring and Ulysses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ... import ops
from ...ops.checks import statistics_dtype
from ...ops.options import BackwardTensors
from . import local, plan
from .local import Options
from .on_device import Lanes
from .packing import Call, Mask
from .plan import as_batch
from .sharding import Sharding, Span
from .transport import Pending, Rows, Sum, Transport, add_in_place, many, narrowed

# -------------------------------------------------------------------------------------- all-gather
# All-gather: every rank gathers K and V and computes its queries by its own calls.
#
# As in Llama 3 (arXiv 2407.21783, section 3.3.2). K and V travel in pieces of heads: while the
# kernel computes one piece the next travels. A query meets all its keys in one call, so nothing is
# merged. The backward pass gathers K and V again, so nothing but this rank's rows is kept between,
# and sums dK and dV over the ranks, each piece while the kernel computes the next. Gradients travel
# in the inputs' dtype and are summed in float32.

FEW_KEYS = 160_000
"""Rows of keys, of all heads and calls, up to which two calls of a backward pass are better one.
That is some ten waves of tiles. The last wave of each call is not full; with more tiles that costs
less than the pass over memory that adds up the gradients of one call (docs/notes/020)."""

PiecesOf = Callable[[int, bool], tuple[int, ...]]
"""How many key heads are in each piece: of their number, and whether gradients travel back."""

Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Behind:
    """A transfer of results, hidden by the kernels of the next piece: it is waited for when the
    next transfer has begun."""

    def __init__(self) -> None:
        self._last: Pending[Any] | None = None

    def follow(self, begun: Pending[Any] | None) -> Any:
        """What the one before gives, or None. `begun` is None after the last."""
        last, self._last = self._last, begun
        return None if last is None else last.wait()


class _Keys:
    """The whole sequence's K and V, piece by piece."""

    def __init__(
        self, transport: Transport | None, k: Tensor, v: Tensor, pieces: tuple[int, ...]
    ) -> None:
        self._transport, self._begun = transport, 0
        self._whole, self._count = (k, v), len(pieces)
        self._travelling: Pending[Rows] | None = None
        if transport is not None:
            self._begin = transport.gather((k, v), pieces, "all-gather of K and V")
            self._begin_next()

    def _begin_next(self) -> None:
        if self._begun < self._count:
            self._travelling = self._begin(self._begun)
            self._begun += 1

    def wait(self) -> Rows:
        """K and V of the next piece, (B, S, H, D)."""
        if self._transport is None:  # all heads are one piece
            return self._whole
        pending = self._travelling
        assert pending is not None
        if self._transport.needs_sms:
            self._begin_next()
        return pending.wait()

    def launched(self) -> None:
        """The kernels of this piece have been enqueued."""
        if self._transport is not None and not self._transport.needs_sms:
            self._begin_next()


class _Views:
    """A call's options, and its queries in several tensors for each piece of heads: found once, and
    before a lane begins, which waits for what its options have to copy to the device."""

    def __init__(
        self, call: Call, options: Options, pieces: list[int], tensors: Sequence[Tensor | None]
    ) -> None:
        """`tensors`: as `local.view` gives them; `pieces`: how many query heads are in each."""
        device = next(x.device for x in tensors if x is not None)
        self.call, self._options = call, local.options_of(call, options, device)
        self._firsts = [0, *itertools.accumulate(pieces)]
        nothing = len(pieces) * (None,)
        split = [nothing if x is None else x.split(pieces, -2) for x in tensors]
        self._of_pieces: list[tuple[Any, ...]] = list(zip(*split, strict=True))

    def of(self, i: int) -> tuple[Options, tuple[Any, ...]]:
        """The options and the tensors of piece i."""
        options = self._options
        if "alibi_slopes" in options or "sink" in options:
            options = local.of_heads(options, *self._firsts[i : i + 2])
        return options, self._of_pieces[i]


class Gather:
    """This method, for a rank's calls against the whole sequence."""

    def __init__(
        self, transport: Transport | None, calls: tuple[Call, ...], pieces: PiecesOf | None = None
    ) -> None:
        """`transport` is None if this rank has the whole sequence. Without `pieces` all heads are
        one."""
        self.transport, self.calls, self.pieces = transport, calls, pieces
        # A transfer by kernels would wait for them.
        self._beside = transport is not None and not transport.needs_sms

    def _pieces(self, q: Tensor, k: Tensor, returns: bool) -> tuple[list[int], tuple[int, ...]]:
        """How many heads of q and of k are in each piece; `returns`: its gradients travel back."""
        heads = k.shape[2]
        split = None if self.transport is None else self.pieces
        pieces = (heads,) if split is None else split(heads, returns)
        return [q.shape[2] // heads * piece for piece in pieces], pieces

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        q_pieces, k_pieces = self._pieces(q, k, returns=False)
        batch, count, heads, _ = q.shape
        calls = as_batch(self.calls) if batch == 1 else self.calls
        keys = _Keys(self.transport, k, v, k_pieces)
        if len(k_pieces) == 1 and [call.q for call in calls] == [(0, count)]:
            chosen = local.of_heads(options, 0, heads)
            k_all, v_all = keys.wait()
            out, lse = local.forward(calls[0], q, k_all, v_all, chosen)
            return q, k, v, out, lse
        out = q.new_empty((batch, count, heads, v.shape[-1]))
        lse = q.new_empty((batch, heads, count), dtype=statistics_dtype(q.dtype))
        for rows in _others(call.q for call in calls):  # that see no key
            out[:, rows].zero_()
            lse[..., rows].fill_(-torch.inf)
        views = []
        for call in calls:
            tensors = local.view(call, q, call.q), local.view(call, out, call.q)
            of_lse = local.view(call, lse, call.q, -1)
            views.append(_Views(call, options, q_pieces, (*tensors, of_lse)))
        kept = []
        with Lanes(q.device, self._beside) as lanes:
            for i in range(len(k_pieces)):
                with lanes.of(i):
                    whole = keys.wait()
                    for of_call in views:
                        call, (chosen, (q_here, into, lse_here)) = of_call.call, of_call.of(i)
                        k_here, v_here = (local.view(call, x, call.k) for x in whole)
                        found = local.forward_of_views(call, q_here, k_here, v_here, chosen, into)
                        lse_here.copy_(found[1])
                kept.append(whole)
                keys.launched()
        return q, k, v, out, lse

    def _as_batch(self, batch: int, heads: int) -> bool:
        """Whether a piece of this number of key heads has one call backward if that can be."""
        return batch == 1 and heads * sum(call.k[1] - call.k[0] for call in self.calls) <= FEW_KEYS

    def _beside_each_other(self, views: Sequence[_Views], dsink: Tensor | None) -> bool:
        """Whether the calls of a piece alternate between two streams: calls of documents, whose
        last tiles are of unequal lengths. Others were no faster (docs/notes/020)."""
        packed = all(of_call.call.packed is not None for of_call in views)
        return self._beside and packed and dsink is None  # which is added up on one stream

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved."""
        return q, k, v, out, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        q_pieces, k_pieces = self._pieces(q, k, returns=True)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows in _others(call.q for call in self.calls):
            dq[:, rows].zero_()
        dsink = options["sink"].new_zeros(q.shape[2]) if "sink" in options else None

        @cache
        def views(as_one: bool) -> list[_Views]:
            """Of the calls, the longest first: its gradient is the sum's first value."""
            calls = as_batch(self.calls) if as_one else self.calls
            found = []
            for call in sorted(calls, key=lambda call: call.k[0] - call.k[1]):
                tensors = [local.view(call, x, call.q) for x in (dout, q, out, dq)]
                statistics = [
                    x if x is None else local.view(call, x, call.q, -1).contiguous()
                    for x in (lse, dlse)
                ]
                found.append(_Views(call, options, q_pieces, [*tensors, *statistics]))
            return found

        behind = _Behind()
        keys = _Keys(self.transport, k, v, k_pieces)
        for i, into in enumerate(zip(dk.split(k_pieces, 2), dv.split(k_pieces, 2), strict=True)):
            whole: Rows = into
            begin = None
            if self.transport is not None:  # before the keys' memory may be taken again
                what = f"sum of dK and dV, piece {i + 1} of {len(k_pieces)}"
                whole, begin = self.transport.scatter(into, what)
            found = keys.wait()
            of_calls = views(self._as_batch(k.shape[0], k_pieces[i]))
            parts = self._backward_of_piece(
                i, of_calls, found, whole, None if dsink is None else dsink.split(q_pieces)[i]
            )
            keys.launched()  # before the sum, whose transfer waits for the kernels
            if begin is None:
                add_in_place(parts, whole)
            else:
                behind.follow(begin(parts))
        behind.follow(None)
        return dq, dk, dv, dsink

    def _backward_of_piece(
        self, i: int, views: list[_Views], keys: Rows, into: Rows, dsink: Tensor | None
    ) -> list[tuple[Span, Rows]]:
        """The gradients of piece i: dK and dV of each call, the first call's in their place in
        `into`, (B, S, H, D). dQ is written, and dsink is added up."""
        parts: list[tuple[Span, Rows]] = []
        # All of it before a lane begins, which would not wait for what used the memory before.
        for number, of_call in enumerate(views):
            span = of_call.call.k
            place = tuple(narrowed(x, span, 1) for x in into)
            if number > 0:
                place = tuple(x.new_empty(x.shape) for x in place)
            parts.append((span, place))
        with Lanes(into[0].device, self._beside_each_other(views, dsink)) as lanes:
            for number, (of_call, (_, gradients)) in enumerate(zip(views, parts, strict=True)):
                call, (options, (dout, q, out, dq, lse, dlse)) = of_call.call, of_call.of(i)
                with lanes.of(number):
                    k, v = (local.view(call, x, call.k) for x in keys)
                    written = [local.view(call, x, (0, x.shape[1])) for x in gradients]
                    tensors = BackwardTensors(dout, dlse, q, k, v, out, lse)
                    dsink_part = local.backward_of_views(call, tensors, options, [dq, *written])
                if dsink is not None and dsink_part is not None:
                    dsink += dsink_part
        return parts


def _others(spans: Iterable[Span]) -> Iterator[slice]:
    """The rows that are in none of the spans, of which no two overlap."""
    at = 0
    for first, last in sorted(spans):
        yield slice(at, first)
        at = last
    yield slice(at, None)


# -------------------------------------------------------------------------------------------- ring
# Ring: every rank computes its queries against the keys of one rank after the other.
#
# Ring Attention (Liu, Zaharia, Abbeel, arXiv 2310.01889), with a zigzag layout so that every step
# has the same work on every rank under a causal mask: the first half of an earlier rank's keys for
# all queries, all of a later rank's keys for the second half of the queries.
#
# While the kernel computes a step, K and V of the next travel. A step gives out and lse as if there
# were no other keys; `torch.ops.flash_ext.combine_parts` makes the lse of all keys from the
# lse of several steps. In the backward pass each step has the lse and out of all keys, so gradients
# only add: dQ stays here, and each step's dK and dV go to their rank in the inputs' dtype.
#
# All sums are formed in float32, and rounded once. Their passes over memory are what a ring costs
# beyond its kernels: so what the steps give is kept and added up in one pass, a few at a time.


class Ring:
    """This method, for one rank."""

    def __init__(self, transport: Transport, shards: Sharding, mask: Mask) -> None:
        self.transport = transport
        self.steps = plan.ring(shards, transport.rank, mask)

    def _keys(self, k: Tensor, v: Tensor) -> Iterator[Rows]:
        """K and V of each step, while the next K and V travel."""
        begin = self.transport.rotate((k, v), len(self.steps), "ring of K and V")
        here: Rows = k, v
        for t in range(1, len(self.steps)):
            following = begin(t)
            yield here
            here = following.wait()
        yield here

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        results = _Results(q.shape[:-1], v)
        for calls, (k_here, v_here) in zip(self.steps, self._keys(k, v), strict=True):
            for call in calls:
                out, lse = local.forward(call, q, k_here, v_here, options)
                results.add(out, lse, call.q[0])
        return q, k, v, *results.found()

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved."""
        return q, k, v, out, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        dq, dk, dv = (Sum(x) for x in (q, k, v))
        dsink: Tensor | None = None
        behind = _Behind()

        def follow(begun: Pending[Rows] | None) -> None:
            for sums, part in zip((dk, dv), behind.follow(begun) or (), strict=False):
                sums.add(part)

        steps = zip(self.steps, self._keys(k, v), strict=True)
        for t, (calls, (k_here, v_here)) in enumerate(steps):
            parts: list[tuple[Span, Rows]] = []
            for call in calls:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call, dout, dlse, q, k_here, v_here, out, lse, options
                )
                dq.add(dq_part, call.q[0])
                parts.append((call.k, (dk_part, dv_part)))
                dsink = local.add(dsink, dsink_part)
            if t > 0:
                follow(self.transport.shift(parts, (k, v), -t, f"ring of dK and dV, step {t}"))
                continue
            for (first, _), of_call in parts:
                for sums, part in zip((dk, dv), of_call, strict=True):
                    sums.add(part, first)
        follow(None)
        if "sink" in options and dsink is None:
            dsink = torch.zeros_like(options["sink"])
        return dq.found(), dk.found(), dv.found(), dsink


class _Results:
    """out (B, rows, H, Dv) and lse (B, H, rows) of all keys from several results of some keys;
    a few at a time, so that not all of many are kept."""

    def __init__(self, queries: torch.Size, v: Tensor) -> None:
        """`queries`: (B, rows, H)."""
        self._queries, self._v = queries, v
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._firsts: list[int] = []

    def add(self, out: Tensor, lse: Tensor, first: int) -> None:
        """Of the queries from `first` on."""
        if many([part.shape[2] for _, part in self._parts], self._queries[1]):
            self._parts, self._firsts = [self._combined(statistics_dtype(self._v.dtype))], [0]
        self._parts.append((out, lse))
        self._firsts.append(first)

    def found(self) -> tuple[Tensor, Tensor]:
        """In the inputs' dtype; a part itself if it is the only one."""
        if len(self._parts) == 1:
            ((out, lse),) = self._parts
            if out.shape[:-1] == self._queries and out.dtype == self._v.dtype:
                return out, lse
        return self._combined(self._v.dtype)

    def _combined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, rows, heads = self._queries
        out = self._v.new_empty((batch, rows, heads, self._v.shape[-1]), dtype=dtype)
        lse = self._v.new_empty((batch, heads, rows), dtype=statistics_dtype(dtype))
        outs, statistics = ([part[i] for part in self._parts] for i in (0, 1))
        ops.combine_parts(out, lse, outs, statistics, self._firsts)
        return out, lse


# ----------------------------------------------------------------------------------------- Ulysses
# Ulysses: from all heads of a rank's rows to all rows of a rank's heads, and back.
#
# DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Heads travel in pieces, each of which every
# rank has a part of: while the kernel computes one piece, the next one travels in and the one
# before travels out. Within, a rank has whole sequences, or, at two levels, all rows of its group
# of ranks, which a ring or an all-gather across groups completes.
#
# Every rank needs its own key heads. If there are fewer than ranks, each is sent to several.

SAVED = 5
"""How many tensors an all-gather and a ring save: q, k, v, out and lse."""


class Core(Protocol):
    """A method: attention of this rank's rows, with gradients, below autograd."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, or what else `backward` needs; out and lse are the last two."""

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved, where only its inputs and results have been kept."""

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """dq, dk, dv, and dsink where the options have a sink."""


def key_head_copies(heads_q: int, heads_k: int, ranks: int) -> int | None:
    """How many ranks share a key head; None if the heads cannot be divided."""
    if heads_q % ranks:
        return None
    if heads_k % ranks == 0:
        return 1
    return ranks // heads_k if ranks % heads_k == 0 else None


class Ulysses:
    """This method, with another one for the rest, within."""

    def __init__(
        self, transport: Transport, inner: Core, copies: int, pieces: tuple[int, ...]
    ) -> None:
        self.transport, self.inner, self.copies, self.pieces = transport, inner, copies, pieces

    def _heads(self, heads_q: int) -> list[tuple[slice, slice, slice]]:
        """For each piece: heads of q and of k, and which of q's are this rank's.

        A piece is consecutive key heads, as many for every rank, and the query heads that read
        them.
        """
        ranks = self.transport.ranks
        found = []
        for of_q, of_k in local.head_pieces(heads_q // ranks, self.pieces):
            first = ranks * of_q.start + self.transport.rank * (of_q.stop - of_q.start)
            found.append(
                (
                    slice(ranks * of_q.start, ranks * of_q.stop),
                    slice(ranks * of_k.start, ranks * of_k.stop),
                    slice(first, first + of_q.stop - of_q.start),
                )
            )
        return found

    def _arriving(self, parts: Callable[[int], Rows], what: str) -> Iterator[Rows]:
        """Each piece at its ranks; the next one travels meanwhile."""

        def begin(i: int) -> Pending[Rows]:
            return self.transport.to_heads(parts(i), f"all-to-all of {what}, {self._piece(i)}")

        following = begin(0)
        for i in range(1, len(self.pieces)):
            pending, following = following, begin(i)
            yield pending.wait()
        yield following.wait()

    def _piece(self, i: int) -> str:
        return f"piece {i + 1} of {len(self.pieces)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """What the inner method saves of each piece, then out and lse of this rank's rows."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, dim=2) for x in (k, v))
        heads = self._heads(q.shape[2])

        def parts(i: int) -> Rows:
            q_heads, k_heads, _ = heads[i]
            return q[:, :, q_heads], k[:, :, k_heads], v[:, :, k_heads]

        batch, rows, heads_q, _ = q.shape
        out = q.new_empty((batch, rows, heads_q, v.shape[-1]))
        lse = q.new_empty((batch, rows, heads_q), dtype=statistics_dtype(q.dtype))
        saved: list[Tensor] = []
        behind = _Behind()
        arriving = self._arriving(parts, "q, k and v")
        of_pieces = zip(arriving, heads, strict=True)
        for i, ((q_all, k_all, v_all), (q_heads, _, mine)) in enumerate(of_pieces):
            chosen = local.of_heads(options, mine.start, mine.stop)
            found = self.inner.forward(q_all, k_all, v_all, chosen)
            saved += found
            into = out[:, :, q_heads], lse[:, :, q_heads]
            what = f"all-to-all of out and lse, {self._piece(i)}"
            behind.follow(self.transport.to_rows((found[-2], found[-1].mT), into, what))
        behind.follow(None)
        return *saved, out, lse.mT.contiguous()

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved: all of it travels to the ranks of its heads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, dim=2) for x in (k, v))
        saved: list[Tensor] = []
        for q_heads, k_heads, _ in self._heads(q.shape[2]):
            of_q, of_k = ([x[:, :, heads] for x in tensors] for heads, tensors in (
                (q_heads, (q, out, lse.mT)), (k_heads, (k, v))
            ))  # fmt: skip
            pending = self.transport.to_heads((*of_q, *of_k), "all-to-all of what was saved")
            q_all, out_all, lse_all, k_all, v_all = pending.wait()
            saved += self.inner.saved_again(q_all, k_all, v_all, out_all, lse_all.mT)
        return *saved, out, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        *inner, _, _ = saved
        batch, rows, heads_q, _ = dout.shape
        heads = self._heads(heads_q)

        def parts(i: int) -> Rows:
            q_heads, _, _ = heads[i]
            of_out = dout[:, :, q_heads]
            return (of_out,) if dlse is None else (of_out, dlse[:, q_heads].mT)

        dsink = options["sink"].new_zeros(heads_q) if "sink" in options else None
        q, k, v = inner[:3]
        heads_k = heads[-1][1].stop
        dq = q.new_empty((batch, rows, heads_q, q.shape[-1]))
        dk, dv = (x.new_empty((batch, rows, heads_k, x.shape[-1])) for x in (k, v))
        behind = _Behind()
        arriving = self._arriving(parts, "dout and dlse")
        of_pieces = zip(_chunks(inner), arriving, heads, strict=True)
        for i, (piece, (dout_all, *rest), (q_heads, k_heads, mine)) in enumerate(of_pieces):
            dlse_all = rest[0].mT if rest else None
            chosen = local.of_heads(options, mine.start, mine.stop)
            *gradients, dsink_part = self.inner.backward(piece, dout_all, dlse_all, chosen)
            if dsink is not None and dsink_part is not None:
                dsink[mine] = dsink_part
            into = dq[:, :, q_heads], dk[:, :, k_heads], dv[:, :, k_heads]
            what = f"all-to-all of dQ, dK and dV, {self._piece(i)}"
            behind.follow(self.transport.to_rows(tuple(gradients), into, what))
        behind.follow(None)
        if self.copies > 1:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        return dq, dk, dv, dsink


def _chunks(saved: list[Tensor]) -> Iterator[Saved]:
    """What the inner method saved of each piece: five tensors."""
    for i in range(0, len(saved), SAVED):
        yield tuple(saved[i : i + SAVED])
