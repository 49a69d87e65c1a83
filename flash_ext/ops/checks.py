"""The checks of arguments in Python, before an op sees them, and the messages of errors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .options import QK_8_BITS
from .torch_private import in_dual_level

Pair = Sequence[int] | Tensor
"""Two integers, for type checkers; `require_pair` accepts NumPy arrays too."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulators, softmax and lse: float32, or float64 for float64 inputs (CPU only)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """For example "float16"."""
    return str(dtype).removeprefix("torch.")


def result_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of out, for q's dtype and the option `out_dtype`."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if dtype in QK_8_BITS else dtype


def head_dim_v(v: Tensor, options: Mapping[str, Any]) -> int:
    """Dv of v (B, Sk, Hk, Dv), or with the option `v_transposed` (B, Hk, Dv, keys)."""
    return v.shape[-2 if options.get("v_transposed") else -1]


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def refuse(argument: str, wanted: str, got: object) -> NoReturn:
    """Raise the ValueError that names the argument, what was expected and what was given."""
    if isinstance(got, torch.dtype):
        got = dtype_name(got)
    raise ValueError(f"flash_ext: {argument} must be {wanted}, got {got}")


def require_tensors(**arguments: Any) -> None:
    """Refuse all but dense tensors: its attributes and ops would fail without naming it."""
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            if x.is_nested:
                hint = "a jagged one's values() and offsets() are for attention_varlen"
                refuse(name, f"a dense tensor ({hint})", "a nested tensor")
        else:
            refuse(name, "a tensor", None if x is None else f"a value of type {type(x).__name__}")


def require_dtype(argument: str, dtype: Any) -> torch.dtype:
    """Refuse all but dtypes."""
    if not isinstance(dtype, torch.dtype):
        refuse(argument, "a torch.dtype", repr(dtype))
    return dtype


def refuse_gradients(**constants: Any) -> None:
    """Refuse tensors that want a gradient if there is none: it would be lost in silence."""
    for name, x in constants.items():
        if not isinstance(x, Tensor):
            continue
        wants = x.requires_grad and torch.is_grad_enabled()
        if not wants and not is_compiling() and in_dual_level():
            wants = forward_ad.unpack_dual(x).tangent is not None
        if wants:
            wanted = "a constant, since it gets no gradient (detach it)"
            refuse(name, wanted, "a tensor that requires one")


def require_number(name: str, x: Any) -> None:
    """Refuse a tensor of several elements for a number, and one that wants a gradient."""
    if isinstance(x, Tensor):
        refuse_gradients(**{name: x})
        if x.numel() != 1:
            refuse(name, "a number", f"a tensor of shape {tuple(x.shape)}")


def require_pair(argument: str, window: Pair) -> tuple[int, int]:
    """The two sides of a window: integers of any kind in a sequence, a tensor or a NumPy array.

    A tensor on a GPU is waited for.

    Raises:
        ValueError: it is not a pair of integers.
    """
    try:
        if isinstance(window, Tensor):
            left, right = window.tolist()
        elif isinstance(window, Sequence) or hasattr(window, "__array__"):
            left, right = window
        else:
            raise TypeError
        return _integer(left), _integer(right)
    except (TypeError, ValueError):
        refuse(argument, "a pair of ints (left, right), -1 for unlimited", repr(window))


def _integer(x: Any) -> Any:
    return x if isinstance(x, int | torch.SymInt) else operator.index(x)


def require_device(argument: str, tensor: Tensor, q: Tensor) -> None:
    """Refuse a tensor that is not on q's device."""
    if tensor.device != q.device:
        refuse(argument, f"on q's device {q.device}", tensor.device)


def require_one_device(q: Tensor, **others: object) -> None:
    """Of fake kernels: the dispatcher also comes there if only one tensor is a meta tensor."""
    for name, x in others.items():
        if isinstance(x, Tensor):
            require_device(name, x, q)


def _has_shape(x: Tensor, shape: tuple[int | str, ...]) -> bool:
    """Words stand for any size."""
    if len(x.shape) != len(shape):
        return False
    for size, found in zip(shape, x.shape, strict=True):  # quicker than all() of a generator
        if size != found and type(size) is not str:
            return False
    return True


def require_ints(name: str, x: Tensor, shape: tuple[int | str, ...], q: Tensor) -> None:
    """Refuse all but int32 of a shape, in which words stand for any size, on q's device."""
    if type(x) is not Tensor:
        require_tensors(**{name: x})
    if x.dtype != torch.int32 or not _has_shape(x, shape) or x.device != q.device:
        words = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        got = f"{x.dtype} of shape {tuple(x.shape)}, on {x.device}"
        refuse(name, f"int32 of shape ({words}), on {q.device}", got)


def check_rows(
    name: str,
    x: Tensor,
    shape: tuple[int | str, ...],
    q: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Check the shape of x, where words stand for any size, and that it is on q's device, in this
    dtype or q's."""
    if type(x) is not Tensor:
        require_tensors(**{name: x})
    dtype = q.dtype if dtype is None else dtype
    if not _has_shape(x, shape) or x.dtype != dtype or x.device != q.device:
        like = ", like q" if dtype == q.dtype else ""
        wanted = f"of shape ({', '.join(map(str, shape))}), {dtype}, on {q.device}{like}"
        got = f"{tuple(x.shape)}, {x.dtype}, on {x.device}"
        raise ValueError(f"flash_ext: {name} must be {wanted}, got {got}")
