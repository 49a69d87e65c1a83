"""The table of the speed of this build over that of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator

import common
from builds import summarise

from .tables import NOWHERE, gpu_folders, provenance, table


def builds_section() -> str:
    """A table per GPU on which two builds were compared."""
    return "\n\n".join(parts()) or NOWHERE


def parts() -> Iterator[str]:
    """What was measured on each GPU."""
    for folder in gpu_folders("builds"):
        result = common.read_json(folder / "builds.json")
        if result is None:
            continue
        yield (
            f"{result['device']}: {provenance(result)}, or that of the row; before it source"
            f" `{result['before']['digest']}`. Times before over times now, medians of turns;"
            " above 1 the later source is faster."
        )
        yield table(
            ["cells", "variant", "direction", "number", "geometric mean", "smallest",
             "source"],
            [
                [s["set"], s["variant"], s["direction"], f"{s['cells']}",
                 f"{s['geometric_mean']:.3f}", f"{s['min']:.3f} ({s['min_at']})",
                 ", ".join(f"`{digest}`" for digest in s["digests"])]
                for s in summarise(result["cells"])
            ],
            words=3,
        )  # fmt: skip
        if "host" in result:
            yield (
                "The CPU's time per call, µs before and now: "
                + "; ".join(
                    f"{what} {times['before']:.1f}, {times['now']:.1f} (source `{times['digest']}`)"
                    for what, times in result["host"].items()
                )
                + "."
            )
