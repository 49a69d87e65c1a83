"""README's and the docs' numbers, tables and figures are those of the committed results.

Would catch a table edited by hand, a figure of older results, a result file that does not say what
it was measured with, a number typed into a document, a verdict that does not follow or lacks its
reason, a dead link, an option that no document has, and a front page that grows.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import gpu_test_report
import pytest

import flash_ext
from flash_ext.bench.__main__ import parse

common = gpu_test_report.common
import console  # noqa: E402
import everything  # noqa: E402
import providers  # noqa: E402
from report import (  # noqa: E402
    claims,
    compare,
    documents,
    figures,
    front,
    goals,
    moved,
    support,
    tables,
)
from report.__main__ import main as write_report  # noqa: E402
from report.distributed import distributed_section, speed_table  # noqa: E402
from report.sections import memory_section  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GPUS = [folder.name for folder in tables.gpu_folders()]
MAIN = tables.main_gpu() or common.RESULTS  # the GPU of which most is measured
# All but docs/notes, which are logs of development, and say so.
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "notes"
]
GENERATED = re.compile(r"<!-- generated:(.*?) begin -->.*?<!-- generated:\1 end -->", re.DOTALL)


def test_documents_are_the_generated_ones() -> None:
    assert not [path.name for path in documents.outdated(ROOT)], "run: make report"


@pytest.mark.parametrize("gpu", GPUS)
def test_figures_belong_to_the_results(gpu: str) -> None:
    assert not figures.stale(gpu), "run: make report"
    files = {path.stem for path in (figures.FOLDER / gpu).glob("*.svg")}
    results = figures.load(common.RESULTS / gpu)
    assert files == {f.name for f in figures.FIGURES if f.data(results) is not None}


def test_a_figure_of_other_results_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    results = figures.load(MAIN)
    monkeypatch.setattr(figures, "load", lambda folder: results)
    results["memory"] = copy.deepcopy(results["memory"])
    results["memory"]["providers"]["fa2"]["forward"]["bytes"]["4096"] += 1
    assert figures.stale(MAIN.name) == ["memory"]
    del results["io"]
    assert set(figures.stale(MAIN.name)) == {"memory", "io", "roofline"}


def test_equal_data_give_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    first = {path: path.read_bytes() for path in figures.write(MAIN.name)}
    assert first and figures.write(MAIN.name) == list(first)
    assert all(path.read_bytes() == content for path, content in first.items())
    assert not figures.stale(MAIN.name)
    for path in first:
        text = path.read_text()
        assert "<text" in text and "S (tokens)" in text or path.stem in (
            "speedup", "generations", "roofline", "numerics", "training",
        )  # fmt: skip


def test_every_figure_draws(tmp_path: Path) -> None:
    """Training too, which may have no results yet."""
    pytest.importorskip("matplotlib")
    speeds = {"fa3": 5.0, "sdpa": 4.0, "standard": 2.0}
    providers = {n: {"tokens_per_second": x} for n, x in speeds.items()} | {"fa1": {"skipped": "x"}}
    results = figures.load(MAIN)
    results["train"] = {"cells": [{"model": "small", "seqlen": 1024, "providers": providers}]}
    rows = [["small, S 1024", "fa3", 1.25], ["small, S 1024", "standard", 0.5]]
    assert figures.training_data(results) == rows
    for figure in figures.FIGURES:
        data = figure.data(results)
        assert data is not None and len(figure.digest(data)) == 16
        drawn = figure.draw(data)
        drawn.savefig(tmp_path / f"{figure.name}.svg")
        figures.pyplot().close(drawn)


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*/*.json")), ids=lambda p: p.stem)
def test_results_say_what_they_were_measured_with(path: Path) -> None:
    result = common.read_json(path)
    assert result["device"] and result["torch"] and result["cudnn"] and result["driver"]
    if path.stem != "recorded_peers":  # which has no flash_ext
        assert re.fullmatch("[0-9a-f]{16}", result["digest"])
        assert re.match(r"\d{4}-\d\d-\d\dT", result["date"])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def typed_measurements(text: str) -> list[str]:
    """Numbers with a unit of speed, time or share, outside of generated parts and code."""
    text = GENERATED.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    units = r"(?:×|%|\s?(?:TFLOP|TB/s|ms|µs|us|tokens/s)\b)"
    return re.findall(rf"\d[\d.,]*\s?{units}", text)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_documents_have_no_typed_measurement(path: Path) -> None:
    assert not typed_measurements(path.read_text())


def test_what_counts_as_typed() -> None:
    begin, end = (f"<!-- generated:x {word} -->" for word in ("begin", "end"))
    generated = f"{begin}\n2.5×\n{end}"
    assert not typed_measurements(f"1,024 keys\n{generated}\n```\n7 ms\n```\n")
    assert typed_measurements(f"is 2.5× as fast\n{generated}, 700 TFLOP/s, 12 µs, 3 %") == [
        "2.5×", "700 TFLOP", "12 µs", "3 %",
    ]  # fmt: skip


def test_the_front_page_is_short_and_has_no_red_row() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert "not reached" not in text and " failed" not in GENERATED.sub("", text)
    assert "TFLOP/s" in text and "](docs/figures/" in text, "a line and a picture of speed"


def test_the_front_page_shows_what_bench_prints() -> None:
    """The command asks for the shape of the table, and the numbers are those of a result file."""
    (block,) = re.findall(
        r"<!-- generated:bench begin -->\n(.*?)\n```\n<", (ROOT / "README.md").read_text(), re.S
    )
    where, _, _, command, title, _, *rows = block.splitlines()
    (shape,) = parse(["--device", "cpu", "--full-size", *command.split()[4:]]).shapes
    compare = common.read_json(MAIN / "compare.json")
    assert title == f"forward, bfloat16: {shape}"
    assert compare["device"] in where and compare["digest"] in where
    cell = next(c for c in compare["cells"] if front.SAMPLE.items() <= c.items())
    measured = {x["ms"] for x in cell["providers"].values() if "ms" in x}
    printed = {float(row[21:].split()[0]) for row in rows}
    assert printed == {round(ms * 1e3, 1) for ms in measured}
    best = min(ms for n, x in cell["providers"].items() if n not in flash_ext.VARIANTS
               if (ms := x.get("ms")))  # fmt: skip
    (fa3,) = (row.split() for row in rows if row.startswith("flash_ext fa3"))
    assert float(fa3[4]) == round(best / cell["providers"]["fa3"]["ms"], 2)


def test_the_lines_of_the_front_page_run() -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    found: dict[str, Any] = {}
    exec(lines.replace('device="cuda"', 'device="cpu"'), found)
    assert found["q"].grad.shape == found["out"].shape == (2, 1024, 16, 64)


def test_a_second_gpu_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("much/a.json", "much/b.json", "little/a.json", "cpu/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    much, little = tmp_path / "much", tmp_path / "little"
    assert tables.main_gpu() == much
    rows = [["goal", "1.2"], ["goal", tables.UNKNOWN], ["goal", tables.NO]]
    assert tables.relevant(much, rows, 1) == rows
    assert tables.relevant(little, rows, 1) == rows[:1]


def test_the_front_page_names_the_peer_that_was_measured() -> None:
    peers = {"fa3": {"ms": 1.0, "tflops": 700.0}, "cudnn": {"ms": 1.5}}
    cell = {"dtype": "bf16", "direction": "forward", "d": 128, "d_v": 0, "causal": False,
            "seqlen": 1024, "seqlen_q": 0, "batch": 16, "heads": 16, "kv_heads": 0,
            "providers": peers}  # fmt: skip
    assert "forward 1.50× the speed of SDPA cuDNN" in front.words_of([cell], "forward")
    best = cell | {"providers": peers | {"best_peer": {"ms": 1.2}}}
    assert "forward 1.20× the speed of the best peer" in front.words_of([best], "forward")
    assert front.words_of([cell], "backward") == ""


def test_a_recorded_ratio_is_no_measurement() -> None:
    """README and the goals say in how many cells the best peer was not measured."""
    cells = [
        {"dtype": "bf16", "direction": "forward", "d": 128, "causal": False, "seqlen": s,
         "batch": 16384 // s, "heads": 16, "providers": {
             "fa3": {"ms": 1.0, "tflops": 700.0},
             "best_peer": {"ms": 1.2} | ({"recorded": True} if s == 512 else {})}}
        for s in (512, 1024)
    ]  # fmt: skip
    note = ", 1 of 2 cells against a recorded ratio"
    (goal,) = [g for g in goals.GOALS if (g.ours, g.direction) == ("fa3", "forward")]
    assert f"of 2 shapes{note})" in front.words_of(cells, "forward")
    rows = goals.goal_rows(goal, cells, {"best_peer": "best peer"})
    assert len(rows) == 2 and all(row[1].endswith(f"2 cells{note}") for row in rows)
    rows = goals.goal_rows(goal, cells[1:], {"best_peer": "best peer"})
    assert "recorded" not in front.words_of(cells[1:], "forward") + str(rows)
    recorded = [note in row for row in figures.speedup_data({"compare": {"cells": cells}})]
    assert recorded == [True]


def test_the_front_page_has_the_numbers_of_this_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another source only where there are no others."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for gpu, digest in (("gpu-a", "another"), ("gpu-b", common.source_digest())):
        result = {"device": gpu, "digest": digest, "date": "2026-01-01", "cells": []}
        (tmp_path / gpu).mkdir()
        common.write_json(tmp_path / gpu / "compare.json", result)
        text = front.front_section()
        assert gpu in text and digest in text
    assert "gpu-a" not in text


def test_the_changelog_has_this_version() -> None:
    version = flash_ext.__version__
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_every_option_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), re.M)
    parameters = inspect.signature(flash_ext.attention).parameters.values()
    assert rows == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def test_the_walkthrough_shows_every_step() -> None:
    text = (ROOT / "docs" / "walkthrough.md").read_text()
    assert set(documents.STEPS) == {m[1] for m in GENERATED.finditer(text)}
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


def test_every_claim_has_its_row() -> None:
    rows = claims.rows(figures.load(MAIN))
    assert len(rows) == len(claims.CLAIMS) and all(len(row) == 5 and all(row[:2]) for row in rows)
    starts = ("holds", "not reached", "not measured")
    assert all(row[4].startswith(starts) for row in rows)
    judged = [row[4] for row in rows if row[4] != claims.UNKNOWN]
    assert all(": " in words for words in judged if re.match("not|holds partly", words))
    assert [row[4] for row in claims.rows({})].count(claims.UNKNOWN) == len(rows) - 2, (
        "without results only what needs none has a verdict"
    )


def test_a_goal_that_is_not_reached_has_a_reason() -> None:
    results = figures.load(MAIN)
    verdicts = [row[2] for row in goals.rows(results["compare"], results["memory"])]
    assert "holds" in verdicts
    assert all(v in ("holds", "") or v.startswith("**not reached**: ") for v in verdicts)


def test_a_slow_clock_is_named_as_the_reason() -> None:
    cells = [{"gpu": {"sm_mhz": mhz}} for mhz in (1980.0, 1950.0, 1815.0)]
    assert goals.slow_clock(cells[1], cells) == goals.OPEN
    assert "1,815 MHz, in other cells up to 1,980" in goals.slow_clock(cells[2], cells)
    assert goals.slow_clock({}, [*cells, {}]) == goals.OPEN == goals.slow_clock({}, [{}])


def io_case(method: str, seqlen: int, sm: float, theta: float, **other: object) -> dict:
    return {
        "method": method, "direction": "forward", "seqlen": seqlen, "d": 64, "heads": 128,
        "hbm_read": sm / 2, "hbm_written": sm / 2, "sm": sm, "theta": theta, "shared_bytes": 1024,
        "ms": 1.0, "tflops": 1.0,
    } | other  # fmt: skip


def test_verdicts_follow_the_numbers() -> None:
    assert claims.judged([2.0, 3.0], 2, "x") == "holds"
    assert claims.judged([1.9, 3.0], 2, "x") == "holds partly: x"
    assert claims.judged([1.0, 1.9], 2, "x") == "not reached: x"

    def io(times: float) -> dict:
        cases = [
            io_case(m, s, sm=10.0 * (times if s == 4096 else 1), theta=1.0) | {"direction": d}
            for m in ("standard", "fa1", "fa2", "fa3")
            for s in (2048, 4096)
            for d in ("forward", "backward")
        ]
        return {"io": {"cases": cases}}

    for measure in (claims.standard_io, claims.flash_io):
        assert measure(io(1.1)).verdict.startswith("holds")
        assert measure(io(2.0)).verdict.startswith("not reached")

    def grid(fast: float) -> dict:
        cells = [
            {"dtype": "bf16", "direction": "forward", "d": 64, "causal": False, "seqlen": s,
             "batch": 16384 // s, "heads": 32,
             "providers": {"fa2": {"ms": 1.0}, "fa1": {"ms": fast if s == 512 else 3.0}}}
            for s in (512, 1024)
        ]  # fmt: skip
        return {"compare": {"cells": cells}}

    measure = claims.over("fa2", "fa1", "forward", 2, ", no")
    assert measure(grid(2.5)).verdict == "holds"
    assert measure(grid(1.5)).verdict == "holds partly: 1 of 2 cells reach 2×, no"
    assert measure(grid(1.5)).figure == "1.5× – 3×, geometric mean 2.12×"

    def train(speed: float) -> dict:
        providers = {"fa2": {"tokens_per_second": speed}, "standard": {"tokens_per_second": 1.0}}
        return {"train": {"cells": [{"model": "small", "seqlen": 1024, "providers": providers}]}}

    measure = claims.training("small", 3, "why")
    assert measure(train(3.1)).verdict == "holds" and measure(train(3.1)).figure == "3.1×"
    assert measure(train(2.0)).verdict == "not reached: why"


def memory_of(both: dict[str, dict]) -> dict:
    """memory.json where each provider ended so, forward and backward together."""
    shape = {"batch": 1, "heads": 4, "d": 128, "causal": True}
    return {"memory": {"shape": shape, "providers": {n: {"both": r} for n, r in both.items()}}}


def test_a_method_may_stop_at_its_first_length() -> None:
    none, some = {"bytes": {}, "stopped": "x"}, {"bytes": {"1024": 1, "2048": 2}}
    finding = claims.standard_stops(memory_of({"standard": some | none, "fa1": none, "fa2": some}))
    assert finding.figure == "standard attention did not run; fa1 did not run, fa2 ran at 2048"
    assert finding.verdict == "holds partly: fa1 ran out of memory too"
    refused = {"bytes": {}, "refused": "x"}
    finding = claims.standard_stops(memory_of({"standard": none, "fa1": refused, "fa2": some}))
    assert finding.verdict == "holds partly: fa1 did not run longer"


def test_a_result_that_is_no_number_is_shown() -> None:
    """As an infinite error; what has only such a reference to stand beside is left out."""
    errors = {"max": 1.0, "rms": 0.5}
    cell = {"dtype": "bf16", "seqlen": 512, "distribution": "normal", "providers": {
        "fa2": {"out": errors, "dq": {"finite": 0.0}, "dk": errors},
        "standard": {"out": errors, "dq": errors, "dk": {"finite": 0.0}},
    }}  # fmt: skip
    finding = claims.exact({"numerics": {"d": 128, "cells": [cell]}})
    assert "1× – ∞× that" in finding.figure and finding.conditions.endswith("2 pairs")
    assert finding.verdict.startswith("not reached")


def test_every_peer_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table of speeds all but SDPA efficient; in that of memory whatever was measured."""
    assert set(providers.PEERS) - set(compare.ROWS) == {"efficient"}
    assert set(providers.PEERS) <= figures.STYLES.keys() & figures.LABELS.keys()
    cell = {"dtype": "bf16", "direction": "forward", "d": 64, "causal": False, "seqlen": 512}
    cell["providers"] = {n: {"ms": 1.0} for n in ("fa2", "fa3", "flash_attn_2", "flash_attn_3")}
    labels = {"flash_attn_2": "flash-attn 2", "flash_attn_3": "flash-attn 3"}
    head = compare.ratio_table([cell], labels).partition("\n")[0]
    assert "fa2 / flash-attn 2" in head and "fa3 / flash-attn 3" in head

    result = {"device": "gpu", "torch": "2", "date": "2026-01-01", "digest": "0" * 16}
    result |= memory_of({"flash_attn_3": {"bytes": {"1024": 2**20}}})["memory"]
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("report.sections.picture", lambda *_: [])
    (tmp_path / "gpu").mkdir()
    common.write_json(tmp_path / "gpu" / "memory.json", result | {"labels": labels})
    assert "| forward and backward, flash-attn 3 | 1 |" in memory_section()


