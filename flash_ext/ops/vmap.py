"""`torch.vmap` of the ops: the mapped dimension becomes part of the batch, in one call.

Elements run one by one if the batch cannot hold them: packed sequences, options that have a batch
or differ between elements, dropout, whose masks would differ, and gradients that are summed over
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .options import dim_of
from .torch_private import register_vmap_kernel

Dims = Any
"""The mapped dimension of each tensor, or None; for the options a dict of these."""


def _rows(x: Tensor) -> Tensor:
    """x as the ops take it: rows in the last dimension; vectors and lse are contiguous."""
    return x if x.dim() > 3 and x.stride(-1) == 1 else x.contiguous()


def _have_one_batch(tensors: Any, dims: Any) -> bool:
    """Whether the elements of all tensors have the same batch; the op itself says the error."""
    batches = set()
    for x, dim in zip(tensors, dims, strict=True):
        if x is None:
            continue
        shape = [size for i, size in enumerate(x.shape) if i != dim]
        if len(shape) not in (3, 4):
            return False
        batches.add(shape[0])
    return len(batches) == 1


def _has_batch(name: str, x: Tensor, dim: int | None) -> bool:
    """Whether an option has a batch, or is mapped. A bias of batch 1 is one for every batch."""
    if dim is not None:
        return True
    batch = dim_of(name, x.dim(), "batch")
    return batch is not None and not (name == "bias" and x.shape[batch] == 1)


def _one_by_one(op: Any, size: int, tensors: Any, dims: Any, options: Any, option_dims: Any) -> Any:
    def element(x: Any, dim: int | None, i: int) -> Any:
        return x if dim is None else _rows(x.select(dim, i))

    found = [
        op(
            *(element(x, dim, i) for x, dim in zip(tensors, dims, strict=True)),
            **{name: element(x, option_dims.get(name), i) for name, x in options.items()},
        )
        for i in range(size)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


def _together(op: Any, size: int, tensors: Any, dims: Any, options: Any) -> Any:
    def folded(x: Tensor | None, dim: int | None) -> Tensor | None:
        """(size * B, ...)"""
        if x is None:
            return None
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return _rows(x.flatten(0, 1))

    results = op(*(folded(x, dim) for x, dim in zip(tensors, dims, strict=True)), **options)
    # (0,) stands for no gradient.
    split = tuple(x if x.dim() == 1 else x.unflatten(0, (size, -1)) for x in results)
    return split, tuple(None if x.dim() == 1 else 0 for x in results)


def _rule(op: Any, sums_over_batch: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    """What `torch.vmap` does in place of the op.

    Args:
        op: accepts tensors of (B, ...) and options.
        sums_over_batch: whether the op with these options returns a sum over the batch.
    """

    def rule(info: Any, dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        *tensors, options = arguments
        *tensor_dims, every_dim = dims
        option_dims = {name: every_dim[name] for name, x in options.items() if torch.is_tensor(x)}
        apart = (
            "cu_seqlens_q" in options
            or options.get("dropout_p", 0.0) > 0
            or any(_has_batch(name, options[name], dim) for name, dim in option_dims.items())
            or sums_over_batch(options)
            or not _have_one_batch(tensors, tensor_dims)
        )
        size = info.batch_size
        if apart:
            return _one_by_one(op, size, tensors, tensor_dims, options, option_dims)  # type: ignore[no-any-return]
        return _together(op, size, tensors, tensor_dims, options)  # type: ignore[no-any-return]

    return rule


def _sums_gradients(options: dict[str, Any]) -> bool:
    """Whether bwd returns gradients of a sink or of a bias, which may be summed over the batch."""
    bias = options.get("bias")
    dbias = bias is not None and options.get("need_dbias", True) and bias.is_floating_point()
    return dbias or options.get("sink") is not None


def register(library: Library, fwd: Any, bwd: Any) -> None:
    """Register the rules of the two ops."""
    for op, sums in ((fwd, lambda options: False), (bwd, _sums_gradients)):
        register_vmap_kernel(library, op, _rule(op, sums))
