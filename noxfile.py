"""The wheel of dist/ under several releases of torch and Python, its source under several of nvcc.

    nox                                            # all rows; `make compat`
    nox -s "wheel(python='3.11', torch='2.11.0')"  # one of them; nox --list: their names
    nox -s gpu                                     # the GPU tests, in this environment
    nox -s complete                                # an error if a row is missing or not green

A row of torch has its own environment. There the wheel is installed, without a compiler in
reach, and imported; its ops, attention on the CPU and explain are tried; then the CPU tests of the
sdist run against the wheel's package. For a row of nvcc the toolkit is installed by pip into a
folder, and builds the sdist for all targets with the torch of this environment: no kernel may be
slow. A row goes to benchmarks/results/compat.json as soon as it is done, green or not; `make
report` makes the tables in docs/support.md. pyproject.toml has the rows.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "distribution"), str(ROOT / "benchmarks")]
import common  # noqa: E402
from release import DIST, identity, unpack, wheel_path  # noqa: E402

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
ROWS = PYPROJECT["tool"]["flash_ext"]["compat"]
RESULTS = ROOT / "benchmarks/results/compat.json"
ENVIRONMENTS = ROOT / "build/compat"
INSTALL_SECONDS = 20
NO_COMPILER = {"PATH": os.devnull, "CUDA_HOME": None, "PYTHONPATH": None, "CC": None, "CXX": None}

nox.options.sessions = ["wheel", "nvcc"]

PROBE = """
import json, sys, torch
import flash_ext
from flash_ext import ops
q, k, v = torch.randn(3, 2, 65, 4, 64, dtype=torch.float64).unbind()
q.requires_grad_()
out = flash_ext.attention(q, k, v, causal=True)
out.sum().backward()
expected = flash_ext.reference.attention(q, k, v, causal=True)[0]
explained = flash_ext.explain(q, k, v, causal=True)
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = ("fwd", "bwd", "check", "fp8_quantize", "fp8_token_mean", "combine_parts")
assert not torch.cuda.is_initialized()
print(json.dumps({
    "torch": torch.__version__,
    "python": sys.version.split()[0],
    "ops": all(has(f"flash_ext::{name}", key) for name in names for key in ("CPU", "CUDA")),
    "library": ops.cuda_missing or "loaded",
    "checksum": ops.checksum_agrees(),
    "attention": torch.allclose(out, expected) and q.grad is not None,
    "explain": explained.variant == "fa2" and explained.binary == "loaded",
}))
"""


def tested() -> tuple[dict[str, str], dict[str, Any]]:
    """The head of compat.json for the wheel of dist/, and the rows that it has of this wheel."""
    found, wheel = common.read_json(RESULTS) or {}, identity(wheel_path())
    return wheel, found["rows"] if found == found | wheel else {}


@contextmanager
def row(name: str) -> Iterator[dict[str, Any]]:
    """The facts of a row, which are stored in the end: as green if no command failed."""
    facts: dict[str, Any] = {"green": False, "failed": "see the output of nox"}
    try:
        yield facts
        facts["green"] = True
        del facts["failed"]
    finally:
        wheel, rows = tested()
        rows[name] = facts | {"date": common.now()}
        common.write_json(RESULTS, wheel | {"rows": rows})


def unpacked_sdist(folder: Path) -> Path:
    """The sdist, unpacked in folder/source."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
        (folder / archive.getnames()[0].partition("/")[0]).rename(source)
    return source


def source_with_wheel(folder: Path) -> Path:
    """The sdist, unpacked, with the package of the wheel in place of the sdist's."""
    source = unpacked_sdist(folder)
    unpack(wheel_path(), source)
    return source


