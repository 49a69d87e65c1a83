"""FlashAttention 1 and 2 as tile loops in torch: the CPU kernels, to be read with the papers.

FlashAttention-3 is not here: its tile loop is FlashAttention-2's. What it adds (which warps copy,
which compute, and when) has no counterpart on a CPU. Its FP8 form has: `fp8.py`.

Line numbers and symbols are the pseudocode's: Algorithms 2 and 4 of FlashAttention (Dao et
al., 2022), Algorithms 1 and 2 of FlashAttention-2 (Dao, 2023). What the papers write for one head
is done for all heads at once, so every on-chip step is one batched matrix product or elementwise
operation. "HBM" is a whole tensor, "on chip" a tile of it.

Beyond the pseudocode, in all four:

- Tiles that the mask hides are skipped, and tiles at its edge are cut to the part that it shows.
  (A mask of lists of blocks is a bool bias here, whose tiles are all visited.)
- Scores get more than a scale and a mask: `Tile.scores` in `tiling.py`, and its gradient.
- m starts at the lowest finite number instead of −∞. So a row that has seen no key yet never meets
  −∞ − (−∞): its P̃ is exp(−∞) = 0. With a sink, m and ℓ start as if that key had been seen.
- Grouped queries: the rows of a tile are (query, head of the group) pairs, all of which read the
  same K_j, V_j.
- Matrix products accumulate in float32 (float64 for float64); P and dS are rounded to the input
  dtype before their products, as on tensor cores. P then has dropout's factor 1 / (1 − p), which
  Z_ij is (up to 2^15, `Tiling.late_factor`), and dS its root: without it small numbers would
  lose digits in float16, and dS with all of it could overflow.
- Where L is so large that its rounding is felt in exp(S − L), S and L are made relative to the
  row's maximum (`_relative_to_maximum`).

`forward` and `backward` run them on the ops' tensors: on all sequences at once where these are of
equal lengths, else on one after the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.checks import result_dtype, statistics_dtype
from ..ops.options import CPU_VARIANTS, QK_8_BITS, BackwardTensors, Options
from . import fp8
from .sequences import Span, spans
from .tile_mask import mask_as_bias
from .tiling import Tiling, exp_, in_double, reciprocal, starting_statistics


class Operands(NamedTuple):
    """What both passes read, as rows (`Tiling.to_rows`); so are all tensors of the algorithms."""

    Q: Tensor
    K: Tensor
    V: Tensor


class Saved(NamedTuple):
    """What only the backward pass reads."""

    O: Tensor  # noqa: E741
    dO: Tensor
    L: Tensor
    """+∞ for a row that sees no key (its lse is −∞), so that its P = exp(S − L) = 0."""
    dL: Tensor
    """The gradient of L; 0 for a row that sees no key, whatever was given."""
    reference: Tensor | None = None
    """What the scores of a row, and its L, are relative to; 0 for most rows. None: for all."""


def _dropped(tile: Tensor, kept: Tensor | None) -> Tensor:
    """The tile ∘ Z_ij."""
    return tile if kept is None else tile * kept


def _probabilities(S_ij: Tensor, saved: Saved, rows: slice) -> Tensor:
    """exp(S − L), in place."""
    if saved.reference is not None:
        reference = saved.reference[:, rows]
        # Relative to its maximum no score is above 0, except by rounding.
        S_ij = S_ij.sub_(reference).clamp_(max=torch.where(reference == 0, math.inf, 0.0))
    return exp_(S_ij, saved.L[:, rows])


def _relative_to_maximum(tiling: Tiling, operands: Operands, saved: Saved) -> Saved:
    """With L relative to the row's maximum if it is large.

    In float32 an L of 10⁸ is known to within 4, so that exp(S − L) would be wrong by a factor of
    e⁴. The maximum m is one of the scores, so the differences of the others from it are exact.
    """
    large = saved.L.isfinite() & (saved.L.abs() * torch.finfo(tiling.dtype).eps > 2**-12)
    if not large.any():
        return saved
    Q, K, _ = operands
    m, ell = starting_statistics(tiling)
    for k0, k1 in tiling.kv_blocks():
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):
            tile = tiling.tile(q0, q1, k0, k1)
            m_i, ell_i = m[:, tile.rows], ell[:, tile.rows]
            S_ij = tile.scores(Q[:, tile.rows] @ K[:, tile.keys].mT)
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))
            row_sum = exp_(S_ij, m_new).sum(dim=-1, keepdim=True)
            ell_i.mul_(torch.exp(m_i - m_new)).add_(row_sum)
            m_i.copy_(m_new)
    L = torch.where(large, ell.log(), saved.L)
    return saved._replace(L=L, reference=m.masked_fill(~large, 0))


def fa1_forward(tiling: Tiling, operands: Operands) -> tuple[Tensor, Tensor]:
    """FlashAttention, Algorithm 2: KV outer; O, ℓ and m are read and written at every step.

    Returns:
        O (B·Hk, Sq·G, Dv) and L (B·Hk, Sq·G, 1).
    """
    Q, K, V = operands
    m, ell = starting_statistics(tiling)  # 3
    Out = Q.new_zeros((*Q.shape[:2], V.shape[2]))

    for k0, k1 in tiling.kv_blocks():  # 6
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 8
            tile = tiling.tile(q0, q1, k0, k1)
            K_j, V_j = K[:, tile.keys], V[:, tile.keys]  # 7
            Q_i, O_i, ell_i, m_i = (x[:, tile.rows] for x in (Q, Out, ell, m))  # 9
            S_ij = tile.scores(Q_i @ K_j.mT)  # 10, 11
            m_ij = S_ij.amax(dim=-1, keepdim=True)  # 12: m̃_ij
            m_ij.clamp_(min=torch.finfo(m_ij.dtype).min)
            P_ij = exp_(S_ij, m_ij)  # P̃_ij
            ell_ij = P_ij.sum(dim=-1, keepdim=True)  # ℓ̃_ij
            m_new = torch.maximum(m_i, m_ij)  # 13
            old, new = torch.exp(m_i - m_new), torch.exp(m_ij - m_new)
            ell_new = old * ell_i + new * ell_ij
            P_ij = _dropped(P_ij, tile.kept())  # 14
            PV_ij = (tiling.rounded(P_ij) @ V_j).mul_(tiling.late_factor)
            O_new = ell_i * old * O_i + new * PV_ij  # 15
            O_i.copy_(O_new.mul_(reciprocal(ell_new)))
            ell_i.copy_(ell_new)  # 16
            m_i.copy_(m_new)

    # The backward pass needs ℓ and m only as L = m + log ℓ, which every variant saves.
    return Out, m + ell.log()


def fa2_forward(tiling: Tiling, operands: Operands) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, Algorithm 1: Q outer, O unnormalized until one rescale at the end.

    Arguments and results as for `fa1_forward`.
    """
    Q, K, V = operands
    m, ell = starting_statistics(tiling)
    Out = Q.new_zeros((*Q.shape[:2], V.shape[2]))
    L = torch.empty_like(m)

    for q0, q1 in tiling.q_blocks():  # 3
        rows = tiling.rows(q0, q1)
        Q_i, O_i, ell_i, m_i = (x[:, rows] for x in (Q, Out, ell, m))  # 4, 5
        for k0, k1 in tiling.kv_blocks_seen_by(q0, q1):  # 6
            tile = tiling.tile(q0, q1, k0, k1)
            K_j, V_j = K[:, tile.keys], V[:, tile.keys]  # 7
            S_ij = tile.scores(tiling.product(Q_i, K_j.mT))  # 8
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))  # 9
            P_ij = exp_(S_ij, m_new)  # P̃_ij
            rescale = exp_(m_i - m_new)
            ell_i = rescale * ell_i + tiling.row_sum(P_ij)
            P_ij = _dropped(P_ij, tile.kept())
            O_i.mul_(rescale).add_(tiling.product(tiling.rounded(P_ij), V_j))  # 10
            m_i = m_new
        O_i.mul_(reciprocal(ell_i).mul_(tiling.late_factor))  # 12, 14
        L[:, rows] = m_i + in_double(torch.log, ell_i)  # 13, 15

    return Out, L


