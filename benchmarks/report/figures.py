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
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from cells import HEAD_DIMS, SEQLENS, standard_cells
from providers import LABELS

from .tables import load, mask_of, select, size_name, speeds

FOLDER = common.ROOT / "docs" / "figures"
FULL_WIDTH, PIXELS = 9.0, 100  # inches, and pixels per inch
STYLES: dict[str, list[str]] = common.SHAPES["names"]["styles"]  # colour, marker, line


@dataclass(frozen=True)
class Figure:
    """One file of docs/figures/<gpu>."""

    name: str
    title: str  # also what a reader who does not see it is told
    data: Callable[[Path], Any]
    draw: Callable[[Any], Any]

    def digest(self, data: Any) -> str:
        """Sixteen hex digits of what is drawn and how."""
        style = STYLES, Path(__file__).with_suffix(".mplstyle").read_text()
        how = inspect.getsource(sys.modules[__name__]), *style
        text = json.dumps([self.title, data, how], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, gpu: str) -> Path:
        return FOLDER / gpu / f"{self.name}.svg"


def pyplot() -> Any:
    """matplotlib, set up so that equal data give equal files."""
    import matplotlib.pyplot

    matplotlib.use("svg")
    matplotlib.style.use(Path(__file__).with_suffix(".mplstyle"))
    return matplotlib.pyplot


