"""Sequences of different lengths: where each lies in packed or padded tensors.

For what runs one sequence after the other: standard attention and the CPU kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """One sequence: x[batch, queries] or x[batch, keys] is its part of a (B, S, H, D) tensor.

    Packed tensors (total, H, D) take part as one batch element, (1, total, H, D).
    """

    index: int
    """b, its place among the sequences."""
    batch: slice
    queries: slice
    keys: slice
    """Those in use."""

    def slopes_of(self, alibi_slopes: Tensor) -> Tensor:
        """Its part of alibi_slopes, (Hq)."""
        return alibi_slopes[self.index] if alibi_slopes.dim() == 2 else alibi_slopes

    def bias_of(self, bias: Tensor) -> Tensor:
        """Its part of (B|1, Hq|1, Sq|1, Sk|1), a view; it may reach less far than the sequence."""
        lengths = (s.stop - s.start for s in (self.queries, self.keys))
        wanted = (slice(self.index, self.index + 1), slice(None), *map(slice, lengths))
        parts = zip(bias.shape, wanted, strict=True)
        return bias[tuple(slice(None) if size == 1 else part for size, part in parts)]


def sequences(
    q: Tensor, k: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None, seqused_k: Tensor | None
) -> Iterator[Sequence]:
    """Every sequence of q (B, Sq, Hq, D) and k (B, Sk, Hk, D).

    With cu_seqlens, for q and for k, these are packed. seqused_k is as in `flash_ext.attention`.
    """
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    if cu_seqlens is None:
        places = [(slice(b, b + 1), 0, seqlen_q, 0, seqlen_k) for b in range(batch)]
    else:
        starts_q, starts_k = (x.tolist() for x in cu_seqlens)
        edges = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
        places = [(slice(0, 1), *four) for four in edges]
    used = None if seqused_k is None else seqused_k.tolist()
    for index, (element, q0, q1, k0, k1) in enumerate(places):
        stop = k1 if used is None else k0 + min(max(used[index], 0), k1 - k0)
        yield Sequence(index, element, slice(q0, q1), slice(k0, stop))
