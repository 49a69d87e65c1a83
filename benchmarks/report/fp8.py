"""FP8: its goals, speed beside cuDNN's and beside bfloat16, errors, and a trained model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import common
import fp8_errors
import fp8_model
from cells import FP8_SEQLENS, HIDDEN, TOKENS, fp8_cells
from common import Finding, Json
from fp8_providers import FP8_PROVIDERS
from ratios import fp8_findings, geometric_mean, ratios

import flash_ext

from .goals import OPEN, verdict
from .tables import NO, NOWHERE, UNKNOWN, gpu_folders, provenance, table

OURS = FP8_PROVIDERS[0].name
PEER = "bf16_peer"  # the fastest in bfloat16 that is not ours, cell by cell
ROWS = {p.name: p.label for p in FP8_PROVIDERS} | {
    "fa3": "flash_ext fa3, bf16",
    PEER: "best peer, bf16",
}


def goal_rows(compare: Json | None, errors: Json | None, model: Json | None) -> Iterator[list[str]]:
    """Every goal with what was measured for it."""
    found: list[Finding] = list(fp8_findings(compare["cells"] if compare else []))
    found += fp8_errors.findings(errors) if errors else [Finding("errors of FP8", "", None)]
    found += (
        fp8_model.findings(model["models"])
        if model
        else [Finding(f"a trained GPT: loss with {fp8_model.FP8}", "", None)]
    )
    for f in found:
        judged = "" if f.reached is None else verdict(f.reached, f.why or OPEN)
        yield [f.goal, f.measured or UNKNOWN, judged]


def with_peer(cell: Json) -> Json:
    """The cell with the best peer in bfloat16 among its providers."""
    ours = {*flash_ext.VARIANTS, *(p.name for p in FP8_PROVIDERS)}
    peers = [r for name, r in cell["providers"].items() if name not in ours and "ms" in r]
    best = {PEER: min(peers, key=lambda r: r["ms"])} if peers else {}
    return cell | {"providers": cell["providers"] | best}


def dims(cell: Json) -> str:
    """A cell's head dims."""
    return f"{cell['d']}/{cell['d_v']}" if cell.get("d_v") else str(cell["d"])


def speed_table(cells: list[Json]) -> str:
    """TFLOP/s by head dim, mask and provider, and what fa3 in FP8 is over each."""
    rows = []
    for (d, causal), group in itertools.groupby(
        map(with_peer, cells), lambda c: (dims(c), c["causal"])
    ):
        same = {c["seqlen"]: c for c in group}
        for name, label in ROWS.items():
            results = [same[s]["providers"].get(name, {}) if s in same else {} for s in FP8_SEQLENS]
            if not any("ms" in r for r in results):
                continue
            values = ratios(list(same.values()), OURS, name) if name != OURS else []
            rows.append([
                f"{d} {'causal' if causal else 'full'}", label,
                *(f"{r['tflops']:.0f}" if "ms" in r else NO for r in results),
                f"{geometric_mean(values):.2f} ({min(values):.2f})" if values else NO,
            ])  # fmt: skip
    lengths = [f"S {s}" for s in FP8_SEQLENS]
    return table(["d, mask", "TFLOP/s", *lengths, "fa3 in FP8 over it"], rows, words=2)


