"""All-gather: every rank gathers K and V and computes its queries by calls of its own.

As in Llama 3 (arXiv 2407.21783, section 3.3.2). K and V travel in pieces of heads: while the kernel
computes one piece the next travels. A query meets all its keys in one call, so nothing is merged.
The backward pass gathers K and V again, so nothing but this rank's rows is kept between, and sums
dK and dV over the ranks, each piece while the kernel computes the next. Gradients travel in the
inputs' dtype and are summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local
from .cost import pieces_of
from .local import Options
from .plan import Call
from .transport import Pending, Transport

Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def rows_first(*tensors: Tensor) -> Tensor:
    """(rows, B, H, ΣD), contiguous: tensors (B, rows, H, D) side by side, as they travel."""
    return torch.cat([x.transpose(0, 1) for x in tensors], dim=-1)


def rows_second(x: Tensor, *dims: int) -> tuple[Tensor, ...]:
    """Views (B, rows, H, D) of what `rows_first` has put side by side."""
    return tuple(torch.split(x.transpose(0, 1), list(dims), dim=-1))


class Gather:
    """This method, for a rank's calls against the whole sequence."""

    def __init__(
        self, transport: Transport | None, calls: tuple[Call, ...], ratio: float = 0.0
    ) -> None:
        """`transport` is None where this rank has the whole sequence; `ratio`: `cost.pieces_of`."""
        self.transport, self.calls, self.ratio = transport, calls, ratio

    def _heads(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        heads = k.shape[2]
        pieces = (heads,) if self.transport is None else pieces_of(heads, self.ratio)
        return list(local.head_pieces(q.shape[2], pieces))

    def _keys(
        self, k: Tensor, v: Tensor, heads: list[tuple[slice, slice]]
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Pieces: heads of q and of k, and the whole sequence's K and V of these heads.

        The next piece has begun to travel when a piece is given out.
        """
        if self.transport is None:
            for q_heads, k_heads in heads:
                yield q_heads, k_heads, k[:, :, k_heads], v[:, :, k_heads]
            return
        transport = self.transport

        def begin(i: int) -> Pending:
            part = rows_first(*(x[:, :, heads[i][1]] for x in (k, v)))
            return transport.gather(part, f"all-gather of K and V, piece {i + 1} of {len(heads)}")

        following = begin(0)
        for i, (q_heads, k_heads) in enumerate(heads):
            pending = following
            if i + 1 < len(heads):
                following = begin(i + 1)
            k_all, v_all = rows_second(pending.wait(), k.shape[-1], v.shape[-1])
            yield q_heads, k_heads, k_all, v_all

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, all of this rank's rows."""
        pieces = self._heads(q, k)
        batch, rows, heads, _ = q.shape
        whole = len(pieces) == 1 and [call.q for call in self.calls] == [(0, rows)]
        out = lse = None
        for q_heads, _, k_all, v_all in self._keys(k, v, pieces):
            chosen = local.of_heads(options, q_heads.start, q_heads.stop)
            for call in self.calls:
                out_part, lse_part = local.forward(call, q[:, :, q_heads], k_all, v_all, chosen)
                if whole:
                    return q, k, v, out_part, lse_part
                if out is None or lse is None:
                    out = out_part.new_zeros((batch, rows, heads, v.shape[-1]))
                    lse = lse_part.new_full((batch, heads, rows), -torch.inf)
                out[:, slice(*call.q), q_heads] = out_part
                lse[:, q_heads, slice(*call.q)] = lse_part
        return q, k, v, *_or_nothing(out, lse, q, v)

    def backward(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, options: Options
    ) -> Gradients:
        """The gradients of q, k, v and of the sink, this rank's share."""
        q, k, v, out, lse = saved
        pieces = self._heads(q, k)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        dsink = options["sink"].new_zeros(q.shape[2]) if "sink" in options else None
        # The longest first: its gradient is the sum's first value.
        by_keys = sorted(self.calls, key=lambda call: call.k[0] - call.k[1])
        travelling: tuple[slice, Pending] | None = None

        def finish() -> None:
            if travelling is not None:
                heads, pending = travelling
                sums = rows_second(pending.wait(), k.shape[-1], v.shape[-1])
                dk[:, :, heads], dv[:, :, heads] = sums

        for i, (q_heads, k_heads, k_all, v_all) in enumerate(self._keys(k, v, pieces)):
            chosen = local.of_heads(options, q_heads.start, q_heads.stop)
            dkv: Tensor | None = None
            for call in by_keys:
                dq_part, dk_part, dv_part, dsink_part = local.backward(
                    call,
                    dout[:, :, q_heads],
                    None if dlse is None else dlse[:, q_heads],
                    q[:, :, q_heads],
                    k_all,
                    v_all,
                    out[:, :, q_heads],
                    lse[:, q_heads],
                    chosen,
                )
                dq[:, slice(*call.q), q_heads] = dq_part
                if dsink is not None and dsink_part is not None:
                    dsink[q_heads] += dsink_part
                part = rows_first(dk_part, dv_part)
                if dkv is None and part.shape[0] == k_all.shape[1]:
                    dkv = part
                else:
                    if dkv is None:
                        dkv = part.new_zeros((k_all.shape[1], *part.shape[1:]))
                    dkv[slice(*call.k)] += part
            if dkv is None:
                dkv = rows_first(torch.zeros_like(k_all), torch.zeros_like(v_all))
            if self.transport is None:
                dk[:, :, k_heads], dv[:, :, k_heads] = rows_second(dkv, k.shape[-1], v.shape[-1])
                continue
            what = f"sum of dK and dV, piece {i + 1} of {len(pieces)}"
            pending = self.transport.scatter(dkv, what)
            finish()  # the piece before, whose sum the kernels above have hidden
            travelling = k_heads, pending
        finish()
        return dq, dk, dv, dsink


def _or_nothing(
    out: Tensor | None, lse: Tensor | None, q: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The results of a rank without any call."""
    if out is not None and lse is not None:
        return out, lse
    batch, rows, heads, _ = q.shape
    out = q.new_zeros((batch, rows, heads, v.shape[-1]))
    dtype = statistics_dtype(q.dtype)
    return out, q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
