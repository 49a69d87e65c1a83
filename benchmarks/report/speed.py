"""The tables of speed, from what compare.py and host.py measured, and README's line and curves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import results
from cells import (
    FP8_DIMS,
    GRID,
    SEQLENS,
    SOURCES,
    fp8_cells,
    geometric_mean,
    is_plain,
    on_grid,
    ours_and_best,
    ratios,
    shape_name,
)
from common import SHAPES, Json
from fp8_providers import FP8, FP8_PROVIDERS
from host import CALLS
from providers import BEST, BEST_OF, LABELS, PEERS

import flash_ext
from flash_ext.bench import measure as bench
from flash_ext.bench.output import table as bench_table

from . import figures, tables

BOTH = ("forward", "backward")
PACKAGES = ("flash_attn_4", "flash_attn_3", "flash_attn_2")
ROWS = (*flash_ext.VARIANTS, "flash", "cudnn", *PACKAGES, BEST, "standard")
PAIRS = (
    *(("fa3", peer) for peer in (BEST, "cudnn", *PACKAGES, "flash", "fa2")),
    *(("fa2", peer) for peer in ("flash", "cudnn", "flash_attn_2", "fa1", "standard")),
    ("fa1", "standard"),
)
KNOWN = tuple(SHAPES["names"]["models_for_readers"])
GAIN_LENGTH = 2048
OURS_FP8 = FP8_PROVIDERS[0].name
FP8_PEER = "best peer, bf16"  # the fastest in bfloat16 that is not ours, cell by cell
FP8_PAIRS = (
    *((f"over {LABELS[name]}", OURS_FP8, name) for name in ("flash_attn_3_fp8", "cudnn_fp8")),
    ("over flash_ext fa3, bf16", OURS_FP8, "fa3"),
    (f"over {FP8_PEER}", OURS_FP8, FP8_PEER),
    ("with quantization, over bf16", "fp8_attention", "fa3"),
    ("q and k in int8, over FP8", "fa3_int8", OURS_FP8),
)


def words_of(folder: Path, direction: str) -> str:
    """What fa3 reaches on the grid in a direction; "" if it was not measured."""
    for peer, label in ((BEST, "the best peer"), ("cudnn", LABELS["cudnn"])):
        if found := tables.has_grid(folder, direction, "fa3", peer):
            values = ratios(found, "fa3", peer)
            fastest = max(c["providers"]["fa3"]["tflops"] for c in found)
            return (
                f"{direction} {geometric_mean(values):.2f}× the speed of {label} (geometric mean of"
                f" {len(values)} shapes), up to {fastest:.0f} TFLOP/s"
            )
    return ""


# ------------------------------------------------------------------------------ the front page
def measured() -> list[Path]:
    """The GPUs that measured the kernels as they are, or while there is none those that measured
    older ones."""
    folders = [p for p in tables.gpu_folders("compare") if words_of(p, "forward")]
    setups = {p: (row["setup"] for row in tables.has_grid(p, "forward", "fa3")) for p in folders}
    now = functools.partial(results.is_current, "compare")
    return [p for p in folders if any(map(now, setups[p]))] or folders


def front_section(document: str = "README.md") -> str:
    """A line for each GPU that measured the kernels as they are, and the first one's curves. While
    none has, the lines and curves of older kernels, which each line names."""
    folders, parts = measured(), []
    for folder in folders[: None if document == "README.md" else 1]:
        words = [w for x in BOTH if (w := words_of(folder, x))]
        setup = tables.has_grid(folder, "forward", "fa3")[0]["setup"]
        parts.append(f"{tables.device_of(folder)}, fa3, bf16: {'; '.join(words)} (kernels"
                     f" `{setup['kernels']}`, {setup['date'][:10]}).")  # fmt: skip
    if not parts:
        return tables.NOWHERE
    curves = figures.pictures(folders[0], Path(document), "speed")
    return "\n\n".join(filter(None, (parts[0], *curves, " ".join(parts[1:]))))


# A cell of the standard grid, its rows in the order of flash_ext.bench, and the
# arguments that ask for it.
SAMPLE = {"dtype": "bf16", "d": 128, "causal": True, "seqlen": 4096, "batch": 4, "heads": 16,
          "direction": "forward"}  # fmt: skip
SAMPLE_ARGUMENTS = "--shape 4 4096 16 128 --causal --forward"
SAMPLE_ROWS = (*flash_ext.VARIANTS, "flash", "cudnn", "efficient", "flash_attn_2", "flash_attn_3",
               "flash_attn_4", "standard")  # fmt: skip


def as_bench_cell(cell: Json) -> Json:
    """A cell of compare.py as one of flash_ext.bench, which has the same timer."""
    rows = {
        LABELS[name]: {"us": r["ms"] * 1e3, "tflops": r["tflops"], "error": r["error"]}
        for name in SAMPLE_ROWS
        if "ms" in (r := cell["providers"].get(name, {}))
    }
    shape = {
        "batch": cell["batch"], "queries": cell["seqlen"], "keys": cell["seqlen"],
        "heads": cell["heads"], "kv_heads": cell["heads"], "head_dim": cell["d"],
        "head_dim_v": cell["d"], "causal": cell["causal"], "direction": cell["direction"],
        "dtype": "bfloat16", "rows": rows,
    }  # fmt: skip
    return bench.with_best_peer(shape, (LABELS[n] for n in SAMPLE_ROWS if n in PEERS))


def bench_section() -> str:
    """The table of a command, with the times of the first GPU that measured its shape."""
    for folder in measured():
        for cell in tables.load("compare", folder):
            if is_plain(cell) and SAMPLE.items() <= cell.items():
                setup = cell["setup"]
                return (
                    "The table of a command, with times that `benchmarks/compare.py`, which has the"
                    f" same timer, measured on an {setup['device']} with torch {setup['torch']},"
                    f" kernels `{setup['kernels']}`:\n\n"
                    f"```\n$ python -m flash_ext.bench {SAMPLE_ARGUMENTS}\n"
                    f"{bench_table(as_bench_cell(cell))}\n```"
                )
    return tables.NOWHERE


# ------------------------------------------------------------------------- the page for readers
def grid_table(folder: Path) -> str:
    """fa3's TFLOP/s on the standard grid, with how many times as fast it is as the best peer."""

    def entries() -> Iterator[tables.Entry]:
        for direction in BOTH:
            cells = sorted(tables.has_grid(folder, direction, "fa3"),
                           key=lambda c: (c["d"], c["causal"], c["seqlen"]))  # fmt: skip
            for c in cells:
                over = "".join(f" ({x:.2f})" for x in ratios([c], "fa3", BEST))
                line = (f"{direction}, d {c['d']}, {tables.mask_of(c)}",)
                yield line, f"S {c['seqlen']}", f"{c['providers']['fa3']['tflops']:.0f}{over}"

    return tables.pivot(["TFLOP/s (times the best peer)"], entries())


