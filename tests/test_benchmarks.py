"""What the benchmarks and the test reports claim about themselves: FLOPs, completeness.

Would catch a FLOP formula that flatters, a test report written by a run that left tests out, a
wrong result that is timed or called supported, and a table that does not follow from the results.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import gpu_suite
import gpu_test_report  # puts benchmarks/ on the path
import pytest
import torch

import flash_ext
from flash_ext.ops import binary

common = gpu_test_report.common
import activation  # noqa: E402
import builds  # noqa: E402
import calls  # noqa: E402
import compare  # noqa: E402
import distributed  # noqa: E402
import fp8_errors  # noqa: E402
import fp8_inputs  # noqa: E402
import fp8_model  # noqa: E402
import fp8_providers  # noqa: E402
import memory  # noqa: E402
import merge  # noqa: E402
import models  # noqa: E402
import neighbors  # noqa: E402
import numerics  # noqa: E402
import options  # noqa: E402
import providers  # noqa: E402
import support  # noqa: E402
import timing  # noqa: E402
import train  # noqa: E402
from cells import (  # noqa: E402
    CHUNKS,
    DECODE,
    FP8_DIMS,
    FP8_SEQLENS,
    LATENCY,
    PREFILL,
    Cell,
    fp8_cells,
    grid,
    is_plain,
    key,
    on_grid,
    shape_name,
)
from ratios import (  # noqa: E402
    GOALS,
    best_of_peers,
    fp8_findings,
    ratio_range,
    ratio_spread,
    summarise,
    verdict,
    with_best,
)
from report import builds as builds_report  # noqa: E402
from report import claims  # noqa: E402
from report import compare as compare_report  # noqa: E402
from report import fp8 as fp8_report  # noqa: E402
from report import neighbors as neighbors_report  # noqa: E402
from report import options as options_report  # noqa: E402
from report import support as support_report  # noqa: E402
from report import train as train_report  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("n", range(1, 7))
def test_each_call_follows_every_other_one_equally_often(n: int) -> None:
    orders = timing.balanced_orders([str(i) for i in range(n)])
    assert all(len(set(order)) == n for order in orders)
    after = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(after) == n * (n - 1) and len(set(after.values())) <= 1


@pytest.mark.parametrize(("seconds", "turns"), [(0.1, 1), (0.8, 2), (1.2, 3), (60.0, 6)])
def test_no_turn_of_sustained_load_is_short(seconds: float, turns: int) -> None:
    made: list[str] = []
    calls = {name: functools.partial(made.append, name) for name in "abc"}
    timer = timing.Timer(torch.device("cpu"))
    results = timer.sustained(calls, dict.fromkeys(calls, (1.0, 0.0)), seconds)
    order = [name for name, _ in itertools.groupby(made)]
    assert collections.Counter(made) == dict.fromkeys(calls, turns * 6), "five, and one before"
    assert len(order) >= 2 * turns + 1 and all(r["calls"] == 5 * turns for r in results.values())


def test_flops() -> None:
    """4 B H Sq Sk D, halved when causal, times 2.5 backward."""
    shape = {"dtype": "bfloat16", "d": 64, "seqlen": 1024, "batch": 2, "heads": 4}
    full = 4 * 2 * 4 * 1024 * 1024 * 64
    for causal, direction, factor in (
        (False, "forward", 1.0),
        (True, "forward", 0.5),
        (False, "backward", 2.5),
        (True, "backward", 1.25),
    ):
        cell = Cell(**shape, causal=causal, direction=direction)
        assert cell.flops() == full * factor


def test_flops_of_few_queries_and_grouped_heads() -> None:
    shape = {"dtype": "bf16", "d": 128, "seqlen": 4096, "batch": 2, "heads": 32, "kv_heads": 8}
    decode = Cell(**shape, causal=False, seqlen_q=1)
    assert decode.flops() == 4 * 2 * 32 * 1 * 4096 * 128, "grouping saves bytes, not FLOPs"
    assert decode.kv_bytes() == 2 * 2 * 4096 * 8 * 128 * 2
    causal = Cell(**shape, causal=True, seqlen_q=1024)
    assert causal.flops() == 4 * 2 * 32 * 128 * (1024 * 4096 - 1024**2 / 2)


def test_exact_results_of_grouped_heads() -> None:
    """Against float64 standard attention on the whole, though computed a key head at a time."""
    torch.manual_seed(0)
    shape = (2, 48, 6, 16)
    work = providers.Workload(shape, torch.float32, torch.device("cpu"), seqlen_q=20, kv_heads=2)
    work.CHUNK_BYTES = 2 * 4 * 20 * 48 * 3  # two key heads at a time
    leaves = [x.double().requires_grad_() for x in (work.q, work.k, work.v)]
    out = flash_ext.reference.attention(*leaves, causal=True)[0]
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, work.dout.double())]
    for got, want in zip(work.exact(causal=True, gradients=True), wanted, strict=True):
        assert got.shape == want.shape
        assert providers.relative_error(got, want.float()) < (1e-5, 1e-5)
    for name in ("standard", "flash"):
        provider = providers.PEERS[name]()
        if name == "flash":  # which aligns the other way
            with pytest.raises(ValueError, match="aligns"):
                work.forward(provider, causal=True)()
        got = work.forward(provider, causal=False)()
        (want,) = work.exact(causal=False, gradients=False)
        assert max(providers.relative_error(got, want)) < 1e-5


@pytest.mark.parametrize("seqlen_q", [1, 60, 256])
@pytest.mark.parametrize("window", [1, 100, 256])
def test_flops_of_windows(seqlen_q: int, window: int) -> None:
    """Within half a key a query of what the mask shows, as without a window."""
    cell = Cell("bf16", 64, True, 256, 1, 1, seqlen_q=seqlen_q, window=window, d_v=32)
    pairs = sum(min(256 - seqlen_q + i + 1, window) for i in range(seqlen_q))
    assert abs(cell.flops() / (2 * (64 + 32)) - pairs) <= seqlen_q / 2
    backward = dataclasses.replace(cell, direction="backward")
    assert backward.flops() / cell.flops() == (3 * 64 + 2 * 32) / (64 + 32)


def test_flops_of_queries_that_see_no_key() -> None:
    """Aligned bottom-right, 64 of 192 queries come before the first of 128 keys."""
    cell = Cell("bf16", 64, True, 128, 1, 1, seqlen_q=192)
    assert cell.flops() == Cell("bf16", 64, True, 128, 1, 1).flops() > 0


def test_results_of_kernels_of_another_source_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(common, "nvidia_smi", lambda _: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    for digest in (None, common.source_digest()):
        monkeypatch.setattr(
            binary, "cuda_build", lambda digest=digest: binary.Build("80", digest=digest)
        )
        assert common.describe_setup(device)["digest"] == common.source_digest()
    monkeypatch.setattr(binary, "cuda_build", lambda: binary.Build("80", digest="0" * 16))
    with pytest.raises(SystemExit, match="of source 0000000000000000, this is .*: make build"):
        common.describe_setup(device)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_results_of_windows_and_of_other_head_dims_of_v(causal: bool) -> None:
    torch.manual_seed(0)
    size = {"seqlen_q": 40, "kv_heads": 2, "d_v": 24, "window": 7}
    work = providers.Workload((2, 48, 4, 16), torch.float32, torch.device("cpu"), **size)
    leaves = [x.double().requires_grad_() for x in (work.q, work.k, work.v)]
    window = (6, 0 if causal else -1)
    out = flash_ext.reference.attention(*leaves, window=window)[0]
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, work.dout.double())]
    exact = work.exact(causal, gradients=True)
    fa2 = providers.variant("fa2")
    for results in (exact, [work.forward(fa2, causal)(), *work.backward(fa2, causal)()]):
        for got, want in zip(results, wanted, strict=True):
            assert got.shape == want.shape
            assert max(providers.relative_error(got, want.float())) < 1e-5
    with pytest.raises(ValueError, match="no window"):
        work.forward(providers.PEERS["flash"](), causal)
    work.MATRIX_BYTES, work.LAST_ROWS = 0, 8
    (last,) = work.exact(causal, gradients=False)
    torch.testing.assert_close(last, exact[0][:, -8:])


def test_shapes_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(models.SHAPES) >= 30 and len({s.name for s in models.SHAPES}) == len(models.SHAPES)
    for shape in models.SHAPES:
        assert shape.source and shape.heads % shape.kv_heads == 0
        assert not shape.window or shape.causal
    cells = grid_of("--set", "models", monkeypatch=monkeypatch)
    forward = [c for c in cells if c.direction == "forward"]
    assert [c.model for c in cells if c.direction == "backward"] == [
        s.name for s in models.SHAPES if s.backward
    ]
    assert sorted(c.model for c in forward) == sorted(s.name for s in models.SHAPES)
    assert not any(is_plain(dataclasses.asdict(c)) for c in cells)
    steady = grid_of("--sustained", monkeypatch=monkeypatch)
    assert all(c.sustained for c in steady) and len(steady) == len(SHAPES)
    assert not any(on_grid(dataclasses.asdict(c)) for c in steady)


@pytest.mark.parametrize("arguments", [("--set", "models"), ("--s", "128", "--sustained")])
def test_models_and_sustained_runs_are_measured(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "compare.json"
    monkeypatch.setattr(models, "SHAPES", models.SHAPES[:2])
    monkeypatch.setattr(
        sys, "argv",
        ["compare", "--device", "cpu", *arguments, "--rounds", "1", "--variants", "fa2", "--peers",
         "standard", "--out", str(path)],
    )  # fmt: skip
    assert compare.main() == 0
    cells = json.loads(path.read_text())["cells"]
    assert all(c["providers"]["fa2"]["ms"] > 0 for c in cells)
    assert all(best_of_peers(c)["of"] == "standard" for c in cells)
    table = compare_report.shapes_table(cells, {"standard": "standard attention"})
    assert len(table.splitlines()) == 2 + len(cells)
    assert ("(openai-community/gpt2)" in table) == ("models" in arguments)
    shown = capsys.readouterr().out
    assert "fastest variant over fastest peer" in shown
    assert ("GPT-2" in shown) == ("models" in arguments)


def test_a_failing_peer_and_a_lack_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails while it is timed leaves its cell empty; what no time is left for keeps
    what the file has."""
    path = tmp_path / "compare.json"
    calls = itertools.count()
    right = providers.standard()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        if next(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right.attend(q, k, v, causal)

    failing = dataclasses.replace(right, attend=attend)
    monkeypatch.setitem(providers.PEERS, "standard", lambda: failing)
    arguments = ("--device", "cpu", "--s", "64", "--causal", "--fwd", "--sustained", "--variants",
                 "fa2", "--peers", "standard", "--out", str(path))  # fmt: skip
    assert run(compare.main, *arguments, monkeypatch=monkeypatch) == 0
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["providers"]["standard"] == {"skipped": "OutOfMemoryError: CUDA out of memory."}
    assert cell["providers"]["fa2"]["ms"] > 0
    assert run(compare.main, *arguments, "--minutes", "0", monkeypatch=monkeypatch) == 0
    assert json.loads(path.read_text())["cells"] == [cell]


OTHER_RESULTS = """
_right = attention


def attention(q, *others, **options):
    if q.requires_grad:
        raise RuntimeError("no gradients")
    return _right(q, *others, **options) * 1.5
"""


def test_two_builds_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A build beside one that is the same, and beside one with other results."""
    package, path = Path(flash_ext.__file__).parent, tmp_path / "builds.json"
    for name in ("same", "other"):
        shutil.copytree(
            package, tmp_path / name / "flash_ext", ignore=shutil.ignore_patterns("*.so", "_C.*")
        )
    with (tmp_path / "other" / "flash_ext" / "__init__.py").open("a") as other:
        other.write(OTHER_RESULTS)
    arguments = ("--device", "cpu", "--s", "32", "--heads", "1", "--causal", "--min-time", "0",
                 "--set", "standard", "--variants", "fa2", "--out", str(path))  # fmt: skip
    before = ("--before", str(tmp_path / "same"))
    assert run(builds.main, *before, *arguments, monkeypatch=monkeypatch) == 0
    result = json.loads(path.read_text())
    forward, backward = result["cells"]
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    for cell in (forward, backward):
        assert cell["ratio"] == pytest.approx(cell["before"] / cell["now"], rel=1e-3)
        assert cell["error"] == 0 and cell["rounds"] >= builds.TURNS
    assert [s["cells"] for s in builds.summarise(result["cells"])] == [1, 1]
    longer = [backward, forward | {"seqlen": 64}]
    builds.store(path, result, longer)
    assert json.loads(path.read_text())["cells"] == [forward, *longer]
    builds.store(path, result | {"digest": "of a later source"}, [backward])
    assert json.loads(path.read_text())["cells"] == [forward, *longer]
    builds.store(path, result | {"before": {"digest": "of another source"}}, longer)
    assert json.loads(path.read_text())["cells"] == longer

    before = ("--before", str(tmp_path / "other"))
    assert run(builds.main, *before, *arguments, monkeypatch=monkeypatch) == 1
    forward, backward = json.loads(path.read_text())["cells"]
    assert "results differ by 0.3" in forward["failed"] and "ratio" not in forward
    assert backward["failed"] == "before: RuntimeError: no gradients"
    assert "FAILED: fa2 backward d 64 causal S 32" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        run(builds.main, "--before", str(tmp_path), *arguments, monkeypatch=monkeypatch)


def test_what_became_slower_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts of two builds, and their table."""
    cells = [
        dataclasses.asdict(Cell("bf16", 64, True, seqlen, 1, 1, direction, seqlen_q=seqlen_q))
        | {"set": name, "variant": "fa2", "ratio": ratio, "digest": f"{seqlen}"}
        for name, direction, seqlen_q, ratios in (
            ("standard", "forward", 0, (1.0, 0.99)),
            ("standard", "backward", 0, (0.99, 0.99)),
            ("chunks", "forward", 16, (1.2, 0.97)),
        )
        for seqlen, ratio in zip((512, 1024), ratios, strict=True)
    ]
    cells += [cells[0] | {"refused": "why"}]
    cells[-1].pop("ratio")
    kept, mean, least = builds.findings(cells)
    assert kept.reached and "0.995 of 2 cells" in kept.measured
    assert not mean.reached and "0 below" in mean.measured
    assert not least.reached and "0.970 at least (d 64 causal S 1024, 16 queries)" in least.measured

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert builds_report.builds_section() == "On a GPU: not measured yet."
    setup = {"device": "GPU", "torch": "2", "date": "2026-01-01", "digest": "b" * 16}
    host = {"forward": {"before": 6.0, "now": 5.0, "digest": "c" * 16}}
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "builds.json").write_text(
        json.dumps(setup | {"before": {"digest": "a" * 16}, "cells": cells, "host": host})
    )
    text = builds_report.builds_section()
    assert "source `bbbbbbbbbbbbbbbb`, or that of the row" in text
    assert "before it source `aaaaaaaaaaaaaaaa`" in text
    row = "| chunks | fa2 | forward | 2 | 1.079 | 0.970 (d 64 causal S 1024, 16 queries)"
    assert f"{row} | `1024`, `512` |" in text
    assert "forward 6.0, 5.0 (source `cccccccccccccccc`)." in text


