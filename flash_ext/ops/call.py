"""`fwd` for callers in Python, by the quickest way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import node
from .autograd import autocast_tensors, fwd_autograd, register_subclasses
from .binary import cuda_missing
from .checks import require_tensors
from .schemas import fwd
from .torch_private import (
    below_autocast,
    in_autocast,
    in_function_mode,
    in_transforms,
    is_fake,
)

node_forward = node.find() if cuda_missing is None else None
"""The node in C++, or None: then a small call for gradients takes the host a third longer, forward
and backward (docs/notes/011-host-time.md)."""


def is_real(x: Tensor) -> bool:
    """Whether x has elements that a kernel could read: `check` needs them."""
    return not (x.is_meta or is_fake(x))


def can_be_read(x: Tensor) -> bool:
    """Whether numbers can be looked at without a wait for a device."""
    return not x.is_cuda and not is_compiling() and is_real(x)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for x's device. (torch knows no autocast for meta.)"""
    return in_autocast() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


AS_IT_IS = nullcontext()


def no_autocast(q: Tensor) -> AbstractContextManager[Any]:
    """Within it q's device has no autocast."""
    return torch.autocast(q.device.type, enabled=False) if autocasts(q) else AS_IT_IS


def forward(q: Tensor, k: Tensor, v: Tensor, *, need_lse: bool = True, **options: Any) -> Any:
    """`fwd` for callers in Python, quicker. Without need_lse, lse may have no gradient.

    Where a call would first reach its Autocast and Autograd kernels this calls them directly: the
    dispatcher's way into Python and back is slower than a launch.
    """
    if is_compiling() or in_transforms() or in_function_mode():
        return fwd(q, k, v, **options)
    if not (type(q) is type(k) is type(v) is Tensor):
        require_tensors(q=q, k=k, v=v)
        register_subclasses(q, k, v)
        return fwd(q, k, v, **options)
    autocast = autocasts(q)
    if autocast:
        q, k, v = autocast_tensors(q.device.type, q, k, v)
    if not need_lse and node_forward is not None and node.takes(q, k, v, options):
        return node_forward(q, k, v, options)
    if not autocast:
        return fwd_autograd(q, k, v, **options)
    with below_autocast(q.device.type):
        return fwd_autograd(q, k, v, **options)
