"""README's and the docs' numbers, tables and figures are those of the committed results.

Would catch a table edited by hand, a figure of older results, a result that does not say what it
was measured with, a number typed into a document, a dead link, an option that no document has, and
a page for readers that grows.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import gpu_test_report
import pytest

import flash_ext
from flash_ext.bench.__main__ import parse

common = gpu_test_report.common
import providers  # noqa: E402
import results  # noqa: E402
from report import __main__ as report  # noqa: E402
from report import claims, figures, front, speed, subjects, support, tables  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MAIN = tables.main_gpu() or common.RESULTS  # the GPU of which most is measured
# All but docs/notes, which are logs of development, and say so.
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "notes"
]
GENERATED = re.compile(r"<!-- generated:(.*?) begin -->.*?<!-- generated:\1 end -->", re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_documents_are_the_generated_ones() -> None:
    assert not [path.name for path in report.outdated(ROOT)], "run: make report"


@pytest.mark.parametrize("folder", tables.gpu_folders(), ids=lambda p: p.name)
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
    (copied / "io.jsonl").unlink()
    assert set(figures.stale(copied)) == {"memory", "io", "roofline"}


def test_equal_data_give_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each draws."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    first = {path: path.read_bytes() for path in figures.write(MAIN)}
    assert len(first) == len(figures.FIGURES)
    monkeypatch.setattr(figures, "FIGURES", figures.FIGURES[:1])
    (again,) = figures.write(MAIN)
    assert again.read_bytes() == first[again] and not figures.stale(MAIN)
    assert set(providers.PEERS) <= figures.STYLES.keys() & providers.LABELS.keys()


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*/*.json*")), ids=lambda p: p.name)
def test_results_say_what_they_were_measured_with(path: Path) -> None:
    lines = results.read(path) if path.suffix == ".jsonl" else []
    for setup in [line["setup"] for line in lines] or [common.read_json(path)]:
        assert setup["device"] and setup["torch"] and setup["cudnn"] and setup["driver"]
        if path.stem != "recorded_peers":  # which has no flash_ext
            assert re.fullmatch("[0-9a-f]{16}", setup["digest"])
            assert re.match(r"\d{4}-\d\d-\d\dT", setup["date"])
    assert len({results.identity(line["cell"]) for line in lines}) == len(lines)


def test_every_subject_is_shown(copied: Path) -> None:
    """In the page of a GPU, and none is missed if it was not measured."""
    text = report.appendix(copied)
    assert all(f"\n## {heading}\n" in text for heading in report.APPENDIX)
    assert len(claims.CLAIMS) == text.count(" | FA1, ") + text.count(" | FA2, ") + text.count(
        " | FA3, "
    ) + text.count(" | Milakov")
    for path in copied.glob("*.jsonl"):
        path.unlink()
    assert "\n## " not in report.appendix(copied)


def test_front_page_has_the_numbers_of_these_kernels(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others only if there are none; and it says which peer was measured, and how."""
    other = copied.with_name("gpu-b")
    shutil.copytree(copied, other)
    monkeypatch.setattr(results, "is_current", lambda subject, setup: False)
    assert front.front_section().count(" the speed of the best peer (") == 4
    lines = results.read(other / "compare.jsonl")
    for line in lines:
        line["setup"] |= {"kernels": "now", "device": "B"}
        for name in list(line["result"]["providers"]):
            if name.startswith("flash_attn"):
                del line["result"]["providers"][name]
    (other / "compare.jsonl").unlink()
    results.append(other / "compare.jsonl", lines)
    monkeypatch.setattr(results, "is_current", lambda subject, s: s["kernels"] == "now")
    assert front.front_section().count(" the speed of SDPA cuDNN (") == 2
    ratios = [{"direction": "forward", "d": 128, "causal": True, "seqlen": 512, "ratio": 2.0}]
    common.write_json(other / "recorded_peers.json", {"ratios": ratios})
    tables._load.cache_clear()
    assert "1 of 1 cells against a recorded ratio" in speed.words_of(other, "forward")
    assert "in 1 of 1 cells, marked r" in speed.best_note(tables.speeds(other), other)


def typed_measurements(text: str) -> list[str]:
    """Numbers with a unit of speed, time or share, outside of generated parts and code."""
    text = GENERATED.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    units = r"(?:×|%|\s?(?:TFLOP|TB/s|ms|µs|us|tokens/s)\b)"
    return re.findall(rf"\d[\d.,]*\s?{units}", text)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_documents_have_no_typed_measurement(path: Path) -> None:
    if path.parent.name != "benchmarks":  # generated whole
        assert not typed_measurements(path.read_text())


def test_what_counts_as_typed() -> None:
    begin, end = (f"<!-- generated:x {word} -->" for word in ("begin", "end"))
    generated = f"{begin}\n2.5×\n{end}"
    assert not typed_measurements(f"1,024 keys\n{generated}\n```\n7 ms\n```\n")
    assert typed_measurements(f"is 2.5× as fast\n{generated}, 700 TFLOP/s, 12 µs, 3 %") == [
        "2.5×", "700 TFLOP", "12 µs", "3 %",
    ]  # fmt: skip


def test_pages_for_readers_are_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert "TFLOP/s" in text and "](docs/figures/" in text, "a line and curves of speed"
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "not reached" not in text and "goal" not in text, "goals are the team's"


