"""The figures of README and docs, drawn from result files: docs/figures/<gpu>/*.svg.

Each figure is a pair: ``data`` picks what is drawn out of the results, None where that was not
measured, and ``draw`` draws it. A digest of both stands in the file, so that a test can tell,
without drawing, whether a committed figure belongs to the committed results. Equal data give equal
files.

Colours are Okabe and Ito's, which the colour-blind can tell apart; line styles and markers say the
same again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from cells import HEAD_DIMS, SEQLENS, standard_cells
from common import Json
from providers import BEST, BEST_LABEL
from ratios import geometric_mean, ratios, recorded_note, with_best

FOLDER = common.ROOT / "docs" / "figures"
FULL_WIDTH, PIXELS = 9.0, 100  # inches, and pixels per inch

# Colour, marker and line of each method.
STYLES = {
    "fa1": ("#e69f00", "^", "-"),
    "fa2": ("#009e73", "s", "-"),
    "fa3": ("#0072b2", "o", "-"),
    "fa3, 128 rows": ("#56b4e9", "p", "-"),
    "flash": ("#cc79a7", "D", "--"),
    "cudnn": ("#d55e00", "v", "--"),
    "efficient": ("#8c6bb1", "<", "--"),
    "flash_attn_2": ("#882255", "1", "--"),
    "flash_attn_3": ("#44aa99", "2", "--"),
    "flash_attn_4": ("#000000", "x", "--"),
    BEST: ("#000000", "x", ":"),
    "standard": ("#666666", "P", "-."),
    "naive": ("#b0a000", "*", ":"),
}
LABELS = {
    "fa1": "fa1", "fa2": "fa2", "fa3": "fa3", "flash": "SDPA flash", "cudnn": "SDPA cuDNN",
    "efficient": "SDPA efficient", "flash_attn_2": "flash-attn 2", "flash_attn_3": "flash-attn 3",
    "flash_attn_4": "flash-attn 4", BEST: BEST_LABEL, "standard": "standard attention",
    "naive": "naive softmax",
}  # fmt: skip
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Figure:
    """One file of docs/figures/<gpu>."""

    name: str
    title: str  # also what a reader who does not see it is told
    data: Callable[[dict[str, Json]], Any]
    draw: Callable[[Any], Any]

    def digest(self, data: Any) -> str:
        """Sixteen hex digits of what is drawn and how."""
        how = inspect.getsource(sys.modules[__name__])
        text = json.dumps([self.title, data, how], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, gpu: str) -> Path:
        """Where the figure of a GPU lies."""
        return FOLDER / gpu / f"{self.name}.svg"


def pyplot() -> Any:
    """matplotlib, set up so that equal data give equal files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "flash_ext",
        "svg.fonttype": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "legend.frameon": False,
    })  # fmt: skip
    import matplotlib.pyplot

    return matplotlib.pyplot


