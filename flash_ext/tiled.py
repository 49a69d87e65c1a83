"""FlashAttention 1 and 2 as tile loops in torch: the CPU kernels, readable beside the papers.

Line numbers and symbols are those of the pseudocode: Algorithms 2 and 4 of FlashAttention (Dao et
al., 2022), Algorithms 1 and 2 of FlashAttention-2 (Dao, 2023). What the papers write for one head
is done for all heads at once, so every on-chip step is one batched matrix product or elementwise
operation. "HBM" is a whole tensor, "on chip" a tile of it.

Beyond the pseudocode, in all four:

- Tiles that the mask hides are skipped, and tiles at its edge are cut to the part that it shows.
- m starts at the lowest finite number instead of −∞. So a row that has seen no key yet never meets
  −∞ − (−∞): its P̃ is exp(−∞) = 0.
- Grouped queries: the rows of a tile are (query, head of the group) pairs, all of which read the
  same K_j, V_j.
- Matrix products accumulate in float32 (float64 for float64); P and dS are rounded to the input
  dtype before their products, as on tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import statistics_dtype
from ._options import Options
from .dropout import keep_scale, keep_tile
from .mask import Band, band, blocks

ON_CHIP_ELEMENTS = 128 * 1024
"""M, the on-chip memory in elements: 512 KiB of float32, a CPU core's share of the L2 cache."""


def block_sizes(on_chip: int, head_dim: int) -> tuple[int, int]:
    """(B_r, B_c) for M = `on_chip` elements (FlashAttention, Algorithm 1, line 1).

    B_c = ⌈M / 4d⌉ lets K_j, V_j, Q_i and O_i fit together; B_r = min(⌈M / 4d⌉, d) keeps the tile
    of scores, B_r × B_c, as small as one of them.
    """
    B_c = math.ceil(on_chip / (4 * head_dim))
    return min(B_c, head_dim), B_c


