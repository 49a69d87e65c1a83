"""`torch.vmap` of the ops: the mapped dimension becomes part of the batch, in one call.

With an option that is a tensor the elements run one by one. The batch could hold few of those: not
packed sequences, nor a dropout mask for each element, nor gradients that are summed over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .torch_private import register_vmap_kernel

Dims = Any
"""The mapped dimension of each tensor, or None; for the options a dict of these."""


def _rows(x: Tensor) -> Tensor:
    """x as the ops take it: rows in the last dimension; vectors, lse and masks are contiguous."""
    has_rows = x.dim() > 3 and x.stride(-1) == 1 and x.dtype != torch.int32
    return x if has_rows else x.contiguous()


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


def _rule(op: Any) -> Callable[..., Any]:
    """What `torch.vmap` does in place of the op, of tensors (B, ...) and options."""

    def rule(info: Any, dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        *tensors, options = arguments
        *tensor_dims, every_dim = dims
        option_dims = {name: every_dim[name] for name, x in options.items() if torch.is_tensor(x)}
        size = info.batch_size
        if option_dims or not _have_one_batch(tensors, tensor_dims):
            return _one_by_one(op, size, tensors, tensor_dims, options, option_dims)  # type: ignore[no-any-return]
        return _together(op, size, tensors, tensor_dims, options)  # type: ignore[no-any-return]

    return rule


def register(library: Library, *ops: Any) -> None:
    """Register the rules of ops."""
    for op in ops:
        register_vmap_kernel(library, op, _rule(op))
