"""benchmarks/tune.py: from times to the cost constants of csrc/plan, as a diff.

Would catch a fit that misses the constants which the times were made with, a model or a choice that
is not the plan's, and a diff that does not apply. No GPU: the times are made by the model.
"""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_test_report  # noqa: F401  puts benchmarks/ on the path
import pytest
from compiled import NATIVE, python_module

import tune  # isort: skip
import tune_decode  # isort: skip
from tune import Call, Cost, Row, Tile  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (ROOT / tune.TUNING).read_text(), (ROOT / tune.COST).read_text()
ROWS = {(row.dims[0], row.fp8): row for row in tune.read(*TEXTS)}
SMS = 132


def times_of(row: Row, noise: float = 0.0) -> tune.Times:
    """What the calls of the grid take if the model is right; a unit of each call cancels."""
    noises = random.Random(0)
    return {
        call: {
            name: 1e-12
            * (1 + number % 3)
            * tune.forward_time(call, tile, row.costs(call)[name], SMS)
            * (1 + noises.uniform(-noise, noise))
            for name, tile in row.tiles.items()
        }
        for number, call in enumerate(tune.grid(row.dims[0]))
    }


def with_costs(row: Row, **costs: Cost) -> Row:
    """The row with these costs; of a call whose Q tiles differ with two percent more."""
    differ = {n: c if row.fp8 else Cost(c.percent + 2, c.overhead) for n, c in costs.items()}
    return dataclasses.replace(row, alike=row.alike | costs, differ=row.differ | differ)


def test_rows_are_those_of_the_tables() -> None:
    assert set(ROWS) == {(32, False), (64, False), (96, False), (64, True)}
    row = ROWS[64, False]
    assert row.tiles["usual"] == Tile(256, 64) and row.tiles["few_queries"] == Tile(128, 128)
    assert row.tiles["long_keys"] == Tile(192, 96)
    assert {name: row.alike[name] for name in row.tiles} == {
        "few_queries": Cost(112), "usual": Cost(), "long_keys": Cost(98)
    }  # fmt: skip
    assert row.differ["long_keys"] == Cost(99, 155) and row.differ["few_queries"] == Cost(109, 80)
    assert ROWS[96, False].tiles.keys() == {"few_queries", "usual"}
    assert ROWS[64, True].alike == {"few_queries": Cost(115), "usual": Cost()}


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_known_constants_are_found(key: tuple[int, bool]) -> None:
    true = with_costs(ROWS[key], **{
        name: cost for name, cost in (("few_queries", Cost(117, 90)), ("long_keys", Cost(91, 140)))
        if name in ROWS[key].tiles
    })  # fmt: skip
    found = tune.fitted(ROWS[key], times_of(true), SMS)
    assert (found.alike, found.differ) == (true.alike, true.differ)


def test_constants_of_noisy_times_choose_as_well() -> None:
    """Times that are off by up to 2 %: percent within 2, and no choice loses more than they."""
    true = with_costs(ROWS[64, False], few_queries=Cost(125, 64), long_keys=Cost(90, 100))
    found = tune.fitted(ROWS[64, False], times_of(true, noise=0.02), SMS)
    for name in ("few_queries", "long_keys"):
        assert abs(found.alike[name].percent - true.alike[name].percent) <= 3
    exact = times_of(true)
    for call, t in exact.items():
        assert t[tune.choice(found, call, SMS)] <= 1.03 * min(t.values())


def test_the_report_says_what_a_choice_costs() -> None:
    """Today's constants would take few rows, which here are slow."""
    true = with_costs(ROWS[64, False], few_queries=Cost(200))
    times = times_of(true)
    new = tune.fitted(ROWS[64, False], times, SMS)
    lines = list(tune.report(ROWS[64, False], new, times, SMS))
    assert lines[0] == "\nhead dims 64, 64"
    assert lines[-1] == "  new constants lose 0.00 % on average, at most 0.0 %"
    assert "today's constants lose" in lines[-2] and not lines[-2].endswith("0.0 %")
    wrong = [x for x in lines if "today's few_queries" in x and "fastest usual" in x]
    assert wrong and all("new usual +0.0 %" in x for x in wrong)


def test_few_tiles_take_few_rows() -> None:
    assert tune.choice(ROWS[64, False], Call(1, 16, 1024, 1024), SMS) == "few_queries"
    assert tune.choice(ROWS[64, False], Call(1, 17, 1024, 1024), SMS) != "few_queries"


def test_the_diff_applies_and_is_read_again(tmp_path: Path) -> None:
    true = [
        with_costs(row, few_queries=Cost(101 + number, 63 + number))
        for number, row in enumerate(ROWS.values())
    ]
    for path, text in zip((tune.TUNING, tune.COST), TEXTS, strict=True):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    written = tune.written(true, *TEXTS)
    text = tune.diff(tmp_path, dict(zip((tune.TUNING, tune.COST), written, strict=True)))
    subprocess.run(["git", "apply", "-"], input=text, text=True, cwd=tmp_path, check=True)
    assert list(tune.read(*((tmp_path / x).read_text() for x in (tune.TUNING, tune.COST)))) == true
    assert tune.diff(tmp_path, {tune.TUNING: written[0]}) == ""
    assert tune.written(ROWS.values(), *TEXTS) == TEXTS, "today's costs give today's files"


