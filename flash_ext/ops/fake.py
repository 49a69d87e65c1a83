"""The fake kernels: shapes, dtypes and strides only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import register_fake

from .checks import head_dim_v, require_one_device, result_dtype, statistics_dtype
from .options import BackwardTensors
from .schemas import library


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    require_one_device(q, k=k, v=v, **options)
    *batch, rows, heads, _ = q.shape  # no batch if sequences are packed
    dtype = result_dtype(q.dtype, options.get("out_dtype"))
    out = q.new_empty((*batch, rows, heads, head_dim_v(v, options)), dtype=dtype)
    lse = q.new_empty((*batch, heads, rows), dtype=statistics_dtype(q.dtype))
    return out, lse


def _bwd_fake(*tensors: Any, need_dbias: bool = True, **options: Any) -> tuple[Tensor, ...]:
    x = BackwardTensors(*tensors)
    require_one_device(**x._asdict(), **options)
    bias, sink = options.get("bias"), options.get("sink")
    if bias is not None and not (need_dbias and bias.is_floating_point()):
        bias = None
    gradients_of = (x.q, x.k, x.v, bias, sink)
    return tuple(x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in gradients_of)


register_fake("flash_ext::fwd", _fwd_fake, lib=library)
register_fake("flash_ext::bwd", _bwd_fake, lib=library)
