"""Ulysses: from all heads of a rank's rows to all rows of a rank's heads, and back.

DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Heads travel in pieces, each of which every
rank has a part of: while the kernel computes one piece, the next one travels in and the one before
travels out. Within, a rank has whole sequences, or, at two levels, all rows of its group of ranks,
which a ring or an all-gather across groups completes.

Every rank needs key heads of its own. Where there are fewer than ranks each is sent to several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ...ops.checks import statistics_dtype
from . import local
from .gather import Gradients, Saved
from .local import Options
from .rows import Rows
from .transport import Pending, Transport

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
    """How many ranks share a key head; None where the heads cannot be divided."""
    if heads_q % ranks:
        return None
    if heads_k % ranks == 0:
        return 1
    return ranks // heads_k if ranks % heads_k == 0 else None


class Ulysses:
    """This method, with another one for what is left to do within."""

    def __init__(
        self, transport: Transport, inner: Core, copies: int, pieces: tuple[int, ...]
    ) -> None:
        self.transport, self.inner, self.copies, self.pieces = transport, inner, copies, pieces

    def _heads(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice]]:
        """For each piece: heads of q and of k, and which of q's are this rank's.

        A piece is consecutive key heads, as many for every rank, and the query heads that read
        them.
        """
        ranks = self.transport.ranks
        found = []
        for of_q, of_k in local.head_pieces(q.shape[2] // ranks, self.pieces):
            first = ranks * of_q.start + self.transport.rank * (of_q.stop - of_q.start)
            found.append(
                (
                    slice(ranks * of_q.start, ranks * of_q.stop),
                    slice(ranks * of_k.start, ranks * of_k.stop),
                    slice(first, first + of_q.stop - of_q.start),
                )
            )
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """What the inner method saves of each piece, then out and lse of this rank's rows."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, dim=2) for x in (k, v))
        heads = self._heads(q, k)

        def begin(i: int) -> Pending[Rows]:
            q_heads, k_heads, _ = heads[i]
            parts = (q[:, :, q_heads], k[:, :, k_heads], v[:, :, k_heads])
            what = f"all-to-all of q, k and v, piece {i + 1} of {len(heads)}"
            return self.transport.to_heads(parts, what)

        batch, rows, heads_q, _ = q.shape
        out = q.new_empty((batch, rows, heads_q, v.shape[-1]))
        lse = q.new_empty((batch, rows, heads_q), dtype=statistics_dtype(q.dtype))
        saved: list[Tensor] = []
        travelling: list[Pending[None]] = []
        following = begin(0)
        for i, (q_heads, _, mine) in enumerate(heads):
            pending = following
            if i + 1 < len(heads):
                following = begin(i + 1)
            q_all, k_all, v_all = pending.wait()
            found = self.inner.forward(
                q_all, k_all, v_all, local.of_heads(options, mine.start, mine.stop)
            )
            saved += found
            into = out[:, :, q_heads], lse[:, :, q_heads]
            what = f"all-to-all of out and lse, piece {i + 1} of {len(heads)}"
            travelling.append(self.transport.to_rows((found[-2], found[-1].mT), into, what))
            if i > 0:  # the piece before, whose way back the kernels above have hidden
                travelling.pop(0).wait()
        travelling.pop().wait()
        return *saved, out, lse.mT.contiguous()

    def saved_again(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Saved:
        """What `forward` saved: all of it travels to the ranks of its heads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, dim=2) for x in (k, v))
        saved: list[Tensor] = []
        for q_heads, k_heads, _ in self._heads(q, k):
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
        pieces = list(_chunks(inner))
        ranks = self.transport.ranks
        q_heads_all = dout.shape[2]
        heads: list[tuple[slice, slice]] = []
        at = 0
        for piece in pieces:
            each = piece[0].shape[2]
            first = at + self.transport.rank * each
            heads.append((slice(at, at + ranks * each), slice(first, first + each)))
            at += ranks * each

        def begin(i: int) -> Pending[Rows]:
            q_heads = heads[i][0]
            gradients: Rows = (dout[:, :, q_heads],)
            if dlse is not None:
                gradients = (*gradients, dlse[:, q_heads].mT)
            what = f"all-to-all of dout and dlse, piece {i + 1} of {len(heads)}"
            return self.transport.to_heads(gradients, what)

        dsink = options["sink"].new_zeros(q_heads_all) if "sink" in options else None
        q, k, v = pieces[0][:3]
        batch, rows = dout.shape[:2]
        key_heads = sum(piece[1].shape[2] for piece in pieces) * ranks
        dq = q.new_empty((batch, rows, q_heads_all, q.shape[-1]))
        dk, dv = (x.new_empty((batch, rows, key_heads, x.shape[-1])) for x in (k, v))
        at = 0
        travelling: list[Pending[None]] = []
        following = begin(0)
        for i, (piece, (q_heads, mine)) in enumerate(zip(pieces, heads, strict=True)):
            pending = following
            if i + 1 < len(heads):
                following = begin(i + 1)
            dout_part, *rest = pending.wait()
            dlse_part = rest[0].mT if rest else None
            chosen = local.of_heads(options, mine.start, mine.stop)
            *gradients, dsink_part = self.inner.backward(piece, dout_part, dlse_part, chosen)
            if dsink is not None and dsink_part is not None:
                dsink[mine] = dsink_part
            k_heads = slice(at, at + ranks * piece[1].shape[2])
            at = k_heads.stop
            into = dq[:, :, q_heads], dk[:, :, k_heads], dv[:, :, k_heads]
            what = f"all-to-all of dQ, dK and dV, piece {i + 1} of {len(pieces)}"
            travelling.append(self.transport.to_rows(tuple(gradients), into, what))
            if i > 0:
                travelling.pop(0).wait()
        travelling.pop().wait()
        if self.copies > 1:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        return dq, dk, dv, dsink


def _chunks(saved: list[Tensor]) -> Iterator[Saved]:
    """What the inner method saved of each piece: five tensors."""
    for i in range(0, len(saved), SAVED):
        yield tuple(saved[i : i + SAVED])
