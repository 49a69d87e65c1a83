"""Writes README's result and support tables from benchmarks/results; no number is typed.

    python benchmarks/report.py            # rewrite README.md between its markers
    python benchmarks/report.py --check    # exit 1 if README.md differs from what would be written

The markers are <!-- generated:results begin --> ... <!-- generated:results end -->, and the same
with 'support'. CPU support is asked of the package here and now; GPU support comes from
compare.json, where the same questions were asked on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from common import Json
from compare import HIDDEN, TOKENS, geometric_mean, ratios
from support import OPTIONS, probe

import flash_ext

ROWS = ("fa1", "fa2", "flash", "cudnn", "standard")  # the providers README shows
YES, NO, UNKNOWN = "yes", "–", "not yet measured"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def on_grid(cell: Json) -> bool:
    """Whether a cell belongs to DESIGN's standard grid."""
    return (
        cell["dtype"] == "bf16"
        and cell["batch"] * cell["seqlen"] == TOKENS
        and cell["heads"] * cell["d"] == HIDDEN
    )


def select(cells: list[Json], **wanted: object) -> list[Json]:
    """The cells whose entries equal ``wanted``, or are in it where it is a tuple."""
    return [
        cell
        for cell in cells
        if all(
            cell[key] in value if isinstance(value, tuple) else cell[key] == value
            for key, value in wanted.items()
        )
    ]


def claims(compare: Json | None, memory: Json | None) -> Iterator[list[str]]:
    """What the package promises of speed and memory, beside what was measured."""
    cells = compare["cells"] if compare else []
    standard = [c for c in cells if on_grid(c)]

    def claim(text: str, found: list[Json], ours: str, peer: str, least: float) -> list[str]:
        values = ratios(found, ours, peer)
        if not values:
            return [text, UNKNOWN, ""]
        verdict = "holds" if min(values) >= least else "**not reached**"
        spread = f"{min(values):.2f}× – {max(values):.2f}×, in {len(values)} cells"
        return [f"{text} {least:g}×", spread, verdict]

    for direction in ("forward", "backward"):
        yield claim(
            f"fa2 over SDPA flash, {direction}, d 64 and 128, S ≥ 2048: at least",
            [c for c in select(standard, direction=direction, d=(64, 128)) if c["seqlen"] >= 2048],
            "fa2", "flash", 1.0,
        )  # fmt: skip
    for direction in ("forward", "backward"):
        wide = select(cells, direction=direction, d=128, seqlen=(1024, 2048), dtype="bf16")
        yield claim(
            f"fa1 over standard attention, {direction}, d 128, S 1024–2048, B·H ≥ 132: at least",
            [c for c in wide if c["batch"] * c["heads"] >= 132], "fa1", "standard", 1.5,
        )  # fmt: skip
    for direction in ("forward", "backward"):
        yield claim(
            f"fa2 over fa1, {direction}, S ≥ 4096: at least",
            [c for c in select(standard, direction=direction) if c["seqlen"] >= 4096],
            "fa2", "fa1", 2.0,
        )  # fmt: skip
    for name in ("fa1", "fa2"):
        rows = (memory or {}).get("providers", {}).get(name, {})
        found = {d: r["exponent"] for d, r in rows.items() if "exponent" in r}
        if not memory or not found:
            yield [f"{name}: extra memory grows linearly in S", UNKNOWN, ""]
            continue
        limit = memory["exponent_limit"]
        linear = all(e < limit for e in found.values()) and not any(
            "stopped" in r for r in rows.values()
        )
        lengths = [int(s) for r in rows.values() for s in r["bytes"]]
        yield [
            f"{name}: extra memory grows linearly, exponent below {limit:g}",
            ", ".join(f"{d} S^{e:.2f}" for d, e in found.items())
            + f" (S {min(lengths)}–{max(lengths)})",
            "holds" if linear else "**not reached**",
        ]


def speed_table(cells: list[Json], labels: dict[str, str]) -> str:
    """TFLOP/s of one direction: rows are head dim, mask and provider, columns are S."""
    lengths = sorted({c["seqlen"] for c in cells})
    rows = []
    for d, causal in itertools.product(sorted({c["d"] for c in cells}), (False, True)):
        same = {c["seqlen"]: c for c in select(cells, d=d, causal=causal)}
        for name in ROWS:
            results = [same[s]["providers"].get(name, {}) if s in same else {} for s in lengths]
            if any("ms" in r for r in results):
                speeds = [f"{r['tflops']:.0f}" if "ms" in r else NO for r in results]
                rows.append([f"{d} {'causal' if causal else 'full'}", labels[name], *speeds])
    return table(["d, mask", "", *(f"S {s}" for s in lengths)], rows)