def grid(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure as wide as README, with axes as a 2-D array."""
    options = {"squeeze": False, "layout": "constrained"} | options
    return pyplot().subplots(rows, columns, figsize=(FULL_WIDTH, height), **options)


def size_name(value: float) -> str:
    """512, 1k, 2k, ..."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def over_lengths(axis: Any, lengths: Iterable[int]) -> None:
    """A logarithmic axis of sequence lengths."""
    ticks = sorted(set(lengths))
    axis.set_xscale("log", base=2)
    step = max(1, len(ticks) // 6)
    axis.set_xticks(ticks[::step], [size_name(s) for s in ticks[::step]])
    axis.minorticks_off()
    axis.set_xlabel("sequence length S (tokens)")


def line(axis: Any, method: str, xs: list[Any], ys: list[Any], **options: Any) -> None:
    """One method's curve."""
    color, marker, style = STYLES[method]
    options = {"color": color, "marker": marker, "linestyle": style} | options
    axis.plot(xs, ys, label=options.pop("label", LABELS.get(method, method)), **options)


def legend_above(figure: Any, axis: Any, columns: int = 7) -> None:
    """The legend of one axis, over the whole figure."""
    handles, labels = axis.get_legend_handles_labels()
    columns = min(columns, len(labels))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9)


# ------------------------------------------------------------------------------------------- speed
SPEED_ROWS = ("fa1", "fa2", "fa3", "flash", "cudnn", BEST, "standard")


def cells_of(results: dict[str, Json], name: str = "compare") -> list[Json]:
    """The cells of compare.json, with the best peer."""
    if name not in results:
        return []
    return with_best(results[name]["cells"], results.get("recorded_peers"))


def cells_of_all_variants(results: dict[str, Json]) -> list[Json]:
    """The same of the last run of everything (compare_full.json)."""
    return cells_of(results, "compare_full" if "compare_full" in results else "compare")


def speed_data(direction: str) -> Callable[[dict[str, Json]], Any]:
    """TFLOP/s on the standard grid: [causal, d, method, {S: speed}]."""

    def data(results: dict[str, Json]) -> Any:
        found = standard_cells(cells_of(results), direction)
        rows = []
        for causal in (False, True):
            for d in HEAD_DIMS:
                same = [c for c in found if (c["d"], c["causal"]) == (d, causal)]
                for method in SPEED_ROWS:
                    speeds = {
                        c["seqlen"]: round(r["tflops"], 1)
                        for c in sorted(same, key=lambda c: c["seqlen"])
                        if "ms" in (r := c["providers"].get(method, {}))
                    }
                    if speeds:
                        rows.append([causal, d, method, speeds])
        return rows or None

    return data


def draw_speed(rows: Any) -> Any:
    """Rows of panels: mask; columns: head dim."""
    figure, axes = grid(2, len(HEAD_DIMS), 5.6, sharey=True)
    for causal, d, method, speeds in rows:
        axis = axes[int(causal)][HEAD_DIMS.index(d)]
        line(axis, method, [int(s) for s in speeds], list(speeds.values()))
        axis.set_title(f"head dim {d}, {'causal' if causal else 'full'}")
    for row in axes:
        row[0].set_ylabel("speed (TFLOP/s)")
        for axis in row:
            over_lengths(axis, SEQLENS)
            axis.set_ylim(bottom=0)
    legend_above(figure, max(axes.flat, key=lambda a: len(a.lines)))
    return figure


SPEEDUPS = tuple(
    (ours, peer) for peer in ("standard", "flash", "cudnn", BEST) for ours in ("fa1", "fa2", "fa3")
)


def speedup_data(results: dict[str, Json]) -> Any:
    """Geometric mean, smallest and largest ratio on the standard grid, by direction and pair, and
    a note where some are against a recorded one."""
    rows = []
    for direction in (FORWARD, BACKWARD):
        found = standard_cells(cells_of(results), direction)
        for ours, peer in SPEEDUPS:
            values = ratios(found, ours, peer)
            if values:
                numbers = (geometric_mean(values), min(values), max(values))
                note = recorded_note(found, ours, peer)
                rows.append([direction, ours, peer, *(round(x, 3) for x in numbers), note])
    return rows or None


def draw_speedup(rows: Any) -> Any:
    """Bars: the geometric mean; whiskers: the smallest and the largest cell."""
    figure, axes = grid(1, 2, 3.4, sharey=True)
    for axis, direction in zip(axes[0], (FORWARD, BACKWARD), strict=True):
        peers = list(dict.fromkeys(r[2] for r in rows if r[0] == direction))
        for offset, ours in enumerate(("fa1", "fa2", "fa3")):
            mine = {r[2]: r[3:6] for r in rows if r[:2] == [direction, ours]}
            xs = [peers.index(p) + 0.27 * (offset - 1) for p in mine]
            means = [m[0] for m in mine.values()]
            whiskers = [[m[0] - m[1] for m in mine.values()], [m[2] - m[0] for m in mine.values()]]
            axis.bar(xs, [m - 1 for m in means], 0.25, bottom=1, color=STYLES[ours][0], label=ours,
                     zorder=2)  # fmt: skip
            axis.errorbar(xs, means, whiskers, fmt="none", color="#000000", lw=1, capsize=2)
            for x, (mean, bottom, top) in zip(xs, mine.values(), strict=True):
                y, side = (top * 1.08, "bottom") if mean >= 1 else (bottom / 1.08, "top")
                axis.text(x, y, f"{mean:.2f}", ha="center", va=side, fontsize=8)
        axis.set_ylim(min(r[4] for r in rows) / 3)
        axis.axhline(1, color="#333333", lw=1)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}×" if y >= 1 else f"1/{1 / y:g}×")
        axis.set_xticks(range(len(peers)), [f"over\n{LABELS[p]}".replace(" ", "\n")
                                            for p in peers], fontsize=9)  # fmt: skip
        axis.set_title(direction)
        axis.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("times as fast")
    if notes := dict.fromkeys(f"{r[0]}, over {LABELS[r[2]]}{r[6]}" for r in rows if r[6]):
        figure.supxlabel("\n".join(notes), fontsize=8)
    legend_above(figure, axes[0][0])
    return figure


