"""The ops that add up what several calls have written, and their fake kernels.

    sum_rows(out!, parts, firsts, index=None) -> ()

writes the sum of parts, in their order, to all rows of out (B, S, H, D). Part p, (B, rows, H, D),
is of rows firsts[p] to firsts[p] + rows of the sequence; a row that is in none has zeros. With
index (S), int32, row i of out is row index[i] of the sequence. out may be one of the parts
if there is no index and it is of rows 0 to S.

    combine_parts(out!, lse!, parts, lse_parts, firsts) -> ()

makes attention over some keys each, parts (B, rows, H, Dv) and lse_parts (B, H, rows), into that
over all of them:

    lse = log sum_p exp(lse_p)
    out = sum_p exp(lse_p - lse) parts_p

A row without a key has zeros and lse = -inf. Where lse_p = -inf nothing of parts_p counts. out and
lse may be of one part, of rows 0 to S.

    copy_rows(outs!, x) -> ()

writes rows x (B, rows, H, D) to each of outs, 1 to 16 tensors of its shape and of one dtype and
strides. They may be in the memory of other GPUs. Numbers are copied, not bits: -0 becomes 0.

out and parts are float16, bfloat16 or float32, each by itself, lse and lse_parts float32 (on a CPU
also all of them float64). Sums are formed in float32 and rounded once, to out's dtype: a chain of
sums can begin with a 16-bit out, continue in float32 and end in 16 bits. At most 8 parts. Any
strides with a contiguous last dimension, of lse too, so that rows may be a section of more. No
gradient: gradients of parts need only the whole lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import require_one_device
from .schemas import library
from .torch_private import register_in_place, register_no_gradient

MOST_PARTS, MOST_OUTS = 8, 16
"""Of one call."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

library.define(
    "combine_parts(Tensor(a!) out, Tensor(b!) lse, Tensor[] parts, Tensor[] lse_parts, "
    "int[] firsts) -> ()",
    tags=_TAGS,
)
library.define(
    "sum_rows(Tensor(a!) out, Tensor[] parts, int[] firsts, Tensor? index=None) -> ()",
    tags=_TAGS,
)
library.define("copy_rows(Tensor(a!)[] outs, Tensor x) -> ()", tags=_TAGS)
combine_parts: Any = torch.ops.flash_ext.combine_parts.default
sum_rows: Any = torch.ops.flash_ext.sum_rows.default
copy_rows: Any = torch.ops.flash_ext.copy_rows.default
for _op, _written in ((combine_parts, 2), (sum_rows, 1), (copy_rows, 1)):
    register_no_gradient(library, _op)
    register_in_place(library, _op, _written)


def _combine_parts_fake(
    out: Tensor, lse: Tensor, parts: list[Tensor], lse_parts: list[Tensor], firsts: list[int]
) -> None:
    named = {f"parts[{i}]": x for i, x in enumerate(parts)}
    named |= {f"lse_parts[{i}]": x for i, x in enumerate(lse_parts)}
    require_one_device(out, lse=lse, **named)


def _sum_rows_fake(
    out: Tensor, parts: list[Tensor], firsts: list[int], index: Tensor | None = None
) -> None:
    require_one_device(out, index=index, **{f"parts[{i}]": x for i, x in enumerate(parts)})


def _copy_rows_fake(outs: list[Tensor], x: Tensor) -> None:
    require_one_device(x, **{f"outs[{i}]": out for i, out in enumerate(outs)})


register_fake("flash_ext::copy_rows", _copy_rows_fake, lib=library)
register_fake("flash_ext::combine_parts", _combine_parts_fake, lib=library)
register_fake("flash_ext::sum_rows", _sum_rows_fake, lib=library)
