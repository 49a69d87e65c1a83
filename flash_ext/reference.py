"""Standard attention: three passes over memory. The reference of every test and benchmark.

It holds the whole (Sq, Sk) score matrix, which the FlashAttention papers avoid. Masks, sequences,
descales and the rounding of P to FP8 are written out here: the reference shares no code with the
kernels that it judges.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import keep_mask, keep_scale
from .ops.checks import Pair, require_pair, result_dtype, statistics_dtype
from .ops.options import QK_8_BITS

P_FACTOR = 2.0**8
"""P, at most 1, is multiplied by this before it is rounded to FP8, whose largest number is 448."""

ROWS_OF_A_DESCALE = 128
"""The rows of q or k that share a descale of shape (B, H, blocks)."""


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
    page_table: Tensor | None = None,
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
    dtype, and nothing is rounded to FP8. 8-bit k and v beside a q of more bits are dequantized, to
    q's dtype.

    Args:
        q: (B, Sq, Hq, D), any floating dtype. Upcast it yourself for a float64 reference.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), Hq a multiple of Hk.
        scale, causal, window, softcap, alibi_slopes, bias: as in `flash_ext.attention`.
        sink, seqused_k, dropout_p, rng_state, q_descale, k_descale, v_descale: as there.
        page_table: int32 (B, pages of a sequence): k and v are pages, (pages, page size, Hk, D) and
            (…, Dv); the row of a sequence names its pages, one after the other. Entries past the
            keys in use may be anything.
        out_dtype: of out, with 8-bit inputs; None is bfloat16. Above.
        first_batch: the batch index that dropout gives to q[0].

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype (or out_dtype) and lse (B, Hq, Sq) in float32 (float64 for
        float64). A query that sees no key has out = 0 and zero gradients; its lse is the sink,
        without one −∞.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16)  # (2, 8, 4, 16) each
        >>> out, lse = flash_ext.reference.attention(q, k, v, causal=True)
        >>> torch.allclose(out, flash_ext.attention(q, k, v, causal=True), atol=1e-5)
        True
    """
    if page_table is not None:
        k, v = (x[page_table.clamp(0, len(x) - 1).long()].flatten(1, 2) for x in (k, v))
    out_dtype, has_8_bits = result_dtype(q.dtype, out_dtype), q.dtype in QK_8_BITS
    if has_8_bits:
        dtype = statistics_dtype(out_dtype)
        q, k = (_scaled(x.to(dtype), y, by_row=True) for x, y in ((q, q_descale), (k, k_descale)))
        v = _scaled(v.to(dtype), v_descale, by_row=False)
    elif k.dtype in QK_8_BITS:
        dtype = statistics_dtype(q.dtype)
        k = _scaled(k.to(dtype), k_descale, by_row=True).to(q.dtype)
        v = _scaled(v.to(dtype), v_descale, by_row=False).to(q.dtype)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    window = require_pair("window", window)
    diagonals, hidden = _mask(seqlen_q, seqlen_k, seqused_k, causal, window, q.device)
    if seqused_k is not None:  # in rows that are not in use there may be anything
        unused = torch.arange(seqlen_k, device=q.device) >= seqused_k[:, None]
        k, v = (x.masked_fill(unused[..., None, None], 0) for x in (k, v))
    Q = q.transpose(1, 2)
    K = k.transpose(1, 2).repeat_interleave(group, dim=1)
    V = v.transpose(1, 2).repeat_interleave(group, dim=1)

    # Pass 1: S = τ Q Kᵀ, modified and masked.
    S = Q @ K.mT * scale
    if softcap > 0:
        S = softcap * torch.tanh(S / softcap)
    if alibi_slopes is not None:
        S = S - (alibi_slopes[..., None, None] * diagonals.abs()).to(S.dtype)
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        hidden = hidden | (bias == -math.inf)
        S = S + torch.where(hidden, 0, bias.to(S.dtype))
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


