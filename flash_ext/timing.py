"""Times calls: in turns, with a cold cache, by medians. For `flash_ext.bench` and benchmarks/.

It imports nothing of flash_ext, so that benchmarks/ can time an older build with this module.
"""

from __future__ import annotations

import gc
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

FLUSH_BYTES = 256 << 20  # several times the largest L2 (60 MB on an H200)
MIN_ROUNDS, MAX_ROUNDS = 5, 200
SLOW_SECONDS, SLOW_ROUNDS = 0.02, 4  # calls that take longer differ less
SM_CLOCK_HZ = 2e9  # an upper bound; turns a waiting time into cycles

T = TypeVar("T")

METHOD = (
    "One process; the providers take turns, round by round, in orders that are balanced, so that "
    "each follows every other one about equally often, on the same fresh random inputs. "
    "Before each call 256 MiB are written, so that L2 is cold, and the GPU is kept busy for "
    "longer than the CPU needs to enqueue the call (the same time for every provider), so that "
    "the two CUDA events around the call see only GPU time. Calls where the CPU still came late "
    "are dropped ('late'). 'ms' is the median. Forward runs without gradients; backward is one "
    "torch.autograd.grad call on a graph that was built before."
)


@dataclass
class Samples:
    """The times of one provider in one cell."""

    seconds: list[float]
    host_seconds: float  # what the CPU needs to enqueue one call
    late: int = 0  # dropped calls: the GPU had caught up with the CPU
    launch_bound: bool = False  # too many late calls: they are kept, and hold CPU time too

    def summary(self) -> dict[str, float | int | bool]:
        """Median and spread, in milliseconds."""
        values = self.seconds if len(self.seconds) > 1 else self.seconds * 2
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        result: dict[str, float | int | bool] = {
            "ms": round(median * 1e3, 6),
            "min_ms": round(min(self.seconds) * 1e3, 6),
            "q1_ms": round(q1 * 1e3, 6),
            "q3_ms": round(q3 * 1e3, 6),
            "rounds": len(self.seconds),
            "host_us": round(self.host_seconds * 1e6, 1),
        }
        if self.late:
            result["late"] = self.late
        if self.launch_bound:
            result["launch_bound"] = True
        return result


def balanced_orders(names: list[str]) -> list[list[str]]:
    """Orders in which each name comes right after every other one equally often.

    A call inherits the clock, the temperature and the caches of instructions that the one before
    has left. A Williams design: for an odd number of names each order is followed by its reverse.
    """
    n = len(names)
    first = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    orders = [[names[(x + shift) % n] for x in first] for shift in range(n)]
    if n % 2 == 0:
        return orders
    return [order for pair in zip(orders, (x[::-1] for x in orders), strict=True) for order in pair]


class Timer:
    """Times calls on one device; on the CPU with the wall clock and no flush.

    `sleep` keeps the GPU busy for a number of cycles: torch.cuda._sleep.
    """

    def __init__(self, device: torch.device, sleep: Callable[[int], object]) -> None:
        self.device, self.sleep = device, sleep
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def once(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds on the device and seconds until the call was enqueued, for one call."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            return seconds, seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        self.flush.zero_()
        begin.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) * 1e-3, host

    def estimate(self, call: Callable[[], object]) -> tuple[float, float]:
        """Device and host seconds of a warm call: medians of three, or one if it is slow."""
        first = self.once(call)
        if first[0] > SLOW_SECONDS:
            return first
        tries = [self.once(call) for _ in range(3)]
        return statistics.median(t[0] for t in tries), statistics.median(t[1] for t in tries)

    def compare(
        self,
        calls: dict[str, Callable[[], object]],
        estimates: dict[str, tuple[float, float]],
        min_time: float,
        rounds: int | None = None,
    ) -> dict[str, Samples]:
        """Time ``calls`` in turns, each for about ``min_time`` seconds or ``rounds`` times.

        ``estimates`` holds what ``estimate`` returned. A slow provider joins in evenly spread
        rounds only, so that all of them see the same states of the machine.
        """

        def count(seconds: float) -> int:
            least = SLOW_ROUNDS if seconds > SLOW_SECONDS else MIN_ROUNDS
            return min(MAX_ROUNDS, max(least, math.ceil(min_time / max(seconds, 1e-7))))

        counts = {name: rounds or count(estimates[name][0]) for name in calls}
        total = max(counts.values())
        lead = 1.5 * max(host for _, host in estimates.values()) + 20e-6
        sleep_cycles = int(min(lead, 5e-3) * SM_CLOCK_HZ)
        samples = {name: Samples([], estimates[name][1]) for name in calls}
        pending: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, bool]]] = {
            name: [] for name in calls
        }
        for name, call in calls.items():
            if estimates[name][0] <= SLOW_SECONDS:
                call()  # the allocator may have to ask the driver for memory again
        gc.collect()
        gc.disable()  # a collection between the events would be timed
        try:
            orders = balanced_orders(list(calls))
            for turn in range(total):
                for name in orders[turn % len(orders)]:
                    if (turn + 1) * counts[name] // total == turn * counts[name] // total:
                        continue
                    if self.cuda:
                        pending[name].append(self._enqueue(calls[name], sleep_cycles))
                    else:
                        samples[name].seconds.append(self.once(calls[name])[0])
            if self.cuda:
                torch.cuda.synchronize(self.device)
        finally:
            gc.enable()
        for name, timed in pending.items() if self.cuda else ():
            times = [(begin.elapsed_time(end) * 1e-3, late) for begin, end, late in timed]
            on_time = [seconds for seconds, late in times if not late]
            samples[name].late = len(times) - len(on_time)
            samples[name].launch_bound = len(on_time) < min(3, len(times))
            samples[name].seconds = (
                [seconds for seconds, _ in times] if samples[name].launch_bound else on_time
            )
        return samples

    def _enqueue(
        self, call: Callable[[], object], sleep_cycles: int
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        """Enqueue flush, event, call, event; the flag says whether the CPU was too late."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sleep(sleep_cycles)
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        # If the GPU has already passed the first event, it may have waited for the CPU.
        return begin, end, begin.query()


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Iterate with a progress bar: tqdm's if it is installed, otherwise a line of dots."""
    try:
        from tqdm import tqdm
    except ImportError:
        for done, item in enumerate(items, 1):
            yield item
            print(f"\r{what}: {done}/{total}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    else:
        seconds = 0.1 if sys.stderr.isatty() else 5  # a log file needs few lines
        yield from tqdm(items, total=total, desc=what, dynamic_ncols=True, mininterval=seconds)


def first_line(error: BaseException) -> str:
    """An exception as one short line for a result file."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def cpu_name() -> str:
    """The processor's model name where Linux reports it, otherwise its architecture."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()
