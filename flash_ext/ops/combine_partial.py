"""The op `torch.ops.flash_ext.combine_partial`, and its fake kernel.

    combine_partial(out!, lse!, o_partial, lse_partial) -> ()

adds attention over other keys to the results so far, in place:

    lse' = log(exp(lse) + exp(lse_partial))
    out' = exp(lse - lse') out + exp(lse_partial - lse') o_partial

out (B, S, H, Dv) and lse (B, H, S) are float32 (float64 with float64, on a CPU), o_partial has
out's shape in float16, bfloat16 or float32, and lse_partial lse's shape in its dtype. Any strides
with a contiguous last dimension, of lse too, so that rows may be a section of more. A row without a
key so far has out = 0 and lse = -inf. No gradient: gradients of parts need only the whole lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from .checks import require_one_device
from .schemas import library
from .torch_private import register_no_gradient

library.define(
    "combine_partial(Tensor(a!) out, Tensor(b!) lse, Tensor o_partial, Tensor lse_partial) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
combine_partial: Any = torch.ops.flash_ext.combine_partial.default
register_no_gradient(library, combine_partial)


def _combine_fake(out: Tensor, lse: Tensor, o_partial: Tensor, lse_partial: Tensor) -> None:
    require_one_device(out, lse=lse, o_partial=o_partial, lse_partial=lse_partial)


register_fake("flash_ext::combine_partial", _combine_fake, lib=library)
