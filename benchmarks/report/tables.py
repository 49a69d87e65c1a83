"""What the parts share: Markdown tables, words, and where results are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import common
import results
from cells import standard_cells, with_best
from common import Json
from providers import DISTRIBUTIONS

NO, UNKNOWN = "–", "not measured yet"
NOWHERE = f"On a GPU: {UNKNOWN}."
Entry = tuple[tuple[str, ...], str, str]  # the words that a line begins with, a column, the text


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A Markdown table; the first ``words`` columns are left-aligned, the others right."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def pivot(head: list[str], entries: Iterable[Entry], first: Iterable[str] = ()) -> str:
    """A table of entries, lines and columns in the order in which they come; '–' where none is.
    Columns of `first` come first."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = dict.fromkeys(first)
    for line, column, text in entries:
        lines.setdefault(line, {})[column] = text
        columns[column] = None
    body = [[*line, *(found.get(c, NO) for c in columns)] for line, found in lines.items()]
    return table([*head, *columns], body, words=len(head))


def select(cells: Iterable[Json], **wanted: object) -> list[Json]:
    """The cells whose entries equal ``wanted``, or are in it if it is a tuple."""
    sets = {key: x if isinstance(x, tuple) else (x,) for key, x in wanted.items()}
    return [c for c in cells if all(c.get(key) in values for key, values in sets.items())]


@functools.lru_cache(maxsize=64)
def _load(subject: str, folder: Path, changed: int) -> list[Json]:
    return results.load(subject, folder)


def load(subject: str, folder: Path) -> list[Json]:
    """The rows of a subject of one GPU: see results.load."""
    path = folder / f"{subject}.jsonl"
    return _load(subject, folder, path.stat().st_mtime_ns) if path.is_file() else []


def speeds(folder: Path) -> list[Json]:
    """The rows of compare.py, with the best peer of each."""
    return [with_best(cell) for cell in load("compare", folder)]


def provenance(rows: list[Json], subject: str = "") -> str:
    """Where numbers come from: versions, dates, and the code that they depend on."""
    setups = [row["setup"] for row in rows]

    def every(name: str, what: Callable[[str], str] = str) -> str:
        found = dict.fromkeys(what(s[name]) for s in setups if s.get(name))
        return ", ".join(sorted(found)) or "not recorded"

    digests = (f"source `{every('digest')}`" if subject in results.PACKAGE
               else f"kernels `{every('kernels')}`")  # fmt: skip
    versions = f"torch {every('torch')}, cuDNN {every('cudnn')}, driver {every('driver')}"
    peers = "".join(f", {package} {every(name)}" for name, package in DISTRIBUTIONS.items()
                    if any(name in s for s in setups))  # fmt: skip
    return f"{versions}{peers}; {every('date', lambda date: str(date)[:10])}; {digests}"


def device_of(folder: Path) -> str:
    lines = (line for path in sorted(folder.glob("*.jsonl")) for line in results.read(path))
    return next((str(line["setup"]["device"]) for line in lines), folder.name)


def gpu_folders(subject: str = "*") -> list[Path]:
    """The devices with results of a subject, the CPU's smoke tests aside; the one with most speeds
    first."""
    folders = [p for p in sorted(common.RESULTS.glob("*")) if p.is_dir() and p.name != "cpu"]
    found = [p for p in folders if any(p.glob(f"{subject}.jsonl"))]
    return sorted(found, key=lambda p: -len(results.read(p / "compare.jsonl")))


def main_gpu() -> Path | None:
    return next(iter(gpu_folders()), None)


def size_name(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def mask_of(cell: Json) -> str:
    return "causal" if cell["causal"] else "full"


def has_grid(folder: Path, direction: str, *names: str) -> list[Json]:
    """The cells of the standard grid in which all of these providers were timed."""
    cells = standard_cells(speeds(folder), direction)
    return [c for c in cells if all("ms" in c["providers"].get(n, {}) for n in names)]