def grid(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure as wide as README, with axes as a 2-D array."""
    options = {"squeeze": False, "layout": "constrained"} | options
    return pyplot().subplots(rows, columns, figsize=(FULL_WIDTH, height), **options)


def over_lengths(axis: Any, lengths: Iterable[int]) -> None:
    """A logarithmic axis of sequence lengths."""
    ticks = sorted(set(lengths))
    axis.set_xscale("log", base=2)
    step = max(1, len(ticks) // 6)
    axis.set_xticks(ticks[::step], [size_name(s) for s in ticks[::step]])
    axis.minorticks_off()
    axis.set_xlabel("sequence length S (tokens)")


def line(axis: Any, method: str, xs: list[Any], ys: list[Any], **options: Any) -> None:
    color, marker, style = STYLES[method]
    options = {"color": color, "marker": marker, "linestyle": style} | options
    axis.plot(xs, ys, label=LABELS[method].removeprefix("flash_ext "), **options)


def legend_above(figure: Any, axis: Any) -> None:
    """The legend of one axis, over the whole figure."""
    handles, labels = axis.get_legend_handles_labels()
    columns = min(7, len(labels))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9)


# ------------------------------------------------------------------------------------------- speed
SPEED_ROWS = ("fa1", "fa2", "fa3", "flash", "cudnn", "flash_attn_4", "standard")


def speed_data(*directions: str, **wanted: Any) -> Callable[[Path], Any]:
    """TFLOP/s on the standard grid: [panel, method, {S: speed}]; `wanted`: of these cells alone."""

    def data(folder: Path) -> Any:
        rows = []
        for direction in directions:
            found = select(standard_cells(speeds(folder), direction), **wanted)
            panels = dict.fromkeys((c["causal"], c["d"]) for c in sorted(
                found, key=lambda c: (c["causal"], c["d"])))  # fmt: skip
            for causal, d in panels:
                title = f"head dim {d}, {'causal' if causal else 'full'}"
                title = f"{direction}, {title}" if len(directions) > 1 else title
                cells = sorted(select(found, causal=causal, d=d), key=lambda c: c["seqlen"])
                for method in SPEED_ROWS:
                    of_method = ((c["seqlen"], c["providers"].get(method, {})) for c in cells)
                    points = {s: round(r["tflops"], 1) for s, r in of_method if "ms" in r}
                    if points:
                        rows.append([title, method, points])
        return rows or None

    return data


def draw_speed(rows: Any) -> Any:
    """A panel for each mask and head dim, or for each direction."""
    titles = list(dict.fromkeys(r[0] for r in rows))
    columns = min(len(HEAD_DIMS), len(titles))
    figure, axes = grid(-(-len(titles) // columns), columns, 3.4 if len(titles) < 4 else 5.6,
                        sharey=True)  # fmt: skip
    for title, method, points in rows:
        axis = axes.flat[titles.index(title)]
        line(axis, method, [int(s) for s in points], list(points.values()))
        axis.set_title(title)
    for axis in axes.flat:
        over_lengths(axis, SEQLENS)
        axis.set_ylim(bottom=0)
    for row in axes:
        row[0].set_ylabel("speed (TFLOP/s)")
    legend_above(figure, max(axes.flat, key=lambda a: len(a.lines)))
    return figure


# ------------------------------------------------------------------------------------------ memory
def memory_data(folder: Path) -> Any:
    """Bytes by method and S, forward and backward together, and the shape."""
    rows = select(load("memory", folder), direction="both")
    shape = {n: rows[0][n] for n in ("batch", "heads", "d", "causal")} if rows else {}
    points = [[r["provider"], r["bytes"]] for r in rows if r["bytes"]]
    return {"shape": shape, "rows": points} if points else None


def draw_memory(data: Any) -> Any:
    """In MiB; where a curve ends, the method stops. Equal curves lie on each other: their markers
    stand at every third length, each method's a length later."""
    figure, axes = grid(1, 1, 3.4)
    axis, shape = axes[0][0], data["shape"]
    for place, (method, points) in enumerate(data["rows"]):
        line(axis, method, [int(s) for s in points], [b / 2**20 for b in points.values()],
             markevery=(place % 3, 3))  # fmt: skip
    over_lengths(axis, {int(s) for row in data["rows"] for s in row[1]})
    axis.set_yscale("log")
    axis.set_title(f"forward and backward, batch {shape['batch']}, {shape['heads']} heads of"
                   f" {shape['d']}, {mask_of(shape)}")  # fmt: skip
    axis.set_ylabel("peak extra memory (MiB)")
    legend_above(figure, axis)
    return figure


FIGURES = (
    Figure("speed", "Speed by sequence length, head dim 128, causal",
           speed_data("forward", "backward", d=128, causal=True), draw_speed),
    Figure("speed_forward", "Forward speed by sequence length, head dim and mask",
           speed_data("forward"), draw_speed),
    Figure("speed_backward", "Backward speed by sequence length, head dim and mask",
           speed_data("backward"), draw_speed),
    Figure("memory", "Peak extra memory by sequence length", memory_data, draw_memory),
)  # fmt: skip


def pictures(folder: Path, document: Path, *names: str) -> list[str]:
    """The image lines of a GPU's figures in a document, as far as there are data for them."""
    found = []
    for figure in (f for f in FIGURES if f.name in names):
        if figure.data(folder) is not None:
            path = os.path.relpath(figure.path(folder.name), common.ROOT / document.parent)
            found.append(f"![{figure.title}]({Path(path).as_posix()})")
    return found


def stale(folder: Path) -> list[str]:
    """The figures that do not belong to the results of a GPU, by name."""
    found = []
    for figure in FIGURES:
        data, path = figure.data(folder), figure.path(folder.name)
        text = path.read_text() if path.is_file() else ""
        if (data is None) != (not text) or (data and figure.digest(data) not in text):
            found.append(figure.name)
    return found


def write(folder: Path) -> None:
    """Draw every figure whose data there are, and delete the others."""
    for path in (FOLDER / folder.name).glob("*.svg"):
        path.unlink()
    for figure in FIGURES:
        data, path = figure.data(folder), figure.path(folder.name)
        if data is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = figure.draw(json.loads(json.dumps(data)))
        metadata = {"Date": None, "Creator": None, "Title": figure.title,
                    "Description": f"digest {figure.digest(data)}"}  # fmt: skip
        drawn.savefig(path, metadata=metadata, dpi=PIXELS)
        pyplot().close(drawn)
        path.write_text("\n".join(s.rstrip() for s in path.read_text().splitlines()) + "\n")
