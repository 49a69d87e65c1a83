"""Benchmarks on a GPU that some variants do not take all calls of: that is no failure.

The GPU is the CPU here, and refuses as one of compute capability 8.6 does.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_test_report  # puts benchmarks/ on the path
import pytest
import torch

import flash_ext

common = gpu_test_report.common
import compare  # noqa: E402
import memory  # noqa: E402
import options  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402

LARGE = "head dims above 64 need more shared memory"


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa1 takes no head dim above 64, and of fa2 there are no gradients then."""
    usual = flash_ext.explain

    def explain(q: torch.Tensor, *others: Any, **options: Any) -> flash_ext.Explanation:
        found = usual(q, *others, **options)
        if q.shape[-1] <= 64:
            return found
        reasons = found.reasons | {"fa1": LARGE}
        return dataclasses.replace(found, reasons=reasons, backward=None, why_backward=LARGE)

    monkeypatch.setattr(flash_ext, "explain", explain)


def results_of(
    main: Callable[[], int], path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    """The rows that a program writes that ends well."""
    command = [main.__module__, "--device", "cpu", "--out", str(path), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    return [results.flat(line) for line in results.read(path)]


def test_the_variants_that_run() -> None:
    device = torch.device("cpu")
    assert providers.running(device) == list(flash_ext.CPU_VARIANTS)
    assert providers.running(device, 128) == [v for v in flash_ext.CPU_VARIANTS if v != "fa1"]
    assert providers.running(device, 128, gradients=True) == []


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ("--d", "128", "--s", "32", "--heads", "1", "--batch", "1", "--causal", "--peers")
    result = results_of(compare.main, tmp_path / "x", monkeypatch, *shape, "standard", "--variants",
                        "fa1", "fa2")  # fmt: skip
    found = {cell["direction"]: cell["providers"] for cell in result}
    forward, backward = found["forward"], found["backward"]
    refused = {"skipped": LARGE, "refused": True}
    assert forward["fa1"] == refused and forward["fa2"]["ms"] > 0
    assert backward["fa1"] == backward["fa2"] == refused and backward["standard"]["ms"] > 0


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = results_of(memory.main, tmp_path / "m", monkeypatch, "--s", "64", "128", "--variants",
                        "fa1", "--peers")  # fmt: skip
    assert (result[0]["bytes"], result[0]["refused"]) == ({}, LARGE)


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--rounds", "1", "--only", "mix", "--d", "128")
    result = results_of(options.main, tmp_path / "o", monkeypatch, *few)
    assert {cell["direction"] for cell in result} <= {"forward"}


def test_no_room_for_the_exact_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What peers cannot be held against is left out; the shapes after it are not."""
    usual = providers.Workload.exact

    def exact(work: providers.Workload, causal: bool, gradients: bool) -> list[torch.Tensor]:
        if work.q.shape[1] == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return usual(work, causal, gradients)

    monkeypatch.setattr(providers.Workload, "exact", exact)
    path = tmp_path / "x"
    few = ("--d", "32", "--s", "64", "32", "--heads", "1", "--batch", "1", "--causal")
    command = ["compare", "--device", "cpu", "--out", str(path), *few, "--variants", "fa2"]
    monkeypatch.setattr(sys, "argv", [*command, "--peers"])
    assert compare.main() == 1
    cells = sorted(map(results.flat, results.read(path)), key=lambda c: c["seqlen"])
    assert [("ms" in c["providers"]["fa2"], c["seqlen"]) for c in cells] == [
        (True, 32), (True, 32), (False, 64), (False, 64)
    ]  # fmt: skip
    assert cells[2]["providers"]["fa2"] == {"skipped": "OutOfMemoryError: CUDA out of memory."}
