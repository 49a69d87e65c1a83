"""`python -m flash_ext.bench`: every option, what it prints and writes, and what it refuses.

Would catch a factor in TFLOP/s, a file that nobody asked for, a wrong result that is timed, a row
that is missing without a reason, and a failure of one implementation that ends the run.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from torch import Tensor

import flash_ext
from flash_ext.bench import implementations as rows_module
from flash_ext.bench import measure, problem
from flash_ext.bench.__main__ import __doc__ as bench_help
from flash_ext.bench.__main__ import main, parse
from flash_ext.bench.implementations import Implementation, Refused
from flash_ext.bench.output import table
from flash_ext.bench.problem import Inputs, Shape, for_cpu
from flash_ext.timing import Samples, Timer

TINY = ("--device", "cpu", "--shape", "1", "64", "2", "16", "--rounds", "1")
SHAPE = Shape(2, 48, 48, 4, 2, 16, 16, causal=True)


class OneMillisecond(Timer):
    """Each call takes a millisecond."""

    def estimate(self, call: Any) -> tuple[float, float]:
        return 1e-3, 0.0

    def compare(self, calls: dict[str, Any], *others: Any) -> dict[str, Samples]:
        return {name: Samples([1e-3] * 5, 0.0) for name in calls}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "Timer", OneMillisecond)


def cells(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What --json writes."""
    path = tmp_path / "out.json"
    main([*TINY, *arguments, "--json", str(path)])
    return json.loads(path.read_text())["cells"]


def ran(cell: dict[str, Any]) -> set[str]:
    return {name for name, row in cell["rows"].items() if "us" in row}


