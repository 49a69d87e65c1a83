"""The numbers that 8-bit tensors stand for, x = 8-bit x · descale.

A descale is one number for the whole tensor, or one for each batch element and key head, (B, Hk),
or finer: of q and k for blocks of 128 rows, (B, H, blocks), of v for channels, (B, Hk, Dv).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.options import DESCALE_ROWS


def row_factors(descale: Tensor | None, x: Tensor) -> Tensor:
    """A factor for every row of q or k (B, S, H, D): float32, (1 or B, 1 or S, 1 or H, 1)."""
    _, rows, heads, _ = x.shape
    if descale is None or descale.dim() < 2:
        return _one_number(descale, x)
    descale = descale.repeat_interleave(heads // descale.shape[1], dim=1)  # q's heads of a group
    if descale.dim() == 2:
        return descale[:, None, :, None]
    by_row = descale.repeat_interleave(DESCALE_ROWS, dim=2)[:, :, :rows]
    return by_row.mT.unsqueeze(-1)


def channel_factors(descale: Tensor | None, v: Tensor) -> Tensor:
    """A factor for every channel of v (B, Sk, Hk, Dv): float32, (1 or B, 1, 1 or Hk, 1 or Dv)."""
    if descale is None or descale.dim() < 2:
        return _one_number(descale, v)
    return descale[:, None, :, None] if descale.dim() == 2 else descale[:, None]


def _one_number(descale: Tensor | None, x: Tensor) -> Tensor:
    if descale is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.float32, device=x.device)
    return descale.reshape(1, 1, 1, 1)