def _mask(
    seqlen_q: int,
    seqlen_k: int,
    seqused_k: Tensor | None,
    causal: bool,
    window: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The diagonal of each pair of query and key, and whether the query does not see the key.

    Both are (1 or B, 1, Sq, Sk). The diagonal is key minus query, both counted from the last one,
    so that the last query is on diagonal 0 with the last key in use.
    """
    i, j = (torch.arange(n, device=device) for n in (seqlen_q, seqlen_k))
    keys = torch.tensor([seqlen_k], device=device) if seqused_k is None else seqused_k
    keys = keys.clamp(0, seqlen_k).view(-1, 1, 1, 1)
    diagonals = (j - keys) - (i - seqlen_q)[:, None]
    left, right = window[0], 0 if causal else window[1]
    hidden = (j >= keys).expand_as(diagonals)
    if left >= 0:
        hidden = hidden | (diagonals < -left)
    if right >= 0:
        hidden = hidden | (diagonals > right)
    return diagonals, hidden


def _scaled(x: Tensor, descale: Tensor | None, by_row: bool) -> Tensor:
    """x (B, S, H, D) times its descale: one number, (B, Hk), or finer.

    Finer is (B, H, blocks of rows) for q and k, `by_row`, and (B, Hk, D) for v.
    """
    if descale is None:
        return x
    if descale.dim() < 2:
        return x * descale.reshape(())
    factors = descale.repeat_interleave(x.shape[2] // descale.shape[1], dim=1)
    if factors.dim() == 2:
        return x * factors[:, None, :, None]
    if not by_row:
        return x * factors[:, None]
    block = torch.arange(x.shape[1], device=x.device) // ROWS_OF_A_DESCALE
    return x * factors[:, :, block].mT[..., None]


def _rounded_to_fp8(P: Tensor) -> Tensor:
    """As the variants round P: relative to the maximum of the row, times P_FACTOR."""
    if P.shape[-1] == 0:
        return P
    largest = P.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(P.dtype).tiny)
    rounded = (P / largest * P_FACTOR).to(torch.float8_e4m3fn).to(P.dtype)
    return rounded * (largest / P_FACTOR)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Standard attention of packed sequences, one after the other.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as in `flash_ext.attention_varlen`.
        page_table: as in `attention`; then there is no cu_seqlens_k.
        seqused_k, out_dtype, options: as in `attention`, but first_batch.

    Returns:
        out (total_q, Hq, Dv) and lse (Hq, total_q), as from `attention`. In rows that belong to no
        sequence, out = 0 and lse = −∞.

    Examples:
        >>> q, k, v = torch.randn(3, 8, 4, 16)  # sequences of 3 and 5 tokens
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> out, lse = flash_ext.reference.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)
        >>> out.shape, lse.shape
        (torch.Size([8, 4, 16]), torch.Size([4, 8]))
    """
    dtype = result_dtype(q.dtype, out_dtype)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=statistics_dtype(dtype))
    edges = list(pairwise(cu_seqlens_q.tolist()))
    edges_k = edges if cu_seqlens_k is None else pairwise(cu_seqlens_k.tolist())
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(edges, edges_k, strict=True)):
        keys = (k, v) if page_table is not None else (k[None, k0:k1], v[None, k0:k1])
        out_b, lse_b = attention(
            q[None, q0:q1],
            *keys,
            seqused_k=None if seqused_k is None else seqused_k[b : b + 1],
            page_table=None if page_table is None else page_table[b : b + 1],
            out_dtype=out_dtype,
            first_batch=b,
            **_of_sequence(options, b, q1 - q0, k1 - k0),
        )
        out[q0:q1], lse[:, q0:q1] = out_b[0], lse_b[0]
    return out, lse


def _of_sequence(options: dict[str, Any], b: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    """The options of sequence b, of which some tensors have a part for each."""
    own = dict(options)
    for name in ("alibi_slopes", "q_descale", "k_descale", "v_descale"):
        if (x := options.get(name)) is not None and x.dim() > 1:
            own[name] = x[b : b + 1]
    if (bias := options.get("bias")) is not None:
        bias = bias[(None,) * (4 - bias.dim())]
        bias = bias[b : b + 1] if bias.shape[0] > 1 else bias
        rows, columns = (
            0 if size == 1 else seqlen - size
            for size, seqlen in zip(bias.shape[2:], (seqlen_q, seqlen_k), strict=True)
        )
        # Padding by less than 0 cuts off. Where the bias does not reach, everything is hidden.
        value = False if bias.dtype == torch.bool else -math.inf
        own["bias"] = F.pad(bias, (0, columns, 0, rows), value=value)
    return own


def safe_softmax(x: Tensor) -> Tensor:
    """softmax over the last dimension in three reads of x: maximum, sum, quotient.

    Examples:
        >>> x = torch.tensor([1000.0, 1000.0])  # exp(1000) is infinite
        >>> flash_ext.reference.safe_softmax(x)
        tensor([0.5000, 0.5000])
    """
    m = x.amax(dim=-1, keepdim=True)
    f = torch.exp(x - m)
    return f / f.sum(dim=-1, keepdim=True)


def online_softmax(x: Tensor, block: int) -> Tensor:
    """softmax over the last dimension, where maximum and sum come from one read in blocks.

    What makes FlashAttention possible (FlashAttention §3.1): when a block raises the maximum from m
    to m_new, the sum so far is corrected by exp(m − m_new).

    Examples:
        >>> x = torch.randn(4, 100)
        >>> torch.allclose(flash_ext.reference.online_softmax(x, block=16), x.softmax(-1))
        True
    """
    m = x.new_full((*x.shape[:-1], 1), -math.inf)
    sum_ = torch.zeros_like(m)
    for x_j in x.split(block, dim=-1):
        m_new = torch.maximum(m, x_j.amax(dim=-1, keepdim=True))
        sum_ = torch.exp(m - m_new) * sum_ + torch.exp(x_j - m_new).sum(dim=-1, keepdim=True)
        m = m_new
    return torch.exp(x - m) / sum_