def fa1_backward(tiling: Tiling, operands: Operands, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention, Algorithm 4: one KV block after the other, dQ read and written each time.

    Returns:
        dQ, dK, dV, shaped like Q, K, V. The bias's gradient is added to `tiling.dbias`.
    """
    Q, K, V = operands
    Out, dO, dL = saved.O, saved.dO, saved.dL
    ds_factor = tiling.ds_factor
    dQ, dK, dV = (torch.zeros_like(x) for x in operands)  # 5

    for k0, k1 in tiling.kv_blocks():  # 7
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 10
            tile = tiling.tile(q0, q1, k0, k1)
            K_j, V_j, dK_j, dV_j = (x[:, tile.keys] for x in (K, V, dK, dV))  # 8, 9
            Q_i, O_i, dO_i, dQ_i = (x[:, tile.rows] for x in (Q, Out, dO, dQ))  # 11
            S_ij = tile.scores(Q_i @ K_j.mT)  # 12, 13
            P_ij = _probabilities(S_ij, saved, tile.rows)  # 14: diag(ℓ_i)⁻¹ exp(S − m_i)
            kept = tile.kept()  # 15
            dV_ij = tiling.rounded(_dropped(P_ij, kept)).mT @ dO_i  # 16
            dV_j.add_(dV_ij, alpha=tiling.late_factor)
            dP_ij = _dropped(dO_i @ V_j.mT, kept).mul_(tiling.late_factor)  # 17, 18
            D_i = (dO_i * O_i).sum(dim=-1, keepdim=True) - dL[:, tile.rows]  # 19
            dS_ij = tile.scores_gradient(dP_ij.sub_(D_i).mul_(P_ij))  # 20
            dS_ij = tiling.rounded(dS_ij.div_(ds_factor))
            dQ_i.add_(dS_ij @ K_j, alpha=tiling.scale * ds_factor)  # 21
            dK_j.add_(dS_ij.mT @ Q_i, alpha=tiling.scale * ds_factor)  # 22

    return dQ, dK, dV


def fa2_backward(tiling: Tiling, operands: Operands, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, Algorithm 2: D first, then KV blocks that are independent.

    (Except for the sums into dQ, which the CUDA kernel does with atomics.) Arguments and results as
    for `fa1_backward`.
    """
    Q, K, V = operands
    dO = saved.dO
    ds_factor = tiling.ds_factor
    dQ, dK, dV = (torch.zeros_like(x) for x in operands)  # 3
    D = _delta(saved)  # 4

    for k0, k1 in tiling.kv_blocks():  # 5
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 8
            tile = tiling.tile(q0, q1, k0, k1)
            K_j, V_j, dK_j, dV_j = (x[:, tile.keys] for x in (K, V, dK, dV))  # 6, 7
            Q_i, dO_i, dQ_i, D_i = (x[:, tile.rows] for x in (Q, dO, dQ, D))  # 9
            S_ij = tile.scores(Q_i @ K_j.mT)  # 10
            P_ij = _probabilities(S_ij, saved, tile.rows)  # 11
            kept = tile.kept()
            dV_ij = tiling.rounded(_dropped(P_ij, kept)).mT @ dO_i  # 12
            dV_j.add_(dV_ij, alpha=tiling.late_factor)
            dP_ij = _dropped(dO_i @ V_j.mT, kept).mul_(tiling.late_factor)  # 13
            dS_ij = tile.scores_gradient(dP_ij.sub_(D_i).mul_(P_ij))  # 14
            dS_ij = tiling.rounded(dS_ij.div_(ds_factor))
            dQ_i.add_(dS_ij @ K_j, alpha=tiling.scale * ds_factor)  # 15
            dK_j.add_(dS_ij.mT @ Q_i, alpha=tiling.scale * ds_factor)  # 16

    return dQ, dK, dV


def _delta(saved: Saved) -> Tensor:
    """D = rowsum(dO ∘ O), minus the gradient of L."""
    return (saved.dO * saved.O).sum(dim=-1, keepdim=True) - saved.dL


_FORWARD = {"fa1": fa1_forward, "fa2": fa2_forward}
_BACKWARD = {"fa1": fa1_backward, "fa2": fa2_backward}


# --- The ops' tensors ---


def _as_batch(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Packed sequences as a batch of one."""
    return x if cu_seqlens is None else x.unsqueeze(0)


def _as_given(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The inverse of `_as_batch`."""
    return x if cu_seqlens is None else x.squeeze(0)


def _by_position(lse: Tensor) -> Tensor:
    """(B, Hq, Sq) → (B, Sq, Hq, 1), a view."""
    return lse.mT.unsqueeze(-1)


def _operands(span: Span, tiling: Tiling, q: Tensor, k: Tensor, v: Tensor) -> Operands:
    parts = (span.of_queries(q), span.of_keys(k), span.of_keys(v))
    return Operands(*map(tiling.to_rows, parts))


def _dequantized(operands: Operands, descales: fp8.Descales) -> Operands:
    """K and V of 8 bits as the numbers that they stand for."""
    Q, K, V = operands
    return Operands(Q, K * descales.k.mT, V * descales.v)


def forward(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    on_chip: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The op fwd by one variant, arguments already checked.

    K and V of 8 bits beside a Q of more are dequantized. FlashAttention-3's loop is then
    FlashAttention-2's.

    Tiles are the papers' for M = `on_chip` elements. None is M = `tiling.ON_CHIP_ELEMENTS` where
    the options name the variant, and with "auto" other tiles, `tiling.fast_block_sizes`.
    """
    packed_q, packed_k = options.cu_seqlens_q, options.cu_seqlens_k
    q, k, v = _as_batch(q, packed_q), _as_batch(k, packed_k), _as_batch(v, packed_k)
    batch, seqlen_q, heads, _ = q.shape
    dtype = result_dtype(q.dtype, options.out_dtype)
    out = q.new_zeros((batch, seqlen_q, heads, v.shape[3]), dtype=dtype)
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=statistics_dtype(q.dtype))
    options = mask_as_bias(q, k, options)
    for span in spans(q, k, options):
        tiling = Tiling.of(span, q, k, v, options, on_chip)
        operands = _operands(span, tiling, q, k, v)
        if k.dtype in QK_8_BITS:
            descales = fp8.Descales.of(span, tiling, q, k, v, options)
        if q.dtype in QK_8_BITS:
            Out, L = fp8.fa3_forward(tiling, *operands, descales)
        elif k.dtype in QK_8_BITS:
            Out, L = _FORWARD[CPU_VARIANTS[-1]](tiling, _dequantized(operands, descales))
        else:
            Out, L = _FORWARD[variant](tiling, operands)
        tiling.from_rows(Out, span.of_queries(out))
        tiling.from_rows(L, span.of_queries(_by_position(lse)))
    return _as_given(out, packed_q), _as_given(lse, packed_q)


def backward(
    variant: str,
    tensors: BackwardTensors,
    options: Options,
    need_dbias: bool,
    on_chip: int | None = None,
) -> tuple[Tensor | None, ...]:
    """The op bwd, like `forward` for fwd; dbias and dsink are None if its shape is (0,)."""
    packed = options.cu_seqlens_q
    dout, q, k, v, out, lse = (
        _as_batch(getattr(tensors, name), packed) for name in ("dout", "q", "k", "v", "out", "lse")
    )
    unseen = lse == -math.inf
    dlse = torch.zeros_like(lse) if tensors.dlse is None else _as_batch(tensors.dlse, packed)
    L, dL = lse.masked_fill(unseen, math.inf), dlse.masked_fill(unseen, 0)
    saved_tensors = (out, dout, _by_position(L), _by_position(dL))

    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    bias, sink, dbias = options.bias, options.sink, None
    if bias is not None and bias.is_floating_point() and need_dbias:
        dbias = torch.zeros(bias.shape, dtype=lse.dtype, device=bias.device)
    dsink = None if sink is None else torch.zeros_like(sink)
    options = mask_as_bias(q, k, options)
    for span in spans(q, k, options):
        tiling = Tiling.of(span, q, k, v, options, on_chip, dbias)
        saved = Saved(*(tiling.to_rows(span.of_queries(x)) for x in saved_tensors))
        operands = _operands(span, tiling, q, k, v)
        saved = _relative_to_maximum(tiling, operands, saved)
        dQ, dK, dV = _BACKWARD[variant](tiling, operands, saved)
        tiling.from_rows(dQ, span.of_queries(dq))
        tiling.from_rows(dK, span.of_keys(dk))
        tiling.from_rows(dV, span.of_keys(dv))
        if dsink is not None:
            share = _probabilities(tiling.sink_rows(), saved, slice(None))
            dsink -= tiling.sum_by_head(share * _delta(saved))
    dq, dk, dv = (_as_given(x, packed) for x in (dq, dk, dv))
    return dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype), dsink
