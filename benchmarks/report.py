"""Writes the measured tables and figures of README and docs from benchmarks/results.

    python benchmarks/report.py            # rewrite them
    python benchmarks/report.py --check    # exit 1 if one differs from what would be written

No number is typed. Tables stand between <!-- generated:results begin --> and <!-- generated:results
end -->, and the same with the other names in ``DOCUMENTS``; figures are figures.py's. CPU support
is asked of the package here and now; GPU support comes from support.json, where the same questions
were asked on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import figures
import torch
from common import Json
from compare import (
    GOALS,
    GRID,
    HIDDEN,
    HOST_ROWS,
    SEQLENS,
    TOKENS,
    Goal,
    geometric_mean,
    is_plain,
    on_grid,
    ratio_spread,
    ratios,
    standard_cells,
    with_best,
)
from options import MEASURED, MIXED, PLAIN, REPEATS
from providers import BEST, BEST_LABEL
from sections import STEPS, claims_section, io_section, memory_section, numerics_section, picture
from support import BOTH, features, probe
from tables import NO, NOWHERE, UNKNOWN, YES, gpu_folders, provenance, select, table

import flash_ext

# The providers README shows, and who is held against whom.
ROWS = (*flash_ext.VARIANTS, "flash", "cudnn", "flash_attn_4", BEST, "standard")
PAIRS = (
    *(("fa3", peer) for peer in (BEST, "cudnn", "flash_attn_4", "flash", "fa2")),
    *(("fa2", peer) for peer in ("flash", "cudnn", "fa1", "standard")),
    ("fa1", "standard"),
)
# TFLOP/s that fa3 is to reach at S 16384, by direction, head dim and causal.
FA3_SPEEDS = {
    ("forward", 64, False): 560, ("forward", 128, False): 700, ("forward", 256, False): 780,
    ("forward", 128, True): 680,
    ("backward", 64, False): 560, ("backward", 128, False): 650, ("backward", 256, False): 520,
    ("backward", 128, True): 620,
}  # fmt: skip
SIZES = {"small": "GPT-2 small", "medium": "GPT-2 medium", "bert-large": "as BERT-large",
         "long-range": "as long-range arena"}  # fmt: skip
MEMORY = "out of memory"  # in the reason for which a provider was left out


def verdict(reached: bool) -> str:
    """The last column of a claim."""
    return "holds" if reached else "**not reached**"


def goal_rows(goal: Goal, cells: list[Json], names: dict[str, str]) -> list[list[str]]:
    """A goal of each cell of the standard grid, and of their mean; of a part of the grid there is
    no verdict."""
    text = f"{goal.ours} over {names[goal.peer]}, {goal.direction}"
    every = f"{text}, every cell of the grid: at least {goal.least:g}×"
    values = ratios(standard_cells(cells, goal.direction), goal.ours, goal.peer)
    if not values:
        return [[every, UNKNOWN, ""]]
    whole = len(values) == GRID
    reached, mean = sum(v >= goal.least for v in values), geometric_mean(values)
    return [
        [
            every,
            f"{min(values):.2f}× – {max(values):.2f}×, {reached} of {len(values)} cells",
            verdict(reached == len(values)) if whole else "",
        ],
        [
            f"{text}, geometric mean: at least {goal.mean:g}×",
            f"{mean:.2f}×, over {len(values)} cells",
            verdict(mean >= goal.mean) if whole else "",
        ],
    ]


def claims(compare: Json | None, memory: Json | None) -> Iterator[list[str]]:
    """What the package promises of speed and memory, beside what was measured."""
    cells = compare["cells"] if compare else []
    plain = [c for c in select(cells, dtype="bf16") if is_plain(c)]
    names = (compare or {}).get("labels", {}) | {BEST: BEST_LABEL, "flash": "SDPA flash"}

    def claim(text: str, found: list[Json], ours: str, peer: str, least: float) -> list[str]:
        values = ratios(found, ours, peer)
        if not values:
            return [f"{text} {least:g}×", UNKNOWN, ""]
        spread = f"{min(values):.2f}× – {max(values):.2f}×, in {len(values)} cells"
        return [f"{text} {least:g}×", spread, verdict(min(values) >= least)]

    for goal in GOALS:
        yield from goal_rows(goal, cells, names)
    for (direction, d, causal), least in FA3_SPEEDS.items():
        longest = select(standard_cells(cells, direction), seqlen=max(SEQLENS))
        speeds = [c["providers"].get("fa3", {}).get("tflops")
                  for c in select(longest, d=d, causal=causal)]  # fmt: skip
        text = f"fa3, {direction}, d {d} {'causal' if causal else 'full'}, S {max(SEQLENS)}"
        speed = next((s for s in speeds if s is not None), None)
        yield [
            f"{text}: at least {least} TFLOP/s",
            f"{speed:.0f}" if speed else UNKNOWN,
            verdict(speed >= least) if speed else "",
        ]
    for direction in ("forward", "backward"):
        wide = select(plain, direction=direction, d=128, seqlen=(1024, 2048))
        yield claim(
            f"fa1 over standard attention, {direction}, d 128, S 1024–2048, B·H ≥ 132: at least",
            [c for c in wide if c["batch"] * c["heads"] >= 132],
            "fa1", "standard", 1.5,
        )  # fmt: skip
    for direction in ("forward", "backward"):
        yield claim(
            f"fa2 over fa1, {direction}, S ≥ 4096: at least",
            [c for c in standard_cells(cells, direction) if c["seqlen"] >= 4096],
            "fa2", "fa1", 2.0,
        )  # fmt: skip
    for name in flash_ext.VARIANTS:
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
            verdict(linear),
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
                speeds = [
                    f"{r['tflops']:.0f}" + " r" * ("recorded" in r) if "ms" in r else NO
                    for r in results
                ]
                rows.append([f"{d} {'causal' if causal else 'full'}", labels[name], *speeds])
    return table(["d, mask", "", *(f"S {s}" for s in lengths)], rows)


def ratio_table(cells: list[Json], labels: dict[str, str]) -> str:
    """Geometric means of ratios over S, with the smallest in brackets; pairs that never met are
    left out."""
    pairs = [pair for pair in PAIRS if ratios(cells, *pair)]
    rows = []
    dtypes, dims = ({c[key] for c in cells} for key in ("dtype", "d"))
    groups = itertools.product(sorted(dtypes), BOTH, sorted(dims), (False, True))
    for dtype, direction, d, causal in groups:
        found = select(cells, dtype=dtype, direction=direction, d=d, causal=causal)
        values = [ratios(found, ours, peer) for ours, peer in pairs]
        if any(values):
            row = [f"{geometric_mean(v):.2f} ({min(v):.2f})" if v else NO for v in values]
            other = "" if dtype == "bf16" else f", {dtype}"
            rows.append([f"{direction}, d {d}, {'causal' if causal else 'full'}{other}", *row])
    return table(["", *(f"{a} / {labels.get(b, b)}" for a, b in pairs)], rows)


def spread_note(cells: list[Json]) -> str:
    """How far the quartiles of times move a cell's ratio, and what the GPU did meanwhile."""
    spreads = [s for c in cells for pair in PAIRS if not math.isnan(s := ratio_spread([c], *pair))]
    if not spreads:
        return ""
    note = (
        f"The quartiles of the times keep a cell's ratio within {statistics.median(spreads):.1%}"
        f" (median of {len(spreads)} ratios), {max(spreads):.1%} at most."
    )
    states = [c["gpu"] for c in cells if "gpu" in c]
    if states:
        clocks, watts = ([s[k] for s in states if k in s] for k in ("sm_mhz", "power_w"))
        note += (
            f" Meanwhile the SM clock was {min(clocks):.0f} to {max(clocks):.0f} MHz, the power"
            f" {min(watts):.0f} to {max(watts):.0f} W, medians of each cell."
        )
    return note


