"""Measures on this GPU what README and docs show: the commands of everything.toml.

    make bench                          # within nine minutes on an H200
    python benchmarks/everything.py --record --only grid memory    # into benchmarks/results
    python benchmarks/everything.py --record FOLDER --only models mqa
    python benchmarks/everything.py --only fp8 "fp8 errors" "fp8 model"    # only prints

With --record, results go to a folder's <device>/<subject>.jsonl as soon as they are there, and
those of other cells stay: parts may run at the same time on several GPUs, with a
CUDA_VISIBLE_DEVICES each, and what is interrupted keeps what it has. Without it nothing is written.
Peers that are separate packages, such as flash-attn 4, are measured if they are installed. Exit
status 1 if a part failed.
"""

from __future__ import annotations

import subprocess
import sys
import time

import common
import results
import torch
from cells import tomllib
from common import ROOT

COMMANDS = tomllib.loads((ROOT / "benchmarks" / "everything.toml").read_text())
PARTS: dict[str, str] = COMMANDS["usual"] | COMMANDS["request"]


def main() -> int:
    """Run the parts that are asked for, one after another."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS["usual"]), choices=list(PARTS))
    results.add_output(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    given = [f"--{name}={path}" for name in ("record", "out") if (path := getattr(args, name))]
    failed = []
    for name in args.only:
        script, *arguments = PARTS[name].split()
        print(f"\n===== {name}", flush=True)
        begun, path = time.monotonic(), ROOT / "benchmarks" / f"{script}.py"
        status = subprocess.run([sys.executable, str(path), *arguments, *given]).returncode
        print(f"===== {name}: {time.monotonic() - begun:.0f} s, exit status {status}", flush=True)
        failed += [name] if status else []
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
