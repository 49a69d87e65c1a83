"""FLOPs of the ops for `torch.utils.flop_counter.FlopCounterMode`, by the rule of SDPA's formulas.

That is two matmuls forward and five backward over whole rows of scores: masked scores count too.
Packed sequences count with their own lengths, if these can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .checks import head_dim_v


def _values(lengths: Tensor) -> list[int] | None:
    """None if tensors hold no values: on the meta device, and in the subclasses of tracing."""
    if lengths.is_meta or type(lengths) is not Tensor:
        return None
    return lengths.tolist()


def _sequences(q: Tensor, k: Tensor, options: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The queries and keys of each sequence. Unknown lengths are taken to be equal."""
    used, table = options.get("seqused_k"), options.get("page_table")
    packed_q, packed_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    batch = q.shape[0] if packed_q is None else packed_q.shape[0] - 1
    rows_k = k.shape[-3] if table is None else table.shape[1] * k.shape[1]

    def lengths(rows: int, cu_seqlens: Tensor | None) -> list[int]:
        if cu_seqlens is None:
            return [rows] * batch
        return _values(cu_seqlens.diff()) or [rows // max(batch, 1)] * batch

    lengths_q, lengths_k = lengths(q.shape[-3], packed_q), lengths(rows_k, packed_k)
    if used is not None:
        lengths_k = _values(used) or lengths_k
    return zip(lengths_q, lengths_k, strict=True)


def _scores(q: Tensor, k: Tensor, options: dict[str, Any]) -> int:
    """The number of scores, of all heads."""
    return int(q.shape[-2] * sum(rows * columns for rows, columns in _sequences(q, k, options)))


def fwd_flops(q: Tensor, k: Tensor, v: Tensor, *, out_val: Any = None, **options: Any) -> int:
    """Of the forward op: the scores, D multiplications and additions each, and P V."""
    return 2 * _scores(q, k, options) * (q.shape[-1] + head_dim_v(v, options))


def bwd_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Of the backward op: S again, dP, dV, dQ and dK."""
    return 2 * _scores(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])


def register(op: Any, formula: Callable[..., int]) -> None:
    """Register the formula of an op, given as its packet of overloads."""
    register_flop_formula(op, get_raw=True)(formula)
