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
import calls  # noqa: E402
import cells  # noqa: E402
import compare  # noqa: E402
import distributed  # noqa: E402
import everything  # noqa: E402
import fp8_errors  # noqa: E402
import fp8_inputs  # noqa: E402
import fp8_model  # noqa: E402
import fp8_providers  # noqa: E402
import fp8_quantize  # noqa: E402
import host  # noqa: E402
import memory  # noqa: E402
import numerics  # noqa: E402
import options  # noqa: E402
import providers  # noqa: E402
import ratios  # noqa: E402
import results  # noqa: E402
import support  # noqa: E402
import timing  # noqa: E402
import train  # noqa: E402
from cells import Cell, fp8_cells, grid, is_plain, on_grid  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SETUP = {"device": "D", "torch": "2", "kernels": "k", "digest": "d", "date": "2026-01-02"}


def run(
    main: Callable[[], int], *arguments: object, monkeypatch: pytest.MonkeyPatch, out: Path
) -> list[dict[str, Any]]:
    """The rows that a run on the CPU adds to a file; its exit status is 0."""
    status, found = run_for(main, *arguments, monkeypatch=monkeypatch, out=out)
    assert status == 0
    return found


def run_for(
    main: Callable[[], int], *arguments: object, monkeypatch: pytest.MonkeyPatch, out: Path
) -> tuple[int, list[dict[str, Any]]]:
    """The same, with the exit status."""
    given = ["benchmark", "--device", "cpu", *map(str, arguments), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    status = main()
    return status, [results.flat(line) for line in results.read(out)]


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


def test_nothing_is_written_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--record alone writes to the results of this repository."""
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed")
    parser = argparse.ArgumentParser()
    parser.set_defaults(device="cpu")
    results.add_output(parser)
    places = {
        (): None,
        ("--record",): tmp_path / "committed/cpu/x.jsonl",
        ("--record", str(tmp_path)): tmp_path / "cpu/x.jsonl",
        ("--out", str(tmp_path / "y")): tmp_path / "y",
    }
    for given, path in places.items():
        recorder = results.Recorder("x", SETUP, parser.parse_args(given))
        recorder.add({"d": 64, "causal": True}, {"providers": {"fa2": {"ms": 1.5, "q": 2}}}, v="1")
        recorder.close()
        assert recorder.path == path
        if path:
            (found,) = results.read(path)
            assert found["setup"]["v"] == "1" and found["cell"] == {"d": 64, "causal": True}
    shown = capsys.readouterr().out
    assert "d 64, causal" in shown and "1.5000 ms" in shown and "not written" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"committed", "cpu", "y"}


def test_a_result_goes_stale_with_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_digest_now", {"digest": "d", "kernels": "k"}.get)
    for subject in ("compare", "host"):
        assert results.is_current(subject, SETUP)
        assert not results.is_current(subject, SETUP | {"kernels": "", "digest": ""})
    assert results.is_current("compare", SETUP | {"digest": "after a change of Python"})
    assert not results.is_current("host", SETUP | {"digest": "after a change of Python"})


def test_what_moved() -> None:
    """By more than runs differ, of the same cells, wherever they stand."""
    old = [line("1", 1.0, d=64), line("1", 1.0, d=128)]
    new = [line("2", 1.03, d=128), line("2", 1.2, d=64), line("2", 9.0, d=256)]
    ((change, text),) = everything.moved(old, new)
    assert change == pytest.approx(0.2) and text == "d 64: ms 1 -> 1.2 (+20.0%)"


def test_every_part_of_the_bench_is_a_script_that_knows_its_arguments() -> None:
    texts = {p.stem: p.read_text() for p in (ROOT / "benchmarks").glob("*.py")}
    for name in everything.PARTS:
        command = everything.command(name, ["--record", "x"], 5.0)
        script = Path(command[1]).stem
        known = texts[script] + texts["cells"] * ("add_grid" in texts[script])
        known += texts["providers"] * ("command_line(" in texts[script])
        given = [a for a in command[2:-2] if a.startswith("--")]
        assert all(f'"{a}"' in known for a in given), name
        assert ("--minutes" in command) == (script in everything.BOUNDED)


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
    found = timer.sustained(calls, dict.fromkeys(calls, (1.0, 0.0)), seconds)
    order = [name for name, _ in itertools.groupby(made)]
    assert collections.Counter(made) == dict.fromkeys(calls, turns * 6), "five, and one before"
    assert len(order) >= 2 * turns + 1 and all(r["calls"] == 5 * turns for r in found.values())


def test_clocks() -> None:
    log = common.ClockLog(torch.device("cpu"))
    for line in ("1980, 100.5, 30\n", "[N/A], 1, 2\n", "1500, 690.5, 50\n", "1400, 695, 50\n"):
        log.add(line)
    assert log.since_last() == {"sm_mhz": 1500, "power_w": 690.5, "temperature_c": 50}
    assert log.since_last() == {}
    log.close()


def test_results_of_kernels_of_another_source_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(common, "driver_version", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    for kernels in (None, common.kernel_digest()):
        monkeypatch.setattr(
            binary, "cuda_build", lambda kernels=kernels: binary.Build("80", kernels=kernels)
        )
        assert common.describe_setup(device)["digest"] == common.source_digest()
    monkeypatch.setattr(binary, "cuda_build", lambda: binary.Build("80", kernels="0" * 16))
    with pytest.raises(SystemExit, match="of csrc 0000000000000000, this is .*: make build"):
        common.describe_setup(device)


# -------------------------------------------------------------------------------------- cells
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
    for found in (exact, [work.forward(fa2, causal)(), *work.backward(fa2, causal)()]):
        for got, want in zip(found, wanted, strict=True):
            assert got.shape == want.shape
            assert max(providers.relative_error(got, want.float())) < 1e-5
    with pytest.raises(ValueError, match="no window"):
        work.forward(providers.PEERS["flash"](), causal)
    work.MATRIX_BYTES, work.LAST_ROWS = 0, 8
    (last,) = work.exact(causal, gradients=False)
    torch.testing.assert_close(last, exact[0][:, -8:])


def grid_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setattr("flash_ext.__main__.usable_device", str)  # which this torch may not have
    monkeypatch.setattr(sys, "argv", ["compare", "--device", "cuda", *arguments])
    return list(grid(compare.parse()))


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell has a place of its own; only the grid's are the grid's."""
    find = functools.partial(grid_of, monkeypatch=monkeypatch)
    standard = find()
    assert len(standard) == 72 and all(on_grid(c.to_json()) for c in standard)
    assert {c.dtype for c in find("--dtype", "bf16", "fp16", "--s", "512")} == {"bf16", "fp16"}
    sets = {name: find("--set", name) for name in cells.SETS if name != "standard"}
    others = [c for found in sets.values() for c in found]
    assert not any(on_grid(c.to_json()) for c in others)
    for name in ("decode", "chunks", "prefill", "fp8"):
        assert all(c.direction == "forward" for c in sets[name])
    assert {(c.heads, c.kv_heads) for c in sets["mqa"]} == {(8, 1), (8, 0)}
    assert len(sets["fp8"]) == 40 == len(fp8_cells([c.to_json() for c in sets["fp8"]]))
    assert {(c.d, c.d_v) for c in sets["fp8"]} == {(64, 0), (96, 0), (128, 0), (192, 128), (256, 0)}
    models = cells.SHAPES["sets"]["models"]["shapes"]
    assert {c.model for c in sets["models"]} == {s["model"] for s in models} == set(cells.SOURCES)
    assert all(not c.window or c.causal for c in sets["models"])
    short = find("--set", "latency", "--sustained", "--graph")
    assert all(c.graph and c.sustained for c in short)
    own = find("--s", "4096", "--sq", "128", "--kv-heads", "4")
    assert {(c.seqlen, c.seqlen_q, c.kv_heads) for c in own} == {(4096, 128, 4)}
    every = [*standard, *others, *short, *own]
    assert len({results.identity(c.to_json()) for c in every}) == len(every)
    assert all(Cell(**c.to_json()) == c for c in every)
    with pytest.raises(SystemExit):
        find("--graph")


def test_neighbors_of_a_shape() -> None:
    shape = Cell("bf16", 128, True, 4096, 2, 32, kv_heads=8)
    found = list(cells.neighbors(shape))
    assert found[0] == dataclasses.replace(shape, near="4096 x 32")
    assert {c.seqlen for c in found} == {4096, 4095, 4097, 4224, 3968, 4160}
    assert (found[-1].heads, found[-1].kv_heads) == (36, 9)
    assert not any(is_plain(c.to_json()) for c in found)


def with_peers(cudnn: float, fa4: float | None, ratio: float | None) -> dict | None:
    """The best peer of a cell in which fa3 takes 1 ms and the peers so much."""
    times = {"fa3": 1.0, "cudnn": cudnn} | ({} if fa4 is None else {"flash_attn_4": fa4})
    return ratios.best_peer({n: {"ms": t, "tflops": 1 / t} for n, t in times.items()}, ratio)


def test_the_best_peer_is_measured_or_says_that_it_is_recorded() -> None:
    assert with_peers(2.0, 1.5, 9.0) == {"ms": 1.5, "tflops": 1 / 1.5, "of": "flash_attn_4"}
    assert with_peers(2.0, 2.5, None) == {"ms": 2.0, "tflops": 0.5, "of": "cudnn"}
    assert with_peers(2.0, None, None) is None, "one peer alone is not the best of two"
    assert with_peers(2.0, None, 0.8) == {"ms": 2.0, "tflops": 0.5, "of": "cudnn"}
    recorded = with_peers(2.0, None, 1.25)
    assert recorded == {"ms": 1.6, "tflops": 0.625, "of": "flash_attn_4", "recorded": True}


# ------------------------------------------------------------------------------------ compare
def test_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.SHAPES["sets"]["models"], "shapes",
                        cells.SHAPES["sets"]["models"]["shapes"][:2])  # fmt: skip
    arguments = ("--set", "models", "--rounds", 1, "--variants", "fa2", "--peers", "standard")
    found = run(compare.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert len(found) == 4 and all(c["providers"]["fa2"]["ms"] > 0 for c in found)
    assert all(ratios.best_of_peers(c)["of"] == "standard" for c in found)
    assert all(ratios.ratio_spread(c, "fa2", "standard") >= 0 for c in found)


def test_a_failing_peer_and_a_lack_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails while it is timed leaves its cell empty; what no time is left for keeps
    what the file has."""
    path = tmp_path / "compare.jsonl"
    count = itertools.count()
    right = providers.standard()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        if next(count) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right.attend(q, k, v, causal)

    failing = dataclasses.replace(right, attend=attend)
    monkeypatch.setitem(providers.PEERS, "standard", lambda: failing)
    arguments = ("--s", 64, "--causal", "--fwd", "--sustained", "--variants", "fa2", "--peers",
                 "standard")  # fmt: skip
    (cell,) = run(compare.main, *arguments, monkeypatch=monkeypatch, out=path)
    assert cell["providers"]["standard"] == {"skipped": "OutOfMemoryError: CUDA out of memory."}
    assert cell["providers"]["fa2"]["ms"] > 0
    late = (*arguments, "--minutes", 0)
    assert run(compare.main, *late, monkeypatch=monkeypatch, out=path) == [cell]


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


@pytest.mark.parametrize("cudnn", (FakeCudnn(), FakeCudnn(1.5), None), ids=("", "wrong", "none"))
def test_fp8_is_measured(cudnn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside cuDNN and bfloat16, each right by its own inputs; a peer that is wrong or absent has
    its reason."""
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(fp8_providers, "cudnn_handle", lambda: None)
    arguments = ("--set", "fp8", "--rounds", 1, "--s", 128, "--peers", "flash", "--variants", "fa2")
    found = run(compare.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    for cell in found:
        result = cell["providers"]
        assert sorted(result) == ["cudnn_fp8", "fa3_fp8", "fa3_fp8_tensor", "fa3_int8", "flash"]
        peer = result.pop("cudnn_fp8")
        if cudnn is None or cudnn.factor != 1:
            assert "ModuleNotFoundError" in peer["skipped"] or peer["wrong"]
        else:
            assert 1e-2 < peer["error"] < 4e-2, "its output in e4m3"
        assert all(r["ms"] > 0 for r in result.values())
        assert all(1e-2 < result[n]["error"] < 4e-2 for n in result if n != "flash"), "P in e4m3"
        assert result["flash"]["error"] < 1e-2, "held against the inputs before quantization"


def test_a_variant_that_refuses_or_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is no failure, the other is."""
    explain = flash_ext.explain

    def refusing(*inputs: torch.Tensor, **options: object) -> object:
        found = explain(*inputs, **options)
        found.reasons["fa2"] = "too wide"
        return found

    arguments = ("--rounds", 1, "--s", 64, "--full", "--fwd", "--variants", "fa2", "--peers")
    with monkeypatch.context() as patch:
        patch.setattr(flash_ext, "explain", refusing)
        (cell,) = run(compare.main, *arguments, monkeypatch=patch, out=tmp_path / "x")
    assert cell["providers"]["fa2"] == {"skipped": "too wide", "refused": True}
    attention = flash_ext.attention
    monkeypatch.setattr(flash_ext, "attention", lambda *x, **o: attention(*x, **o) * 1.1)
    status, (cell,) = run_for(compare.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "y")
    assert status == 1 and cell["providers"]["fa2"]["wrong"]


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
    package = Path(flash_ext.__file__).parent
    for name in ("same", "other"):
        shutil.copytree(
            package, tmp_path / name / "flash_ext", ignore=shutil.ignore_patterns("*.so", "_C.*")
        )
    with (tmp_path / "other" / "flash_ext" / "__init__.py").open("a") as other:
        other.write(OTHER_RESULTS)
    arguments = ("--s", 32, "--heads", 1, "--causal", "--min-time", 0, "--set", "standard",
                 "--variants", "fa2")  # fmt: skip
    before = ("--before", tmp_path / "same")
    found = run(builds.main, *before, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert [c["direction"] for c in found] == ["forward", "backward"]
    for cell in found:
        assert cell["ratio"] == pytest.approx(cell["before"] / cell["now"], rel=1e-3)
        assert cell["error"] == 0 and cell["rounds"] >= builds.TURNS
    slower = found[0] | {"seqlen": 64, "seqlen_q": 16, "ratio": 0.97}
    forward, _ = builds.summarise([found[0] | {"ratio": 1.0}, found[1], slower])
    assert (forward["cells"], forward["min"], forward["below"]) == (2, 0.97, 1)
    assert forward["min_at"] == "d 64 causal S 64, 16 queries"

    before = ("--before", tmp_path / "other")
    status, (forward, backward) = run_for(
        builds.main, *before, *arguments, monkeypatch=monkeypatch, out=tmp_path / "y"
    )
    assert status == 1
    assert "results differ by 0.3" in forward["failed"] and "ratio" not in forward
    assert backward["failed"] == "before: RuntimeError: no gradients"
    assert "FAILED: fa2 backward d 64 causal S 32" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        run_for(builds.main, "--before", tmp_path, monkeypatch=monkeypatch, out=tmp_path / "z")


# ------------------------------------------------------------------------------ other subjects
def test_lengths_of_the_mix() -> None:
    """What the documents say of them: 16,384 tokens, 1k in the mean, 8,192 at most, a long tail."""
    lengths = options.draw_lengths(options.GPU.tokens, options.GPU.longest)
    assert lengths == options.draw_lengths(options.GPU.tokens, options.GPU.longest)
    assert sum(lengths) == 16384 and len(lengths) == 16 and max(lengths) == 8192
    assert sorted(lengths)[8] < 600
    seqlen = options.dense_seqlen(lengths, 2, 128)
    assert abs(2 * seqlen**2 / sum(n * n for n in lengths) - 1) < 0.05


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of every variant that runs, in three tables; a lack of time is a failure."""
    arguments = ("--rounds", 1, "--d", 64)
    found = run(options.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    tables = collections.Counter(c["table"] for c in found)
    kinds = [sum(v in flash_ext.CPU_VARIANTS for v, _ in x)
             for x in (options.MEASURED, options.MIXED)]  # fmt: skip
    assert tables == {"options": 2 * kinds[0], "mix": 2 * kinds[1], "deterministic": 2}
    for cell in (c for c in found if c["table"] == "options"):
        timed = {n for n, r in cell["results"].items() if "ratio" in r}
        once = cell["direction"] == "backward"
        assert timed == {n for n in options.OPTIONS if once or n not in options.BACKWARD_ONLY}
    for cell in (c for c in found if c["table"] == "mix"):
        speeds = {n: r["over_dense"] for n, r in cell["results"].items() if "tflops" in r}
        assert {"dense", "as drawn", "ascending", "descending"} <= set(speeds)
    late = (*arguments, "--budget", 0, "--only", "mix")
    assert run_for(options.main, *late, monkeypatch=monkeypatch, out=tmp_path / "y") == (1, [])


def test_a_wrong_option_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = options.Bench(torch.device("cpu"), 1)
    call = calls.Call(*torch.randn(3, 1, 64, 2, 64), {"causal": False})

    def wrong() -> calls.Attend:
        return lambda c: (c.exact()[0] * 1.1, c.exact()[1])

    for direction in ("forward", "backward"):
        found = bench.times({"right": (call, lambda: calls.Call.exact), "wrong": (call, wrong)},
                            direction)  # fmt: skip
        assert "ms" in found["right"]
        assert found["wrong"]["wrong"] and "ms" not in found["wrong"]


def test_memory_ends_where_calls_get_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is no failure of a variant; a growth that is not linear is."""
    # The profiler's first start, which counts as time of a call, takes a second or two.
    arguments = ("--d", 32, "--heads", 1, "--s", 64, 128, 99999, "--variants", "fa2", "--limit", 60)
    _, found = run_for(
        memory.main, *arguments, "--peers", monkeypatch=monkeypatch, out=tmp_path / "x"
    )
    for row in found:
        assert list(row["bytes"]) == ["64", "128"] and "stopped" not in row
        assert row["slow"].startswith("S = 99999: a call would take about")
    assert memory.fit({1024: 1 << 20, 2048: 2 << 20, 4096: 4 << 20}).exponent == 1
    assert memory.fit({1024: 1 << 20, 2048: 4 << 20}).exponent == 2
    assert memory.is_linear({"exponent": 1.0}) and memory.is_linear({"refused": "why"})
    assert not memory.is_linear({"exponent": 2.0}) and not memory.is_linear({"stopped": "why"})


def test_host_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "compiled_provider", lambda p: p)
    monkeypatch.setattr(timing, "HOST_ROUNDS", 2)
    monkeypatch.setattr(timing, "HOST_CALLS", 1)
    arguments = ("--variants", "fa2", "--peers", "flash")
    found = run(host.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert [r["call"] for r in found][1:3] == ["forward and backward", "forward, compiled"]
    assert all(r["providers"]["fa2"]["us"] > 0 for r in found)
    assert {"auto", "sdpa", "varlen", "bare_node"} <= found[0]["providers"].keys()


def test_numerics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--s", 32, "--d", 16)
    found = run(numerics.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert len(found) == 2 * len(numerics.DISTRIBUTIONS) + len(numerics.SOFTMAX_SCALES)
    assert found[-1]["forms"]["naive"]["finite"] < 1 and "finite" not in found[-1]["forms"]["safe"]
    assert found[0]["providers"]["fa2"]["dq"]["rms"] < 1e-4


def train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, out: Path, *names: str, status: int = 0
) -> dict[str, dict]:
    """What a short training at S 64 leaves of each provider."""
    arguments = ("--rounds", 2, "--steps", 1, "--seq", 64, "--providers", *names)
    code, (cell,) = run_for(train.main, *arguments, monkeypatch=monkeypatch, out=out)
    assert code == status and list(cell["providers"]) == list(names)
    return cell["providers"]


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the example trains, with the same losses."""
    found = train_on_the_cpu(monkeypatch, tmp_path / "x", "fa2", "sdpa", "standard")
    for r in found.values():
        assert r["tokens_per_second"] == pytest.approx(train.CPU_TOKENS / r["ms"] * 1e3, rel=1e-3)
        assert len(r["losses"]) == train.WARM_UP + 2 * (1 + 1) and min(r["losses"]) < r["losses"][0]
        assert r["loss_difference"] < 1e-5, "float32: the same but for the order of sums"
    config = train.train_gpt.Config(
        2, 2, 32, 64, 2, 7, "cpu", train.MEGABYTES, train.MODELS["tiny"].rate
    )
    data = train.train_gpt.standard_library(train.MEGABYTES)
    example = train.train_gpt.train("x", train.train_gpt.standard_attention, data, config)
    assert found["standard"]["losses"] == pytest.approx(example.losses, rel=1e-5)
    trainee = train.Trainee(
        train.sdpa(), config, list(itertools.islice(train.train_gpt.batches(data, config), 4))
    )
    trainee.warm_up()
    weights = sum(p.nbytes for p in trainee.training.model.parameters())
    assert trainee.state_bytes() == 3 * weights + len(trainee.training.optimizer.state) * 4
    extra = common.peak_extra_memory(trainee.step, trainee.device)
    assert extra > weights, "gradients, and more"
    assert trainee.peak_bytes - trainee.state_bytes() == pytest.approx(extra, rel=0.1)


def test_models_without_a_mask_and_with_fewer_heads_of_k_and_v(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"wide": train.Size(1, 2, 32, (32, 64), causal=False)}
    monkeypatch.setattr(train, "MODELS", train.MODELS | sizes)
    arguments = ("--model", "wide", "tiny-llama", "--rounds", 1, "--steps", 1)
    found = run(train.main, *arguments, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert [(c["seqlen"], c["causal"], c["kv_heads"]) for c in found] == [
        (32, False, 2), (64, False, 2), (16, True, 2),
    ]  # fmt: skip
    assert all(r["loss_difference"] < 1e-5 for c in found for r in c["providers"].values())
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    masked, whole = (train.in_model(train.sdpa(), causal)(q, k, v) for causal in (True, False))
    assert not torch.equal(masked[:, 0], whole[:, 0])
    late = (*arguments, "--minutes", 0)
    assert run(train.main, *late, monkeypatch=monkeypatch, out=tmp_path / "y") == []


def test_a_training_that_is_wrong_or_waits_for_the_cpu_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("fa2", "sdpa", "standard")
    in_model, right = train.in_model, train.sdpa()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return right.attend(q, k, v, causal) * 2

    wrong = dataclasses.replace(right, name="fa2", attend=attend)
    with monkeypatch.context() as patch:
        patch.setitem(providers.VARIANTS, "fa2", lambda: wrong)
        found = train_on_the_cpu(patch, tmp_path / "x", *names, status=1)
    assert found["fa2"]["wrong"] and found["fa2"]["skipped"].startswith("WRONG RESULT: relative")

    def misplaced(provider: providers.Provider, causal: bool) -> object:
        return in_model(wrong if provider.name == "fa2" else provider, causal)

    with monkeypatch.context() as patch:
        patch.setattr(train, "in_model", misplaced)
        found = train_on_the_cpu(patch, tmp_path / "y", *names, status=1)
    assert found["fa2"]["wrong"] and "of standard's" in found["fa2"]["skipped"]
    assert "tokens_per_second" in found["sdpa"]

    seconds = {"fast": [0.01], "slow": [0.002]}  # of a step, that the CPU enqueues in 3 ms
    trainees = {name: mock.Mock(losses=[torch.ones(())], seconds=x, host_seconds=[0.003],
                                peak_bytes=1) for name, x in seconds.items()}  # fmt: skip
    found = {"providers": {name: {"attention": {"ms": 1.0}} for name in seconds}}
    config = mock.Mock(batch=1, seq=1, layers=1)
    train.Bench.judge(mock.Mock(device=torch.device("cuda")), config, found, trainees)
    assert found["providers"]["fast"]["tokens_per_second"] == 100
    assert found["providers"]["slow"]["cpu_bound"] and "ms" not in found["providers"]["slow"]


def test_support_is_what_explain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every call of a feature: one that is refused is a no, with the reason."""
    on_cpu = torch.device("cpu")
    answers = support.probe(on_cpu)
    assert answers["gradient of bias"] == dict.fromkeys(flash_ext.CPU_VARIANTS, {"backward": None})
    for name, by_variant in answers.items():
        reasons = [r for by_direction in by_variant.values() for r in by_direction.values()]
        assert all("8-bit inputs" in r if "FP8" in name else r is None for r in reasons), name
    refusal = providers.refusal

    def refuses(variant: str, *call: Any, **options: Any) -> str | None:
        return "no sink" if options.get("sink") is not None else refusal(variant, *call, **options)

    monkeypatch.setattr(support, "refusal", refuses)
    found = {n for n, x in support.probe(on_cpu).items() if "no sink" in x["fa2"].values()}
    assert found == {"sink", "gradient of sink", "all options at once"}


# ----------------------------------------------------------------------------------------- FP8
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


SMALL = fp8_errors.Sizes({32: 256}, 1, 128, 2, (128, 256), 256, (64,))


def test_fp8_errors_and_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_errors, "CPU", SMALL)
    found = run(fp8_errors.main, monkeypatch=monkeypatch, out=tmp_path / "x")
    kinds = collections.Counter(r["experiment"] for r in found)
    assert kinds == {"outliers": 1, "length": 4, "needle": 3}
    assert set(found[0]["methods"]) == {*fp8_errors.SIXTEEN_BITS, *fp8_inputs.METHODS}
    assert all(r["rmse"] <= r["rmse_max"] for r in found[0]["methods"].values())
    assert fp8_errors.gain(found[0]) > 1
    monkeypatch.setattr(fp8_inputs.Quantized, "variant", lambda self, causal=False: None)
    ((_, row),) = fp8_errors.outlier_rows(torch.device("cpu"), SMALL)
    assert row["by"] == fp8_inputs.EMULATION, "standard attention with P in e4m3 stands in"

    monkeypatch.setattr(fp8_model, "CPU", (dataclasses.replace(fp8_model.CPU[0], steps=3),))
    (model,) = run(fp8_model.main, monkeypatch=monkeypatch, out=tmp_path / "y")
    losses = model["attentions"]
    assert list(losses) == list(fp8_model.ATTENTIONS) and model["steps"] == 3
    assert losses[fp8_model.BFLOAT16]["difference"] == 0
    assert 0 < abs(losses[fp8_model.FP8]["difference"]) < 1e-2


def test_quantization_beside_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_quantize, "CPU_SHAPES", ((1, 140, 2, 16),))
    found = run(fp8_quantize.main, "--min-time", 0, monkeypatch=monkeypatch, out=tmp_path / "x")
    assert len(found) == len(fp8_quantize.KINDS) and all(r["ratio"] > 0 for r in found)
    assert found[0]["bytes"] == 140 * 2 * 16 * 3, "two bytes read, and one written"


# ----------------------------------------------------------------------------------- many GPUs
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
