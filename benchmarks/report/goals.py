"""The goals for speed and memory, with what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from cells import SEQLENS, is_plain, standard_cells
from common import Json
from providers import BEST, BEST_LABEL
from ratios import GOALS, GRID, Goal, geometric_mean, ratios, recorded_note

import flash_ext

from .tables import UNKNOWN, select

# TFLOP/s that fa3 must reach at S 16384, by direction, head dim and causal.
FA3_SPEEDS = {
    ("forward", 64, False): 560, ("forward", 128, False): 700, ("forward", 256, False): 780,
    ("forward", 128, True): 680,
    ("backward", 64, False): 560, ("backward", 128, False): 650, ("backward", 256, False): 520,
    ("backward", 128, True): 620,
}  # fmt: skip

# Where a goal is not reached, why: ours to judge, the numbers are not.
FULL = "supposed, not measured: fa1 leaves few SMs idle where B·H is near their number"
MATMULS = (
    "supposed, not measured: without a mask cuBLAS uses wgmma, fa1 mma.sync and one matmul more,"
    " and its dQ passes through HBM in float32"
)
FA3_BACKWARD = (
    "at d 128 each consumer waits for itself between its matmuls"
    " ([note 010](notes/010-fa3-backward.md#between-the-matmuls))"
)
FA3_FORWARD = (
    "with 512 tokens more than half of the time is that of the bytes, and the"
    " consumers wait for loads ([note 022](notes/022-short-sequences.md))"
)
OPEN = "the reason is not known yet"
REASONS = {("fa3", "forward"): FA3_FORWARD, ("fa3", "backward"): FA3_BACKWARD}


def verdict(reached: bool, why: str = OPEN) -> str:
    """The last column of a goal."""
    return "holds" if reached else f"**not reached**: {why}"


def sm_clock(cell: Json) -> float:
    """In MHz, the median while the cell was measured; 0 if it is not known."""
    return (cell.get("gpu") or {}).get("sm_mhz") or 0.0


def slow_clock(cell: Json, cells: list[Json]) -> str:
    """Why a cell is slow, if its GPU's clock says it."""
    clock, highest = sm_clock(cell), max(map(sm_clock, cells))
    if not 0 < clock < 0.98 * highest:
        return OPEN
    return f"the SM clock was {clock:,.0f} MHz, in other cells up to {highest:,.0f}"


def goal_rows(goal: Goal, cells: list[Json], names: dict[str, str]) -> list[list[str]]:
    """A goal of each cell of the standard grid, and of their mean; of a part of the grid there is
    no verdict."""
    text = f"{goal.ours} over {names[goal.peer]}, {goal.direction}"
    every = f"{text}, every cell of the grid: at least {goal.least:g}×"
    found = standard_cells(cells, goal.direction)
    values = ratios(found, goal.ours, goal.peer)
    if not values:
        return [[every, UNKNOWN, ""]]
    note = recorded_note(found, goal.ours, goal.peer)
    whole = len(values) == GRID
    why = REASONS.get((goal.ours, goal.direction), OPEN)
    reached, mean = sum(v >= goal.least for v in values), geometric_mean(values)
    return [
        [
            every,
            f"{min(values):.2f}× – {max(values):.2f}×, {reached} of {len(values)} cells{note}",
            verdict(reached == len(values), why) if whole else "",
        ],
        [
            f"{text}, geometric mean: at least {goal.mean:g}×",
            f"{mean:.2f}×, over {len(values)} cells{note}",
            verdict(mean >= goal.mean, why) if whole else "",
        ],
    ]


def rows(compare: Json | None, memory: Json | None) -> Iterator[list[str]]:
    """The table's rows."""
    cells = compare["cells"] if compare else []
    plain = [c for c in select(cells, dtype="bf16") if is_plain(c)]
    names = (compare or {}).get("labels", {}) | {BEST: BEST_LABEL, "flash": "SDPA flash"}

    def claim(
        text: str, cells: list[Json], ours: str, peer: str, least: float, why: str
    ) -> list[str]:
        values = ratios(cells, ours, peer)
        if not values:
            return [f"{text} {least:g}×", UNKNOWN, ""]
        spread = f"{min(values):.2f}× – {max(values):.2f}×, in {len(values)} cells"
        return [f"{text} {least:g}×", spread, verdict(min(values) >= least, why)]

    for goal in GOALS:
        yield from goal_rows(goal, cells, names)
    for (direction, d, causal), least in FA3_SPEEDS.items():
        longest = select(standard_cells(cells, direction), seqlen=max(SEQLENS))
        measured = [c for c in select(longest, d=d, causal=causal)
                    if c["providers"].get("fa3", {}).get("tflops")]  # fmt: skip
        text = f"fa3, {direction}, d {d} {'causal' if causal else 'full'}, S {max(SEQLENS)}"
        text = f"{text}: at least {least} TFLOP/s"
        if not measured:
            yield [text, UNKNOWN, ""]
            continue
        speed = measured[0]["providers"]["fa3"]["tflops"]
        yield [text, f"{speed:.0f}", verdict(speed >= least, slow_clock(measured[0], cells))]
    for direction in ("forward", "backward"):
        wide = select(plain, direction=direction, d=128, seqlen=(1024, 2048))
        yield claim(
            f"fa1 over standard attention, {direction}, d 128, S 1024–2048, B·H ≥ 132: at least",
            [c for c in wide if c["batch"] * c["heads"] >= 132],
            "fa1", "standard", 1.5, MATMULS,
        )  # fmt: skip
    for direction in ("forward", "backward"):
        yield claim(
            f"fa2 over fa1, {direction}, S ≥ 4096: at least",
            [c for c in standard_cells(cells, direction) if c["seqlen"] >= 4096],
            "fa2", "fa1", 2.0, FULL,
        )  # fmt: skip
    for name in flash_ext.VARIANTS:
        rows = (memory or {}).get("providers", {}).get(name, {})
        exponents = {d: r["exponent"] for d, r in rows.items() if "exponent" in r}
        if not memory or not exponents:
            yield [f"{name}: extra memory grows linearly in S", UNKNOWN, ""]
            continue
        limit = memory["exponent_limit"]
        linear = all(e < limit for e in exponents.values()) and not any(
            "stopped" in r for r in rows.values()
        )
        lengths = [int(s) for r in rows.values() for s in r["bytes"]]
        yield [
            f"{name}: extra memory grows linearly, exponent below {limit:g}",
            ", ".join(f"{d} S^{e:.2f}" for d, e in exponents.items())
            + f" (S {min(lengths)}–{max(lengths)})",
            verdict(linear),
        ]