def test_neighbors_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, and that a slow neighbor is found."""
    shape = Cell("bf16", 128, True, 4096, 2, 32, kv_heads=8)
    found = list(neighbors.neighbors(shape))
    assert found[0] == shape and {c.seqlen for c in found} == {4096, 4095, 4097, 4224, 3968, 4160}
    assert (found[-1].heads, found[-1].kv_heads) == (36, 9)
    (finding,) = neighbors.findings([{"ratios": {"a": 1.0, "b": 0.95}}, {"ratios": {"a": 0.89}}])
    assert finding.reached is False and "0.89 at least, 1 below" in finding.measured
    (finding,) = neighbors.findings([])
    assert finding.reached is None

    path = tmp_path / "neighbors.json"
    monkeypatch.setattr(sys, "argv", ["neighbors", "--device", "cpu", "--out", str(path)])
    monkeypatch.setattr(neighbors, "CPU_SHAPES", (Cell("fp32", 16, True, 160, 1, 1),))
    assert neighbors.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(next(iter(row["ratios"].values())) == 1 for row in rows)

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert neighbors_report.neighbors_section() == "On a GPU: not measured yet."
    row = rows[0] | {"ratios": {"S 9, H 1": 1.0, "S 8, H 1": 0.8, "S 7, H 1": 0.95}, "kv_heads": 1}
    row["tflops"] = dict.fromkeys(row["ratios"], 5.0)
    others = rows[1] | {"ratios": {"S 9, H 4": 1.0, "S 8, H 4": 0.91}, "kv_heads": 2}
    others["tflops"] = dict.fromkeys(others["ratios"], 4.0)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "neighbors.json").write_text(
        json.dumps(json.loads(path.read_text()) | {"rows": [row, others]})
    )
    text = neighbors_report.neighbors_section()
    assert "0.80 at least, 1 below; NOT REACHED" in text
    assert "| d 16, causal, B 1, S 9, H 1 | forward | 5 | S 8, H 1 | 0.80 |" in text
    assert "S 9, H 4, 2 of K and V | backward | 4 | S 8, H 4 | 0.91 |" in text


def grid_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setattr("flash_ext.__main__.usable_device", str)  # which this torch may not have
    monkeypatch.setattr(sys, "argv", ["compare", "--device", "cuda", *arguments])
    return list(grid(compare.parse()))


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    standard = grid_of(monkeypatch=monkeypatch)
    assert [dataclasses.asdict(c) for c in standard] and len(standard) == len(SHAPES)
    assert all(on_grid(dataclasses.asdict(c)) for c in standard)
    both = grid_of("--dtype", "bf16", "fp16", "--s", "512", monkeypatch=monkeypatch)
    assert {c.dtype for c in both} == {"bf16", "fp16"} and len(both) == 2 * len(standard) / 6
    others = grid_of("--set", "gqa", "decode", "chunks", "prefill", monkeypatch=monkeypatch)
    assert not any(on_grid(dataclasses.asdict(c)) for c in others)
    decode = [c for c in others if c.seqlen_q]
    assert len(decode) == len(DECODE) + len(CHUNKS)
    assert all(c.direction == "forward" and not c.causal for c in decode)
    alike = [c for c in others if c.kv_heads == c.heads and not c.seqlen_q]
    assert len(alike) == 2 * len(PREFILL)
    assert all(c.direction == "forward" and c.causal and c.batch == 1 for c in alike)
    rest = [c for c in others if not c.seqlen_q and c not in alike]
    assert {c.direction for c in rest} == {"forward", "backward"}
    one = grid_of("--set", "mqa", monkeypatch=monkeypatch)
    assert {(c.heads, c.kv_heads) for c in one} == {(8, 1), (8, 8)}
    assert {c.direction for c in one} == {"forward", "backward"}
    others += one
    arguments = ("--set", "latency", "--sustained", "--graph")
    short = grid_of(*arguments, monkeypatch=monkeypatch)
    assert len(short) == len(LATENCY) and all(c.graph and c.sustained for c in short)
    others += short
    assert "in a CUDA graph" in shape_name(dataclasses.asdict(short[0]))
    with pytest.raises(SystemExit):
        grid_of("--graph", monkeypatch=monkeypatch)
    own = grid_of("--s", "4096", "--sq", "128", "--kv-heads", "4", monkeypatch=monkeypatch)
    assert {(c.seqlen, c.seqlen_q, c.kv_heads) for c in own} == {(4096, 128, 4)}
    assert len({key(dataclasses.asdict(c)) for c in (*standard, *others, *own)}) == (
        len(standard) + len(others) + len(own)
    ), "each has a place of its own in the file"


def test_cells_of_old_files_keep_their_places() -> None:
    new = dataclasses.asdict(Cell(**SHAPES[0]))
    assert key(SHAPES[0]) == key(new)


def test_spread_of_ratios() -> None:
    times = {"fa2": {"ms": 1.0, "q1_ms": 0.9, "q3_ms": 1.1}, "flash": {"ms": 2.0, "q1_ms": 2.0,
                                                                       "q3_ms": 2.2}}  # fmt: skip
    cell = SHAPES[0] | {"providers": times}
    assert ratio_range(cell, "fa2", "flash") == pytest.approx((2 / 1.1, 2.2 / 0.9))
    assert ratio_spread([cell], "fa2", "flash") == pytest.approx(2.2 / 0.9 / 2 - 1)
    (note,) = [compare_report.spread_note([cell | {"gpu": {"sm_mhz": 1500.0, "power_w": 690.0}}])]
    assert "22.2% at most" in note and "1500 to 1500 MHz" in note and "690" in note
    assert compare_report.spread_note([]) == ""


def test_table_of_few_queries() -> None:
    cell = dataclasses.asdict(Cell("bf16", 128, False, 8192, 16, 32, "forward", 1, 8))
    times = {"fa2": {"ms": 1.0, "tflops": 2.0, "tbps": 3.456}}
    text = compare_report.other_table([cell | {"providers": times}], {"fa2": "flash_ext fa2"})
    assert "16 x 1 x 8192, heads 32/8, TB/s of K and V | 3.46 |" in text


def test_clocks() -> None:
    log = common.ClockLog(torch.device("cpu"))
    for line in ("1980, 100.5, 30\n", "[N/A], 1, 2\n", "1500, 690.5, 50\n", "1400, 695, 50\n"):
        log.add(line)
    assert log.since_last() == {"sm_mhz": 1500, "power_w": 690.5, "temperature_c": 50}
    assert log.since_last() == {}
    log.close()


class Reports:
    """A plugin of pytest that keeps what it reports."""

    def __init__(self) -> None:
        self.skipped: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.skipped += [report] * report.skipped


def test_report_says_why_tests_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', (1, 2))\n"
        "def test_memory(i): pytest.skip('needs 100 GiB')\n"
        "@pytest.mark.skip(reason='needs two GPUs')\n"
        "def test_two(): pass\n"
        "def test_one(): pass\n"
    )
    reports = Reports()
    quiet = ("-p", "no:cacheprovider", "-p", "no:terminal", f"--rootdir={tmp_path}")
    assert pytest.main([*quiet, str(tmp_path)], plugins=[reports]) == 0
    reasons = gpu_test_report.skip_reasons(reports.skipped)
    assert reasons == {"needs 100 GiB": 2, "needs two GPUs": 1}


# As `pytest ARGUMENTS --part I/N --report I.json`, once for each part; torch is imported once.
RUN_PARTS = """
import os, sys, attention_testing, pytest
parts, *arguments = sys.argv[1:]
for i in range(int(parts)):
    if os.fork() == 0:
        report = ["--part", f"{i}/{parts}", "--report", f"{i}.json"]
        os._exit(pytest.main([*arguments, *report]))
    os.wait()
