"""The speed that benchmarks/compare.py publishes, with a clock that always says one millisecond.

Would catch a factor between FLOPs, bytes, time and what is written to the result file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu_test_report  # noqa: F401  puts benchmarks/ on the path
import pytest

import compare  # isort: skip
import results  # isort: skip
from timing import Samples, Timer  # isort: skip


class OneMillisecond(Timer):
    """Each call takes a millisecond."""

    def estimate(self, call: Any) -> tuple[float, float]:
        return 1e-3, 0.0

    def compare(self, calls: dict[str, Any], *others: Any) -> dict[str, Samples]:
        return {name: Samples([1e-3] * 5, 0.0) for name in calls}

    def sustained(self, calls: dict[str, Any], *others: Any) -> dict[str, Any]:
        return {name: {"ms": 1.0, "calls": 5} for name in calls}


def cells(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Of the result file of a run on the CPU."""
    monkeypatch.setattr(compare, "Timer", OneMillisecond)
    monkeypatch.setattr(
        sys,
        "argv",
        ["compare", "--device", "cpu", "--variants", "fa2", "--peers", "standard", "--out",
         str(path), *arguments],
    )  # fmt: skip
    assert compare.main() == 0
    return [results.flat(line) for line in results.read(path)]


@pytest.mark.parametrize("load", ((), ("--sustained",)), ids=("bursts", "sustained"))
def test_flops_in_a_millisecond(
    load: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 B H S S D, halved when causal, times 2.5 backward: 2.56e8 for the forward of all keys."""
    shape = ("--s", "500", "--batch", "2", "--heads", "2", "--d", "64")
    found = {
        (c["causal"], c["direction"]): {name: x["tflops"] for name, x in c["providers"].items()}
        for c in cells(tmp_path / "compare.jsonl", monkeypatch, *shape, *load)
    }
    assert found == {
        (causal, direction): dict.fromkeys(("fa2", "standard"), pytest.approx(expected, abs=1e-4))
        for causal, direction, expected in (
            (False, "forward", 0.256),
            (False, "backward", 0.64),
            (True, "forward", 0.128),
            (True, "backward", 0.32),
        )
    }


def test_bytes_in_a_millisecond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of few queries, float32: 2 · 2 · 8192 · 2 · 64 · 4."""
    shape = ("--s", "8192", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--d", "64")
    (cell,) = cells(tmp_path / "compare.jsonl", monkeypatch, *shape, "--sq", "1", "--full", "--fwd")
    assert cell["dtype"] == "fp32"
    assert cell["providers"]["fa2"]["tbps"] == pytest.approx(16.8e6 / 1e-3 / 1e12, rel=5e-3)
