"""Speed of flash_ext's variants beside their peers, forward and backward.

    python benchmarks/compare.py                                 # the standard grid, everything
    python benchmarks/compare.py --variants fa2 --peers flash    # under a minute on an H200
    python benchmarks/compare.py --d 96 192                      # the grid at other head dims
    python benchmarks/compare.py --dtype bf16 fp16
    python benchmarks/compare.py --set gqa decode prefill   # grouped heads, few queries, one prompt
    python benchmarks/compare.py --set models                    # shapes of real models
    python benchmarks/compare.py --set neighbors --peers         # shapes beside those of tables
    python benchmarks/compare.py --set fp8                       # FP8 forward, beside bf16
    python benchmarks/compare.py --sustained                     # back to back, at the power limit
    python benchmarks/compare.py --s 131072 --batch 1 --heads 32 --kv-heads 4 --sq 128
    python benchmarks/compare.py --filter 'd=128,causal,fwd,S>=2048' --rounds 20
    python benchmarks/compare.py --device cpu                    # a smoke test

The standard grid is bf16, 16,384 tokens, hidden size 2048, head dims 64, 128 and 256, S from 512
to 16,384, causal and full: 72 cells. There are 2048 // d heads, also if d does not divide 2048: 21
at d 96, 10 at d 192. A cell's FLOPs are 4 B H S S D, halved when causal, times 2.5 for backward.
shapes.toml has the other sets. No provider is timed before its results agree with float32 standard
attention. Beside each cell stand the SM clock and the power that nvidia-smi saw meanwhile.

--set fp8 is the forward in FP8, quantization not timed: fa3 with output in bfloat16 and cuDNN
through nvidia-cudnn-frontend (imported as ``cudnn``) with output in FP8, beside fa3 and its peers
in bfloat16 on the inputs before quantization. Providers of FP8 are held against float32 standard
attention of what the FP8 numbers stand for.

With --sustained each call runs back to back for a second or more, as in training, where the GPU
comes to its power limit; clock, power and energy per call are those of that time. With --graph too
the calls are those of a CUDA graph, for kernels that are shorter than a launch.

With --record or --out the results of each shape are written as soon as they are there, each cell as
a whole, because a ratio is meaningful only within one process. After --minutes no shape begins.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import common
import torch
from cells import Cell, add_grid, grid, place
from common import Json, say
from fp8_providers import FP8, FP8_PROVIDERS
from providers import (
    PEERS,
    VARIANTS,
    Provider,
    Refused,
    Workload,
    collect,
    command_line,
    relative_error,
    running,
    versions,
    wrong,
)
from ratios import geometric_mean, ratios
from results import Recorder
from timing import Timer

GRAPH_CALLS = 20
SUSTAINED_SECONDS = 1.2


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PEERS)
    add = parser.add_argument
    add_grid(parser)
    add("--sustained", type=float, nargs="?", const=SUSTAINED_SECONDS, default=0.0,
        metavar="SECONDS", help="each call back to back for so long"
        f" ({SUSTAINED_SECONDS} s if not said)")  # fmt: skip
    add(
        "--graph",
        action="store_true",
        help=f"with --sustained: {GRAPH_CALLS} calls at a time in a CUDA graph; only forward",
    )
    add("--min-time", type=float, default=0.1, help="seconds of calls per provider and cell")
    add("--rounds", type=int, help="calls per provider and cell, in place of --min-time")
    add("--minutes", type=float, default=math.inf, help="begin no shape later")
    add("--skip-slow", type=float, nargs="?", const=100.0, metavar="MS",
        help="leave out what takes longer per call than this (100 ms if not said)")  # fmt: skip
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.graph and not (args.sustained and args.device.startswith("cuda")):
        parser.error("--graph is for --sustained on a GPU")
    return args


class Bench:
    """Measures cells on one device."""

    def __init__(self, args: argparse.Namespace, providers: list[Provider]) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.timer = Timer(self.device)
        self.log = common.ClockLog(self.device)
        self.clocks: dict[str, float] = {}  # and power, while a cell was timed
        self.providers = providers

    def shape(self, cells: list[Cell]) -> Iterator[tuple[Cell, Json]]:
        """Measure the directions of one shape on the same inputs."""
        cell = cells[0]
        try:
            work = cell.workload(self.device)
            exact = work.exact(cell.causal, gradients=any(c.direction == "backward" for c in cells))
        except torch.OutOfMemoryError as error:
            nobody = {"skipped": common.first_line(error)}
            yield from ((cell, {p.name: nobody for p in self.providers}) for cell in cells)
            return
        for cell in cells:
            yield (
                cell,
                self.cell(cell, work, exact[:1] if cell.direction == "forward" else exact[1:]),
            )

    def cell(self, cell: Cell, work: Workload, exact: list[torch.Tensor]) -> Json:
        """The results of every provider in one cell: numbers, or why there are none."""
        calls: dict[str, Callable[[], object]] = {}
        estimates: dict[str, tuple[float, float]] = {}
        results: Json = {}
        for provider in work.asked(self.providers):
            try:
                prepare = work.forward if cell.direction == "forward" else work.backward
                call = prepare(provider, cell.causal)
                whole, block = self.check(call(), provider, work.wanted(provider, exact))
                if bad := wrong(whole, block, provider.limits):
                    say(f"!!! {provider.label}, {cell}: {bad['skipped']} !!!")
                    results[provider.name] = bad
                    continue
                device_seconds, host_seconds = self.timer.estimate(call)
                slow = self.args.skip_slow
                if slow and device_seconds * 1e3 > slow:
                    reason = f"{device_seconds * 1e3:.0f} ms a call, over --skip-slow {slow:g}"
                    results[provider.name] = {"skipped": reason}
                    continue
                extra = common.peak_extra_memory(call, self.device)
            except Refused as refusal:
                results[provider.name] = {"skipped": str(refusal), "refused": True}
                continue
            except Exception as error:  # a peer's failure must not end the run
                results[provider.name] = {"skipped": common.first_line(error)}
                call = None  # a graph that did not fit must not stay
                common.free_memory(self.device)
                continue
            calls[provider.name], estimates[provider.name] = call, (device_seconds, host_seconds)
            results[provider.name] = {"extra_bytes": extra, "error": float(f"{whole:.4g}")}
        try:
            self.add_times(cell, calls, estimates, results)
        except Exception as error:  # most often: out of memory
            for name in calls:
                if "ms" not in results[name]:
                    results[name] = {"skipped": common.first_line(error)}
        return results

    def add_times(
        self,
        cell: Cell,
        calls: dict[str, Callable[[], object]],
        estimates: dict[str, tuple[float, float]],
        results: Json,
    ) -> None:
        """Add every call's times to its results."""
        self.clocks = {}
        if not calls:
            return
        if not cell.sustained:
            self.log.since_last()
            timed = self.timer.compare(calls, estimates, self.args.min_time, self.args.rounds)
            self.clocks = self.log.since_last()
            for name, samples in timed.items():
                summary = samples.summary()
                summary["tflops"] = round(cell.flops() / summary["ms"] * 1e-9, 4)
                if cell.seqlen_q:
                    summary["tbps"] = round(cell.kv_bytes() / summary["ms"] * 1e-9, 4)
                results[name] = summary | results[name]
            return
        at_once = GRAPH_CALLS if cell.graph else 1
        steady: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            try:
                steady[name] = self.timer.in_graph(call, at_once) if cell.graph else call
            except Exception as error:  # a call that no graph can hold
                results[name] = {"skipped": common.first_line(error)}
        seconds = self.args.sustained
        for name, times in self.timer.sustained(steady, estimates, seconds, at_once).items():
            if "skipped" in times:
                results[name] = times
                continue
            tflops = round(cell.flops() / times["ms"] * 1e-9, 4)
            results[name] = times | {"tflops": tflops} | results[name]

    def check(
        self, got: object, provider: Provider, exact: list[torch.Tensor]
    ) -> tuple[float, float]:
        """The largest relative errors, whole and block-wise, over a call's results."""
        if isinstance(got, tuple):  # gradients come in the provider's layout, out in ours
            tensors = [provider.view(x) for x in got]
        else:
            assert isinstance(got, torch.Tensor)
            tensors = [got]
        errors = [
            relative_error(x[:, -want.shape[1] :], want)
            for x, want in zip(tensors, exact, strict=True)
        ]
        return max(e[0] for e in errors), max(e[1] for e in errors)