def test_a_row_without_costs_gets_some() -> None:
    without = TEXTS[0].replace(
        ",\n     .few_queries_costs = {.alike = {110}, .differ = {105}}", "", 1
    )
    assert without != TEXTS[0]
    (row,) = (x for x in tune.read(without, TEXTS[1]) if x.dims == (96, 96))
    assert row.alike["few_queries"] == Cost()
    assert tune.written([ROWS[96, False]], without, TEXTS[1])[0] == TEXTS[0]


def test_a_tile_is_forced_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tune.HOOK, "")
    seen: list[Any] = []
    calls = [
        tune.forced(name, lambda: seen.append(tune.os.environ[tune.HOOK])) for name in tune.TILES
    ]
    for call in (*calls, calls[0]):
        call()
    assert seen == ["0", "1", "2", "0"]
    enumerators = re.search(r"enum class Fa3ForwardTile \{ ([\w, ]+)", TEXTS[0])
    assert enumerators is not None
    names = [
        re.sub("[A-Z]", lambda x: "_" + x[0].lower(), x[1:])[1:] for x in enumerators[1].split(", ")
    ]
    assert tuple(names[:3]) == tune.TILES


def test_it_needs_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        tune.main()


def test_kernels_without_the_hook_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_ext.ops import binary

    (tmp_path / "ops").mkdir()
    monkeypatch.setattr(binary, "__file__", str(tmp_path / "ops/binary.py"))
    (tmp_path / "_C.abi3.so").write_bytes(b"\x7fELF")
    with pytest.raises(SystemExit, match="make build"):
        tune.refuse_without_hook()
    (tmp_path / "_C.abi3.so").write_bytes(
        b"\x7fELF FLASH_EXT_FORCE_TILE\0FLASH_EXT_FORCE_SPLITS\0FLASH_EXT_TUNE\0"
    )
    tune.refuse_without_hook()


def test_choices_are_those_of_plans() -> None:
    """tune.py has a copy of the model whose constants it fits."""
    native = python_module("flash_ext_native", [NATIVE / "native.cpp"])
    for row in (x for x in ROWS.values() if not x.fp8):
        for call in tune.grid(row.dims[0]):
            window = (call.window, 0 if call.causal else -1)
            heads = call.batch * call.heads
            expected = row.tiles[tune.choice(row, call, SMS)]
            found = native.fa3_tile(row.dims, heads, call.queries, call.keys, window, False)
            assert found == (expected.rows, expected.block_kv), call


# --- Splits ---

GPU = tune_decode.Gpu(SMS, 32 << 20)
TODAY = tune_decode.read("".join(TEXTS))
TRUE = tune_decode.Costs(4.0, 1.5, 0.5, 0.45, 0.7, 0.8, 0.9, 2.5)


def split_times(costs: tune_decode.Costs, noise: float = 0.0) -> tune_decode.Times:
    noises = random.Random(0)
    return {
        call: {
            n: tune_decode.time(call, n, costs, GPU) * (1 + noises.uniform(-noise, noise))
            for n in call.splits()
        }
        for call in tune_decode.grid()
    }


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_known_constants_of_splits_are_found(noise: float) -> None:
    found = tune_decode.fitted(split_times(TRUE, noise), GPU, TODAY)
    for name, true in dataclasses.asdict(TRUE).items():
        assert getattr(found, name) == pytest.approx(true, rel=max(0.015, 2 * noise)), name


def test_the_report_of_splits_says_what_a_choice_costs() -> None:
    lines = list(tune_decode.report(split_times(TRUE), TODAY, TRUE, GPU))
    assert lines[-1] == "  new constants lose 0.00 % on average, at most 0.0 %"
    assert "today's constants lose" in lines[-2] and "lose 0.00" not in lines[-2]


def test_constants_of_splits_are_written_and_read_again() -> None:
    texts = [tune_decode.written(TRUE, text) for text in TEXTS]
    launch = {"launch": TODAY.launch}  # no constant of csrc
    assert tune_decode.read("".join(texts)) == dataclasses.replace(TRUE, **launch)
    assert tuple(tune_decode.written(TODAY, text) for text in TEXTS) == TEXTS
    with pytest.raises(AssertionError, match="reads otherwise"):
        tune_decode.read(TEXTS[0])


def test_splits_are_those_of_plans() -> None:
    native = python_module("flash_ext_native", [NATIVE / "native.cpp"])
    for call in tune_decode.grid():
        found = native.decode_splits(call.batch, call.kv_heads, call.group, call.keys)
        assert found == tune_decode.choice(call, TODAY, GPU), call
