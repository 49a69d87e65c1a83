"""README's line and picture of speed, and what `python -m flash_ext.bench` prints."""

from __future__ import annotations

from pathlib import Path

import common
from cells import is_plain, standard_cells
from common import Json
from providers import BEST, BEST_LABEL
from ratios import geometric_mean, ratios, recorded_note, with_best
from support import BOTH

import flash_ext
from flash_ext.bench.measure import with_best_peer
from flash_ext.bench.output import table

from .sections import picture
from .tables import NOWHERE, UNKNOWN, gpu_folders

PEERS = {BEST: f"the {BEST_LABEL}", "cudnn": "SDPA cuDNN"}  # the first of them that was measured


def words_of(cells: list[Json], direction: str) -> str:
    """What fa3 reaches in a direction, or nothing where that is not measured."""
    found = standard_cells(cells, direction)
    speeds = [r["tflops"] for c in found if "tflops" in (r := c["providers"].get("fa3", {}))]
    for peer, label in PEERS.items():
        if values := ratios(found, "fa3", peer):
            note = recorded_note(found, "fa3", peer)
            return (
                f"{direction} {geometric_mean(values):.2f}× the speed of {label}"
                f" (geometric mean of {len(values)} shapes{note}), up to {max(speeds):.0f} TFLOP/s"
            )
    return ""


def measured() -> list[tuple[Path, Json]]:
    """The result files of the source as it is, or while there is none those of other sources."""
    found: list[tuple[bool, Path, Json]] = []
    for folder in gpu_folders("compare"):
        if compare := common.read_json(folder / "compare.json"):
            found.append((compare["digest"] != common.source_digest(), folder, compare))
    found = [x for x in found if not x[0]] or found
    return [x[1:] for x in sorted(found, key=lambda x: x[:2])]


def front_section() -> str:
    """A line for each GPU, which names the source, and the curves of the first one."""
    parts = []
    for folder, compare in (found := measured()):
        recorded = common.read_json(folder / "recorded_peers.json")
        cells = with_best(compare["cells"], recorded)
        line = "; ".join(words for x in BOTH if (words := words_of(cells, x))) or UNKNOWN
        parts.append(
            f"{compare['device']}, fa3: {line}. bf16, source `{compare['digest']}`,"
            f" {compare['date'][:10]}."
        )
    if not found:
        return NOWHERE
    curves = picture(found[0][0], "speed_forward", document="README.md")
    return "\n\n".join(filter(None, (parts[0], *curves, " ".join(parts[1:]))))


# A cell of the standard grid, the names of its rows in flash_ext.bench, in their order, and the
# arguments that ask for it.
SAMPLE = {"dtype": "bf16", "d": 128, "causal": True, "seqlen": 4096, "batch": 4, "heads": 16,
          "direction": "forward"}  # fmt: skip
SAMPLE_ARGUMENTS = "--shape 4 4096 16 128 --causal --forward"
SAMPLE_ROWS = {
    **{name: f"flash_ext {name}" for name in flash_ext.VARIANTS},
    **{"flash": "SDPA flash", "cudnn": "SDPA cuDNN", "efficient": "SDPA efficient"},
    **{f"flash_attn_{x}": f"flash-attn {x}" for x in (2, 3, 4)},
    "standard": "standard attention",
}


def as_bench_cell(cell: Json) -> Json:
    """A cell of compare.py as one of flash_ext.bench, which has the same timer."""
    rows = {
        label: {"us": r["ms"] * 1e3, "tflops": r["tflops"], "error": r["error"]}
        for name, label in SAMPLE_ROWS.items()
        if "ms" in (r := cell["providers"].get(name, {}))
    }
    shape = {
        "batch": cell["batch"], "queries": cell["seqlen"], "keys": cell["seqlen"],
        "heads": cell["heads"], "kv_heads": cell["heads"], "head_dim": cell["d"],
        "head_dim_v": cell["d"], "causal": cell["causal"], "direction": cell["direction"],
        "dtype": "bfloat16", "rows": rows,
    }  # fmt: skip
    return with_best_peer(shape, (x for n, x in SAMPLE_ROWS.items() if n not in flash_ext.VARIANTS))


def bench_section() -> str:
    """The table of a command, with the times of the first GPU that measured its shape."""
    for _, compare in measured():
        for cell in compare["cells"]:
            if is_plain(cell) and SAMPLE.items() <= cell.items():
                return (
                    "The table of a command, with times that `benchmarks/compare.py`, which has the"
                    f" same timer, measured on an {compare['device']} with torch"
                    f" {compare['torch']}, source `{compare['digest']}`:\n\n"
                    f"```\n$ python -m flash_ext.bench {SAMPLE_ARGUMENTS}\n"
                    f"{table(as_bench_cell(cell))}\n```"
                )
    return NOWHERE
