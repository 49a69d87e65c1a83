"""Measures on this GPU what README and docs show, and prints what moved.

    make bench                          # within nine minutes on an H200
    python benchmarks/everything.py --record --only compare io    # into benchmarks/results
    python benchmarks/everything.py --record FOLDER --only models sustained
    python benchmarks/everything.py --only fp8 "fp8 errors" "fp8 model"    # only prints
    python benchmarks/everything.py --record --minutes 9 --only train llama
    python benchmarks/everything.py --against HEAD~5    # what moved since then; measures nothing

Each part of everything.toml is a run of a script. With --record, results go to a folder's
<device>/<subject>.jsonl as soon as they are there, and those of other cells stay: parts may run at
the same time on several GPUs, with a CUDA_VISIBLE_DEVICES each. Without it nothing is written.
After --minutes no part begins, and compare.py and train.py end early. Peers that are separate
packages, such as flash-attn 4, are measured if they are installed. Last come the numbers that moved
by more than runs differ. Exit status 1 if a part failed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common
import results
import torch
from cells import tomllib
from common import ROOT, Json

PARTS: dict[str, Json] = tomllib.loads((ROOT / "benchmarks" / "everything.toml").read_text())
BOUNDED = ("compare", "train")  # the scripts that know --minutes
# By how much a number must differ to have moved; numbers that are not listed here are ignored.
LIMITS = {"ms": 0.06, "us": 0.15, "tokens_per_second": 0.06, "hbm_read": 0.05, "hbm_written": 0.05,
          "sm": 0.02, "extra_bytes": 0.02, "peak_bytes": 0.02, "exponent": 0.02, "rms": 0.1,
          "rmse": 0.1}  # fmt: skip
SHOWN = 12


def command(name: str, arguments: list[str], minutes: float = math.inf) -> list[str]:
    """The command of a part."""
    part = PARTS[name]
    script = part.get("script", name)
    bound = ["--minutes", f"{minutes:.2f}"] if script in BOUNDED else []
    path = ROOT / "benchmarks" / f"{script}.py"
    return [sys.executable, str(path), *part.get("arguments", ()), *bound, *arguments]


def run(names: list[str], arguments: list[str], minutes: float = math.inf) -> list[str]:
    """Run the parts one after another; returns those that failed or had no time."""
    end = time.monotonic() + 60 * minutes
    failed = []
    for name in names:
        begun = time.monotonic()
        if begun > end:
            print(f"\n===== {name}: left out, no time", flush=True)
            failed.append(name)
            continue
        print(f"\n===== {name}", flush=True)
        status = subprocess.run(command(name, arguments, (end - begun) / 60)).returncode
        print(f"===== {name}: {time.monotonic() - begun:.0f} s, exit status {status}", flush=True)
        failed += [name] if status else []
    return failed


def numbers(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, float]]:
    """(where it is, which of LIMITS applies, the number) of all that LIMITS knows."""
    for name, x in value.items() if isinstance(value, dict) else ():
        if isinstance(x, dict):
            yield from numbers(x, (*path, name))
        elif name in LIMITS and isinstance(x, int | float):
            yield ", ".join((*path, name)), name, float(x)


def moved(old: list[Json], new: list[Json]) -> list[tuple[float, str]]:
    """(change, line) of each number of the same cells that moved, the largest first."""
    before = {results.identity(line["cell"]): dict(
        (where, x) for where, _, x in numbers(line["result"])) for line in old}  # fmt: skip
    found = []
    for line in new:
        values = before.get(results.identity(line["cell"]), {})
        for where, kind, x in numbers(line["result"]):
            if values.get(where) and abs(x / values[where] - 1) > LIMITS[kind]:
                change = x / values[where] - 1
                text = f"{results.words(line['cell'])}: {where} {values[where]:.6g} -> {x:.6g}"
                found.append((change, f"{text} ({change:+.1%})"))
    return sorted(found, key=lambda f: -abs(f[0]))


def print_moved(old: dict[str, list[Json]], new: dict[str, list[Json]]) -> None:
    """What moved in each subject."""
    for name in sorted(n for n in new if new[n] != old.get(n, [])):
        found = moved(old.get(name, []), new[name])
        print(f"\n{name}: {len(new[name])} cells, {len(found)} numbers moved")
        for _, line in found[:SHOWN]:
            print(f"  {line}")


def snapshot(folder: Path) -> dict[str, list[Json]]:
    """The results of a device as they are now."""
    return {path.stem: results.read(path) for path in sorted(folder.glob("*.jsonl"))}


def committed(folder: Path, revision: str) -> dict[str, list[Json]]:
    """The results of a device as they were at a revision."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout  # fmt: skip

    place = folder.relative_to(ROOT).as_posix()
    files = git("ls-tree", "--name-only", revision, f"{place}/").split()
    return {
        Path(f).stem: [json.loads(x) for x in git("show", f"{revision}:{f}").splitlines()]
        for f in files
        if f.endswith(".jsonl")
    }


def main() -> int:
    """Measure, and say what moved."""
    parser = common.parser(__doc__)
    usual = [name for name, part in PARTS.items() if not part.get("on_request")]
    parser.add_argument("--only", nargs="*", default=usual, choices=list(PARTS))
    parser.add_argument("--against", metavar="REVISION", help="only compare, with that revision's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later")
    parser.add_argument("--gpu", help="folder under benchmarks/results, default: this GPU's")
    results.add_output(parser)
    args = parser.parse_args()
    if args.gpu is not None and args.against is None:
        parser.error("--gpu goes with --against: what is measured is this GPU")
    if args.gpu is None and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --gpu with --against compares recorded results")
    folder = (args.record or common.RESULTS) / (args.gpu or results.slug(torch.device("cuda")))
    if args.against:
        print_moved(committed(folder, args.against), snapshot(folder))
        return 0
    old = snapshot(folder)
    given = ["--record", str(args.record)] if args.record else []
    failed = run(args.only, [*given, *(["--out", str(args.out)] if args.out else [])], args.minutes)
    print_moved(old, snapshot(folder))
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
