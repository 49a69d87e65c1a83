"""README's line and curves of speed, and what `python -m flash_ext.bench` prints."""

from __future__ import annotations

from pathlib import Path

import results
from cells import is_plain
from common import Json
from providers import LABELS

import flash_ext
from flash_ext.bench.measure import with_best_peer
from flash_ext.bench.output import table

from . import figures
from .speed import BOTH, words_of
from .tables import NOWHERE, device_of, gpu_folders, has_grid, load


def measured() -> list[Path]:
    """The GPUs that measured the kernels as they are, or while there is none those that measured
    older ones."""
    folders = [p for p in gpu_folders("compare") if words_of(p, "forward")]
    fresh = [p for p in folders if any(results.is_current("compare", row["setup"])
                                       for row in has_grid(p, "forward", "fa3"))]  # fmt: skip
    return fresh or folders


def front_section(document: str = "README.md") -> str:
    """A line for each GPU that measured the kernels as they are, and the first one's curves. While
    none has, the lines and curves of older kernels, which each line names."""
    folders, parts = measured(), []
    for folder in folders[: None if document == "README.md" else 1]:
        words = [w for x in BOTH if (w := words_of(folder, x))]
        setup = has_grid(folder, "forward", "fa3")[0]["setup"]
        parts.append(f"{device_of(folder)}, fa3, bf16: {'; '.join(words)} (kernels"
                     f" `{setup['kernels']}`, {setup['date'][:10]}).")  # fmt: skip
    if not parts:
        return NOWHERE
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
    return with_best_peer(shape, (LABELS[n] for n in SAMPLE_ROWS if n not in flash_ext.VARIANTS))


def bench_section() -> str:
    """The table of a command, with the times of the first GPU that measured its shape."""
    for folder in measured():
        for cell in load("compare", folder):
            if is_plain(cell) and SAMPLE.items() <= cell.items():
                setup = cell["setup"]
                return (
                    "The table of a command, with times that `benchmarks/compare.py`, which has the"
                    f" same timer, measured on an {setup['device']} with torch {setup['torch']},"
                    f" kernels `{setup['kernels']}`:\n\n"
                    f"```\n$ python -m flash_ext.bench {SAMPLE_ARGUMENTS}\n"
                    f"{table(as_bench_cell(cell))}\n```"
                )
    return NOWHERE