def test_the_front_page_shows_what_bench_prints() -> None:
    """The command asks for the shape of the table, and the numbers are those of a result."""
    (block,) = re.findall(
        r"<!-- generated:bench begin -->\n(.*?)\n```\n<", (ROOT / "README.md").read_text(), re.S
    )
    where, _, _, command, title, _, *rows = block.splitlines()
    (shape,) = parse(["--device", "cpu", "--full-size", *command.split()[4:]]).shapes
    assert title == f"forward, bfloat16: {shape}"
    cell = next(c for c in tables.load("compare", MAIN) if front.SAMPLE.items() <= c.items())
    assert cell["setup"]["device"] in where and cell["setup"]["kernels"] in where
    times = {n: x["ms"] for n, x in cell["providers"].items() if "ms" in x}
    assert {float(row[21:].split()[0]) for row in rows} == {
        round(ms * 1e3, 1) for ms in times.values()
    }
    best = min(ms for n, ms in times.items() if n not in flash_ext.VARIANTS)
    (fa3,) = (row.split() for row in rows if row.startswith("flash_ext fa3"))
    assert float(fa3[4]) == round(best / times["fa3"], 2)


def test_the_lines_of_the_front_page_run() -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    found: dict[str, Any] = {}
    exec(lines.replace('device="cuda"', 'device="cpu"'), found)
    assert found["q"].grad.shape == found["out"].shape == (2, 1024, 16, 64)


def test_the_changelog_has_this_version() -> None:
    version = flash_ext.__version__
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_every_option_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), re.M)
    parameters = inspect.signature(flash_ext.attention).parameters.values()
    assert rows == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def test_the_walkthrough_shows_every_step() -> None:
    text = (ROOT / "docs" / "walkthrough.md").read_text()
    assert set(claims.STEPS) == {m[1] for m in GENERATED.finditer(text)}
    sizes = r"\d[\d.,]*\s?(GB|MB|MiB|KiB|tokens)"
    assert not re.findall(sizes, GENERATED.sub("", text))


def anchors(text: str) -> set[str]:
    """Those that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Targets that do not exist: files, and headings in them."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        name, _, anchor = target.partition("#")
        if name.startswith(("http://", "https://")):
            continue
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "docs/notes").glob("*.md"))], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert not dead_links(path, path.read_text())


def test_what_is_a_dead_link() -> None:
    text = "[a](LICENSE) [b](README.md#use) [c](https://x.y) [d](none.md) [e](README.md#none)"
    assert dead_links(ROOT / "README.md", text) == ["none.md", "README.md#none"]


def test_every_page_is_reached_from_the_front_page() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {
            (page.parent / target).resolve()
            for page in new
            for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        }
        new = {link for link in links if link.is_file()} - found
    assert set(PAGES) <= found


def test_a_result_that_is_no_number_is_shown(copied: Path) -> None:
    """As an infinite error."""
    lines = results.read(copied / "numerics.jsonl")
    lines[0]["result"]["providers"]["fa2"]["out"] = {"finite": 0.5}
    results.append(copied / "numerics.jsonl", lines)
    found = claims.exact(copied)
    assert found is not None and "– ∞× the error" in found[0]


def test_tables() -> None:
    entries = [(("a", "b"), "y", "1"), (("c", "d"), "x", "2")]
    assert tables.pivot(["", "h"], entries, ["x"]).splitlines() == [
        "|  | h | x | y |", "| --- | --- | --: | --: |", "| a | b | – | 1 |", "| c | d | 2 | – |",
    ]  # fmt: skip
    assert [tables.number(x) for x in (0.1234, 12.34, 999.7)] == ["0.123", "12.3", "1,000"]
    assert tables.span([1.0, 2.5]) == "1× – 2.5×" and tables.span([2.0, 2.0]) == "2×"
    fast = {"ms": 3.0, "tflops": 1.0, "auto_ms": 2.0}
    slow = {"ms": 3.0, "tflops": 1.0, "auto_ms": 4.0}
    row = {"kind": "causal", "rows": 4096, "ranks": 2, "provider": "ring-flash-attn x"}
    line = subjects.distributed_table([row | {"forward": fast, "backward": slow}])
    assert line.endswith("| 1.50, 0.75 |"), "of times that were taken in turns"


def test_support_table(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each no has its reason below; what a device was not asked is 'not measured yet'."""
    lines = [x for x in results.read(copied / "support.jsonl") if x["cell"]["feature"] != "scale"]
    for line in lines:
        for answers in line["result"]["answers"].values():
            answers.update({d: "no time" for d in answers if line["cell"]["feature"] == "sink"})
    (copied / "support.jsonl").unlink()
    results.append(copied / "support.jsonl", lines)
    monkeypatch.setattr(support, "probe", lambda device: {})
    text = support.support_section()
    number = re.search(r"\((\d+)\) no time\.", text)
    assert number and f"| sink |{f' no ({number[1]}) |' * 6}" in text
    assert f"| scale |{' not measured yet |' * 8}" in text


def test_report_draws_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without results the documents say so; a change by hand is found."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(support, "probe", lambda device: {})
    (tmp_path / "docs").mkdir()
    for name in report.DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["report", "--root", str(tmp_path), *arguments])
        return report.main()

    assert run("--check") == 1
    assert run() == 0 and run("--check") == 0
    for name, sections in report.DOCUMENTS.items():
        text = (tmp_path / name).read_text()
        empty = 0 if "support" in sections else len(sections)  # CPU support needs no GPU
        assert text.count(tables.NOWHERE) == empty, name
        (tmp_path / name).write_text(text.replace(" begin -->\n", " begin -->\nfast ", 1))
        assert run("--check") == 1
        (tmp_path / name).write_text(text)
        assert run("--check") == 0
