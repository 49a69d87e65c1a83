"""The layers of csrc/: who may include whom, where torch and where `asm` may appear.

`make lint` runs this file alone; it needs neither torch nor the binary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TORCH_FILES = {"bindings.cpp", "attention.h", "attention.cpp", "check.h"}
STABLE_HEADERS = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")


def layer(file: Path) -> int:
    """The layer of a file, given relative to csrc/; a file includes none from a higher layer."""
    if len(file.parts) > 1:
        return {"ptx": 1, "tile": 2, "kernels": 4, "instantiate": 5}[file.parts[0]]
    if file.name in TORCH_FILES:
        return 6
    return 0 if file.suffix == ".h" else 3  # params, variants, dispatch, tuning; mask, softmax, …


def code_of(file: Path) -> str:
    """The text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", file.read_text(), flags=re.DOTALL)


def violations(csrc: Path) -> Iterator[str]:
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".cuh", ".cu", ".cpp"}:
            continue
        file = path.relative_to(csrc)
        code = code_of(path)
        if re.search(r"\b(asm|__asm__)\b", code) and file.parts[0] != "ptx":
            yield f"{file}: asm belongs in ptx/"
        for name in re.findall(r"#include\s+<([^>]+)>", code):
            if not re.match(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h", name):
                continue
            if str(file) not in TORCH_FILES:
                yield f"{file}: only {', '.join(sorted(TORCH_FILES))} include torch, not <{name}>"
            elif not name.startswith(STABLE_HEADERS):
                yield f"{file}: <{name}> is not a header of the stable ABI"
        for name in re.findall(r'#include\s+"([^"]+)"', code):
            found = [p for p in (path.parent / name, csrc / name) if p.is_file()]
            if not found:
                yield f'{file}: "{name}" is not in csrc/'
                continue
            included = found[0].resolve().relative_to(csrc.resolve())
            if layer(included) > layer(file):
                yield f"{file}: includes {included}, which is of a higher layer"


def test_csrc_keeps_its_layers() -> None:
    assert list(violations(CSRC)) == []


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("tile/gemm.cuh", 'asm volatile("bar.sync 0;");', "asm belongs in ptx/"),
        ("params.h", "#include <torch/headeronly/macros/Macros.h>", "include torch"),
        ("check.h", "#include <ATen/ATen.h>", "not a header of the stable ABI"),
        ("ptx/mma.cuh", '#include "../tile/swizzle.cuh"', "of a higher layer"),
        ("tuning.h", '#include "tile/swizzle.cuh"', "of a higher layer"),
        ("kernels/fa2_forward.cuh", '#include "gone.cuh"', "is not in csrc/"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, code: str, complaint: str) -> None:
    for name in ("tile/swizzle.cuh", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(f"// asm in a comment is fine\n{code}\n")
    (found,) = violations(tmp_path)
    assert file in found and complaint in found
