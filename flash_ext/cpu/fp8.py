"""The tile loop of FlashAttention-3's FP8 forward in torch, to be read with the paper (§3.3).

It is FlashAttention-2's loop (`tiled.fa2_forward`, whose line numbers these are) on numbers of 8
bits, and the same sums as in csrc/kernels/fa3:

- Block quantization. Q, K and V come as FP8 (e4m3: 4 bits of exponent, 3 of mantissa, at most 448)
  with descales: x = FP8 x · descale. Q K_jᵀ is a product of FP8 numbers, and the tile of scores
  then gets the descales of its queries and its keys. Each block of rows may have its own, so an
  outlier takes precision from its block only. V's descales, of channels, come at the end: they are
  the same for all keys.
- P in FP8. Below 2⁻⁶ e4m3 loses digits, and 2⁻¹⁰ is rounded to 0. So P, which is at most 1, is
  multiplied by 2⁸ before it is rounded, the largest power of two below 448. ℓ gets the same factor,
  which cancels in O / ℓ.
- Two-level accumulation. Hopper's tensor cores add FP8 products with about 14 bits. Over many keys
  such a sum would lose the small terms. So P V of a tile starts from zero, and float32 additions
  outside the tensor cores gather the tiles. (Here every sum is in float32; the loop is the same.)

Incoherent processing, the paper's other means against outliers, is a rotation of Q and K before
they are quantized: the caller's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.options import FP8, Options
from .descales import channel_factors, row_factors
from .sequences import Span
from .tiling import Tiling, exp_, reciprocal, starting_statistics

P_SCALE_LOG2 = 8
"""P is multiplied by 2 to this power before it is rounded to FP8."""


class Descales(NamedTuple):
    """For the rows of Q and K and the columns of V, as `Tiling.to_rows` has these."""

    q: Tensor
    """(B·Hk, Sq·G, 1)"""
    k: Tensor
    """(B·Hk, 1, Sk)"""
    v: Tensor
    """(B·Hk, 1, Dv)"""

    @classmethod
    def of(
        cls, span: Span, tiling: Tiling, q: Tensor, k: Tensor, v: Tensor, options: Options
    ) -> Descales:
        """Of one span of q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv)."""
        q, k, v = span.of_queries(q), span.of_keys(k), span.of_keys(v)
        of_q, of_k, of_v = (
            None if x is None else span.descale_of(x)
            for x in (options.q_descale, options.k_descale, options.v_descale)
        )
        q_rows = row_factors(of_q, q).expand(*q.shape[:-1], 1)
        k_rows = row_factors(of_k, k).expand(*k.shape[:-1], 1)
        channels = channel_factors(of_v, v).expand(v.shape[0], 1, *v.shape[2:])
        return cls(tiling.to_rows(q_rows), tiling.to_rows(k_rows).mT, tiling.to_rows(channels))


def to_fp8(tile: Tensor) -> Tensor:
    """The nearest e4m3 numbers, in the tile's dtype; beyond 448 they saturate."""
    largest = torch.finfo(FP8).max
    return tile.clamp(-largest, largest).to(FP8).to(tile.dtype)


def fa3_forward(
    tiling: Tiling, Q: Tensor, K: Tensor, V: Tensor, descales: Descales
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's forward in FP8. Q, K and V are FP8 numbers, in float32.

    Returns:
        O (B·Hk, Sq·G, Dv) and L (B·Hk, Sq·G, 1), as `tiled.fa2_forward`.
    """
    m, ell = starting_statistics(tiling)
    ell *= 2.0**P_SCALE_LOG2
    Out = Q.new_zeros((*Q.shape[:2], V.shape[2]))
    L = torch.empty_like(m)

    for q0, q1 in tiling.q_blocks():  # 3
        rows = tiling.rows(q0, q1)
        Q_i, O_i, ell_i, m_i = (x[:, rows] for x in (Q, Out, ell, m))  # 4, 5
        for k0, k1 in tiling.kv_blocks_seen_by(q0, q1):  # 6
            tile = tiling.tile(q0, q1, k0, k1)
            K_j, V_j = K[:, tile.keys], V[:, tile.keys]  # 7
            S_ij = Q_i @ K_j.mT  # 8
            # First their product: one of them may be as large as the other is small.
            S_ij.mul_(descales.q[:, rows] * descales.k[..., tile.keys])
            S_ij = tile.scores(S_ij)
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))  # 9
            P_ij = exp_(S_ij.sub_(m_new)).mul_(2.0**P_SCALE_LOG2)  # P̃_ij
            rescale = torch.exp(m_i - m_new)
            ell_i = rescale * ell_i + P_ij.sum(dim=-1, keepdim=True)
            PV_ij = to_fp8(P_ij) @ V_j  # from zero
            O_i.mul_(rescale).add_(PV_ij)  # 10
            m_i = m_new
        O_i.mul_(reciprocal(ell_i)).mul_(descales.v)  # 12
        L[:, rows] = m_i + ell_i.log() - P_SCALE_LOG2 * math.log(2)  # 13, 15

    return Out, L
