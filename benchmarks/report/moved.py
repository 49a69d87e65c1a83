"""What moved: each number of a new result file with that of the old file, where they differ by more
than runs differ (``LIMITS``)."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import common
from common import Json

from .tables import number

# By how much a number must differ to have moved; numbers that are not listed here are ignored.
LIMITS = {
    "ms": 0.06, "us": 0.15, "tokens_per_second": 0.06, "ratio": 0.06, "over_dense": 0.06,
    "bytes": 0.02, "hbm_read": 0.05, "hbm_written": 0.05, "sm": 0.02, "model": 0.0,
    "extra_bytes": 0.02, "peak_bytes": 0.02, "exponent": 0.02, "rms": 0.1, "rmse": 0.1,
}  # fmt: skip
# What tells one entry of a list from another.
IDENTITY = (
    "model", "variant", "method", "direction", "dtype", "d", "causal", "seqlen", "batch", "heads",
    "seqlen_q", "kv_heads", "d_v", "window", "sustained", "graph", "distribution", "scale",
    "kind", "rows", "ranks", "provider", "set",
)  # fmt: skip
SHOWN = 12


Number = tuple[str, str, float]  # where it is, which of LIMITS applies, its value


def numbers(value: object, path: tuple[str, ...] = (), kind: str = "") -> Iterator[Number]:
    """Every number of a result that LIMITS knows."""
    if isinstance(value, dict):
        for name, x in value.items():
            named = name if name in LIMITS else kind if kind == "bytes" else ""
            yield from numbers(x, (*path, name), named)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict):
                # "model" is whose shape it is, or what a model of the cost says.
                names = {k: entry[k] for k in IDENTITY if entry.get(k)}
                if not isinstance(names.get("model", ""), str):
                    del names["model"]
                who = [f"{k} {x}" for k, x in names.items()]
                inner = {k: x for k, x in entry.items() if k not in names}
                yield from numbers(inner, (*path, " ".join(who)))
    elif kind and isinstance(value, int | float) and not isinstance(value, bool):
        yield ", ".join(path), kind, float(value)


def moved(old: Json, new: Json) -> tuple[list[tuple[float, str]], list[float]]:
    """(change, line) of each number that moved, the largest first, and all changes of times."""
    before = {where: x for where, _, x in numbers(old)}
    found, changes = [], []
    for where, kind, x in numbers(new):
        if where not in before or before[where] == x == 0:
            continue
        change = x / before[where] - 1 if before[where] else float("inf")
        if kind in ("ms", "us"):
            changes.append(change)
        if abs(change) > LIMITS[kind]:
            values = f"{number(before[where], 6)} -> {number(x, 6)}"
            found.append((change, f"{where}: {values} ({change:+.1%})"))
    return sorted(found, key=lambda f: -abs(f[0])), changes


def answers(value: object, path: tuple[str, ...] = ()) -> dict[str, object]:
    """The leaves of what has no speeds: support.json's answers, tests.json's counts."""
    if not isinstance(value, dict):
        return {", ".join(path): value}
    return {k: v for name, x in value.items() for k, v in answers(x, (*path, name)).items()}


def print_moved(name: str, old: Json | None, new: Json | None) -> None:
    """What moved in one result file."""
    if old is None or new is None or old == new:
        words = "gone" if new is None else "new" if old is None else "not measured again"
        print(f"\n{name}: {words}")
        return
    found, changes = moved(old, new)
    setup = [f"{k} {old.get(k)} -> {new.get(k)}" for k in common.SAME_SETUP
             if old.get(k) != new.get(k)]  # fmt: skip
    total = sum(1 for _ in numbers(new))
    words = f"{len(found)} of {total} numbers moved" if total else "measured again"
    print(f"\n{name}: {words}" + "".join(f"; {s}" for s in setup))
    if changes:
        print(f"  times: median {statistics.median(changes):+.1%}, from {min(changes):+.1%}"
              f" to {max(changes):+.1%}")  # fmt: skip
    for _, line in found[:SHOWN]:
        print(f"  {line}")
    for part in ("support", "counts", "tools"):
        before, after = (answers(x.get(part, {})) for x in (old, new))
        for where in sorted(before.keys() | after.keys()):
            if before.get(where) != after.get(where):
                print(f"  {where}: {before.get(where)} -> {after.get(where)}")
    if len(found) > SHOWN:
        print(f"  and {len(found) - SHOWN} more")


def snapshot(folder: Path) -> dict[str, Json]:
    """The result files of a GPU as they are now."""
    return {p.name: found for p in sorted(folder.glob("*.json")) if (found := common.read_json(p))}


def committed(folder: Path, revision: str) -> dict[str, Json]:
    """The result files of a GPU as they were at a revision."""
    place = folder.relative_to(common.ROOT).as_posix()

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=common.ROOT, capture_output=True, text=True,
                              check=True)  # fmt: skip
        return done.stdout

    files = git("ls-tree", "--name-only", revision, f"{place}/").split()
    return {Path(f).name: json.loads(git("show", f"{revision}:{f}"))
            for f in files if f.endswith(".json")}  # fmt: skip
