"""How many times as fast one provider is as another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cells import on_grid
from common import Json
from providers import BEST, BEST_OF, VARIANTS


def geometric_mean(values: list[float]) -> float:
    """The geometric mean; NaN if there is nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(cells: Iterable[Json], ours: str, peer: str) -> list[float]:
    """How many times faster ``ours`` is than ``peer``: ratios of medians, cell by cell."""
    pairs = [(c["providers"].get(ours, {}), c["providers"].get(peer, {})) for c in cells]
    return [b["ms"] / a["ms"] for a, b in pairs if "ms" in a and "ms" in b]


def recorded_note(cells: list[Json], ours: str, peer: str) -> str:
    """How many of the ratios are against a recorded one, to end a phrase with; "" if none is."""
    found = [c["providers"][peer] for c in cells if ratios([c], ours, peer)]
    recorded = sum("recorded" in r for r in found)
    return f", {recorded} of {len(found)} cells against a recorded ratio" if recorded else ""


def ratio_spread(cell: Json, ours: str, peer: str) -> float | None:
    """How far the quartiles of both move a cell's ratio, relative to it; None without a ratio."""
    if not (ratio := ratios([cell], ours, peer)):
        return None
    a, b = cell["providers"][ours], cell["providers"][peer]
    low = b.get("q1_ms", b["ms"]) / a.get("q3_ms", a["ms"])
    high = b.get("q3_ms", b["ms"]) / a.get("q1_ms", a["ms"])
    return max(abs(edge / ratio[0] - 1) for edge in (low, high))


def best_peer(providers: Json, recorded_ratio: float | None) -> Json | None:
    """The faster of cuDNN and flash-attn 4 in one cell's results.

    If flash-attn 4 was not measured, its time is cuDNN's over ``recorded_ratio``, and the result
    says so; without that ratio the best is unknown.
    """
    found = {n: providers[n] for n in BEST_OF if "ms" in providers.get(n, {})}
    found = {n: {"ms": r["ms"], "tflops": r["tflops"], "of": n} for n, r in found.items()}
    if "cudnn" in found and "flash_attn_4" not in found and recorded_ratio is not None:
        cudnn = found["cudnn"]
        found["flash_attn_4"] = {
            "ms": round(cudnn["ms"] / recorded_ratio, 6),
            "tflops": round(cudnn["tflops"] * recorded_ratio, 4),
            "of": "flash_attn_4",
            "recorded": True,
        }
    return min(found.values(), key=lambda r: r["ms"]) if len(found) == len(BEST_OF) else None


def with_best(cells: list[Json], recorded: Json | None) -> list[Json]:
    """The cells with the best peer among their providers; ``recorded`` is recorded_peers.json."""
    names = ("direction", "d", "causal", "seqlen")
    found = {tuple(r[n] for n in names): r["ratio"] for r in (recorded or {"ratios": ()})["ratios"]}

    def one(cell: Json) -> Json:
        same = tuple(cell[n] for n in names)
        ratio = found.get(same) if cell["dtype"] == "bf16" and on_grid(cell) else None
        best = best_peer(cell["providers"], ratio)
        return cell | {"providers": cell["providers"] | ({BEST: best} if best else {})}

    return [one(cell) for cell in cells]


def best_of_peers(cell: Json) -> Json | None:
    """The result of the fastest peer that ran a cell, with its name as "of"."""
    found = [r | {"of": name} for name, r in cell["providers"].items()
             if name not in VARIANTS and name != BEST and "ms" in r]  # fmt: skip
    return min(found, key=lambda r: r["ms"]) if found else None