@dataclass(frozen=True)
class _Tiling:
    """How one call is cut into tiles, and the steps on a tile that all four algorithms share."""

    band: Band
    B_r: int
    B_c: int
    batch: int
    heads_k: int
    group: int
    """G = Hq / Hk."""
    scale: float
    """τ."""
    input_dtype: torch.dtype
    dtype: torch.dtype
    """Of accumulators and statistics."""
    dropout_p: float
    rng_state: Tensor | None

    @property
    def lowest(self) -> float:
        """Where m starts: the lowest finite number."""
        return torch.finfo(self.dtype).min

    @classmethod
    def of(cls, q: Tensor, k: Tensor, options: Options, on_chip: int) -> _Tiling:
        batch, seqlen_q, heads, head_dim = q.shape
        B_r, B_c = block_sizes(on_chip, head_dim)
        return cls(
            band=band(
                seqlen_q, k.shape[1], options.causal, options.window_left, options.window_right
            ),
            B_r=B_r,
            B_c=B_c,
            batch=batch,
            heads_k=k.shape[2],
            group=heads // k.shape[2],
            scale=1 / math.sqrt(head_dim) if options.scale is None else options.scale,
            input_dtype=q.dtype,
            dtype=statistics_dtype(q.dtype),
            dropout_p=options.dropout_p,
            rng_state=options.rng_state,
        )

    # --- Between the layout of the op and that of the algorithms ---

    def to_rows(self, x: Tensor) -> Tensor:
        """(B, S, H, d) → (B·Hk, S·H/Hk, d): row s·H/Hk + g is head g of its group, position s."""
        batch, seqlen, heads, head_dim = x.shape
        group = heads // self.heads_k
        rows = x.new_empty((batch, self.heads_k, seqlen, group, head_dim), dtype=self.dtype)
        rows.permute(0, 2, 1, 3, 4).copy_(x.view(batch, seqlen, self.heads_k, group, head_dim))
        return rows.view(batch * self.heads_k, seqlen * group, head_dim)

    def load(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as rows."""
        return self.to_rows(q), self.to_rows(k), self.to_rows(v)

    def load_statistics(self, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
        """L and its gradient, (B, Hq, Sq) → (B·Hk, Sq·G, 1).

        A row that sees no key has L = −∞. Here it gets L = +∞, so that P = exp(S − L) = 0, and the
        gradient 0, whatever came.
        """
        unseen = lse == -math.inf
        dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(unseen, 0)
        L, dL = (
            self.to_rows(x.transpose(1, 2).unsqueeze(-1))
            for x in (lse.masked_fill(unseen, math.inf), dlse)
        )
        return L, dL

    def store(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `to_rows`, contiguous, with the shape and dtype of `like`."""
        batch, seqlen, heads, head_dim = like.shape
        group = heads // self.heads_k
        x = like.new_empty((batch, seqlen, self.heads_k, group, head_dim))
        x.copy_(rows.view(batch, self.heads_k, seqlen, group, head_dim).transpose(1, 2))
        return x.view(like.shape)

    def store_statistics(self, rows: Tensor) -> Tensor:
        """(B·Hk, Sq·G, 1) → (B, Hq, Sq), contiguous."""
        seqlen = self.band.seqlen_q
        x = rows.view(self.batch, self.heads_k, seqlen, self.group).transpose(2, 3).contiguous()
        return x.view(self.batch, self.heads_k * self.group, seqlen)

    # --- Blocks ---

    def q_blocks(self) -> Iterator[tuple[int, int]]:
        """The T_r blocks of queries."""
        return blocks(0, self.band.seqlen_q, self.B_r)

    def q_blocks_seeing(self, k0: int, k1: int) -> Iterator[tuple[int, int]]:
        """The blocks of queries that see any key of [k0, k1)."""
        return blocks(*self.band.query_range(k0, k1), self.B_r)

    def kv_blocks(self) -> Iterator[tuple[int, int]]:
        """The T_c blocks of keys."""
        return blocks(0, self.band.seqlen_k, self.B_c)

    def kv_blocks_seen_by(self, q0: int, q1: int) -> Iterator[tuple[int, int]]:
        """The blocks of keys that any query of [q0, q1) sees, cut to what they see."""
        return blocks(*self.band.key_range(q0, q1), self.B_c)

    def cut(self, k0: int, k1: int, q0: int, q1: int) -> slice:
        """The part of the block of keys [k0, k1) that queries [q0, q1) see."""
        start, stop = self.band.key_range(q0, q1)
        return slice(max(k0, start), min(k1, stop))

    def rows(self, q0: int, q1: int) -> slice:
        """Where queries [q0, q1) of all heads of a group are among the rows."""
        return slice(q0 * self.group, q1 * self.group)

    # --- Steps on a tile ---

    def mask_(self, S_ij: Tensor, q0: int, q1: int, keys: slice) -> Tensor:
        """MASK(S_ij), in place. Leaves alone what is visible throughout."""
        if self.band.covers(q0, q1, keys.start, keys.stop):
            return S_ij
        visible = self.band.visible(q0, q1, keys.start, keys.stop, S_ij.device)
        return S_ij.masked_fill_(~visible.repeat_interleave(self.group, dim=0), -math.inf)

    def dropout_scale(self, q0: int, q1: int, keys: slice) -> Tensor | None:
        """Z_ij: 1 / (1 − p) where dropout keeps the entry, else 0. None without dropout."""
        if self.dropout_p == 0 or self.rng_state is None:
            return None
        heads, columns = self.heads_k * self.group, (keys.start, keys.stop)
        keep = keep_tile(self.rng_state, self.dropout_p, self.batch, heads, (q0, q1), columns)
        Z_ij = keep.to(self.dtype).mul_(keep_scale(self.dropout_p))
        # As rows: the heads of a group lie side by side at each position.
        queries, n_keys = Z_ij.shape[2:]
        Z_ij = Z_ij.reshape(self.batch * self.heads_k, self.group, queries, n_keys).transpose(1, 2)
        return Z_ij.reshape(self.batch * self.heads_k, queries * self.group, n_keys)

    def dropped(self, tile: Tensor, Z_ij: Tensor | None) -> Tensor:
        """The tile ∘ Z_ij."""
        return tile if Z_ij is None else tile * Z_ij

    def rounded(self, tile: Tensor) -> Tensor:
        """The tile as a matrix product reads it: rounded to the input dtype."""
        if self.input_dtype == self.dtype:
            return tile
        return tile.to(self.input_dtype).to(self.dtype)


def _reciprocal(row_sum: Tensor) -> Tensor:
    """diag(ℓ)⁻¹, where a row that saw no key (ℓ = 0) keeps its O = 0."""
    return row_sum.masked_fill(row_sum == 0, 1).reciprocal_()


def fa1_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, on_chip: int = ON_CHIP_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """FlashAttention, Algorithm 2: KV outer; O, ℓ and m are read and written at every step.

    Args:
        q, k, v: (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, D), already checked.
        options: the op's options.
        on_chip: M, in elements.

    Returns:
        out (B, Sq, Hq, D) and lse (B, Hq, Sq).
    """
    tiling = _Tiling.of(q, k, options, on_chip)  # 2: B_r, B_c
    Q, K, V = tiling.load(q, k, v)
    Out = torch.zeros_like(Q)  # 3
    ell = Q.new_zeros((*Q.shape[:2], 1))
    m = torch.full_like(ell, tiling.lowest)

    for k0, k1 in tiling.kv_blocks():  # 6
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 8
            rows, keys = tiling.rows(q0, q1), tiling.cut(k0, k1, q0, q1)
            K_j, V_j = K[:, keys], V[:, keys]  # 7
            Q_i, O_i, ell_i, m_i = Q[:, rows], Out[:, rows], ell[:, rows], m[:, rows]  # 9
            S_ij = (Q_i @ K_j.mT).mul_(tiling.scale)  # 10
            S_ij = tiling.mask_(S_ij, q0, q1, keys)  # 11
            m_ij = S_ij.amax(dim=-1, keepdim=True).clamp_(min=tiling.lowest)  # 12: m̃_ij
            P_ij = S_ij.sub_(m_ij).exp_()  # P̃_ij
            ell_ij = P_ij.sum(dim=-1, keepdim=True)  # ℓ̃_ij
            m_new = torch.maximum(m_i, m_ij)  # 13
            old, new = torch.exp(m_i - m_new), torch.exp(m_ij - m_new)
            ell_new = old * ell_i + new * ell_ij
            P_ij = tiling.dropped(P_ij, tiling.dropout_scale(q0, q1, keys))  # 14
            O_new = ell_i * old * O_i + new * (tiling.rounded(P_ij) @ V_j)  # 15
            O_i.copy_(O_new.mul_(_reciprocal(ell_new)))
            ell_i.copy_(ell_new)  # 16
            m_i.copy_(m_new)

    # The backward pass needs ℓ and m only as L = m + log ℓ, which every variant saves.
    return tiling.store(Out, q), tiling.store_statistics(m + ell.log())


def fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, on_chip: int = ON_CHIP_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, Algorithm 1: Q outer, O unnormalised until one rescale at the end.

    Arguments and results as for `fa1_forward`.
    """
    tiling = _Tiling.of(q, k, options, on_chip)
    Q, K, V = tiling.load(q, k, v)
    Out = torch.empty_like(Q)
    L = Q.new_empty((*Q.shape[:2], 1))

    for q0, q1 in tiling.q_blocks():  # 3
        rows = tiling.rows(q0, q1)
        Q_i = Q[:, rows]  # 4
        O_i = torch.zeros_like(Q_i)  # 5
        ell_i = Q_i.new_zeros((*Q_i.shape[:2], 1))
        m_i = torch.full_like(ell_i, tiling.lowest)
        for k0, k1 in tiling.kv_blocks_seen_by(q0, q1):  # 6
            keys = slice(k0, k1)
            K_j, V_j = K[:, keys], V[:, keys]  # 7
            S_ij = (Q_i @ K_j.mT).mul_(tiling.scale)  # 8
            S_ij = tiling.mask_(S_ij, q0, q1, keys)
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))  # 9
            P_ij = S_ij.sub_(m_new).exp_()  # P̃_ij
            rescale = torch.exp(m_i - m_new)
            ell_i = rescale * ell_i + P_ij.sum(dim=-1, keepdim=True)
            P_ij = tiling.dropped(P_ij, tiling.dropout_scale(q0, q1, keys))
            O_i.mul_(rescale).baddbmm_(tiling.rounded(P_ij), V_j)  # 10
            m_i = m_new
        Out[:, rows] = O_i.mul_(_reciprocal(ell_i))  # 12, 14
        L[:, rows] = m_i + ell_i.log()  # 13, 15

    return tiling.store(Out, q), tiling.store_statistics(L)


def fa1_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    on_chip: int = ON_CHIP_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention, Algorithm 4: one KV block after the other, dQ read and written each time.

    Args:
        dout: gradient of out, (B, Sq, Hq, D).
        dlse: gradient of lse, (B, Hq, Sq), or None for zeros.
        q, k, v, out, lse, options, on_chip: as given to and returned by the forward pass.

    Returns:
        dq, dk, dv, with the shapes and dtypes of q, k, v.
    """
    tiling = _Tiling.of(q, k, options, on_chip)  # 3: B_r, B_c
    Q, K, V = tiling.load(q, k, v)
    Out, dO = tiling.to_rows(out), tiling.to_rows(dout)
    L, dL = tiling.load_statistics(lse, dlse)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)  # 5

    for k0, k1 in tiling.kv_blocks():  # 7
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 10
            rows, keys = tiling.rows(q0, q1), tiling.cut(k0, k1, q0, q1)
            K_j, V_j, dK_j, dV_j = K[:, keys], V[:, keys], dK[:, keys], dV[:, keys]  # 8, 9
            Q_i, O_i, dO_i, dQ_i = Q[:, rows], Out[:, rows], dO[:, rows], dQ[:, rows]  # 11
            S_ij = (Q_i @ K_j.mT).mul_(tiling.scale)  # 12
            S_ij = tiling.mask_(S_ij, q0, q1, keys)  # 13
            P_ij = S_ij.sub_(L[:, rows]).exp_()  # 14: diag(ℓ_i)⁻¹ exp(S − m_i) = exp(S − L_i)
            Z_ij = tiling.dropout_scale(q0, q1, keys)  # 15
            P_dropped = tiling.dropped(P_ij, Z_ij)
            dV_j.baddbmm_(tiling.rounded(P_dropped).mT, dO_i)  # 16
            dP_ij = tiling.dropped(dO_i @ V_j.mT, Z_ij)  # 17, 18
            D_i = (dO_i * O_i).sum(dim=-1, keepdim=True) - dL[:, rows]  # 19
            dS_ij = tiling.rounded(dP_ij.sub_(D_i).mul_(P_ij))  # 20
            dQ_i.baddbmm_(dS_ij, K_j, alpha=tiling.scale)  # 21
            dK_j.baddbmm_(dS_ij.mT, Q_i, alpha=tiling.scale)  # 22

    return tiling.store(dQ, q), tiling.store(dK, k), tiling.store(dV, v)


