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
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from release import DIST, RECORD, ROOT, wheel_path

Json = dict[str, Any]
METADATA = {
    "name": "flash-ext",
    "version": 1,  # one number, raised when callers must change something
    "kernels-minver": "0.17.0",  # the oldest that knows variants of the stable ABI
    "license": "MIT",
    "python-depends": [],
}
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
    return re.findall(r"\d+\.\d\w*(?:\+PTX)?", re.sub(r"(\d+)(\d)", r"\1.\2", targets))


def write_variant(kernel: str, package: Path, variant: Path, backend: Json, *without: str) -> None:
    """One variant: the text of its __init__.py, and the package without files of some patterns."""
    ignored = shutil.ignore_patterns("__pycache__", *without)
    shutil.copytree(package, variant / "flash_ext", ignore=ignored)
    (variant / "__init__.py").write_text(kernel)
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
    metadata = {"id": f"flash_ext_{unique}", **METADATA, "backend": backend}
    metadata |= {"digest": {"algorithm": "sha256", "files": files}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def make(package: Path, record: Json, folder: Path) -> None:
    """The whole layout, of a package with the library that the record tells of."""
    kernel = (ROOT / "distribution/hub_kernel.py").read_text().replace("VERSION", record["version"])
    backend = {"type": "cuda", "archs": architectures(record["targets"])}
    name = f"torch-stable-abi211-cu{record['cuda'].replace('.', '')}-x86_64-linux"
    shutil.rmtree(folder, ignore_errors=True)
    write_variant(kernel, package, folder / "build" / name, backend)
    write_variant(kernel, package, folder / "build/torch-cpu", {"type": "cpu"}, "_C.*")
    (folder / "README.md").write_text(CARD.format(**record))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel_path("x86_64")) as wheel:
        wheel.extractall(unpacked)
        make(Path(unpacked, "flash_ext"), json.loads(wheel.read(RECORD)), DIST / "hub")
