"""The CPU kernels of the ops: FlashAttention 1, 2 and the FP8 form of 3 as tile loops in torch.

They are for reading and for testing: `tiled` has the papers' algorithms line by line, `fp8` the one
for 8-bit inputs, `tiling` cuts a call into tiles, `mask`, `sequences` and `descales` say which keys
are visible and what 8-bit numbers stand for, and `checks` refuses wrong arguments. `tile_mask`
reads masks of lists of blocks, and `make_mask` makes them. `quantize` is quantization to 8 bits,
`transposed_v` the layout of V^T, `sum_rows` adds up what several calls have written, `into` writes
into given tensors, `append_kv` into a cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.options import QK_8_BITS, VARIANTS, BackwardTensors, Options
from ..ops.schemas import library
from ..ops.torch_private import below_autocast
from . import append_kv as append_kv
from . import into as into
from . import make_mask as make_mask
from . import quantize as quantize
from . import refusals as refusals
from . import sum_rows as sum_rows
from . import tiled, transposed_v
from .checks import check_backward, check_forward


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    options = Options(**given)
    with below_autocast("cpu"):
        variant = check_forward(q, k, v, options)
        if options.v_transposed:
            v = transposed_v.to_rows(v, k.shape[-3], options.cu_seqlens_k)
        return tiled.forward(variant, q, k, v, options)


def _bwd_cpu(*tensors: Any, need_dbias: bool = True, **given: Any) -> tuple[Tensor, ...]:
    x, options = BackwardTensors(*tensors), Options(**given)
    with below_autocast("cpu"):
        gradients = tiled.backward(check_backward(x, options), x, options, need_dbias)
    return tuple(x.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _check_cpu(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[int, int, str, str]:
    variant = VARIANTS.index(check_forward(q, k, v, Options(**given)))
    if k.dtype in QK_8_BITS:
        return variant, -1, "no variant has a backward for 8-bit inputs", ""
    if given.get("page_table") is not None:
        return variant, -1, "no variant has a backward with a page table", ""
    return variant, variant, "", ""


library.impl("fwd", _fwd_cpu, "CPU")
library.impl("bwd", _bwd_cpu, "CPU")
library.impl("check", _check_cpu, "CPU")
