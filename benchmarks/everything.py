"""Measures again on this GPU all that README and docs show, and prints what moved.

    make bench                          # within nine minutes on an H200
    python benchmarks/everything.py --only compare io
    python benchmarks/everything.py --only models sustained    # shapes of models; the power limit
    python benchmarks/everything.py --only fp8 "fp8 errors" "fp8 model"    # FP8: three minutes
    python benchmarks/everything.py --minutes 9 --only train llama
    python benchmarks/everything.py --against HEAD~5    # what moved since then; measures nothing

Each benchmark is a separate program and writes its result file as when it is run by itself; those
that time nothing run in parallel. After --minutes none begins, and those of compare.py and train.py
end early, with what they have measured. Peers that are separate packages, such as flash-attn 4, are
measured where they are installed. Then report/ writes the tables and figures, unless with
--no-report. Last come the numbers that moved (report/moved.py). Exit status 1 if a benchmark
failed.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time

import common
import torch
from report.moved import committed, print_moved, snapshot

# In this order, with the arguments with which all take nine minutes, including flash-attn 4's
# compilation.
RUNS: dict[str, tuple[str, ...]] = {
    "support": (),
    "numerics": ("--peers", "flash", "cudnn", "efficient"),
    "PTX path": ("--ptx",),
    "io": (),
    "memory": (),
    "compare": ("--brief", "--min-time", "0.03"),
    "few heads": ("--brief", "--min-time", "0.03", "--set", "gqa", "decode", "chunks", "prefill",
                  "--peers", "flash", "cudnn", "efficient", "standard"),
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
    "models": ("--min-time", "0.03", "--set", "models", "--variants", "fa2", "fa3", "--peers",
               "flash", "cudnn", "flash_attn_4"),
    "sustained": ("--sustained", "0.8", "--s", "2048", "4096", "8192", "16384", "--variants", "fa3",
                  "--peers", "cudnn", "flash_attn_4"),
    "mqa": ("--min-time", "0.03", "--set", "mqa", "--variants", "fa3", "--peers", "flash", "cudnn",
            "flash_attn_4"),
    "latency": ("--set", "latency", "--sustained", "0.3", "--graph", "--variants", "fa3", "--peers",
                "flash", "cudnn"),
    "neighbors": (),
    "llama": ("--rounds", "2", "--model", "llama", "--providers", "fa3", "fa2", "sdpa", "flash",
              "flash_attn_4"),
    "fp8_quantize": (),
    "fp8": ("--set", "fp8", "--min-time", "0.03", "--peers", "cudnn", "flash_attn_4"),
    "fp8 errors": ("--fp8",),
    "fp8 model": ("--fp8",),
}  # fmt: skip
ON_REQUEST = (
    "models",
    "sustained",
    "mqa",
    "latency",
    "neighbors",
    "llama",
    "fp8_quantize",
    "fp8",
    "fp8 errors",
    "fp8 model",
)  # by --only: they do not fit into the nine minutes
# Parts that are not named as their script, which adds to what it has of the same source.
SCRIPTS = dict.fromkeys(
    (
        "few heads",
        "head dims",
        "fa1",
        "host",
        "fp16",
        "models",
        "sustained",
        "mqa",
        "latency",
        "fp8",
    ),
    "compare",
) | {
    "PTX path": "support",
    "activation": "train",
    "fp8 errors": "numerics",
    "fp8 model": "train",
    "llama": "train",
}
BOUNDED = ("compare", "train")  # the scripts that take --minutes
UNTIMED = ("support", "numerics")  # these run in parallel
BESIDE = "PTX path"  # the driver compiles for minutes, on one core; this adds to "support"


def run(names: list[str], minutes: float = math.inf) -> list[str]:
    """Run the benchmarks, the timed ones one after another; returns those that failed, or that
    there was no time for."""
    begun: dict[str, float] = {}
    end = time.monotonic() + 60 * minutes

    def start(name: str, output: int | None) -> subprocess.Popen[str]:
        begun[name] = time.monotonic()
        script = SCRIPTS.get(name, name)
        left = f"{(end - begun[name]) / 60:.2f}"
        return subprocess.Popen([*(("nice", "-n", "19") if name == BESIDE else ()),
                                 sys.executable, str(common.ROOT / "benchmarks" / f"{script}.py"),
                                 *RUNS[name],
                                 *(("--minutes", left) if script in BOUNDED else ())],
                                stdout=output,
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
            if time.monotonic() > end:
                print(f"\n===== {name}: left out, no time", flush=True)
                failed.append(name)
                continue
            print(f"\n===== {name}: {' '.join(RUNS[name])}", flush=True)
            finish(name, start(name, None))
    if beside is not None:
        print(f"\n===== {BESIDE}", flush=True)
        finish(BESIDE, beside)
    return failed


def main() -> int:
    """Measure, write the tables and figures, and say what moved."""
    parser = common.parser(__doc__)
    usual = [name for name in RUNS if name not in ON_REQUEST]
    parser.add_argument("--only", nargs="*", default=usual, choices=list(RUNS))
    parser.add_argument("--against", metavar="REVISION", help="only compare, with that revision's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later")
    parser.add_argument("--no-report", action="store_true", help="no tables and figures")
    parser.add_argument("--gpu", help="folder under benchmarks/results, default: this GPU's")
    args = parser.parse_args()
    if args.gpu is not None and args.against is None:
        parser.error("--gpu goes with --against: what is measured is this GPU")
    if args.gpu is None and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --gpu with --against compares recorded results")
    folder = common.RESULTS / (args.gpu or common.slug(torch.device("cuda")))
    started = time.monotonic()
    failed = []
    if args.against:
        old = committed(folder, args.against)
    else:
        old = snapshot(folder)
        failed = run(args.only, args.minutes)
        if not failed and set(args.only) >= set(usual) and args.minutes == math.inf:
            shutil.copy(folder / "compare.json", folder / "compare_full.json")
        report = [sys.executable, "-m", "report"]
        here = common.ROOT / "benchmarks"
        if not args.no_report:
            failed += ["report"] if subprocess.run(report, cwd=here).returncode else []
    new = snapshot(folder)
    print("\n===== what moved")
    for name in sorted(old.keys() | new.keys()):
        print_moved(name, old.get(name), new.get(name))
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    if not args.against:
        print(f"\nafter {time.monotonic() - started:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
