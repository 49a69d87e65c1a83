"""Results as JSON lines: benchmarks/results/<device>/<subject>.jsonl, a line for each cell.

'cell' says what was measured, 'result' what came out, 'setup' where, with which versions and
sources, and when. Of two lines with the same cell the newest counts: files may be put together with
`cat`, and processes on several GPUs may write to the same file. A result goes stale with what it
measures: the speed of kernels with csrc; times of the host and answers of the package with any of
its code (`PACKAGE`).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from digest import ROOT, kernel_digest, source_digest

Json = dict[str, Any]
FOLDER = ROOT / "benchmarks" / "results"
PACKAGE = ("host", "train", "models", "distributed", "support")  # all of the code matters to them


def identity(cell: Json) -> str:
    """What tells a cell from others; fields that are 0, empty or false may be left out."""
    return json.dumps({name: cell[name] for name in sorted(cell) if cell[name]})


def newest(lines: Iterable[Json]) -> list[Json]:
    """The newest line of each cell, in the order in which the cells came."""
    found: dict[str, Json] = {}
    for line in lines:
        old = found.setdefault(identity(line["cell"]), line)
        if line["setup"]["date"] >= old["setup"]["date"]:
            found[identity(line["cell"])] = line
    return list(found.values())


def read(path: Path) -> list[Json]:
    """The newest line of each cell of a file; [] without one."""
    text = path.read_text() if path.is_file() else ""
    return newest(json.loads(line) for line in text.splitlines())


def append(path: Path, lines: list[Json]) -> None:
    """Add lines to a file, in place of older ones of the same cells, and of no others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # processes on several GPUs may write to the same file
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(f"{json.dumps(x)}\n" for x in newest([*read(path), *lines])))
        os.replace(partial, path)  # an interrupted run leaves the old file intact
    finally:
        os.close(folder)


def now() -> str:
    """The time in UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def say(line: str) -> None:
    """Print a line without breaking a progress bar."""
    bar = sys.modules.get("tqdm")
    (bar.tqdm.write if bar else print)(line)


def slug(device: torch.device) -> str:
    """The name of a device's folder under results: 'NVIDIA H200' gives 'nvidia-h200'."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where results go: without one of them nowhere."""
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="add the results to this file (JSON lines)")
    add("--record", type=Path, nargs="?", const=FOLDER, metavar="FOLDER",
        help="add the results to FOLDER/<device>/<subject>.jsonl, by default those of this"
        " repository")  # fmt: skip


class Recorder:
    """Takes the results of one subject, prints them, and writes them where the options say."""

    def __init__(self, subject: str, setup: Json, args: argparse.Namespace) -> None:
        """`setup`: of common.describe_setup."""
        self.setup, self.device = setup, torch.device(args.device)
        self.path: Path | None = args.out
        if args.record is not None:
            self.path = args.record / slug(self.device) / f"{subject}.jsonl"
        self.lines: list[Json] = []

    def add(self, cell: Json, result: Json, **more: object) -> Json:
        """Print and write a result at once; `more` goes to its setup. Returns the line."""
        line = {"cell": cell, "result": result, "setup": self.setup | {"date": now()} | more}
        line = json.loads(json.dumps(line))
        self.lines.append(line)
        show(words(cell), result)
        if self.path is not None:
            append(self.path, [line])
        return line

    def close(
        self, failed: Callable[[Json], object] = lambda result: False, missing: Json | None = None
    ) -> int:
        """Say where the results are, and why peers are missing. Returns the exit status of the
        script: 1 if one of the results `failed`."""
        for name, reason in (missing or {}).items():
            print(f"  not importable: {name}: {reason}")
        where = f"written to {self.path}" if self.path else "not written (--record, --out)"
        about = [f"{name} {self.setup[name]}" for name in ("torch", "kernels", "digest")]
        print(f"\n{self.setup['device']}, {', '.join(about)}: {len(self.lines)} cells, {where}")
        return int(any(failed(line["result"]) for line in self.lines))


def words(cell: Json) -> str:
    """A cell in a line."""
    shown = {name: x for name, x in cell.items() if x}
    return ", ".join(x if isinstance(x, str) else name if x is True else f"{name} {x}"
                     for name, x in shown.items())  # fmt: skip


def show(name: str, result: Json, indent: str = "") -> None:
    """Print a result: its numbers and reasons in a line, and below it its parts that have some."""
    plain = {key: x for key, x in result.items() if not isinstance(x, (dict, list))}
    values = (
        f"{key} {x:.6g}" if isinstance(x, float) else f"{key} {x}" for key, x in plain.items()
    )
    if name or plain:
        say(f"{indent}{name:<{34 - len(indent)}}  {'  '.join(values)}".rstrip())
    for part, inner in result.items():
        if isinstance(inner, dict) and part != "answers":
            show(part, inner, indent + "  ")


# ----------------------------------------------------------------------------------------- reading
def flat(line: Json) -> Json:
    """A line's cell and result in one, beside its setup."""
    return line["cell"] | line["result"] | {"setup": line["setup"]}


def load(subject: str, folder: Path) -> list[Json]:
    """The rows of a subject of one device, each a cell with its results; [] without any."""
    return [flat(line) for line in read(folder / f"{subject}.jsonl")]


@functools.lru_cache
def _digest_now(name: str) -> str:
    return source_digest() if name == "digest" else kernel_digest()


def is_current(subject: str, setup: Json) -> bool:
    """Whether a result belongs to the code that it depends on as it is now."""
    name = "digest" if subject in PACKAGE else "kernels"
    return bool(setup[name] == _digest_now(name))