def other_table(cells: list[Json], labels: dict[str, str]) -> str:
    """Few heads, in TFLOP/s, and few queries, in TB/s of K and V."""
    names = [n for n in ROWS if any("ms" in c["providers"].get(n, {}) for c in cells)]
    rows = []
    for c in sorted(cells, key=lambda c: (
        c.get("seqlen_q", 0), c["direction"] != "forward", c["dtype"], c["d"], c["batch"],
        c["seqlen"],
    )):  # fmt: skip
        few = bool(c.get("seqlen_q"))
        queries = f"{c['seqlen_q']} x " if few else ""
        speeds = [c["providers"].get(n, {}).get("tbps" if few else "tflops") for n in names]
        size = f"{c['batch']} x {queries}{c['seqlen']}, heads {c['heads']}/{c['kv_heads']}"
        rows.append([
            f"{c['direction']}, {c['dtype']}, d {c['d']}, {'causal' if c['causal'] else 'full'},"
            f" {size}, {'TB/s of K and V' if few else 'TFLOP/s'}",
            *(NO if s is None else f"{s:.2f}" if few else f"{s:.0f}" for s in speeds),
        ])  # fmt: skip
    return table(["few heads or queries", *(labels.get(n, n) for n in names)], rows)


def best_note(cells: list[Json], compare: Json, folder: Path) -> str:
    """What "best peer" means, and where not all of it was measured here; "" where none is."""
    found = [c["providers"][BEST] for c in cells if BEST in c["providers"]]
    if not found:
        return ""
    note = "The best peer is the faster of SDPA cuDNN and flash-attn 4 in a cell."
    recorded = sum("recorded" in r for r in found)
    source = common.read_json(folder / "recorded_peers.json")
    if recorded and source is not None:
        return (
            f"{note} In {recorded} of {len(found)} cells, marked r below, that is flash-attn 4"
            f" {source['flash_attn_4']} by a recorded ratio: its time is cuDNN's, measured here,"
            f" over the ratio of the two on {source['date']} ({source['device']}, torch"
            f" {source['torch']}, cuDNN {source['cudnn']})."
        )
    version = compare.get("versions", {}).get("flash_attn_4", "of unknown version")
    return f"{note} Both were measured in the same process, flash-attn 4 is {version}."


