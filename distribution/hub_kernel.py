"""flash_ext as a kernel of the Hugging Face hub, with the functions of flash-attn 2.8.

    from kernels import get_local_kernel
    kernel = get_local_kernel(Path("dist/hub"))
    out = kernel.flash_attn_func(q, k, v, causal=True)  # q, k, v: (batch, seqlen, heads, head_dim)

`kernel.flash_attn_interface` has FlashAttention-3's functions. The package lies beside this file. A
process can define its ops, torch.ops.flash_ext, once: a `flash_ext` that is imported already takes
its place, if it has the same version. Nothing is downloaded.
"""

import sys
from pathlib import Path

_HERE, __version__ = str(Path(__file__).resolve().parent), "VERSION"
sys.path.insert(0, _HERE)
try:
    import flash_ext
finally:
    sys.path.remove(_HERE)
if flash_ext.__version__ != __version__:
    there = f"flash_ext {flash_ext.__version__} is imported already, from {flash_ext.__file__}"
    raise ImportError(
        f"this kernel is flash_ext {__version__}, and {there}: a process can have one"
    )

from flash_ext import attention, attention_varlen, explain, flash_attn_interface  # noqa: E402,F401
from flash_ext.flash_attn import *  # noqa: E402,F403
