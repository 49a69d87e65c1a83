"""The tables of speed, from what compare.py measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import common
from cells import HIDDEN, SEQLENS, TOKENS, is_plain, on_grid, shape_name
from common import ClockLog, Json
from host import ROWS as HOST_ROWS
from models import SHAPES
from providers import BEST, BEST_LABEL
from ratios import best_of_peers, geometric_mean, ratio_spread, ratios, with_best
from support import BOTH

import flash_ext

from . import goals
from .sections import picture
from .tables import NO, NOWHERE, UNKNOWN, gpu_folders, provenance, relevant, select, table

# The peers that are packages, the providers that are shown, and the pairs that are compared.
PACKAGES = ("flash_attn_4", "flash_attn_3", "flash_attn_2")
ROWS = (*flash_ext.VARIANTS, "flash", "cudnn", *PACKAGES, BEST, "standard")
PAIRS = (
    *(("fa3", peer) for peer in (BEST, "cudnn", *PACKAGES, "flash", "fa2")),
    *(("fa2", peer) for peer in ("flash", "cudnn", "flash_attn_2", "fa1", "standard")),
    ("fa1", "standard"),
)


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
        heads = f"{c['heads']}/{c['kv_heads'] or c['heads']}"
        size = f"{c['batch']} x {queries}{c['seqlen']}, heads {heads}"
        rows.append([
            f"{c['direction']}, {c['dtype']}, d {c['d']}, {'causal' if c['causal'] else 'full'},"
            f" {size}, {'TB/s of K and V' if few else 'TFLOP/s'}",
            *(NO if s is None else f"{s:.2f}" if few else f"{s:.0f}" for s in speeds),
        ])  # fmt: skip
    return table(["few heads or queries", *(labels.get(n, n) for n in names)], rows)


def shapes_table(cells: list[Json], labels: dict[str, str]) -> str:
    """Shapes of models, or under sustained load: speed of our fastest variant and the fastest peer
    that took the shape, how many times as fast, and the power."""
    sources = {s.name: s.source for s in SHAPES}
    powers = any("power_w" in r for c in cells for r in c["providers"].values())
    rows = []
    for c in cells:
        ours = [r | {"of": n} for n, r in c["providers"].items()
                if n in flash_ext.VARIANTS and "ms" in r]  # fmt: skip
        if not ours:
            continue
        own, best = min(ours, key=lambda r: r["ms"]), best_of_peers(c)
        both = [own, best] if best else [own]
        name = f"{c['model']} ({sources.get(c['model'], '')})" if c.get("model") else "grid"
        rows.append([
            name, f"{c['direction']}, {shape_name(c)}",
            *(f"{r['tflops']:.0f} {labels.get(r['of'], r['of'])}" for r in both),
            *([NO] * (2 - len(both))),
            f"{best['ms'] / own['ms']:.2f}" if best else NO,
            *([" / ".join(f"{r['power_w']:.0f}" for r in both if "power_w" in r)] * powers),
        ])  # fmt: skip
    head = ["shape of", "", "TFLOP/s, ours", "fastest peer", "times as fast", *["W"] * powers]
    return table(head, rows, words=2)


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
    """One line on the report of the GPU tests."""
    if tests is None:
        return f"GPU tests: {UNKNOWN}."
    counts = ", ".join(f"{number} {kind}" for kind, number in tests["counts"].items())
    again = tests.get("again")
    second = f"; {again} of them in a second run, after a change of the tests" if again else ""
    status = tests["exit_status"]
    return f"GPU tests: {counts} (exit status {status}){second}; {provenance(tests)}."


def speed_parts(compare: Json, folder: Path, newest: bool) -> Iterator[str]:
    """The tables of one run; the pictures are those of the newest."""
    cells = [c for c in select(compare["cells"], seqlen=SEQLENS) if on_grid(c)]
    labels = compare["labels"] | {BEST: BEST_LABEL}
    yield (
        f"Speed: {provenance(compare)}. {TOKENS} tokens, {HIDDEN} // d heads, cold L2, medians;"
        " bf16 where not said otherwise. How many times faster, as the geometric mean over S,"
        " and the smallest in brackets:"
    )
    if newest:
        yield from picture(folder, "speedup", "speed_forward", "speed_backward")
    yield ratio_table(cells, labels)
    yield from [note] if (note := spread_note(cells)) else []
    yield from [note] if (note := best_note(cells, compare, folder)) else []
    special = ("d_v", "window", "model", "sustained")
    others = [
        c for c in compare["cells"] if not is_plain(c) and not any(c.get(name) for name in special)
    ]
    yield from [other_table(others, labels)] if others else []
    for kind in ("model", "sustained"):
        found = [c for c in compare["cells"] if c.get(kind) and (kind == "sustained") == bool(
            c.get("sustained"))]  # fmt: skip
        yield from [shapes_table(found, labels)] if found else []
        if found and kind == "sustained" and compare.get("power") != ClockLog.FIELDS["power_w"]:
            yield "W is nvidia-smi's mean of a second there, which is longer than a call's turn."
    yield from [host_table(compare["host"], labels)] if "host" in compare else []
    for direction in ("forward", "backward"):
        found = select(cells, direction=direction, dtype="bf16")
        if found:
            yield (
                f"<details><summary>{direction.capitalize()}, TFLOP/s</summary>\n\n"
                f"{speed_table(found, labels)}\n\n</details>"
            )


def results_section() -> str:
    """The tables of goals and speeds, one part per GPU."""
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
        if folder in gpu_folders("compare"):
            rows = relevant(folder, goals.rows(compare, memory), 1)
            parts.append(table(["goal", "measured", ""], rows, words=3))
        if compare is None:
            continue
        parts += speed_parts(compare, folder, newest=True)
        whole = common.read_json(folder / "compare_full.json")
        if whole is not None and whole["digest"] != compare["digest"]:
            recorded = common.read_json(folder / "recorded_peers.json")
            whole["cells"] = with_best(whole["cells"], recorded)
            parts.append("#### The last run of everything")
            parts += speed_parts(whole, folder, newest=False)
    return "\n\n".join(parts) or NOWHERE
