"""Speed of flash_ext's variants beside their peers, forward and backward.

    python benchmarks/compare.py                                 # the standard grid, everything
    python benchmarks/compare.py --variants fa2 --peers flash    # under a minute on an H200
    python benchmarks/compare.py --d 96 192                      # the grid at other head dims
    python benchmarks/compare.py --dtype bf16 fp16
    python benchmarks/compare.py --set gqa decode prefill   # grouped heads, few queries, one prompt
    python benchmarks/compare.py --set models                    # shapes of real models (models.py)
    python benchmarks/compare.py --set fp8                       # FP8 forward, beside bf16
    python benchmarks/compare.py --sustained                     # back to back, at the power limit
    python benchmarks/compare.py --s 4096 --heads 32 --kv-heads 4 --sq 128
    python benchmarks/compare.py --filter 'd=128,causal,fwd,S>=2048' --rounds 20
    python benchmarks/compare.py --host                          # only the CPU's time per call
    python benchmarks/compare.py --device cpu                    # a smoke test

The standard grid is bf16, 16,384 tokens, hidden size 2048, head dims 64, 128 and 256, S from 512
to 16,384, causal and full: 72 cells. There are 2048 // d heads, also where d does not divide 2048:
21 at d 96, 10 at d 192. A cell's FLOPs are 4 B H S S D, halved when causal, times 2.5 for
backward. No provider is timed before its results agree with float32 standard attention. Beside each
cell stand the SM clock and the power that nvidia-smi saw meanwhile.

--set fp8 is the forward in FP8, quantization not timed: fa3 with output in bfloat16 and cuDNN
through nvidia-cudnn-frontend (imported as ``cudnn``, where it can be) with output in FP8, beside
fa3 and its peers in bfloat16 on the inputs before quantization. Providers of FP8 are held against
float32 standard attention of what the FP8 numbers stand for.

With --sustained each call runs back to back for a second or more, as in training, where the GPU
comes to its power limit; clock, power and energy per call are those of that time. With --graph too
the calls are those of a CUDA graph, for kernels that are shorter than a launch. Such cells stand
beside the others. The best peer of a model's shape is the fastest that was measured and took it.

The last lines say whether each variant reaches its goal on the standard grid: fa2 over SDPA flash,
fa3 over the best peer, the faster of cuDNN and flash-attn 4 in each cell. Where flash-attn 4 cannot
run, its time is cuDNN's over the ratio in results/<device>/recorded_peers.json; such results are
marked "recorded".

Results go to benchmarks/results/<device>/compare.json, those of --set fp8, which goes alone, to
compare_fp8.json; those of each shape as soon as they are there. A run with the same device,
versions and source digest adds its cells to that file or replaces them, each cell as a whole,
because a ratio is meaningful only within one process; any other run starts a new file. After
--minutes no shape begins: what is left out keeps what the file has of it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict

import common
import host
import torch
from cells import (
    Cell,
    add_grid,
    grid,
    key,
)
from common import Json, say
from console import print_fp8, print_shapes, print_tables
from fp8_providers import FP8, FP8_PROVIDERS
from providers import (
    BEST,
    BEST_LABEL,
    PEERS,
    Provider,
    Refused,
    Workload,
    collect,
    command_line,
    relative_error,
    running,
    variant,
    versions,
    wrong,
)
from ratios import GOALS, fp8_findings, verdict, with_best
from timing import METHOD, Timer

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
    add("--host", action="store_true", help="only the CPU's time per call, at a tiny shape")
    add("--min-time", type=float, default=0.1, help="seconds of calls per provider and cell")
    add("--rounds", type=int, help="calls per provider and cell, in place of --min-time")
    add("--minutes", type=float, default=math.inf, help="begin no shape later")
    add("--skip-slow", type=float, nargs="?", const=100.0, metavar="MS",
        help="leave out what takes longer per call than this (100 ms if not said)")  # fmt: skip
    add("--brief", action="store_true", help="print speeds and mean ratios only")
    add("--seed", type=int, default=0)
    add("--out", help="result file, default benchmarks/results/<device>/compare[_fp8].json")
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
                self.release()
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

    def release(self) -> None:
        """Give unused cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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


