"""The same wheel under several releases of torch and Python, and its source under several of nvcc.

    python distribution/compat.py                   # all rows that are missing, one by one
    python distribution/compat.py 2.11.0 2.15.0     # the rows of these releases of torch, again
    python distribution/compat.py "nvcc newest"     # the row of the newest nvcc; nvcc: all of nvcc
    python distribution/compat.py --gpu             # the GPU tests, in this environment

Run by `make compat`. A row of torch has an environment of its own, made here. There the wheel of
dist/ is installed, without a compiler in reach, and imported; its ops, attention on the CPU and
explain are tried; then the CPU tests of the sdist run against the installed package. For a row of
nvcc the toolkit is installed by pip into a folder, and builds the sdist for all targets with the
torch of this environment: the row has the kernels that spill registers, and needs no GPU. A row is
written to benchmarks/results/compat.json as soon as it is done, and a row of the same package is
not run twice: an interrupted run goes on where it stopped. `make report` makes the tables in
docs/support.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from make_wheel import RECORD, ROOT, content_checksum, sdist_path, wheel_path

sys.path.insert(0, str(ROOT / "benchmarks"))
import common  # noqa: E402

RESULTS = ROOT / "benchmarks/results/compat.json"
ROWS = (
    ("2.11.0", "3.11"),
    ("2.12.1", "3.10"),
    ("2.13.0", "3.12"),
    ("2.14.1", "3.13"),
    ("2.15.0", "3.11"),
)
"""Each torch from 2.11 on, and each Python from 3.10 to 3.13, at least once."""

NVCC = ("13.2", "newest")
"""Those of CUDA 12 are not to be had by pip. `make build` in CI is another one."""

NAMES = (*(f"{torch}, {python}" for torch, python in ROWS), *(f"nvcc {x}" for x in NVCC))
"""The rows' names in compat.json. One more, "gpu", is made on a GPU."""

TARGETS = "80+PTX;90a"

INSTALL_SECONDS = 20

PROBE = """
import json, sys, time
import torch
start = time.perf_counter()
import flash_ext
seconds = time.perf_counter() - start
from flash_ext import ops
q, k, v = torch.randn(3, 2, 65, 4, 64, dtype=torch.float64).unbind()
q.requires_grad_()
out = flash_ext.attention(q, k, v, causal=True)
out.sum().backward()
expected = flash_ext.reference.attention(q, k, v, causal=True)[0]
explained = flash_ext.explain(q, k, v, causal=True)
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = ("fwd", "bwd", "check", "fp8_quantize", "fp8_token_mean", "combine_parts")
print(json.dumps({
    "torch": torch.__version__,
    "python": sys.version.split()[0],
    "from": flash_ext.__file__,
    "import_ms": round(1e3 * seconds, 1),
    "ops": all(has(f"flash_ext::{name}", key) for name in names for key in ("CPU", "CUDA")),
    "library": ops.cuda_missing or "loaded",
    "build": str(ops.cuda_build()),
    "checksum": ops.checksum_agrees(),
    "attention": torch.allclose(out, expected) and q.grad is not None,
    "explain": explained.variant == "fa2" and explained.binary == "loaded",
    "cuda_initialized": torch.cuda.is_initialized(),
}))
"""


def interpreter(version: str) -> str | None:
    """A Python of this minor version: on PATH, of pyenv, or of uv."""
    if found := shutil.which(f"python{version}"):
        works = subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
        if works:  # pyenv puts names there that may not be switched on
            return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    if versions := sorted(root.glob(f"{version}.*/bin/python")):
        return str(versions[-1])
    if uv := shutil.which("uv"):
        done = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def run(command: list[str], log: Path, **options: Any) -> int:
    """Run a command, its output appended to the log."""
    with log.open("a") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **options).returncode


def environment_of(folder: Path, torch: str, python: str, log: Path) -> str | None:
    """Make a virtual environment with torch and the tools. Returns why it could not be made."""
    executable = folder / "bin/python"
    ready = folder / "compat.ready"
    if ready.exists():
        return None
    base = interpreter(python)
    if base is None:
        return f"no Python {python} here"
    if not executable.exists() and run([base, "-m", "venv", str(folder)], log):
        return f"no environment of Python {python} could be made"
    install = [str(executable), "-m", "pip", "install", "-q"]
    if run([*install, "pip>=25.1", f"torch=={torch}"], log):
        return f"torch {torch} cannot be installed with Python {python}"
    if run([*install, "numpy", "--group", f"{ROOT}/pyproject.toml:test"], log):
        return "the tools of the tests cannot be installed"
    ready.touch()
    return None