def left_out(cells: list[Json]) -> list[str]:
    """Why there are no speeds in FP8, a line for each reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for p in FP8_PROVIDERS:
            reason = cell["providers"].get(p.name, {}).get("skipped")
            if reason:
                where.setdefault((p.label, reason), []).append(f"d {dims(cell)}")
    return [
        f"- {label}, {', '.join(dict.fromkeys(places))}: {reason.rstrip('.')}."
        for (label, reason), places in where.items()
    ]


def speed_part(compare: Json) -> list[str]:
    """The table of speeds."""
    cells = fp8_cells(compare["cells"])
    version = compare.get("versions", {}).get("cudnn_fp8")
    peer = f" nvidia-cudnn-frontend {version}." if version else ""
    reasons = left_out(cells)
    return [
        f"Speed: {provenance(compare)}.{peer} Forward, {TOKENS} tokens, {HIDDEN} // d heads,"
        " inputs quantized before, cold L2, medians; in brackets the smallest over S.",
        speed_table(cells),
        *(["Not measured:\n\n" + "\n".join(reasons)] if reasons else []),
    ]


def outlier_table(rows: list[Json]) -> str:
    """RMSE by method and size."""
    head = [f"d {r['d']}, {r['seqlen']} keys, by {r['by']}" for r in rows]
    methods = list(rows[0]["methods"])
    body = [
        [name, *(f"{r['methods'][name]['rmse']:.1e} ({r['methods'][name]['rmse_max']:.1e})"
                 for r in rows)]
        for name in methods
    ]  # fmt: skip
    return table(["RMSE, mean of seeds (worst)", *head], body)


def length_table(rows: list[Json]) -> str:
    """Relative error by number of keys."""
    keys = sorted({r["keys"] for r in rows})
    kinds = list(dict.fromkeys((r["d"], r["queries"], r["mean"]) for r in rows))
    body = []
    for kind in kinds:
        found = {r["keys"]: r["error"] for r in rows if (r["d"], r["queries"], r["mean"]) == kind}
        d, queries, mean = kind
        body.append([
            f"d {d}, {queries} queries, values of mean {mean:g}",
            *(f"{found[k]:.1e}" if k in found else NO for k in keys),
        ])  # fmt: skip
    return table(["relative error", *(f"{k} keys" for k in keys)], body)


def needle_table(rows: list[Json]) -> str:
    """Differences where one key counts."""
    body = [
        [
            f"{r['queries']} queries, {r['keys']} keys, the one at {r['where']:g}",
            f"{r['weight']:.2f}",
            f"{r['from_bf16']:.1e}",
            f"{r['from_float64']:.1e}",
        ]
        for r in rows
    ]
    return table(["one key", "weight", "from bf16", "from float64"], body)


def errors_part(numerics: Json) -> list[str]:
    """The tables of errors."""
    found, definitions = numerics["fp8"], numerics["fp8"]["definitions"]
    return [
        f"Errors: {provenance(numerics)}.",
        definitions["outliers"],
        outlier_table(found["outliers"]),
        definitions["length"],
        length_table(found["length"]),
        definitions["needle"],
        needle_table(found["needle"]),
    ]


def model_table(models: list[Json]) -> str:
    """Loss and its relative difference from bfloat16's."""

    def entry(result: Json) -> str:
        if "loss" not in result:
            return NO
        return f"{result['loss']:.4f} ({result['difference']:+.1e})"

    head = [
        f"{m['layers']} layers, {m['heads']} heads of {m['d']}, S {m['seqlen']}, {m['steps']} steps"
        for m in models
    ]
    names = dict.fromkeys(n for m in models for n in m["attentions"])
    body = [[n, *(entry(m["attentions"].get(n, {})) for m in models)] for n in names]
    return table(["loss (difference)", *head], body)


def model_part(train: Json) -> list[str]:
    """The trained models."""
    found = train["fp8"]
    return [
        f"Trained models: {provenance(train)}. {found['method']}",
        model_table(found["models"]),
    ]


def of_gpu(folder: Path) -> Iterator[str]:
    """The parts of one GPU; what was not measured is said to be so."""
    names = ("compare_fp8", "numerics", "train_fp8")
    compare, numerics, train = (common.read_json(folder / f"{name}.json") for name in names)
    device = next((r["device"] for r in (compare, numerics, train) if r), folder.name)
    errors, model = ((r or {}).get("fp8") for r in (numerics, train))
    rows = list(goal_rows(compare, errors, model))
    yield table([f"goal, {device}", "measured", ""], rows, words=3)
    if compare:
        yield from speed_part(compare)
    if numerics and errors:
        yield from errors_part(numerics)
    if train and model:
        yield from model_part(train)


def fp8_section() -> str:
    """All of it, one part per GPU."""
    parts = [part for folder in gpu_folders("*fp8*") for part in of_gpu(folder)]
    return "\n\n".join(parts) or NOWHERE
