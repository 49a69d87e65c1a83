"""Ring: every rank computes its queries against the keys of one rank after the other.

Ring Attention (Liu, Zaharia, Abbeel, arXiv 2310.01889), with a zigzag layout so that every step has
the same work on every rank under a causal mask: the first half of an earlier rank's keys for all
queries, all of a later rank's keys for the second half of the queries.

While the kernel computes a step, K and V of the next travel. A step gives out and lse as if there
were no other keys; `torch.ops.flash_ext.combine_partial` adds it to the results so far. In the
backward pass each step has the lse and out of all keys, so gradients only add: dQ stays here, and
each step's dK and dV go to their rank in the inputs' dtype, which adds them.

All sums are formed in float32. Their passes over memory are what a ring costs beyond its kernels:
so a row's first addition reads what the kernel has written, and its last one writes the inputs'
dtype. A sum of two steps is never stored in float32. (Gradients of three steps or more have a pass
that only converts.)
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local, plan
from .gather import Gradients, Saved
from .local import Options
from .plan import Mask
from .rows import Rows, total
from .sharding import Sharding, Span
from .transport import Pending, Transport


class Ring:
    """This method, for one rank."""

    def __init__(self, transport: Transport, shards: Sharding, mask: Mask) -> None:
        self.transport = transport
        rank, ranks = transport.rank, transport.ranks
        count = plan.ring_steps(shards, mask)
        self.steps = [plan.step(shards, rank, (rank - t) % ranks, mask) for t in range(count)]
        calls = tuple(itertools.chain(*self.steps))
        # Whether the first call is one of all queries: to its results the others are added.
        self.begins = calls != () and calls[0].q == (0, shards.lengths[rank])
        self.additions = plan.additions(calls[self.begins :])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        batch, rows, heads, _ = q.shape
        results: _Results | None = None
        lse: Tensor | None = None
        if not self.begins:
            results = _Results(q.new_zeros((batch, rows, heads, v.shape[-1])))
            lse = q.new_full((batch, heads, rows), -torch.inf, dtype=statistics_dtype(q.dtype))
        additions = iter(self.additions)
        begin = self.transport.rotate((k, v), len(self.steps), "ring of K and V")
        k_here, v_here = k, v
        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < len(self.steps) else None
            for call in calls:
                o_partial, lse_partial = local.forward(call, q, k_here, v_here, options)
                if results is None or lse is None:
                    results, lse = _Results(o_partial), lse_partial
                    continue
                for addition in next(additions):
                    of_all, of_call = addition.rows_of(call)
                    out, before = results.places(addition)
                    torch.ops.flash_ext.combine_partial(
                        out,
                        lse[..., of_all],
                        o_partial[:, of_call],
                        lse_partial[..., of_call],
                        before,
                    )
            if following is not None:
                k_here, v_here = following.wait()
        assert results is not None and lse is not None
        return q, k, v, results.found, lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        steps = len(self.steps)
        dq = None if self.begins else _Results(torch.zeros_like(q))
        dk_dv: list[_Results] = []
        dsink: Tensor | None = None
        additions = iter(self.additions)
        begin = self.transport.rotate((k, v), steps, "ring of K and V")
        k_here, v_here = k, v
        travelling: tuple[int, Pending[Rows]] | None = None

        def arrive(t: int, pending: Pending[Rows]) -> None:
            for sums, part in zip(dk_dv, pending.wait(), strict=True):
                sums.add(part, plan.Addition((0, part.shape[1]), t == 1, t == steps - 1))

        for t, calls in enumerate(self.steps):
            following = begin(t + 1) if t + 1 < steps else None
            parts: list[tuple[Span, Rows]] = []
            for call in calls:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call, dout, dlse, q, k_here, v_here, out, lse, options
                )
                if dq is None:
                    dq = _Results(dq_part)
                else:
                    for addition in next(additions):
                        dq.add(dq_part[:, addition.rows_of(call)[1]], addition)
                parts.append((call.k, (dk_part, dv_part)))
                dsink = local.add(dsink, dsink_part)
            if t == 0:
                dk_dv = [_Results(x) for x in _of_rows(parts, (k, v))]
                pending = None
            else:
                what = f"ring of dK and dV, step {t}"
                pending = t, self.transport.shift(parts, (k, v), -t, what)
            if travelling is not None:  # of the step before, which this one has hidden
                arrive(*travelling)
            travelling = pending
            if following is not None:
                k_here, v_here = following.wait()
        if travelling is not None:
            arrive(*travelling)
        if "sink" in options and dsink is None:
            dsink = torch.zeros_like(options["sink"])
        assert dq is not None
        dk, dv = (sums.found for sums in dk_dv)
        return dq.found, dk, dv, dsink


def _of_rows(parts: list[tuple[Span, Rows]], like: Rows) -> Rows:
    """The sum of parts, for all rows; the part itself where it is one of all rows."""
    if [span for span, _ in parts] == [(0, like[0].shape[1])]:
        return parts[0][1]
    found = tuple(torch.empty_like(x) for x in like)
    total(parts, found)
    return found


class _Results:
    """Results (B, rows, H, D) to which others are added: in the inputs' dtype before the first
    addition and after the last one, and in float32 (float64) between them."""

    def __init__(self, found: Tensor) -> None:
        self.found = found
        self._sums: Tensor | None = None

    def places(self, addition: plan.Addition) -> tuple[Tensor, Tensor | None]:
        """Where the sums of these rows belong, and where the results so far are, if not there."""
        out = self._at(addition.last)[:, slice(*addition.rows)]
        if addition.first == addition.last:
            return out, None
        return out, self._at(addition.first)[:, slice(*addition.rows)]

    def add(self, part: Tensor, addition: plan.Addition) -> None:
        """Add gradients of some rows."""
        out, before = self.places(addition)
        if before is not None and addition.first:
            out.copy_(before)  # a sum of two tensors of 16 bits would be rounded to 16 bits
            before = None
        torch.add(out if before is None else before, part, out=out)

    def _at(self, edge: bool) -> Tensor:
        if edge:
            return self.found
        if self._sums is None:
            dtype = statistics_dtype(self.found.dtype)
            self._sums = torch.empty_like(self.found, dtype=dtype)
        return self._sums
