"""Makes dist/hub/, which Hugging Face's `kernels` loads, from the wheel. Run by `make hub`.

    dist/hub/README.md
    dist/hub/build/torch-stable-abi211-cu130-x86_64-linux/   the wheel's package
    dist/hub/build/torch-cpu/                                the same without the library

Each variant has __init__.py (hub_kernel.py), flash_ext/ and metadata.json. The first is for every
torch from 2.11 on whose CUDA is 13.x; the second for a torch without CUDA. Nothing is uploaded.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

from release import DIST, ROOT, record_of, unpack, wheel_path

# The version is raised when callers must change something; kernels 0.17 is the oldest that knows
# variants of the stable ABI.
METADATA = {"name": "flash-ext", "version": 1, "kernels-minver": "0.17.0", "license": "MIT",
            "python-depends": []}  # fmt: skip
# What the hub itself reads of README.md; the text is hub_kernel.py's.
CARD = "---\nlicense: mit\nlibrary_name: kernels\ntags: [kernel]\n---\n"


def architectures(targets: str) -> list[str]:
    """Turns "80+PTX;90a" into ["8.0+PTX", "9.0a"], as `kernels` writes them."""
    return re.findall(r"\d+\.\d\w*(?:\+PTX)?", re.sub(r"(\d+)(\d)", r"\1.\2", targets))


def make(wheel: Path, folder: Path) -> None:
    record = record_of(wheel)
    kernel = (ROOT / "distribution/hub_kernel.py").read_text().replace("VERSION", record["version"])
    gpu = {"type": "cuda", "archs": architectures(record["targets"])}
    cuda = f"torch-stable-abi211-cu{record['cuda'].replace('.', '')}-x86_64-linux"
    shutil.rmtree(folder, ignore_errors=True)
    for name, backend in ((cuda, gpu), ("torch-cpu", {"type": "cpu"})):
        variant = folder / "build" / name
        unpack(wheel, variant)
        (variant / "__init__.py").write_text(kernel)
        unique = {"id": f"flash_ext_{record['digest']}_{backend['type']}"}
        metadata = unique | METADATA | {"backend": backend}
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    for part in folder.glob("build/torch-cpu/flash_ext/_C.*"):
        part.unlink()
    (folder / "README.md").write_text(CARD + (ast.get_docstring(ast.parse(kernel)) or "") + "\n")


if __name__ == "__main__":
    make(wheel_path("x86_64"), DIST / "hub")
