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


PLAN = tuple(
    CSRC / "plan" / f"{name}.cpp" for name in ("plan", "short", "fa1", "fa2", "fa3", "fa3_decode")
)
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
BUILD = ROOT / "build" / "tests-native"


def compile_once(
    name: str, sources: Sequence[Path], command: Sequence[str], code: str = ""
) -> Path:
    """What the compiler makes of code, its standard input; cached under build/ by all it reads.

    Skips the test where there is no C++ compiler.
    """
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no C++ compiler {COMPILER} (set CXX)")
    content = hashlib.sha256(" ".join([COMPILER, *command, code, sys.version]).encode())
    for path in sources:
        content.update(path.read_bytes())
    made = BUILD / content.hexdigest()[:16] / name
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"{name}.lock", "w") as lock:  # processes of pytest-xdist compile it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            partial = made.with_suffix(".partial")
            command = [COMPILER, *command, "-o", str(partial)]
            compiled = subprocess.run(command, input=code, capture_output=True, text=True)
            assert compiled.returncode == 0, f"{' '.join(command)}\n{compiled.stderr}"
            partial.replace(made)
    return made


def shared_library(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """The library, of all sources as one: headers are read once."""
    code = "".join(f'#include "{path}"\n' for path in sources)
    headers = (
        x for folder in (CSRC, NATIVE) for end in ("cuh", "h") for x in folder.rglob(f"*.{end}")
    )
    command = [*FLAGS, "-Wno-missing-field-initializers", "-shared", f"-I{CSRC}", "-x", "c++", "-"]
    return compile_once(f"{name}.so", [*sources, *sorted(headers)], [*command, *flags], code)


def python_module(
    name: str, sources: Sequence[Path], flags: Sequence[str] = (), library_name: str = ""
) -> ModuleType:
    """The module that the sources make with pybind11, whose headers are compiled before.

    library_name: of a library with several modules, if the name is not the module's.
    """
    pybind11 = pytest.importorskip("pybind11")
    includes = [f"-I{x}" for x in (pybind11.get_include(), sysconfig.get_path("include"))]
    header = NATIVE / "python.h"
    command = [*FLAGS, *includes, "-x", "c++-header", str(header)]
    compiled = compile_once("python.h.gch", [header], command).with_suffix("")
    more = [*includes, "-include", str(compiled)]
    library = shared_library(library_name or name, sources, [*flags, *more])
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def small_kernels(name: str) -> ModuleType:
    """The module `name` of the kernels without shared memory, or little. All of them are one
    library: the compiler needs longer for pybind11 than for a kernel."""
    names = ("append_kv", "copies", "make_mask", "split_by_length")
    sources = [NATIVE / f"{source}.cpp" for source in names]
    flags = [*DEVICE_CODE, "-Wno-unused-variable", "-Wno-parentheses"]
    return python_module(name, [*sources, FAKE_CUDA / "device.cpp"], flags, "flash_ext_kernels")


def host_code(name: str) -> ModuleType:
    """The module `name` of the constexpr code and the plan, in one library for the same reason."""
    flags = [f"-I{FAKE_CUDA}", "-DFLASH_EXT_SM90A", "-DMODULE=flash_ext_plan"]
    sources = [NATIVE / "native.cpp", NATIVE / "plan.cpp", *PLAN]
    return python_module(name, sources, flags, "flash_ext_host_code")


@functools.cache
def load_host_side() -> None:
    """Gives the host's side of the CUDA kernels, node.cpp, sdpa.cpp and accept*.h, to the CPU's."""
    import torch

    from flash_ext.cpu.refusals import MASK_CHECKS, OF_APPEND
    from flash_ext.ops.options import schema_options

    home = Path(torch.__file__).parent
    library = shared_library(
        "flash_ext_host",
        [
            *(CSRC / "api" / f"{name}.cpp" for name in ("node", "sdpa", "out_of_memory")),
            NATIVE / "host.cpp",
        ],
        [
            "-DTORCH_TARGET_VERSION=0x020b000000000000",
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
    schemas.define(f"refused_append_kv({OF_APPEND}) -> str")
    for signature in MASK_CHECKS:
        schemas.define(f"refused_{signature}) -> str")
    load_host_side.schemas = schemas  # type: ignore[attr-defined]  # they last as long as it does
    torch.ops.load_library(library)