def without_compilers(folder: Path) -> dict[str, str]:
    """The environment variables of a user without nvcc and g++."""
    kept = {
        n: x for n, x in os.environ.items() if n not in ("CUDA_HOME", "PYTHONPATH", "CC", "CXX")
    }
    return kept | {"PATH": str(folder / "bin")}


def install_and_probe(folder: Path, log: Path) -> dict[str, Any]:
    """Install the wheel where there is no compiler, and try what works without a GPU."""
    python, environment = str(folder / "bin/python"), without_compilers(folder)
    run([python, "-m", "pip", "uninstall", "-q", "-y", "flash_ext"], log)
    start = time.monotonic()
    install = [python, "-m", "pip", "install", "-q", str(wheel_path())]
    if run(install, log, env=environment, cwd=folder):
        return {"failed": "pip install"}
    seconds = time.monotonic() - start
    done = subprocess.run(
        [python, "-c", PROBE], env=environment, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        return {"failed": f"import: {done.stderr.strip().splitlines()[-1]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # The tests have the package in their own folder, and some make installations.
    run([python, "-m", "pip", "uninstall", "-q", "-y", "flash_ext"], log)
    assert Path(found.pop("from")).is_relative_to(folder)
    return {"install_s": round(seconds, 1)} | found


def unpacked_sdist(folder: Path) -> Path:
    """The sdist, unpacked in folder/source."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist_path()) as archive:
        name = archive.getnames()[0].partition("/")[0]
        if sys.version_info >= (3, 12):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (folder / name).rename(source)
    return source


def source_with_wheel(folder: Path) -> Path:
    """The sdist, unpacked, with the package of the wheel in place of its own."""
    source = unpacked_sdist(folder)
    shutil.rmtree(source / "flash_ext")
    with zipfile.ZipFile(wheel_path()) as archive:
        archive.extractall(source, [n for n in archive.namelist() if n.startswith("flash_ext/")])
    return source


def run_tests(python: str, source: Path, jobs: int, log: Path) -> dict[str, Any]:
    """Run the CPU tests in a source folder; returns counts and names of failures."""
    report = source / "tests.xml"
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu",
        f"--junitxml={report}", "-n", str(jobs),
    ]  # fmt: skip
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    status = run(command, log, cwd=source, env=environment)
    if not report.exists():
        return {"exit_status": status, "failed": ["no test ran"]}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            counts["skipped"] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["passed"] += 1
    return {
        "exit_status": status,
        "counts": counts,
        "failed": failed,
        "seconds": round(time.monotonic() - start),
    }


def row_of(torch: str, python: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: an environment, the wheel in it, the CPU tests."""
    folder = args.environments / f"torch-{torch}-py{python}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    if why := environment_of(folder, torch, python, log):
        return {"unavailable": why}
    row = install_and_probe(folder, log)
    if "failed" not in row and not args.no_tests:
        source = source_with_wheel(folder)
        row["tests"] = run_tests(str(folder / "bin/python"), source, args.jobs, log)
    if args.remove:
        shutil.rmtree(folder)
    return row


def install_nvcc(release: str, folder: Path, log: Path) -> Path | None:
    """Install the toolkit of a release, for example "13.2", or the newest. Returns its home."""
    shutil.rmtree(folder, ignore_errors=True)
    which = "" if release == "newest" else f"=={release}.*"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
    if run([*command, f"cuda-toolkit[nvcc,cccl]{which}"], log):
        return None
    return next((nvcc.parents[1] for nvcc in folder.glob("nvidia/*/bin/nvcc")), None)


def built_kernels(source: Path) -> dict[str, Any]:
    """What a build says of its kernels: how many there are, and which are slow."""
    records = source.glob("build/temp*/**/*.ptxas.json")
    functions = [x for path in records for x in json.loads(path.read_text())["kernels"]]
    (library,) = source.glob(f"build/lib*/{RECORD}")
    return {
        "kernels": sum("registers" in x for x in functions),  # others are called by kernels
        "slow_kernels": json.loads(library.read_text())["slow_kernels"],
    }


def nvcc_row(release: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the toolkit, and a user's build of the sdist with it."""
    folder = args.environments / f"nvcc-{release}"
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    home = install_nvcc(release, folder / "toolkit", log)
    if home is None:
        return {"unavailable": f"nvcc {release} cannot be installed"}
    said = subprocess.check_output([home / "bin/nvcc", "--version"], text=True)
    row: dict[str, Any] = {"nvcc": re.findall(r"V(\d[\d.]+)", said)[0]}
    source, start = unpacked_sdist(folder), time.monotonic()
    changed = {"CUDA_HOME": str(home), "FLASH_EXT_CUDA_ARCHS": TARGETS, "FLASH_EXT_STRICT": "0"}
    kept = {n: x for n, x in os.environ.items() if n not in ("PYTHONPATH", "PYTORCH_NVCC")}
    if run([sys.executable, "setup.py", "build"], log, cwd=source, env=kept | changed):
        return row | {"failed": "the build fails"}
    row |= built_kernels(source) | {"seconds": round(time.monotonic() - start)}
    if args.remove:
        shutil.rmtree(folder)
    return row


def gpu_row(args: argparse.Namespace) -> dict[str, Any]:
    """The GPU tests against the wheel, with the torch and the GPU of this environment."""
    import torch

    folder = args.environments / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    source, report = source_with_wheel(folder), folder / "tests.json"
    command = [sys.executable, str(source / "tests/gpu_suite.py"), "--to", str(report)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    status = run(command, folder / "gpu.log", cwd=source, env=environment)
    found = common.read_json(report) or {"exit_status": status, "failures": ["no test ran"]}
    counts = found.get("counts", {})
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(),
        "tests": {
            "exit_status": found["exit_status"],
            "counts": {name: counts.get(name, 0) for name in ("passed", "failed", "skipped")},
            "failed": found["failures"],
            "seconds": round(found.get("seconds", 0)),
        },
    }


def is_green(row: dict[str, Any]) -> bool:
    """Whether all of a row works: installation in time, import, ops, attention, explain, tests.

    With another nvcc: whether it builds the kernels, none of them slow.
    """
    if "nvcc" in row:
        return row.get("kernels", 0) > 0 and row.get("slow_kernels") == []
    tests = row.get("tests", {})
    tested = tests.get("exit_status") == 0 and not tests["failed"]
    tested = tested and tests["counts"]["passed"] > 0
    if "device" in row:
        return tested
    probes = ("ops", "attention", "explain", "checksum")
    works = all(row.get(name) for name in probes) and row.get("library") == "loaded"
    in_time = row.get("install_s", INSTALL_SECONDS + 1) <= INSTALL_SECONDS
    return tested and works and in_time and not row["cuda_initialized"]


def load(wheel: str) -> dict[str, Any]:
    """The rows that are there of this wheel; none of another."""
    with zipfile.ZipFile(wheel_path()) as archive:
        digest = json.loads(archive.read(RECORD)).get("digest")
    found = common.read_json(RESULTS) or {}
    rows = found.get("rows", {}) if found.get("wheel") == wheel else {}
    return {"wheel": wheel, "digest": digest, "rows": rows}


def make_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of this name."""
    if name == "gpu":
        return gpu_row(args)
    if name.startswith("nvcc "):
        return nvcc_row(name.removeprefix("nvcc "), args)
    return row_of(*name.split(", "), args)


def is_named(row: str, names: list[str]) -> bool:
    """Whether a row is one of those on the command line, by its whole name or its beginning."""
    return any(row == name or row.startswith((f"{name}, ", f"{name} ")) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="those that are run again, and no others")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/compat")
    parser.add_argument("--remove", action="store_true", help="remove each environment after use")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the tests (default: 2)")
    parser.add_argument("--no-tests", action="store_true", help="print rows without the CPU tests")
    parser.add_argument("--gpu", action="store_true", help="the GPU tests, in this environment")
    args = parser.parse_args()
    args.environments = args.environments.resolve()
    for path in (wheel_path(), sdist_path()):
        if not path.is_file():
            sys.exit(f"there is no {path}: run make wheel")
    wheel = content_checksum(wheel_path())
    green = True
    named = [name for name in NAMES if not args.rows or is_named(name, args.rows)]
    if not named:
        parser.error(f"the rows are {', '.join(NAMES)}")
    for name in ["gpu"] if args.gpu else named:
        row = load(wheel)["rows"].get(name)
        if row is None or args.rows or args.gpu or args.no_tests:
            row = make_row(name, args)
            row |= {"green": is_green(row), "date": common.now()}
            if not args.no_tests:
                result = load(wheel)  # another run may have written meanwhile
                result["rows"][name] = row
                common.write_json(RESULTS, result)
        green &= row["green"]
        short = row | {"tests": row.get("tests", {}).get("counts")}
        print(
            f"{name}: {'green' if row['green'] else 'NOT green'}: {json.dumps(short)}", flush=True
        )
    return int(not green)


if __name__ == "__main__":
    sys.exit(main())
