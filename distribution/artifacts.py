"""Checks of a machine's wheel that no tool has. Run by `make check-wheel`, after the tools.

The library needs nothing but libtorch and the C and C++ runtimes; the wheel is at most 12 MB; it
holds this source and the record of its build, with the library's checksum, without slow kernels.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from manylinux import LOADERS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import digest  # noqa: E402

DIST = ROOT / "dist"
MAX_BYTES = 12_000_000
LIBRARIES = {
    "libtorch.so", "libtorch_cpu.so", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6",
    "libpthread.so.0", "librt.so.1", "libstdc++.so.6", *LOADERS.values(),
}  # fmt: skip
BINARY, RECORD = "flash_ext/_C.abi3.so", "flash_ext/_C.json"


def version() -> str:
    text = (ROOT / "flash_ext/__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def wheel_path(machine: str = platform.machine()) -> Path:
    return DIST / f"flash_ext-{version()}-cp310-abi3-manylinux_2_28_{machine}.whl"


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
        if not wheel.stem.endswith(f"-{record['platform']}"):
            found += [f"the library was linked for {record['platform']}"]
        if record["digest"] != digest.source_digest():
            found += [f"the library is of source {record['digest']}, not {digest.source_digest()}"]
        found += [f"a slow kernel: {x}" for x in record.get("slow_kernels") or ()]
        for name in (x for x in archive.namelist() if re.match(r"flash_ext/.*\.py$", x)):
            file = ROOT / name
            if not file.is_file() or archive.read(name) != file.read_bytes():
                found += [f"the wheel has another {name}"]
        readelf = subprocess.run(["readelf", "-d", library], check=True, capture_output=True)
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf.stdout.decode())
        found += [f"the library needs {x}" for x in needed if x not in LIBRARIES]
    return found


if __name__ == "__main__":
    if wrong := complaints(wheel_path(*sys.argv[1:])):
        sys.exit("\n".join(f"WRONG: {x}" for x in wrong))
