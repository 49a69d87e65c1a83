"""README's line and picture of speed."""

from __future__ import annotations

from pathlib import Path

import common
from cells import standard_cells
from common import Json
from providers import BEST, BEST_LABEL
from ratios import geometric_mean, ratios, recorded_note, with_best
from support import BOTH

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


def front_section() -> str:
    """A line for each GPU that measured the source as it is, and the figure of the first one's
    ratios. While none has, the lines and figure of other sources, which each line names."""
    found: list[tuple[bool, Path, Json]] = []
    for folder in gpu_folders("compare"):
        if compare := common.read_json(folder / "compare.json"):
            found.append((compare["digest"] != common.source_digest(), folder, compare))
    found = [x for x in found if not x[0]] or found
    parts = []
    for _, folder, compare in sorted(found, key=lambda x: x[:2]):
        recorded = common.read_json(folder / "recorded_peers.json")
        cells = with_best(compare["cells"], recorded)
        line = "; ".join(words for x in BOTH if (words := words_of(cells, x))) or UNKNOWN
        parts.append(
            f"{compare['device']}, fa3: {line}. bf16, source `{compare['digest']}`,"
            f" {compare['date'][:10]}."
        )
    if found:
        parts[1:1] = picture(min(found, key=lambda x: x[:2])[1], "speedup", document="README.md")
    return "\n\n".join(parts) or NOWHERE
