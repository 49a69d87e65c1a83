"""A kernel that spills registers: a build warns, the installation names it, `make` refuses it.

Would catch a `pip install` that fails under another nvcc, a warning that pip hides, and a build of
`make` that passes in spite of a spill.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python

import flash_ext
from flash_ext import __main__, ops
from flash_ext.ops import binary

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parent.parent
KERNEL = "_ZN9flash_ext10fa3_kernelI6ConfigEEvNT_6ParamsE"
SAID = f"""
ptxas warning : Local memory used for function '{KERNEL}', size of stack frame: 48 bytes
ptxas warning : Registers are spilled to local memory in function '{KERNEL}', 140 bytes
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_90a'
ptxas info    : Function properties for {KERNEL}
    48 bytes stack frame, 140 bytes spill stores, 196 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compile time = 12.000 ms
"""
# The first lines are a script of sh: a path with spaces cannot stand after #!.
NVCC = f"""#!/bin/sh
'''exec' '{sys.executable}' "$0" "$@"
'''
import subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("Cuda compilation tools, release 13.4, V13.4.1"))
target = sys.argv[sys.argv.index("-o") + 1]
subprocess.run(["g++", "-fPIC", "-x", "c", "-c", "/dev/null", "-o", target], check=True)
print('''{SAID}''')
"""
SLOW = "Registers are spilled to local memory in function 'fa3_kernel<Config>', 140 bytes"


@pytest.fixture
def source(source: Path) -> Path:
    """A checkout with one kernel, which spills, and a toolkit beside it."""
    (source / "csrc/instantiate").mkdir(parents=True)
    (source / "csrc/instantiate/slow.cu").touch()
    home = source.parent / "toolkit"
    for name in ("bin", "include", "lib64"):
        (home / name).mkdir(parents=True)
    (home / "include/cuda_runtime.h").touch()
    subprocess.run(["ar", "qc", home / "lib64/libcudart_static.a"], check=True)
    (home / "bin/nvcc").write_text(NVCC)
    (home / "bin/nvcc").chmod(0o755)
    return source


@pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "ninja", "ar", "c++filt"))), reason="needs g++ and ninja"
)
@pytest.mark.parametrize("strict", (None, "0", "1"))
def test_a_kernel_that_spills(source: Path, strict: str | None) -> None:
    kept = {name: x for name, x in os.environ.items() if name != "FLASH_EXT_STRICT"}
    environment = kept | {"CUDA_HOME": str(source.parent / "toolkit")}
    environment |= {"FLASH_EXT_STRICT": strict} if strict else {}
    command = ("setup.py", "-q", "build", "--build-lib", "../lib")
    done = run_python(*command, cwd=source, env=environment)
    record = source.parent / "lib/flash_ext/_C.json"
    if strict == "1":
        assert done.returncode != 0 and not record.exists()
        assert SLOW in done.stderr and "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert SLOW in done.stderr and "flash_ext: warning: 1 slow" in done.stderr
    (said,) = json.loads(record.read_text())["slow_kernels"]
    assert said.endswith(SLOW)
    assert "168" in (source / "build/ptxas.log").read_text()


@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja", "ar"))), reason="needs g++")
def test_a_strict_build_after_another(source: Path) -> None:
    """The object is there and not compiled again, and its kernel still spills."""
    for strict, passes in (("0", True), ("1", False), ("1", False)):
        environment = os.environ | {"CUDA_HOME": str(source.parent / "toolkit")}
        environment |= {"FLASH_EXT_STRICT": strict}
        done = run_python("setup.py", "-q", "build", cwd=source, env=environment)
        assert (done.returncode == 0) == passes, done.stderr
    assert "spilled" in done.stderr


UNUSED = "namespace { int unused(int parameter) { return 1; } }"
WARNED = 'csrc/x.cu(2): warning #177-D: variable "y" was declared but never referenced'


@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja", "ar"))), reason="needs g++")
@pytest.mark.parametrize("of_host", (False, True))
@pytest.mark.parametrize("strict", ("0", "1"))
def test_a_warning(source: Path, of_host: bool, strict: str) -> None:
    nvcc = source.parent / "toolkit/bin/nvcc"
    nvcc.write_text(NVCC.replace(SAID, "" if of_host else WARNED))
    (source / "csrc/plan").mkdir()
    (source / "csrc/plan/x.cpp").write_text(UNUSED if of_host else "")
    environment = os.environ | {"CUDA_HOME": str(nvcc.parent.parent), "FLASH_EXT_STRICT": strict}
    done = run_python("setup.py", "-q", "build", cwd=source, env=environment)
    assert (done.returncode == 0) == (strict == "0"), done.stderr
    assert ("unused-" if of_host else "never referenced") in done.stderr


def test_make_is_strict() -> None:
    """And with it CI, which runs `make test`."""
    assert re.search(r"^export FLASH_EXT_STRICT \?= 1$", (ROOT / "Makefile").read_text(), re.M)


def test_the_installation_names_slow_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = f"{SLOW} spill stores"
    monkeypatch.setattr(binary, "cuda_missing", None)
    monkeypatch.setattr(binary, "_record", {"targets": "90a", "slow_kernels": [slow]})
    build = ops.cuda_build()
    assert build is not None and build.slow_kernels == (slow,)
    assert ("slow kernel", slow) in list(__main__._facts())
    q = torch.empty(1, 8, 2, 64)
    assert "slow kernels:   1, which python -m" in str(flash_ext.explain(q, q, q))
    for recorded, found in (([], ()), (None, None)):
        monkeypatch.setattr(binary, "_record", {"targets": "90a", "slow_kernels": recorded})
        build = ops.cuda_build()
        assert build is not None and build.slow_kernels == found
        assert "slow kernel" not in dict(__main__._facts())
        assert "slow kernels" not in str(flash_ext.explain(q, q, q))