GENERATIONS = ("standard", "fa1", "fa2", "fa3")


def generations_data(results: dict[str, Json]) -> Any:
    """TFLOP/s of each generation at one size of the grid, by direction: [direction, {method}]."""
    rows = []
    for direction in (FORWARD, BACKWARD):
        for cell in standard_cells(cells_of_all_variants(results), direction):
            if (cell["d"], cell["causal"], cell["seqlen"]) == (128, False, 2048):
                speeds = {
                    m: round(cell["providers"][m]["tflops"], 1)
                    for m in GENERATIONS
                    if "ms" in cell["providers"].get(m, {})
                }
                rows.append([direction, speeds])
    return rows or None


def draw_generations(rows: Any) -> Any:
    """Bars of TFLOP/s, with the gain over the generation before."""
    figure, axes = grid(1, 2, 2.7, sharey=True)
    for axis, (direction, speeds) in zip(axes[0], rows, strict=False):
        before = None
        for place, (method, speed) in enumerate(speeds.items()):
            axis.bar(place, speed, 0.7, color=STYLES[method][0], zorder=2)
            gain = f"\n{speed / before:.1f}× the one before" if before else ""
            axis.text(place, speed, f"{speed:.0f}{gain}", ha="center", va="bottom", fontsize=8)
            before = speed
        axis.set_xticks(range(len(speeds)), [LABELS[m].replace(" ", "\n") for m in speeds])
        axis.set_title(f"{direction}, head dim 128, S 2k, full")
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.2)
    axes[0][0].set_ylabel("speed (TFLOP/s)")
    return figure


# ------------------------------------------------------------------------------------------ memory
def memory_data(results: dict[str, Json]) -> Any:
    """Bytes by method, direction and S, and the shape."""
    if "memory" not in results:
        return None
    memory = results["memory"]
    rows = [
        [method, direction, row["bytes"]]
        for method, by_direction in memory["providers"].items()
        for direction, row in by_direction.items()
        if row["bytes"]
    ]
    return {"shape": memory["shape"], "rows": rows}


