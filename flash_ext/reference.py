"""Standard attention: three passes over memory. The reference of every test and benchmark.

It holds the whole (Sq, Sk) score matrix, which the FlashAttention papers avoid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.descales import channel_factors, row_factors
from .cpu.fp8 import P_SCALE_LOG2, to_fp8
from .cpu.mask import band
from .cpu.sequences import Span, spans
from .dropout import keep_mask, keep_scale
from .ops.checks import Pair, require_pair, result_dtype, statistics_dtype
from .ops.options import QK_8_BITS


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Standard attention (FlashAttention, Algorithm 0), in q's dtype, differentiable repeatedly.

    With 8-bit inputs everything is in float32, but P, relative to its row's maximum, is rounded to
    FP8, as the variants round it. With an out_dtype of float32 or float64 everything is in that
    dtype, and nothing is rounded to FP8.

    Args:
        q: (B, Sq, Hq, D), any floating dtype. Upcast it yourself for a float64 reference.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), Hq a multiple of Hk.
        scale, causal, window, softcap, alibi_slopes, bias, sink, seqused_k, dropout_p, rng_state,
            q_descale, k_descale, v_descale: as in `flash_ext.attention`.
        out_dtype: of out, with 8-bit inputs; None is bfloat16. Above.
        first_batch: the batch index that dropout gives to q[0].

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype (or out_dtype) and lse (B, Hq, Sq) in float32 (float64 for
        float64). A query that sees no key has out = 0 and zero gradients; its lse is the sink,
        without one −∞.
    """
    if seqused_k is not None:
        return _by_sequence(
            q,
            k,
            v,
            seqused_k=seqused_k,
            alibi_slopes=alibi_slopes,
            bias=bias,
            descales=(q_descale, k_descale, v_descale),
            out_dtype=out_dtype,
            first_batch=first_batch,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sink=sink,
            dropout_p=dropout_p,
            rng_state=rng_state,
        )
    out_dtype, has_8_bits = result_dtype(q.dtype, out_dtype), q.dtype in QK_8_BITS
    if has_8_bits:
        dtype = statistics_dtype(out_dtype)
        q, k = (
            x.to(dtype) * row_factors(descale, x) for x, descale in ((q, q_descale), (k, k_descale))
        )
        v = v.to(dtype) * channel_factors(v_descale, v)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    Q = q.transpose(1, 2)
    K = k.transpose(1, 2).repeat_interleave(group, dim=1)
    V = v.transpose(1, 2).repeat_interleave(group, dim=1)

    # Pass 1: S = τ Q Kᵀ, modified and masked.
    S = Q @ K.mT * scale
    if softcap > 0:
        S = softcap * torch.tanh(S / softcap)
    mask = band(seqlen_q, seqlen_k, causal, *require_pair("window", window))
    tile = (0, seqlen_q, 0, seqlen_k, q.device)
    hidden = ~mask.visible(*tile)
    if alibi_slopes is not None:
        S = S - (alibi_slopes[..., None, None] * mask.diagonals(*tile).abs()).to(S.dtype)
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        bias = bias.to(S.dtype)
        hidden = hidden | (bias == -math.inf)
        S = S + bias.masked_fill(bias == -math.inf, 0)
    if sink is not None:  # like a first key, with value 0
        S = torch.cat((sink.to(S.dtype).view(-1, 1, 1).expand(batch, -1, seqlen_q, 1), S), dim=-1)
        hidden = F.pad(hidden, (1, 0), value=False)
    # A fully masked row would be 0 / 0. It stays unmasked here; its results are 0 by definition.
    dead = hidden.all(dim=-1, keepdim=True)
    S = S.masked_fill(hidden & ~dead, -math.inf)

    # Pass 2: P = softmax(S).
    P = S.softmax(dim=-1).masked_fill(dead, 0)
    lse = S.to(torch.promote_types(S.dtype, torch.float32)).logsumexp(dim=-1)
    lse = lse.masked_fill(dead.squeeze(-1), -math.inf)
    if has_8_bits and out_dtype.itemsize == 2:
        P = _rounded_to_fp8(P)
    if sink is not None:
        P = P[..., 1:]

    # Pass 3: O = P V, with P after dropout.
    if dropout_p > 0:
        assert rng_state is not None, "dropout needs rng_state"
        shape = (batch, heads, seqlen_q, seqlen_k)
        keep = keep_mask(rng_state, dropout_p, *shape, first_batch=first_batch)
        P = P * keep * keep_scale(dropout_p)
    return (P @ V).transpose(1, 2).to(out_dtype), lse


def _rounded_to_fp8(P: Tensor) -> Tensor:
    """As the variants round P: relative to the maximum of the row, with a factor of 2^8."""
    if P.shape[-1] == 0:
        return P
    largest = P.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(P.dtype).tiny)
    factor = 2.0**P_SCALE_LOG2
    return to_fp8(P / largest * factor) * (largest / factor)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Standard attention of packed sequences, one after the other.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as in `flash_ext.attention_varlen`.
        options: those of `attention`, but first_batch.

    Returns:
        out (total_q, Hq, Dv) and lse (Hq, total_q), as from `attention`. In rows that belong to no
        sequence, out = 0 and lse = −∞.
    """
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    descales = tuple(options.pop(f"{name}_descale", None) for name in ("q", "k", "v"))
    out, lse = _by_sequence(q[None], k[None], v[None], cu_seqlens, descales=descales, **options)
    return out.squeeze(0), lse.squeeze(0)


def _by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    *,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    descales: tuple[Tensor | None, ...] = (None, None, None),
    out_dtype: torch.dtype | None = None,
    first_batch: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention` one span at a time; packed tensors come as a batch of one."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=result_dtype(q.dtype, out_dtype))
    dtype = statistics_dtype(out.dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=dtype)
    for span in spans(q, k, cu_seqlens, seqused_k):
        if alibi_slopes is not None:
            options["alibi_slopes"] = span.slopes_of(alibi_slopes)
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            options["bias"] = _whole_bias_of(span, bias)
        for name, descale in zip(("q", "k", "v"), descales, strict=True):
            options[f"{name}_descale"] = None if descale is None else span.descale_of(descale)
        out_part, lse_part = attention(
            span.of_queries(q),
            span.of_keys(k),
            span.of_keys(v),
            out_dtype=out_dtype,
            first_batch=first_batch + span.sequences.start,
            **options,
        )
        span.of_queries(out).copy_(out_part)
        span.of_queries(lse.mT).copy_(lse_part.mT)
    return out, lse


def _whole_bias_of(span: Span, bias: Tensor) -> Tensor:
    """The span's bias; where it does not reach, everything is hidden."""
    bias = span.bias_of(bias)
    missing = [
        0 if size == 1 else length - size
        for size, length in zip(bias.shape[2:], span.lengths, strict=True)
    ]
    hidden = False if bias.dtype == torch.bool else -math.inf
    return F.pad(bias, (0, missing[1], 0, missing[0]), value=hidden)


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
