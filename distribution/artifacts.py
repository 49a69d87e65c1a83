"""Checks of a wheel that no tool has. Run by `make check-wheel`, after the tools.

The library needs nothing but libtorch's stable ABI and the C and C++ runtimes; the wheel is at most
12 MB; it holds the record of the build, with the checksum of its library and without slow kernels.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_28_x86_64"
MAX_BYTES = 12_000_000
LIBRARIES = {
    "libtorch.so", "libtorch_cpu.so", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6",
    "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2",
}  # fmt: skip
BINARY, RECORD = "flash_ext/_C.abi3.so", "flash_ext/_C.json"


def version() -> str:
    text = (ROOT / "flash_ext/__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def wheel_path() -> Path:
    return DIST / f"flash_ext-{version()}-cp310-abi3-{PLATFORM}.whl"


def sdist_path() -> Path:
    return DIST / f"flash_ext-{version()}.tar.gz"


def content_checksum(wheel: Path) -> str:
    """SHA-256 of the package in a wheel, without the metadata and the README."""
    content = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if n.startswith("flash_ext/")):
            file = hashlib.sha256(archive.read(name)).hexdigest()
            content.update(f"{file}  {name}\n".encode())
    return content.hexdigest()


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def complaints(wheel: Path) -> list[str]:
    """The errors of a wheel."""
    if not wheel.is_file():
        return [f"there is no {wheel.name}: run make wheel"]
    found = []
    if wheel.stat().st_size > MAX_BYTES:
        found += [f"the wheel has {wheel.stat().st_size:,} bytes, more than {MAX_BYTES:,}"]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        if not {BINARY, RECORD} <= set(archive.namelist()):
            return [f"{wheel.name} holds no {BINARY} or no {RECORD}"]
        library = archive.extract(BINARY, folder)
        record = json.loads(archive.read(RECORD))
        if record["sha256"] != hashlib.sha256(archive.read(BINARY)).hexdigest():
            found += ["the library has another checksum than its record says"]
        if record["version"] != version():
            found += [f"the record is of version {record['version']}, the source of {version()}"]
        if record["platform"] != PLATFORM:
            found += [f"the library was linked for {record['platform']}"]
        found += [f"a slow kernel: {x}" for x in record.get("slow_kernels") or ()]
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library))
        found += [f"the library needs {x}" for x in needed if x not in LIBRARIES]
        # C++ functions of torch, without which the library does not load; the stable ABI is in C.
        symbols = output("nm", "-D", "--undefined-only", library)
        unstable = re.findall(r" U (_ZN?K?(?:2at|3c10|5torch)\w+)", symbols)
        found += [f"{name} is not of the stable ABI" for name in unstable]
    return found


if __name__ == "__main__":
    if wrong := complaints(wheel_path()):
        sys.exit("\n".join(f"WRONG: {x}" for x in wrong))
