"""How many times as fast one provider is as another, and whether that reaches the goals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cells import FP8_SEQLENS, HEAD_DIMS, SEQLENS, fp8_cells, on_grid, place, standard_cells
from common import Finding, Json
from fp8_providers import FP8_PROVIDERS
from providers import BEST, VARIANTS, best_peer


@dataclass(frozen=True)
class Goal:
    """How many times as fast as a peer a variant must be on the standard grid."""

    ours: str
    peer: str
    direction: str
    least: float  # in every cell
    mean: float  # geometric


GOALS = (
    Goal("fa2", "flash", "forward", 1.0, 1.15),
    Goal("fa2", "flash", "backward", 1.0, 1.10),
    Goal("fa3", BEST, "forward", 0.98, 1.08),
    Goal("fa3", BEST, "backward", 0.98, 1.10),
)
GRID = len(HEAD_DIMS) * 2 * len(SEQLENS)  # cells of a direction


@dataclass(frozen=True)
class Fp8Goal:
    """How many times as fast as another provider fa3 in FP8 must be at a head dim."""

    d: int
    over: str
    mean: float | None = None  # geometric, over S and masks
    least: float | None = None  # in every cell
    why: str = ""  # it is not reached


SOFTMAX = (
    "a consumer's softmax takes half of its iteration, with some three exponentials in flight; and "
    "energy a FLOP is more than cuDNN's; other pipelines were tried (docs/notes/016-fp8.md)"
)
FEW_MATMULS = (
    "supposed: exponentials are as many as with 16 bits; other pipelines were slower "
    "(docs/notes/016-fp8.md)"
)
LIKE_D128 = (
    "supposed: as at d 128; the pipeline of the 16-bit kernel was not faster "
    "(docs/notes/016-fp8.md)"
)
FP8_GOALS = (
    Fp8Goal(128, "cudnn_fp8", mean=1.08, least=1.0, why=SOFTMAX),
    Fp8Goal(64, "cudnn_fp8", mean=1.15, why=FEW_MATMULS),
    Fp8Goal(64, "fa3", least=1.0, why=FEW_MATMULS),
    Fp8Goal(256, "cudnn_fp8", mean=1.08, why=LIKE_D128),
)


def geometric_mean(values: list[float]) -> float:
    """The geometric mean; NaN if there is nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(cells: list[Json], ours: str, peer: str) -> list[float]:
    """How many times faster ``ours`` is than ``peer``: ratios of medians, cell by cell."""
    pairs = [(c["providers"].get(ours, {}), c["providers"].get(peer, {})) for c in cells]
    return [b["ms"] / a["ms"] for a, b in pairs if "ms" in a and "ms" in b]


def recorded_note(cells: list[Json], ours: str, peer: str) -> str:
    """How many of the ratios are against a recorded one, to end a phrase with; "" where none is."""
    found = [c["providers"][peer] for c in cells if ratios([c], ours, peer)]
    recorded = sum("recorded" in r for r in found)
    return f", {recorded} of {len(found)} cells against a recorded ratio" if recorded else ""


def ratio_range(cell: Json, ours: str, peer: str) -> tuple[float, float]:
    """Where the quartiles of both put a cell's ratio."""
    a, b = cell["providers"][ours], cell["providers"][peer]
    return b.get("q1_ms", b["ms"]) / a.get("q3_ms", a["ms"]), b.get("q3_ms", b["ms"]) / a.get(
        "q1_ms", a["ms"]
    )


