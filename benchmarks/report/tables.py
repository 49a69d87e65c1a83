"""What the parts share: Markdown tables, words, and where results are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import common
from common import Json

YES, NO, UNKNOWN = "yes", "–", "not measured yet"
NOWHERE = f"On a GPU: {UNKNOWN}."


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A Markdown table; the first ``words`` columns are left-aligned, the others right."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def select(cells: list[Json], **wanted: object) -> list[Json]:
    """The cells whose entries equal ``wanted``, or are in it where it is a tuple."""
    return [
        cell
        for cell in cells
        if all(
            cell[key] in value if isinstance(value, tuple) else cell[key] == value
            for key, value in wanted.items()
        )
    ]


def provenance(result: Json) -> str:
    """Where a result file's numbers come from."""
    versions = [f"torch {result['torch']}"]
    versions += [f"cuDNN {result['cudnn']}"] if result.get("cudnn") else []
    versions += [f"driver {result['driver']}"] if result.get("driver") else []
    return f"{', '.join(versions)}; {result['date'][:10]}; source `{result['digest']}`"


def gpu_folders(name: str = "*") -> list[Path]:
    """The devices with results, the CPU's smoke tests aside.

    `name`: those with a file of this name, since a second GPU need not have everything; all of
    them where none has.
    """
    folders = sorted(p for p in common.RESULTS.glob("*") if p.is_dir() and p.name != "cpu")
    found = [p for p in folders if any(p.glob("*.json"))]
    return [p for p in found if any(p.glob(f"{name}.json"))] or found


def main_gpu() -> Path | None:
    """The GPU of which most is measured. What others lack is not missing: it is read there."""
    folders = gpu_folders()
    return max(folders, key=lambda folder: len(list(folder.glob("*.json")))) if folders else None


def relevant(folder: Path, rows: Iterable[list[str]], column: int) -> list[list[str]]:
    """Of a second GPU only the rows with a measurement in this column."""
    return [row for row in rows if folder == main_gpu() or row[column] not in (UNKNOWN, NO)]


def number(x: float, digits: int = 3) -> str:
    """A number to so many digits, or to all of those before the point; never with an exponent
    because it is large."""
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    return f"{x:,.0f}" if abs(x) >= 10**digits - 0.5 else f"{x:.{digits}g}"


def span(values: list[float], unit: str = "×", digits: int = 3) -> str:
    """The range of some numbers, or the one number that they all are."""
    low, high = (number(x, digits) + unit for x in (min(values), max(values)))
    return low if low == high else f"{low} – {high}"
