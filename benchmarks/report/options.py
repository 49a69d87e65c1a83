"""The tables of what options and mixed lengths cost."""

from __future__ import annotations

import itertools

import common
from cells import HIDDEN
from common import Json
from options import MEASURED, MIXED, PLAIN, REPEATS

from .tables import NO, NOWHERE, UNKNOWN, gpu_folders, provenance, select, table


def options_table(result: Json) -> str:
    """What each option costs: a ratio to the plain call, full / causal."""
    kinds = [(v, d) for v, d in MEASURED if select(result["options"], variant=v, direction=d)]
    dims = sorted({c["d"] for c in result["options"]})

    def ratio(name: str, **wanted: object) -> str:
        found = select(result["options"], **wanted)
        results = found[0]["results"].get(name, {}) if found else {}
        return f"{results['ratio']:.2f}" if "ratio" in results else NO

    columns = list(itertools.product(kinds, dims))
    rows = []
    for name, words in result["words"].items():
        cells = [
            " / ".join(
                ratio(name, variant=v, direction=direction, d=d, causal=c) for c in (False, True)
            )
            for (v, direction), d in columns
        ]
        if name != PLAIN and any(cell != f"{NO} / {NO}" for cell in cells):
            rows.append([f"{name}: {words}", *(NO if c == f"{NO} / {NO}" else c for c in cells)])
    head = [f"{variant} {direction}, d {d}" for (variant, direction), d in columns]
    return table(["option", *head], rows)


def spread(result: Json) -> float:
    """The largest distance of a ratio's range from the ratio, relative to it."""
    found = [r for c in result["options"] for r in c["results"].values() if "ratio_range" in r]
    return max((abs(x / r["ratio"] - 1) for r in found for x in r["ratio_range"]), default=0.0)


def mix_table(result: Json) -> str:
    """TFLOP/s of the mix of lengths; in brackets, over the dense call."""
    mix = [{"variant": "fa2"} | c for c in result["mix"]]  # once it was the only one
    names = list(dict.fromkeys(n for c in mix for n in c["results"]))

    def speed(found: Json) -> str:
        if "tflops" not in found:
            return NO
        return f"{found['tflops']:.0f} ({found.get('over_dense', float('nan')):.2f})"

    rows = [
        [f"{variant} {direction}, d {c['d']}, {'causal' if c['causal'] else 'full'}",
         *(speed(c["results"].get(name, {})) for name in names)]
        for variant, direction in MIXED
        for c in select(mix, variant=variant, direction=direction)
    ]  # fmt: skip
    return table(["TFLOP/s (over dense)", *names], rows)


def deterministic_table(result: Json) -> str:
    """TFLOP/s of backward calls that repeat bit by bit; in brackets, over the usual call's time."""
    cells = result["deterministic"]
    names = [n for n in dict.fromkeys(n for c in cells for n in c["results"])]
    usual = [n for n in names if not n.endswith(REPEATS)]

    def entry(cell: Json, name: str) -> str:
        found = cell["results"].get(name + REPEATS, {})
        if "tflops" not in found:
            return "refused" if "skipped" in found else NO
        return f"{found['tflops']:.0f} ({found.get('ratio', float('nan')):.2f})"

    rows = [
        [f"d {c['d']}, {'causal' if c['causal'] else 'full'}", *(entry(c, n) for n in usual)]
        for c in cells
    ]
    return table(["TFLOP/s (time over the usual)", *usual], rows)


def options_section() -> str:
    """The tables of what options and mixed lengths cost, one part per GPU."""
    parts = []
    for folder in gpu_folders("options"):
        result = common.read_json(folder / "options.json")
        if result is None:
            parts.append(f"{folder.name}: {UNKNOWN}.")
            continue
        parts.append(f"{result['device']}: {provenance(result)}.")
        if result["incomplete"]:
            parts.append("The run ended before all was measured.")
        if result["options"]:
            parts.append(
                f"Time over that of the plain call, full / causal: {result['dtype']}, B"
                f" {result['batch']}, S {result['seqlen']}, {result['heads']} heads; quartiles"
                f" within {spread(result):.1%} of the ratio."
            )
            parts.append(options_table(result))
        if result.get("deterministic"):
            parts.append(
                "Backward calls that repeat bit by bit, of the same shapes; SDPA's backends under"
                " torch.use_deterministic_algorithms."
            )
            parts.append(deterministic_table(result))
        if result["mix"]:
            parts.append(
                f"Packed self-attention, {len(result['lengths'])} sequences of"
                f" {min(result['lengths'])} to {max(result['lengths'])} tokens,"
                f" {result['tokens']} in all, {HIDDEN} // d heads; torch's varlen_attn beside them,"
                f" where this torch has it. Dense: B {result['dense_batch']}, S"
                f" {result['dense_seqlen']}, about as many FLOPs."
            )
            parts.append(mix_table(result))
    return "\n\n".join(parts) or NOWHERE
