"""Tables and figures of what was measured."""

from __future__ import annotations

from .problem import Json, Shape


def title(cell: Json) -> str:
    """What a table is about, in a line."""
    shape = Shape(**{name: cell[name] for name in Shape.__dataclass_fields__})
    options = [n if x is None else f"{n}={x}" for n, x in cell.get("options", {}).items()]
    return ", ".join([f"{cell['direction']}, {cell['dtype']}: {shape}", *options])


def table(cell: Json) -> str:
    """A cell as text."""
    width = max(map(len, cell["rows"])) + 1
    head = f"{'':{width}}{'µs':>10}{'TFLOP/s':>10}{'x best peer':>13}{'error':>10}"
    lines = [title(cell), head]
    for name, row in cell["rows"].items():
        if "us" not in row:
            lines.append(f"{name:{width}}  not run: {row['not run'].partition('. ')[0][:100]}")
            continue
        multiple = f"{row['times_best_peer']:.2f}" if "times_best_peer" in row else "-"
        error = "-" if row.get("error") is None else f"{row['error']:.1e}"
        late = " *" if row.get("launch_bound") else ""
        speed = f"{row['tflops']:.1f}" if row["tflops"] >= 1 else f"{row['tflops']:.2g}"
        lines.append(f"{name:{width}}{row['us']:10.1f}{speed:>10}{multiple:>13}{error:>10}{late}")
    if any(row.get("launch_bound") for row in cell["rows"].values()):
        lines.append("* the CPU could not keep ahead of the GPU: the time has launches in it")
    return "\n".join(lines)


def plot(path: str, cells: list[Json], device: str) -> None:
    """A figure: TFLOP/s over sequence lengths, a panel for each direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(cell["direction"] for cell in cells))
    figure = Figure(figsize=(5.2 * len(directions), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, direction in enumerate(directions, 1):
        axes = figure.add_subplot(1, len(directions), number)
        columns = [cell for cell in cells if cell["direction"] == direction]
        for name in columns[0]["rows"]:
            points = [
                (cell["queries"], cell["rows"][name]["tflops"])
                for cell in columns
                if "us" in cell["rows"][name]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="sequence length", ylabel="TFLOP/s", title=direction, ylim=(0, None))
        axes.legend(fontsize=8)
    figure.suptitle(f"{device}, {cells[0]['dtype']}", fontsize=10)
    figure.savefig(path, dpi=150)
