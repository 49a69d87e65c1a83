"""The constants of `decoding_time` (csrc/plan/cost.h), for tune.py: how FA3 splits few queries.

The model has no closed form, since every SM or its memory may be the limit. So the constants come
from a search, together with the time of a launch, which is the same for all numbers of splits.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import common
import torch
from timing import Timer

HOOK = "FLASH_EXT_FORCE_SPLITS"
HEAD_DIM, ROWS, CTAS_PER_SM = 128, 16, 2  # kFa3Decode at 128, few_rows; many_rows has one CTA
CLUSTER = 8  # kMaxClusterSplits
SPLITS = (1, 2, 4, *range(CLUSTER, 15 * CLUSTER + 1, CLUSTER))  # those that a plan considers


class Gpu(NamedTuple):
    """As GpuModel in csrc/plan/device.h."""

    sms: int
    l2_share: int

    @property
    def cluster_sms(self) -> int:
        return self.sms - self.sms // 11


def gpu_of(device: torch.device) -> Gpu:
    """The GPU as `gpu_model` describes it."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, min(found.L2_cache_size // 5 * 4, 32 << 20))


@dataclass(frozen=True)
class Costs:
    """In microseconds. `alone` is of 128 keys in a CTA that nothing but itself limits."""

    launch: float = 3.0
    wave: float = 1.2
    alone_few_rows: float = 0.36
    alone_many_rows: float = 0.6
    of_l2: float = 0.6
    of_memory: float = 0.95
    in_cluster: float = 0.5
    of_clusters: float = 1.7


PATTERNS = {
    "wave": r"(: )([\d.]+)( \+ ceil_div\(keys, 128 \* splits\))",
    "of_l2": r"(bytes <= gpu\.l2_share \? )([\d.]+)( : )",
    "of_memory": r"(bytes <= gpu\.l2_share \? [\d.]+ : )([\d.]+)(;)",
    "in_cluster": r"(decode_clusters\(splits\) == 1 \? )([\d.]+)( : )",
    "of_clusters": r"(decode_clusters\(splits\) == 1 \? [\d.]+ : )([\d.]+)(;)",
    "alone_many_rows": r"(tile == Fa3ForwardTile::kManyRows \? )([\d.]+)( : )",
    "alone_few_rows": r"(tile == Fa3ForwardTile::kManyRows \? [\d.]+ : )([\d.]+)(;)",
}
"""Where each constant is: the first five in cost.h, the others in tuning.h."""


def read(text: str) -> Costs:
    """The constants of tuning.h and cost.h, one after the other."""
    found = {name: re.findall(pattern, text) for name, pattern in PATTERNS.items()}
    assert all(len(x) == 1 for x in found.values()), f"csrc/plan reads otherwise: {found}"
    return Costs(**{name: float(x[0][1]) for name, x in found.items()})


def written(costs: Costs, text: str) -> str:
    """tuning.h or cost.h with the constants that it has."""
    for name, pattern in PATTERNS.items():
        text = re.sub(pattern, rf"\g<1>{float(f'{getattr(costs, name):.2g}')}\g<3>", text)
    return text


@dataclass(frozen=True)
class Call:
    """One query against a cache, `group` query heads on a head of keys."""

    batch: int
    kv_heads: int
    group: int
    keys: int

    @property
    def tiles(self) -> int:
        return self.batch * self.kv_heads

    @property
    def few_rows(self) -> bool:
        return self.group <= ROWS

    def splits(self) -> list[int]:
        """The numbers of splits that have 128 keys or more each."""
        return [x for x in SPLITS if x == 1 or 128 * x <= self.keys]


def grid() -> Iterator[Call]:
    """One sequence and many, with 16 rows and 32, in L2 and beyond."""
    for keys in (1024, 4096, 16384, 65536, 131072):
        yield Call(1, 8, 8, keys)
        yield Call(1, 1, 32, keys)
    for batch, keys in ((2, 8192), (4, 4096), (8, 2048), (16, 8192), (64, 1024), (64, 4096)):
        yield Call(batch, 8, 4, keys)
    for batch, keys in ((2, 16384), (4, 8192), (8, 4096)):
        yield Call(batch, 8, 32, keys)