def host_table(host: Json, labels: dict[str, str]) -> str:
    """The CPU's time per call."""

    def us(result: Json) -> str:
        return f"{result['us']:.1f}" if "us" in result else NO

    found = [n for n in ("auto", *ROWS) if "us" in host["providers"].get(n, {})]
    shape = ", ".join(map(str, host["shape"]))
    rows = [
        [f"host time per call, {what}, µs", *(us(host[results].get(n, {})) for n in found)]
        for what, results in HOST_ROWS.items()
        if results in host
    ]
    return table([f"(B, S, H, D) = ({shape})", *(labels.get(n, n) for n in found)], rows)


def tests_line(tests: Json | None) -> str:
    """One line on the GPU tests' evidence file."""
    if tests is None:
        return f"GPU tests: {UNKNOWN}."
    counts = ", ".join(f"{number} {kind}" for kind, number in tests["counts"].items())
    return f"GPU tests: {counts} (exit status {tests['exit_status']}); {provenance(tests)}."


def results_section() -> str:
    """README's measured tables, one part per GPU."""
    parts = []
    for folder in gpu_folders():
        compare = common.read_json(folder / "compare.json")
        if compare is not None:
            recorded = common.read_json(folder / "recorded_peers.json")
            compare["cells"] = with_best(compare["cells"], recorded)
        memory = common.read_json(folder / "memory.json")
        tests = common.read_json(folder / "tests.json")
        device = next(r["device"] for r in (compare, memory, tests, {"device": folder.name}) if r)
        parts.append(f"### {device}\n\n{tests_line(tests)}")
        parts.append(table(["claim", "measured", ""], list(claims(compare, memory))))
        if compare is None:
            continue
        cells = [c for c in select(compare["cells"], seqlen=SEQLENS) if on_grid(c)]
        labels = compare["labels"] | {BEST: BEST_LABEL}
        parts.append(
            f"Speed: {provenance(compare)}. {TOKENS} tokens, {HIDDEN} // d heads, cold L2, medians;"
            " bf16 where not said otherwise. How many times faster, as the geometric mean over S,"
            " and the smallest in brackets:"
        )
        parts += picture(folder, "speedup", "speed_forward", "speed_backward")
        parts.append(ratio_table(cells, labels))
        parts += [note] if (note := spread_note(cells)) else []
        parts += [note] if (note := best_note(cells, compare, folder)) else []
        others = [c for c in compare["cells"] if not is_plain(c)]
        parts += [other_table(others, labels)] if others else []
        parts += [host_table(compare["host"], labels)] if "host" in compare else []
        for direction in ("forward", "backward"):
            found = select(cells, direction=direction, dtype="bf16")
            if found:
                parts.append(
                    f"<details><summary>{direction.capitalize()}, TFLOP/s</summary>\n\n"
                    f"{speed_table(found, labels)}\n\n</details>"
                )
    return "\n\n".join(parts) or NOWHERE