def draw_memory(data: Any) -> Any:
    """Forward, and forward with backward, in MiB; where a curve ends, the method stops."""
    figure, axes = grid(1, 2, 3.4, sharey=True)
    shape = data["shape"]
    lengths = {int(s) for row in data["rows"] for s in row[2]}
    for axis, direction in zip(axes[0], (FORWARD, "both"), strict=True):
        widths = iter((5.5, 3.5, 1.6, 1.6, 1.6, 1.6, 1.6))
        for method, _, points in (r for r in data["rows"] if r[1] == direction):
            # Equal curves lie on each other: the first ones are drawn wider.
            line(axis, method, [int(s) for s in points], [b / 2**20 for b in points.values()],
                 linewidth=next(widths) if method in ("fa1", "fa2", "fa3") else 1.6,
                 markersize=3.5)  # fmt: skip
        over_lengths(axis, lengths)
        axis.set_yscale("log")
        axis.set_title("forward" if direction == FORWARD else "forward and backward")
    axes[0][0].set_ylabel("peak extra memory (MiB)")
    legend_above(figure, axes[0][0])
    figure.supxlabel(f"batch {shape['batch']}, {shape['heads']} heads of {shape['d']}", fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------- IO
def io_data(results: dict[str, Json]) -> Any:
    """Bytes at both boundaries, and the model's, over S at head dim 64."""
    counted = [c for c in results.get("io", {}).get("cases", []) if "sm" in c]
    heads = max((c["heads"] for c in counted), default=0)
    rows = []
    for direction in (FORWARD, BACKWARD):
        for method in GENERATIONS:
            same = sorted(
                (c for c in counted if (c["method"], c["direction"], c["d"], c["heads"])
                 == (method, direction, 64, heads)), key=lambda c: c["seqlen"],
            )  # fmt: skip
            if same:
                points = {
                    c["seqlen"]: [c["hbm_read"] + c["hbm_written"], c["sm"], c["model"]]
                    for c in same
                }
                rows.append([direction, method, points])
    return {"heads": heads, "rows": rows} if rows else None


def draw_io(data: Any) -> Any:
    """Rows: direction; columns: between L2 and the SMs, between HBM and L2."""
    figure, axes = grid(2, 2, 6.0, sharey="row", sharex=True)
    lengths = {int(s) for row in data["rows"] for s in row[2]}
    places = ("between L2 and the SMs", "between HBM and L2")
    for direction, method, points in data["rows"]:
        row = axes[int(direction == BACKWARD)]
        xs = [int(s) for s in points]
        for axis, index, place in zip(row, (1, 0), places, strict=True):
            ys = [p[index] / 1e9 for p in points.values()]
            # fa2 and fa3 often lie on each other: a ring around a dot.
            ring = {"markerfacecolor": "none", "markersize": 9} if method == "fa2" else {}
            line(axis, method, xs, ys, linestyle="", **ring)
            axis.plot(xs, [p[2] / 1e9 for p in points.values()], color=STYLES[method][0], lw=1.2)
            axis.set_yscale("log")
            axis.set_title(f"{direction}: {place}")
    for row in axes:
        row[0].set_ylabel("bytes moved (GB)")
    for axis in axes[-1]:
        over_lengths(axis, lengths)
    axes[0][0].plot([], [], color="#333333", lw=1.2, label="the algorithm's loops, predicted")
    legend_above(figure, axes[0][0])
    figure.supxlabel(f"markers: counted by the GPU; head dim 64, {data['heads']} heads", fontsize=8)
    return figure


def roofline_data(results: dict[str, Json]) -> Any:
    """FLOPs per byte of HBM, and TFLOP/s, of what io.py counted and timed."""
    io = results.get("io")
    counted = [c for c in (io or {}).get("cases", []) if "sm" in c]
    if io is None or not counted:
        return None
    heads = max(c["heads"] for c in counted)
    rows = []
    for direction in (FORWARD, BACKWARD):
        for method in GENERATIONS:
            points = [
                [c["seqlen"], round(c["tflops"] * c["ms"] * 1e9
                                    / (c["hbm_read"] + c["hbm_written"]), 1), c["tflops"]]
                for c in sorted(counted, key=lambda c: c["seqlen"])
                if (c["method"], c["direction"], c["d"], c["heads"])
                == (method, direction, 64, heads)
            ]  # fmt: skip
            if points:
                rows.append([direction, method, points])
    return {"ceilings": io["ceilings"], "rows": rows}


def draw_roofline(data: Any) -> Any:
    """The two roofs as measured on this GPU, and each method's way from short to long S."""
    figure, axes = grid(1, 2, 3.6, sharey=True, sharex=True)
    peak, bandwidth = data["ceilings"]["matmul_tflops"], data["ceilings"]["copy_tbps"]
    found = [p[1] for row in data["rows"] for p in row[2]]
    xs = [min(found) / 2, peak / bandwidth, max(found) * 2]
    for axis, direction in zip(axes[0], (FORWARD, BACKWARD), strict=True):
        roof = f"matmul {peak:.0f} TFLOP/s, copy {bandwidth:.2f} TB/s, measured"
        axis.plot(xs, [min(peak, bandwidth * x) for x in xs], color="#222222", lw=2, label=roof)
        for _, method, points in (r for r in data["rows"] if r[0] == direction):
            line(axis, method, [p[1] for p in points], [p[2] for p in points])
            for seqlen, x, y in (points[0], points[-1]):
                axis.annotate(size_name(seqlen), (x, y), textcoords="offset points",
                              xytext=(4, -10), fontsize=7.5, color="#333333")  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"{direction}, head dim 64, S as written")
        axis.set_xlabel("FLOPs per byte of HBM")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.set_yticks([50, 100, 200, 400, 800])
    axes[0][0].set_ylabel("speed (TFLOP/s)")
    legend_above(figure, axes[0][0])
    return figure


