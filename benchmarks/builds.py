"""Before and after: two builds of flash_ext in turns on one device, cell by cell.

    pip install --target ../before flash_ext-*.whl           # or a checkout where it was built
    python benchmarks/builds.py --before ../before           # grid, decode, chunks, prefill
    python benchmarks/builds.py --before ../before --variants fa2 --set prefill

FOLDER/flash_ext is the build before. Each has a process, compare.py's inputs and cells, and turns
in the order ABBA, since the first of two calls finds a cooler GPU. A ratio is the time before
('over') over the time now. Exit status 1 if results differ, or if a build failed.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from cells import Cell, add_grid, geometric_mean, grid, place
from common import Json
from fp8_providers import FP8, FP8_PROVIDERS
from providers import VARIANTS, Provider, Refused, relative_error, running, variant
from results import Recorder
from timing import Timer

import flash_ext

SETS = ("standard", "decode", "chunks", "prefill")
TURNS = 4  # of each build in a cell
LEAST = 0.98  # a cell below is called slower
FP8_NAMES = {p.name: p for p in FP8_PROVIDERS if p.ours}


class Build:
    """What a process does that has imported one build: its answers to requests."""

    def __init__(self, device: str) -> None:
        self.timer = Timer(torch.device(device))
        self.call: Callable[[], object] | None = None
        self.estimate = 0.0, 0.0

    def describe(self) -> Json:
        """Where the build is, and what its binary was built from."""
        package = Path(flash_ext.__file__).resolve().parent
        return {
            "folder": str(package.parent),
            "version": flash_ext.__version__,
            "digest": (common.read_json(package / "_C.json") or {}).get("digest"),
        }

    def prepare(self, cell: Json, provider: str, results: str, compare: bool) -> Json:
        """Compute a cell; without `compare` write the file that results are held against."""
        self.call, shape = None, Cell(**cell)
        torch.manual_seed(0)
        asked = FP8_NAMES.get(provider) or variant(provider)
        try:
            work = shape.workload(self.timer.device)
            if not asked.fp8:
                options = {"causal": shape.causal, "window": (shape.window - 1, -1)}
                reason = flash_ext.explain(work.q, work.k, work.v, **options).reasons[provider]
                if reason is not None:
                    raise Refused(reason)
            way = work.forward if shape.direction == "forward" else work.backward
            call = way(asked, shape.causal)
            got = call()
        except Refused as refusal:
            return {"refused": str(refusal)}
        except Exception as error:
            return {"failed": common.first_line(error)}
        tensors = list(got) if isinstance(got, tuple) else [got]
        if not compare:
            torch.save(tensors, results)
        # Both do this: the memory that they reuse then lies alike, which is 1 us of a short call.
        wanted = torch.load(results, map_location=self.timer.device)
        errors = [relative_error(x, y.float()) for x, y in zip(tensors, wanted, strict=True)]
        answer: Json = {"errors": [max(e) for e in zip(*errors, strict=True)]}
        del wanted
        del got, tensors
        self.call, self.estimate = call, self.timer.estimate(call)
        return answer | {"seconds": self.estimate[0]}

    def time(self, min_time: float) -> Json:
        """Seconds of single calls, one after another."""
        assert self.call is not None
        (timed,) = self.timer.compare({0: self.call}, {0: self.estimate}, min_time).values()
        return {"seconds": timed.seconds, "launch_bound": timed.launch_bound}


this_build = functools.cache(Build)  # the one of a process


def answer(device: str, what: str, request: Json) -> Json:
    """Call a method of a process's build."""
    return getattr(this_build(device), what)(**request)