def training_table(result: Json) -> str:
    """Tokens per second, the ratio to SDPA, and the peak memory of each attention."""
    rows = []
    for cell in sorted(
        result["cells"], key=lambda c: (c.get("causal", True), c["width"], c["seqlen"])
    ):
        found = cell["providers"]
        base = found.get("sdpa", {}).get("tokens_per_second")
        for name, label in result["labels"].items():
            r = found.get(name)
            if r is None:  # it was not asked for
                continue
            row = [f"{SIZES.get(cell['model'], cell['model'])}, S {cell['seqlen']}", label]
            speed = r.get("tokens_per_second")
            if speed is None:
                why = "wrong" if r.get("wrong") else "no memory" if MEMORY in r["skipped"] else NO
                rows.append([*row, why, NO, NO, NO])
                continue
            ratio = f"{speed / base:.2f}" if base else NO
            peak = f"{r['peak_bytes'] / 2**30:.1f}"
            rows.append([*row, f"{speed:,.0f}", ratio, peak, f"{r['share']:.0%}"])
    head = ["size", "attention", "tokens/s", "over SDPA", "peak GiB", "attention's share"]
    return table(head, rows)


def training_section() -> str:
    """README's tables of training from end to end, one part per GPU."""
    parts = []
    for folder in gpu_folders():
        result = common.read_json(folder / "train.json")
        if result is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
            continue
        backends = sorted({c["sdpa_backend"] for c in result["cells"] if "sdpa_backend" in c})
        chosen = f" SDPA chose {' and '.join(backends)}." if backends else ""
        parts.append(
            f"{result['device']}: {provenance(result)}. Median step; losses within"
            f' {result["loss_limit"]:.1%} of each other\'s at every step, or "wrong".{chosen}'
        )
        parts += picture(folder, "training")
        parts.append(training_table(result))
    return "\n\n".join(parts) or NOWHERE


def options_table(result: Json) -> str:
    """What each option costs: a ratio to the plain call, full / causal."""
    kinds = [(v, d) for v, d in MEASURED if select(result["options"], variant=v, direction=d)]
    dims = sorted({c["d"] for c in result["options"]})

    def ratio(name: str, **wanted: object) -> str:
        found = select(result["options"], **wanted)
        results = found[0]["results"].get(name, {}) if found else {}
        return f"{results['ratio']:.2f}" if "ratio" in results else NO

    columns = list(itertools.product(kinds, dims))
    rows = []
    for name, words in result["words"].items():
        cells = [
            " / ".join(
                ratio(name, variant=v, direction=direction, d=d, causal=c) for c in (False, True)
            )
            for (v, direction), d in columns
        ]
        if name != PLAIN and any(cell != f"{NO} / {NO}" for cell in cells):
            rows.append([f"{name}: {words}", *(NO if c == f"{NO} / {NO}" else c for c in cells)])
    head = [f"{variant} {direction}, d {d}" for (variant, direction), d in columns]
    return table(["option", *head], rows)


