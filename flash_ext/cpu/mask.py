"""The band mask: which keys a query sees, as intervals.

Causal, sliding-window and full attention are one mask. With offset = Sk − Sq (so that the last
query is aligned with the last key), query i sees key j where

    i + offset − left <= j <= i + offset + right

and a side of −1 is unlimited. Queries and keys are half-open ranges throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """The visible band of a (seqlen_q, seqlen_k) score matrix."""

    seqlen_q: int
    seqlen_k: int
    left: int = -1
    right: int = -1

    @property
    def offset(self) -> int:
        """The key position that query 0 is aligned with: the last query sees the last key."""
        return self.seqlen_k - self.seqlen_q

    def key_range(self, q0: int, q1: int) -> tuple[int, int]:
        """The smallest [k0, k1) that holds every key seen by a query of [q0, q1); may be empty."""
        k0 = 0 if self.left < 0 else q0 + self.offset - self.left
        k1 = self.seqlen_k if self.right < 0 else q1 + self.offset + self.right
        return max(k0, 0), min(k1, self.seqlen_k)

    def query_range(self, k0: int, k1: int) -> tuple[int, int]:
        """The smallest [q0, q1) that holds every query seeing a key of [k0, k1); may be empty."""
        q0 = 0 if self.right < 0 else k0 - self.offset - self.right
        q1 = self.seqlen_q if self.left < 0 else k1 - self.offset + self.left
        return max(q0, 0), min(q1, self.seqlen_q)

    def hide_(self, tile: Tensor, q0: int, k0: int) -> None:
        """Set to −∞, in place, the scores of a tile whose query does not see the key.

        The tile is (heads, queries, keys), from query q0 and key k0 on. What was there is
        overwritten, NaN too. (On a CPU `masked_fill_` is several times slower.)
        """
        _, rows, keys = tile.shape
        aligned = q0 + self.offset - k0  # j − i of a query and the key that it is aligned with
        lowest, highest = aligned - self.left, aligned + self.right  # j − i of the visible keys
        if self.right >= 0 and highest < keys - 1:
            hidden = tile.new_full((rows, keys), -math.inf).triu_(highest + 1)
            tile.tril_(highest).add_(hidden)
        if self.left >= 0 and lowest > 1 - rows:
            hidden = tile.new_full((rows, keys), -math.inf).tril_(lowest - 1)
            tile.triu_(lowest).add_(hidden)

    def diagonals(self, q0: int, q1: int, k0: int, k1: int, device: torch.device) -> Tensor:
        """j − i − offset over the tile [q0, q1) × [k0, k1), int64."""
        diagonal = torch.arange(q0 + self.offset, q1 + self.offset, device=device)
        return torch.arange(k0, k1, device=device) - diagonal.unsqueeze(1)

    def visible(self, q0: int, q1: int, k0: int, k1: int, device: torch.device) -> Tensor:
        """The tile [q0, q1) × [k0, k1) of the mask, bool, true where the query sees the key."""
        diagonal = self.diagonals(q0, q1, k0, k1, device)
        visible = torch.ones_like(diagonal, dtype=torch.bool)
        if self.left >= 0:
            visible &= diagonal >= -self.left
        if self.right >= 0:
            visible &= diagonal <= self.right
        return visible


def band(seqlen_q: int, seqlen_k: int, causal: bool, window_left: int, window_right: int) -> Band:
    """The band of these options: `causal` is window_right = 0, whatever window_right says."""
    return Band(seqlen_q, seqlen_k, window_left, 0 if causal else window_right)


def blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks [n·size, (n+1)·size), cut to [start, stop); those outside it are skipped."""
    for block in range(start - start % size, stop if start < stop else start, size):
        yield max(block, start), min(block + size, stop)
