"""The lint of words finds what docs/words.toml names, in prose alone.

Would catch a rule that finds nothing, a list in CONTRIBUTING.md that is another, and a lint that
reads code as English or skips a docstring.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")
ROOT = Path(__file__).resolve().parent.parent
LINT: dict[str, Any] = runpy.run_path(str(ROOT / "docs/lint_words.py"))
RULES = LINT["RULES"]["rules"]

PYTHON = '''"""The tiles: those of Q."""
x = "those of"
y = {"what is": 1}  # None where it is missing
def f():
    """One line.

    It takes longer than a launch."""
    raise ValueError(f"{x} has so many rows")
'''
MARKDOWN = """Tiles, *likewise*.
`what is` and [that of](those-of) a
```
nobody
```
<!-- generated:x begin -->
anew
<!-- generated:x end -->
a fence behind a
store, too.
"""


def found(text: str, name: str, tmp_path: Path) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text)
    return sorted((line, what) for line, what, _ in LINT["findings"](LINT["prose"](path)))


def test_comments_docstrings_and_messages_are_prose(tmp_path: Path) -> None:
    assert found(PYTHON, "x.py", tmp_path) == [
        (1, "those of"),
        (2, "those of"),
        (3, "None where"),
        (3, "what is"),
        (3, "where it is missing"),
        (7, "takes longer"),
        (8, "so many"),
    ]
    assert found("int so_many;  // of nobody\nnobody();\n", "x.cu", tmp_path) == [(1, "nobody")]


def test_code_and_what_is_generated_are_not(tmp_path: Path) -> None:
    assert found(MARKDOWN, "x.md", tmp_path) == [
        (1, "likewise"),
        (2, "that of"),
        (9, "behind a"),
        (10, ", too"),
    ]


def test_every_file_that_is_named_is_read() -> None:
    names = {x.relative_to(ROOT).as_posix() for x in LINT["files"]([])}
    assert {"README.md", "docs/design/forward.md", "flash_ext/functional.py", "setup.py"} <= names
    assert not [x for x in names if x.startswith(("csrc/", "docs/notes/"))]


def test_contributing_has_the_words() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| write | not |\n| --- | --- |\n")[2].partition("\n<!--")[0]
    assert table.splitlines() == [f"| {x['write']} | {x['instead_of']} |" for x in RULES]
