"""The CPU kernels of `torch.ops.flash_ext.sum_rows`, `combine_parts` and `copy_rows`.

Their checks are also the words with which the CUDA kernels refuse (csrc/api/sum_rows.cpp has the
same conditions).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.checks import refuse, require_device, statistics_dtype
from ..ops.schemas import library
from ..ops.sum_rows import MOST_OUTS, MOST_PARTS


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


def _require_rows(name: str, x: Tensor, out: Tensor, rows: int | None = None) -> None:
    """x is out's but for the rows, of which there may be any number, or this one."""
    if x.dim() != 4:
        refuse(name, "of shape (batch, seqlen, heads, head_dim)", tuple(x.shape))
    dtype = statistics_dtype(out.dtype)
    results = (dtype,) if dtype == torch.float64 else (torch.float16, torch.bfloat16, dtype)
    count = x.shape[1] if rows is None else rows
    _require(name, x, out, (out.shape[0], count, *out.shape[2:]), results)


def _require_lse(name: str, lse: Tensor, out: Tensor, rows: int) -> None:
    shape = (out.shape[0], out.shape[2], rows)
    _require(name, lse, out, shape, (statistics_dtype(out.dtype),))


def _require_out(name: str, out: Tensor) -> None:
    _require_rows(name, out, out)
    if out.device.type == "cuda" and max(math.prod(out.shape[:3]), out.shape[3]) >= 2**31:
        refuse(name, "below 2^31 rows of all heads", tuple(out.shape))


def _require_parts(out: Tensor, parts: list[Tensor], firsts: list[int]) -> None:
    _require_out("out", out)
    if len(parts) > MOST_PARTS:
        refuse("parts", f"at most {MOST_PARTS} tensors", len(parts))
    if len(firsts) != len(parts):
        refuse("firsts", "one number for each of parts", len(firsts))
    for i, x in enumerate(parts):
        _require_rows(f"parts[{i}]", x, out)


def check_sum_rows(
    out: Tensor, parts: list[Tensor], firsts: list[int], index: Tensor | None = None
) -> None:
    """Check the arguments of `sum_rows`."""
    _require_parts(out, parts, firsts)
    if index is not None:
        _require("index", index, out, (out.shape[1],), (torch.int32,))


def check_combine_parts(
    out: Tensor, lse: Tensor, parts: list[Tensor], lse_parts: list[Tensor], firsts: list[int]
) -> None:
    """Check the arguments of `combine_parts`."""
    _require_parts(out, parts, firsts)
    _require_lse("lse", lse, out, out.shape[1])
    if len(lse_parts) != len(parts):
        refuse("lse_parts", "one tensor for each of parts", len(lse_parts))
    for i, (x, of_x) in enumerate(zip(parts, lse_parts, strict=True)):
        _require_lse(f"lse_parts[{i}]", of_x, out, x.shape[1])


def check_copy_rows(outs: list[Tensor], x: Tensor) -> None:
    """Check the arguments of `copy_rows`."""
    if not 1 <= len(outs) <= MOST_OUTS:
        refuse("outs", f"1 to {MOST_OUTS} tensors", len(outs))
    out = outs[0]
    _require_out("outs[0]", out)
    _require_rows("x", x, out, out.shape[1])
    for i, other in enumerate(outs):
        _require(f"outs[{i}]", other, out, tuple(out.shape), (out.dtype,))
        if other.stride() != out.stride():
            refuse(f"outs[{i}]", "of the strides of outs[0]", "others")


def _sum_rows_cpu(
    out: Tensor, parts: list[Tensor], firsts: list[int], index: Tensor | None = None
) -> None:
    check_sum_rows(out, parts, firsts, index)
    rows = out.shape[1]
    source = torch.arange(rows, device=out.device) if index is None else index.long()
    total = torch.zeros(out.shape, dtype=statistics_dtype(out.dtype), device=out.device)
    for x, first in zip(parts, firsts, strict=True):
        has = (source >= first) & (source < first + x.shape[1])
        total[:, has] += x[:, source[has] - first]
    out.copy_(total)


def _combine_parts_cpu(
    out: Tensor, lse: Tensor, parts: list[Tensor], lse_parts: list[Tensor], firsts: list[int]
) -> None:
    check_combine_parts(out, lse, parts, lse_parts, firsts)
    rows = out.shape[1]
    whole = torch.full_like(lse, -torch.inf)
    places = []
    for x, of_x, first in zip(parts, lse_parts, firsts, strict=True):
        a, b = max(first, 0), min(first + x.shape[1], rows)
        place, mine = slice(a, max(a, b)), slice(a - first, max(a, b) - first)
        places.append((place, x[:, mine], of_x[..., mine]))
        whole[..., place] = torch.logaddexp(whole[..., place], of_x[..., mine])
    total = torch.zeros(out.shape, dtype=lse.dtype, device=out.device)
    for place, x, of_x in places:  # without any key there may be anything in x
        has_key = (of_x != -torch.inf).mT[..., None]
        weight = torch.exp(of_x - whole[..., place]).mT[..., None]
        total[:, place] += torch.where(has_key, weight * x, 0)
    out.copy_(total)
    lse.copy_(whole)


def _copy_rows_cpu(outs: list[Tensor], x: Tensor) -> None:
    check_copy_rows(outs, x)
    for other in outs:
        other.copy_(x)


library.impl("combine_parts", _combine_parts_cpu, "CPU")
library.impl("sum_rows", _sum_rows_cpu, "CPU")
library.impl("copy_rows", _copy_rows_cpu, "CPU")
