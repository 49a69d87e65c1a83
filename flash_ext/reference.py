"""Standard attention: three passes over memory. The yardstick of every test and benchmark.

It holds the whole (Sq, Sk) score matrix, which is what the FlashAttention papers do without.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dropout import keep_mask, keep_scale
from .mask import band


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Standard attention (FlashAttention, Algorithm 0), in the inputs' dtype, differentiable.

    Args:
        q: (B, Sq, Hq, D), any floating dtype. Upcast it yourself for a float64 yardstick.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), Hq a multiple of Hk.
        scale, causal, window, dropout_p, rng_state: as in `flash_ext.attention`.

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype and lse (B, Hq, Sq) in float32 (float64 for float64). A
        query that sees no key has out = 0, lse = −inf and zero gradients.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    Q = q.transpose(1, 2)
    K = k.transpose(1, 2).repeat_interleave(group, dim=1)
    V = v.transpose(1, 2).repeat_interleave(group, dim=1)

    # Pass 1: S = τ Q Kᵀ, masked.
    S = Q @ K.mT * scale
    visible = band(seqlen_q, seqlen_k, causal, *window).visible(
        0, seqlen_q, 0, seqlen_k, device=q.device
    )
    S = S.masked_fill(~visible, -math.inf)

    # Pass 2: P = softmax(S). A fully masked row is 0 / 0 there; it is 0 by definition.
    P = S.softmax(dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0)
    lse = S.to(torch.promote_types(S.dtype, torch.float32)).logsumexp(dim=-1)

    # Pass 3: O = P V, where dropout has thinned P.
    if dropout_p > 0:
        assert rng_state is not None, "dropout needs rng_state"
        keep = keep_mask(rng_state, dropout_p, batch, heads, seqlen_q, seqlen_k)
        P = P * keep * keep_scale(dropout_p)
    return (P @ V).transpose(1, 2), lse


def safe_softmax(x: Tensor) -> Tensor:
    """softmax over the last dimension in three reads of x: maximum, sum, quotient."""
    m = x.amax(dim=-1, keepdim=True)
    f = torch.exp(x - m)
    return f / f.sum(dim=-1, keepdim=True)


def online_softmax(x: Tensor, block: int) -> Tensor:
    """softmax over the last dimension, where maximum and sum come from one read in blocks.

    What makes FlashAttention possible (FlashAttention §3.1): when a block raises the maximum from m
    to m_new, the sum so far is corrected by exp(m − m_new).
    """
    m = x.new_full((*x.shape[:-1], 1), -math.inf)
    sum_ = torch.zeros_like(m)
    for x_j in x.split(block, dim=-1):
        m_new = torch.maximum(m, x_j.amax(dim=-1, keepdim=True))
        sum_ = torch.exp(m - m_new) * sum_ + torch.exp(x_j - m_new).sum(dim=-1, keepdim=True)
        m = m_new
    return torch.exp(x - m) / sum_