"""


def test_parts_of_the_gpu_tests(tmp_path: Path) -> None:
    """Every test is in one part, and the variants of a test in the same."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('name', ('fa1', 'fa2', 'fa3'))\n"
        "@pytest.mark.parametrize('i', range(20))\n"
        "def test_it(i, name): assert i != 7 or name != 'fa3'\n"
        "@pytest.mark.parametrize('gpus', (0, 99))\n"
        "def test_gpus(gpus, need_gpus): need_gpus(gpus)\n"
    )
    command = [sys.executable, "-c", RUN_PARTS, "3"]
    command += ["-q", "-p", "no:cacheprovider", "-s", f"--rootdir={tmp_path}", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    subprocess.run(command, env=environment, cwd=tmp_path)
    parts = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    passed = [part["counts"]["passed"] for part in parts]
    assert sum(passed) == 60 and min(passed) > 0
    assert [x for p in parts for x in p["several_gpus"].items()] == [
        ("test_some.py::test_gpus[0]", 0)
    ], "named with their number where there are as many"
    assert [x for p in parts for x in p["skips"]] == ["needs 99 GPUs"]
    assert sorted(p["counts"]["failed"] for p in parts) == [0, 0, 1]
    assert [x for p in parts for x in p["failures"]] == ["test_some.py::test_it[7-fa3]"]
    for parts in (2, 5):
        assert (
            len({gpu_suite.part_of(f"test_it[{name}-3]", parts) for name in flash_ext.VARIANTS})
            == 1
        )


def test_processes_begin_with_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each still sees all of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = [gpu_suite.visible_devices(job)["CUDA_VISIBLE_DEVICES"] for job in range(3)]
    assert seen == ["3,5", "5,3", "3,5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_suite.visible_devices(1)["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_results_of_two_gpus(tmp_path: Path) -> None:
    """Each half runs in a checkout of its own, of the same source; their files end up here."""
    here = tmp_path / "here"
    for name in ("csrc/build/a.py", "flash_ext/timing.py", "build/c.py", ".venv/d.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"x = '{name}'")
    for name in ("merge.py", "compare.py", "common.py", "digest.py", "evidence.sh"):
        (here / "benchmarks").mkdir(parents=True, exist_ok=True)
        (here / "benchmarks" / name).write_text((ROOT / "benchmarks" / name).read_text())
    (here / "flash_ext/timing.py").write_text((ROOT / "flash_ext/timing.py").read_text())
    python = tmp_path / "python"
    # The modules that are not copied. Not in PYTHONPATH: Python 3.10 would take benchmarks/io.py
    # for its own.
    others = [str(ROOT / "benchmarks"), str(ROOT)]
    run_with_others = (
        f"import runpy, sys; sys.path[:0] = ['benchmarks', *{others}]; del sys.argv[0];"
        " runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    python.write_text(
        f"""#!/bin/bash
[ "$1" = benchmarks/merge.py ] && [ -n "$NOTHING_TO_MERGE" ] && exit
[ "$1" = benchmarks/everything.py ] || exec {sys.executable} -c "{run_with_others}" "$@"
mkdir -p benchmarks/results/x
files=$(ls csrc/build flash_ext build .venv 2>/dev/null | grep -c py)
printf '{{"date": "2026", "parts": "%s", "gpu": %s, "files": %s}}' "${{*:4}}" \
    $CUDA_VISIBLE_DEVICES $files > benchmarks/results/x/$4.json
sed -i "s/\\"$4\\": 0/\\"$4\\": 1/; s/2025/202$((6 + CUDA_VISIBLE_DEVICES))/" \
    benchmarks/results/x/numerics.json 2>/dev/null
[[ $4 = slow* ]] && sleep 60
[ "$2" = --no-report ] && [ $4 != wrong ]
"""
    )
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "out")}

    def run(*parts: str) -> int:
        command = ["bash", "benchmarks/evidence.sh", "results", *parts]
        return subprocess.run(command, cwd=here, env=environment).returncode

    assert run("one", "b", "/", "two") == 0
    found = {p.name: json.loads(p.read_text()) for p in here.glob("benchmarks/results/x/*")}
    assert found == {
        "one.json": {"date": "2026", "parts": "one b", "gpu": 0, "files": 2},
        "two.json": {"date": "2026", "parts": "two", "gpu": 1, "files": 2},
    }
    parts = here / "benchmarks/results/x/numerics.json"
    parts.write_text('{"date": "2025", "one": 0, "two": 0}')
    assert run("one", "/", "two") == 0
    assert json.loads(parts.read_text()) == {"date": "2027", "one": 1, "two": 1}
    environment["NOTHING_TO_MERGE"] = "yes"
    assert run("one", "/", "wrong") == 1 and run("wrong", "/", "one") == 1

    # What is measured when time runs out is kept.
    del environment["NOTHING_TO_MERGE"]
    (tmp_path / "out" / "results.tgz").unlink()
    shutil.rmtree(here / "benchmarks/results")
    command = ["timeout", "4", "bash", "benchmarks/evidence.sh", "results", "slow", "/", "slow2"]
    assert subprocess.run(command, cwd=here, env=environment).returncode == 124
    with tarfile.open(tmp_path / "out" / "results.tgz") as kept:
        assert {"benchmarks/results/x/slow.json", "benchmarks/results/x/slow2.json"} <= set(
            kept.getnames()
        )


@pytest.mark.parametrize(
    ("visible", "cores", "jobs"),
    ((None, 64, 32), ("0", 16, 8), ("0", 64, 8), ("0,GPU-3", 64, 16), (None, 16, 8)),
)
def test_processes_of_the_gpu_tests(
    visible: str | None, cores: int, jobs: int, tmp_path: Path
) -> None:
    """Four GPUs of 80 GB, or those of CUDA_VISIBLE_DEVICES, and so many cores."""
    scripts = {
        "bin/nproc": f"echo {cores}",
        "bin/nvidia-cuda-mps-control": "exit 0",
        # One line for each GPU that is asked for.
        "bin/nvidia-smi": "ids=0,1,2,3; [[ $1 = --id=* ]] && ids=${1#--id=}; "
        "tr , '\n' <<<$ids | sed 's/.*/81559/'",
        "bin/python": '[ "$1" = tests/gpu_suite.py ] && echo "$@" >"$OUT/asked"; exit 0',
        "tests/sanitize.sh": "exit 0",
        "benchmarks/evidence.sh": (ROOT / "benchmarks/evidence.sh").read_text(),
    }
    for name, script in scripts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks/results").mkdir()
    environment = {n: x for n, x in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    environment |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}",
        "PYTHON": str(tmp_path / "bin/python"),
        "OUT": str(tmp_path / "out"),
    }
    command = ["bash", "benchmarks/evidence.sh", "tests"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "out/asked").read_text().split()[1:] == ["--jobs", str(jobs)]


