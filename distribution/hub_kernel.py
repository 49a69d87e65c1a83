"""flash_ext as a kernel of the Hugging Face hub, with the functions of flash-attn 2.8.

    from kernels import get_local_kernel
    kernel = get_local_kernel(Path("dist/hub"))
    out = kernel.flash_attn_func(q, k, v, causal=True)  # q, k, v: (batch, seqlen, heads, head_dim)

`kernel.flash_attn_interface` has FlashAttention-3's functions.

The package lies beside this file and is imported as `flash_ext`, since its ops are in the namespace
torch.ops.flash_ext and a process can define them once. So a `flash_ext` that is imported already
takes its place, if it has the same version. Nothing is downloaded.
"""

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_VERSION = "VERSION"


def _package():
    loaded = sys.modules.get("flash_ext")
    if loaded is not None:
        version = getattr(loaded, "__version__", None)
        if version != _VERSION:
            raise ImportError(
                f"this kernel is flash_ext {_VERSION}, and flash_ext {version} is imported already,"
                f" from {loaded.__file__}: a process can have one"
            )
        if any(_HERE.glob("flash_ext/_C.*.so")) and (missing := loaded.ops.cuda_missing):
            raise ImportError(
                f"flash_ext is imported already, from {loaded.__file__}, and its CUDA kernels are"
                f" {missing}"
            )
        return loaded
    spec = importlib.util.spec_from_file_location("flash_ext", _HERE / "flash_ext" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["flash_ext"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["flash_ext"]
        raise
    return module


flash_ext = _package()

from flash_ext import attention, attention_varlen, explain, flash_attn_interface  # noqa: E402,F401
from flash_ext.flash_attn import *  # noqa: E402,F403

__version__ = _VERSION
