"""The ops `fwd_into` and `bwd_into`: `fwd` and `bwd` that write into tensors they are given.

    fwd_into(out!, q, k, v, *, options) -> lse
    bwd_into(dq!, dk!, dv!, dout, dlse?, q, k, v, out, lse, *, options) -> dsink

The tensors that are written have the shapes and the dtype that `fwd` and `bwd` return, in any
strides with a contiguous last dimension, where `fits` says so: some heads of a tensor with more, or
some rows. They do not overlap the inputs. dsink is as of `bwd`. No gradients, no bias, no FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import require_one_device, statistics_dtype
from .schemas import define, library
from .torch_private import register_in_place, register_no_gradient

ALIGNMENT = 16
"""Bytes: where each row of a written tensor begins."""

_MUTATING = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

fwd_into = define("fwd_into(Tensor(a!) out, Tensor q, Tensor k, Tensor v", "Tensor lse", _MUTATING)
bwd_into = define(
    "bwd_into(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor dout, Tensor? dlse, Tensor q,"
    " Tensor k, Tensor v, Tensor out, Tensor lse",
    "Tensor dsink",
    _MUTATING,
)


for _op, _written in ((fwd_into, 1), (bwd_into, 3)):
    register_no_gradient(library, _op)
    register_in_place(library, _op, _written)


def fits(*tensors: Tensor) -> bool:
    """Whether the ops can write these: rows are contiguous, begin at multiples of 16 bytes, and no
    two are the same memory."""
    return all(
        x.stride(-1) == 1
        and x.shape[-1] * x.element_size() % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
        and all(
            count == 1 or (stride != 0 and stride * x.element_size() % ALIGNMENT == 0)
            for count, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
        for x in tensors
    )


def _fwd_fake(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    require_one_device(q, out=out, k=k, v=v, **options)
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=statistics_dtype(q.dtype))


def _bwd_fake(dq: Tensor, dk: Tensor, dv: Tensor, *tensors: Any, **options: Any) -> Tensor:
    require_one_device(dq, dk=dk, dv=dv)
    sink = options.get("sink")
    return dq.new_empty(0) if sink is None else torch.empty_like(sink)


register_fake("flash_ext::fwd_into", _fwd_fake, lib=library)
register_fake("flash_ext::bwd_into", _bwd_fake, lib=library)