def test_cells_of_two_runs_are_merged(tmp_path: Path) -> None:
    def cell(seqlen: int, ms: float) -> dict:
        found = dataclasses.asdict(Cell("bf16", 64, True, seqlen, 1, 1))
        return found | {"ms": ms, "date": str(ms)}

    setup = dict.fromkeys(common.SAME_SETUP, "same")
    here = setup | {"date": "1", "labels": {"a": "A"}, "cells": [cell(64, 1.0), cell(128, 1.0)]}
    other = setup | {
        "date": "2",
        "labels": {"b": "B"},
        "cells": [cell(64, 0.5), cell(128, 2.0), cell(256, 2.0)],
    }
    target, source = tmp_path / "here" / "compare.json", tmp_path / "other.json"
    target.parent.mkdir()
    common.write_json(target, here)
    common.write_json(source, other)
    merge.merge(source, target)
    merged = json.loads(target.read_text())
    assert [(c["seqlen"], c["ms"]) for c in merged["cells"]] == [(64, 1.0), (128, 2.0), (256, 2.0)]
    assert merged["labels"] == {"a": "A", "b": "B"}
    common.write_json(source, other | {"digest": "another", "date": "0"})
    merge.merge(source, target)
    assert json.loads(target.read_text()) == merged, "an older file of another source is left out"
    later = other | {"date": "0", "host": {"us": 1.0}}
    assert merge.with_cells(merged | {"host": {"us": 2.0}}, later, {})["host"] == {"us": 2.0}
    assert merge.with_cells(merged, later, {})["host"] == {"us": 1.0}


def test_parts_of_a_file_that_two_gpus_measured_are_merged(tmp_path: Path) -> None:
    setup = dict.fromkeys(common.SAME_SETUP, "same")
    here = setup | {"date": "1", "cells": [1], "support": {"window": None, "sink": "old"}}
    other = setup | {"date": "2", "fp8": [2], "support": {"sink": "new"}}
    target, source = tmp_path / "here" / "support.json", tmp_path / "other.json"
    target.parent.mkdir()
    for first, second in ((here, other), (other, here)):
        common.write_json(target, first)
        common.write_json(source, second)
        merge.merge(source, target)
        assert json.loads(target.read_text()) == here | other | {
            "support": {"window": None, "sink": "new"}
        }
    target = tmp_path / "here" / "io.json"  # one run writes all of it
    common.write_json(target, here | {"not_counted": "why"})
    common.write_json(source, other)
    merge.merge(source, target)
    assert json.loads(target.read_text()) == other


@pytest.mark.parametrize("name", merge.WITH_CELLS + merge.WITH_PARTS)
def test_a_part_that_a_run_only_carries_along_is_not_new(name: str, tmp_path: Path) -> None:
    setup = dict.fromkeys(common.SAME_SETUP, "same") | {"cells": []}
    old = setup | {"date": "1", "host": "old", "fp8": "old", "support": {"a": "old", "b": "old"}}
    one = old | {"date": "2", "host": "new", "support": {"a": "new", "b": "old"}}
    two = old | {"date": "3", "fp8": "new", "support": {"a": "old", "b": "new"}}
    paths = target, source, before = [tmp_path / x / name for x in ("here", "other", "before")]
    for path in paths:
        path.parent.mkdir()
    common.write_json(before, old)
    for first, second in itertools.permutations((one, two)):
        common.write_json(target, first)
        common.write_json(source, second)
        merge.merge(source, target, before)
        new = {"date": "3", "host": "new", "fp8": "new", "support": {"a": "new", "b": "new"}}
        assert json.loads(target.read_text()) == setup | new
    common.write_json(source, old)
    merge.merge(source, target, before)
    assert json.loads(target.read_text()) == setup | new, "nothing was measured"


def test_failed_tests_run_again() -> None:
    before = {
        "counts": {"passed": 7, "failed": 2, "error": 1, "skipped": 4},
        "failures": ["a", "b", "c"], "exit_status": 1, "digest": "x", "processes": 8,
    }  # fmt: skip
    again = {
        "counts": {"passed": 2, "failed": 1}, "failures": ["b"], "exit_status": 1, "processes": 1,
        "skips": {}, "several_gpus": {"a": 4},
    }  # fmt: skip
    found = gpu_suite.replaced(before | {"several_gpus": {"d": 2}}, again)
    counts = {"passed": 9, "failed": 1, "error": 0, "skipped": 4}
    several = {"a": 4, "d": 2}
    new = {"counts": counts, "failures": ["b"], "again": 3, "several_gpus": several}
    assert found == before | new


@pytest.mark.parametrize(
    ("before", "again", "status", "message"),
    (
        (["a process ended with status -6"], [], 1, "nothing was run: 'a process ended"),
        (["tests/test_rule.py::test_gone"], [], 4, "nothing is written: .* status 4"),
        (["tests/test_rule.py"], ["a process ended with status 1"], 1, "nothing is written"),
    ),
)
def test_what_did_not_run_again_replaces_nothing(
    before: list[str], again: list[str], status: int, message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    result = {"failures": again, "counts": {}, "exit_status": status}
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(common, "describe_setup", lambda device: {})
    monkeypatch.setattr(gpu_suite, "run", lambda *_: result)
    path = common.result_path(torch.device("cuda"), "tests.json")
    common.write_json(path, {"failures": before, "counts": {}})
    with pytest.raises(SystemExit, match=message):
        gpu_suite.run_failed(tmp_path)


def test_without_a_gpu_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of which every test skips is no evidence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_suite, "run", lambda *_: pytest.fail("the tests were run"))
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_suite.main()


def test_a_part_that_crashes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are added up, and one without a report is an error."""

    class Part:
        def __init__(self, command: list[str], **_: object) -> None:
            report = Path(command[command.index("--report") + 1])
            self.returncode = -11 if report.name == "1.json" else 0
            if not self.returncode:
                found = {"counts": {"passed": 2}, "skips": {"why": 1}, "failures": []}
                report.write_text(json.dumps(found | {"several_gpus": {report.name: 2}}))

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(gpu_suite.subprocess, "Popen", Part)
    result = gpu_suite.run(3, [], tmp_path)
    assert result["counts"] == {"passed": 4, "error": 1} and result["skips"] == {"why": 2}
    assert result["exit_status"] == 11 and result["failures"] == ["a process ended with status -11"]
    assert result["several_gpus"] == {"0.json": 2, "2.json": 2}


def test_make_tells_the_sanitizers_which_python() -> None:
    """Not the one that it was given, where that has no torch."""
    command = ["make", "-n", "sanitize", "PYTHON=false", "ARGS=memcheck"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    python = ROOT / ".venv/bin/python"
    assert f'PYTHON="{python}" bash tests/sanitize.sh memcheck\n' in found.stdout


def test_report_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path and content of both files, on a made-up device."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    setup = {"device": "NVIDIA H200", "digest": "0123456789abcdef"}
    monkeypatch.setattr(common, "describe_setup", lambda device: setup)

    path = gpu_test_report.write("tests.json", {"counts": {"passed": 3}})
    assert path == tmp_path / "nvidia-h200" / "tests.json"
    assert json.loads(path.read_text()) == setup | {"counts": {"passed": 3}}
    path = gpu_test_report.write_sanitizer(["memcheck 0 12", "racecheck 99 30"], 24)
    assert path.name == "sanitizer.json"
    tools = json.loads(path.read_text())["tools"]
    assert tools["racecheck"] == {"exit_status": 99, "seconds": 30}


SHAPES = [
    {"dtype": "bf16", "d": d, "causal": causal, "seqlen": s, "batch": 16384 // s,
     "heads": 2048 // d, "direction": direction}
    for direction in ("forward", "backward")
    for d in (64, 128, 256)
    for causal in (False, True)
    for s in (512, 1024, 2048, 4096, 8192, 16384)
]  # fmt: skip


def grid_results(speedup: float) -> list[dict]:
    """The whole standard grid, where fa2 is ``speedup`` times as fast as SDPA flash."""
    return [s | {"providers": {"fa2": {"ms": 1.0}, "flash": {"ms": speedup}}} for s in SHAPES]


def test_verdict_on_the_grid() -> None:
    cells = grid_results(1.2)
    assert all(on_grid(c) for c in cells)

    goals = [goal for goal in GOALS if goal.ours == "fa2"]

    def first() -> str:
        return verdict(goals[0], cells)

    assert all(verdict(goal, cells).endswith("; reached") for goal in goals)
    cells.append(cells[0] | {"d": 96, "providers": {"fa2": {"ms": 9.0}, "flash": {"ms": 1.0}}})
    assert first().endswith("; reached"), "other head dims have no part in the goal"
    cells[0]["providers"]["flash"]["ms"] = 0.9
    assert "smallest 0.900x (d 64 full S 512), 1 of 36 cells below 1x" in first()
    assert first().endswith("NOT REACHED")
    del cells[1]
    assert first().endswith("not the whole grid")
    assert verdict(GOALS[-1], cells).endswith("not measured")
    row = summarise(grid_results(1.05), ["fa2", "flash"])[-1]
    assert row["geometric_mean"] == 1.05 and row["cells"] == 36 and row["d"] is None


def with_peers(cudnn: float, fa4: float | None, ratio: float | None) -> dict | None:
    """The best peer of a cell in which fa3 takes 1 ms and the peers so much."""
    times = {"fa3": 1.0, "cudnn": cudnn} | ({} if fa4 is None else {"flash_attn_4": fa4})
    return providers.best_peer({n: {"ms": t, "tflops": 1 / t} for n, t in times.items()}, ratio)


def test_the_best_peer_is_measured_or_says_that_it_is_recorded() -> None:
    assert with_peers(2.0, 1.5, 9.0) == {"ms": 1.5, "tflops": 1 / 1.5, "of": "flash_attn_4"}
    assert with_peers(2.0, 2.5, None) == {"ms": 2.0, "tflops": 0.5, "of": "cudnn"}
    assert with_peers(2.0, None, None) is None, "one peer alone is not the best of two"
    assert with_peers(2.0, None, 0.8) == {"ms": 2.0, "tflops": 0.5, "of": "cudnn"}
    recorded = with_peers(2.0, None, 1.25)
    assert recorded == {"ms": 1.6, "tflops": 0.625, "of": "flash_attn_4", "recorded": True}


def test_recorded_ratios_are_those_of_the_grid() -> None:
    """Every cell has one, and no cell of another size or type gets one."""
    recorded = common.read_json(common.RESULTS / "nvidia-h200" / "recorded_peers.json")
    times = {"fa3": {"ms": 1.0, "tflops": 1.0}, "cudnn": {"ms": 1.0, "tflops": 1.0}}
    cells = with_best([s | {"providers": times} for s in SHAPES], recorded)
    assert len(recorded["ratios"]) == len(SHAPES)
    assert all(providers.BEST in c["providers"] for c in cells)
    line = verdict(GOALS[-1], cells)
    assert "against a recorded ratio" in line and line.endswith("NOT REACHED")
    for other in ({"dtype": "fp16"}, {"batch": 3}, {"d": 96, "heads": 21}):
        (cell,) = with_best([SHAPES[0] | other | {"providers": times}], recorded)
        assert providers.BEST not in cell["providers"]


def test_activation_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns of each, a ratio, and a model that computes otherwise is called wrong."""
    monkeypatch.setattr(activation.sdpa, "activated", contextlib.nullcontext)

    def make(batch: int) -> activation.Case:
        x = torch.randint(256, (batch, 16))
        loss = torch.nn.functional.cross_entropy
        return activation.GPT(1, 32, 2, 16), x, lambda y: loss(y, x)

    result = activation.measure(make, torch.device("cpu"), rounds=1, steps=1)
    assert result["sdpa"]["ms"] > 0 and result["ratio"] > 0 and result["difference"] == 0
    monkeypatch.setattr(activation.sdpa, "activated", lambda: sdpa_with(torch.neg))
    result = activation.measure(make, torch.device("cpu"), rounds=1, steps=1)
    assert result["wrong"]


