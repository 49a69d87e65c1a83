"""benchmarks/tune.py: from times to the cost constants of csrc/plan.

Would catch a fit that misses the constants which the times were made with, and a model, a choice or
a constant that is not the plan's. No GPU: the times are made by the model.
"""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import gpu_test_report  # noqa: F401  puts benchmarks/ on the path
import pytest
from compiled import host_code

import tune  # isort: skip
from tune import Cost, Gpu, Row, SplitCosts  # isort: skip

PLAN = Path(__file__).resolve().parent.parent / "csrc/plan"
TUNING, COST = (" ".join((PLAN / name).read_text().split()) for name in ("tuning.h", "cost.h"))
ROWS = {(row.d, row.fp8): row for row in tune.ROWS}
GPU = Gpu(132, 32 << 20)
TODAY, TRUE = SplitCosts(), SplitCosts(4.0, 1.5, 0.5, 0.45, 0.7, 0.8, 0.9, 2.5)


def times_of(row: Row) -> tune.Times:
    """What the calls of the grid take if the model is right; a unit of each call cancels."""
    return {
        call: {
            name: (1 + number % 3) * tune.forward_time(call, tile, row.costs(call)[name], GPU.sms)
            for name, tile in row.tiles.items()
        }
        for number, call in enumerate(tune.grid(row.d))
    }


def with_costs(row: Row, **costs: Cost) -> Row:
    """The row with these costs; of a call whose Q tiles differ with two percent more."""
    differ = {n: c if row.fp8 else Cost(c.percent + 2, c.overhead) for n, c in costs.items()}
    return dataclasses.replace(row, alike=row.alike | costs, differ=row.differ | differ)


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_known_constants_are_found(key: tuple[int, bool]) -> None:
    true = with_costs(ROWS[key], **{
        name: cost for name, cost in (("small_q", Cost(117, 90)), ("long_keys", Cost(91, 140)))
        if name in ROWS[key].tiles
    })  # fmt: skip
    found = tune.fitted(ROWS[key], times_of(true), GPU.sms)
    assert (found.alike, found.differ) == (true.alike, true.differ)


def split_times(costs: SplitCosts, noise: float = 0.0) -> tune.Times:
    noises = random.Random(0)
    return {
        call: {
            n: tune.decoding_time(call, n, costs, GPU) * (1 + noises.uniform(-noise, noise))
            for n in call.splits()
        }
        for call in tune.decodings()
    }


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_known_constants_of_splits_are_found(noise: float) -> None:
    found = tune.fitted_splits(split_times(TRUE, noise), GPU, TODAY)
    for name, true in dataclasses.asdict(TRUE).items():
        assert getattr(found, name) == pytest.approx(true, rel=max(0.015, 2 * noise)), name


def test_choices_are_those_of_plans() -> None:
    """tune.py has a copy of the models whose constants it fits."""
    native = host_code("flash_ext_native")
    for row in (x for x in ROWS.values() if not x.fp8):
        for call in tune.grid(row.d):
            window = (call.window, 0 if call.causal else -1)
            heads = call.batch * call.heads
            expected = row.tiles[tune.choice(row, call, GPU.sms)]
            found = native.fa3_tile((row.d, row.d), heads, call.queries, call.keys, window, False)
            assert found == expected, call
    for call in tune.decodings():
        found = native.decode_splits(call.batch, call.kv_heads, call.group, call.keys)
        assert found == tune.splits_choice(call, TODAY, GPU), call


def test_todays_constants_are_those_of_csrc() -> None:
    for row in ROWS.values():
        for name in row.tiles.keys() - {tune.USUAL}:
            costs = f"{{.alike = {row.alike[name]}, .differ = {row.differ[name]}}}"
            assert (f"kCosts{costs}" in COST) if row.fp8 else (f".{name}_costs = {costs}" in TUNING)
    assert TUNING.count("_costs = {.alike") == sum(len(x.tiles) - 1 for x in ROWS.values()) - 1
    x = TODAY
    for text in (
        f"kManyRows ? {x.alone_many_rows} : {x.alone_few_rows}) * (of_8_bits",
        f"l2_share ? {x.of_l2} : {x.of_memory};", f"return {x.wave} + ceil_div(keys, 128 * x",
        f"x.splits == x.cluster ? {x.in_cluster} : several;", f"1.9 : {x.of_clusters};",
    ):  # fmt: skip
        assert text in COST, text
    enumerators = re.search(r"enum class Fa3ForwardTile \{ ([\w, ]+) ", TUNING)
    assert enumerators is not None
    names = [re.sub("(?<!^)([A-Z])", r"_\1", x[1:]).lower() for x in enumerators[1].split(", ")]
    assert tuple(names) == tune.TILES
