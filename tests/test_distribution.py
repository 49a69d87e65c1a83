"""What is handed out: the version, the sdist, the linking of wheels.

Would catch a version that is written twice, an sdist that lacks files or differs between machines,
metadata that need torch or nvcc, a wheel that asks for newer symbols than its platform has, and a
cross build that takes a tool or library of this machine.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from forked import run_python

import flash_ext

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parent.parent
TORCH = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = ["setup.py", *sys.argv[1:]]
runpy.run_path("setup.py", run_name="__main__")
"""


def setup(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py where there is no torch."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "-q", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def make(folder: Path, *arguments: str, **changed: str) -> str:
    """What a command of make prints, as a user types it, also if make runs this test."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", f"PY={sys.executable}", *arguments],
        cwd=folder, env=kept | changed, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, or of an sdist."""
    folder = tmp_path_factory.mktemp("distribution") / "source"
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def files() -> set[str]:
    """The files of this repository, junk aside."""
    if not (ROOT / ".git").exists():
        generated = {"PKG-INFO", "setup.cfg"}
        found = (x.relative_to(ROOT).as_posix() for x in ROOT.rglob("*") if x.is_file())
        junk = re.compile(r"(.*/)?(__pycache__|build|dist|\.\w+|[\w.]+\.egg-info|results/cpu)/.*")
        kept = {x for x in found if not junk.match(x)}
        return {x for x in kept - generated if not x.startswith("flash_ext/_C.")}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    return {x for x in listed if (ROOT / x).is_file()}


# --- Versions ---


def test_the_version_is_written_once() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject and not re.search("^version", pyproject, re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_ext.__version__)


def test_metadata_need_neither_torch_nor_nvcc(source: Path) -> None:
    done = setup(source, "--version", CUDA_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == flash_ext.__version__


# --- The sdist ---


@pytest.mark.share(0)
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_sdist_is_the_same_everywhere_and_whole(source: Path) -> None:
    made = []
    for number, changed in enumerate(({}, {"FLASH_EXT_SKIP_CUDA": "1", "CUDA_HOME": "/nowhere"})):
        folder = source.parent / str(number)
        mask = os.umask(0o022 + 0o55 * number)
        try:
            make(source, "sdist", f"DIST={folder}", **changed)
        finally:
            os.umask(mask)
        (path,) = folder.iterdir()
        made.append(path)
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as archive:
        listed = [x for x in archive.getmembers() if x.isfile()]
        assert {(x.uid, x.gid, x.mtime, x.uname) for x in listed} == {(0, 0, 0, "")}
    names = {x.name.partition("/")[2] for x in listed}
    generated = {x for x in names if re.match(r"PKG-INFO|setup\.cfg|flash_ext\.egg-info/", x)}
    assert names - generated == files() - {".ci/run", ".gitignore"}


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_what_a_page_installs_does_not_break_torch(page: str) -> None:
    """torch 2.11 and 2.12 want setuptools < 82; the license in pyproject.toml wants 77."""
    wanted = re.findall(r'"(setuptools[^"]*)"', (ROOT / page).read_text())
    assert wanted and set(wanted) == {"setuptools>=77,<82"}
    (pin,) = re.findall(r'"setuptools==(\d+)', (ROOT / "pyproject.toml").read_text())
    assert 77 <= int(pin) < 82


# --- The linking of wheels ---


CODE = """
#include <dlfcn.h>
#include <pthread.h>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
extern "C" int text(int number) {
    static std::shared_ptr<std::string> kept;
    pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { kept = std::make_shared<std::string>("x"); });
    std::ostringstream stream;
    stream << *kept << number << (dlopen(nullptr, RTLD_LAZY) != nullptr);
    try {
        throw std::runtime_error(stream.str());
    } catch (const std::exception& error) {
        return std::stoi(error.what() + 1);
    }
}
"""
MACHINES = {"x86_64": "c++", "aarch64": "aarch64-linux-gnu-g++"}
needs_native = pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which("c++") and shutil.which("readelf")),
    reason="needs x86-64, a C++ compiler and binutils",
)