# ---------------------------------------------------------------------------------------- numerics
NUMERICS_ROWS = ("fa1", "fa2", "fa3", "flash", "cudnn", "efficient", "standard", "naive")


def numerics_data(results: dict[str, Json]) -> Any:
    """RMS errors of out and dq at the longest S without a mask; None where not all is finite."""
    numerics = results.get("numerics")
    if numerics is None:
        return None
    longest = max(c["seqlen"] for c in numerics["cells"])
    rows = [
        [c["dtype"], tensor, c["distribution"], method,
         None if "finite" in found or "rms" not in found else found["rms"]]
        for c in numerics["cells"] if c["seqlen"] == longest and not c["causal"]
        for tensor in ("out", "dq")
        for method in NUMERICS_ROWS
        if (found := c["providers"].get(method, {}).get(tensor)) is not None
    ]  # fmt: skip
    return {"seqlen": longest, "d": numerics["d"], "rows": rows}


def draw_numerics(data: Any) -> Any:
    """Rows: out and dq; columns: type; in a panel each method's error by distribution."""
    rows = data["rows"]
    dtypes = list(dict.fromkeys(r[0] for r in rows))
    kinds = list(dict.fromkeys(r[2] for r in rows))
    methods = list(dict.fromkeys(r[3] for r in rows))
    figure, axes = grid(2, len(dtypes), 5.4, sharex=True, sharey="col")
    for dtype, tensor, kind, method, value in rows:
        axis = axes[("out", "dq").index(tensor)][dtypes.index(dtype)]
        x = kinds.index(kind) + 0.1 * (methods.index(method) - (len(methods) - 1) / 2)
        color, marker, _ = STYLES[method]
        label = LABELS[method] if kind == kinds[0] else None
        if value is None:  # at the top edge: not a number
            axis.plot(x, 0.97, color=color, marker="$\u2715$", markersize=7, linestyle="",
                      transform=axis.get_xaxis_transform())  # fmt: skip
        axis.plot(x, math.nan if value is None else value, color=color, marker=marker,
                  linestyle="", label=label)  # fmt: skip
        axis.set_yscale("log")
        axis.set_title(f"{tensor}, {dtype}")
    for row in axes:
        row[0].set_ylabel("RMS error / RMS")
        for axis in row:
            axis.set_xticks(range(len(kinds)), [k.replace(" ", "\n") for k in kinds])
            axis.grid(axis="x", visible=False)
            axis.margins(y=0.2)
            for edge in range(len(kinds) - 1):
                axis.axvline(edge + 0.5, color="#bbbbbb", lw=0.8)
    legend_above(figure, axes[0][0], 4)
    figure.supxlabel(f"S {data['seqlen']}, head dim {data['d']}, no mask; ✕ at the top: results"
                     " that are not numbers", fontsize=8)  # fmt: skip
    return figure


# ---------------------------------------------------------------------------------------- training
def training_data(results: dict[str, Json]) -> Any:
    """Tokens per second over SDPA's, by model and S."""
    rows = []
    for c in results.get("train", {}).get("cells", []):
        speeds = {n: r["tokens_per_second"] for n, r in c["providers"].items()
                  if "tokens_per_second" in r}  # fmt: skip
        base = speeds.get("sdpa")
        rows += [
            [f"{c['model']}, S {c['seqlen']}", name, round(x / base, 4)]
            for name, x in speeds.items()
            if base and name != "sdpa"
        ]
    return rows or None


