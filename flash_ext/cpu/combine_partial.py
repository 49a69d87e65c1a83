"""The CPU kernel of `torch.ops.flash_ext.combine_partial`.

The checks are those of csrc/api/combine_partial.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.checks import refuse, require_device, statistics_dtype
from ..ops.schemas import library


def _require(
    name: str, x: Tensor, out: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(x.shape) != shape:
        refuse(name, f"of shape {shape}", tuple(x.shape))
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(name, names, x.dtype)
    require_device(name, x, out)
    if x.numel() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1:
        refuse(name, "contiguous in its last dimension", f"strides {x.stride()}")


def _combine_cpu(
    out: Tensor,
    lse: Tensor,
    o_partial: Tensor,
    lse_partial: Tensor,
    out_before: Tensor | None = None,
) -> None:
    if out.dim() != 4:
        refuse("out", "of shape (batch, seqlen, heads, head_dim)", tuple(out.shape))
    dtype = statistics_dtype(out.dtype)
    results = (dtype,) if dtype == torch.float64 else (torch.float16, torch.bfloat16, dtype)
    statistics = (out.shape[0], out.shape[2], out.shape[1])
    before = out if out_before is None else out_before
    _require("out", out, out, tuple(out.shape), results)
    _require("lse", lse, out, statistics, (dtype,))
    _require("lse_partial", lse_partial, out, statistics, (dtype,))
    _require("o_partial", o_partial, out, tuple(out.shape), results)
    _require("out_before", before, out, tuple(out.shape), results)
    whole = torch.logaddexp(lse, lse_partial)

    def weighted(x: Tensor, of: Tensor) -> Tensor:  # without any key there may be anything in x
        has_key = (of != -torch.inf).mT[..., None]
        return torch.where(has_key, torch.exp(of - whole).mT[..., None] * x, 0)

    out.copy_(weighted(before, lse) + weighted(o_partial, lse_partial))
    lse.copy_(whole)


library.impl("combine_partial", _combine_cpu, "CPU")
