"""All-gather: every rank gathers K and V and computes its queries by calls of its own.

As in Llama 3 (arXiv 2407.21783, section 3.3.2). K and V travel in pieces of heads: while the kernel
computes one piece the next travels. A query meets all its keys in one call, so nothing is merged.
The backward pass gathers K and V again, so nothing but this rank's rows is kept between, and sums
dK and dV over the ranks, each piece while the kernel computes the next. Gradients travel in the
inputs' dtype and are summed in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local
from .calls import Call
from .lanes import Lanes
from .local import Options
from .plan import as_batch
from .rows import Rows, add_in_place, narrowed
from .sharding import Span
from .transport import Pending, Transport

FEW_KEYS = 160_000
"""Rows of keys, of all heads and calls, up to which two calls of a backward pass are better one.
That is some ten waves of tiles. The last wave of each call is not full; with more tiles that costs
less than the pass over memory that adds up the gradients of one call (docs/notes/020)."""

PiecesOf = Callable[[int, bool], tuple[int, ...]]
"""How many key heads are in each piece: of their number, and whether gradients travel back."""

Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Keys:
    """The whole sequence's K and V, piece by piece."""

    def __init__(
        self, transport: Transport | None, k: Tensor, v: Tensor, pieces: tuple[int, ...]
    ) -> None:
        self._transport, self._given, self._begun = transport, 0, 0
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
        """Whether a piece of so many key heads has one call backward if that can be."""
        return batch == 1 and heads * sum(call.k[1] - call.k[0] for call in self.calls) <= FEW_KEYS

    def _beside_each_other(self, views: Sequence[_Views], dsink: Tensor | None) -> bool:
        """Whether the calls of a piece are on two streams by turns: those of documents, whose last
        tiles are of unequal lengths. Others were no faster (docs/notes/020)."""
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

        travelling: Pending[None] | None = None
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
                continue
            pending = begin(parts)
            if travelling is not None:  # the piece before, whose sum the kernels above have hidden
                travelling.wait()
            travelling = pending
        if travelling is not None:
            travelling.wait()
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
            written = tuple(narrowed(x, span, 1) for x in into)
            if number > 0:
                written = tuple(x.new_empty(x.shape) for x in written)
            parts.append((span, written))
        with Lanes(into[0].device, self._beside_each_other(views, dsink)) as lanes:
            for number, (of_call, (_, gradients)) in enumerate(zip(views, parts, strict=True)):
                call, (options, (dout, q, out, dq, lse, dlse)) = of_call.call, of_call.of(i)
                with lanes.of(number):
                    k, v = (local.view(call, x, call.k) for x in keys)
                    dk, dv = (local.view(call, x, (0, x.shape[1])) for x in gradients)
                    dsink_part = local.backward_of_views(
                        call, dout, dlse, q, k, v, out, lse, options, dq, dk, dv
                    )
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