@contextlib.contextmanager
def sdpa_with(function: Callable) -> Iterator[None]:
    """SDPA's result passed through a function."""
    attend = activation.F.scaled_dot_product_attention
    changed = lambda *x, **options: function(attend(*x, **options))  # noqa: E731
    with mock.patch.object(activation.F, "scaled_dot_product_attention", changed):
        yield


def test_claims_on_fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grid where fa3 takes 0.9 times cuDNN's time, and flash-attn 4 was not there."""
    cells = []
    for shape in SHAPES:
        flops = Cell(**shape).flops()
        times = {"fa3": 0.9, "cudnn": 1.0}
        providers = {n: {"ms": t, "tflops": flops / t * 1e-9} for n, t in times.items()}
        cells.append(shape | {"providers": providers})
    setup = {"device": "NVIDIA H200", "torch": "2", "date": "2000-01-01", "digest": "0" * 16}
    labels = {"fa3": "flash_ext fa3", "cudnn": "SDPA cuDNN"}
    times = {"auto": {"us": 8.5}, "fa3": {"us": 9.0}, "cudnn": {"us": 12.34}}
    host = {"shape": [1, 2], "providers": times}
    host["with_backward"] = {"fa3": {"us": 90.0}, "cudnn": {"us": 123.4}}
    host["compiled"] = {"fa3": {"us": 15.0}, "cudnn": {"skipped": "why"}}
    recorded = common.RESULTS / "nvidia-h200" / "recorded_peers.json"
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / "compare.json").write_text(
        json.dumps(setup | {"cells": cells, "labels": labels, "host": host})
    )
    assert "fa3 over best peer, forward, every cell of the grid: at least 0.98× | not" in (
        compare_report.results_section()
    ), "of cuDNN alone nobody knows whether it is the best"
    (folder / recorded.name).write_text(recorded.read_text())
    text = compare_report.results_section()
    assert "| fa3 over best peer, forward, geometric mean: at least 1.08× | 1.0" in text
    assert "marked r below" in text and " r |" in text
    assert "| fa3, forward, d 64 full, S 16384: at least 560 TFLOP/s | 2443 | holds |" in text
    assert "host time per call, forward, µs | 8.5 | 9.0 | 12.3 |" in text
    assert "host time per call, forward and backward, µs | – | 90.0 | 123.4 |" in text
    assert "host time per call, forward, compiled, µs | – | 15.0 | – |" in text

    one = {"dtype": "bf16", "d": 128, "causal": False, "seqlen": 2048, "batch": 128, "heads": 32}
    one |= {"direction": "forward", "providers": {"fa1": {"ms": 1.0}, "standard": {"ms": 2.0}}}
    decode = one | {
        "seqlen_q": 1,
        "kv_heads": 32,
        "providers": {"fa1": {"ms": 1.0}, "standard": {"ms": 9.0}},
    }
    more = setup | {"cells": [*cells, one, decode], "labels": labels}
    (folder / "compare.json").write_text(json.dumps(more))
    assert "B·H ≥ 132: at least 1.5× | 2.00× – 2.00×, in 1 cells | holds |" in (
        compare_report.results_section()
    ), "a decoding step is no self-attention"

    for c in cells:
        c["providers"]["flash_attn_4"] = c["providers"]["cudnn"]
    labels["flash_attn_4"] = "flash-attn 4"
    both = setup | {"cells": cells, "labels": labels, "versions": {"flash_attn_4": "4.0"}}
    (folder / "compare.json").write_text(json.dumps(both))
    text = compare_report.results_section()
    assert "Both were measured in the same process, flash-attn 4 is 4.0." in text
    assert "recorded ratio" not in text and " r |" not in text


def test_lengths_of_the_mix() -> None:
    """What the documents say of them: 16,384 tokens, 1k in the mean, 8,192 at most, a long tail."""
    lengths = options.draw_lengths(options.GPU.tokens, options.GPU.longest)
    assert lengths == options.draw_lengths(options.GPU.tokens, options.GPU.longest)
    assert sum(lengths) == 16384 and len(lengths) == 16 and max(lengths) == 8192
    assert sorted(lengths)[8] < 600
    seqlen = options.dense_seqlen(lengths, 2, 128)
    assert seqlen % 128 == 0
    assert abs(2 * seqlen**2 / sum(n * n for n in lengths) - 1) < 0.05