class Remote:
    """A process with one build."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        processes = multiprocessing.get_context("forkserver")  # which imports torch once
        processes.set_forkserver_preload(["torch"])
        self.pool = ProcessPoolExecutor(1, processes)
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):  # which the process gets
            self.described = self.ask("describe")

    def ask(self, what: str, **request: Any) -> Json:
        return self.pool.submit(answer, self.device, what, request).result()


def compare(
    builds: dict[str, Remote], cell: Cell, provider: Provider, min_time: float, results: str
) -> Json:
    """Times of both builds in a cell and their ratio, or why there is none."""
    request = {"cell": asdict(cell), "provider": provider.name, "results": results}
    prepared = {"before": builds["before"].ask("prepare", compare=False, **request)}
    comparable = "seconds" in prepared["before"]
    prepared["now"] = builds["now"].ask("prepare", compare=comparable, **request)
    states = {name: p for name, p in prepared.items() if "seconds" not in p}
    if states:
        if len(states) == len(builds) and all("refused" in p for p in states.values()):
            return {"refused": states["now"]["refused"]}
        return {"failed": "; ".join(f"{n}: {next(iter(p.values()))}" for n, p in states.items())}
    errors = prepared["now"]["errors"]
    if any(not e <= 2 * limit for e, limit in zip(errors, provider.limits, strict=True)):
        return {"failed": f"results differ by {errors[0]:.2g}, in a block by {errors[1]:.2g}"}
    times: dict[str, list[float]] = {name: [] for name in builds}
    launch_bound = False
    for turn in range(TURNS):
        for name in list(builds)[:: 1 if turn % 2 == 0 else -1]:
            timed = builds[name].ask("time", min_time=min_time / TURNS)
            times[name] += timed["seconds"]
            launch_bound |= timed["launch_bound"]
    milliseconds = {n: round(statistics.median(t) * 1e3, 6) for n, t in times.items()}
    ratio = round(milliseconds["before"] / milliseconds["now"], 4)
    counted = {"error": float(f"{errors[0]:.2g}"), "rounds": min(map(len, times.values()))}
    late = {"launch_bound": True} if launch_bound else {}
    return milliseconds | {"ratio": ratio} | counted | late


def summary(rows: list[Json]) -> Iterator[str]:
    """Of each set, variant and direction: the mean of the ratios and the smallest."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        if "ratio" in row:
            groups.setdefault((row["variant"], row["direction"], row["set"]), []).append(row)
    for (ours, direction, name), group in groups.items():
        ratios = [r["ratio"] for r in group]
        least = min(group, key=lambda r: r["ratio"])
        queries = f", {least['seqlen_q']} queries" if least.get("seqlen_q") else ""
        yield (
            f"{ours} {direction}, {name}: geometric mean {geometric_mean(ratios):.3f} of"
            f" {len(group)} cells, {least['ratio']:.3f} at least ({place(least)}{queries}),"
            f" {sum(r < LEAST for r in ratios)} below {LEAST:g}"
        )


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__, device=True)
    add = parser.add_argument
    add("--before", type=Path, required=True, metavar="FOLDER", help="holds flash_ext/")
    add("--variants", nargs="*", choices=list(VARIANTS), help="default: all that run")
    add_grid(parser)
    add("--min-time", type=float, default=0.06, help="seconds of calls per build and cell")
    args = parser.parse_args()
    if not (args.before / "flash_ext" / "__init__.py").is_file():
        parser.error(f"there is no flash_ext in {args.before}")
    return args


def main() -> int:
    args = parse()
    device = torch.device(args.device)
    variants = args.variants or running(device)
    jobs = [
        (name, cell, provider)
        for name in args.set or SETS
        for cell in grid(argparse.Namespace(**(vars(args) | {"set": [name]})))
        for provider in (FP8_NAMES.values() if cell.dtype == FP8 else map(variant, variants))
    ]
    if not jobs:
        raise SystemExit("no cell left: see --causal, --full, --fwd, --bwd")
    now = Path(flash_ext.__file__).resolve().parents[1]
    folders = {"before": args.before.resolve(), "now": now}
    builds = {name: Remote(folder, args.device) for name, folder in folders.items()}
    for name, folder in folders.items():
        if Path(builds[name].described["folder"]) != folder:
            raise SystemExit(f"asked for {folder}, imported {builds[name].described['folder']}")
    over = {"over": builds["before"].described["digest"] or str(args.before)}
    recorder = Recorder("builds", common.describe_setup(device), args)
    rows: list[Json] = []
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # results are large
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        try:
            for name, cell, provider in common.progress(jobs, len(jobs), "cells"):
                found = compare(builds, cell, provider, args.min_time, f"{folder}/results.pt")
                what = cell.to_json() | {"set": name, "variant": provider.name} | over
                recorder.add(what, found)
                rows.append(what | found)
        finally:
            for build in builds.values():
                build.pool.shutdown()
    print("\n".join(summary(rows)))
    for row in (r for r in rows if "failed" in r):
        print(f"FAILED: {row['variant']} {row['direction']} {place(row)}: {row['failed']}")
    return recorder.close(lambda result: "failed" in result)


if __name__ == "__main__":
    sys.exit(main())
