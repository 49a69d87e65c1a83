"""Exact attention for PyTorch: FlashAttention 1, 2 and 3 side by side.

    # q, k, v: (batch, seqlen, heads, head_dim)
    out = flash_ext.attention(q, k, v, causal=True)
    # … or sequences of any lengths, packed: (total, heads, head_dim)
    out = flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    print(flash_ext.explain(q, k, v, causal=True))  # which variant runs, and why not the others

`flash_ext.reference` is standard attention, `flash_ext.tiled` the papers' algorithms in torch.
VARIANTS are the generations, oldest first, CPU_VARIANTS those that run on a CPU too.
"""

from . import dropout, reference, tiled
from ._options import CPU_VARIANTS, VARIANTS
from .explain import Explanation, explain
from .functional import attention, attention_varlen

__version__ = "0.1.0"

__all__ = [
    "CPU_VARIANTS",
    "VARIANTS",
    "Explanation",
    "attention",
    "attention_varlen",
    "dropout",
    "explain",
    "reference",
    "tiled",
]
