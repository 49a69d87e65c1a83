"""Exact attention for PyTorch: FlashAttention 1 and 2, forward and backward, side by side.

    # q, k, v: (batch, seqlen, heads, head_dim)
    out = flash_ext.attention(q, k, v, causal=True)
    print(flash_ext.explain(q, k, v, causal=True))  # which variant runs, and why not the others

`flash_ext.reference` is standard attention, `flash_ext.tiled` the papers' algorithms in torch.
"""

from . import dropout, reference, tiled
from ._options import VARIANTS
from .explain import Explanation, explain
from .functional import attention

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
    "Explanation",
    "attention",
    "dropout",
    "explain",
    "reference",
    "tiled",
]
