"""README's and the docs' numbers, tables and figures are those of the committed results.

Would catch a table edited by hand, a figure of older results, a result that does not say what it
was measured with, and a ratio that is upside down.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import gpu_test_report
import pytest
from test_documents import GENERATED

import flash_ext
from flash_ext.bench.__main__ import parse

common = gpu_test_report.common
import results  # noqa: E402
from report import __main__ as report  # noqa: E402
from report import figures, speed, subjects, support, tables  # noqa: E402
from results import Json  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GPUS = tables.gpu_folders()
MAIN = tables.main_gpu() or common.RESULTS  # the GPU of which most is measured


def test_documents_are_the_generated_ones() -> None:
    assert not [path.name for path in report.outdated(ROOT)], "run: make report"


@pytest.mark.parametrize("folder", GPUS, ids=lambda p: p.name)
def test_figures_belong_to_the_results(folder: Path) -> None:
    assert not figures.stale(folder), "run: make report"
    files = {path.stem for path in (figures.FOLDER / folder.name).glob("*.svg")}
    assert files == {f.name for f in figures.FIGURES if f.data(folder) is not None}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the main GPU's results, which stands for them."""
    folder = tmp_path / MAIN.name
    shutil.copytree(MAIN, folder)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return folder


def test_a_figure_of_other_results_is_stale(copied: Path) -> None:
    (line,) = [x for x in results.read(copied / "memory.jsonl")
               if (x["cell"]["provider"], x["cell"]["direction"]) == ("fa2", "both")]  # fmt: skip
    line["result"]["bytes"]["4096"] += 1
    results.append(copied / "memory.jsonl", [line])
    assert figures.stale(copied) == ["memory"]


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*/*.json*")), ids=lambda p: p.name)
def test_results_say_what_they_were_measured_with(path: Path) -> None:
    lines = results.read(path) if path.suffix == ".jsonl" else []
    for setup in [line["setup"] for line in lines] or [common.read_json(path)]:
        assert setup["device"] and setup["torch"] and setup["cudnn"] and setup["driver"]
        assert re.fullmatch("[0-9a-f]{16}", setup["digest"])
        assert re.match(r"\d{4}-\d\d-\d\dT", setup["date"])
    assert len({results.identity(line["cell"]) for line in lines}) == len(lines)


def test_every_subject_is_shown(copied: Path) -> None:
    """In the page of a GPU that has it, and none is missed if it was not measured."""
    text = "".join(map(report.appendix, GPUS))
    assert all(f"\n## {heading}\n" in text for heading in report.APPENDIX)
    for path in copied.glob("*.jsonl"):
        path.unlink()
    assert "\n## " not in report.appendix(copied)


def row(subject: str, ms: dict[str, float], cell: Json) -> Json:
    """A line of a result file, whose calls took so many milliseconds."""
    setup = {"device": "D", "torch": "2", "kernels": "k", "digest": "d", "date": "2026-01-02"}
    times = {name: {"ms": x, "tbps": 1 / x} for name, x in ms.items()}
    return {"cell": cell, "result": {subject: times, "density": 0.25}, "setup": setup}


def test_masks_and_serving_are_compared_the_right_way_up(tmp_path: Path) -> None:
    """Above 1 a peer takes longer; a mask below 1 less than the call without one."""
    size = {"batch": 2, "seqlen": 1024, "heads": 4, "kv_heads": 2, "d": 64}
    assert not [*subjects.masks_section(tmp_path), *subjects.serving_section(tmp_path)]
    ms = {f"{name} {way}": x * y for way, y in (("forward", 1.0), ("both", 3.0))
          for name, x in (("flash_ext", 0.5), ("no mask", 2.0), ("flex", 0.75))}  # fmt: skip
    results.append(tmp_path / "masks.jsonl", [row("results", ms | {"make": 0.02}, size | {
        "name": "prefix"})])  # fmt: skip
    *_, forward, both = "\n".join(subjects.masks_section(tmp_path)).splitlines()
    name = "prefix, 2 x 1024, 4/2 heads of 64"
    assert forward == f"| {name} | forward | 25% | 500 | 0.25 | 1.50 | – | – | 20 |"
    assert both.split(" | ")[3:6] == ["1,500", "0.25", "1.50"]

    call = size | {"table": "decode", "seqlen_q": 1}
    ms = {"flash_ext": 0.1, "dense": 0.08, "cudnn": 0.2}
    results.append(tmp_path / "serving.jsonl", [
        row("providers", ms, call | {"page": 16, "longest": 3, "table": "mixed"}),
        row("providers", {"flash_ext": 0.1, "flash": 0.3}, call | {"page": 0}),
    ])  # fmt: skip
    head, _, decode, mixed = "\n".join(subjects.serving_section(tmp_path)).splitlines()[-4:]
    assert head.endswith("| µs | TB/s | over dense | SDPA flash | cuDNN, pages |")
    what = "d 64, 1 query, 2 x 1,024 keys"
    assert decode == f"| decode, {what} | dense | 100.0 | 10.00 | – | 3.00 | – |"
    longer = f"mixed, {what}, the first one 3 times as long"
    assert mixed == f"| {longer} | pages of 16 | 100.0 | 10.00 | 1.25 | – | 2.00 |"


def test_peers_of_shapes_and_whole_models(tmp_path: Path) -> None:
    """The fastest peer of each direction, and of both the fastest one that has both."""
    for way, x in (("forward", 1.0), ("backward", 2.0)):
        shape = {"table": "softcap", "direction": way, "batch": 2, "seqlen": 64, "heads": 4}
        ms = {"plain": x, "fa3": 2 * x, "flash_attn_4": 3 * x}
        ms |= {"flash_attn_3": 1.5} if way == "forward" else {}
        results.append(tmp_path / "options.jsonl", [
            row("results", ms, shape | {"kv_heads": 2, "d": 64, "causal": True, "dtype": "bf16"})
        ])  # fmt: skip
    cells = results.load("options", tmp_path)
    found = subjects.shaped_table(cells, ("flash_attn_3", "flash_attn_4")).splitlines()[-1]
    forward, backward = "1,000 | 2,000 | – | 1,500", "2,000 | 4,000 | – | 6,000"
    assert found == f"| 2 x 64, 4/2 heads of 64, causal | {forward} | {backward} | 1.50 |"
    line = row("providers", {"sdpa": 3.0, "flash_ext": 2.0}, {"model": "m"})
    line["result"]["ratio"] = 1.5
    results.append(tmp_path / "models.jsonl", [line])
    assert list(subjects.models_section(tmp_path))[1].endswith("| m | 3.00 | 2.00 | 1.50 |")


def test_front_page_has_the_numbers_of_these_kernels(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others only if there are none; and it says which peer was measured."""
    other = copied.with_name("gpu-b")
    shutil.copytree(copied, other)
    monkeypatch.setattr(results, "is_current", lambda subject, setup: False)
    assert speed.front_section().count(" the speed of the best peer (") == 4
    lines = results.read(other / "compare.jsonl")
    for line in lines:
        line["setup"] |= {"kernels": "now", "device": "B"}
        for name in list(line["result"]["providers"]):
            if name.startswith("flash_attn"):
                del line["result"]["providers"][name]
    (other / "compare.jsonl").unlink()
    results.append(other / "compare.jsonl", lines)
    monkeypatch.setattr(results, "is_current", lambda subject, s: s["kernels"] == "now")
    assert speed.front_section().count(" the speed of SDPA cuDNN (") == 2


def test_the_front_page_shows_what_bench_prints() -> None:
    """The command asks for the shape of the table, and the numbers are those of a result."""
    (block,) = re.findall(
        r"<!-- generated:bench begin -->\n(.*?)\n```\n<", (ROOT / "README.md").read_text(), re.S
    )
    where, _, _, command, title, _, *rows = block.splitlines()
    (shape,) = parse(["--device", "cpu", "--full-size", *command.split()[4:]]).shapes
    assert title == f"forward, bfloat16: {shape}"
    cell = next(c for c in tables.load("compare", MAIN) if speed.SAMPLE.items() <= c.items())
    assert cell["setup"]["device"] in where and cell["setup"]["kernels"] in where
    times = {n: x["ms"] for n, x in cell["providers"].items() if "ms" in x}
    assert {float(row[21:].split()[0]) for row in rows} == {
        round(ms * 1e3, 1) for ms in times.values()
    }
    best = min(ms for n, ms in times.items() if n not in flash_ext.VARIANTS)
    (fa3,) = (row.split() for row in rows if row.startswith("flash_ext fa3"))
    assert float(fa3[4]) == round(best / times["fa3"], 2)


def test_the_walkthrough_shows_every_step() -> None:
    text = (ROOT / "docs" / "walkthrough.md").read_text()
    assert set(report.DOCUMENTS["docs/walkthrough.md"]) == {m[1] for m in GENERATED.finditer(text)}
    sizes = r"\d[\d.,]*\s?(GB|MB|MiB|KiB|tokens)"
    assert not re.findall(sizes, GENERATED.sub("", text))


def test_report_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without results the documents say so; a change by hand is found."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(support, "probe", lambda device: {})
    (tmp_path / "docs").mkdir()
    for name in report.DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())
    for arguments, status in (["--check"], 1), ([], 0), (["--check"], 0):
        monkeypatch.setattr(sys, "argv", ["report", "--root", str(tmp_path), *arguments])
        assert report.main() == status
    page = tmp_path / "README.md"
    assert page.read_text().count(tables.NOWHERE) == len(report.DOCUMENTS["README.md"])
    page.write_text(page.read_text().replace(" begin -->\n", " begin -->\nfast ", 1))
    assert report.main() == 1
