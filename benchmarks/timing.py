"""What `flash_ext.timing` does not have: calls back to back, and the CPU's time."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import common
import torch
from common import Json

balanced_orders = common.timing.balanced_orders
Around = Callable[[], AbstractContextManager[object]]

HOST_ROUNDS, HOST_CALLS = 50, 20  # so few calls in a row that the GPU's queue takes them all

# Seconds of one call back to back. With 0.07, at the power limit, flash-attn 4's backward ran at
# 1,710 MHz beside others that take less power, and with 0.2 at 1,605 MHz.
LEAST_TURN = 0.4


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


def repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


class Timer(common.timing.Timer):
    """Times calls on one device; on the CPU with the wall clock and no flush."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.cuda._sleep)

    def timed(
        self, calls: dict[Any, Callable[[], object]], min_time: float, rounds: int | None = None
    ) -> dict[Any, Json]:
        """Median and spread of each call, in turns, in milliseconds: of `Samples.summary`."""
        if not calls:
            return {}
        estimates = {name: self.estimate(call) for name, call in calls.items()}
        found = self.compare(calls, estimates, min_time, rounds)
        return {name: samples.summary() for name, samples in found.items()}

    def host(
        self, calls: dict[str, tuple[Callable[[], object], Around]], gradients: bool
    ) -> dict[str, dict[str, float]]:
        """Microseconds until one call returns, on tensors so small that the GPU's work is nothing:
        median and quartiles. The device is waited for before each turn of HOST_CALLS calls, which
        are timed one by one, and never within one."""
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

    def sustained(self, calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, Json]:
        """Milliseconds of each call, back to back for ``seconds`` in all, in turns, on a GPU that
        is hot; caches are warm.

        A turn begins with a third of its time that does not count. No turn is shorter than
        ``LEAST_TURN``, or the power limit would follow the mean of all calls."""
        orders = balanced_orders(list(calls))
        orders = orders[: max(1, int(seconds / LEAST_TURN + 1e-6))]  # 1.2 / 0.4 is below 3
        turn = seconds / max(len(orders), 1) if self.cuda else 0
        counts = {
            name: max(5, math.ceil(turn / max(self.estimate(call)[0], 1e-7)))
            for name, call in calls.items()
        }
        turns: dict[str, list[float]] = {name: [] for name in calls}
        for name in itertools.chain.from_iterable(orders):
            call, count = calls[name], counts[name]
            repeat(call, count // 3)
            (whole,) = step_times(functools.partial(repeat, call, count), 1, self.device)
            turns[name].append(whole * 1e3 / count)
        return {
            name: {"ms": round(statistics.fmean(ms), 6), "calls": counts[name] * len(orders)}
            for name, ms in turns.items()
        }