@nox.session
@nox.parametrize("python,torch", [(python, torch) for torch, python in ROWS["torch"]])
def wheel(session: nox.Session, torch: str) -> None:
    """A release of torch: the wheel in its own environment, and the CPU tests."""
    with row(f"{torch}, {session.python}") as facts:
        tools = nox.project.dependency_groups(PYPROJECT, "test")
        session.install(f"torch=={torch}", "numpy", *tools)
        start = time.monotonic()
        session.install("--no-deps", str(wheel_path()), env=NO_COMPILER)
        facts["install_s"] = round(time.monotonic() - start, 1)
        session.chdir(session.create_tmp())
        facts |= json.loads(session.run("python", "-c", PROBE, env=NO_COMPILER, silent=True))
        works = all(facts[x] for x in ("ops", "attention", "explain", "checksum"))
        if not works or facts["library"] != "loaded" or facts["install_s"] > INSTALL_SECONDS:
            session.error(f"the wheel does not work: {facts}")
        # The tests have the package in their own folder, and some make installations.
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", "flash_ext")
        source = source_with_wheel(Path.cwd())
        session.chdir(source)
        report = source.parent / "tests.json"
        report.unlink(missing_ok=True)
        options = ["-q", "-m", "not gpu", "-n", "2", f"--report={report}", *session.posargs]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
        try:
            session.run("python", "-m", "pytest", *options, env=environment)
        finally:
            facts["tests"] = {"counts": (common.read_json(report) or {})["counts"]}


@nox.session(venv_backend="none")
@nox.parametrize("release", ROWS["nvcc"])
def nvcc(session: nox.Session, release: str) -> None:
    """A release of nvcc: a user's build of the sdist."""
    with row(f"nvcc {release}") as facts:
        folder = ENVIRONMENTS / f"nvcc-{release}"
        shutil.rmtree(folder, ignore_errors=True)
        which = "cuda-toolkit[nvcc,cccl]" + ("" if release == "newest" else f"=={release}.*")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target"]
        session.run(*pip, str(folder / "toolkit"), which)
        home = next(x.parents[1] for x in folder.glob("toolkit/nvidia/*/bin/nvcc"))
        said = session.run(str(home / "bin/nvcc"), "--version", silent=True, external=True)
        facts["nvcc"] = said.rpartition(" V")[2].split()[0]
        source = unpacked_sdist(folder)
        session.chdir(source)
        changed = {"CUDA_HOME": str(home), "FLASH_EXT_CUDA_ARCHS": "80+PTX;90a"}
        session.run(sys.executable, "setup.py", "build", env=changed | {"FLASH_EXT_STRICT": "0"})
        facts["kernels"] = (source / "build/ptxas.log").read_text().count("Function properties")
        (library,) = source.glob("build/lib*/flash_ext/_C.json")
        facts["slow_kernels"] = json.loads(library.read_text())["slow_kernels"]
        if not facts["kernels"] or facts["slow_kernels"]:
            session.error(f"slow kernels: {facts['slow_kernels']}")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The GPU tests against the wheel, with the torch and the GPU of this environment."""
    import torch

    with row("gpu") as facts:
        folder = ENVIRONMENTS / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        source, report = source_with_wheel(folder), folder / "tests.json"
        report.unlink(missing_ok=True)
        facts |= {"torch": torch.__version__, "python": sys.version.split()[0]}
        facts["device"] = torch.cuda.get_device_name()
        session.chdir(source)
        command = [sys.executable, "tests/gpu_suite.py", "--to", str(report)]
        try:
            session.run(*command, env={"PYTHONPATH": str(source)})
        finally:
            facts["tests"] = {"counts": (common.read_json(report) or {})["counts"]}


@nox.session(venv_backend="none")
def complete(session: nox.Session) -> None:
    """Every row is there and green, for the wheel of dist/: a release needs it."""
    names = [f"{torch}, {python}" for torch, python in ROWS["torch"]]
    names += [*(f"nvcc {x}" for x in ROWS["nvcc"]), "gpu"]
    _, rows = tested()
    if missing := [name for name in names if not rows.get(name, {}).get("green")]:
        session.error(f"not tested with this wheel, or not green: {'; '.join(missing)}")