def ratio_table(cells: list[Json], labels: dict[str, str]) -> str:
    """Geometric means of ratios over S, with the smallest in brackets."""
    pairs = [("fa2", "flash"), ("fa2", "cudnn"), ("fa2", "fa1"), ("fa2", "standard"),
             ("fa1", "standard")]  # fmt: skip
    rows = []
    groups = itertools.product(
        ("forward", "backward"), sorted({c["d"] for c in cells}), (False, True)
    )
    for direction, d, causal in groups:
        found = select(cells, direction=direction, d=d, causal=causal)
        values = [ratios(found, ours, peer) for ours, peer in pairs]
        if any(values):
            row = [f"{geometric_mean(v):.2f} ({min(v):.2f})" if v else NO for v in values]
            rows.append([f"{direction}, d {d}, {'causal' if causal else 'full'}", *row])
    return table(["", *(f"{a} / {labels.get(b, b)}" for a, b in pairs)], rows)


def provenance(result: Json) -> str:
    """Where a result file's numbers come from."""
    versions = [f"torch {result['torch']}"]
    versions += [f"cuDNN {result['cudnn']}"] if result.get("cudnn") else []
    versions += [f"driver {result['driver']}"] if result.get("driver") else []
    return f"{', '.join(versions)}; {result['date'][:10]}; source `{result['digest']}`"


def tests_line(tests: Json | None) -> str:
    """One line on the GPU tests' evidence file."""
    if tests is None:
        return f"GPU tests: {UNKNOWN}."
    counts = ", ".join(f"{number} {kind}" for kind, number in tests["counts"].items())
    return f"GPU tests: {counts} (exit status {tests['exit_status']}); {provenance(tests)}."


def gpu_folders() -> list[Path]:
    """The devices with results, the CPU's smoke tests aside."""
    folders = sorted(p for p in common.RESULTS.glob("*") if p.is_dir() and p.name != "cpu")
    return [p for p in folders if any(p.glob("*.json"))]


def results_section() -> str:
    """README's measured tables, one part per GPU."""
    parts = []
    for folder in gpu_folders():
        compare = common.read_json(folder / "compare.json")
        memory = common.read_json(folder / "memory.json")
        tests = common.read_json(folder / "tests.json")
        device = next(r["device"] for r in (compare, memory, tests, {"device": folder.name}) if r)
        parts.append(f"### {device}\n\n{tests_line(tests)}")
        parts.append(table(["claim", "measured", ""], list(claims(compare, memory))))
        if compare is None:
            continue
        cells = [c for c in compare["cells"] if on_grid(c)]
        labels = compare["labels"]
        parts.append(
            f"Speed: {provenance(compare)}. bf16, {TOKENS} tokens, hidden size {HIDDEN}, cold L2,"
            " medians. How many times faster, as the geometric mean over S, and the smallest in"
            " brackets:"
        )
        parts.append(ratio_table(cells, labels))
        for direction in ("forward", "backward"):
            found = select(cells, direction=direction)
            if found:
                parts.append(
                    f"<details><summary>{direction.capitalize()}, TFLOP/s</summary>\n\n"
                    f"{speed_table(found, labels)}\n\n</details>"
                )
    return "\n\n".join(parts) or f"On a GPU: {UNKNOWN}."


def support_section() -> str:
    """README's table of options x variants x devices."""
    columns: list[tuple[str, dict[str, dict[str, str | None]] | None]] = [
        ("CPU", probe(torch.device("cpu")))
    ]
    for folder in gpu_folders():
        compare = common.read_json(folder / "compare.json")
        columns.append(
            (compare["device"] if compare else folder.name, (compare or {}).get("support"))
        )
    if len(columns) == 1:
        columns.append(("GPU", None))

    def answer(found: dict[str, dict[str, str | None]] | None, option: str, variant: str) -> str:
        if found is None or variant not in found.get(option, {}):
            return UNKNOWN
        return YES if found[option][variant] is None else NO

    head = [f"{variant}, {name}" for name, _ in columns for variant in flash_ext.VARIANTS]
    rows = [
        [option, *(answer(found, option, v) for _, found in columns for v in flash_ext.VARIANTS)]
        for option in OPTIONS
    ]
    return table(["option", *head], rows)


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = f"<!-- generated:{name} begin -->", f"<!-- generated:{name} end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"README must hold the markers {begin} and {end} once, in this order")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def main() -> int:
    """Rewrite or check README."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    parser.add_argument("--readme", type=Path, default=common.ROOT / "README.md")
    args = parser.parse_args()
    digest = common.source_digest()
    for path in sorted(common.RESULTS.glob("*/*.json")):
        found = (common.read_json(path) or {}).get("digest")
        if found != digest:
            print(f"note: {path.relative_to(common.ROOT)} is of source {found}, not of {digest}",
                  file=sys.stderr)  # fmt: skip
    before = args.readme.read_text()
    after = replaced(before, "results", results_section())
    after = replaced(after, "support", support_section())
    if args.check:
        if after != before:
            print(f"{args.readme.name} is not up to date: run python benchmarks/report.py")
        return int(after != before)
    args.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
