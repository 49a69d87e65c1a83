"""Adds the result files of another run to those here.

    python benchmarks/merge.py FOLDER      # FOLDER/<device>/*.json, as in benchmarks/results
    python benchmarks/merge.py FOLDER --before FOLDER      # with the results that it began with

For benchmarks that ran at the same time on several GPUs, each in a checkout of its own
(evidence.sh). Cells of compare*.json and train.json with the same device, versions and source are
added to those here, or replace them if they are newer. So do the other parts of these files, and
those of numerics.json and support.json. They have no dates: with --before a part that the other run
only carries along is told from one that it has measured. Any other file replaces the one here if it
is newer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import common
from cells import key
from common import Json, say

Merge = Callable[[Json, Json, Json], Json]
WITH_CELLS = ("compare.json", "compare_fp8.json", "train.json")
WITH_PARTS = ("numerics.json", "support.json")  # which parts of everything.py add to
OF_MANY = ("labels", "versions", "support")  # parts to each of which several runs add


def union(old: Json, new: Json, before: Json) -> Json:
    """All of both; where they differ, what was measured since `before`, or else the newer."""
    found = old | new
    for parts in (old, new):
        found |= {name: x for name, x in parts.items() if (name, x) not in before.items()}
    return found


def with_parts(here: Json, other: Json, before: Json) -> Json:
    """A file with the parts of another one of the same setup; both began with `before`."""
    both = sorted((here, other), key=lambda result: result["date"])
    inner = {
        name: union(*(result.get(name, {}) for result in (*both, before)))
        for name in OF_MANY
        if name in here or name in other
    }
    return union(*both, before) | inner


def with_cells(here: Json, other: Json, before: Json) -> Json:
    """The same, with the cells of both."""
    cells: dict[tuple[object, ...], Json] = {}
    for cell in [*here["cells"], *other["cells"]]:
        if cell["date"] >= cells.setdefault(key(cell), cell)["date"]:
            cells[key(cell)] = cell
    return with_parts(here, other, before) | {"cells": list(cells.values())}


def merge(source: Path, target: Path, begun_with: Path | None = None) -> None:
    """Add one result file to another, which may not exist."""
    here, other = common.read_json(target), common.read_json(source)
    before = common.read_json(begun_with) if begun_with else None
    if other is None or other in (here, before):
        return
    if before is None or not common.same_setup(before, other):
        before = {}
    adds: dict[str, Merge] = dict.fromkeys(WITH_CELLS, with_cells)
    adds |= dict.fromkeys(WITH_PARTS, with_parts)
    if target.name in adds and here is not None and common.same_setup(here, other):
        common.write_json(target, adds[target.name](here, other, before))
    elif here is None or here["date"] < other["date"]:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    else:
        return
    say(f"merged: {target}")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="the results that the other run began with")
    args = parser.parse_args()
    for source in sorted(args.folder.glob("*/*.json")):
        name = source.relative_to(args.folder)
        merge(source, common.RESULTS / name, args.before / name if args.before else None)


if __name__ == "__main__":
    main()
