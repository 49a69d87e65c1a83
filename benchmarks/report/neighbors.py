"""How fast shapes are beside those that kernels are tuned to."""

from __future__ import annotations

from collections.abc import Iterator

import common
from common import Json
from neighbors import findings

from .tables import NOWHERE, gpu_folders, provenance, table


def neighbors_section() -> str:
    """A table for each GPU on which neighbors were measured."""
    return "\n\n".join(parts()) or NOWHERE


def parts() -> Iterator[str]:
    """What was measured on each GPU."""
    for folder in gpu_folders("neighbors"):
        result = common.read_json(folder / "neighbors.json")
        if result is None:
            continue
        yield f"{result['device']}, {result['variant']}: {provenance(result)}."
        yield "\n".join(f"- {finding}" for finding in findings(result["rows"]))
        yield table(
            ["shape", "direction", "TFLOP/s", "slowest neighbor", "of its speed"],
            [row_of(row, result["least"]) for row in result["rows"]],
            words=2,
        )


def row_of(row: Json, least: float) -> list[str]:
    """A shape, and those of its neighbors that are too slow, or the slowest one."""
    own, *others = row["ratios"]
    slow = sorted(others, key=row["ratios"].__getitem__)
    shown = [name for name in slow if row["ratios"][name] < least] or slow[:1]
    dims = f"{row['d']}" if row["d_v"] == row["d"] else f"{row['d']}/{row['d_v']}"
    mask = "causal" if row["causal"] else "full"
    shared = "" if own.endswith(f"H {row['kv_heads']}") else f", {row['kv_heads']} of K and V"
    return [
        f"d {dims}, {mask}, B {row['batch']}, {own}{shared}",
        row["direction"],
        f"{row['tflops'][own]:.0f}",
        "; ".join(shown),
        "; ".join(f"{row['ratios'][name]:.2f}" for name in shown),
    ]
