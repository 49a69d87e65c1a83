"""Finds words that docs/words.toml replaces, in documents, docstrings, comments and messages.

    python docs/lint_words.py                      # every finding, as path:line; run by `make lint`
    python docs/lint_words.py README.md flash_ext  # of these files and folders

Code is left out: fenced blocks, `names`, links, and what is generated into a document.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # of pytest, which `make lint` needs too
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
RULES = tomllib.loads((ROOT / "docs/words.toml").read_text())
CODE = re.compile(
    r"<!-- generated:(\w+) begin -->.*?<!-- generated:\1 end -->|<!--.*?-->"
    r"|^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)|https?:\S+",
    re.DOTALL | re.MULTILINE,
)


def blank(match: re.Match[str]) -> str:
    """A stand-in of as many lines, which no rule finds."""
    return "\n" * match[0].count("\n") or "·"


def of_python(text: str) -> str:
    """Comments and strings that are sentences, each on its lines; nothing of the code."""
    lines = [""] * (text.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# type:"):
            lines[token.start[0]] += token.string.lstrip("#")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.split("\n"), node.lineno):
                lines[min(number, len(lines) - 1)] += f" {line}"
    return "\n".join(lines[1:])


def of_cpp(text: str) -> str:
    """The comments, each on its line."""
    return "\n".join(line.partition("//")[2] for line in text.split("\n"))


def prose(path: Path) -> str:
    text = path.read_text()
    text = (
        of_python(text) if path.suffix == ".py" else of_cpp(text) if path.suffix != ".md" else text
    )
    return CODE.sub(blank, text)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, what was found, what to write) for each match of a rule. A match may span lines."""
    for rule in RULES["rules"]:
        for pattern in rule["patterns"]:
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                yield line, " ".join(match[0].split()), rule["write"]


def files(names: list[str]) -> Iterator[Path]:
    for path in sorted({x for glob in RULES["files"] for x in ROOT.glob(glob)}):
        name = path.relative_to(ROOT).as_posix()
        chosen = not names or any(name == x or name.startswith(f"{x}/") for x in names)
        if chosen and not any(fnmatch(name, glob) for glob in RULES["exempt"]):
            yield path


def main() -> int:
    count = 0
    for path in files([x.rstrip("/") for x in sys.argv[1:]]):
        for line, found, instead in sorted(findings(prose(path))):
            print(f"{path.relative_to(ROOT)}:{line}: {found!r}: {instead}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
