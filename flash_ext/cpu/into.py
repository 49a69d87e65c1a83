"""The CPU kernels of `fwd_into` and `bwd_into`: compute, and copy.

Their checks are also the words with which the CUDA kernels refuse (csrc/api/attention.cpp has the
same conditions).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.checks import dtype_name, refuse, require_device
from ..ops.into import ALIGNMENT, fits
from ..ops.options import QK_8_BITS, BackwardTensors, Options
from ..ops.schemas import library
from ..ops.torch_private import below_autocast
from . import tiled
from .checks import check_backward, check_forward


def check_into(name: str, into: Tensor, like: Tensor, last: Tensor) -> None:
    """Check a tensor for a result of the shape of `like`, but for the last size."""
    shape = (*like.shape[:-1], *last.shape[-1:])
    if tuple(into.shape) != shape:
        refuse(name, f"of shape {shape}", tuple(into.shape))
    if into.dtype != like.dtype:
        refuse(name, f"of q's dtype {dtype_name(like.dtype)}", dtype_name(into.dtype))
    require_device(name, into, like)
    if into.numel() > 0 and not fits(into):
        wanted = f"of contiguous rows of their own that begin at multiples of {ALIGNMENT} bytes"
        refuse(name, wanted, f"strides {into.stride()}")


def check_plain_call(q: Tensor, options: Options) -> None:
    """Check that out has q's dtype, and that each gradient has a place."""
    if q.dtype in QK_8_BITS:
        refuse("q", "float16 or bfloat16 where results are written into tensors",
               dtype_name(q.dtype))  # fmt: skip
    if options.bias is not None:
        refuse("bias", "None if results are written into tensors", "a tensor")


def _fwd_into_cpu(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    options = Options(**given)
    check_plain_call(q, options)
    with below_autocast("cpu"):
        found, lse = tiled.forward(check_forward(q, k, v, options), q, k, v, options)
    check_into("out", out, found, found)
    out.copy_(found)
    return lse


def _bwd_into_cpu(dq: Tensor, dk: Tensor, dv: Tensor, *tensors: Any, **given: Any) -> Tensor:
    x, options = BackwardTensors(*tensors), Options(**given)
    check_plain_call(x.q, options)
    with below_autocast("cpu"):
        *found, _, dsink = tiled.backward(check_backward(x, options), x, options, need_dbias=False)
    for name, into, gradient in zip(("dq", "dk", "dv"), (dq, dk, dv), found, strict=True):
        assert gradient is not None
        check_into(name, into, gradient, gradient)
        into.copy_(gradient)
    return dq.new_empty(0) if dsink is None else dsink


library.impl("fwd_into", _fwd_into_cpu, "CPU")
library.impl("bwd_into", _bwd_into_cpu, "CPU")