def fa2_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    on_chip: int = ON_CHIP_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, Algorithm 2: D first, then KV blocks that need nothing of each other.

    (Except for the sums into dQ, which the CUDA kernel does with atomics.) Arguments and results as
    for `fa1_backward`.
    """
    tiling = _Tiling.of(q, k, options, on_chip)
    Q, K, V = tiling.load(q, k, v)
    dO = tiling.to_rows(dout)
    L, dL = tiling.load_statistics(lse, dlse)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)  # 3
    D = (dO * tiling.to_rows(out)).sum(dim=-1, keepdim=True) - dL  # 4

    for k0, k1 in tiling.kv_blocks():  # 5
        for q0, q1 in tiling.q_blocks_seeing(k0, k1):  # 8
            rows, keys = tiling.rows(q0, q1), tiling.cut(k0, k1, q0, q1)
            K_j, V_j, dK_j, dV_j = K[:, keys], V[:, keys], dK[:, keys], dV[:, keys]  # 6, 7
            Q_i, dO_i, dQ_i = Q[:, rows], dO[:, rows], dQ[:, rows]  # 9
            S_ij = (Q_i @ K_j.mT).mul_(tiling.scale)  # 10
            S_ij = tiling.mask_(S_ij, q0, q1, keys)
            P_ij = S_ij.sub_(L[:, rows]).exp_()  # 11
            Z_ij = tiling.dropout_scale(q0, q1, keys)
            dV_j.baddbmm_(tiling.rounded(tiling.dropped(P_ij, Z_ij)).mT, dO_i)  # 12
            dP_ij = tiling.dropped(dO_i @ V_j.mT, Z_ij)  # 13
            dS_ij = tiling.rounded(dP_ij.sub_(D[:, rows]).mul_(P_ij))  # 14
            dQ_i.baddbmm_(dS_ij, K_j, alpha=tiling.scale)  # 15
            dK_j.baddbmm_(dS_ij.mT, Q_i, alpha=tiling.scale)  # 16

    return tiling.store(dQ, q), tiling.store(dK, k), tiling.store(dV, v)


FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fa1": fa1_forward,
    "fa2": fa2_forward,
}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "fa1": fa1_backward,
    "fa2": fa2_backward,
}
