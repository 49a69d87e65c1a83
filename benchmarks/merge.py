"""Adds the result files of another run to those here.

    python benchmarks/merge.py FOLDER      # FOLDER/<device>/*.json, as in benchmarks/results

For benchmarks that ran at the same time on several GPUs, each in a checkout of its own
(evidence.sh). Cells of compare*.json and train.json with the same device, versions and source are
added to those here, or replace them if they are newer. Parts of numerics.json and support.json
likewise. Any other file replaces the one here if it is newer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import common
from cells import key
from common import Json, say

WITH_CELLS = ("compare.json", "compare_fp8.json", "train.json")
WITH_PARTS = ("numerics.json", "support.json")  # which parts of everything.py add to


def with_cells(here: Json, other: Json) -> Json:
    """A file with the cells of another one of the same setup."""
    cells: dict[tuple[object, ...], Json] = {}
    for cell in [*here["cells"], *other["cells"]]:
        if cell["date"] >= cells.setdefault(key(cell), cell)["date"]:
            cells[key(cell)] = cell
    both = {
        part: here.get(part, {}) | other.get(part, {})
        for part in ("labels", "versions")
        if part in here or part in other
    }
    old, new = sorted((here, other), key=lambda result: result["date"])
    return old | new | both | {"cells": list(cells.values())}


def with_parts(here: Json, other: Json) -> Json:
    """A file of the same setup with the parts that only the other has; the newer one's go first."""
    old, new = sorted((here, other), key=lambda result: result["date"])
    inner = {
        name: old[name] | part
        for name, part in new.items()
        if isinstance(part, dict) and isinstance(old.get(name), dict)
    }
    return old | new | inner


def merge(source: Path, target: Path) -> None:
    """Add one result file to another, which may not exist."""
    here, other = common.read_json(target), common.read_json(source)
    if other is None or here == other:
        return
    adds = dict.fromkeys(WITH_CELLS, with_cells) | dict.fromkeys(WITH_PARTS, with_parts)
    if target.name in adds and here is not None and common.same_setup(here, other):
        common.write_json(target, adds[target.name](here, other))
    elif here is None or here["date"] < other["date"]:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    else:
        return
    say(f"merged: {target}")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for source in sorted(folder.glob("*/*.json")):
        merge(source, common.RESULTS / source.relative_to(folder))


if __name__ == "__main__":
    main()