def ratio_spread(cells: list[Json], ours: str, peer: str) -> float:
    """The largest distance of a cell's range from its ratio, relative to it; NaN without cells."""
    return max(
        (
            abs(edge / ratio - 1)
            for c in cells
            for ratio in ratios([c], ours, peer)
            for edge in ratio_range(c, ours, peer)
        ),
        default=math.nan,
    )


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs that are compared: each two of our own variants once, the later over the
    earlier."""
    names = list(names)
    ours = [n for n in VARIANTS if n in names]
    return [(a, b) for a in ours for b in names if b not in ours or ours.index(b) < ours.index(a)]


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
    """The result of the fastest peer that took a cell, with its name as "of"."""
    found = [r | {"of": name} for name, r in cell["providers"].items()
             if name not in VARIANTS and name != BEST and "ms" in r]  # fmt: skip
    return min(found, key=lambda r: r["ms"]) if found else None


def summarise(cells: list[Json], names: Iterable[str]) -> list[Json]:
    """Ratios of each pair, by type, direction and head dim; d None is the standard grid's three."""
    rows = []
    dtypes = sorted({c["dtype"] for c in cells})
    kinds = itertools.product(dtypes, ("forward", "backward"), pairs_of(names))
    for dtype, direction, (ours, peer) in kinds:
        same = [c for c in cells if (c["dtype"], c["direction"]) == (dtype, direction)]
        for d in [*sorted({c["d"] for c in same}), None]:
            found = [c for c in same if c["d"] == d or (d is None and c["d"] in HEAD_DIMS)]
            values = [(r[0], c) for c in found if (r := ratios([c], ours, peer))]
            if not values:
                continue
            least, where = min(values, key=lambda v: v[0])
            rows.append({
                "ours": ours, "peer": peer, "dtype": dtype, "direction": direction, "d": d,
                "cells": len(values),
                "geometric_mean": round(geometric_mean([v for v, _ in values]), 4),
                "min": round(least, 4),
                "min_at": place(where),
                "below_1": sum(v < 1 for v, _ in values),
                "spread": round(ratio_spread([c for _, c in values], ours, peer), 4),
            })  # fmt: skip
    return rows


def verdict(goal: Goal, cells: list[Json]) -> str:
    """Whether a goal is reached on the whole standard grid, in one line."""
    found = [(r[0], c) for c in standard_cells(cells, goal.direction)
             if (r := ratios([c], goal.ours, goal.peer))]  # fmt: skip
    name = f"{goal.ours} / {goal.peer}, bf16 {goal.direction}"
    if not found:
        return f"{name}: not measured"
    values = [v for v, _ in found]
    mean, (least, where) = geometric_mean(values), min(found, key=lambda f: f[0])
    short = sum(v < goal.least for v in values)
    reached = short == 0 and mean >= goal.mean
    end = "reached" if reached else "NOT REACHED"
    return (
        f"{name}: geometric mean {mean:.3f}x"
        f" (goal {goal.mean:.2f}x), smallest {least:.3f}x ({place(where)}),"
        f" {short} of {len(found)} cells below {goal.least:g}x"
        + recorded_note([c for _, c in found], goal.ours, goal.peer)
        + f"; {end if len(found) == GRID else 'not the whole grid'}"
    )


def fp8_findings(cells: list[Json]) -> Iterator[Finding]:
    """The goals for FP8. Of a part of the set there is no verdict."""
    ours = FP8_PROVIDERS[0]
    names = {p.name: p.label for p in FP8_PROVIDERS} | {"fa3": "fa3 in bf16"}
    for goal in FP8_GOALS:
        found = [c for c in fp8_cells(cells) if c["d"] == goal.d]
        values = ratios(found, ours.name, goal.over)
        whole = len(values) == 2 * len(FP8_SEQLENS)
        text = f"fa3 in FP8 over {names[goal.over]}, d {goal.d}"
        for words, least, reduce in (
            ("geometric mean: at least", goal.mean, geometric_mean),
            ("every cell: at least", goal.least, min),
        ):
            if least is None:
                continue
            goal_text = f"{text}, {words} {least:g}×"
            if values:
                got = reduce(values)
                of = f"of {len(values)} cells, {min(values):.2f}× – {max(values):.2f}×"
                reached = got >= least if whole else None
                yield Finding(goal_text, f"{got:.2f}×, {of}", reached, goal.why)
                continue
            results = [c["providers"].get(n, {}) for c in found for n in (ours.name, goal.over)]
            reasons = [r for r in results if "skipped" in r]
            refused = next((r["skipped"] for r in reasons if r.get("refused")), None)
            if refused:
                yield Finding(goal_text, "refused", False, refused)
            else:
                yield Finding(goal_text, reasons[0]["skipped"] if reasons else "", None)
