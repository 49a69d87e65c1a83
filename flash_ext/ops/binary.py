"""The CUDA kernels: whether they are present, and what they were compiled for."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import __version__
from .schemas import library

_PACKAGE = Path(__file__).resolve().parents[1]
_BINARY = _PACKAGE / "_C.abi3.so"
_RECORD = _PACKAGE / "_C.json"
"""Written by setup.py beside the binary."""
_WHY_NOT_BUILT = _PACKAGE / "_C.missing.txt"
"""Written by setup.py in place of the binary."""
_HOW_TO_BUILD = (
    "Where nvcc is on PATH or in $CUDA_HOME, type this in the source folder: "
    "pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir ."
)


@dataclass(frozen=True)
class Build:
    """What the CUDA kernels were built from, and for what. None is: this build did not record it.

    `str()` of it is one line.
    """

    targets: str | None
    """The GPU code that they hold, for example "80+PTX;90a"."""

    cuda: str | None = None
    """The CUDA version of the compiler, whose runtime they hold."""

    digest: str | None = None
    """The source digest: `python benchmarks/digest.py package` prints a checkout's."""

    kernels: str | None = None
    """The digest of csrc alone: `python benchmarks/digest.py kernels`."""

    version: str | None = None
    """The version of flash_ext."""

    torch: str | None = None
    """The torch whose headers they were compiled with."""

    platform: str | None = None
    """The platform of wheels that they were linked for, for example "manylinux_2_28_x86_64"."""

    sha256: str | None = None
    """The checksum of the library."""

    slow_kernels: tuple[str, ...] | None = None
    """What ptxas said of each kernel with spilled registers, local memory or serialized wgmma: its
    results are right, and it runs slower than it could."""

    def __str__(self) -> str:
        said = {"for": self.targets, "CUDA": self.cuda, "source": self.digest}
        return ", ".join(f"{name} {x or 'not recorded'}" for name, x in said.items())


def _read_record() -> dict[str, Any]:
    """What setup.py wrote of the binary; {} if it is missing or unreadable."""
    try:
        record = json.loads(_RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _mismatch(record: dict[str, Any]) -> str | None:
    """Why the binary is not this package's, before it is loaded, or None."""
    version, size = record.get("version", __version__), record.get("bytes")
    if version != __version__:
        return f"of flash_ext {version}, and this is {__version__}"
    # More is a binary that a packager has changed; `checksum_agrees` tells.
    if size is not None and (found := _BINARY.stat().st_size) < size:
        return f"damaged: {_BINARY} has {found} bytes, and was built with {size}"
    return None


def _hidden_binary() -> Path | None:
    """The binary of an installation that Python would find if it did not find this one first."""
    for entry in sys.path:
        with contextlib.suppress(OSError):  # a folder that is gone, or may not be searched
            other = Path(entry, _PACKAGE.name, _BINARY.name).resolve()
            if other != _BINARY and other.exists():
                return other
    return None


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
    how = f"Reinstall flash_ext, or build them: {_HOW_TO_BUILD}"
    if mismatch := _mismatch(_record):
        return f"{mismatch}. {how}"
    try:
        torch.ops.load_library(_BINARY)
    except (OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        return f"built, but they do not load: {first_line}. {how}"
    return None


_record = _read_record() if _BINARY.exists() else {}
cuda_missing: str | None = _load_binary()
"""The state of the CUDA kernels, and what to do; None if they are loaded."""


def cuda_targets() -> str | None:
    """What the CUDA kernels were compiled for, for example "80+PTX;90a"; None without them."""
    if cuda_missing is not None:
        return None
    try:  # the library itself says it
        targets = ctypes.CDLL(str(_BINARY)).flash_ext_targets
    except AttributeError:
        return "not recorded by this build"
    targets.restype = ctypes.c_char_p
    return str(targets().decode())


def cuda_build() -> Build | None:
    """How the CUDA kernels were built; None without them."""
    if cuda_missing is not None:
        return None
    known = {name: _record.get(name) for name in Build.__dataclass_fields__}
    slow = known["slow_kernels"]
    known["slow_kernels"] = None if slow is None else tuple(slow)
    return Build(**known | {"targets": known["targets"] or cuda_targets()})


def checksum_agrees() -> bool | None:
    """Whether the library has the bytes that were built; None if their checksum is unknown."""
    if "sha256" not in _record:
        return None
    return hashlib.sha256(_BINARY.read_bytes()).hexdigest() == str(_record["sha256"])


def _cuda_unavailable(*tensors: Any, **options: Any) -> NoReturn:
    raise RuntimeError(f"flash_ext: the CUDA kernels are {cuda_missing}")


if cuda_missing is not None:
    for _name in (
        "fwd",
        "bwd",
        "check",
        "fp8_quantize",
        "fp8_quantize_qkv",
        "fp8_token_mean",
        "combine_parts",
        "sum_rows",
        "copy_rows",
        "append_kv",
        "fwd_into",
        "bwd_into",
        "mask_from_dense",
        "mask_from_intervals",
        "mask_from_documents",
        "mask_from_blocks",
        "mask_from_kinds",
    ):
        library.impl(_name, _cuda_unavailable, "CUDA")
