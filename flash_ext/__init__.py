"""Exact attention for PyTorch: FlashAttention 1, 2 and 3 side by side.

    # q, k, v: (batch, seqlen, heads, head_dim)
    out = flash_ext.attention(q, k, v, causal=True)
    # … or sequences of any lengths, packed: (total, heads, head_dim)
    out = flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    print(flash_ext.explain(q, k, v, causal=True))  # which variant runs, and why not the others

`flash_ext.fp8` quantizes. `flash_ext.reference` is standard attention, `flash_ext.tiled` the
papers' algorithms in torch. VARIANTS are the generations, oldest first, CPU_VARIANTS those that run
on a CPU too (and with 8-bit inputs fa3 does). KERNEL_DIMS are the head dims for which CUDA kernels
are compiled; others are padded to these.
"""

__version__ = "0.1.0"

from . import dropout, fp8, ops, reference
from . import flash_attn_interface as flash_attn_interface
from .cache import attention_with_cache, attention_with_shared_prefix
from .cpu import tiled
from .explanation import Explanation, explain
from .flex import flex_attention
from .functional import attention, attention_varlen
from .mask import Mask
from .ops.options import CPU_VARIANTS, KERNEL_DIMS, VARIANTS
from .triangle import triangle_attention

__all__ = [
    "CPU_VARIANTS",
    "KERNEL_DIMS",
    "VARIANTS",
    "Explanation",
    "Mask",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "attention_with_shared_prefix",
    "dropout",
    "explain",
    "flex_attention",
    "fp8",
    "reference",
    "tiled",
    "triangle_attention",
]

ops.SUBCLASS_MODULES["torch.distributed.tensor"] = f"{__name__}.integrations.dtensor"