def test_the_documented_command(tmp_path: Path) -> None:
    """In a process of its own, with real times. A CPU runs it small; it writes no file."""
    command = "-m flash_ext.bench --shape 2 4096 32 128 --kv-heads 8 --causal"
    done = run_python(*command.split(), "--device", "cpu", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "This is a CPU" in done.stdout and "smaller than asked for" in done.stdout
    assert "forward, bfloat16: 1 x 256, 4 heads on 1 of keys, head dim 128, causal" in done.stdout
    assert "16/16" in done.stderr and "16/16" not in done.stdout, "the progress bar"
    assert list(tmp_path.iterdir()) == []


def test_the_commands_of_the_help_are_understood() -> None:
    commands = re.findall(r"python -m flash_ext.bench (--.*?)(?:  #.*)?\n", bench_help or "")
    assert len(commands) == 5
    for command in commands:
        args = parse([*command.split(), "--device", "cpu", "--full-size"])
        assert args.shapes[0].head_dim in (128, 256)


def test_rows_and_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 B H S S D in a millisecond, halved when causal, times 2.5 backward."""
    forward, backward = cells(tmp_path, "--causal")
    assert [forward["direction"], backward["direction"]] == ["forward", "backward"]
    for cell, tflops in ((forward, 2 * 2 * 64 * 64 * 16 / 1e9), (backward, 5 * 131072 / 1e9)):
        assert ran(cell) >= {"flash_ext fa1", "flash_ext fa2", "SDPA flash", "standard attention"}
        assert "Hopper" in cell["rows"]["flash_ext fa3"]["not run"]
        assert set(cell["rows"]) >= {"SDPA cuDNN", "SDPA efficient"}
        for name in ran(cell):
            row = cell["rows"][name]
            assert row["us"] == 1000 and row["times_best_peer"] == 1
            assert row["tflops"] == pytest.approx(tflops, rel=1e-3) and row["error"] < 1e-2
    printed = capsys.readouterr().out
    assert table(forward) in printed and table(backward) in printed
    assert "µs   TFLOP/s  x best peer     error" in printed


def test_the_best_peer_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OursIsFaster(OneMillisecond):
        def compare(self, calls: dict[str, Any], *others: Any) -> dict[str, Samples]:
            times = {name: 5e-4 if name.startswith("flash_ext") else 1e-3 for name in calls}
            return {name: Samples([time] * 5, 0.0) for name, time in times.items()}

    monkeypatch.setattr(measure, "Timer", OursIsFaster)
    (cell,) = cells(tmp_path, "--forward")
    assert cell["best_peer"] in ("SDPA flash", "standard attention")
    assert cell["rows"]["flash_ext fa2"]["times_best_peer"] == 2
    alone = measure.with_best_peer({"rows": {"flash_ext fa3": {"us": 1.0}}}, set())
    assert alone["best_peer"] is None and "times_best_peer" not in alone["rows"]["flash_ext fa3"]


def test_keys_heads_dims_and_dtype(tmp_path: Path) -> None:
    arguments = ("--keys", "96", "--kv-heads", "1", "--head-dim-v", "8", "--dtype", "float32")
    (cell,) = cells(tmp_path, *arguments, "--causal", "--forward")
    shape = [cell[name] for name in ("queries", "keys", "heads", "kv_heads", "head_dim_v")]
    assert shape == [64, 96, 2, 1, 8] and cell["dtype"] == "float32"
    assert {"flash_ext fa2", "standard attention"} <= ran(cell)
    assert "aligns" in cell["rows"]["SDPA flash"]["not run"]
    assert cell["rows"]["flash_ext fa2"]["error"] < 1e-5


def test_one_query_is_decoding(tmp_path: Path) -> None:
    """The last query sees every key, so that SDPA can run it."""
    arguments = ("--shape", "1", "1", "2", "16", "--keys", "1k", "--causal", "--forward")
    (cell,) = cells(tmp_path, *arguments)
    assert cell["keys"] == 1024 and {"SDPA flash", "flash_ext fa2"} <= ran(cell)


def test_sequence_lengths_and_plot(tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    found = cells(tmp_path, "--seqlens", "32", "64", "--backward", "--plot", str(picture))
    assert [(c["queries"], c["keys"]) for c in found] == [(32, 32), (64, 64)]
    assert {c["direction"] for c in found} == {"backward"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("option", "also"),
    [
        ("softcap=5", {"standard attention"}),
        ("window=7,0", {"standard attention"}),
        ("scale=0.3", {"standard attention", "SDPA flash"}),
        ("deterministic=True", {"standard attention"}),
        ("bias", {"standard attention"}),
        ("sink", set()),
        ("alibi_slopes", set()),
    ],
)
def test_options(tmp_path: Path, option: str, also: set[str]) -> None:
    """Whoever runs it agrees with the reference; whoever has it not says so."""
    forward, backward = cells(tmp_path, "--option", option, "--kv-heads", "1")
    name = option.partition("=")[0]
    for cell in (forward, backward):
        assert {"flash_ext fa1", "flash_ext fa2", *also} <= ran(cell), cell["rows"]
        assert name in cell["options"]
        assert all(cell["rows"][x]["error"] < 1e-2 for x in ran(cell))
        lacking = {n: x for n, x in cell["rows"].items() if n not in ran(cell)}
        if "standard attention" not in also:
            assert lacking["standard attention"]["not run"] == f"has no {name}"


def test_two_options_and_dropout(tmp_path: Path) -> None:
    """A random result has no error."""
    options = ("--option", "dropout_p=0.25", "--option", "window=-1,3")
    (cell,) = cells(tmp_path, *options, "--forward")
    assert cell["options"] == {"dropout_p": 0.25, "window": [-1, 3]}
    assert {cell["rows"][name]["error"] for name in ran(cell)} == {None}
    assert "    -" in table(cell)


def test_fp8(tmp_path: Path) -> None:
    forward, backward = cells(tmp_path, "--fp8", "--shape", "1", "64", "2", "64")
    kernels = {"flash_ext fa3 FP8", "flash_ext fa3 int8"}
    assert kernels | {"flash_ext.fp8.attention"} <= ran(forward)
    assert all(1e-3 < forward["rows"][name]["error"] < 0.1 for name in kernels)
    assert "flash_ext.fp8.attention" in ran(backward) and not kernels & ran(backward)


def test_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    monkeypatch.setattr(
        measure.Bench, "cell", lambda self, inputs, *others: iter([made.append(inputs.q)])
    )
    for seed in ("0", "0", "1"):
        list(measure.Bench(parse([*TINY, "--forward", "--seed", seed])).run())
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shape", "1", "2", "3"], "expected 4 arguments"),
        (["--shape", "1", "0", "2", "16"], "a size is a number such as 4096 or 4k, got '0'"),
        (["--seqlens", "1m"], "got '1m'"),
        (["--kv-heads", "3"], "--kv-heads must divide the number of heads, 16, got 3"),
        (["--dtype", "int8"], "invalid choice"),
        (["--device", "gpu"], "cannot be used here"),
        (["--option", "sofcap=5"], "did you mean 'softcap'?"),
        (["--option", "causal=True"], "'causal' is no option for this"),
        (["--option", "window_size=3,0"], "here it is window"),
        (["--option", "softcap"], "softcap must be 0 (none), or at least"),
        (["--option", "softcap=-1"], "softcap must be 0 (none), or at least"),
        (["--option", "dropout_p=1"], "dropout_p must be in [0, 1)"),
        (["--option", "scale='x'"], "scale must be a number"),
        (["--option", "window=3"], "window must be two numbers"),
        (["--option", "deterministic=1"], "deterministic must be True or False"),
        (["--option", "bias=1"], "bias is a random tensor: it has no value"),
        (["--plot", "a.png"], "--plot needs --seqlens with two lengths"),
        (["--json", "missing/a.json"], "must be a file in a folder that exists"),
        (["--fp8", "--dtype", "float32"], "--fp8 quantizes bfloat16 or float16"),
        (["--min-time", "0"], "must be above 0"),
        (["--rounds", "0"], "a size is a number"),
    ],
)
def test_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2 and complaint in capsys.readouterr().err


def test_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--seqlens", "1k", "2k", "--plot", "a.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_full_size_and_min_time() -> None:
    arguments = ["--device", "cpu", "--shape", "4", "2k", "8", "64", "--min-time", "0.5"]
    small, full = parse(arguments), parse([*arguments, "--full-size"])
    assert full.shapes == [Shape(4, 2048, 2048, 8, 8, 64, 64, causal=False)]
    assert small.made_small and not full.made_small and full.min_time == 0.5
    assert small.shapes == for_cpu(full.shapes)
    assert not parse([*TINY]).made_small


def test_shapes_of_a_cpu() -> None:
    """Short in all, with their heads of keys and their order of lengths."""
    asked = [Shape(4, n, n, 32, 8, 128, 64, causal=True) for n in (512, 1024, 16384)]
    small = for_cpu(asked)
    assert sum(x.flops(False, {}) for x in small) <= problem.CPU_FLOPS
    assert [(x.batch, x.heads, x.kv_heads, x.head_dim_v) for x in small] == [(1, 4, 1, 64)] * 3
    assert [x.queries * 64 for x in small] == [512, 1024, 16384]
    decoding = [Shape(1, 1, 32768, 32, 8, 128, 128, causal=True)]
    assert for_cpu(decoding)[0].queries == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 9), (-1, 2)])
@pytest.mark.parametrize("lengths", [(7, 7), (4, 19), (19, 4)])
def test_pairs(causal: bool, window: tuple[int, int], lengths: tuple[int, int]) -> None:
    """As many as the reference's mask shows; of a causal mask alone half of the diagonal."""
    shape = Shape(1, *lengths, 1, 1, 8, 8, causal)
    left, right = shape.sides({"window": window})
    diagonals = torch.arange(lengths[1]) - (
        torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
    )
    seen = (diagonals >= -left if left >= 0 else True) & (
        diagonals <= right if right >= 0 else True
    )
    expected = torch.as_tensor(seen).expand_as(diagonals).sum().item()
    if (left, right) == (-1, 0):
        expected -= min(lengths) / 2
    assert shape.pairs({"window": window}) == expected


@pytest.mark.parametrize("fails_in", ["bind", "call", "backward"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB."),
        RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_out_of_memory_is_a_row(
    fails_in: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise error

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        backward = staticmethod(fail)

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if fails_in == "bind":
            raise error
        return fail if fails_in == "call" else lambda: Fails.apply(q)

    monkeypatch.setattr(
        rows_module, "standard_row", lambda *_: Implementation("standard attention", bind)
    )
    *_, backward = cells(tmp_path)
    assert backward["rows"]["standard attention"] == {"not run": "out of memory"}
    assert "standard attention   not run: out of memory" in table(backward)
    assert {"flash_ext fa1", "flash_ext fa2"} <= ran(backward)


def test_calls_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them, standard attention, is left out."""

    class Full(OneMillisecond):
        def compare(self, calls: dict[str, Any], *others: Any) -> dict[str, Samples]:
            if "standard attention" in calls:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().compare(calls)

    monkeypatch.setattr(measure, "Timer", Full)
    (cell,) = cells(tmp_path, "--forward")
    assert cell["rows"]["standard attention"] == {"not run": "out of memory"}
    assert {"flash_ext fa2", "SDPA flash"} <= ran(cell)


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return lambda: flash_ext.attention(q, k, v) * 1.1

    def nothing(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return lambda: (q + k + v) * torch.nan

    made = [Implementation("wrong", bind), Implementation("nan", nothing)]
    monkeypatch.setattr(measure, "implementations", lambda *_: made)
    forward, backward = cells(tmp_path)
    for cell in (forward, backward):
        assert "wrong result: relative error 0.1" in cell["rows"]["wrong"]["not run"]
        assert "wrong result" in cell["rows"]["nan"]["not run"]
    assert main([*TINY]) == 1, "nothing of flash_ext ran"


def test_long_sequences_are_checked_by_their_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are not: every row has a part in dk and dv."""
    torch.manual_seed(0)
    inputs = Inputs(SHAPE, torch.float32, torch.device("cpu"))
    options = {"softcap": 5.0, "sink": torch.rand(4), "bias": torch.randn(1, 1, 48, 48)}
    full = inputs.exact(options, backward=False)
    monkeypatch.setattr(problem, "CHECKED_SCORES", 10 * 48)
    last = inputs.exact(options, backward=False)
    assert full is not None and last is not None and last[0].shape == (1, 10, 2, 16)
    torch.testing.assert_close(full[0][:, -10:], last[0])
    assert inputs.exact(options, backward=True) is None
    out, _ = flash_ext.reference.attention(inputs.q, inputs.k, inputs.v, causal=True, **options)
    torch.testing.assert_close(inputs.checked([out]), full)


FLASH_ATTN = """
import flash_ext
calls = []
def flash_attn_func(q, k, v, causal, softmax_scale=None, window_size=(-1, -1), **options):
    calls.append((window_size, options))
    window = tuple(-1 if x is None else x for x in window_size)
    out = flash_ext.attention(q, k, v, causal=causal, scale=softmax_scale, window=window)
    return out, None
"""


@pytest.mark.parametrize(
    ("name", "module", "window"),
    [
        ("flash-attn 2", "flash_attn", (3, -1)),
        ("flash-attn 3", "flash_attn_interface", (3, -1)),
        ("flash-attn 4", "flash_attn/cute", (3, None)),
    ],
)
def test_flash_attn_if_installed(
    name: str, module: str, window: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options have the names that each release has."""
    (tmp_path / f"{module}.py").parent.mkdir(exist_ok=True)
    (tmp_path / f"{module}.py").write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(tmp_path)
    module = module.replace("/", ".")
    for loaded in [x for x in sys.modules if x.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, loaded)
    options = ("--option", "window=3,-1", "--option", "scale=0.2")
    forward, backward = cells(tmp_path, *options)
    assert name in ran(forward) and name in ran(backward)
    assert sys.modules[module].calls[-1] == (window, {})
    for loaded in [x for x in sys.modules if x.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, loaded)
    (tmp_path / f"{module.replace('.', '/')}.py").write_text("raise ImportError('no libcudart')")
    (cell,) = cells(tmp_path, "--forward")
    assert cell["rows"][name] == {"not run": "ImportError: no libcudart"}


def test_an_interrupted_run_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = measure.Bench.cell

    def interrupted(self: Any, inputs: Any, options: Any, backward: bool) -> Any:
        if backward:
            raise KeyboardInterrupt
        return cell(self, inputs, options, backward)

    monkeypatch.setattr(measure.Bench, "cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*TINY])
    printed = capsys.readouterr().out
    assert "forward, bfloat16" in printed and "backward, bfloat16" not in printed


def test_refusals_of_gradients() -> None:
    inputs = Inputs(SHAPE, torch.bfloat16, torch.device("cpu"))
    one = Implementation("int8", lambda *_: lambda: inputs.q, gradients=False)
    with pytest.raises(Refused, match="no gradients"):
        measure.prepared(one, inputs, backward=True)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real times: every variant, a peer, standard attention, and 8 bits."""
    monkeypatch.setattr(measure, "Timer", Timer)
    path = tmp_path / "out.json"
    shape = ("--shape", "2", "1k", "8", "128", "--kv-heads", "2", "--causal", "--fp8")
    assert main([*shape, "--min-time", "0.01", "--json", str(path)]) == 0
    hopper = torch.cuda.get_device_capability()[0] == 9
    for cell in json.loads(path.read_text())["cells"]:
        expected = {"flash_ext fa1", "flash_ext fa2", "SDPA flash", "standard attention"}
        if hopper:
            expected |= {"flash_ext fa3", "flash_ext.fp8.attention"}
        assert expected <= ran(cell), cell["rows"]
        assert all(0 < cell["rows"][name]["us"] < 1e5 for name in expected)
        assert cell["best_peer"] is not None and not cell["best_peer"].startswith("flash_ext")
