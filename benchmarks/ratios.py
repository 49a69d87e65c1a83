"""How many times as fast one provider is as another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from common import Json
from providers import BEST, BEST_OF, VARIANTS


def geometric_mean(values: list[float]) -> float:
    """The geometric mean; NaN if there is nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(cells: Iterable[Json], ours: str, peer: str) -> list[float]:
    """How many times faster ``ours`` is than ``peer``: ratios of medians, cell by cell."""
    pairs = [(c["providers"].get(ours, {}), c["providers"].get(peer, {})) for c in cells]
    return [b["ms"] / a["ms"] for a, b in pairs if "ms" in a and "ms" in b]


def ratio_spread(cell: Json, ours: str, peer: str) -> float | None:
    """How far the quartiles of both move a cell's ratio, relative to it; None without a ratio."""
    if not (ratio := ratios([cell], ours, peer)):
        return None
    a, b = cell["providers"][ours], cell["providers"][peer]
    low = b.get("q1_ms", b["ms"]) / a.get("q3_ms", a["ms"])
    high = b.get("q3_ms", b["ms"]) / a.get("q1_ms", a["ms"])
    return max(abs(edge / ratio[0] - 1) for edge in (low, high))


def fastest(cell: Json, names: Iterable[str]) -> Json | None:
    """The result of the fastest of these that ran a cell, with its name as "of"."""
    found = [
        cell["providers"][n] | {"of": n} for n in names if "ms" in cell["providers"].get(n, {})
    ]
    return min(found, key=lambda r: r["ms"]) if found else None


def with_best(cell: Json) -> Json:
    """The cell with the best peer among its providers: the faster of cuDNN and flash-attn 4, where
    both were measured. One alone is not the best of two."""
    both = all("ms" in cell["providers"].get(n, {}) for n in BEST_OF)
    best = {BEST: fastest(cell, BEST_OF)} if both else {}
    return cell | {"providers": cell["providers"] | best}


def best_of_peers(cell: Json) -> Json | None:
    """The result of the fastest peer that ran a cell."""
    return fastest(cell, [n for n in cell["providers"] if n not in VARIANTS and n != BEST])
