"""Ring: every rank computes its queries against the keys of one rank after the other.

Ring Attention (Liu, Zaharia, Abbeel, arXiv 2310.01889), with a zigzag layout so that every step has
the same work on every rank under a causal mask: the first half of an earlier rank's keys for all
queries, all of a later rank's keys for the second half of the queries.

While the kernel computes a step, K and V of the next travel. A step gives out and lse as if there
were no other keys; `torch.ops.flash_ext.combine_parts` makes those of several steps into that of
all their keys. In the backward pass each step has the lse and out of all keys, so gradients only
add: dQ stays here, and each step's dK and dV go to their rank in the inputs' dtype.

All sums are formed in float32, and rounded once. Their passes over memory are what a ring costs
beyond its kernels: so what the steps give is kept and added up in one pass, a few at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ...ops.checks import statistics_dtype
from . import local, plan
from .calls import Mask
from .gather import Gradients, Saved
from .local import Options
from .rows import Rows, Sum, many
from .sharding import Sharding, Span
from .transport import Pending, Transport


class Ring:
    """This method, for one rank."""

    def __init__(self, transport: Transport, shards: Sharding, mask: Mask) -> None:
        self.transport = transport
        self.steps = plan.ring(shards, transport.rank, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        results = _Results(q.shape[:-1], v)
        begin = self.transport.rotate((k, v), len(self.steps), "ring of K and V")
        k_here, v_here = k, v
        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < len(self.steps) else None
            for call in calls:
                out, lse = local.forward(call, q, k_here, v_here, options)
                results.add(out, lse, call.q[0])
            if following is not None:
                k_here, v_here = following.wait()
        return q, k, v, *results.found()

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved."""
        return q, k, v, out, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        steps = len(self.steps)
        dq, dk, dv = (Sum(x) for x in (q, k, v))
        dsink: Tensor | None = None
        begin = self.transport.rotate((k, v), steps, "ring of K and V")
        k_here, v_here = k, v
        travelling: Pending[Rows] | None = None

        def arrive(pending: Pending[Rows]) -> None:
            for sums, part in zip((dk, dv), pending.wait(), strict=True):
                sums.add(part)

        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < steps else None
            parts: list[tuple[Span, Rows]] = []
            for call in calls:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call, dout, dlse, q, k_here, v_here, out, lse, options
                )
                dq.add(dq_part, call.q[0])
                parts.append((call.k, (dk_part, dv_part)))
                dsink = local.add(dsink, dsink_part)
            pending = None
            if t > 0:
                pending = self.transport.shift(parts, (k, v), -t, f"ring of dK and dV, step {t}")
            else:
                for (first, _), of_call in parts:
                    for sums, part in zip((dk, dv), of_call, strict=True):
                        sums.add(part, first)
            if travelling is not None:  # of the step before, which this one has hidden
                arrive(travelling)
            travelling = pending
            if following is not None:
                k_here, v_here = following.wait()
        if travelling is not None:
            arrive(travelling)
        if "sink" in options and dsink is None:
            dsink = torch.zeros_like(options["sink"])
        return dq.found(), dk.found(), dv.found(), dsink


class _Results:
    """out (B, rows, H, Dv) and lse (B, H, rows) of all keys from those of some keys each; a few at
    a time, so that not all of many are kept."""

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
