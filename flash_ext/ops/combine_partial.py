"""The op `torch.ops.flash_ext.combine_partial`, and its fake kernel.

    combine_partial(out!, lse!, o_partial, lse_partial, out_before=None) -> ()

adds attention over other keys to the results so far, in place:

    lse' = log(exp(lse) + exp(lse_partial))
    out' = exp(lse - lse') out + exp(lse_partial - lse') o_partial

out (B, S, H, Dv) and o_partial, of its shape, are float16, bfloat16 or float32, each by itself, and
lse (B, H, S) and lse_partial are float32 (on a CPU also all of them float64). Sums are formed in
float32 and rounded once, to out's dtype. Any strides with a contiguous last dimension, of lse too,
so that rows may be a section of more. A row without a key has zeros and lse = -inf, in out as in
o_partial.

With out_before, of out's shape in any of its dtypes, the results so far are read there and only
written to out, all of it: a chain of such sums can begin with a 16-bit out, continue in float32 and
end in 16 bits. The two must not overlap. No gradient: gradients of parts need only the whole lse.
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
    "combine_partial(Tensor(a!) out, Tensor(b!) lse, Tensor o_partial, Tensor lse_partial, "
    "Tensor? out_before=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
combine_partial: Any = torch.ops.flash_ext.combine_partial.default
register_no_gradient(library, combine_partial)


def _combine_fake(
    out: Tensor,
    lse: Tensor,
    o_partial: Tensor,
    lse_partial: Tensor,
    out_before: Tensor | None = None,
) -> None:
    require_one_device(
        out, lse=lse, o_partial=o_partial, lse_partial=lse_partial, out_before=out_before
    )


register_fake("flash_ext::combine_partial", _combine_fake, lib=library)
