"""What the benchmarks claim about themselves: FLOPs, results, and what is timed.

Would catch a FLOP formula that flatters, a wrong result that is timed, a result that is lost or
written where it was not asked for, and one that counts for code that it does not depend on.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_test_report  # puts benchmarks/ on the path
import pytest
import torch

import flash_ext
from flash_ext.ops import binary

common = gpu_test_report.common
import builds  # noqa: E402
import cells  # noqa: E402
import compare  # noqa: E402
import distributed  # noqa: E402
import fp8_errors  # noqa: E402
import fp8_providers  # noqa: E402
import memory  # noqa: E402
import models  # noqa: E402
import options  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import serving  # noqa: E402
import support  # noqa: E402
import timing  # noqa: E402
import train  # noqa: E402
from cells import Cell, fp8_cells, grid, on_grid  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SETUP = {"device": "D", "torch": "2", "kernels": "k", "digest": "d", "date": "2026-01-02"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script on the CPU, and returns the rows that it adds to a file.

    As if all calls were slow, each is timed as seldom as such ones are.
    """
    numbers = itertools.count()
    monkeypatch.setattr(common.timing, "SLOW_SECONDS", 0.0)

    def rows(main: Callable[[], int], *given: object, status: int = 0) -> list[dict[str, Any]]:
        out = tmp_path / f"results-{next(numbers)}.jsonl"
        command = ["x", "--device", "cpu", *map(str, given), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", command)
        assert main() == status
        return [results.flat(line) for line in results.read(out)]

    return rows


Run = Callable[..., list[dict[str, Any]]]


# ------------------------------------------------------------------------------------- results
def line(date: str, ms: float, **cell: object) -> dict[str, Any]:
    return {"cell": cell, "result": {"ms": ms}, "setup": SETUP | {"date": date}}


def test_the_newest_line_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jsonl"
    assert results.read(path) == []
    results.append(path, [line("1", 1.0, d=64), line("2", 2.0, d=128)])
    results.append(path, [line("3", 3.0, d=64, causal=False), line("0", 9.0, d=128)])
    assert [(x["cell"]["d"], x["result"]["ms"]) for x in results.read(path)] == [
        (64, 3.0), (128, 2.0),
    ]  # fmt: skip
    other = tmp_path / "other.jsonl"
    results.append(other, [line("4", 4.0, d=128), line("4", 5.0, d=256)])
    path.write_text(path.read_text() + other.read_text())
    assert [x["result"]["ms"] for x in results.read(path)] == [3.0, 4.0, 5.0], "as `cat` does"


def test_only_what_is_asked_for_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--record alone writes to the results of this repository."""
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed")
    parser = argparse.ArgumentParser()
    parser.set_defaults(device="cpu")
    results.add_output(parser)
    for given, path in {
        (): None,
        ("--record",): tmp_path / "committed/cpu/x.jsonl",
        ("--record", str(tmp_path)): tmp_path / "cpu/x.jsonl",
        ("--out", str(tmp_path / "y")): tmp_path / "y",
    }.items():
        recorder = results.Recorder("x", SETUP, parser.parse_args(given))
        recorder.add({"d": 64, "causal": True}, {"ms": 1.5}, v="1")
        assert recorder.path == path
        if path:
            (found,) = results.read(path)
            assert found["setup"]["v"] == "1" and found["cell"] == {"d": 64, "causal": True}
    assert {p.name for p in tmp_path.iterdir()} == {"committed", "cpu", "y"}


def test_a_result_goes_stale_with_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_digest_now", {"digest": "d", "kernels": "k"}.get)
    for subject in ("compare", "host"):
        assert results.is_current(subject, SETUP)
        assert not results.is_current(subject, SETUP | {"kernels": "", "digest": ""})
    assert results.is_current("compare", SETUP | {"digest": "after a change of Python"})
    assert not results.is_current("host", SETUP | {"digest": "after a change of Python"})


# ------------------------------------------------------------------------------------- timing
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
    with mock.patch.object(timer, "estimate", lambda call: (1.0, 0.0)):
        found = timer.sustained(calls, seconds)
    order = [name for name, _ in itertools.groupby(made)]
    assert collections.Counter(made) == dict.fromkeys(calls, turns * 6), "five, and one before"
    assert len(order) >= 2 * turns + 1 and all(r["calls"] == 5 * turns for r in found.values())


def test_results_of_kernels_of_another_source_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(common, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    for kernels in (None, common.kernel_digest()):
        build = binary.Build("80", kernels=kernels)
        monkeypatch.setattr(binary, "cuda_build", lambda build=build: build)
        assert common.describe_setup(device)["digest"] == common.source_digest()
    monkeypatch.setattr(binary, "cuda_build", lambda: binary.Build("80", kernels="0" * 16))
    with pytest.raises(SystemExit, match="of csrc 0000000000000000, this is .*: make build"):
        common.describe_setup(device)


# -------------------------------------------------------------------------------------- cells
def test_flops() -> None:
    """4 B H Sq Sk D, halved when causal, times 2.5 backward."""
    shape = {"dtype": "bf16", "d": 64, "seqlen": 1024, "batch": 2, "heads": 4}
    full = 4 * 2 * 4 * 1024 * 1024 * 64
    for causal, direction, factor in (
        (False, "forward", 1.0), (True, "forward", 0.5),
        (False, "backward", 2.5), (True, "backward", 1.25),
    ):  # fmt: skip
        assert Cell(**shape, causal=causal, direction=direction).flops() == full * factor
    shape = {"dtype": "bf16", "d": 128, "seqlen": 4096, "batch": 2, "heads": 32, "kv_heads": 8}
    decode = Cell(**shape, causal=False, seqlen_q=1)
    assert decode.flops() == 4 * 2 * 32 * 1 * 4096 * 128, "grouping saves bytes, not FLOPs"
    assert decode.kv_bytes() == 2 * 2 * 4096 * 8 * 128 * 2
    causal = Cell(**shape, causal=True, seqlen_q=1024)
    assert causal.flops() == 4 * 2 * 32 * 128 * (1024 * 4096 - 1024**2 / 2)
    # Aligned bottom-right, 64 of 192 queries come before the first of 128 keys.
    early = Cell("bf16", 64, True, 128, 1, 1, seqlen_q=192)
    assert early.flops() == Cell("bf16", 64, True, 128, 1, 1).flops() > 0


@pytest.mark.parametrize("seqlen_q", [1, 60, 256])
@pytest.mark.parametrize("window", [1, 100, 256])
def test_flops_of_windows(seqlen_q: int, window: int) -> None:
    """Within half a key a query of what the mask shows, as without a window."""
    cell = Cell("bf16", 64, True, 256, 1, 1, seqlen_q=seqlen_q, window=window, d_v=32)
    pairs = sum(min(256 - seqlen_q + i + 1, window) for i in range(seqlen_q))
    assert abs(cell.flops() / (2 * (64 + 32)) - pairs) <= seqlen_q / 2
    backward = dataclasses.replace(cell, direction="backward")
    assert backward.flops() / cell.flops() == (3 * 64 + 2 * 32) / (64 + 32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 7])
def test_exact_results(causal: bool, window: int) -> None:
    """Against float64 standard attention on the whole, though computed some heads at a time."""
    torch.manual_seed(0)
    size = {"seqlen_q": 20, "kv_heads": 2, "d_v": 24, "window": window}
    work = providers.Workload((2, 48, 6, 16), torch.float32, torch.device("cpu"), **size)
    work.CHUNK_BYTES = 5 * 4 * 20 * 48  # five heads at a time
    leaves = [x.double().requires_grad_() for x in (work.q, work.k, work.v)]
    sides = (window - 1, 0 if causal else -1)
    out = flash_ext.reference.attention(*leaves, window=sides)[0]
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, work.dout.double())]
    exact = work.exact(causal, gradients=True)
    fa2 = providers.variant("fa2")
    for found in (exact, [work.forward(fa2, causal)(), *work.backward(fa2, causal)()]):
        for got, want in zip(found, wanted, strict=True):
            assert got.shape == want.shape
            assert max(providers.relative_error(got, want.float())) < 1e-5
    work.MATRIX_BYTES, work.LAST_ROWS = 0, 8
    (last,) = work.exact(causal, gradients=False)
    torch.testing.assert_close(last, exact[0][:, -8:])
    if window or causal:  # SDPA has no window, and aligns the other way
        with pytest.raises(ValueError, match="no window" if window else "aligns"):
            work.forward(providers.PEERS["flash"](), causal)()


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell has a place of its own; only the grid's are the grid's."""
    monkeypatch.setattr("flash_ext.__main__.usable_device", str)  # which this torch may not have

    def find(*arguments: str) -> list[Cell]:
        monkeypatch.setattr(sys, "argv", ["compare", "--device", "cuda", *arguments])
        return list(grid(compare.parse()))

    standard, fp8 = find(), find("--set", "fp8")
    others = [c for name in cells.SETS if name != "standard" for c in find("--set", name)]
    assert len(standard) == 72 and all(on_grid(c.to_json()) for c in standard)
    assert not any(on_grid(c.to_json()) for c in others)
    assert len(fp8) == 40 == len(fp8_cells([c.to_json() for c in fp8]))
    assert {c.direction for c in find("--set", "decode", "prefill", "fp8")} == {"forward"}
    assert len(find("--set", "decode8", "--dtype", "bf16", "fp16")) == 12
    every = [*standard, *others, *find("--s", "4096", "--sq", "128", "--kv-heads", "4")]
    assert len({results.identity(c.to_json()) for c in every}) == len(every)
    assert all(Cell(**c.to_json()) == c for c in every)


def test_the_best_peer_is_the_faster_of_two() -> None:
    def best(**ms: float) -> Any:
        cell = {"providers": {name: {"ms": x} for name, x in ms.items()}}
        return cells.with_best(cell)["providers"].get(providers.BEST, {}).get("of")

    assert best(fa3=1.0, cudnn=2.0, flash_attn_4=1.5) == "flash_attn_4"
    assert best(fa3=1.0, cudnn=2.0, flash_attn_4=2.5) == "cudnn"
    assert best(fa3=1.0, cudnn=2.0, flash=1.0) is None, "one peer alone is not the best of two"
    cell = {"providers": {"fa3": {"ms": 1.0}, "cudnn": {"ms": 2.0}}}
    assert cells.ratios([cell], "fa3", "cudnn") == [2.0], "above 1 the first is faster"


# ------------------------------------------------------------------------------------ compare
class OneMillisecond(timing.Timer):
    """Each call takes a millisecond."""

    def timed(self, calls: dict[str, Any], *others: Any) -> dict[str, Any]:
        return {name: {"ms": 1.0} for name in calls}


def test_speed_in_a_millisecond(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 B H S S D, halved when causal, times 2.5 backward: 2.56e8 for the forward of all keys; of
    few queries the bytes of K and V, 2 · 2 · 8192 · 2 · 64 · 4."""
    monkeypatch.setattr(compare, "Timer", OneMillisecond)
    who = ("--batch", 2, "--d", 64, "--variants", "fa2", "--peers", "standard")
    found = {
        (c["causal"], c["direction"]): {x["tflops"] for x in c["providers"].values()}
        for c in run(compare.main, "--s", 500, "--heads", 2, *who)
    }
    assert found == {
        (False, "forward"): {0.256}, (False, "backward"): {0.64},
        (True, "forward"): {0.128}, (True, "backward"): {0.32},
    }  # fmt: skip
    few = ("--s", 8192, "--heads", 4, "--kv-heads", 2, "--sq", 1, "--full", "--fwd")
    (cell,) = run(compare.main, *few, *who)
    assert cell["dtype"] == "fp32"
    assert cell["providers"]["fa2"]["tbps"] == pytest.approx(16.8e6 / 1e-3 / 1e12, rel=5e-3)


def test_a_variant_that_refuses_or_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one is no failure, the other is."""
    given = ("--rounds", 1, "--s", 64, "--full", "--fwd", "--variants", "fa2", "--peers")
    attention = flash_ext.attention
    with monkeypatch.context() as patch:
        patch.setattr(providers, "refusal", lambda *_, **__: "too wide")
        (cell,) = run(compare.main, *given)
    assert cell["providers"]["fa2"] == {"skipped": "too wide", "refused": True}
    monkeypatch.setattr(flash_ext, "attention", lambda *x, **o: attention(*x, **o) * 1.1)
    (cell,) = run(compare.main, *given, status=1)
    assert cell["providers"]["fa2"]["wrong"] and "ms" not in cell["providers"]["fa2"]


def test_fp8_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside bfloat16, each right by its own inputs; an absent peer has its reason."""
    for module in ("cudnn", *providers.FLASH_ATTN_3):
        monkeypatch.setitem(sys.modules, module, None)
    given = ("--set", "fp8", "--rounds", 1, "--s", 128, "--peers", "flash", "--variants", "fa2")
    for result in (cell["providers"] for cell in run(compare.main, *given)):
        for absent in ("cudnn_fp8", "flash_attn_3_fp8"):
            assert "ModuleNotFoundError" in result.pop(absent)["skipped"]
        assert sorted(result) == ["fa3_fp8", "fa3_int8", "flash", "fp8_attention"]
        assert all(r["ms"] > 0 for r in result.values())
        assert all(1e-2 < result[n]["error"] < 4e-2 for n in result if n != "flash"), "P in e4m3"
        assert result["flash"]["error"] < 1e-2, "held against the inputs before quantization"


def test_keys_and_values_in_8_bits_are_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right by its own numbers."""
    shapes = [{"d": 64, "seqlen": 300, "batch": 2}]
    monkeypatch.setitem(cells.SHAPES["sets"]["decode8"], "shapes", shapes)
    (cell,) = run(compare.main, "--set", "decode8", "--rounds", 1, "--peers", "flash")
    result = cell["providers"]
    assert sorted(result) == ["fa3_e4m3_kv", "fa3_int8_kv"], "fa3 itself is for GPUs"
    assert all(r["ms"] > 0 and r["error"] < 1e-2 for r in result.values())


OTHER_RESULTS = """
_right = attention


def attention(q, *others, **options):
    if q.shape[1] != 32:
        return _right(q, *others, **options)
    if q.requires_grad:
        raise RuntimeError("no gradients")
    return _right(q, *others, **options) * 1.5
"""


def test_two_builds_take_turns(tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """A build with other results at one length, and the same at another."""
    package = Path(flash_ext.__file__).parent
    shutil.copytree(package, tmp_path / "flash_ext", ignore=shutil.ignore_patterns("*.so", "_C.*"))
    with (tmp_path / "flash_ext" / "__init__.py").open("a") as other:
        other.write(OTHER_RESULTS)
    given = ("--s", 16, 32, "--heads", 1, "--causal", "--min-time", 0, "--set", "standard",
             "--variants", "fa2")  # fmt: skip
    *same, forward, backward = run(builds.main, "--before", tmp_path, *given, status=1)
    assert [c["direction"] for c in same] == ["forward", "backward"]
    for cell in same:
        assert cell["ratio"] == pytest.approx(cell["before"] / cell["now"], rel=1e-3)
        assert cell["error"] == 0 and cell["rounds"] >= builds.TURNS
    assert "results differ by 0.3" in forward["failed"] and "ratio" not in forward
    assert backward["failed"] == "before: RuntimeError: no gradients"
    assert "FAILED: fa2 backward d 64 causal S 32" in capfd.readouterr().out


# ------------------------------------------------------------------------------ other subjects
def test_serving(run: Run) -> None:
    """Every table, dense and in pages; a wrong result is not timed."""
    found = run(serving.main, "--rounds", 1)
    assert {(c["table"], c["page"]) for c in found} == {
        (table, page) for table in serving.SIZES["tables"] for page in (0, 16)
    }
    for cell in found:
        ours = cell["providers"]
        of_table = {"append": "alone", "chunk": "apart", "8 bits": "16 bits"}.get(cell["table"])
        assert ours.keys() == {"flash_ext", of_table, "dense" if cell["page"] else None,
                               None if "cache" in cell else "batch_invariant"} - {None}  # fmt: skip
        assert all("ms" in result for result in ours.values())
    right = flash_ext.attention_with_cache
    with mock.patch.object(flash_ext, "attention_with_cache",
                           lambda *x, **y: right(*x, **(y | {"causal": False}))):  # fmt: skip
        wrong = run(serving.main, "--rounds", 1, "--only", "prefill", status=1)
    assert all("WRONG" in r["skipped"] for c in wrong for r in c["providers"].values())


def test_options(run: Run) -> None:
    """Every option of every variant that runs."""
    found = run(options.main, "--rounds", 1, "--d", 64)
    assert {c["table"] for c in found} == set(options.TABLES)
    for cell in (c for c in found if c["table"] == "options"):
        timed = {n for n, r in cell["results"].items() if "ratio" in r}
        both = cell["direction"] == "backward"
        assert timed == {n for n in options.OPTIONS if both or n not in options.BACKWARD_ONLY}
        plain, window = (cell["results"][n] for n in (options.PLAIN, "window"))
        ratio = window["ms"] / plain["ms"]  # which is rounded to four places
        assert window["ratio"] == pytest.approx(ratio, rel=1e-3, abs=5.1e-5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_option_is_not_timed(direction: str) -> None:
    call = options.Call(*torch.randn(3, 1, 64, 2, 64), {"causal": False})

    def wrong(call: options.Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = options.exact(call)
        return out * 1.1, lse

    calls = {"right": (call, options.exact), "wrong": (call, wrong)}
    found = options.Bench(torch.device("cpu"), 1).times(calls, direction)
    assert "ms" in found["right"] and found["wrong"]["wrong"] and "ms" not in found["wrong"]


def test_growth_of_memory() -> None:
    """A growth that is not linear is a failure of a variant; a call that it refuses is none."""
    assert memory.exponent({1024: 1 << 20, 2048: 2 << 20, 4096: 4 << 20}) == 1
    assert memory.exponent({1024: 1 << 20, 2048: 4 << 20}) == 2
    assert memory.is_linear({"exponent": 1.0}) and memory.is_linear({"refused": "why"})
    assert not memory.is_linear({"exponent": 2.0}) and not memory.is_linear({"stopped": "why"})


def test_training(run: Run) -> None:
    """As the example trains, with the same losses; and the peak of one model."""
    shape = ("--rounds", 2, "--steps", 1, "--seq", 64)
    (cell,) = run(train.main, *shape, "--providers", "fa2", "sdpa", "standard")
    for r in cell["providers"].values():
        assert r["tokens_per_second"] == pytest.approx(train.CPU_TOKENS / r["ms"] * 1e3, rel=1e-3)
        assert min(r["losses"]) < r["losses"][0]
        assert r["loss_difference"] < 1e-5, "float32: the same but for the order of sums"
    rate = train.MODELS["tiny"].rate
    config = train.train_gpt.Config(2, 2, 32, 64, 2, 7, "cpu", train.MEGABYTES, rate)
    data = train.train_gpt.standard_library(train.MEGABYTES)
    example = train.train_gpt.train("x", train.train_gpt.standard_attention, data, config)
    assert cell["providers"]["standard"]["losses"] == pytest.approx(example.losses, rel=1e-5)
    (grouped,) = run(train.main, "--model", "tiny-llama", "--rounds", 1, "--steps", 1)
    assert all(r["loss_difference"] < 1e-5 for r in grouped["providers"].values())


def test_training_that_is_wrong_has_no_speed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a step that waits for the CPU."""
    given = ("--rounds", 2, "--steps", 1, "--seq", 64, "--providers", "fa2", "sdpa", "standard")
    in_model, right = train.in_model, train.sdpa()
    wrong = dataclasses.replace(right, name="fa2", attend=lambda *x: right.attend(*x) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(train, "in_model", lambda p, causal: in_model(
            wrong if p.name == "fa2" else p, causal))  # fmt: skip
        (cell,) = run(train.main, *given, status=1)
    assert cell["providers"]["fa2"]["wrong"]
    assert "of standard's" in cell["providers"]["fa2"]["skipped"]
    assert "tokens_per_second" in cell["providers"]["sdpa"]

    seconds = {"fast": [0.01], "slow": [0.002]}  # of a step, that the CPU enqueues in 3 ms
    trainees = {name: mock.Mock(losses=[torch.ones(())], seconds=x, host_seconds=[0.003],
                                peak_bytes=1) for name, x in seconds.items()}  # fmt: skip
    found: dict[str, Any] = {"providers": {name: {} for name in seconds}}
    config = mock.Mock(batch=1, seq=1, layers=1)
    train.Bench.judge(mock.Mock(device=torch.device("cuda")), config, found, trainees)
    assert found["providers"]["fast"]["tokens_per_second"] == 100
    assert found["providers"]["slow"]["cpu_bound"] and "ms" not in found["providers"]["slow"]


def test_whole_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not installed has its reason; one with other gradients is not timed."""
    monkeypatch.setitem(sys.modules, "timm", None)
    given = ("--rounds", 1, "--model", "beit_base_patch16_224", "pairformer")
    beit, triangles = run(models.main, *given)
    assert all("ModuleNotFoundError" in r["skipped"] for r in beit["providers"].values())
    both = triangles["providers"]
    assert triangles["ratio"] == pytest.approx(both["sdpa"]["ms"] / both["flash_ext"]["ms"], 1e-3)
    assert both["sdpa"]["gradient_error"] == 0 < both["flash_ext"]["gradient_error"] < 1e-2

    wrong = functools.partial(models.triangle_attention, scale=2.0)
    monkeypatch.setattr(models, "triangle_attention", wrong)
    (cell,) = run(models.main, "--rounds", 1, "--model", "pairformer", status=1)
    assert "gradients by" in cell["providers"]["flash_ext"]["skipped"] and "ratio" not in cell


def test_support_is_what_explain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every call of a feature: one that is refused is a no, with the reason."""
    refusal = providers.refusal

    def refuses(variant: str, *call: Any, **options: Any) -> str | None:
        return "no sink" if options.get("sink") is not None else refusal(variant, *call, **options)

    monkeypatch.setattr(support, "refusal", refuses)
    answers = support.probe(torch.device("cpu"))
    found = {n for n, x in answers.items() if "no sink" in x["fa2"].values()}
    assert found == {"sink", "gradient of sink"}
    assert set(answers["window"]["fa2"].values()) == {None}


# ----------------------------------------------------------------------------------------- FP8
def test_methods_of_quantization() -> None:
    """Ours is that of `flash_ext.fp8.attention`, but for the signs; each gives what it names."""
    q, k, v = (torch.randn(1, 140, 2, 64).bfloat16() for _ in range(3))
    want, _ = flash_ext.reference.attention(q.double(), k.double(), v.double())
    for name, method in fp8_providers.METHODS.items():
        for x in (method(q, k, v), method(q, k, v).first_queries(130)):
            part = want[:, : x.q.shape[1]]
            assert (x.attend() - part).norm() / part.norm() < 0.1, name
            assert (x.attend() - x.exact()).norm() / part.norm() < 0.06, name
    signs = flash_ext.fp8._seeded_signs(64, 0, q)
    with mock.patch.object(flash_ext.fp8, "random_signs", lambda *_, **__: signs):
        for name in (fp8_providers.OURS, fp8_providers.OURS_IN_FP8):
            method = fp8_providers.METHODS[name]
            got = method(q, k, v).attend(out_dtype=torch.bfloat16)
            assert torch.equal(got, flash_ext.fp8.attention(q, k, v, qk_dtype=method.qk_dtype))


def test_fp8_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_errors, "CPU_SEQLENS", {32: 256})
    (outliers,) = run(fp8_errors.main)
    assert all(r["rmse"] <= r["rmse_max"] for r in outliers["methods"].values())
    ours, plain = (outliers["methods"][n] for n in (fp8_providers.OURS, fp8_providers.PER_TENSOR))
    assert ours["rmse"] < plain["rmse"]


# ----------------------------------------------------------------------------------- many GPUs
def test_calls_on_several_gpus_take_turns() -> None:
    """Of long calls there are two rounds, in both orders, so that neither has the cooler GPU."""
    clock = distributed.Clock(torch.device("cpu"), limit=4.5)
    made, seconds = [], {"a": itertools.count(3.0), "b": itertools.count(2.0)}

    def call(name: str) -> float:
        made.append(name)
        return next(seconds[name])

    with (
        mock.patch.object(clock, "slowest", lambda x: x),
        mock.patch.object(clock, "once", lambda call: (call(), False)),
    ):
        found = clock.median({name: functools.partial(call, name) for name in "ab"})
    assert "".join(made) == "ab" + "abba", "the first ones do not count"
    assert found == {"a": 4.5, "b": 3.5}
