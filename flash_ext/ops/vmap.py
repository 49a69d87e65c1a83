"""`torch.vmap` of the ops: the mapped dimension becomes part of the batch, in one call.

Where the batch cannot hold it (packed sequences, a different sink or descale for each element,
dropout, whose masks would differ, gradients that are summed over the batch) the elements run one by
one. Descales of (B, Hk) and larger belong to the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .options import ABOUT, dim_of
from .torch_private import register_vmap_kernel

_OF_BATCH = {name for name, about in ABOUT.items() if "batch" in about.dims}

Dims = Any
"""The mapped dimension of each tensor, or None; for the options a dict of these."""


def _folded(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """x of (B or 1, ...), mapped along `dim` or not: (size * B, ...), as the ops take it."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
    return x if x.dim() == 4 and x.stride(-1) == 1 else x.contiguous()


def _is_one_number(name: str, x: Tensor, dim: int | None) -> bool:
    """Whether a factor is one number for the whole batch of an element."""
    return dim_of(name, x.dim() - (dim is not None), "batch") is None


def _folded_options(
    options: dict[str, Any], dims: dict[str, int | None], size: int, batch: int
) -> dict[str, Any]:
    folded = dict(options)
    for name in dims.keys() & _OF_BATCH:
        x, dim = options[name], dims[name]
        if ABOUT[name].factor and _is_one_number(name, x, dim):
            continue
        if name == "alibi_slopes" and x.dim() == 1 + (dim is not None):  # (Hq), one for the batch
            x, dim = (x[None], None) if dim is None else (x.movedim(dim, 0)[:, None], 0)
        folded[name] = _folded(x, dim, size, batch)
    return folded


def _same_batch(
    tensors: Any, dims: Any, options: dict[str, Any], option_dims: dict[str, int | None]
) -> bool:
    """Whether everything has one batch, for each element; the op itself says the error."""

    def batch_of(x: Tensor, dim: int | None) -> int:
        return x.shape[0] if dim is None or dim > 0 else x.shape[1]

    given = [(x, dim) for x, dim in zip(tensors, dims, strict=True) if x is not None]
    if any(x.dim() - (dim is not None) not in (3, 4) for x, dim in given):
        return False
    batches = {batch_of(x, dim) for x, dim in given}
    for name in option_dims.keys() & _OF_BATCH:
        x, dim = options[name], option_dims[name]
        rank = x.dim() - (dim is not None)
        if rank == 0 or (ABOUT[name].factor and _is_one_number(name, x, dim)):
            continue
        if name == "alibi_slopes" and rank == 1:
            continue
        if not (name == "bias" and batch_of(x, dim) == 1):
            batches.add(batch_of(x, dim))
    return len(batches) == 1


def _element(tree: Any, dims: Dims, index: int) -> Any:
    """The arguments of one element."""
    if isinstance(tree, dict):
        return {n: _element(x, dims.get(n), index) for n, x in tree.items()}
    if dims is None:
        return tree
    x = tree.select(dims, index)
    # Vectors and lse are contiguous, rows in their last dimension.
    return x if x.dim() > 3 and x.stride(-1) == 1 else x.contiguous()


def _one_by_one(op: Any, size: int, tensors: Any, dims: Any, options: Any, option_dims: Any) -> Any:
    found = [
        op(
            *(_element(x, dim, i) for x, dim in zip(tensors, dims, strict=True)),
            **_element(options, option_dims, i),
        )
        for i in range(size)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


def _together(op: Any, size: int, tensors: Any, dims: Any, options: Any, option_dims: Any) -> Any:
    last, dim = tensors[-1], dims[-1]
    batch = last.shape[0] if dim is None else last.movedim(dim, 0).shape[1]
    results = op(
        *(
            None if x is None else _folded(x, dim, size, batch)
            for x, dim in zip(tensors, dims, strict=True)
        ),
        **_folded_options(options, option_dims, size, batch),
    )
    # (0,) stands for no gradient.
    split = tuple(x if x.dim() == 1 else x.unflatten(0, (size, batch)) for x in results)
    return split, tuple(None if x.dim() == 1 else 0 for x in results)


def _rule(op: Any, sums_over_batch: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    """What `torch.vmap` does in place of the op.

    Args:
        op: accepts tensors of (B, ...), the last of which is not None, and options.
        sums_over_batch: whether the op with these options returns a sum over the batch.
    """

    def rule(info: Any, dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        *tensors, options = arguments
        *tensor_dims, every_dim = dims
        option_dims = {name: every_dim[name] for name, x in options.items() if torch.is_tensor(x)}
        apart = (
            "cu_seqlens_q" in options
            or not _same_batch(tensors, tensor_dims, options, option_dims)
            or options.get("dropout_p", 0.0) > 0
            or option_dims.get("sink") is not None
            or any(
                dim is not None and ABOUT[name].factor and _is_one_number(name, options[name], dim)
                for name, dim in option_dims.items()
            )
            or sums_over_batch(options)
        )
        call = _one_by_one if apart else _together
        return call(op, info.batch_size, tensors, tensor_dims, options, option_dims)  # type: ignore[no-any-return]

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
