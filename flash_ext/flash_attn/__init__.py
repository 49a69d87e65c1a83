"""The names and signatures of the package flash-attn 2.8, on flash_ext's kernels.

    from flash_ext.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func
    from flash_ext.flash_attn.bert_padding import unpad_input  # was: from flash_attn.bert_padding

Shapes, dtypes and options are as in `flash_ext.attention` and `flash_ext.attention_varlen`, with
flash-attn's names for them:

    softmax_scale: the factor of the scores; None is 1 / sqrt(D). A tensor that requires a gradient
        is refused, for this as for other numbers and for alibi_slopes: flash-attn loses it.
    causal: aligned bottom-right, as everywhere in flash_ext.
    window_size: (left, right), any two integers, both included; below 0 is unlimited, and so is a
        side of at least Sk (max_seqlen_k of packed sequences, the length of a cache). So where
        Sq > Sk the right side may reach further than its number says.
    softcap: 0 or less is none.
    alibi_slopes: (Hq) or (B, Hq).
    dropout_p: the masks come from torch's generator, but differ from flash-attn's.
    deterministic: False follows `torch.are_deterministic_algorithms_enabled()`.
    max_seqlen, max_seqlen_q, max_seqlen_k: not needed; only window_size is compared with them.
    return_attn_probs: return (out, softmax_lse, S_dmask) instead of out. softmax_lse is float32,
        (B, Hq, Sq), or (Hq, total_q) of packed sequences, with flash-attn's values: +inf where a
        query sees no key; with causal and alibi_slopes, without a window, larger by
        slope · (i + Sk − Sq) than the lse of `flash_ext.attention`, since flash-attn adds slope · j
        to key j, which gives the same softmax. Here it is differentiable. S_dmask, which
        flash-attn returns for its own tests, is always empty, of shape (0,).

As in flash-attn, a last dimension that is not contiguous is copied, and autocast casts neither a
cache nor inputs that are all float16 or all bfloat16. It casts others, which flash-attn refuses.
An unsupported argument raises NotImplementedError before anything runs; wrong arguments raise
ValueError or RuntimeError.

`flash_ext.flash_attn_interface` has FlashAttention-3's functions.
`flash_ext.flash_attn.flash_attn_interface` also has flash-attn's `_flash_attn_forward`,
`_flash_attn_backward` and their varlen forms, below autograd, as ring-flash-attn calls them:
`flash_ext.flash_attn.low_level`.

`__version__` is the version of the flash-attn with these names, for code that checks it.
"""

from .bert_padding import index_first_axis, pad_input, unpad_input
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
]
