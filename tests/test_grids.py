"""Which cases of a test the CPU has (grids.some_of).

Would catch a value of an argument that no case has left, and arguments that are tied to each other
by their order.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import conftest
import grids
import pytest


def cases(*sizes: int) -> list[dict[str, str]]:
    """The product of arguments with this many values."""
    values = ([(f"argument {n}", str(x)) for x in range(size)] for n, size in enumerate(sizes))
    return [dict(case) for case in itertools.product(*values)]


@pytest.mark.parametrize("sizes", [(1,), (7,), (6, 2), (2, 6), (5, 4, 3), (40, 2), (3, 3, 3, 3)])
def test_each_value_occurs(sizes: tuple[int, ...]) -> None:
    given = cases(*sizes)
    chosen = grids.some_of(given, "a test")
    assert max(*sizes, len(given) / 4) <= len(chosen) <= max(sum(sizes), len(given) / 4 + 1)
    for name in given[0]:
        assert {given[i][name] for i in chosen} == {case[name] for case in given}


def test_each_value_occurs_where_cases_are_missing() -> None:
    draw = random.Random(0)
    for number in range(50):
        given = draw.sample(cases(6, 4, 3), draw.randint(1, 40))
        chosen = grids.some_of(given, str(number))
        for name in given[0]:
            assert {given[i][name] for i in chosen} == {case[name] for case in given}


def test_arguments_are_not_tied() -> None:
    """As the order is in every grid: mask by mask, and variant by variant."""
    given = [case | {"mask": str(i // 2 % 2)} for i, case in enumerate(cases(60, 2))]
    met = [(given[i]["mask"], given[i]["argument 1"]) for i in grids.some_of(given, "a test")]
    assert all(met.count(pair) >= 8 for pair in itertools.product("01", repeat=2)), met


def test_only_the_cpu_has_fewer_cases() -> None:
    """And not of tests with the marker all_cases, nor, unless it is quick, of those that name no
    device."""

    def item(test: str, marked: bool, **arguments: object) -> SimpleNamespace:
        return SimpleNamespace(
            nodeid=f"{test}[{arguments}]",
            callspec=SimpleNamespace(params=arguments),
            get_closest_marker=lambda name: marked and name == "all_cases",
        )

    values = itertools.product(range(6), range(6))
    items = [
        item(test, test == "whole", **device, a=a, b=b)
        for a, b in values
        for test in ("some", "whole")
        for device in ({"device": "cpu"}, {"device": "cuda"}, {})
    ]
    items.insert(0, SimpleNamespace(nodeid="no cases"))
    left_out = list(conftest.cases_left_out(items, quick=False))
    assert len(left_out) == 36 - 9
    assert {(x.nodeid[:4], x.callspec.params["device"]) for x in left_out} == {("some", "cpu")}
    without_device = items[:1] + items[3::3]
    assert not list(conftest.cases_left_out(without_device, quick=False))
    quick = list(conftest.cases_left_out(without_device, quick=True))
    assert len(quick) == 36 - 9 and {x.nodeid[:4] for x in quick} == {"some"}


@pytest.mark.parametrize(("share", "kept"), [(0, 0), (1 / 100, 1), (1 / 8, 3), (1, 24)])
def test_a_share_of_the_cases(share: float, kept: int) -> None:
    """The same one in every run, of each test its own."""

    def item(test: str, number: int, share: float | None) -> SimpleNamespace:
        marker = None if share is None else SimpleNamespace(args=[share])
        return SimpleNamespace(nodeid=f"{test}[{number}]", get_closest_marker=lambda _: marker)

    items = [item(test, n, s) for n in range(24) for test, s in (("some", share), ("all", None))]
    left_out = [x.nodeid for x in conftest.beyond_their_shares(items)]
    assert left_out == [x.nodeid for x in conftest.beyond_their_shares(items)]
    assert len(set(left_out)) == 24 - kept and not any("all" in x for x in left_out)