def print_means(lines: list[Json], names: list[str]) -> None:
    """The geometric mean of each variant's speed over each peer's, and the smallest."""
    cells = [line["cell"] | line["result"] for line in lines]
    for direction, dtype in sorted({(c["direction"], c["dtype"]) for c in cells}, reverse=True):
        same = [c for c in cells if (c["direction"], c["dtype"]) == (direction, dtype)]
        for ours in (n for n in names if n in VARIANTS or "fa3" in n):
            for peer in (n for n in names if names.index(n) > names.index(ours)):
                found = [(r[0], place(c)) for c in same if (r := ratios([c], ours, peer))]
                if found:
                    mean, least = geometric_mean([r for r, _ in found]), min(found)
                    print(f"{dtype} {direction}, {ours} over {peer}: {mean:.3f}x, smallest"
                          f" {least[0]:.3f}x ({least[1]}), {len(found)} cells")  # fmt: skip


def main() -> int:
    """Run; the exit status is 1 if a variant of flash_ext was wrong or failed somewhere."""
    args = parse()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore")  # SDPA explains there what it then raises
    cells = list(grid(args))
    if not cells:
        raise SystemExit("no cell left: see --filter, --causal, --full, --fwd, --bwd")
    args.variants = args.variants or running(torch.device(args.device))
    providers, missing = collect(args.variants, args.peers)
    providers[:0] = FP8_PROVIDERS if any(c.dtype == FP8 for c in cells) else ()
    bench = Bench(args, providers)
    recorder = Recorder("compare", common.describe_setup(bench.device), args)
    shapes: dict[Cell, list[Cell]] = {}
    for cell in cells:
        shapes.setdefault(replace(cell, direction="forward"), []).append(cell)

    def run() -> Iterator[tuple[Cell, Json]]:
        for begun, same_shape in enumerate(shapes.values()):
            if time.monotonic() - started > 60 * args.minutes:
                say(f"left out, no time: {len(shapes) - begun} of {len(shapes)} shapes")
                return
            yield from bench.shape(same_shape)
            common.free_memory(bench.device)  # one shape's graphs must not crowd out the next

    try:
        for cell, found in common.progress(run(), len(cells), "cells"):
            state = {"gpu": bench.clocks} if bench.clocks else {}
            recorder.add(cell.to_json(), state | {"providers": found}, **versions(providers))
    finally:
        bench.log.close()
    print_means(recorder.lines, [p.name for p in providers])
    for name, reason in missing.items():
        print(f"  not importable: {name}: {reason}")
    recorder.close()
    bad = [r for line in recorder.lines for p in providers
           if p.ours and (r := line["result"]["providers"].get(p.name, {})).get("skipped")
           and not r.get("refused") and "--skip-slow" not in r["skipped"]]  # fmt: skip
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
