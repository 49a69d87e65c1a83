"""Makes dist/hub/, which Hugging Face's `kernels` loads, from the wheel. Run by `make hub`.

    dist/hub/README.md
    dist/hub/build/torch-stable-abi211-cu130-x86_64-linux/   the wheel's package
    dist/hub/build/torch-cpu/                                the same without the library

Each variant has __init__.py (hub_kernel.py), flash_ext/ and metadata.json, with the checksum of
every file. The first is for every torch from 2.11 on whose CUDA is 13.x; the second for a torch
without CUDA. Nothing is uploaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from artifacts import DIST, RECORD, ROOT, version, wheel_path

HUB = DIST / "hub"
NAME = "flash-ext"
REVISION = 1
"""The version of the kernel on the hub: one number, raised when callers must change something."""
KERNELS = "0.17.0"
"""The oldest release of `kernels` that knows variants of the stable ABI."""

CARD = """---
license: mit
library_name: kernels
tags: [kernel]
---
# flash-ext

Exact attention as hand-written CUDA kernels, with the functions of flash-attn 2.8:
`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` (without paged caches),
and with FlashAttention-3's in `flash_attn_interface`.
flash_ext {version}, source {digest}, for {targets}, CUDA {cuda}.
"""


def architectures(targets: str) -> list[str]:
    """Turns "80+PTX;90a" into ["8.0+PTX", "9.0a"], as `kernels` writes them."""
    found = []
    for target in re.split(r"[;,\s]+", targets.strip("; ,")):  # as setup.py takes them
        number = target.rstrip("af+PTX")
        found.append(f"{number[:-1]}.{number[-1]}{target[len(number) :]}")
    return found


def checksums(variant: Path) -> dict[str, str]:
    """SHA-256 in base64 of every file of a variant but metadata.json, by path."""
    return {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file() and path.name != "metadata.json"
    }


def write_variant(package: Path, variant: Path, record: dict[str, Any] | None) -> None:
    """One variant: of the library that the record tells of, or without it."""
    ignored = shutil.ignore_patterns("__pycache__", *([] if record else ["_C.*"]))
    shutil.copytree(package, variant / "flash_ext", ignore=ignored)
    text = (ROOT / "distribution/hub_kernel.py").read_text().replace('"VERSION"', f'"{version()}"')
    (variant / "__init__.py").write_text(text)
    files = checksums(variant)
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
    backend: dict[str, Any] = {"type": "cpu"}
    if record:
        backend = {"type": "cuda", "archs": architectures(record["targets"])}
    metadata = {
        "id": f"flash_ext_{unique}",
        "name": NAME,
        "version": REVISION,
        "kernels-minver": KERNELS,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def make(package: Path, record: dict[str, Any], folder: Path) -> None:
    """The whole layout, of a package with the library that the record tells of."""
    for name in ("targets", "cuda", "digest"):
        if not record.get(name):
            raise SystemExit(f"the library does not record its {name}: build it with this setup.py")
    cuda = "".join(record["cuda"].split(".")[:2])
    shutil.rmtree(folder, ignore_errors=True)
    write_variant(package, folder / f"build/torch-stable-abi211-cu{cuda}-x86_64-linux", record)
    write_variant(package, folder / "build/torch-cpu", None)
    (folder / "README.md").write_text(CARD.format(**record | {"version": version()}))


def main() -> None:
    path = wheel_path("x86_64")
    if not path.is_file():
        sys.exit(f"there is no {path}: run make wheel")
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(path) as wheel:
        wheel.extractall(unpacked)
        make(Path(unpacked, "flash_ext"), json.loads(wheel.read(RECORD)), HUB)
    print(*sorted(HUB.glob("build/*")), sep="\n")


if __name__ == "__main__":
    main()
