"""How a call is cut into tiles, and what happens to a tile's scores: for `flash_ext.cpu.tiled`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import keep_scale, keep_tile
from ..ops.checks import statistics_dtype
from ..ops.options import Options
from .mask import Band, band, blocks
from .sequences import Span

ON_CHIP_ELEMENTS = 128 * 1024
"""M, the on-chip memory in elements: 512 KiB of float32, a CPU core's share of the L2 cache."""

SCORES_BYTES = 2 * 1024 * 1024
"""What `fast_block_sizes` gives S_ij, all heads together."""

_LOG2_E = 1 / math.log(2)


def block_sizes(on_chip: int, head_dim: int) -> tuple[int, int]:
    """(B_r, B_c) for M = `on_chip` elements (FlashAttention, Algorithm 1, line 1).

    B_c = ⌈M / 4d⌉ lets K_j, V_j, Q_i and O_i fit together; B_r = min(⌈M / 4d⌉, d) keeps the tile
    of scores, B_r × B_c, as small as one of them.
    """
    B_c = math.ceil(on_chip / (4 * head_dim))
    return min(B_c, head_dim), B_c


def fast_block_sizes(heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """(B_r, B_c) for an S_ij of `SCORES_BYTES`, over this number of heads of all sequences.

    Here a step of the algorithms is a call of torch, whose overhead equals the work of some
    thousands of scores. So fewer tiles are better, as long as they fit in the caches. B_c is one to
    four times B_r. Even many heads get 64 × 128: narrower matrix products are slower.
    """
    scores = max(SCORES_BYTES // (dtype.itemsize * max(heads, 1)), 64 * 128)
    B_r = 1 << (scores.bit_length() - 1) // 2
    return B_r, scores // B_r


@dataclass(frozen=True)
class Tiling:
    """How a span of sequences is cut into tiles, and how its tensors become rows and back."""

    band: Band
    B_r: int
    B_c: int
    batch: int
    first_sequence: int
    heads_k: int
    group: int
    """G = Hq / Hk."""
    scale: float
    """τ."""
    input_dtype: torch.dtype
    dtype: torch.dtype
    """Of accumulators and statistics."""
    options: Options
    """With the span's part of alibi_slopes and bias."""
    dbias: Tensor | None
    """What the bias's gradient is added to, shaped like the span's bias. None: not requested."""

    @classmethod
    def of(
        cls,
        span: Span,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        on_chip: int | None,
        dbias: Tensor | None = None,
    ) -> Tiling:
        """Of one span of q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv)."""
        (heads_q, head_dim), heads_k = q.shape[2:], k.shape[2]
        batch, dtype = span.batch.stop - span.batch.start, statistics_dtype(q.dtype)
        if options.batch_invariant:  # blocks that do not depend on the call
            B_r = B_c = 64
        elif on_chip is None and options.variant == "auto":
            B_r, B_c = fast_block_sizes(batch * heads_q, dtype)
        else:
            B_r, B_c = block_sizes(on_chip or ON_CHIP_ELEMENTS, max(head_dim, v.shape[3]))
        left, right = options.window_left, options.window_right
        slopes, bias = options.alibi_slopes, options.bias
        return cls(
            band=band(*span.lengths, options.causal, left, right),
            B_r=B_r,
            B_c=B_c,
            batch=batch,
            first_sequence=span.sequences.start,
            heads_k=heads_k,
            group=heads_q // heads_k,
            scale=1 / math.sqrt(head_dim) if options.scale is None else options.scale,
            input_dtype=q.dtype,
            dtype=dtype,
            options=replace(
                options,
                alibi_slopes=None if slopes is None else span.slopes_of(slopes),
                bias=None if bias is None else span.bias_of(bias),
            ),
            dbias=None if dbias is None else span.bias_of(dbias),
        )

    # --- Between the ops' layout and the algorithms' ---

    def to_rows(self, x: Tensor) -> Tensor:
        """(B, S, H, d) → (B·Hk, S·H/Hk, d): row s·H/Hk + g is head g of its group, position s."""
        batch, seqlen, heads, dim = x.shape
        group = heads // self.heads_k
        rows = x.new_empty((batch, self.heads_k, seqlen, group, dim), dtype=self.dtype)
        rows.copy_(x.unflatten(2, (self.heads_k, group)).transpose(1, 2))
        return rows.view(batch * self.heads_k, seqlen * group, dim)

    def from_rows(self, rows: Tensor, x: Tensor) -> None:
        """The inverse of `to_rows`; the result is written to x."""
        batch, seqlen, heads, dim = x.shape
        group = heads // self.heads_k
        rows = rows.view(batch, self.heads_k, seqlen, group, dim)
        x.unflatten(2, (self.heads_k, group)).copy_(rows.transpose(1, 2))

    @property
    def keep_scale(self) -> float:
        """1 / (1 − p), the factor of entries that dropout keeps."""
        return keep_scale(self.options.dropout_p)

    @property
    def p_factor(self) -> float:
        """The part of `keep_scale` that P has when it is rounded: all of it, up to 2^15.

        Without it, small P would lose digits in float16, which ends at 2^-24, and at 65,504.
        """
        return min(self.keep_scale, 2.0**15)

    @property
    def late_factor(self) -> float:
        """The rest of `keep_scale`: 1."""
        return self.keep_scale / self.p_factor

    @property
    def ds_factor(self) -> float:
        """The part of `keep_scale` that dS does not have when it is rounded."""
        return 1.0 if self.input_dtype == self.dtype else math.sqrt(self.keep_scale)

    def sink_rows(self) -> Tensor:
        """The sink of each row of queries, (B·Hk, Sq·G, 1); −∞ without one."""
        if self.options.sink is None:
            shape = (self.batch * self.heads_k, self.band.seqlen_q * self.group, 1)
            return torch.full(shape, -math.inf, dtype=self.dtype, device="cpu")
        sink = self.options.sink.unsqueeze(-1)
        return self.to_rows(sink.expand(self.batch, self.band.seqlen_q, *sink.shape))

    def sum_by_head(self, rows: Tensor) -> Tensor:
        """(B·Hk, Sq·G, 1) → (Hq), summed over batch and positions."""
        shape = (self.batch, self.heads_k, self.band.seqlen_q, self.group)
        return rows.view(shape).sum(dim=(0, 2)).flatten()

    def rounded(self, tile: Tensor) -> Tensor:
        """The tile as a matrix product reads it: rounded to the input dtype."""
        if self.input_dtype == self.dtype:
            return tile
        return tile.to(self.input_dtype).to(self.dtype)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a b. With batch_invariant each element is a sum in order, which no BLAS promises."""
        if not self.options.batch_invariant:
            return a @ b
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
        for i in range(a.shape[-1]):
            total += a[..., i, None] * b[..., i, None, :]  # a product and a sum, never one FMA
        return total

    def row_sum(self, P: Tensor) -> Tensor:
        """The sums of rows, (…, 1)."""
        if not self.options.batch_invariant:
            return P.sum(dim=-1, keepdim=True)
        return self.product(P, P.new_ones(P.shape[-1], 1))

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

    def rows(self, q0: int, q1: int) -> slice:
        """The rows of queries [q0, q1) of all heads of a group."""
        return slice(q0 * self.group, q1 * self.group)

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> Tile:
        """The tile of two blocks, cut to the keys that its queries see."""
        start, stop = self.band.key_range(q0, q1)
        return Tile(self, q0, q1, max(k0, start), min(k1, stop))


@dataclass
class Tile:
    """Queries [q0, q1) against keys [k0, k1): what comes between Q_i K_jᵀ and the softmax.

    Its arrays are (B·Hk, (q1 − q0)·G, k1 − k0), like S_ij.
    """

    tiling: Tiling
    q0: int
    q1: int
    k0: int
    k1: int
    tanh: Tensor | None = None
    """tanh(τ Q_i K_jᵀ / c), if there is a softcap c, once `scores` has run."""

    @property
    def rows(self) -> slice:
        """The rows of Q, O and the statistics that belong to the tile."""
        return self.tiling.rows(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        """The rows of K and V that belong to the tile."""
        return slice(self.k0, self.k1)

    def scores(self, S_ij: Tensor) -> Tensor:
        """S_ij from Q_i K_jᵀ, which is overwritten: scale, softcap, ALiBi, bias, then mask."""
        tiling, options = self.tiling, self.tiling.options
        corners = (self.q0, self.q1, self.k0, self.k1)
        S_ij.mul_(tiling.scale)
        if options.softcap > 0:
            tanh = partial(in_double, torch.tanh) if options.batch_invariant else torch.tanh_
            self.tanh = tanh(S_ij.div_(options.softcap))
            S_ij = self.tanh * options.softcap
        S = self._by_head(S_ij)
        if options.alibi_slopes is not None:
            slopes = self._split_heads(options.alibi_slopes, -1)[..., None, None]
            S.sub_(slopes * tiling.band.diagonals(*corners, S.device).abs())
        if options.bias is not None:
            S.add_(self._bias(options.bias))
        for head in range(tiling.group):
            tiling.band.hide_(S_ij[:, head :: tiling.group], self.q0, self.k0)
        return S_ij

    def scores_gradient(self, dS_ij: Tensor) -> Tensor:
        """The gradient of τ Q_i K_jᵀ from the gradient of S_ij, in place. Adds to dbias."""
        dbias = self.tiling.dbias
        if dbias is not None:
            dbias_ij = self._part_of(dbias)
            # A bias may be shorter than the tile.
            reach = zip(dbias.shape[2:], dbias_ij.shape[2:], strict=True)
            queries, keys = (slice(None if size == 1 else part) for size, part in reach)
            dS = self._by_head(dS_ij).flatten(1, 2)[:, :, queries, keys]
            dbias_ij += dS.sum_to_size(dbias_ij.shape)
        if self.tanh is not None:
            dS_ij.mul_(1 - self.tanh.square())
        return dS_ij

    def kept(self) -> Tensor | None:
        """Z_ij: `p_factor` where dropout keeps the entry, otherwise 0. None without dropout."""
        tiling = self.tiling
        p, rng_state = tiling.options.dropout_p, tiling.options.rng_state
        if p == 0 or rng_state is None:
            return None
        heads = tiling.heads_k * tiling.group
        rows, columns = (self.q0, self.q1), (self.k0, self.k1)
        keep = keep_tile(rng_state, p, tiling.batch, heads, rows, columns, tiling.first_sequence)
        Z = self._split_heads(keep, 1).transpose(2, 3).to(tiling.dtype).mul_(tiling.p_factor)
        return Z.flatten(2, 3).flatten(0, 1)

    # --- Scores by head, as standard attention has them: (B, Hk, G, q1 − q0, k1 − k0) ---

    def _by_head(self, S_ij: Tensor) -> Tensor:
        """A view."""
        tiling = self.tiling
        shape = (tiling.batch, tiling.heads_k, self.q1 - self.q0, tiling.group, self.k1 - self.k0)
        return S_ij.view(shape).transpose(2, 3)

    def _split_heads(self, x: Tensor, dim: int) -> Tensor:
        """Hq → (Hk, G), of what may broadcast there."""
        heads = (self.tiling.heads_k, self.tiling.group)
        return torch.unflatten(x, dim, (1, 1) if x.shape[dim] == 1 else heads)

    def _part_of(self, bias: Tensor) -> Tensor:
        """The tile's part of (B|1, Hq|1, Sq|1, Sk|1), a view."""
        _, _, seqlen_q, seqlen_k = bias.shape
        queries = slice(None) if seqlen_q == 1 else slice(self.q0, self.q1)
        keys = slice(None) if seqlen_k == 1 else slice(self.k0, self.k1)
        return bias[:, :, queries, keys]

    def _bias(self, bias: Tensor) -> Tensor:
        """The tile's part of the bias, as numbers; −∞ outside the bias."""
        bias_ij = self._part_of(bias)
        if bias.dtype == torch.bool:
            zeros = torch.zeros_like(bias_ij, dtype=self.tiling.dtype)
            bias_ij = zeros.masked_fill_(~bias_ij, -math.inf)
        lengths = (self.q1 - self.q0, self.k1 - self.k0)
        rows, columns = (
            0 if size == 1 else length - part
            for size, length, part in zip(bias.shape[2:], lengths, bias_ij.shape[2:], strict=True)
        )
        return self._split_heads(F.pad(bias_ij, (0, columns, 0, rows), value=-math.inf), 1)


# --- Steps that all the algorithms share ---


def starting_statistics(tiling: Tiling) -> tuple[Tensor, Tensor]:
    """m and ℓ before the first tile: of the sink, which is a key with value 0."""
    sink = tiling.sink_rows()
    m = sink.clamp(min=torch.finfo(tiling.dtype).min)
    return m, torch.exp(sink - m)


def reciprocal(row_sum: Tensor) -> Tensor:
    """diag(ℓ)⁻¹, where a row that saw no key (ℓ = 0) keeps its O = 0."""
    return row_sum.masked_fill(row_sum == 0, 1).reciprocal_()


def in_double(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), rounded: in float32 torch's vectors and the rest of an array may differ by a
    bit."""
    return function(x.double()).to(x.dtype)


def exp_(tile: Tensor, minus: Tensor | float = 0.0) -> Tensor:
    """exp(tile − minus), in place. On a CPU `exp_` is several times slower at −∞.

    In float64, because rounding errors in an exponent, a factor's too, grow with the exponent.
    """
    return tile.copy_(tile.double().sub_(minus).mul_(_LOG2_E).exp2_())
