"""The CPU-side cores of benchmarks/io.py and numerics.py.

Would catch a prediction that forgets a tensor, counters given to the wrong call, an error that is
measured against the wrong reference or hides what is not a number, and distributions that do not do
what they are for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from io_module import benchmark_io as io

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import numerics  # noqa: E402
import providers  # noqa: E402
import results as result_files  # noqa: E402

MB = 10**6


def test_predictions_by_hand() -> None:
    """Two tiles of one head, every tensor written out; bytes a row of 64 elements: 128, 256."""
    n = 512
    case = io.Case("fa1", "forward", n, 64, 1)
    assert io.tile(case) == 256
    q, k, v, out = (n * 128,) * 4
    state = (
        n * 256 + 2 * n * 4
    )  # O, m and l in float32: out after the first tile, in before the last
    assert io.model(case) == 2 * q + k + v + out + 2 * state

    assert io.tile(io.Case("fa2", "forward", n, 64, 1)) == 128
    assert io.model(io.Case("fa2", "forward", n, 64, 3)) == 3 * (q + 4 * (k + v) + out + 4 * n)
    scores = 2 * n * n
    assert io.model(io.Case("standard", "forward", n, 64, 1)) == q + k + v + out + 4 * scores
    backward = io.model(io.Case("standard", "backward", n, 64, 1))
    assert backward == 8 * q + 7 * scores

    statistics = 2 * 4 * n
    inner = 4 * (2 * q + statistics)  # Q and dO with lse and delta, for each of four KV tiles
    dq = n * 256
    fa1 = io.model(io.Case("fa1", "backward", n, 64, 1))
    assert fa1 == inner + 2 * 3 * dq + k + v + 2 * k + out + q, "dQ goes out as Q does, once"
    fa2 = io.model(io.Case("fa2", "backward", n, 64, 1))
    before, behind = 2 * q + dq + statistics, dq + q  # delta and zeros; the conversion
    assert fa2 == before + inner + 4 * dq + 4 * k + behind


def test_theta() -> None:
    """N^2 d^2 / M elements, M in elements of two bytes; N d + N^2 for standard attention."""
    case = io.Case("fa2", "forward", 4096, 64, 2)
    assert io.theta(case, 192 * 1024) == pytest.approx(2 * 2 * 4096**2 * 64**2 / (96 * 1024))
    standard = io.Case("standard", "forward", 4096, 64, 2)
    assert io.theta(standard, 1) == 2 * 2 * (4096 * 64 + 4096**2)


def test_tiles_differ_by_method_and_length() -> None:
    sizes = {s: io.tile(io.Case("fa3", "forward", s, 64, 1)) for s in (4096, 8192)}
    assert sizes == {4096: 256, 8192: 192}
    assert io.tile(io.Case(io.SOFTCAP, "forward", 4096, 64, 1)) == 128
    assert io.tile(io.Case("fa3", "forward", 4096, 128, 1)) == 128


def test_every_case_has_a_prediction() -> None:
    asked = list(io.cases(io.SEQLENS, ["standard", "fa1", "fa2", "fa3"]))
    assert len(asked) == len(set(asked)) and all(io.model(c) > 0 for c in asked)
    assert {c.heads for c in asked} == {io.HEADS, io.FEW_HEADS}
    assert {c.method for c in io.cases([512], ["standard", "fa2"])} == {"standard", "fa2"}


def profile(*kernels: tuple[str, float, float, float]) -> str:
    """ncu's CSV, with its lines in front; kernels are (name, read, written, to the SM)."""
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (name, read, written, sm) in enumerate(kernels):
        values = {io.HBM[0]: read, io.HBM[1]: written, io.SM[0]: sm, io.SM[1]: 0, io.SHARED: 1024}
        lines += [f'"{number}","{name}","{m}","byte","{v:,.0f}"' for m, v in values.items()]
    return "\n".join(lines)


