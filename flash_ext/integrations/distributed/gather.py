"""All-gather: every rank gathers K and V and computes its queries by calls of its own.

As in Llama 3 (arXiv 2407.21783, section 3.3.2). K and V travel in pieces of heads: while the kernel
computes one piece the next travels. A query meets all its keys in one call, so nothing is merged.
The backward pass gathers K and V again, so nothing but this rank's rows is kept between, and sums
dK and dV over the ranks, each piece while the kernel computes the next. Gradients travel in the
inputs' dtype and are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local
from .calls import Call
from .lanes import Lanes
from .local import Options
from .plan import as_batch
from .rows import Rows, add_in_place
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
        self, transport: Transport | None, k: Tensor, v: Tensor, heads: list[tuple[slice, slice]]
    ) -> None:
        self._parts: list[Rows] = [(k[:, :, k_heads], v[:, :, k_heads]) for _, k_heads in heads]
        self._transport, self._given, self._begun = transport, 0, 0
        self._travelling: Pending[Rows] | None = None
        if transport is not None:
            self._begin = transport.gather(self._parts, "all-gather of K and V")
            self._begin_next()

    def _begin_next(self) -> None:
        if self._begun < len(self._parts):
            self._travelling = self._begin(self._begun)
            self._begun += 1

    def wait(self) -> Rows:
        """K and V of the next piece, (B, S, H, D)."""
        self._given += 1
        if self._transport is None:
            return self._parts[self._given - 1]
        pending = self._travelling
        assert pending is not None
        if self._transport.needs_sms:
            self._begin_next()
        return pending.wait()

    def launched(self) -> None:
        """The kernels of this piece have been enqueued."""
        if self._transport is not None and not self._transport.needs_sms:
            self._begin_next()


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

    def _heads(self, q: Tensor, k: Tensor, returns: bool) -> list[tuple[slice, slice]]:
        """Heads of q and of k in each piece; `returns`: its gradients travel back."""
        heads = k.shape[2]
        split = None if self.transport is None else self.pieces
        pieces = (heads,) if split is None else split(heads, returns)
        return list(local.head_pieces(q.shape[2], pieces))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        pieces = self._heads(q, k, returns=False)
        batch, count, _, _ = q.shape
        calls = as_batch(self.calls) if batch == 1 else self.calls
        whole = [call.q for call in calls] == [(0, count)]
        keys = _Keys(self.transport, k, v, pieces)
        if whole and len(pieces) == 1:
            chosen = local.of_heads(options, 0, q.shape[2])
            k_all, v_all = keys.wait()
            out, lse = local.forward(calls[0], q, k_all, v_all, chosen)
            return q, k, v, out, lse
        out = q.new_empty((batch, count, q.shape[2], v.shape[-1]))
        lse = q.new_empty((batch, q.shape[2], count), dtype=statistics_dtype(q.dtype))
        for rows in _others(call.q for call in calls):  # that see no key
            out[:, rows].zero_()
            lse[..., rows].fill_(-torch.inf)
        kept = []
        with Lanes(q.device, self._beside) as lanes:
            for i, (q_heads, _) in enumerate(pieces):
                with lanes.of(i):
                    k_all, v_all = keys.wait()
                    chosen = local.of_heads(options, q_heads.start, q_heads.stop)
                    for call in calls:
                        q_rows = slice(*call.q)
                        lse[:, q_heads, q_rows] = local.forward(
                            call, q[:, :, q_heads], k_all, v_all, chosen, out[:, q_rows, q_heads]
                        )[1]
                kept.append((k_all, v_all))
                keys.launched()
        return q, k, v, out, lse

    def _backward_calls(self, k: Tensor) -> Sequence[Call]:
        """The longest first: its gradient is the sum's first value."""
        keys = k.shape[2] * sum(last - first for first, last in (call.k for call in self.calls))
        calls = as_batch(self.calls) if k.shape[0] == 1 and keys <= FEW_KEYS else self.calls
        return sorted(calls, key=lambda call: call.k[0] - call.k[1])

    def _beside_each_other(self, calls: Sequence[Call], options: Options) -> bool:
        """Whether the calls of a piece are on two streams by turns: those of documents, whose last
        tiles are of unequal lengths. Others were no faster (docs/notes/020)."""
        packed = all(call.packed is not None for call in calls)
        return self._beside and packed and "sink" not in options  # dsink is added up on one stream

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved."""
        return q, k, v, out, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        pieces = self._heads(q, k, returns=True)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows in _others(call.q for call in self.calls):
            dq[:, rows].zero_()
        dsink = options["sink"].new_zeros(q.shape[2]) if "sink" in options else None
        travelling: Pending[None] | None = None
        keys = _Keys(self.transport, k, v, pieces)
        for i, (q_heads, k_heads) in enumerate(pieces):
            chosen = local.of_heads(options, q_heads.start, q_heads.stop)
            into = dk[:, :, k_heads], dv[:, :, k_heads]
            what = f"sum of dK and dV, piece {i + 1} of {len(pieces)}"
            whole: Rows = into
            parts: list[tuple[Span, Rows]] = []
            begin = None
            if self.transport is not None:  # before the keys' memory may be taken again
                whole, begin = self.transport.scatter(into, what)
            k_all, v_all = keys.wait()
            calls = self._backward_calls(k_all)
            # All of it before a lane begins, which would not wait for what used the memory before.
            for call in calls:
                rows = slice(*call.k)
                written = tuple(x[:, rows] for x in whole)
                if parts:
                    written = tuple(x.new_empty(x.shape) for x in written)
                parts.append((call.k, written))
            with Lanes(q.device, self._beside_each_other(calls, options)) as lanes:
                for number, (call, (_, (dk_call, dv_call))) in enumerate(
                    zip(calls, parts, strict=True)
                ):
                    with lanes.of(number):
                        *_, dsink_part = local.backward(
                            call,
                            dout[:, :, q_heads],
                            None if dlse is None else dlse[:, q_heads],
                            q[:, :, q_heads],
                            k_all,
                            v_all,
                            out[:, :, q_heads],
                            lse[:, q_heads],
                            chosen,
                            (dq[:, slice(*call.q), q_heads], dk_call, dv_call),
                        )
                    if dsink is not None and dsink_part is not None:
                        dsink[q_heads] += dsink_part
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


def _others(spans: Iterable[Span]) -> Iterator[slice]:
    """The rows that are in none of the spans, of which no two overlap."""
    at = 0
    for first, last in sorted(spans):
        yield slice(at, first)
        at = last
    yield slice(at, None)
