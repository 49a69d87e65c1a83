"""An installation without the CUDA kernels: it is asked for, or says why it is one.

Would catch a wrong CUDA_HOME that passes for "no nvcc", a reason that only `pip -v` shows, and a
Makefile that works only in some folders.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import run_python

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parent.parent

# setup.py where no toolkit is found.
SETUP_WITHOUT_NVCC = """
import pathlib, runpy, shutil, sys
is_file = pathlib.Path.is_file
pathlib.Path.is_file = lambda path: "cuda" not in path.parts and is_file(path)
shutil.which = lambda *_, **__: None
runpy.run_path("setup.py", run_name="__main__")
"""

# The package, without the binary of another installation in this environment.
WITHOUT_BINARIES = """
import pathlib, torch
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.name != "_C.abi3.so" and exists(path)
import flash_ext
print(flash_ext.ops.cuda_missing)
"""


def build(source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: x for name, x in os.environ.items() if name != "CUDA_HOME"}
    arguments = ("-q", "build", "--build-lib", "../lib")
    return run_python("-c", SETUP_WITHOUT_NVCC, *arguments, cwd=source, env=kept | environment)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"FLASH_EXT_SKIP_CUDA": "1"}, "FLASH_EXT_SKIP_CUDA was set"),
        ({"FLASH_EXT_SKIP_CUDA": "1", "CUDA_HOME": "/nowhere"}, "FLASH_EXT_SKIP_CUDA was set"),
        ({}, "no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda)"),
    ],
)
def test_the_reason_is_installed(source: Path, environment: dict[str, str], why: str) -> None:
    files = set(source.glob("flash_ext/**/*"))
    done = build(source, **environment)
    assert done.returncode == 0, done.stderr
    assert set(source.glob("flash_ext/**/*")) == files
    environment = os.environ | {"PYTHONPATH": "lib"}
    asked = run_python("-c", WITHOUT_BINARIES, cwd=source.parent, env=environment, check=True)
    assert asked.stdout.startswith(f"not built: {why}. ")


def test_what_is_gone_from_the_source_is_gone_from_the_build(source: Path) -> None:
    """Also what a build with the kernels left."""
    package = source.parent / "lib" / "flash_ext"
    gone = ("old.py", "_C.abi3.so", "old/__init__.py", "ops/old.py")
    for name in gone:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    for _ in range(2):
        done = build(source, FLASH_EXT_SKIP_CUDA="1")
        assert done.returncode == 0, done.stderr
        built = {str(x.relative_to(package)) for x in package.rglob("*") if x.is_file()}
        there = {str(x.relative_to(source / "flash_ext")) for x in source.rglob("flash_ext/**/*.*")}
        assert built == there | {"_C.missing.txt"}


def test_a_source_folder_that_hides_the_installation(source: Path) -> None:
    """Python finds the folder where it was started first; that has no kernels, the other has."""
    assert build(source, FLASH_EXT_SKIP_CUDA="1").returncode == 0
    installed = source.parent / "lib" / "flash_ext"
    (installed / "_C.missing.txt").unlink()
    (installed / "_C.abi3.so").touch()
    environment = os.environ | {"PYTHONPATH": str(installed.parent)}
    command = ("-m", "flash_ext", "--device", "cpu")
    asked = run_python(*command, cwd=source, env=environment, check=True)
    assert (
        f"not in {source}/flash_ext, which Python imports in place of {installed}" in asked.stdout
    )
    assert "not built" not in asked.stdout


def test_a_wrong_cuda_home_is_an_error(source: Path) -> None:
    done = build(source, CUDA_HOME="/nowhere")
    assert done.returncode != 0
    assert "CUDA_HOME=/nowhere has no bin/nvcc" in done.stderr
    assert "Traceback" not in done.stderr


def a_toolkit(home: Path, headers: str, says: str) -> Path:
    """A toolkit whose nvcc only says which it is."""
    for name in ("bin", headers):
        (home / name).mkdir(parents=True)
    (home / headers / "cuda_runtime.h").touch()
    nvcc = home / "bin/nvcc"
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (
            "echo Cuda compilation tools, release 12.4, V12.4.131",
            "is of CUDA 12.4, and the kernels",
        ),
        ("exit 3", "nvcc does not run"),
    ],
)
@pytest.mark.parametrize("headers", ["include", f"targets/{os.uname().machine}-linux/include"])
def test_an_nvcc_that_cannot_is_an_error(
    source: Path, tmp_path: Path, headers: str, says: str, why: str
) -> None:
    """Also that of conda, which has its headers elsewhere."""
    home = a_toolkit(tmp_path / "toolkit", headers, says)
    environment = os.environ | {"CUDA_HOME": str(home)}
    done = run_python("setup.py", "-q", "build", cwd=source, env=environment)
    assert done.returncode != 0 and why in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(ROOT / "setup.py"))


def test_fa3_and_fp8_are_compiled_for_their_own_target_alone(functions: dict[str, Any]) -> None:
    older = "-gencode=arch=compute_80,code=[sm_80,compute_80]"
    hopper = "-gencode=arch=compute_90a,code=sm_90a"

    def targets(name: str, archs: str) -> list[str]:
        return functions["gencode_flags"](archs, Path("fa3_/csrc/instantiate", name))

    assert targets("fa3_forward_wide.cu", "80+PTX;90a") == [hopper]
    assert targets("fa3_forward_wide.cu", "80+PTX") == [older]  # the launchers must be there
    assert targets("fp8_quantize.cu", " 90a, 80+PTX;") == [hopper]
    assert targets("fa2_wide.cu", "80+PTX 90a") == [older, hopper]


@pytest.mark.parametrize(
    ("release", "targets", "says"),
    [
        ("12.9", "80+PTX;90a", None),
        ("13.10", "90a", None),
        ("12.8", "80+PTX;90a", "for Hopper GPUs need 12.9 or newer; .*ARCHS=80"),
        ("12.8", "90a", "for Hopper GPUs need 12.9 or newer"),
        ("12.5", "80+PTX", None),
        ("12.4", "80+PTX", "kernels need 12.5 or newer; .*cuda-toolkit.nvcc,cccl"),
    ],
)
def test_an_nvcc_that_is_too_old_for_a_target(
    release: str, targets: str, says: str | None, functions: dict[str, Any], tmp_path: Path
) -> None:
    """Up to 12.8 it serializes the matmuls of fa3."""
    home = a_toolkit(tmp_path, "include", f"echo release {release}, V{release}.1")
    with contextlib.nullcontext() if says is None else pytest.raises(SystemExit, match=says):
        assert functions["check_nvcc"](home, targets) == release


@pytest.mark.parametrize(
    ("gpus", "portable", "targets"),
    [
        ([], False, "80+PTX;90a"),
        ([(9, 0), (9, 0)], False, "90a"),
        ([(9, 0)], True, "80+PTX;90a"),
        ([(8, 0), (8, 9)], False, "80+PTX"),
        ([(12, 0)], False, "80+PTX"),
        ([(9, 0), (8, 6)], False, "80+PTX;90a"),
    ],
)
def test_a_build_is_for_the_gpus_that_are_there(
    gpus: list[tuple[int, int]], portable: bool, targets: str, functions: dict[str, Any]
) -> None:
    """And a wheel for all of them."""
    cuda = SimpleNamespace(device_count=lambda: len(gpus), get_device_capability=gpus.__getitem__)
    assert functions["targets_of"](SimpleNamespace(cuda=cuda), portable) == targets


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("given", ("PYTHON", "PY"))
def test_make_works_in_a_path_with_spaces(given: str, tmp_path: Path) -> None:
    """By the Python of .venv, which PYTHON makes, and by PY itself."""
    folder = tmp_path / "a b"
    environment = folder / ".venv/bin"
    environment.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv/ready").touch()
    active, installed = folder / "active python", environment / "python"
    for python in (active, installed):
        python.write_text(f'#!/bin/sh\nexec {sys.executable!r} "$@"\n')
        python.chmod(0o755)
    script = folder / "distribution/make_hub.py"
    script.parent.mkdir()
    script.write_text("import os, sys\nprint(os.getcwd(), sys.argv)")
    # As typed by a user, also if make runs this test.
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", f"{given}={active}", "hub", "ARGS=--check"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ran, printed = done.stdout.splitlines()
    assert ran == f'"{active if given == "PY" else installed}" distribution/make_hub.py --check'
    assert printed == f"{folder} ['distribution/make_hub.py', '--check']"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_network_installs_nothing(tmp_path: Path) -> None:
    """On a machine without a package index, by a Python that has torch and pytest."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python, log = tmp_path / "python3", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n')
    python.chmod(0o755)
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-s", "PY=python3", "gpu-test", "ARGS=-x"]
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    assert log.read_text().splitlines() == [
        "setup.py -q build_ext --inplace",
        "tests/gpu_suite.py -x",
    ]
    assert not (tmp_path / ".venv").exists()
