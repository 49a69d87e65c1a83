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

import torch
from torch import Tensor

from . import local
from .gather import Gradients, Saved
from .local import Options
from .transport import Pending, Transport

SAVED = 5
"""How many tensors an all-gather and a ring save: q, k, v, out and lse."""


class Core(Protocol):
    """A method: attention of this rank's rows, with gradients, below autograd."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """q, k, v, out and lse, or what else `backward` needs; out and lse are the last two."""

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

    def _begin(self, what: str, *tensors: Tensor) -> list[Pending]:
        """Rows of all heads (B, rows, H, …) on their way to all rows of some."""
        return [
            self.transport.to_heads(x.transpose(0, 1), f"all-to-all of {what}") for x in tensors
        ]

    def _return(self, what: str, *tensors: Tensor) -> list[Pending]:
        """The way back of (B, S, H / n, …)."""
        return [self.transport.to_rows(x.transpose(0, 1), f"all-to-all of {what}") for x in tensors]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Saved:
        """What the inner method saves of each piece, then out and lse of this rank's rows."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, dim=2) for x in (k, v))
        heads = self._heads(q, k)

        def begin(i: int) -> list[Pending]:
            q_heads, k_heads, _ = heads[i]
            parts = (q[:, :, q_heads], k[:, :, k_heads], v[:, :, k_heads])
            return self._begin(f"q, k and v, piece {i + 1} of {len(heads)}", *parts)

        saved: list[Tensor] = []
        travelling: list[list[Pending]] = []
        following = begin(0)
        for i, (_, _, mine) in enumerate(heads):
            pending = following
            if i + 1 < len(heads):
                following = begin(i + 1)
            q_all, k_all, v_all = (x.wait().transpose(0, 1) for x in pending)
            found = self.inner.forward(
                q_all, k_all, v_all, local.of_heads(options, mine.start, mine.stop)
            )
            saved += found
            what = f"out and lse, piece {i + 1} of {len(heads)}"
            travelling.append(self._return(what, found[-2], found[-1].mT))
        out, lse = _joined(travelling)
        return *saved, out, lse.mT.contiguous()

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

        def begin(i: int) -> list[Pending]:
            q_heads = heads[i][0]
            gradients = [dout[:, :, q_heads]]
            if dlse is not None:
                gradients.append(dlse[:, q_heads].mT)
            return self._begin(f"dout and dlse, piece {i + 1} of {len(heads)}", *gradients)

        dsink = options["sink"].new_zeros(q_heads_all) if "sink" in options else None
        travelling: list[list[Pending]] = []
        following = begin(0)
        for i, (piece, (_, mine)) in enumerate(zip(pieces, heads, strict=True)):
            pending = following
            if i + 1 < len(heads):
                following = begin(i + 1)
            dout_part, *rest = (x.wait().transpose(0, 1) for x in pending)
            dlse_part = rest[0].mT if rest else None
            chosen = local.of_heads(options, mine.start, mine.stop)
            *gradients, dsink_part = self.inner.backward(piece, dout_part, dlse_part, chosen)
            if dsink is not None and dsink_part is not None:
                dsink[mine] = dsink_part
            what = f"dQ, dK and dV, piece {i + 1} of {len(heads)}"
            travelling.append(self._return(what, *gradients))
        dq, dk, dv = _joined(travelling)
        if self.copies > 1:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        return dq, dk, dv, dsink


def _joined(pieces: list[list[Pending]]) -> list[Tensor]:
    """What has come back, (B, rows, H, …) each, of all pieces' heads."""
    found = [[x.wait() for x in piece] for piece in pieces]
    return [torch.cat(parts, dim=2).transpose(0, 1) for parts in zip(*found, strict=True)]


def _chunks(saved: list[Tensor]) -> Iterator[Saved]:
    """What the inner method saved of each piece: five tensors."""
    for i in range(0, len(saved), SAVED):
        yield tuple(saved[i : i + SAVED])
