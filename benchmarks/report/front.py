"""README's line and picture of speed."""

from __future__ import annotations

import common
from compare import geometric_mean, ratios, standard_cells, with_best
from providers import BEST, BEST_LABEL
from support import BOTH

from .sections import picture
from .tables import NOWHERE, UNKNOWN, gpu_folders


def front_section() -> str:
    """What fa3 reaches, in one line, and the figure of all ratios; one part per GPU."""
    parts = []
    for folder in gpu_folders("compare"):
        compare = common.read_json(folder / "compare.json")
        if compare is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
            continue
        recorded = common.read_json(folder / "recorded_peers.json")
        cells = with_best(compare["cells"], recorded)
        words = []
        for direction in BOTH:
            found = standard_cells(cells, direction)
            values = ratios(found, "fa3", BEST)
            speeds = [
                r["tflops"] for c in found if "tflops" in (r := c["providers"].get("fa3", {}))
            ]
            if values:
                words.append(
                    f"{direction} {geometric_mean(values):.2f}× the speed of the {BEST_LABEL}"
                    f" (geometric mean of {len(values)} shapes), up to {max(speeds):.0f} TFLOP/s"
                )
        line = "; ".join(words) or UNKNOWN
        parts.append(
            f"{compare['device']}, fa3: {line}. bf16, source `{compare['digest']}`,"
            f" {compare['date'][:10]}."
        )
        parts += picture(folder, "speedup", document="README.md")
    return "\n\n".join(parts) or NOWHERE