def main() -> int:
    """Run; the exit status is 1 if a variant of flash_ext was wrong or failed somewhere."""
    args = parse()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore")  # SDPA explains there what it then raises
    cells = [] if args.host else list(grid(args))
    if not cells and not args.host:
        raise SystemExit("no cell left: see --filter, --causal, --full, --fwd, --bwd")
    only_fp8 = bool(cells) and all(c.dtype == FP8 for c in cells)
    if not only_fp8 and any(c.dtype == FP8 for c in cells):
        raise SystemExit("--set fp8 goes alone: its results have a file of their own")
    args.variants = args.variants or running(torch.device(args.device))
    peers = [p for p in args.peers if p in host.PEERS_TIMED] if args.host else args.peers
    providers, missing = collect(args.variants, peers)
    providers[:0] = FP8_PROVIDERS if only_fp8 else ()
    if args.host:
        providers.insert(0, variant("auto"))
    bench = Bench(args, providers)
    name = "compare_fp8.json" if only_fp8 else "compare.json"
    path = common.result_path(bench.device, name, args.out)
    result = common.describe_setup(bench.device) | {
        "method": METHOD,
        "extra_bytes": common.EXTRA_MEMORY,
        "power": common.ClockLog.FIELDS["power_w"],
        "not_importable": missing,
        "labels": {p.name: p.label for p in providers},
    }
    old = {"cells": [], "labels": {}} | common.earlier(path, result)
    kept = {key(c): c for c in old["cells"]}
    result["labels"] = old["labels"] | result["labels"]
    result["versions"] = old.get("versions", {}) | versions(providers)
    recorded = common.read_json(common.result_path(bench.device, "recorded_peers.json"))

    measured: list[Json] = []
    shapes: dict[Cell, list[Cell]] = {}
    for cell in cells:
        shapes.setdefault(Cell(**(asdict(cell) | {"direction": "forward"})), []).append(cell)

    def store() -> list[Json]:
        everything = sorted((kept | {key(c): c for c in measured}).values(), key=key)
        result["seconds"] = round(time.monotonic() - started, 1)
        common.write_json(path, result | {"cells": everything})
        return everything

    def run() -> Iterator[tuple[Cell, Json]]:
        for begun, same_shape in enumerate(shapes.values()):
            if time.monotonic() - started > 60 * args.minutes:
                say(f"left out, no time: {len(shapes) - begun} of {len(shapes)} shapes")
                return
            yield from bench.shape(same_shape)
            store()
            bench.release()  # one shape's graphs must not crowd out the next

    if "host" in old:
        result["host"] = old["host"]
    try:
        for cell, results in common.progress(run(), len(cells), "cells"):
            state = {"gpu": bench.clocks} if bench.clocks else {}
            measured.append(asdict(cell) | {"date": common.now()} | state | {"providers": results})
        if args.host:
            result["host"] = host.measure(bench.timer, providers)
    finally:  # also what an interrupted run has measured
        bench.log.close()
        if bench.device.type == "cuda":
            result["nvidia_smi_at_end"] = common.nvidia_smi(bench.device)
        everything = store()
    print(f"{result['device']}, torch {result['torch']}, source {result['digest']}")
    labels = {p.name: p.label for p in providers} | {BEST: BEST_LABEL}
    in_fp8 = [c for c in measured if c["dtype"] == FP8]
    usual = [c for c in measured if not c["model"] and not c["sustained"] and c not in in_fp8]
    if usual:
        print_tables(with_best(usual, recorded), labels, args.brief)
    if others := [c for c in measured if c not in usual and c not in in_fp8]:
        print_shapes(others, labels)
    print_fp8(in_fp8, labels)
    if args.host:
        host.show(result["host"], result["labels"])
    for name, reason in missing.items():
        print(f"  not importable: {name}: {reason}")
    print(f"\nwritten: {path}, after {result['seconds']:.0f} s")
    for goal in GOALS if len(in_fp8) < len(measured) else ():
        print(verdict(goal, with_best(everything, recorded)))
    for finding in fp8_findings(everything) if in_fp8 else ():
        print(finding)
    bad = [c for c in measured for p in providers
           if p.ours and (r := c["providers"].get(p.name, {})).get("skipped")
           and not r.get("refused") and "--skip-slow" not in r["skipped"]]  # fmt: skip
    if args.host:
        times = [result["host"][row] for row in host.ROWS.values()]
        bad += [t for t in times if any("skipped" in t[name] for name in args.variants)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