def models_table(folder: Path) -> str:
    """The best known models: TFLOP/s, and times the fastest peer that ran the shape."""
    cells = tables.select(tables.load("compare", folder), model=KNOWN, sustained=None)

    def entries() -> Iterator[tables.Entry]:
        for c in sorted(cells, key=lambda c: (KNOWN.index(c["model"]), c["direction"] == BOTH[1])):
            if found := ours_and_best(c):
                own, best = found
                over = f"{best['ms'] / own['ms']:.2f}" if best else tables.NO
                line = c["model"], shape_name(c)
                yield line, f"{c['direction']}, TFLOP/s", f"{own['tflops']:.0f}"
                yield line, f"{c['direction']}, times the fastest peer", over

    return tables.pivot(["model", "shape"], entries())


def gains(folder: Path, after: str, before: str) -> str:
    """One way to compute over the one before, at one length of the grid without a mask."""

    def entries() -> Iterator[tables.Entry]:
        for way in BOTH:
            cells = tables.has_grid(folder, way, after, before)
            for c in tables.select(cells, causal=False, seqlen=GAIN_LENGTH):
                a, b = (c["providers"][n]["tflops"] for n in (after, before))
                line = (f"{LABELS[after]} over {LABELS[before]}, d {c['d']}",)
                yield line, f"{way}, TFLOP/s", f"{a:.0f} over {b:.0f}: {a / b:.2f}×"

    return tables.pivot([f"{tables.device_of(folder)}, S {GAIN_LENGTH}, full"], entries())