def time(call: Call, splits: int, x: Costs, gpu: Gpu) -> float:
    """`decoding_time` of csrc/plan/cost.h and a launch, in microseconds."""
    size = call.batch * call.keys * call.kv_heads * 2 * HEAD_DIM * 2
    of_memory = x.of_l2 if size <= gpu.l2_share else x.of_memory
    alone = x.alone_few_rows if call.few_rows else x.alone_many_rows
    ctas = call.tiles * splits
    at_once = (CTAS_PER_SM if call.few_rows else 1) * (gpu.sms if splits <= 2 else gpu.cluster_sms)

    def wave(of_ctas: int) -> float:
        iterations = -(-call.keys // (128 * splits))
        return of_ctas and x.wave + iterations * max(alone, of_memory * of_ctas / gpu.sms)

    combination = 0.0 if splits == 1 else x.in_cluster if splits <= CLUSTER else x.of_clusters
    return x.launch + ctas // at_once * wave(at_once) + wave(ctas % at_once) + combination


def choice(call: Call, x: Costs, gpu: Gpu) -> int:
    """The splits that a plan takes: `decode_splits` of csrc/plan/cost.h."""
    return min(call.splits(), key=lambda splits: time(call, splits, x, gpu))


Times = dict[Call, dict[int, float]]  # microseconds, by the number of splits


def fitted(times: Times, gpu: Gpu, start: Costs) -> Costs:
    """The constants with the least squares of the logarithms, by steps of one at a time."""

    def badness(x: Costs) -> float:
        return sum(
            math.log(us / time(call, splits, x, gpu)) ** 2
            for call, of_splits in times.items()
            for splits, us in of_splits.items()
        )

    best, least = start, badness(start)
    for step in (1.3, 1.1, 1.03, 1.01, 1.003):
        improved = True
        while improved:
            improved = False
            for name in (x.name for x in fields(Costs)):
                for factor in (step, 1 / step):
                    other = replace(best, **{name: getattr(best, name) * factor})
                    if (found := badness(other)) < least - 1e-12:
                        best, least, improved = other, found, True
    return best


def report(times: Times, old: Costs, new: Costs, gpu: Gpu) -> Iterator[str]:
    """A line for each call, and what the choices cost, in percent of the best splits measured."""
    losses: dict[str, list[float]] = {"today's": [], "new": []}
    yield "\nsplits of few queries"
    for call, us in times.items():
        fastest = min(us, key=us.__getitem__)
        words = []
        for which, costs in (("today's", old), ("new", new)):
            chosen = choice(call, costs, gpu)
            losses[which].append(100 * (us[chosen] / us[fastest] - 1))
            words.append(f"{which} {chosen} +{losses[which][-1]:.1f} %")
        yield f"  {call}: fastest {fastest}, {us[fastest]:.1f} µs; {'; '.join(words)}"
    for which, found in losses.items():
        mean = statistics.fmean(found)
        yield f"  {which} constants lose {mean:.2f} % on average, at most {max(found):.1f} %"


def measure(timer: Timer, min_time: float) -> Times:
    """The times of all numbers of splits, in turns."""
    import flash_ext

    times: Times = {}
    calls = list(grid())
    for call in common.progress(calls, len(calls), "splits"):
        options = {"dtype": torch.bfloat16, "device": timer.device}
        heads = call.kv_heads * call.group
        q = torch.randn(call.batch, 1, heads, HEAD_DIM, **options)
        k, v = torch.randn(2, call.batch, call.keys, call.kv_heads, HEAD_DIM, **options)

        def run(splits: int, q=q, k=k, v=v) -> object:  # type: ignore[no-untyped-def]
            os.environ[HOOK] = str(splits)
            return flash_ext.attention(q, k, v, variant="fa3")

        runs = {str(n): (lambda n=n, run=run: run(n)) for n in call.splits()}
        estimates = {name: timer.estimate(one) for name, one in runs.items()}
        samples = timer.compare(runs, estimates, min_time)
        times[call] = {int(n): statistics.median(x.seconds) * 1e6 for n, x in samples.items()}
    os.environ.pop(HOOK, None)
    return times
