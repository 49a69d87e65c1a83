"""Compiles csrc's host code for tests that need no GPU."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = ROOT / "tests" / "native"
COMPILER = os.environ.get("CXX", "g++")
FAKE_CUDA = NATIVE / "fake_cuda"
DEVICE_CODE = (
    f"-iquote{FAKE_CUDA}",
    f"-I{FAKE_CUDA}",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
)
"""Flags for device code: fake_cuda/ has CUDA's headers, and ptx/ in place of that of csrc/."""


def shared_library(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """The library, cached under build/ by the content of everything it is made from.

    Skips the test where there is no C++ compiler.
    """
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no C++ compiler {COMPILER} (set CXX)")
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra"]
    command += ["-Werror", "-Wno-missing-field-initializers"]
    command += [f"-I{CSRC}", *map(str, sources), *flags]
    content = hashlib.sha256(" ".join([*command, sys.version]).encode())
    headers = (
        x for folder in (CSRC, NATIVE) for end in ("cuh", "h") for x in folder.rglob(f"*.{end}")
    )
    for path in [*sources, *sorted(headers)]:
        content.update(path.read_bytes())
    folder = ROOT / "build" / "tests-native"
    library = folder / content.hexdigest()[:16] / f"{name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:  # processes of pytest-xdist compile it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            command += ["-o", str(partial)]
            compiled = subprocess.run(command, capture_output=True, text=True)
            assert compiled.returncode == 0, f"{' '.join(command)}\n{compiled.stderr}"
            partial.replace(library)
    return library


def python_module(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ModuleType:
    """The module that the sources make with pybind11."""
    pybind11 = pytest.importorskip("pybind11")
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    library = shared_library(name, sources, [*flags, *(f"-I{path}" for path in includes)])
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def load_host_side() -> None:
    """Gives the host's side of the CUDA kernels, node.cpp, sdpa.cpp and accept.h, to the CPU's."""
    import torch

    from flash_ext.ops.options import schema_options

    home = Path(torch.__file__).parent
    library = shared_library(
        "flash_ext_host",
        [
            *(CSRC / "api" / f"{name}.cpp" for name in ("node", "sdpa", "out_of_memory")),
            NATIVE / "host.cpp",
        ],
        [
            *("-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
            *("-DFLASH_EXT_DEVICE=CPU", "-DFLASH_EXT_AUTOGRAD=AutogradCPU"),
            *(f"-isystem{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib"),
            *("-ltorch", "-ltorch_cpu"),
        ],
    )
    schemas = torch.library.Library("flash_ext", "FRAGMENT")
    schemas.define(f"node_options_CPU({schema_options()}) -> float")
    schemas.define("sdpa_override_CPU(bool on, bool with_out) -> ()")
    inputs = "Tensor q, Tensor k, Tensor v"
    results = "Tensor out, Tensor lse"
    schemas.define(f"refused_fwd({inputs}, {schema_options()}) -> str")
    schemas.define(
        f"refused_bwd(Tensor dout, Tensor? dlse, {inputs}, {results}, {schema_options()}) -> str"
    )
    load_host_side.schemas = schemas  # type: ignore[attr-defined]  # they last as long as it does
    torch.ops.load_library(library)