def fp8_summary(folder: Path) -> str:
    """FP8's geometric means over S, by head dim and mask."""

    def entries() -> Iterator[tables.Entry]:
        for d, cells in fp8_groups(folder):
            line = (f"d {d}, {tables.mask_of(cells[0])}",)
            found = [r["tflops"] for c in cells if "ms" in (r := c["providers"].get(OURS_FP8, {}))]
            if found:
                yield line, "up to TFLOP/s", f"{max(found):.0f}"
            for column, *pair in FP8_PAIRS:
                if values := ratios(cells, *pair):
                    yield line, column, f"{geometric_mean(values):.2f}"

    return tables.pivot(["fa3 in FP8, forward"], entries())


# -------------------------------------------------------------------------------- the appendix
def ratio_table(cells: list[Json]) -> str:
    """Geometric means of ratios over S, with the smallest in brackets; pairs that never met are
    left out."""
    pairs = [pair for pair in PAIRS if ratios(cells, *pair)]

    def entries() -> Iterator[tables.Entry]:
        dtypes, dims = (sorted({c[key] for c in cells}) for key in ("dtype", "d"))
        for dtype, way, d, causal in itertools.product(dtypes, BOTH, dims, (False, True)):
            found = tables.select(cells, dtype=dtype, direction=way, d=d, causal=causal)
            other = "" if dtype == "bf16" else f", {dtype}"
            line = (f"{way}, d {d}, {'causal' if causal else 'full'}{other}",)
            for (a, b), values in ((pair, ratios(found, *pair)) for pair in pairs):
                if values:
                    text = f"{geometric_mean(values):.2f} ({min(values):.2f})"
                    yield line, f"{a} / {LABELS[b]}", text

    return tables.pivot([""], entries(), (f"{a} / {LABELS[b]}" for a, b in pairs))


def speed_table(cells: list[Json]) -> str:
    """TFLOP/s of one direction: rows are head dim, mask and provider, columns are S."""
    order = sorted(cells, key=lambda c: (c["d"], c["causal"], c["seqlen"]))
    names = [n for n in ROWS if any("ms" in c["providers"].get(n, {}) for c in cells)]

    def entries() -> Iterator[tables.Entry]:
        for _, group in itertools.groupby(order, lambda c: (c["d"], c["causal"])):
            for name, c in itertools.product(names, list(group)):
                r = c["providers"].get(name, {})
                if "ms" in r:
                    line = f"{c['d']} {tables.mask_of(c)}", LABELS[name]
                    yield line, f"S {c['seqlen']}", f"{r['tflops']:.0f}"

    return tables.pivot(["d, mask", ""], entries(), (f"S {s}" for s in SEQLENS))


