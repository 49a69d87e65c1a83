"""Measures on this GPU what README and docs show.

    make bench                          # within nine minutes on an H200
    python benchmarks/everything.py --record --only compare io    # into benchmarks/results
    python benchmarks/everything.py --record FOLDER --only models sustained
    python benchmarks/everything.py --only fp8 "fp8 errors" "fp8 model"    # only prints
    python benchmarks/everything.py --record --minutes 9 --only train llama

Each part of everything.toml is a run of a script. With --record, results go to a folder's
<device>/<subject>.jsonl as soon as they are there, and those of other cells stay: parts may run at
the same time on several GPUs, with a CUDA_VISIBLE_DEVICES each. Without it nothing is written.
After --minutes no part begins, and compare.py and train.py end early. Peers that are separate
packages, such as flash-attn 4, are measured if they are installed. Exit status 1 if a part failed.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time

import common
import results
import torch
from cells import tomllib
from common import ROOT, Json

PARTS: dict[str, Json] = tomllib.loads((ROOT / "benchmarks" / "everything.toml").read_text())
BOUNDED = ("compare", "train")  # the scripts that know --minutes


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


def main() -> int:
    """Measure all that is asked for."""
    parser = common.parser(__doc__)
    usual = [name for name, part in PARTS.items() if not part.get("on_request")]
    parser.add_argument("--only", nargs="*", default=usual, choices=list(PARTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later")
    results.add_output(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    given = ["--record", str(args.record)] if args.record else []
    failed = run(args.only, [*given, *(["--out", str(args.out)] if args.out else [])], args.minutes)
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