def test_large_numbers_have_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    assert [tables.number(x) for x in (0.1234, 12.34, 999.7)] == ["0.123", "12.3", "1,000"]
    ((_, line),) = moved.moved({"bytes": 8875000000}, {"bytes": 9875000000})[0]
    assert "8,875,000,000 -> 9,875,000,000" in line
    cell = {"dtype": "bf16", "direction": "forward", "d": 64, "causal": True, "seqlen": 512,
            "batch": 2, "heads": 16, "kv_heads": 0, "seqlen_q": 128,
            "providers": {"fa3": {"ms": 1.0, "tflops": 1.0, "tbps": 1234.0}}}  # fmt: skip
    console.print_tables([cell], {"fa3": "flash_ext fa3"}, brief=True)
    assert "1,234" in capsys.readouterr().out
    text = compare.other_table([cell], {})
    assert "2 x 128 x 512, heads 16/16, TB/s of K and V | 1234.00 |" in text


def test_what_moved(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells are found by what they are, wherever they stand; noise and other keys are left out."""
    results = figures.load(MAIN)
    for name in ("compare", "memory", "io", "numerics", "options"):
        where = [w for w, _, _ in moved.numbers(results[name])]
        assert len(where) == len(set(where)) > 10, f"{name}: numbers that have one name"
        assert moved.moved(results[name], results[name])[0] == []

    old, new = results["compare"], copy.deepcopy(results["compare"])
    new["cells"].reverse()
    assert moved.moved(old, new)[0] == []
    ours = (c["providers"].get("fa3", {}) for c in new["cells"])
    times = next(x for x in ours if "host_us" in x)
    times["ms"] *= 1.03
    times["host_us"] *= 9
    assert moved.moved(old, new)[0] == []
    times["ms"] *= 1.1
    ((change, line),) = moved.moved(old, new)[0]
    assert change == pytest.approx(0.133) and "fa3, ms" in line and "(+13.3%)" in line
    new["digest"] = "0" * 16
    moved.print_moved("compare.json", old, new)
    printed = capsys.readouterr().out
    assert "1 of " in printed and f"digest {old['digest']} -> {'0' * 16}" in printed

    several = figures.load(common.RESULTS / "nvidia-h100-80gb-hbm3")["distributed"]
    where = [w for w, _, _ in moved.numbers(several["cells"])]
    assert len(where) == len(set(where)) > 10

    io = copy.deepcopy(results["io"])
    io["cases"][2]["model"] += 1
    assert len(moved.moved(results["io"], io)[0]) == 1, "and the case's other numbers are found"
    io["cases"][2]["model"] -= 1
    io["cases"][3]["sm"] *= 1.5
    assert len(moved.moved(results["io"], io)[0]) == 1
    moved.print_moved("x.json", None, io)
    assert "x.json: new" in capsys.readouterr().out


def test_what_moved_where_there_are_no_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    results = figures.load(MAIN)
    new = copy.deepcopy(results["support"])
    new["support"]["dropout"]["fa2"]["forward"] = "no time"
    moved.print_moved("support.json", results["support"], new)
    assert "dropout, fa2, forward: None -> no time" in capsys.readouterr().out


def test_the_best_speed_is_of_the_standard_grid() -> None:
    results = figures.load(MAIN)
    runs = [results[name] for name in ("compare", "compare_full") if name in results]
    grid = [c for run in runs for c in claims.standard_cells(run["cells"], "forward")]
    speeds = {name: [c["providers"].get(name, {}).get("tflops", 0) for c in grid]
              for name in ("fa1", "fa2", "fa3")}  # fmt: skip
    for name, found in speeds.items():
        finding = claims.of_peak(name, "forward", 0.1, "why")(results)
        assert finding is not None
        assert float(finding.figure.partition(" ")[0]) <= round(max(found))


def test_every_part_of_the_bench_is_a_script_that_takes_its_arguments() -> None:
    shared = "".join((ROOT / "benchmarks" / f"{n}.py").read_text() for n in ("cells", "providers"))
    for name, arguments in everything.RUNS.items():
        script = ROOT / "benchmarks" / f"{everything.SCRIPTS.get(name, name)}.py"
        text = script.read_text()
        text += shared if "command_line(" in text else ""
        assert all(f'"{a}"' in text for a in arguments if a.startswith("--")), name


def test_report_draws_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without results the documents say so; a change by hand is found."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(support, "probe", lambda device: {})
    (tmp_path / "docs").mkdir()
    for name in documents.DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["report", "--root", str(tmp_path), *arguments])
        return write_report()

    assert run("--check") == 1
    assert run() == 0 and run("--check") == 0
    for name, sections in documents.DOCUMENTS.items():
        text = (tmp_path / name).read_text()
        empty = 0 if "support" in sections else len(sections)  # CPU support needs no GPU
        assert text.count(tables.NOWHERE) == empty, name
        (tmp_path / name).write_text(text.replace(" begin -->\n", " begin -->\nfast ", 1))
        assert run("--check") == 1
        (tmp_path / name).write_text(text)
        assert run("--check") == 0


def test_benchmarks_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The PTX path begins before the timed parts, waits for nothing and yields to them."""
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    begun = tmp_path / "begun"
    (scripts / "support.py").write_text(
        f"import os, sys, pathlib; print(sys.argv[1:], os.nice(0))\n"
        f"if '--ptx' in sys.argv: pathlib.Path({str(begun)!r}).touch()"
    )
    (scripts / "io.py").write_text(
        f"import pathlib, time\n"
        f"for _ in range(1000): pathlib.Path({str(begun)!r}).exists() or time.sleep(0.01)\n"
        f"print('timed'); raise SystemExit(3 if pathlib.Path({str(begun)!r}).exists() else 4)"
    )
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "RUNS", {"support": (), "PTX path": ("--ptx",), "io": ("x",)})
    assert everything.run(list(everything.RUNS)) == ["io"]
    printed = re.sub(r"\d+ s,", "", capfd.readouterr().out)
    usual = os.nice(0)
    assert printed.split("\n") == [
        "", "===== support: ", f"[] {usual}", "===== support:  exit status 0",
        "", "===== io: x", "timed", "===== io:  exit status 3",
        "", "===== PTX path", f"['--ptx'] {min(usual + 19, 19)}",
        "===== PTX path:  exit status 0", "",
    ]  # fmt: skip


def test_a_peer_of_several_gpus_beside_auto() -> None:
    """The ratio is of times that were taken in turns, and of no others."""
    cell = {"kind": "causal", "rows": 4096, "ranks": 2, "provider": "ring-flash-attn x"}
    speeds = {"forward": {"ms": 3.0, "tflops": 1.0, "auto_ms": 2.0},
              "backward": {"ms": 3.0, "tflops": 1.0, "auto_ms": 4.0}}  # fmt: skip
    assert speed_table([cell | speeds]).endswith("| 1.50, 0.75 |")
    alone = {name: {"ms": 3.0, "tflops": 1.0} for name in speeds}
    assert "1.50" not in speed_table([cell | alone])


def test_each_result_of_several_gpus_says_how_it_was_measured() -> None:
    """By its file, since distributed.py's way of measuring changes."""
    files = sorted(common.RESULTS.glob("*/distributed.json"))
    section = distributed_section()
    for file in files:
        assert common.read_json(file)["method"] in section
    assert len(files) >= 2