def test_counts_go_to_their_calls() -> None:
    """Kernels up to a mark are one call's; what the flush writes beyond its size is too."""
    flush = float(io.FLUSH_BYTES)
    text = profile(
        ("a", 10 * MB, 5 * MB, 30 * MB), ("b", 1 * MB, 0, 2 * MB),
        ("fill", 0, flush + 3 * MB, flush), (io.MARK, 0, 0, 0),
        ("c", 7 * MB, 1 * MB, 7 * MB), ("fill", 0, flush, flush), (io.MARK, 0, 0, 0),
    )  # fmt: skip
    first, second = io.by_case(io.kernels(text))
    assert (first["hbm_read"], first["hbm_written"], first["sm"]) == (11 * MB, 8 * MB, 32 * MB)
    assert first["kernels"] == 2 and second["kernels"] == 1 and second["hbm_written"] == MB
    with pytest.raises(RuntimeError, match="no permission"):
        io.kernels("==ERROR== no permission")


def test_error_is_relative_and_counts_what_is_not_finite() -> None:
    want = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)  # RMS 2.5
    assert numerics.error(want + torch.tensor([0.0, 0.5, 0.0, 0.0]), want) == {
        "max": 0.2, "rms": 0.1,
    }  # fmt: skip
    nan = torch.tensor([3.0, float("nan"), float("inf"), 0.0])
    assert numerics.error(nan, want) == {"max": 0.0, "rms": 0.0, "finite": 0.5}
    assert numerics.error(nan * float("nan"), want) == {"finite": 0.0}


@pytest.mark.parametrize("distribution", numerics.DISTRIBUTIONS)
def test_distributions(distribution: str) -> None:
    torch.manual_seed(0)
    work = numerics.workload((1, 256, 2, 64), torch.float32, torch.device("cpu"), distribution)
    q, k = work.q.transpose(1, 2), work.k.transpose(1, 2)
    scores = q @ k.mT / 8
    overflows = scores.exp().isinf().any().item()
    assert overflows == (distribution in ("large logits", "rising maximum"))
    rises = scores.cummax(dim=-1).values[..., ::32].diff().gt(0).float().mean()
    assert (rises > 0.9) == (distribution == "rising maximum")
    assert (work.v.abs().max() > 10) == (distribution == "outliers")


def test_naive_softmax_breaks_where_the_others_do_not() -> None:
    device = torch.device("cpu")
    rows = {x: numerics.softmax(x, device)["forms"] for x in numerics.SOFTMAX_SCALES}
    assert all("finite" not in forms[n] for forms in rows.values() for n in ("safe", "online"))
    assert "finite" not in rows[1.0]["naive"] and rows[100.0]["naive"]["finite"] < 0.9
    assert all(forms["online"]["rms"] < 1e-6 for forms in rows.values())


def test_naive_attention_is_attention() -> None:
    work = providers.Workload((1, 64, 2, 32), torch.float32, torch.device("cpu"))
    for causal in (False, True):
        results = numerics.cell(work, [numerics.naive(), numerics.standard()], causal)
        for by_tensor in results.values():
            assert set(by_tensor) == set(numerics.TENSORS)
            assert all(r["rms"] < 1e-6 for r in by_tensor.values())


def test_numerics_runs_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run on the CPU; a variant that is too wrong fails it."""
    path = tmp_path / "numerics.json"
    arguments = ["numerics", "--device", "cpu", "--s", "64", "--d", "32", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert numerics.main() == 0
    rows = [result_files.flat(line) for line in result_files.read(path)]
    cells = [row for row in rows if "distribution" in row]
    assert len(cells) == 2 * len(numerics.DISTRIBUTIONS)
    assert any("finite" in c["providers"]["naive"]["out"] for c in cells)
    assert not numerics.too_wrong(cells, ["fa1", "fa2"])
    cells[0]["providers"]["fa2"]["dk"]["rms"] = 0.1
    cells[1]["providers"]["fa1"]["out"]["finite"] = 0.99
    found = numerics.too_wrong(cells, ["fa1", "fa2"])
    assert [line[:7] for line in found] == ["fa2 dk,", "fa1 out"]
