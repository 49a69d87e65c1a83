"""The parts on bytes, memory, errors and the papers' claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import common
from common import Json

from . import claims, figures
from .figures import LABELS
from .tables import NO, NOWHERE, UNKNOWN, gpu_folders, provenance, relevant, select, table


def per_gpu(name: str, part: Callable[[Path, Json], list[str]]) -> str:
    """A part for each GPU that has a result file of this name."""
    parts = []
    for folder in gpu_folders(name):
        result = common.read_json(folder / f"{name}.json")
        if result is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
        else:
            parts += [f"{result['device']}: {provenance(result)}.", *part(folder, result)]
    return "\n\n".join(parts) or NOWHERE


def picture(folder: Path, *names: str, document: str = "docs/benchmarks.md") -> list[str]:
    """The figures of a GPU, as far as there are data for them."""
    found = (figures.markdown(name, folder.name, Path(document)) for name in names)
    return [line for line in found if line]


def io_table(io: Json) -> str:
    """Bytes of one call at the second longest S, by head dim and number of heads."""
    counted = [c for c in io["cases"] if "sm" in c]
    longest = sorted({c["seqlen"] for c in counted})[-2:][0]
    rows = []
    for c in select(counted, seqlen=longest):
        sizes = (c["hbm_read"], c["hbm_written"], c["sm"], c["model"])
        rows.append([
            f"{c['direction']}, d {c['d']}, {c['heads']} heads",
            io["labels"].get(c["method"], c["method"]),
            *(f"{x / 1e6:,.0f}" for x in sizes),
            f"{c['sm'] / c['theta']:.1f}",
            f"{c['shared_bytes'] / 1024:.0f}",
        ])  # fmt: skip
    head = [f"S {longest}, MB", "", "HBM read", "HBM written", "L2 and SMs", "by the loops",
            "over Θ", "M, KiB"]  # fmt: skip
    return table(head, rows, words=2)


def io_section() -> str:
    """Bytes, with their figure and the roofline."""

    def part(folder: Path, io: Json) -> list[str]:
        if "not_counted" in io:
            return [f"Not counted: {io['not_counted']}"]
        details = f"<details><summary>In bytes</summary>\n\n{io_table(io)}\n\n</details>"
        return [*picture(folder, "io", "roofline"), details]

    return per_gpu("io", part)


def memory_section() -> str:
    """Peak extra memory over S, with standard attention's over the variants'."""

    def part(folder: Path, memory: Json) -> list[str]:
        lengths = sorted({int(s) for rows in memory["providers"].values()
                          for r in rows.values() for s in r["bytes"]})  # fmt: skip
        labels = memory["labels"] | LABELS  # a peer that no figure names has its own label
        rows = []
        for direction in ("forward", "both"):
            words = "forward" if direction == "forward" else "forward and backward"
            base = memory["providers"].get("standard", {}).get(direction, {}).get("bytes", {})
            for name, by_direction in memory["providers"].items():
                size = by_direction.get(direction, {}).get("bytes", {})

                def cell(s: int, size: Json = size, base: Json = base) -> str:
                    if str(s) not in size:
                        return NO
                    ratio = f" ({base[str(s)] / size[str(s)]:.0f}×)" if str(s) in base else ""
                    return f"{size[str(s)] / 2**20:,.0f}" + ratio * (size is not base)

                rows.append([f"{words}, {labels[name]}", *map(cell, lengths)])
        head = ["MiB (times less than standard)", *(f"S {figures.size_name(s)}" for s in lengths)]
        return [*picture(folder, "memory"), table(head, rows)]

    return per_gpu("memory", part)


def numerics_table(numerics: Json) -> str:
    """RMS and largest errors of out and dq at the longest S without a mask."""
    longest = max(c["seqlen"] for c in numerics["cells"])
    names = list(numerics["labels"])

    def entry(found: Json, tensor: str) -> str:
        r = found.get(tensor, {})
        if "finite" in r:
            return "NaN"
        return f"{r['rms']:.1e} / {r['max']:.0e}" if "rms" in r else NO

    rows = [
        [f"{c['dtype']}, {c['distribution']}, {tensor}",
         *(entry(c["providers"].get(n, {}), tensor) for n in names)]
        for c in select(numerics["cells"], seqlen=longest, causal=False)
        for tensor in ("out", "dq")
    ]  # fmt: skip
    return table([f"S {longest}, RMS / max", *(numerics["labels"][n] for n in names)], rows)


def softmax_table(numerics: Json) -> str:
    """Only the softmax: RMS error, and the share of finite entries."""
    names = list(numerics["softmax"][0]["forms"])

    def entry(r: Json) -> str:
        share = r.get("finite", 1)
        return f"{r.get('rms', math.nan):.0e}" if share == 1 else f"{1 - share:.1%} NaN"

    rows = [
        [f"N(0, {row['scale']:g}²), largest {row['largest']:g}",
         *(entry(row["forms"][n]) for n in names)]
        for row in numerics["softmax"]
    ]  # fmt: skip
    return table(["logits, float32", *names], rows)


def numerics_section() -> str:
    """Errors against float64, with their figure."""

    def part(folder: Path, numerics: Json) -> list[str]:
        return [
            *picture(folder, "numerics"),
            f"<details><summary>Errors over the exact tensor's RMS</summary>\n\n"
            f"{numerics_table(numerics)}\n\n</details>",
            softmax_table(numerics),
        ]

    return per_gpu("numerics", part)


def claims_section() -> str:
    """The papers' claims, one table per GPU."""
    parts = []
    for folder in gpu_folders("compare"):
        results = figures.load(folder)
        device = next((r["device"] for r in results.values() if "device" in r), folder.name)
        head = ["claim", "source", f"measured, {device}", "conditions", "verdict"]
        used = [f"{name}.json {r['digest']}" for name, r in results.items() if "digest" in r]
        parts.append("Sources: " + ", ".join(used) + ".")
        parts.append(table(head, relevant(folder, claims.rows(results), 2), words=5))
    return "\n\n".join(parts) or NOWHERE
