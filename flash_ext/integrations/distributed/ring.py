"""Ring: every rank computes its queries against the keys of one rank after the other.

Ring Attention (Liu, Zaharia, Abbeel, arXiv 2310.01889), with a zigzag layout so that every step has
the same work on every rank under a causal mask: the first half of an earlier rank's keys for all
queries, all of a later rank's keys for the second half of the queries.

While the kernel computes a step, K and V of the next travel. A step gives out and lse as if there
were no other keys; `torch.ops.flash_ext.combine_partial` adds it to the results so far in float32.
In the backward pass each step has the lse and out of all keys, so gradients only add: dQ stays
here, and each step's dK and dV go to their rank in the inputs' dtype, which adds them in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local, plan
from .gather import Gradients, Saved
from .local import Options
from .plan import Call, Mask
from .rows import Rows, total
from .sharding import Sharding, Span
from .transport import Pending, Transport


class Ring:
    """This method, for one rank."""

    def __init__(self, transport: Transport, shards: Sharding, mask: Mask) -> None:
        self.transport, self.shards = transport, shards
        rank, ranks = transport.rank, transport.ranks
        count = plan.ring_steps(shards, mask)
        self.steps = [plan.step(shards, rank, (rank - t) % ranks, mask) for t in range(count)]

    def _alone(self, t: int, q: Tensor) -> Call | None:
        """The call of the first step, where that is one of all queries."""
        calls = self.steps[t]
        return calls[0] if t == 0 and [c.q for c in calls] == [(0, q.shape[1])] else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        batch, rows, heads, _ = q.shape
        dtype = statistics_dtype(q.dtype)
        begin = self.transport.rotate((k, v), len(self.steps), "ring of K and V")
        k_here, v_here = k, v
        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < len(self.steps) else None
            if first := self._alone(t, q):
                o_partial, lse = local.forward(first, q, k_here, v_here, options)
                if len(self.steps) == 1:
                    return q, k, v, o_partial, lse
                out = o_partial.to(dtype)
            else:
                if t == 0:
                    out = q.new_zeros((batch, rows, heads, v.shape[-1]), dtype=dtype)
                    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
                for call in calls:
                    o_partial, lse_partial = local.forward(call, q, k_here, v_here, options)
                    q_rows = slice(*call.q)
                    torch.ops.flash_ext.combine_partial(
                        out[:, q_rows], lse[..., q_rows], o_partial, lse_partial
                    )
            if following is not None:
                k_here, v_here = following.wait()
        return q, k, v, out.to(q.dtype), lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        dtype = statistics_dtype(q.dtype)
        dq: Tensor | None = None
        dsink: Tensor | None = None
        sums = _Sums((k, v))
        begin = self.transport.rotate((k, v), len(self.steps), "ring of K and V")
        k_here, v_here = k, v
        travelling: Pending[Rows] | None = None
        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < len(self.steps) else None
            parts: list[tuple[Span, Rows]] = []
            for call in calls:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call, dout, dlse, q, k_here, v_here, out, lse, options
                )
                if dq is None and self._alone(t, q):
                    dq = dq_part if len(self.steps) == 1 else dq_part.to(dtype)
                else:
                    if dq is None:
                        dq = torch.zeros_like(q, dtype=dtype)
                    dq[:, slice(*call.q)] += dq_part
                parts.append((call.k, (dk_part, dv_part)))
                dsink = local.add(dsink, dsink_part)
            if t == 0:
                sums.add(_of_rows(parts, (k, v)))
                pending = None
            else:
                what = f"ring of dK and dV, step {t}"
                pending = self.transport.shift(parts, (k, v), -t, what)
            if travelling is not None:  # of the step before, which this one has hidden
                sums.add(travelling.wait())
            travelling = pending
            if following is not None:
                k_here, v_here = following.wait()
        if travelling is not None:
            sums.add(travelling.wait())
        if "sink" in options and dsink is None:
            dsink = torch.zeros_like(options["sink"])
        dk, dv = sums.result()
        return torch.zeros_like(q) if dq is None else dq.to(q.dtype), dk, dv, dsink


def _of_rows(parts: list[tuple[Span, Rows]], like: Rows) -> Rows:
    """The sum of parts, for all rows; the part itself where it is one of all rows."""
    if [span for span, _ in parts] == [(0, like[0].shape[1])]:
        return parts[0][1]
    found = tuple(torch.empty_like(x) for x in like)
    total(parts, found)
    return found


class _Sums:
    """Sums of dK and dV in float32 (float64), in the order of the steps, rounded once."""

    def __init__(self, like: Rows) -> None:
        self._like = like
        self._last: Rows | None = None
        self._sums: Rows | None = None

    def add(self, gradients: Rows) -> None:
        """Add those of a step. The last ones wait: `result` adds and rounds at once."""
        if self._last is not None:
            if self._sums is None:
                self._sums = tuple(x.to(statistics_dtype(x.dtype)) for x in self._last)
            else:
                for x, part in zip(self._sums, self._last, strict=True):
                    x += part
        self._last = gradients

    def result(self) -> Rows:
        """The gradients (B, rows, H, D), in the inputs' dtype; of a single step, its own."""
        assert self._last is not None, "there is at least one step"
        if self._sums is None:
            return self._last
        found = tuple(torch.empty_like(x) for x in self._like)
        for before, last, out in zip(self._sums, self._last, found, strict=True):
            torch.add(before, last, out=out)
        return found