def spread(result: Json) -> float:
    """The largest distance of a ratio's range from the ratio, relative to it."""
    found = [r for c in result["options"] for r in c["results"].values() if "ratio_range" in r]
    return max((abs(x / r["ratio"] - 1) for r in found for x in r["ratio_range"]), default=0.0)


def mix_table(result: Json) -> str:
    """TFLOP/s of the mix of lengths; in brackets, over the dense call."""
    mix = [{"variant": "fa2"} | c for c in result["mix"]]  # once it was the only one
    names = list(dict.fromkeys(n for c in mix for n in c["results"]))

    def speed(found: Json) -> str:
        if "tflops" not in found:
            return NO
        return f"{found['tflops']:.0f} ({found.get('over_dense', float('nan')):.2f})"

    rows = [
        [f"{variant} {direction}, d {c['d']}, {'causal' if c['causal'] else 'full'}",
         *(speed(c["results"].get(name, {})) for name in names)]
        for variant, direction in MIXED
        for c in select(mix, variant=variant, direction=direction)
    ]  # fmt: skip
    return table(["TFLOP/s (over dense)", *names], rows)


def deterministic_table(result: Json) -> str:
    """TFLOP/s of backward calls that repeat bit by bit; in brackets, over the usual call's time."""
    cells = result["deterministic"]
    names = [n for n in dict.fromkeys(n for c in cells for n in c["results"])]
    usual = [n for n in names if not n.endswith(REPEATS)]

    def entry(cell: Json, name: str) -> str:
        found = cell["results"].get(name + REPEATS, {})
        if "tflops" not in found:
            return "refused" if "skipped" in found else NO
        return f"{found['tflops']:.0f} ({found.get('ratio', float('nan')):.2f})"

    rows = [
        [f"d {c['d']}, {'causal' if c['causal'] else 'full'}", *(entry(c, n) for n in usual)]
        for c in cells
    ]
    return table(["TFLOP/s (time over the usual)", *usual], rows)


def options_section() -> str:
    """README's tables of what options and mixed lengths cost, one part per GPU."""
    parts = []
    for folder in gpu_folders():
        result = common.read_json(folder / "options.json")
        if result is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
            continue
        parts.append(f"{result['device']}: {provenance(result)}.")
        if result["incomplete"]:
            parts.append("The run ended before all was measured.")
        if result["options"]:
            parts.append(
                f"Time over that of the plain call, full / causal: {result['dtype']}, B"
                f" {result['batch']}, S {result['seqlen']}, {result['heads']} heads; quartiles"
                f" within {spread(result):.1%} of the ratio."
            )
            parts.append(options_table(result))
        if result.get("deterministic"):
            parts.append(
                "Backward calls that repeat bit by bit, of the same shapes; SDPA's backends under"
                " torch.use_deterministic_algorithms."
            )
            parts.append(deterministic_table(result))
        if result["mix"]:
            parts.append(
                f"Packed self-attention, {len(result['lengths'])} sequences of"
                f" {min(result['lengths'])} to {max(result['lengths'])} tokens,"
                f" {result['tokens']} in all, {HIDDEN} // d heads; torch's varlen_attn besides,"
                f" where this torch has it. Dense: B {result['dense_batch']}, S"
                f" {result['dense_seqlen']}, about as many FLOPs."
            )
            parts.append(mix_table(result))
    return "\n\n".join(parts) or NOWHERE


