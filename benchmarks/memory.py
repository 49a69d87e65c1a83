"""Peak extra memory of attention, forward and backward, from S = 1k up to where a method stops.

    python benchmarks/memory.py               # on the GPU
    python benchmarks/memory.py --device cpu  # a smoke test, which counts no bytes

For each variant the growth is fitted: the exponent is the slope of log(bytes) over log(S), and
must stay under 1.1 (the papers' O(N) extra memory); standard attention's is near 2. A method stops
where it runs out of memory ('stopped'), at the longest S, or where a call would take longer than
2.5 seconds ('slow'): what grows linearly here grows quadratically in time.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time

import common
import torch
from common import Json
from providers import Provider, Workload, attempt, collect, command_line, running

EXPONENT_LIMIT, LIMIT = 1.1, 2.5
SHAPE = {"batch": 1, "heads": 4, "d": 128, "causal": True}
PEERS_ASKED = ("flash", "cudnn", "efficient", "standard")
DIRECTIONS = ("forward", "both")  # both: forward and backward, with what is saved between


def exponent(points: dict[int, int]) -> float:
    """The slope of log(bytes) over log(S), of two lengths or more: 1 is linear, 2 quadratic."""
    logs = [[math.log(max(x, 1)) for x in values] for values in (points, points.values())]
    return round(statistics.linear_regression(*logs).slope, 4)


def measure(provider: Provider, direction: str, args: argparse.Namespace) -> Json:
    """Bytes per sequence length, until a length no longer fits or runs, and the fit."""
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    points: dict[int, int] = {}
    end, seconds = Json(), 0.0
    for seqlen in sorted(args.s):
        expected = seconds * (seqlen / max(points, default=seqlen)) ** 2
        if expected > LIMIT:
            end = {"slow": f"S = {seqlen}: a call would take about {expected:,.1f} s"}
            break
        work = Workload((1, seqlen, SHAPE["heads"], SHAPE["d"]), dtype, device)

        def peak(work: Workload = work) -> tuple[int, float]:
            def both() -> object:
                return work.backward(provider, SHAPE["causal"])()

            call = work.forward(provider, SHAPE["causal"]) if direction == "forward" else both
            call()  # the first call may set up what stays, such as a library's workspace
            gc.collect()
            started = time.perf_counter()
            size = common.peak_extra_memory(call, device)
            return size, time.perf_counter() - started

        found, reason = attempt(peak)
        del work, peak
        common.free_memory(device)
        if found is None:
            why = reason["skipped"]
            end = {"refused": why} if "refused" in reason else {"stopped": f"S = {seqlen}: {why}"}
            break
        points[seqlen], seconds = found
    return {"bytes": points, **({"exponent": exponent(points)} if len(points) > 1 else {}), **end}


def is_linear(result: Json) -> bool:
    """Whether memory was measured to grow linearly, as far as the call runs."""
    grows = "stopped" in result or result.get("exponent", math.inf) >= EXPONENT_LIMIT
    return "refused" in result or not grows


def main() -> int:
    parser = command_line(__doc__, PEERS_ASKED)
    parser.add_argument("--s", nargs="*", type=int, help="lengths, default 1k, 2k, ... 128k")
    args = parser.parse_args()
    recorder = common.begin("memory", args)
    device = recorder.device
    lengths = range(10, 18) if device.type == "cuda" else range(6, 13)  # 2^17 = 128k
    args.s = args.s or [1 << n for n in lengths]
    providers, missing = collect(args.variants or running(device), args.peers)
    jobs = [(provider, direction) for provider in providers for direction in DIRECTIONS]
    not_linear = []
    for provider, direction in common.progress(jobs, len(jobs), "memory"):
        result = measure(provider, direction, args)
        recorder.add({"provider": provider.name, "direction": direction} | SHAPE, result)
        if provider.ours and not is_linear(result):
            not_linear.append(f"{provider.name} {direction}")
    recorder.close(missing=missing)
    if not_linear:
        print(f"NOT LINEAR (exponent {EXPONENT_LIMIT} or more, or stopped): {not_linear}")
    return int(bool(not_linear))


if __name__ == "__main__":
    sys.exit(main())
