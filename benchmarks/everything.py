"""All that README and docs show, measured again on this GPU, and what moved since it was recorded.

    make bench                          # within nine minutes on an H200
    python benchmarks/everything.py --only compare io
    python benchmarks/everything.py --against HEAD~5    # what moved since then; measures nothing

Each benchmark is a program of its own and writes its result file as it would alone; those that time
nothing run side by side. Peers that are packages of their own, flash-attn 4 among them, are
measured where they are installed. Then report.py writes the tables and figures. Last come the
numbers that moved: each number of a new result file beside the same one in the file of before,
where they differ by more than what runs differ by (``LIMITS``). Exit status 1 if a benchmark
failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from common import Json

# In this order, with the arguments that make them fit into nine minutes together, flash-attn 4's
# compilation included.
RUNS: dict[str, tuple[str, ...]] = {
    "support": (),
    "numerics": ("--peers", "flash", "cudnn", "efficient"),
    "PTX path": ("--ptx",),
    "io": (),
    "memory": (),
    "compare": ("--brief", "--min-time", "0.03"),
    "few heads": ("--brief", "--min-time", "0.03", "--set", "gqa", "decode", "prefill", "--peers",
                  "flash", "cudnn", "efficient", "standard"),
    "head dims": ("--brief", "--min-time", "0.03", "--d", "96", "192", "--s", "1024", "4096",
                  "16384", "--variants", "fa2", "fa3", "--peers", "flash", "cudnn"),
    "fa1": ("--brief", "--min-time", "0.03", "--d", "128", "--s", "1024", "2048", "--batch", "33",
            "--heads", "8", "--variants", "fa1", "fa2", "--peers", "standard"),
    "host": ("--host", "--peers", "flash", "cudnn"),
    "fp16": ("--brief", "--min-time", "0.03", "--dtype", "fp16", "--d", "128", "--s", "1024",
             "4096", "16384", "--peers", "flash", "cudnn"),
    "options": ("--rounds", "10"),
    "activation": ("--activation",),
    "train": ("--rounds", "2", "--model", "small", "medium", "bert-large", "long-range"),
}  # fmt: skip
# Parts that are not named as their script, which adds to what it has of the same source.
SCRIPTS = dict.fromkeys(("few heads", "head dims", "fa1", "host", "fp16"), "compare") | {
    "PTX path": "support",
    "activation": "train",
}
UNTIMED = ("support", "numerics")  # these run side by side
BESIDE = "PTX path"  # the driver compiles for minutes, on one core; this adds to "support"

# By how much a number has to differ to have moved; of those that are not here none is looked at.
LIMITS = {
    "ms": 0.06, "us": 0.15, "tokens_per_second": 0.06, "ratio": 0.06, "over_dense": 0.06,
    "bytes": 0.02, "hbm_read": 0.05, "hbm_written": 0.05, "sm": 0.02, "model": 0.0,
    "extra_bytes": 0.02, "peak_bytes": 0.02, "exponent": 0.02, "rms": 0.1,
}  # fmt: skip
# What tells one entry of a list from another.
IDENTITY = (
    "model", "variant", "method", "direction", "dtype", "d", "causal", "seqlen", "batch", "heads",
    "seqlen_q", "kv_heads", "distribution", "scale",
)  # fmt: skip
SHOWN = 12


Number = tuple[str, str, float]  # where it stands, which of LIMITS it is, its value


def numbers(value: object, path: tuple[str, ...] = (), kind: str = "") -> Iterator[Number]:
    """Every number of a result that LIMITS knows."""
    if isinstance(value, dict):
        for name, x in value.items():
            named = name if name in LIMITS else kind if kind == "bytes" else ""
            yield from numbers(x, (*path, name), named)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict):
                who = [f"{k} {entry[k]}" for k in IDENTITY if entry.get(k)]
                inner = {k: x for k, x in entry.items() if k not in IDENTITY or k == "model"}
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
            found.append((change, f"{where}: {before[where]:g} -> {x:g} ({change:+.1%})"))
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


def run(names: list[str]) -> list[str]:
    """Run the benchmarks, the timed ones one after the other; returns those that failed."""
    begun: dict[str, float] = {}

    def start(name: str, output: int | None) -> subprocess.Popen[str]:
        begun[name] = time.monotonic()
        script = common.ROOT / "benchmarks" / f"{SCRIPTS.get(name, name)}.py"
        return subprocess.Popen([*(("nice", "-n", "19") if name == BESIDE else ()),
                                 sys.executable, str(script), *RUNS[name]], stdout=output,
                                stderr=None if output is None else subprocess.STDOUT,
                                text=True)  # fmt: skip

    def finish(name: str, benchmark: subprocess.Popen[str]) -> None:
        print(benchmark.communicate()[0] or "", end="")
        status = benchmark.returncode
        seconds = time.monotonic() - begun[name]
        print(f"===== {name}: {seconds:.0f} s, exit status {status}", flush=True)
        failed.extend([name] if status else [])

    failed: list[str] = []
    together = {n: start(n, subprocess.PIPE) for n in names if n in UNTIMED}
    for name, benchmark in together.items():
        print(f"\n===== {name}: {' '.join(RUNS[name])}", flush=True)
        finish(name, benchmark)
    beside = start(BESIDE, subprocess.PIPE) if BESIDE in names else None
    for name in names:
        if name not in together and name != BESIDE:
            print(f"\n===== {name}: {' '.join(RUNS[name])}", flush=True)
            finish(name, start(name, None))
    if beside is not None:
        print(f"\n===== {BESIDE}", flush=True)
        finish(BESIDE, beside)
    return failed


def main() -> int:
    """Measure, write the tables and figures, and say what moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--against", metavar="REVISION", help="only compare, with that revision's")
    parser.add_argument("--gpu", help="folder under benchmarks/results, default: this GPU's")
    args = parser.parse_args()
    if args.gpu is None and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --gpu and --against compare recorded results")
    folder = common.RESULTS / (args.gpu or common.slug(torch.device("cuda")))
    started = time.monotonic()
    failed = []
    if args.against:
        old = committed(folder, args.against)
    else:
        old = snapshot(folder)
        failed = run(args.only)
        report = common.ROOT / "benchmarks" / "report.py"
        failed += ["report"] if subprocess.run([sys.executable, str(report)]).returncode else []
    new = snapshot(folder)
    print("\n===== what moved")
    for name in sorted(old.keys() | new.keys()):
        print_moved(name, old.get(name), new.get(name))
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    if not args.against:
        print(f"\nafter {time.monotonic() - started:.0f} s; tables and figures are written")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
