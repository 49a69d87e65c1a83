"""Exact attention for PyTorch: FlashAttention 1 and 2, forward and backward, side by side.

    # q, k, v: (batch, seqlen, heads, head_dim)
    out = flash_ext.attention(q, k, v, causal=True)
    # … or sequences of any lengths, packed: (total, heads, head_dim)
    out = flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    print(flash_ext.explain(q, k, v, causal=True))  # which variant runs, and why not the others

`flash_ext.reference` is standard attention, `flash_ext.tiled` the papers' algorithms in torch.
"""

from . import dropout, reference, tiled
from ._options import VARIANTS
from .explain import Explanation, explain
from .functional import attention, attention_varlen

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
    "Explanation",
    "attention",
    "attention_varlen",
    "dropout",
    "explain",
    "reference",
    "tiled",
]
