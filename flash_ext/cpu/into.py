"""The CPU kernels of `fwd_into` and `bwd_into`: compute, and copy.

csrc/api/bindings.cpp has the same checks.
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


def _write(name: str, into: Tensor, x: Tensor) -> None:
    if into.shape != x.shape:
        refuse(name, f"of shape {tuple(x.shape)}", tuple(into.shape))
    if into.dtype != x.dtype:
        refuse(name, f"of q's dtype {dtype_name(x.dtype)}", dtype_name(into.dtype))
    require_device(name, into, x)
    if into.numel() > 0 and not fits(into):
        wanted = f"of contiguous rows of their own that begin at multiples of {ALIGNMENT} bytes"
        refuse(name, wanted, f"strides {into.stride()}")
    into.copy_(x)


def _require_plain(q: Tensor, options: Options) -> None:
    if q.dtype in QK_8_BITS:
        refuse("q", "float16 or bfloat16 where results are written into tensors",
               dtype_name(q.dtype))  # fmt: skip
    if options.bias is not None:
        refuse("bias", "None where results are written into tensors", "a tensor")


def _fwd_into_cpu(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    options = Options(**given)
    _require_plain(q, options)
    with below_autocast("cpu"):
        found, lse = tiled.forward(check_forward(q, k, v, options), q, k, v, options)
    _write("out", out, found)
    return lse


def _bwd_into_cpu(dq: Tensor, dk: Tensor, dv: Tensor, *tensors: Any, **given: Any) -> Tensor:
    x, options = BackwardTensors(*tensors), Options(**given)
    _require_plain(x.q, options)
    with below_autocast("cpu"):
        *found, _, dsink = tiled.backward(check_backward(x, options), x, options, need_dbias=False)
    for name, into, gradient in zip(("dq", "dk", "dv"), (dq, dk, dv), found, strict=True):
        assert gradient is not None
        _write(name, into, gradient)
    return dq.new_empty(0) if dsink is None else dsink


library.impl("fwd_into", _fwd_into_cpu, "CPU")
library.impl("bwd_into", _bwd_into_cpu, "CPU")
