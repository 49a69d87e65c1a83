"""The ops `torch.ops.flash_ext.fwd`, `bwd` and `check`, as PyTorch sees them.

    fwd(q, k, v, *, options) -> (out, lse)
    bwd(dout, dlse?, q, k, v, out, lse, *, options, need_dbias) -> (dq, dk, dv, dbias, dsink)
    check(q, k, v, *, options) -> (variant, backward, why, copied)

check raises what fwd would, or gives the index in VARIANTS of the variant that runs, and of that
whose kernels compute its gradients. These are its own ("" for `why`), or fa2's where fa3's cannot;
-1 stands for none, as with FP8. `copied` names the inputs whose rows are copied to aligned memory.

Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq);
with cu_seqlens q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv), out (total_q, Hq, Dv),
lse (Hq, total_q). out has q's dtype, with FP8 inputs (which have no gradients) the option's
out_dtype. lse is float32 (float64 for float64, which only the CPU kernels take) and the natural
logarithm. Gradients are contiguous and have the shape and dtype of what they belong to, or the
shape (0,): dsink without a sink, dbias without a bias, for a bool one and without need_dbias. The
options are `flash_ext.ops.options.Options`.

    options        the options, described once, and the variants
    schemas        the schemas: defined here, so that fake and CPU kernels need no binary
    fake           shapes, dtypes and strides, for tracing
    autograd       gradients and autocast
    node           a second, quicker way to gradients, of which only `call` knows
    call           `forward`, by which functions in Python call `fwd`
    vmap, flops    what else PyTorch asks of an op, but for `flash_ext.integrations.dtensor`
    quantize       the ops of quantization to FP8, from schema to fake kernel
    into           `fwd` and `bwd` that write into given tensors, from schema to fake kernel
    sum_rows       the ops that add up what several calls have written, from schema to fake kernel
    mask           the ops that make masks of blocks, from schema to fake kernel
    append_kv      the op that writes new keys and values into a cache, from schema to fake kernel
    binary         the CUDA kernels, which come from `_C.abi3.so`, if it was built
    checks         of arguments in Python
    torch_private  every private name of torch, and the fallback without it

`flash_ext.cpu` has the CPU kernels.
"""

from . import fake as fake
from . import flops, vmap
from . import into as into
from . import node as node  # whose ops the binary has kernels for
from . import quantize as quantize
from .append_kv import append_kv
from .autograd import SUBCLASS_MODULES, register_subclasses
from .binary import Build, checksum_agrees, cuda_build, cuda_missing, cuda_targets
from .call import autocasts, forward, is_real
from .mask import (
    mask_from_blocks,
    mask_from_dense,
    mask_from_documents,
    mask_from_intervals,
    mask_from_kinds,
)
from .schemas import bwd, check, fwd, library
from .sum_rows import combine_parts, copy_rows, sum_rows

vmap.register(library, fwd, bwd)
flops.register(fwd.overloadpacket, flops.fwd_flops)
flops.register(bwd.overloadpacket, flops.bwd_flops)

__all__ = [
    "SUBCLASS_MODULES",
    "Build",
    "append_kv",
    "autocasts",
    "bwd",
    "check",
    "checksum_agrees",
    "combine_parts",
    "copy_rows",
    "cuda_build",
    "cuda_missing",
    "cuda_targets",
    "forward",
    "fwd",
    "is_real",
    "mask_from_blocks",
    "mask_from_dense",
    "mask_from_documents",
    "mask_from_intervals",
    "mask_from_kinds",
    "register_subclasses",
    "sum_rows",
]
