"""FLOPs of the ops for `torch.utils.flop_counter.FlopCounterMode`, by the rule of SDPA's formulas.

That is two matmuls forward and five backward over whole rows of scores: masked scores count too.
Packed sequences count with their own lengths, if these can be read.

The formulas are registered when `torch.utils.flop_counter` is imported, by whomever: it imports
triton if that is installed, which is several times slower to import than flash_ext.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

_MODULE = "torch.utils.flop_counter"


def _values(lengths: Tensor) -> list[int] | None:
    """None if tensors hold no values: on the meta device, and in the subclasses of tracing."""
    if lengths.is_meta or type(lengths) is not Tensor:
        return None
    return lengths.tolist()


def _sequences(q: Tensor, k: Tensor, options: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The queries and keys of each sequence. Unknown lengths are taken to be equal."""
    used = options.get("seqused_k")
    if "cu_seqlens_q" not in options:
        batch = q.shape[0]
        lengths_q, lengths_k = [q.shape[1]] * batch, [k.shape[1]] * batch
    else:
        cu_seqlens = options["cu_seqlens_q"], options["cu_seqlens_k"]
        batch = cu_seqlens[0].shape[0] - 1
        lengths_q, lengths_k = (
            _values(x.diff()) or [total // max(batch, 1)] * batch
            for x, total in zip(cu_seqlens, (q.shape[0], k.shape[0]), strict=True)
        )
    if used is not None:
        lengths_k = _values(used) or lengths_k
    return zip(lengths_q, lengths_k, strict=True)


def _scores(q: Tensor, k: Tensor, options: dict[str, Any]) -> int:
    """The number of scores, of all heads."""
    return int(q.shape[-2] * sum(rows * columns for rows, columns in _sequences(q, k, options)))


def fwd_flops(q: Tensor, k: Tensor, v: Tensor, *, out_val: Any = None, **options: Any) -> int:
    """Of the forward op: the scores, D multiplications and additions each, and P V."""
    return 2 * _scores(q, k, options) * (q.shape[-1] + v.shape[-1])


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


def node_flops(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **_: Any) -> int:
    """Of `node_bwd`; `node.py` says which of its arguments are options."""
    *_bias_and_mask, out, lse, cu_seqlens_q, cu_seqlens_k = more[:6]
    seqused_k = more[-1]
    options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    return bwd_flops(dout, None, q, k, v, out, lse, **given)


class _WhenImported(MetaPathFinder):
    """Registers formulas as soon as torch's registry is there."""

    def __init__(self) -> None:
        self.formulas: list[tuple[Any, Callable[..., int]]] = []

    def add(self, op: Any, formula: Callable[..., int]) -> None:
        """Register a formula, now or later."""
        self.formulas.append((op, formula))
        if module := sys.modules.get(_MODULE):
            self.register_all(module)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def register_all(self, module: ModuleType) -> None:
        """Register what was added."""
        while self.formulas:
            op, formula = self.formulas.pop()
            module.register_flop_formula(op, get_raw=True)(formula)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called before every import; finds one module, once, by those who would find it anyway."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                self.register_all(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


_when_imported = _WhenImported()


def register(op: Any, formula: Callable[..., int]) -> None:
    """Register the formula of an op, given as its packet of overloads."""
    _when_imported.add(op, formula)
