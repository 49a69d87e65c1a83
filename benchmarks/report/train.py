"""The tables of training from end to end."""

from __future__ import annotations

import common
from common import Json

from .sections import picture
from .tables import NO, NOWHERE, UNKNOWN, gpu_folders, provenance, table

SIZES = {"small": "GPT-2 small", "medium": "GPT-2 medium", "bert-large": "as BERT-large",
         "long-range": "as long-range arena", "llama": "4 layers as Llama 3.1 8B's"}  # fmt: skip
MEMORY = "out of memory"  # in the reason for which a provider was left out


def training_table(result: Json) -> str:
    """Tokens per second, the ratio to SDPA, and the peak memory of each attention."""
    rows = []
    for cell in sorted(
        result["cells"], key=lambda c: (c.get("causal", True), c["width"], c["seqlen"])
    ):
        found = cell["providers"]
        base = found.get("sdpa", {}).get("tokens_per_second")
        for name, label in result["labels"].items():
            r = found.get(name)
            if r is None:  # it was not asked for
                continue
            row = [f"{SIZES.get(cell['model'], cell['model'])}, S {cell['seqlen']}", label]
            speed = r.get("tokens_per_second")
            if speed is None:
                why = "wrong" if r.get("wrong") else "no memory" if MEMORY in r["skipped"] else NO
                rows.append([*row, why, NO, NO, NO])
                continue
            ratio = f"{speed / base:.2f}" if base else NO
            peak = f"{r['peak_bytes'] / 2**30:.1f}"
            rows.append([*row, f"{speed:,.0f}", ratio, peak, f"{r['share']:.0%}"])
    head = ["size", "attention", "tokens/s", "over SDPA", "peak GiB", "attention's share"]
    return table(head, rows)


def training_section() -> str:
    """The tables of training from end to end, one part per GPU."""
    parts = []
    for folder in gpu_folders("train"):
        result = common.read_json(folder / "train.json")
        if result is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
            continue
        backends = sorted({c["sdpa_backend"] for c in result["cells"] if "sdpa_backend" in c})
        chosen = f" SDPA chose {' and '.join(backends)}." if backends else ""
        parts.append(
            f"{result['device']}: {provenance(result)}. Median step; losses within"
            f' {result["loss_limit"]:.1%} of each other\'s at every step, or "wrong".{chosen}'
        )
        parts += picture(folder, "training")
        parts.append(training_table(result))
    return "\n\n".join(parts) or NOWHERE