def draw_training(rows: Any) -> Any:
    """Bars, from SDPA with the backend that it chooses itself on."""
    kinds = list(dict.fromkeys(r[0] for r in rows))
    methods = [m for m in STYLES if any(r[1] == m for r in rows)]
    figure, axes = grid(1, 1, 3.2)
    axis = axes[0][0]
    for place, method in enumerate(methods):
        mine = {r[0]: r[2] for r in rows if r[1] == method}
        width = 0.8 / len(methods)
        xs = [kinds.index(k) + width * (place - (len(methods) - 1) / 2) for k in mine]
        axis.bar(xs, [v - 1 for v in mine.values()], width * 0.95, bottom=1, zorder=2,
                 color=STYLES[method][0], label=LABELS[method])  # fmt: skip
    axis.set_xticks(range(len(kinds)), [k.replace(", ", "\n") for k in kinds])
    axis.axhline(1, color="#333333", lw=1)
    axis.set_ylabel("tokens/s over SDPA's (×)")
    axis.grid(axis="x", visible=False)
    legend_above(figure, axis)
    return figure


FIGURES = (
    Figure("speed_forward", "Forward speed by sequence length, head dim and mask",
           speed_data(FORWARD), draw_speed),
    Figure("speed_backward", "Backward speed by sequence length, head dim and mask",
           speed_data(BACKWARD), draw_speed),
    Figure("speedup", "How many times as fast as standard attention and the peers", speedup_data,
           draw_speedup),
    Figure("generations", "Speed of each generation at one size", generations_data,
           draw_generations),
    Figure("memory", "Peak extra memory by sequence length", memory_data, draw_memory),
    Figure("io", "Bytes moved by sequence length, counted and predicted", io_data, draw_io),
    Figure("roofline", "Roofline with each generation's kernels on it", roofline_data,
           draw_roofline),
    Figure("numerics", "Errors against float64 by type and input distribution", numerics_data,
           draw_numerics),
    Figure("training", "Training speed from end to end", training_data, draw_training),
)  # fmt: skip


def load(folder: Path) -> dict[str, Json]:
    """The results of a GPU, by file name."""
    return {p.stem: found for p in sorted(folder.glob("*.json")) if (found := common.read_json(p))}


def markdown(name: str, gpu: str, document: Path) -> str | None:
    """The image line of a figure in a document, or None where nothing was measured for it."""
    figure = next(f for f in FIGURES if f.name == name)
    if figure.data(load(common.RESULTS / gpu)) is None:
        return None
    path = os.path.relpath(figure.path(gpu), common.ROOT / document.parent)
    return f"![{figure.title}]({Path(path).as_posix()})"


def stale(gpu: str) -> list[str]:
    """The figures that do not belong to the results, by name."""
    results = load(common.RESULTS / gpu)
    found = []
    for figure in FIGURES:
        data, path = figure.data(results), figure.path(gpu)
        text = path.read_text() if path.is_file() else ""
        if (data is None) != (not text) or (data and figure.digest(data) not in text):
            found.append(figure.name)
    return found


def write(gpu: str) -> list[Path]:
    """Draw every figure whose data there are, and delete the others."""
    results = load(common.RESULTS / gpu)
    written = []
    for figure in FIGURES:
        data, path = figure.data(results), figure.path(gpu)
        if data is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = figure.draw(json.loads(json.dumps(data)))
        metadata = {"Date": None, "Creator": None, "Title": figure.title,
                    "Description": f"digest {figure.digest(data)}"}  # fmt: skip
        drawn.savefig(path, metadata=metadata, dpi=PIXELS)
        pyplot().close(drawn)
        path.write_text("\n".join(s.rstrip() for s in path.read_text().splitlines()) + "\n")
        written.append(path)
    return written