@pytest.mark.share(0)
@needs_native
@pytest.mark.parametrize("machine", MACHINES)
def test_wheels_are_linked_for_their_platform(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """String streams, threads and dlopen have newer versions in newer systems."""
    if not (compiler := shutil.which(MACHINES[machine])):
        pytest.skip(f"needs the cross compiler {MACHINES[machine]}")
    monkeypatch.setenv("CXX", compiler)
    manylinux = runpy.run_path(str(ROOT / "distribution/manylinux.py"))
    library, libraries = tmp_path / "library.so", tmp_path / "stand-ins"
    flags = manylinux["link_flags"](libraries, machine, TORCH)

    def link(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-x", "c++", "-", "-x", "none",
             "-Wl,--exclude-libs,ALL", "-o", library, f"-L{libraries}", "-ltorch_cpu", *flags],
            input=code, text=True, capture_output=True,
        )  # fmt: skip

    done = link(CODE + "namespace c10 { int f(); }\nint g() { return c10::f(); }\n")
    assert done.returncode != 0 and "undefined reference to `c10::f()'" in done.stderr
    done = link(CODE + 'extern "C" int torch_list_size();\nint g() { return torch_list_size(); }\n')
    assert done.returncode == 0, done.stderr
    needed = subprocess.run(
        ["readelf", "-dV", library], check=True, capture_output=True, text=True
    ).stdout
    versions = set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", needed))
    assert versions
    for family, version in versions:
        assert tuple(map(int, version.split("."))) <= manylinux["NEWEST"][family]
    assert "[libtorch_cpu.so]" in needed
    if machine == "x86_64":
        assert link(CODE).returncode == 0
        assert ctypes.CDLL(str(library)).text(7) == 71


# A toolkit and a cross compiler in one: it writes its commands to ../log, leaves out what takes
# long, and does the rest by this machine's compiler.
TOOL = """#!/bin/sh
echo "$0 $*" >> "$(dirname "$0")/../log"
case "$*" in
*--version*) echo release 13.0 ;;
*print-file-name=ld-linux-aarch64*) exec c++ -print-file-name=ld-linux-x86-64.so.2 ;;
*.cu\\ * | *host.cpp* | *_C.abi3.so*)
    while [ "$1" != -o ]; do shift; done
    : > "$2" ;;
*) exec c++ "$@" ;;
esac
"""


@needs_native
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_wheel_for_another_machine_is_made_by_its_tools(source: Path, tmp_path: Path) -> None:
    """`make wheel MACHINE=aarch64`, without that machine's tools: the commands."""
    pytest.importorskip("ninja")
    tools, include = tmp_path / "bin", tmp_path / "targets/sbsa-linux/include"
    for folder in (tools, include / "cccl", include.with_name("lib")):
        folder.mkdir(parents=True)
    (include / "cuda_runtime.h").touch()
    for name in ("nvcc", "aarch64-linux-gnu-g++"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    said = make(source, "-n", "wheel", "MACHINE=aarch64").replace("\\\n", "")
    (line,) = (x for x in said.splitlines() if "--wheel" in x)
    assert line.endswith("--plat-name=manylinux_2_28_aarch64")
    words = itertools.takewhile(lambda word: "=" in word, shlex.split(line))
    environment = dict(word.split("=", 1) for word in words)
    environment |= {"CUDA_HOME": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"}
    # An editable installation gives another --build-temp each time.
    places = ["--build-lib", str(tmp_path / "built"), "--build-temp", str(tmp_path / "again")]
    command = ("setup.py", "-q", "build", *places)
    done = run_python(*command, cwd=source, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "built/flash_ext/_C.json").read_text())
    assert record["platform"] == "manylinux_2_28_aarch64"
    log = (tmp_path / "log").read_text().splitlines()
    cross = f"{tools}/aarch64-linux-gnu-g++ "
    kernels = [shlex.split(x) for x in log if x.startswith(f"{tools}/nvcc ") and ".cu -o" in x]
    assert len(kernels) == len(list(source.glob("csrc/instantiate/*.cu")))
    for command in kernels:
        assert command[command.index("-ccbin") + 1] == "aarch64-linux-gnu-g++"
        assert {f"-I{include}", f"-isystem={include}/cccl"} <= set(command)
        assert command[-1].startswith("build/temp.linux-aarch64")
    assert sum(x.startswith(cross) and "host.cpp " in x for x in log) == 1
    (link,) = (x.split() for x in log if x.startswith(cross) and "_C.abi3.so" in x)
    folders = [word for word in link if word.startswith("-L")]
    libraries = [f"{source}/build/manylinux_2_28_aarch64", f"{include.with_name('lib')}"]
    assert folders == ["-Lbuild/aarch64/nvidia/cu13/lib", *(f"-L{x}" for x in libraries)]
    assert f"{libraries[0]}/ld-linux-aarch64.so.1" in link
