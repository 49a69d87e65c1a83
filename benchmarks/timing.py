"""Times single calls: interleaved between providers, with a cold cache, by medians."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import common
import torch

FLUSH_BYTES = 256 << 20  # several times the largest L2 (60 MB on an H200)
MIN_ROUNDS, MAX_ROUNDS = 5, 200
SLOW_SECONDS, SLOW_ROUNDS = 0.02, 4  # calls that take longer differ less
SM_CLOCK_HZ = 2e9  # an upper bound; turns a waiting time into torch.cuda._sleep's cycles

Around = Callable[[], AbstractContextManager[object]]

HOST_ROUNDS, HOST_CALLS = 50, 20  # so few calls in a row that the GPU's queue takes them all
HOST_METHOD = (
    "The time until one call returns, on tensors so small that the GPU's work is nothing: forward "
    "with gradients off, and forward and backward through autograd. "
    "'compiled' is torch.compile's default mode. "
    "The providers take turns; the device is waited for before each turn of "
    f"{HOST_CALLS} calls, which are timed one by one, and never within one. SDPA's backend is "
    "chosen outside the calls."
)

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


# Seconds of one call back to back. With 0.07, at the power limit, flash-attn 4's backward ran at
# 1,710 MHz beside others that take less power, and with 0.2 at 1,605 MHz (docs/notes/010).
LEAST_TURN = 0.4


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


def step_times(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of so many steps right after one another, on the device's clock."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e-3 for begin, end in itertools.pairwise(events)]


class Timer:
    """Times calls on one device; on the CPU with the wall clock and no flush."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
        """Device and host seconds of a warm call: medians of three, or one where it is slow."""
        first = self.once(call)
        if first[0] > SLOW_SECONDS:
            return first
        tries = [self.once(call) for _ in range(3)]
        return statistics.median(t[0] for t in tries), statistics.median(t[1] for t in tries)

    def host(
        self, calls: dict[str, tuple[Callable[[], object], Around]], gradients: bool
    ) -> dict[str, dict[str, float]]:
        """Microseconds that the CPU needs for one call, ``HOST_METHOD``: median and quartiles."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for _ in range(HOST_ROUNDS):
                for name, (call, around) in calls.items():
                    if self.cuda:
                        torch.cuda.synchronize(self.device)
                    with torch.set_grad_enabled(gradients), around():
                        for _ in range(HOST_CALLS):
                            start = time.perf_counter()
                            call()
                            times[name].append((time.perf_counter() - start) * 1e6)
        finally:
            gc.enable()
        results = {}
        for name, values in times.items():
            q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
            results[name] = {"us": round(median, 2), "q1_us": round(q1, 2), "q3_us": round(q3, 2)}
        return results

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

    def in_graph(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        """Replays so many calls from one CUDA graph: the host's time is that of one launch."""
        stream, own = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(own)
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        own.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    def sustained(
        self,
        calls: dict[str, Callable[[], object]],
        estimates: dict[str, tuple[float, float]],
        seconds: float,
        at_once: int = 1,
    ) -> dict[str, dict[str, float | str]]:
        """Each call back to back for ``seconds`` in all, in turns, on a GPU that is hot.

        A turn begins with a third of its time that does not count. No turn is shorter than
        ``LEAST_TURN``, or the power limit would follow the mean of all calls. Each of ``calls``
        makes ``at_once`` calls; ``estimates`` holds what ``estimate`` returned of one.

        Milliseconds per call with warm caches, and on a GPU clock, power and temperature (medians
        of the turns' medians), with the energy of a call in joules. Of a call that fails its error,
        as "skipped".
        """
        orders = balanced_orders(list(calls))
        orders = orders[: max(1, int(seconds / LEAST_TURN + 1e-6))]  # 1.2 / 0.4 is below 3
        turn = seconds / max(len(orders), 1) if self.cuda else 0
        counts = {
            name: max(5, math.ceil(turn / max(estimates[name][0] * at_once, 1e-7)))
            for name in calls
        }
        milliseconds: dict[str, list[float]] = {name: [] for name in calls}
        states: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
        results: dict[str, dict[str, float | str]] = {}
        log = common.ClockLog(self.device)
        log.wait_for_sample()
        for name in itertools.chain.from_iterable(orders):
            if name in results:
                continue
            try:
                for _ in range(counts[name] // 3):
                    calls[name]()
                if self.cuda:
                    torch.cuda.synchronize(self.device)
                log.since_last()
                total = self._back_to_back(calls[name], counts[name])
            except Exception as error:  # most often: out of memory
                results[name] = {"skipped": common.first_line(error)}
                continue
            milliseconds[name].append(total / (counts[name] * at_once))
            states[name].append(log.since_last())
        log.close()
        for name in [name for name in calls if name not in results]:
            mean = statistics.fmean(milliseconds[name])
            found = [state for state in states[name] if state]
            state = {x: statistics.median(s[x] for s in found) for x in (found[0] if found else ())}
            energy = {"joules": round(state["power_w"] * mean * 1e-3, 6)} if state else {}
            made = counts[name] * at_once * len(orders)
            results[name] = {"ms": round(mean, 6), "calls": made, **state, **energy}
        return results

    def _back_to_back(self, call: Callable[[], object], count: int) -> float:
        """Milliseconds of so many calls in a row."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end)

    def _enqueue(
        self, call: Callable[[], object], sleep_cycles: int
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        """Enqueue flush, event, call, event; the flag says whether the CPU was too late."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(sleep_cycles)
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        # If the GPU has already passed the first event, it may have waited for the CPU.
        return begin, end, begin.query()
