"""The source digest depends on the code, and not on comments, docstrings and formatting."""

from __future__ import annotations

from pathlib import Path

import pytest
from digest import kernel_digest, source_digest

CUDA = r"""// What it does.
#define SUM(a, b) ((a) + (b))  // of two
#include "a.h"

template <int kN> /* a
   block */ __global__ void f(float* x) {
    if (x[0] > 1'000) return;  // don't
    asm volatile("wait // 0;" : "+r"(x)::);
    const char* raw = R"x(/* kept */ "//" )x";
    x[0] = x[1]++ + x[2];
}
"""
PYTHON = '''"""A module."""

# Why.
def f(x: int, y=(1, 2)) -> str:
    """A function."""
    return f"{x:>{x + 1}} a" + "# b"


x = 1
"""What x is."""
'''
FILES = {"csrc/a-b/a.cuh": CUDA, "flash_ext/b.py": PYTHON, "setup.py": "import os\n"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def replace(tree: Path, name: str, old: str, new: str) -> None:
    text = (tree / name).read_text()
    assert text.count(old) == 1
    (tree / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("csrc/a-b/a.cuh", "// What it does.", '/* Something\nelse, with "a quote */'),
        ("csrc/a-b/a.cuh", "// don't", "// goes \\\n   on"),
        ("csrc/a-b/a.cuh", "#define SUM(a, b) ((a)", "#  define SUM(a, b) \\\n    ((a)"),
        ("csrc/a-b/a.cuh", "template <int kN>", "\n\ntemplate<int kN>\n"),
        ("flash_ext/b.py", "# Why.", ""),
        ("flash_ext/b.py", "A function.", "It's a function,\n    of x.\n    "),
        ("flash_ext/b.py", "x: int, y=(1, 2)", "\n    x: int,\n    y=((1, 2,)),\n"),
    ],
)
def test_how_it_reads_leaves_it(tree: Path, name: str, old: str, new: str) -> None:
    before = source_digest(tree)
    replace(tree, name, old, new)
    assert source_digest(tree) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("csrc/a-b/a.cuh", "1'000", "1'001"),
        ("csrc/a-b/a.cuh", "wait // 0;", "wait  // 0;"),
        ("csrc/a-b/a.cuh", "/* kept */", ""),
        ("csrc/a-b/a.cuh", "SUM(a, b)", "SUM (a, b)"),
        ("csrc/a-b/a.cuh", '#include "a.h"\n\n', '#include "a.h" '),
        ("csrc/a-b/a.cuh", "if (x", "// if (x"),
        ("flash_ext/b.py", "x + 1", "x + 2"),
        ("flash_ext/b.py", "} a", "}  a"),
        ("flash_ext/b.py", "x: int", "x: bool"),
        ("setup.py", "import os", "import re"),
    ],
)
def test_what_runs_changes_it(tree: Path, name: str, old: str, new: str) -> None:
    before = source_digest(tree)
    replace(tree, name, old, new)
    assert source_digest(tree) != before


def test_python_leaves_the_kernels_digest(tree: Path) -> None:
    before = kernel_digest(tree), source_digest(tree)
    replace(tree, "flash_ext/b.py", "x + 1", "x + 2")
    replace(tree, "setup.py", "import os", "import re")
    assert kernel_digest(tree) == before[0] and source_digest(tree) != before[1]
    replace(tree, "csrc/a-b/a.cuh", "1'000", "1'001")
    assert kernel_digest(tree) != before[0]


def test_which_files_count(tree: Path) -> None:
    before = source_digest(tree)
    (tree / "csrc/notes.md").write_text("not a source")
    (tree / "flash_ext/_C.abi3.so").write_bytes(b"\x7fELF")
    (tree / "other.py").write_text("x = 1")
    (tree / "csrc/link.h").symlink_to("a-b/a.cuh")
    assert source_digest(tree) == before
    (tree / "csrc/a-b/a.cuh").rename(tree / "csrc/a-b/b.cuh")
    assert source_digest(tree) != before
