"""How grids of problems become test cases, and problems at random, for hypothesis."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attention_testing import LAYOUTS, VARIANTS, Problem
from hypothesis import strategies as st

HALF_TYPES = (torch.bfloat16, torch.float16)
MASKS = ({}, {"causal": True})
# (query heads, key heads): grouped, multi-head, multi-query, and an odd group.
HEADS = ((4, 2), (3, 3), (4, 1), (6, 2))
DEVICES = ["cpu", "cuda"]
"""Of the tests to collect: conftest.py takes "cuda" away where no test of it is asked for."""

# Every way a bias broadcasts: each dimension whole or 1.
BIAS_PATTERNS = tuple(
    "".join(c if whole else "1" for c, whole in zip("bhqk", chosen, strict=True))
    for chosen in itertools.product((True, False), repeat=4)
)


DEVICE_AND_DIM = [
    ("cpu", 64),
    *(pytest.param("cuda", d, marks=pytest.mark.gpu) for d in (64, 128, 256)),
]
"""Of tests whose head dim chooses a GPU's kernel; on the CPU it changes the size of tiles alone."""


def cover(device: str, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of the axes' values. On a CPU, whose kernels have few paths, only so many
    that each pair of values occurs, in the same order."""
    every = list(itertools.product(*map(enumerate, axes)))
    chosen: set[int] = set()
    pairs = [
        {((a, i), (b, j)) for (a, (i, _)), (b, (j, _)) in itertools.combinations(enumerate(x), 2)}
        for x in every
    ]
    missing = set().union(*pairs)
    while missing and device == "cpu":
        best = max(range(len(every)), key=lambda n: len(pairs[n] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [tuple(v for _, v in x) for n, x in enumerate(every) if device != "cpu" or n in chosen]


LEAST = 1 / 4
"""The share of a test's cases that `some_of` keeps at least."""


def some_of(cases: Sequence[dict[str, str]], seed: str) -> set[int]:
    """The indices of few of a test's cases, in which each value of each argument occurs.

    Which values meet is drawn, evenly: two arguments are not tied to each other by their order.
    """
    values = {name: dict.fromkeys(case[name] for case in cases) for name in cases[0]}
    first = max(values, key=lambda name: len(values[name]))
    counts: Counter[object] = Counter()
    left = dict.fromkeys(random.Random(seed).sample(range(len(cases)), len(cases)))

    def met(index: int) -> list[object]:
        """The values, and the pairs of them. Each value of `first` is taken once anyway."""
        others = [item for item in cases[index].items() if item[0] != first]
        return [*others, *itertools.combinations(others, 2)]

    def take(candidates: Iterable[int]) -> None:
        best = min(candidates, key=lambda index: sum(counts[x] for x in met(index)))
        counts.update(met(best))
        del left[best]

    of_value: dict[object, list[int]] = {}
    for index in left:
        of_value.setdefault(cases[index][first], []).append(index)
    for candidates in of_value.values():
        take(candidates)
    for name, wanted in values.items():
        for value in wanted:
            if all(cases[index][name] != value for index in range(len(cases)) if index not in left):
                take([index for index in left if cases[index][name] == value])
    while len(cases) - len(left) < LEAST * len(cases):
        take(left)
    return set(range(len(cases))) - left.keys()


def alternate(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Vary type, heads, loss and seed along a list, so that they need no separate axis.

    Drawn, not cycled: a cycle would tie itself to the grid's inner axes.
    """
    draw = random.Random(0)
    for problem in problems:
        heads_q, heads_k = draw.choice(HEADS)
        yield dataclasses.replace(
            problem,
            dtype=draw.choice(HALF_TYPES),
            heads_q=heads_q,
            heads_k=heads_k,
            loss=draw.choice(("both", "both", "both", "out", "lse")),
            seed=draw.randrange(1000),
        ).well_conditioned()


def every_case(*grids: Callable[[str], Iterable[Problem]]) -> list[object]:
    """(device, problem, variant) for each problem of grid(device), as parameters of a test.

    The variants of a problem are adjacent, to share its reference.
    """
    return [
        pytest.param(
            device,
            problem,
            variant,
            marks=[pytest.mark.gpu] if device == "cuda" else [],
            id=f"{device}-{grid.__name__}-{problem}-{variant}",
        )
        for device in DEVICES
        for grid in grids
        for problem, variant in itertools.product(grid(device), VARIANTS)
    ]


@st.composite
def problems(draw: st.DrawFn, longest: int) -> Problem:
    """Any problem up to the given length, small sizes and tile edges more often than not.

    Each option is on in one problem out of three, so that most problems have several.
    """
    edges = [n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1) if n + d <= longest]
    lengths = st.one_of(st.sampled_from(edges), st.integers(1, longest))
    heads_k = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 3))
    sides = st.one_of(st.just(-1), st.integers(0, 40), st.integers(0, longest))

    def some(strategy: st.SearchStrategy, default: object) -> object:
        return draw(strategy) if draw(st.sampled_from((False, False, True))) else default

    def one_each(lengths: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(lengths, min_size=batch, max_size=batch).map(tuple)

    lengths_q = some(one_each(st.one_of(st.just(0), lengths)), None)
    return Problem(
        batch=batch,
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        heads_q=heads_k * draw(st.integers(1, 3)),
        heads_k=heads_k,
        head_dim=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(HALF_TYPES)),
        causal=draw(st.booleans()),
        window=draw(st.tuples(sides, sides)),
        scale=draw(st.sampled_from((None, None, 0.05, 0.4))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.1, 0.8))),
        layout=draw(st.sampled_from(LAYOUTS)),
        loss=draw(st.sampled_from(("both", "both", "out", "lse"))),
        seed=draw(st.integers(0, 1000)),
        head_dim_v=some(st.integers(1, 256), None),
        softcap=some(st.sampled_from((0.7, 5.0, 50.0)), 0.0),
        alibi=some(st.sampled_from(("h", "bh")), ""),
        bias=some(st.sampled_from(BIAS_PATTERNS), ""),
        bias_type=draw(st.sampled_from(("input", "float32", "bool"))),
        bias_short=draw(st.sampled_from((0, 0, 3))) if lengths_q else 0,
        sink=some(st.just(True), False),
        seqused_k=some(one_each(st.integers(-1, longest + 1)), None),
        lengths_q=lengths_q,
        lengths_k=lengths_q and draw(one_each(st.one_of(st.just(0), lengths))),
        tail=draw(st.sampled_from((0, 7))),
    ).well_conditioned()
