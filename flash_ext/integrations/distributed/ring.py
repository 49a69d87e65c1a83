"""Ring: K and V go from rank to rank, and every rank computes its queries against each in turn.

Ring Attention (Liu, Zaharia, Abbeel, arXiv 2310.01889), with a zigzag layout so that every step has
the same work on every rank under a causal mask: the first half of an earlier rank's keys for all
queries, all of a later rank's keys for the second half of the queries.

While the kernel computes a step, the next rank's K and V travel. A step gives out and lse as if
there were no other keys; `torch.ops.flash_ext.combine_partial` adds it to the results so far in
float32. In the backward pass each step has the lse and out of all keys, so gradients only add: dQ
stays here, and dK and dV in float32 travel after their K and V, each while the next step is
computed, and from the last step home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local, plan
from .gather import Gradients, Saved, rows_first, rows_second
from .local import Options
from .plan import Call, Mask
from .sharding import Sharding
from .transport import Pending, Transport


class Ring:
    """This method, for one rank."""

    def __init__(self, transport: Transport, shards: Sharding, mask: Mask) -> None:
        self.transport, self.shards = transport, shards
        rank, ranks = transport.rank, transport.ranks
        count = plan.ring_steps(shards, mask)
        self.steps = [plan.step(shards, rank, (rank - t) % ranks, mask) for t in range(count)]

    def _padded(self, x: Tensor) -> Tensor:
        """(rows, …) with as many rows as every rank sends."""
        missing = self.shards.most - x.shape[0]
        return torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x

    def _shift_keys(self, kv: Tensor, t: int) -> Pending | None:
        """Begin to move K and V of step t on, if another step follows."""
        if t + 1 == len(self.steps):
            return None
        return self.transport.shift(kv, 1, f"ring step {t + 1} of K and V")

    def _alone(self, t: int, q: Tensor) -> Call | None:
        """The call of the first step, where that is one of all queries."""
        calls = self.steps[t]
        return calls[0] if t == 0 and [c.q for c in calls] == [(0, q.shape[1])] else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        batch, rows, heads, _ = q.shape
        dims, dtype = (k.shape[-1], v.shape[-1]), statistics_dtype(q.dtype)
        kv = self._padded(rows_first(k, v))
        for t, calls in enumerate(self.steps):
            following = self._shift_keys(kv, t)
            k_here, v_here = rows_second(kv, *dims)
            if first := self._alone(t, q):
                o_partial, lse = local.forward(first, q, k_here, v_here, options)
                if len(self.steps) == 1:
                    return q, k, v, o_partial, lse
                out = o_partial.to(dtype)
            else:
                if t == 0:
                    out = q.new_zeros((batch, rows, heads, dims[1]), dtype=dtype)
                    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
                for call in calls:
                    o_partial, lse_partial = local.forward(call, q, k_here, v_here, options)
                    q_rows = slice(*call.q)
                    torch.ops.flash_ext.combine_partial(
                        out[:, q_rows], lse[..., q_rows], o_partial, lse_partial
                    )
            if following is not None:
                kv = following.wait()
        return q, k, v, out.to(q.dtype), lse

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        dims, dtype = (k.shape[-1], v.shape[-1]), statistics_dtype(q.dtype)
        dq: Tensor | None = None
        dsink: Tensor | None = None
        kv = self._padded(rows_first(k, v))
        travelling: Pending | None = None
        dkv: Tensor | None = None
        for t, calls in enumerate(self.steps):
            following = self._shift_keys(kv, t)
            k_here, v_here = rows_second(kv, *dims)
            parts: list[tuple[slice, Tensor, Tensor]] = []
            for call in calls:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call, dout, dlse, q, k_here, v_here, out, lse, options
                )
                if dq is None and self._alone(t, q):
                    dq = dq_part.to(dtype)
                else:
                    if dq is None:
                        dq = torch.zeros_like(q, dtype=dtype)
                    dq[:, slice(*call.q)] += dq_part
                parts.append((slice(*call.k), dk_part, dv_part))
                dsink = local.add(dsink, dsink_part)
            if travelling is not None:  # the sums of the ranks before, which came meanwhile
                dkv = travelling.wait()
            if dkv is None:
                dkv = torch.zeros_like(kv, dtype=dtype)
            dk_sum, dv_sum = rows_second(dkv, *dims)
            for k_rows, dk_part, dv_part in parts:
                dk_sum[:, k_rows] += dk_part
                dv_sum[:, k_rows] += dv_part
            if following is not None:
                travelling = self.transport.shift(dkv, 1, f"ring step {t + 1} of dK and dV")
                kv = following.wait()
        home = self.transport.ranks - (len(self.steps) - 1)
        assert dkv is not None, "there is at least one step"
        dkv = self.transport.shift(dkv, home, "dK and dV to their rank").wait()
        dk, dv = (x[:, : k.shape[1]].to(k.dtype) for x in rows_second(dkv, *dims))
        if "sink" in options and dsink is None:
            dsink = torch.zeros_like(options["sink"])
        return torch.zeros_like(q) if dq is None else dq.to(q.dtype), dk, dv, dsink