def shapes_table(cells: list[Json]) -> str:
    """Shapes of models, or of few heads or queries: the speed of our fastest variant and of the
    fastest peer that ran the shape, and how many times as fast."""
    rows = []
    for c in cells:
        if not (found := ours_and_best(c)):
            continue
        own, best = found
        both = [own, best] if best else [own]
        name = f"{c['model']} ({SOURCES.get(c['model'], '')})" if c.get("model") else ""
        few = c.get("seqlen_q") and not c.get("model")  # of which reading K and V is the work
        speeds = (f"{r['tbps']:.2f} TB/s" if few else f"{r['tflops']:.0f}" for r in both)
        rows.append([
            name, f"{c['direction']}, {shape_name(c)}",
            *(f"{s} {LABELS[r['of']]}" for s, r in zip(speeds, both, strict=True)),
            *([tables.NO] * (2 - len(both))),
            f"{best['ms'] / own['ms']:.2f}" if best else tables.NO,
        ])  # fmt: skip
    head = ["shape of", "", "TFLOP/s, ours", "fastest peer", "times as fast"]
    return tables.table(head, rows, words=2)


def host_table(rows: list[Json]) -> str:
    def entries() -> Iterator[tables.Entry]:
        for row in tables.select(rows, call=CALLS):
            for name in ("auto", *ROWS):
                if "us" in row["providers"].get(name, {}):
                    line = (f"host time per call, {row['call']}, µs",)
                    yield line, LABELS[name], f"{row['providers'][name]['us']:.1f}"

    shape = ", ".join(str(rows[0][n]) for n in ("batch", "seqlen", "heads", "d"))
    return tables.pivot([f"(B, S, H, D) = ({shape})"], entries())


def speed_section(folder: Path) -> Iterator[str]:
    every = tables.speeds(folder)
    if not every:
        return
    cells = [c for c in tables.select(every, seqlen=SEQLENS) if on_grid(c)]
    size = f"{GRID['tokens']} tokens, {GRID['hidden']} // d heads"
    yield (
        f"{tables.provenance(cells)}. {size}, cold L2, medians; bf16 where not said otherwise. How"
        " many times faster, as the geometric mean over S, and the smallest in brackets:"
    )
    yield ratio_table(cells)
    for direction in BOTH:
        yield f"{direction.capitalize()}, TFLOP/s:"
        yield speed_table(tables.select(cells, direction=direction, dtype="bf16"))
    special = ("d_v", "window", "model", "near", "sustained")
    others = [c for c in every if not is_plain(c) and not any(c.get(name) for name in special)]
    if few := [c for c in others if c["dtype"] != FP8]:
        yield f"Few heads or queries (TB/s: of K and V): {tables.provenance(few)}."
        yield shapes_table(few)
    if models := [c for c in every if c.get("model")]:
        yield f"Shapes of models: {tables.provenance(models)}."
        yield shapes_table(models)
    if steady := [c for c in every if c.get("sustained") and not c.get("graph")]:
        yield f"Back to back, at the power limit: {tables.provenance(steady)}."
        yield shapes_table(steady)
    if host := tables.load("host", folder):
        yield f"Times of the host: {tables.provenance(host, 'host')}."
        yield host_table(host)


# ------------------------------------------------------------------------------------------ FP8
def fp8_groups(folder: Path) -> Iterator[tuple[str, list[Json]]]:
    """The cells of --set fp8 by head dims and mask. The best peer in bfloat16 is beside those for
    which all of them were asked."""

    def with_peer(cell: Json) -> Json:
        asked = all(name in cell["providers"] for name in BEST_OF)
        peers = [r for name, r in cell["providers"].items() if name in PEERS and "ms" in r]
        best = {FP8_PEER: min(peers, key=lambda r: r["ms"])} if asked and peers else {}
        return cell | {"providers": cell["providers"] | best}

    cells = map(with_peer, fp8_cells(tables.load("compare", folder)))
    for (d, _), group in itertools.groupby(cells, lambda c: (c["d"], c["causal"])):
        d_v = FP8_DIMS.get(d, d)
        yield str(d) if d == d_v else f"{d}/{d_v}", list(group)


def fp8_speed_section(folder: Path) -> Iterator[str]:
    if cells := fp8_cells(tables.load("compare", folder)):
        how = "Forward, inputs quantized before, cold L2, medians; geometric means over S."
        yield f"{tables.provenance(cells)}. {how}"
        yield fp8_summary(folder)