def run(main: Callable[[], int], *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    return main()


def test_options_and_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run on the CPU, taken for a GPU's, and its tables."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert options_report.options_section() == "On a GPU: not measured yet."
    path = tmp_path / "gpu" / "options.json"
    path.parent.mkdir()
    (path.parent / "tests.json").write_text("{}")
    assert options_report.options_section() == "gpu: not measured yet."

    arguments = ("--device", "cpu", "--rounds", "1", "--d", "64", "--out", str(path))
    assert run(options.main, *arguments, monkeypatch=monkeypatch) == 0
    result = json.loads(path.read_text())
    assert result["digest"] == common.source_digest() and not result["incomplete"]
    kinds = [[v for v, _ in x if v in flash_ext.CPU_VARIANTS] for x in
             (options.MEASURED, options.MIXED)]  # fmt: skip
    assert len(result["options"]) == 2 * len(kinds[0]) and len(result["mix"]) == 2 * len(kinds[1])
    for cell in result["options"]:
        timed = {n for n, r in cell["results"].items() if "ratio" in r}
        once = cell["direction"] == "backward"
        assert timed == {n for n in options.OPTIONS if once or n not in options.BACKWARD_ONLY}
    for cell in result["mix"]:
        speeds = {n: r["over_dense"] for n, r in cell["results"].items() if "tflops" in r}
        assert {"dense", "as drawn", "ascending", "descending"} <= set(speeds)
        assert speeds["dense"] == 1
    text = options_report.options_section()
    assert all(f"| {name}: " in text for name in options.OPTIONS if name != options.PLAIN)
    assert "| fa2 forward, d 64, causal |" in text
    assert [c["causal"] for c in result["deterministic"]] == [False, True]
    for cell in result["deterministic"]:
        assert set(cell["results"]) == {"fa2", "fa2 deterministic"}
        assert cell["results"]["fa2 deterministic"]["ratio"] > 0
    assert "| TFLOP/s (time over the usual) | fa2 |" in text and "| d 64, causal | " in text

    late = (*arguments, "--budget", "0", "--only", "mix")
    assert run(options.main, *late, monkeypatch=monkeypatch) == 1, "over the budget"
    assert json.loads(path.read_text())["mix"], "cells of the same source are kept"


def test_a_wrong_option_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = options.Bench(torch.device("cpu"), 1)
    call = calls.Call(*torch.randn(3, 1, 64, 2, 64), {"causal": False})

    def wrong() -> calls.Attend:
        return lambda c: (c.exact()[0] * 1.1, c.exact()[1])

    for direction in ("forward", "backward"):
        results = bench.times({"right": (call, lambda: calls.Call.exact), "wrong": (call, wrong)},
                              direction)  # fmt: skip
        assert "ms" in results["right"]
        assert results["wrong"]["wrong"] and "ms" not in results["wrong"]


def test_memory_ends_where_calls_get_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is no failure of a variant; a growth that is not linear is."""
    path = tmp_path / "memory.json"
    arguments = ("--device", "cpu", "--d", "32", "--heads", "1", "--out", str(path), "--peers")
    # The profiler's first start, which counts as time of a call, takes a second or two.
    quick = ("--s", "64", "128", "99999", "--variants", "fa2", "--limit", "60")
    run(memory.main, *arguments, *quick, monkeypatch=monkeypatch)
    rows = json.loads(path.read_text())["providers"]["fa2"]
    for row in rows.values():
        assert list(row["bytes"]) == ["64", "128"] and "stopped" not in row
        assert re.fullmatch(r"S = 99999: a call would take about [\d,]+\.\d s", row["slow"])
    assert memory.fit({1024: 1 << 20, 2048: 2 << 20, 4096: 4 << 20}).exponent == 1
    assert memory.fit({1024: 1 << 20, 2048: 4 << 20}).exponent == 2


def train_on_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, status: int = 0
) -> dict[str, dict]:
    """What a short training at S 64 leaves of each provider."""
    arguments = ("--device", "cpu", "--rounds", "2", "--steps", "1", "--seq", "64", "--providers")
    code = run(train.main, *arguments, *names, "--out", str(path), monkeypatch=monkeypatch)
    assert code == status
    (cell,) = json.loads(path.read_text())["cells"]
    assert list(cell["providers"]) == list(names)
    return cell["providers"]


def test_training_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run on the CPU, taken for a GPU's, and its table."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert train_report.training_section() == "On a GPU: not measured yet."
    path = tmp_path / "gpu" / "train.json"
    path.parent.mkdir()
    (path.parent / "tests.json").write_text("{}")
    assert train_report.training_section() == "gpu: not measured yet."

    found = train_on_the_cpu(path, monkeypatch, "fa2", "sdpa", "standard")
    result = json.loads(path.read_text())
    assert result["digest"] == common.source_digest()
    (cell,) = result["cells"]
    assert cell["batch"] * cell["seqlen"] == train.CPU_TOKENS and cell["reference"] == "standard"
    for r in found.values():
        assert r["tokens_per_second"] == pytest.approx(train.CPU_TOKENS / r["ms"] * 1e3, rel=1e-3)
        assert r["q1_ms"] <= r["ms"] <= r["q3_ms"]
        # Each step has another batch, of the text of this Python's library: not every loss falls.
        assert len(r["losses"]) == train.WARM_UP + 2 * (1 + 1) and min(r["losses"]) < r["losses"][0]
        assert r["loss_difference"] < 1e-5, "float32: the same but for the order of sums"
    arguments = ("--device", "cpu", "--seq", "64", "32", "--steps", "1", "--minutes", "0")
    assert run(train.main, *arguments, "--out", str(path), monkeypatch=monkeypatch) == 0
    assert json.loads(path.read_text())["cells"] == [cell], "no cell has begun"
    ratio = found["fa2"]["tokens_per_second"] / found["sdpa"]["tokens_per_second"]
    text = train_report.training_section()
    assert f"| flash_ext fa2 | {found['fa2']['tokens_per_second']:,.0f} | {ratio:.2f} |" in text
    assert "| tiny, S 64 | SDPA |" in text

    rate = train.MODELS["tiny"].rate
    config = train.train_gpt.Config(2, 2, 32, 64, 2, 7, "cpu", train.MEGABYTES, rate)
    data = train.train_gpt.standard_library(train.MEGABYTES)
    example = train.train_gpt.train("x", train.train_gpt.standard_attention, data, config)
    assert found["standard"]["losses"] == pytest.approx(example.losses, rel=1e-5)
    bench = train.Trainee(
        train.sdpa(), config, list(itertools.islice(train.train_gpt.batches(data, config), 4))
    )
    bench.warm_up()
    weights = sum(p.nbytes for p in bench.training.model.parameters())
    counters = len(bench.training.optimizer.state) * 4  # AdamW counts each parameter's steps
    assert bench.state_bytes() == 3 * weights + counters
    extra = common.peak_extra_memory(bench.step, bench.device)
    assert extra > weights, "gradients, and more"
    assert bench.peak_bytes - bench.state_bytes() == pytest.approx(extra, rel=0.1)


def test_shapes_without_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position attends to all: the exact results and all providers have no mask."""
    assert {m for m, size in train.MODELS.items() if not size.causal} == {
        "bert-large", "long-range",
    }  # fmt: skip
    sizes = {"wide": train.Size(1, 2, 32, (32, 64), causal=False)}
    monkeypatch.setattr(train, "MODELS", train.MODELS | sizes)
    path = tmp_path / "train.json"
    arguments = ("--device", "cpu", "--model", "wide", "--rounds", "1", "--steps", "1",
                 "--out", str(path))  # fmt: skip
    assert run(train.main, *arguments, monkeypatch=monkeypatch) == 0
    cells = json.loads(path.read_text())["cells"]
    assert [(c["seqlen"], c["causal"]) for c in cells] == [(32, False), (64, False)]
    found = cells[1]["providers"]
    assert set(found) == {"fa1", "fa2", "sdpa", "standard"}
    assert all(r["loss_difference"] < 1e-5 for r in found.values())
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    masked, whole = (train.in_model(train.sdpa(), causal)(q, k, v) for causal in (True, False))
    assert not torch.equal(masked[:, 0], whole[:, 0])
    assert torch.allclose(masked[:, -1], whole[:, -1], atol=1e-6)


def test_a_model_with_fewer_heads_of_k_and_v(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.json"
    arguments = ("--device", "cpu", "--model", "tiny-llama", "--rounds", "1", "--steps", "1",
                 "--out", str(path))  # fmt: skip
    assert run(train.main, *arguments, monkeypatch=monkeypatch) == 0
    (cell,) = json.loads(path.read_text())["cells"]
    assert (cell["heads"], cell["kv_heads"], cell["rounds"]) == (4, 2, 1)
    assert all(r["loss_difference"] < 1e-5 for r in cell["providers"].values())
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    example = train.train_gpt
    expected = flash_ext.reference.attention(q, k, v, causal=True)[0]
    for attention in (example.standard_attention, example.sdpa, example.flash_attention("auto")):
        torch.testing.assert_close(attention(q, k, v), expected)


def test_a_wrong_training_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong in itself, wrong only in the model, or out of memory in the model."""
    names = ("fa2", "sdpa", "standard")
    path = tmp_path / "train.json"
    in_model = train.in_model
    right = train.sdpa()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return right.attend(q, k, v, causal) * 2

    wrong = dataclasses.replace(right, name="fa2", attend=attend)
    with monkeypatch.context() as patch:
        patch.setitem(providers.VARIANTS, "fa2", lambda: wrong)
        found = train_on_the_cpu(path, monkeypatch, *names, status=1)
    assert found["fa2"]["wrong"] and found["fa2"]["skipped"].startswith("WRONG RESULT: relative")
    assert "losses" not in found["fa2"] and "tokens_per_second" in found["sdpa"]

    def misplaced(provider: providers.Provider, causal: bool) -> object:
        return in_model(wrong if provider.name == "fa2" else provider, causal)

    with monkeypatch.context() as patch:
        patch.setattr(train, "in_model", misplaced)
        found = train_on_the_cpu(path, monkeypatch, *names, status=1)
    assert found["fa2"]["wrong"] and "of standard's" in found["fa2"]["skipped"]
    assert "tokens_per_second" not in found["fa2"] and "tokens_per_second" in found["sdpa"]

    def no_memory(provider: providers.Provider, causal: bool) -> object:
        if provider.name == "standard":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.")
        return in_model(provider, causal)

    with monkeypatch.context() as patch:
        patch.setattr(train, "in_model", no_memory)
        found = train_on_the_cpu(path, monkeypatch, *names)
    assert found["standard"]["skipped"].endswith("Tried to allocate 96.00 GiB.")
    assert found["fa2"]["loss_difference"] < 1e-5 and found["sdpa"]["loss_difference"] == 0
    table = train_report.training_table(json.loads(path.read_text()))
    assert "| standard attention | no memory | – | – | – |" in table
    assert train.loss_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")


def test_support_is_what_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature that runs but gives wrong numbers, or fails, is a no with its reason."""
    plain = ("float16", "scale", "gradient of lse")
    answers = support.probe(torch.device("cpu"), plain)
    assert set(answers) == set(plain)
    for by_variant in answers.values():
        assert tuple(by_variant) == flash_ext.CPU_VARIANTS
        assert all(r is None for by_direction in by_variant.values() for r in by_direction.values())
    attention = flash_ext.attention
    monkeypatch.setattr(flash_ext, "attention", lambda *a, scale=None, **k: attention(*a, **k))
    answers = support.probe(torch.device("cpu"), ["float16", "scale"])
    assert answers["float16"]["fa2"]["forward"] is None
    assert answers["scale"]["fa2"]["forward"].startswith("wrong result: out is off by")
    assert answers["scale"]["fa2"]["backward"].startswith("wrong result: dq is off by")


@pytest.mark.parametrize("name", [n for n, f in support.features().items() if not f.cuda_only])
def test_every_feature_on_the_cpu(name: str) -> None:
    if name.startswith(("head dims", "every other head dim")):
        pytest.skip("many calls; test_attention has the head dims")
    if "FP8" in name:
        answers = support.probe(torch.device("cpu"), [name])[name]
        reasons = [reason for by_variant in answers.values() for reason in by_variant.values()]
        assert all("has no 8-bit inputs" in reason for reason in reasons)
        return
    assert support.probe(torch.device("cpu"), [name])[name] == {
        variant: dict.fromkeys(support.features()[name].directions)
        for variant in flash_ext.CPU_VARIANTS
    }


@pytest.mark.parametrize("name", [n for n in support.features() if "FP8" in n])
def test_support_of_fp8_is_what_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fa3, as on a GPU that has it."""
    monkeypatch.setattr(support, "variants", lambda device: ("fa3",))
    (answers,) = support.probe(torch.device("cpu"), [name])[name].values()
    assert answers["forward"] is None
    no_gradient = "no variant has a backward for 8-bit inputs"
    assert "backward" not in answers or no_gradient in answers["backward"]
    attention = flash_ext.attention
    monkeypatch.setattr(flash_ext, "attention", lambda *a, k_descale=None, **k: attention(*a, **k))
    (answers,) = support.probe(torch.device("cpu"), [name])[name].values()
    assert answers["forward"].startswith("wrong result: ")


def test_a_variant_without_an_answer_of_its_ptx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails; the other's answer is kept; no text has a path of this machine."""
    ended = subprocess.CalledProcessError(-11, sys.executable)
    for error, why in (
        (subprocess.TimeoutExpired(sys.executable, support.PTX_SECONDS), "no answer within 400 s"),
        (ended, "its process ended with status -11"),
    ):

        def run(command: list[str], error: Exception = error, **_: object) -> mock.Mock:
            if command[-1] == "fa1":
                raise error
            return mock.Mock(stdout=b'a warning\n{"forward": null, "backward": null}\n')

        path = tmp_path / "support.json"
        monkeypatch.setattr(support.subprocess, "run", run)
        monkeypatch.setattr(sys, "argv", ["", "--ptx", "--device", "cpu", "--out", str(path)])
        assert support.main() == 1
        answers = json.loads(path.read_text())["support"][support.PTX]
        assert answers["fa1"] == dict.fromkeys(support.BOTH, f"failed: {why}")
        assert answers["fa2"] == dict.fromkeys(support.BOTH)
        assert "machine code" in answers["fa3"]["forward"]


@pytest.mark.parametrize(
    ("error", "reason"),
    (
        ("flash_ext: q must be 1, got a/b", "q must be 1, got a/b"),
        ("/a/b c.cpp:3: flash_ext: q must be", "q must be"),
        ("flash_ext: the CUDA launch failed: why", "failed: the CUDA launch failed: why"),
        ("cannot open /home/a/b.so, no/yes", "failed: RuntimeError: cannot open b.so, no/yes"),
    ),
)
def test_reasons_of_a_failed_ptx(
    error: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(support, "ptx_answers", mock.Mock(side_effect=RuntimeError(error)))
    monkeypatch.setattr(sys, "argv", ["", "--ptx-child", "fa1"])
    assert support.main() == 0
    assert json.loads(capsys.readouterr().out) == dict.fromkeys(support.BOTH, reason)


def test_support_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each no has its reason below; what a device was not asked is 'not measured yet'."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    asked = {
        "float16": {v: dict.fromkeys(support.BOTH) for v in flash_ext.VARIANTS},
        "gradient of lse": {v: {"backward": "no time"} for v in flash_ext.VARIANTS},
    }
    monkeypatch.setattr(support_report, "probe", lambda device: asked)
    names = ("float16", "gradient of lse", "softcap", support.PTX)
    monkeypatch.setattr(
        support_report, "features", lambda: {n: support.features()[n] for n in names}
    )
    setup = {"device": "A GPU", "torch": "2", "date": "2000-01-01", "digest": "0" * 16}
    path = tmp_path / "gpu" / "support.json"
    path.parent.mkdir()
    path.write_text(json.dumps(setup | {"support": asked}))
    lines = support_report.support_section().splitlines()
    variants, on_cpu = len(flash_ext.VARIANTS), len(flash_ext.CPU_VARIANTS)

    def row(name: str, *answers: str) -> str:
        return f"| {' | '.join((name, *answers))} |"

    unknown = ("not measured yet",) * 2 * variants
    assert row("float16", *("yes",) * (2 * variants + on_cpu)) in lines
    assert row("gradient of lse", *("", "no (1)") * variants, *("no (1)",) * on_cpu) in lines
    assert row("softcap", *unknown, *("not measured yet",) * on_cpu) in lines
    assert row(support.PTX, *unknown, *("",) * on_cpu) in lines
    assert lines[-1] == "(1) no time."


# --- FP8 ---


def test_the_fp8_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = grid_of("--set", "fp8", monkeypatch=monkeypatch)
    assert len(cells) == 5 * 2 * 4 and all(c.direction == "forward" for c in cells)
    assert {(c.d, c.d_v) for c in cells} == {(64, 0), (96, 0), (128, 0), (192, 128), (256, 0)}
    assert all(c.batch * c.seqlen == 16384 and c.heads == 2048 // c.d for c in cells)
    as_json = [dataclasses.asdict(c) for c in cells]
    assert not any(is_plain(c) or on_grid(c) for c in as_json)
    assert len(fp8_cells(as_json)) == len(cells)
    for cell in cells:
        assert cell.flops() == dataclasses.replace(cell, dtype="bf16").flops()
    with_others = grid_of(
        "--set", "standard", "fp8", "--dtype", "bf16", "fp16", monkeypatch=monkeypatch
    )
    assert len(with_others) == len(cells) + 2 * len(SHAPES), "once, whatever the types"
    assert len({key(dataclasses.asdict(c)) for c in with_others}) == len(with_others)
    few = grid_of("--set", "fp8", "--d", "192", "--s", "2048", "--full", monkeypatch=monkeypatch)
    assert [(c.d, c.d_v, c.seqlen, c.causal) for c in few] == [(192, 128, 2048, False)]


class FakeCudnn:
    """The part of nvidia-cudnn-frontend that `CudnnFp8` uses, with standard attention below."""

    heur_mode = mock.MagicMock()
    data_type = mock.MagicMock()

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def pygraph(self, **_: object) -> mock.MagicMock:
        graph = mock.MagicMock()
        graph.get_workspace_size.return_value = 0
        graph.tensor.side_effect = lambda **_: self.tensor()
        result, largest = self.tensor(), self.tensor()
        arguments: dict = {}

        def sdpa_fp8(**given: object) -> list:
            arguments.update(given)
            return [result, None, largest, None]

        def execute(memory: dict, *_: object, **__: object) -> None:
            assert len(memory) == 3 + 6 + 2 and memory[largest].shape == (1,)

            def numbers(name: str) -> torch.Tensor:
                return memory[arguments[name]].view(torch.float8_e4m3fn).float()

            def number(name: str) -> float:
                return float(memory[arguments[name]])

            assert number("scale_s") * number("descale_s") == 1
            q, k, v = (numbers(name) * number(f"descale_{name}") for name in "qkv")
            out, _ = flash_ext.reference.attention(
                q, k, v, scale=arguments["attn_scale"], causal=arguments["use_causal_mask"]
            )
            out = out * number("scale_o") * self.factor
            assert out.abs().max() <= 448
            memory[result].copy_(out.to(torch.float8_e4m3fn).view(torch.uint8))

        graph.sdpa_fp8.side_effect, graph.execute.side_effect = sdpa_fp8, execute
        return graph

    @staticmethod
    def tensor() -> mock.MagicMock:
        one = mock.MagicMock()
        for name in ("set_output", "set_data_type", "set_dim", "set_stride"):
            getattr(one, name).return_value = one
        return one


def run_fp8(
    path: Path, monkeypatch: pytest.MonkeyPatch, cudnn: object, *more: str
) -> tuple[int, list[dict]]:
    """The smoke test of the set, with or without a cuDNN: its exit status and cells."""
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(fp8_providers, "cudnn_handle", lambda: None)
    arguments = ("--device", "cpu", "--set", "fp8", "--rounds", "1", "--s", "128", "--peers",
                 "flash", "--variants", "fa2", "--out", str(path), *more)  # fmt: skip
    status = run(compare.main, *arguments, monkeypatch=monkeypatch)
    return status, json.loads(path.read_text())["cells"]


def test_fp8_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside cuDNN and bfloat16, each right by its own inputs."""
    status, cells = run_fp8(tmp_path / "compare.json", monkeypatch, FakeCudnn())
    assert status == 0 and sorted(c["causal"] for c in cells) == [False, True]
    for cell in cells:
        found = cell["providers"]
        assert sorted(found) == ["cudnn_fp8", "fa3_fp8", "fa3_fp8_tensor", "fa3_int8", "flash"]
        assert all(r["ms"] > 0 for r in found.values())
        assert 1e-2 < found["fa3_int8"]["error"] < 4e-2, "the same P"
        assert 1e-2 < found["fa3_fp8"]["error"] < 4e-2, "P in e4m3"
        assert abs(found["fa3_fp8_tensor"]["error"] - found["fa3_fp8"]["error"]) < 1e-3
        assert 1e-2 < found["cudnn_fp8"]["error"] < 4e-2, "its output in e4m3"
        assert found["flash"]["error"] < 1e-2, "held against the inputs before quantization"
    shown = capsys.readouterr().out
    assert "FP8 forward, d 64, causal: TFLOP/s" in shown and "fa3 in FP8 is" in shown
    assert "fa3 in FP8 over cuDNN, FP8, d 128, geometric mean: at least 1.08×: not meas" in shown


def test_fp8_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--device", "cpu", "--set", "fp8", "decode", "--variants", "fa2")
    with pytest.raises(SystemExit, match="alone"):
        run(compare.main, *arguments, monkeypatch=monkeypatch)


def test_fp8_without_cudnn_or_where_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons, no failures; but a wrong result of ours is one."""
    path = tmp_path / "compare.json"
    with monkeypatch.context() as patch:
        status, cells = run_fp8(path, patch, None, "--full")
        assert status == 0
        assert "ModuleNotFoundError" in cells[0]["providers"]["cudnn_fp8"]["skipped"]
        assert cells[0]["providers"]["fa3_fp8"]["ms"] > 0
    explain = flash_ext.explain

    def refusing(*inputs: torch.Tensor, **options: object) -> object:
        found = explain(*inputs, **options)
        if inputs[0].dtype == torch.float8_e4m3fn:
            found.reasons["fa3"] = "variant 'fa3' takes only others"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(flash_ext, "explain", refusing)
        status, cells = run_fp8(path, patch, FakeCudnn(1.5), "--full")
        assert status == 0, "neither a refusal of ours nor a wrong peer fails"
        found = cells[0]["providers"]
        assert found["fa3_fp8"] == {"skipped": "variant 'fa3' takes only others", "refused": True}
        assert found["cudnn_fp8"]["wrong"]
    attention = flash_ext.attention

    def wrong(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        return attention(*inputs, **options) * (1.2 if "q_descale" in options else 1)

    with monkeypatch.context() as patch:
        patch.setattr(flash_ext, "attention", wrong)
        status, cells = run_fp8(path, patch, FakeCudnn(), "--full")
        assert status == 1 and cells[0]["providers"]["fa3_fp8"]["wrong"]


def fp8_speeds(**times: float) -> list[dict]:
    """The whole set, where each takes so many milliseconds."""
    cells = []
    for d, d_v in FP8_DIMS.items():
        for causal, seqlen in itertools.product((False, True), FP8_SEQLENS):
            shape = Cell("fp8", d, causal, seqlen, 16384 // seqlen, 2048 // d,
                                 d_v=0 if d_v == d else d_v)  # fmt: skip
            results = {n: {"ms": t, "tflops": shape.flops() / t * 1e-9} for n, t in times.items()}
            cells.append(dataclasses.asdict(shape) | {"providers": results})
    return cells


def test_goals_of_fp8() -> None:
    cells = fp8_speeds(fa3_fp8=1.0, cudnn_fp8=1.1, fa3=1.5)
    verdicts = {f.goal: f.reached for f in fp8_findings(cells)}
    assert len(verdicts) == 5 and [v for g, v in verdicts.items() if "d 128" in g] == [True, True]
    assert [v for g, v in verdicts.items() if "cuDNN, FP8, d 64" in g] == [False]
    cells[0]["providers"]["fa3"]["ms"] = 0.9  # d 64
    (own,) = (f for f in fp8_findings(cells) if "bf16" in f.goal)
    assert own.reached is False and own.measured.startswith("0.90×, of 8 cells, 0.90× – 1.50×")
    del cells[0]
    (own,) = (f for f in fp8_findings(cells) if "bf16" in f.goal)
    assert own.reached is None, "of a part of the set there is no verdict"
    for cell in cells:
        if cell["d"] == 256:
            cell["providers"]["fa3_fp8"] = {"skipped": "too wide", "refused": True}
        if cell["d"] == 128:
            cell["providers"]["cudnn_fp8"] = {"skipped": "not there"}
    by_goal = {f.goal: f for f in fp8_findings(cells)}
    (wide,) = (f for g, f in by_goal.items() if "d 256" in g)
    assert (wide.reached, wide.why) == (False, "too wide")
    absent = [f for g, f in by_goal.items() if "d 128" in g]
    assert all((f.reached, f.measured) == (None, "not there") for f in absent)
    assert "not all was measured" in str(absent[0]) and "NOT REACHED" in str(wide)


def test_methods_of_quantization() -> None:
    """Ours is that of `flash_ext.fp8.attention`, but for the signs; each gives what it names."""
    q, k, v = (torch.randn(1, 140, 2, 64).bfloat16() for _ in range(3))
    for name, method in fp8_inputs.METHODS.items():
        x = method(q, k, v)
        assert x.variant() == "fa3"
        want, _ = flash_ext.reference.attention(q.double(), k.double(), v.double())
        for y in (x, x.first_queries(130)):
            rows = y.q.shape[1]
            assert (y.attend() - want[:, :rows]).norm() / want[:, :rows].norm() < 0.1, name
            assert (y.attend() - y.exact()).norm() / want[:, :rows].norm() < 0.06, name
    ours = fp8_inputs.METHODS[fp8_inputs.OURS]
    in_fp8 = fp8_inputs.Method("block", "channel", rotated=True, smooth=True)
    assert ours == dataclasses.replace(in_fp8, qk_dtype=torch.int8)
    assert fp8_inputs.METHODS[fp8_inputs.OURS_IN_FP8] == in_fp8
    signs = flash_ext.fp8._seeded_signs(64, 0, q)
    with mock.patch.object(flash_ext.fp8, "random_signs", lambda *_, **__: signs):
        for method in (ours, in_fp8):
            got = method(q, k, v).attend(out_dtype=torch.bfloat16)
            assert torch.equal(got, flash_ext.fp8.attention(q, k, v, qk_dtype=method.qk_dtype))


def test_where_no_variant_takes_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard attention with P in e4m3 stands in."""
    monkeypatch.setattr(fp8_inputs.Quantized, "variant", lambda self, causal=False: None)
    x = fp8_inputs.METHODS[fp8_inputs.PER_TENSOR](*torch.randn(3, 1, 130, 2, 32).bfloat16())
    want, _ = flash_ext.reference.attention(*x[:3], **x.descales, out_dtype=torch.float16)
    assert torch.equal(x.attend(), want)
    (row,) = fp8_errors.outlier_rows(torch.device("cpu"), SMALL)
    assert row["by"] == fp8_inputs.EMULATION


SMALL = fp8_errors.Sizes({32: 256}, 1, 128, 2, (128, 256), 256, (64,))


def test_fp8_errors_and_a_trained_model_and_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small runs on the CPU, taken for a GPU's. Nothing of it has to be there."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert fp8_report.fp8_section() == "On a GPU: not measured yet."
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "tests.json").write_text("{}")
    text = fp8_report.fp8_section()
    assert text.count("| not measured yet |") == 7 and len(text.splitlines()) == 9

    monkeypatch.setattr(fp8_errors, "CPU", SMALL)
    path = folder / "numerics.json"
    arguments = ("--device", "cpu", "--s", "32", "--d", "16", "--out", str(path))
    assert run(numerics.main, *arguments, "--fp8", monkeypatch=monkeypatch) == 0
    first = json.loads(path.read_text())
    assert len(first["cells"]) == 2 * len(numerics.DISTRIBUTIONS), "the others were not there"
    first["cells"] = first["cells"][:1]
    path.write_text(json.dumps(first))
    assert run(numerics.main, *arguments, "--fp8", monkeypatch=monkeypatch) == 0
    again = json.loads(path.read_text())
    assert again["cells"] == first["cells"] and again["fp8"] == first["fp8"], "added; it repeats"
    assert run(numerics.main, *arguments, monkeypatch=monkeypatch) == 0
    last = json.loads(path.read_text())
    assert last["fp8"] == first["fp8"] and len(last["cells"]) > 1
    (row,) = first["fp8"]["outliers"]
    assert set(row["methods"]) == {*fp8_errors.SIXTEEN_BITS, *fp8_inputs.METHODS}
    assert all(r["rmse"] <= r["rmse_max"] for r in row["methods"].values())

    config = dataclasses.replace(fp8_model.CPU[0], steps=3)
    monkeypatch.setattr(fp8_model, "CPU", (config,))
    path = folder / "train_fp8.json"
    arguments = ("--device", "cpu", "--fp8", "--out", str(path))
    assert run(train.main, *arguments, monkeypatch=monkeypatch) == 0
    (model,) = json.loads(path.read_text())["fp8"]["models"]
    results = model["attentions"]
    assert list(results) == list(fp8_model.ATTENTIONS) and model["steps"] == 3
    assert results[fp8_model.BFLOAT16]["difference"] == 0
    assert 0 < abs(results[fp8_model.FP8]["difference"]) < fp8_model.LIMIT

    setup = {name: first[name] for name in ("device", "torch", "date", "digest")}
    cells = fp8_speeds(fa3_fp8=1.0, cudnn_fp8=1.25, fa3=1.5, cudnn=2.0, flash=4.0)
    for cell in cells:
        if cell["d"] == 256:
            cell["providers"]["fa3_fp8"] = {"skipped": "too wide.", "refused": True}
    compared = {"cells": cells, "labels": {}, "versions": {"cudnn_fp8": "1.2.3"}}
    (folder / "compare_fp8.json").write_text(json.dumps(setup | compared))
    text = fp8_report.fp8_section()
    assert "d 128, geometric mean: at least 1.08× | 1.25×, of 8 cells, 1.25× – 1.25× | holds |" in (
        text
    )
    assert "d 256, geometric mean: at least 1.08× | refused | **not reached**: too wide. |" in text
    assert "nvidia-cudnn-frontend 1.2.3." in text
    assert "| 192/128 causal | best peer, bf16 |" in text and "| 2.00 (2.00) |" in text
    assert "- flash_ext fa3, FP8, d 256: too wide." in text
    assert "| 256 full | flash_ext fa3, FP8 |" not in text
    assert f"| {fp8_inputs.OURS} |" in text
    assert "| d 64, 64 queries, values of mean 1 |" in text and "| weight |" in text
    assert f"| {fp8_model.FP8} | {results[fp8_model.FP8]['loss']:.4f} (" in text
    assert "a trained GPT, d 16: loss with" in text

    loaded = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
    speed, error = claims.fp8_speed(loaded), claims.fp8_error(loaded)
    assert speed is not None and error is not None
    assert speed.figure.endswith("TFLOP/s") and "d 32, 256 keys" in error.conditions
    loaded["compare_fp8"]["cells"] = []
    del loaded["numerics"]["fp8"]["outliers"][0]["methods"][fp8_inputs.OURS]  # an older source
    assert claims.fp8_error(loaded) is None
    assert claims.fp8_speed(loaded) is None


@pytest.mark.parametrize("limit", (4.5, 1000.0))
def test_calls_on_several_gpus_take_turns(limit: float) -> None:
    """Of long calls there are two rounds, in both orders, so that neither has the cooler GPU."""
    clock = distributed.Clock(torch.device("cpu"), limit)
    made, seconds = [], {"a": itertools.count(3.0), "b": itertools.count(2.0)}

    def call(name: str) -> float:
        made.append(name)
        return next(seconds[name])

    with (
        mock.patch.object(clock, "slowest", lambda x: x),
        mock.patch.object(clock, "once", lambda call: (call(), False)),
        mock.patch.multiple(distributed, MOST_ROUNDS=2, FEWEST_ROUNDS=1, WARM_UP=0),
    ):
        found = clock.median({name: functools.partial(call, name) for name in "ab"})
    if limit < 5:
        assert "".join(made) == "abba"
        assert found == {"a": 3.5, "b": 2.5}
    else:  # two rounds that do not count, and two that do, the second in another order
        assert "".join(made) == "abab" + "abba"
        assert found == {"a": 5.5, "b": 4.5}


def test_each_of_three_calls_on_several_gpus_follows_every_other_one() -> None:
    """Equally often: a method, its kernels alone, and the method without transfers."""
    clock = distributed.Clock(torch.device("cpu"), 1000.0)
    made: list[str] = []
    calls = {name: functools.partial(made.append, name) for name in "abc"}
    with (
        mock.patch.object(clock, "slowest", lambda x: x),
        mock.patch.object(clock, "once", lambda call: (call() or 1.0, False)),
        mock.patch.multiple(distributed, MOST_ROUNDS=6, FEWEST_ROUNDS=1, WARM_UP=0),
    ):
        clock.median(calls)
    rounds = ["".join(made[i : i + 3]) for i in range(6, len(made), 3)]
    assert len(rounds) == 6
    follows = collections.Counter(pair for x in rounds for pair in itertools.pairwise(x))
    assert set(follows.values()) == {2} and len(follows) == 6


@pytest.mark.parametrize("layout", ("zigzag", "document_zigzag"))
def test_two_levels_share_the_rows_of_documents(layout: str) -> None:
    """As attention wants them: those of an outer rank in equal parts, not a part of all ranks."""
    cell = next(distributed.cells(argparse.Namespace(lengths=[], documents=True), 4, cpu=False))

    def rows_of(rank: int, across: int | None = None) -> int:
        with mock.patch.object(distributed.dist, "get_rank", lambda: rank):
            ranks = distributed.Ranks(cell, torch.device("cpu"), torch.float32)
        return ranks.rows_of(layout, across)

    equal = [cell.rows // 4] * 4
    assert [rows_of(rank, across=2) for rank in range(4)] == equal
    assert ([rows_of(rank) for rank in range(4)] == equal) == (layout == "zigzag")