def support_section() -> str:
    """README's table of features x variants x devices; a "no" has its reason below."""
    sources: list[tuple[str, Json | None]] = []
    for folder in gpu_folders():
        result = common.read_json(folder / "support.json")
        device = next(
            (r["device"] for n in ("support", "compare", "tests")
             if (r := common.read_json(folder / f"{n}.json"))), folder.name,
        )  # fmt: skip
        sources.append((device, result["support"] if result else None))
    sources = sources or [("CUDA", None)]
    on_cpu = probe(torch.device("cpu"))
    notes: dict[str, int] = {}

    def answer(asked: Json | None, name: str, variant: str, directions: tuple[str, ...]) -> str:
        feature = features()[name]
        wanted = [d for d in directions if d in feature.directions]
        if not wanted or (asked is on_cpu and feature.cuda_only):
            return ""  # the question makes no sense
        if asked is None or variant not in asked.get(name, {}):
            return UNKNOWN
        reasons = [asked[name][variant].get(d) for d in wanted]
        reason = next((r for r in reasons if r is not None), None)
        if reason is None:
            return YES
        return f"no ({notes.setdefault(reason, len(notes) + 1)})"

    variants = flash_ext.VARIANTS
    columns = [
        *((asked, v, (direction,)) for _, asked in sources for v in variants for direction in BOTH),
        *((on_cpu, v, BOTH) for v in flash_ext.CPU_VARIANTS),
    ]
    head = [f"{v} {d}, {name}" for name, _ in sources for v in variants for d in BOTH]
    rows = [[name, *(answer(asked, name, v, d) for asked, v, d in columns)] for name in features()]
    lines = [
        f"{folder.name}: {provenance(result)}."
        for folder in gpu_folders()
        if (result := common.read_json(folder / "support.json"))
    ]
    lines += [table(["", *head, *(f"{v}, CPU" for v in flash_ext.CPU_VARIANTS)], rows)]
    lines += [f"({number}) {reason.rstrip('.')}." for reason, number in notes.items()]
    return "\n\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "results": results_section,
    "claims": claims_section,
    "io": io_section,
    "memory": memory_section,
    "numerics": numerics_section,
    "training": training_section,
    "options": options_section,
    "support": support_section,
}
DOCUMENTS = {"README.md": SECTIONS, "docs/walkthrough.md": STEPS}


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = f"<!-- generated:{name} begin -->", f"<!-- generated:{name} end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"there must be the markers {begin} and {end} once, in this order")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def outdated(root: Path) -> dict[Path, str]:
    """The documents that differ from what the results give, with what they should be."""
    found = {}
    for name, sections in DOCUMENTS.items():
        before = after = (root / name).read_text()
        for section, content in sections.items():
            after = replaced(after, section, content())
        if after != before:
            found[root / name] = after
    return found


def main() -> int:
    """Rewrite or check the documents and figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    parser.add_argument("--root", type=Path, default=common.ROOT, help="of README.md and docs/")
    args = parser.parse_args()
    digest = common.source_digest()
    for path in sorted(common.RESULTS.glob("*/*.json")):
        found = (common.read_json(path) or {}).get("digest")
        if found not in (digest, None):  # what is recorded of others has none
            print(f"note: {path.relative_to(common.RESULTS)} is of source {found}, not of {digest}",
                  file=sys.stderr)  # fmt: skip
    gpus = [folder.name for folder in gpu_folders()]
    old = [f"docs/figures/{gpu}/{name}.svg" for gpu in gpus for name in figures.stale(gpu)]
    documents = outdated(args.root)
    if args.check:
        for name in [*old, *(path.name for path in documents)]:
            print(f"{name} is not up to date: run python benchmarks/report.py")
        return int(bool(old or documents))
    for path, text in documents.items():
        path.write_text(text)
    if old:
        for gpu in gpus:
            figures.write(gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
