"""benchmarks/tune.py: from times to the cost constants of csrc/plan.

Would catch a fit that misses the constants which the times were made with, and a model, a choice or
a constant that is not the plan's. No GPU: the times are made by the model.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gpu_test_report  # noqa: F401  puts benchmarks/ on the path
import pytest
from compiled import host_code

import tune  # isort: skip
from tune import Cost, Row  # isort: skip

PLAN = Path(__file__).resolve().parent.parent / "csrc/plan"
TUNING, COST = (" ".join((PLAN / name).read_text().split()) for name in ("tuning.h", "cost.h"))
ROWS = {(row.d, row.fp8): row for row in tune.ROWS}
SMS = 132


def times_of(row: Row) -> tune.Times:
    """What the calls of the grid take if the model is right; a unit of each call cancels."""
    return {
        call: {
            name: (1 + number % 3) * tune.forward_time(call, tile, row.costs(call)[name], SMS)
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
    found = tune.fitted(ROWS[key], times_of(true), SMS)
    assert (found.alike, found.differ) == (true.alike, true.differ)


def test_choices_are_those_of_plans() -> None:
    """tune.py has a copy of the models whose constants it fits."""
    native = host_code("flash_ext_native")
    for row in (x for x in ROWS.values() if not x.fp8):
        for call in tune.grid(row.d):
            window = (call.window, 0 if call.causal else -1)
            heads = call.batch * call.heads
            expected = row.tiles[tune.choice(row, call, SMS)]
            found = native.fa3_tile((row.d, row.d), heads, call.queries, call.keys, window, False)
            assert found == expected, call


def test_todays_constants_are_those_of_csrc() -> None:
    for row in ROWS.values():
        for name in row.tiles.keys() - {tune.USUAL}:
            costs = f"{{.alike = {row.alike[name]}, .differ = {row.differ[name]}}}"
            assert (f"kCosts{costs}" in COST) if row.fp8 else (f".{name}_costs = {costs}" in TUNING)
    assert TUNING.count("_costs = {.alike") == sum(len(x.tiles) - 1 for x in ROWS.values()) - 1
    enumerators = re.search(r"enum class Fa3ForwardTile \{ ([\w, ]+) ", TUNING)
    assert enumerators is not None
    names = [re.sub("(?<!^)([A-Z])", r"_\1", x[1:]).lower() for x in enumerators[1].split(", ")]
    assert tuple(names) == tune.TILES
