"""The CUDA kernels: whether they are present, and what they were compiled for."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from .schemas import library

_PACKAGE = Path(__file__).resolve().parents[1]
_BINARY = _PACKAGE / "_C.abi3.so"
_WHY_NOT_BUILT = _PACKAGE / "_C.missing.txt"
"""Written by setup.py in place of the binary."""
_HOW_TO_BUILD = (
    "Where nvcc is on PATH or in $CUDA_HOME, type this in the source folder: "
    "pip install --no-build-isolation ."
)


def _hidden_binary() -> Path | None:
    """The binary of an installation that Python would find if it did not find this one first."""
    others = (Path(entry, _PACKAGE.name, _BINARY.name).resolve() for entry in sys.path)
    return next((other for other in others if other != _BINARY and other.exists()), None)


def _load_binary() -> str | None:
    """Load the CUDA kernels. Returns why they are missing, or None."""
    if not _BINARY.exists():
        if hidden := _hidden_binary():
            return (
                f"not in {_PACKAGE}, which Python imports in place of {hidden.parent}, where they"
                f" are. Start Python outside {_PACKAGE.parent}, or build them there with:"
                " make build"
            )
        why = f": {_WHY_NOT_BUILT.read_text()}" if _WHY_NOT_BUILT.exists() else ""
        return f"not built{why}. {_HOW_TO_BUILD}"
    try:
        torch.ops.load_library(_BINARY)
    except OSError as error:
        return f"built, but they do not load: {error}. To rebuild them: {_HOW_TO_BUILD}"
    return None


cuda_missing = _load_binary()
"""The state of the CUDA kernels, and what to do; None where they are loaded."""


def cuda_targets() -> str | None:
    """What the CUDA kernels were compiled for, for example "80+PTX;90a"; None without them."""
    if cuda_missing is not None:
        return None
    try:
        targets = ctypes.CDLL(str(_BINARY)).flash_ext_targets
    except AttributeError:
        return "not recorded by this build"
    targets.restype = ctypes.c_char_p
    return str(targets().decode())


def _cuda_unavailable(*tensors: Any, **options: Any) -> NoReturn:
    raise RuntimeError(f"flash_ext: the CUDA kernels are {cuda_missing}")


if cuda_missing is not None:
    for _name in ("fwd", "bwd", "check", "fp8_quantize", "fp8_token_mean"):
        library.impl(_name, _cuda_unavailable, "CUDA")
