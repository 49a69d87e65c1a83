"""Speed of flash_ext's variants beside their peers, forward and backward.

    python benchmarks/compare.py                                 # the standard grid, everything
    python benchmarks/compare.py --variants fa2 --peers flash    # under a minute on an H200
    python benchmarks/compare.py --set gqa models fp8 decode8    # sets of shapes.toml
    python benchmarks/compare.py --sustained                     # back to back, at the power limit
    python benchmarks/compare.py --s 131072 --batch 1 --heads 32 --kv-heads 4 --sq 128
    python benchmarks/compare.py --device cpu                    # a smoke test

The standard grid is bf16, 16,384 tokens, hidden size 2048, head dims 64, 128 and 256 (--d: others),
S from 512 to 16,384, causal and full: 72 cells, with 2048 // d heads. A cell's FLOPs are 4 B H S S
D, halved when causal, times 2.5 for backward. No provider is timed before its results agree with
float32 standard attention.

--set fp8 is the forward in FP8, quantization not timed: fa3, FlashAttention-3's package or
fa3-fwd's build of it, and cuDNN through nvidia-cudnn-frontend, whose output is in FP8 too; beside
them bfloat16 on the inputs before quantization. Results are held against what the FP8 numbers stand
for. --set decode8 is one query in bfloat16 on K and V of 8 bits; bytes per second are those of
bfloat16. With --sustained each call runs back to back, as in training, where the GPU comes to its
power limit. A ratio is meaningful only within one process, so a cell is written as a whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import common
import providers
import torch
from cells import Cell, add_grid, grid
from common import Json
from fp8_providers import PROVIDERS
from providers import PEERS, Provider, Workload, attempt, prepared
from timing import Timer
from torch import Tensor


def parse() -> argparse.Namespace:
    parser = providers.command_line(__doc__, PEERS)
    add = parser.add_argument
    add_grid(parser)
    add("--sustained", type=float, nargs="?", const=1.2, default=0.0, metavar="SECONDS",
        help="each call back to back for so long (1.2 s if not said)")  # fmt: skip
    add("--min-time", type=float, default=0.1, help="seconds of calls per provider and cell")
    add("--rounds", type=int, help="calls per provider and cell, in place of --min-time")
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace, asked: list[Provider]) -> None:
        self.args, self.asked = args, asked
        self.device = torch.device(args.device)
        self.timer = Timer(self.device)

    def shape(self, cells: list[Cell]) -> Iterator[tuple[Cell, Json]]:
        """Measure the directions of one shape on the same inputs."""
        cell = cells[0]
        gradients = any(c.direction == "backward" for c in cells)

        def inputs() -> tuple[Workload, list[Tensor]]:
            work = cell.workload(self.device)
            return work, work.exact(cell.causal, gradients)

        found, reason = attempt(inputs)
        for cell in cells:
            if found is None:  # most often: no memory
                yield cell, {p.name: reason for p in self.asked}
            else:
                work, exact = found
                wanted = exact[:1] if cell.direction == "forward" else exact[1:]
                yield cell, self.cell(cell, work, wanted)

    def cell(self, cell: Cell, work: Workload, exact: list[Tensor]) -> Json:
        """The results of every provider in one cell: numbers, or why there are none."""
        measured: Json = {}

        def prepare(provider: Provider) -> Callable[[], object]:
            make = work.forward if cell.direction == "forward" else work.backward
            call = make(provider, cell.causal)
            got, wanted = call(), work.wanted(provider, exact)
            # Gradients come in the provider's layout, out in ours.
            tensors = map(provider.view, got) if isinstance(got, tuple) else [got]
            pairs = zip(tensors, wanted, strict=True)
            error = providers.check(((x[:, -y.shape[1] :], y) for x, y in pairs), provider.limits)
            del got, tensors, pairs
            extra = common.peak_extra_memory(call, self.device)
            measured[provider.name] = {"extra_bytes": extra, "error": error}
            return call

        makes = {p.name: partial(prepare, p) for p in work.asked(self.asked)}
        calls, results = prepared(makes)
        times, reason = attempt(partial(self.times, cell, calls))
        return results | {n: times[n] | measured[n] if times else reason for n in calls}

    def times(self, cell: Cell, calls: dict[str, Callable[[], object]]) -> Json:
        """Every call's times, or why a call has none."""
        if cell.sustained:
            found = self.timer.sustained(calls, self.args.sustained)
        else:
            found = self.timer.timed(calls, self.args.min_time, self.args.rounds)
        for result in found.values():
            result["tflops"] = round(cell.flops() / result["ms"] * 1e-9, 4)
            if cell.seqlen_q:
                result["tbps"] = round(cell.kv_bytes() / result["ms"] * 1e-9, 4)
        return found


def main() -> int:
    args = parse()
    cells = list(grid(args))
    if not cells:
        raise SystemExit("no cell left: see --causal, --full, --fwd, --bwd")
    args.variants = args.variants or providers.running(torch.device(args.device))
    asked, missing = providers.collect(args.variants, args.peers)
    for dtype in {c.dtype for c in cells} & PROVIDERS.keys():
        asked[:0] = PROVIDERS[dtype]
    bench = Bench(args, asked)
    recorder = common.begin("compare", args)
    shapes: dict[Cell, list[Cell]] = {}
    for cell in cells:
        shapes.setdefault(replace(cell, direction="forward"), []).append(cell)

    def run() -> Iterator[tuple[Cell, Json]]:
        for same_shape in shapes.values():
            yield from bench.shape(same_shape)
            common.free_memory(bench.device)

    for cell, found in common.progress(run(), len(cells), "cells"):
        recorder.add(cell.to_json(), {"providers": found}, **providers.versions(asked))

    def failed(result: Json) -> bool:
        found = [result["providers"].get(p.name, {}) for p in asked if p.ours]
        return any("skipped" in x and not x.get("refused") for x in found)

    return recorder.close(failed, missing)


if __name__ == "__main__":
    sys.exit(main())
