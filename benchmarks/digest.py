"""The source digests: they name what runs, not how it reads. Need nothing but Python.

    python benchmarks/digest.py             # of the kernels and of the package, a line each
    python benchmarks/digest.py kernels     # one of them alone

The kernels' digest is of csrc/, the package's of csrc/, flash_ext/ and setup.py, on which tests and
times of the host depend. C++ and CUDA files count as their tokens, Python files as their syntax
tree without docstrings: comments, docstrings, line breaks and blanks do not change the digest, any
other change of the code, or of a file's name, does. From Python 3.10 on all compute the same.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("csrc",)
SOURCES = (*KERNELS, "flash_ext", "setup.py")
CPP_SUFFIXES = {".cu", ".cuh", ".h", ".cpp"}

CPP_TOKEN = re.compile(
    r"""
      (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
    | (?P<blank> (?:\s|\\\n)+ )
    | (?P<code>
          (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)"  # raw string
        | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*"
        | (?:u8|[uUL])?'(?:\\.|[^'\\\n])*'
        | \.?\d(?:[eEpP][+-]|'?[\w.])*  # 1'000.5e-3f is one number
        | \#[ \t]*define[ \t]+\w+\(?  # F(x) is not F (x)
        | \w+
        | <<=|>>=|<=>|->\*|\.\.\.|\+\+|--|->|<<|>>|&&|\|\||\#\#|[-+*/%&|^<>=!]=
        | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)


def cpp_tokens(text: str) -> Iterator[str]:
    """The tokens of a C++ file, a directive of the preprocessor between two line ends."""
    line_start, directive = True, False
    for token in CPP_TOKEN.finditer(text):
        if token["blank"] and "\n" in token["blank"].replace("\\\n", ""):
            if directive:
                yield "\n"
            line_start, directive = True, False
        elif token["code"]:
            if line_start and token["code"].startswith("#"):
                yield "\n"
                directive = True
            line_start = False
            code = token["code"]
            yield "".join(code.split()) if code.startswith("#") else code


def python_tree(node: object) -> Iterator[str]:
    """A syntax tree in words: ast.dump without docstrings and without Python's version.

    Empty fields are left out, since newer versions have more of them (``type_params``), and the
    pieces of text in an f-string are joined, since versions cut them differently."""
    if isinstance(node, list):
        for item in node:
            if not (isinstance(item, ast.Expr) and is_text(item.value)):
                yield from python_tree(item)
    elif isinstance(node, ast.JoinedStr):
        yield "JoinedStr("
        text = ""
        for value in node.values:
            if is_text(value):
                text += value.value
            else:
                yield from (ascii(text), *python_tree(value))
                text = ""
        yield from (ascii(text), ")")
    elif isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if value is not None and value != []:
                yield f"{name}="
                yield from python_tree(value)
        yield ")"
    else:
        yield ascii(node)


def is_text(node: ast.AST) -> bool:
    """Whether a node is a string; as a statement it is a docstring."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def content_digest(text: str, suffix: str) -> str:
    """The digest of the part of a file's text that counts."""
    words = python_tree(ast.parse(text)) if suffix == ".py" else cpp_tokens(text)
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def kernel_digest(root: Path = ROOT) -> str:
    """Sixteen hex digits that name the code of the kernels and of what launches them."""
    return source_digest(root, KERNELS)


def source_digest(root: Path = ROOT, sources: tuple[str, ...] = SOURCES) -> str:
    """Sixteen hex digits that name the code of the kernels, the package and their build."""
    files = [
        path
        for source in sources
        for path in ([root / source] if source.endswith(".py") else (root / source).rglob("*"))
        if path.suffix in CPP_SUFFIXES | {".py"} and path.is_file() and not path.is_symlink()
    ]
    listing = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = content_digest(path.read_text(encoding="utf-8"), path.suffix)
        listing.update(f"{content}  {name}\n".encode())
    return listing.hexdigest()[:16]


def main() -> None:
    digests = {"kernels": kernel_digest, "package": source_digest}
    for name in sys.argv[1:]:
        if name not in digests:
            sys.exit(f"{name!r} is neither of {', '.join(digests)}")
        print(digests[name]())
    if not sys.argv[1:]:
        for name, digest in digests.items():
            print(name, digest())


if __name__ == "__main__":
    main()
