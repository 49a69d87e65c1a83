"""The papers' claims, each with its source, our figure, its conditions and the verdict.

FA1 is Dao et al. 2022 (arXiv 2205.14135), FA2 Dao 2023 (2307.08691), FA3 Shah et al. 2024
(2407.08608). A figure follows from the result files; a verdict from the figure. Where a claim does
not hold, its words say why: those are ours to judge, the numbers are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fp8_errors
from cells import fp8_cells, standard_cells
from common import Json
from fp8_providers import FP8_PROVIDERS
from ratios import geometric_mean, ratios

import flash_ext

from .tables import UNKNOWN, select, span

Results = dict[str, Json]
# Dense TFLOP/s in bf16 and fp16, of the data sheets.
PEAK = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0}
CLOSE = 0.95  # "close to" a speed
LEVEL = 1.3  # within this factor from the shortest S to the longest a bound's constant is level


@dataclass(frozen=True)
class Finding:
    """What was measured for a claim."""

    figure: str
    conditions: str
    verdict: str


Measure = Callable[[Results], Finding | None]  # None: not measured yet


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, and how it is measured here: None where that was not done yet."""

    text: str
    source: str
    measure: Measure


def judged(values: list[float], least: float, why: str) -> str:
    """Holds where all reach ``least``; partly where some do; with the reason otherwise."""
    if min(values) >= least:
        return "holds"
    if max(values) >= least:
        return f"holds partly: {why}"
    return f"not reached: {why}"


# --------------------------------------------------------------------------------------- HBM and SM
def counted(results: Results, **wanted: object) -> list[Json]:
    """Cases of io.json that have counters."""
    cases = [c for c in results.get("io", {}).get("cases", []) if "sm" in c]
    return sorted(select(cases, **wanted), key=lambda c: c["seqlen"])


def over_s(results: Results, method: str, direction: str) -> list[Json]:
    """The cases of a method over S, at head dim 64 and all heads."""
    cases = counted(results, method=method, direction=direction, d=64)
    most = max((c["heads"] for c in cases), default=0)
    return [c for c in cases if c["heads"] == most]


def hbm(case: Json) -> float:
    """Bytes between HBM and L2."""
    return float(case["hbm_read"] + case["hbm_written"])


def lengths(cases: list[Json]) -> str:
    """The conditions of cases over S."""
    ends = f"S {cases[0]['seqlen']}–{cases[-1]['seqlen']}"
    return f"bf16, d {cases[0]['d']}, {cases[0]['heads']} heads, {ends}, full"


def standard_io(results: Results) -> Finding | None:
    """HBM bytes over those of N d + N^2 elements."""
    found = {d: over_s(results, "standard", d) for d in ("forward", "backward")}
    if not all(found.values()):
        return None
    values = {d: [hbm(c) / c["theta"] for c in cases] for d, cases in found.items()}
    level = all(max(v) / min(v) <= LEVEL for v in values.values())
    figure = "; ".join(f"{d} {span(v, '')}" for d, v in values.items()) + " times that"
    return Finding(figure, lengths(found["forward"]),
                   "holds: level over S" if level else "not reached: not level over S")  # fmt: skip


def flash_io(results: Results) -> Finding | None:
    """Bytes between L2 and the SMs over those of N^2 d^2 / M elements."""
    figures, level = [], []
    cases: list[Json] = []
    for name, direction in itertools.product(flash_ext.VARIANTS, ("forward", "backward")):
        # Up to 1k the terms in N d, which the bound leaves out, are not small.
        cases = [c for c in over_s(results, name, direction) if c["seqlen"] > 1024]
        by_tile: dict[int, list[float]] = {}
        for c in cases:
            by_tile.setdefault(c["shared_bytes"], []).append(c["sm"] / c["theta"])
        if not by_tile:
            return None
        level += [max(v) / min(v) <= LEVEL for v in by_tile.values()]
        figures.append(f"{name} {direction} " + ", ".join(span(v, "") for v in by_tile.values()))
    return Finding(
        "; ".join(figures) + " times that",
        lengths(cases) + "; one range for each tile size",
        "holds, between L2 and the SMs: level over S" if all(level) else "not reached: not level",
    )


def hbm_saved(method: str, least: float, why: str) -> Measure:
    """How many times fewer bytes of HBM than standard attention, forward and backward."""

    def measure(results: Results) -> Finding | None:
        by_heads: dict[int, list[float]] = {}
        for c in counted(results, method=method):
            same = {k: c[k] for k in ("direction", "seqlen", "d", "heads")}
            by_heads.setdefault(c["heads"], []).extend(
                hbm(s) / hbm(c) for s in counted(results, method="standard", **same)
            )
        values = [v for ratios in by_heads.values() for v in ratios]
        if not values:
            return None
        figure = "; ".join(f"{span(v)} with {h} heads" for h, v in sorted(by_heads.items()))
        conditions = f"{method}, forward and backward, bf16, d 64–256"
        return Finding(figure, conditions, judged(values, least, why))

    return measure


def l2_catches(results: Results) -> Finding | None:
    """HBM bytes over L2-to-SM bytes of fa1 with few heads and with many."""
    cases = counted(results, method="fa1", direction="forward", d=64)
    few = min((c["heads"] for c in cases), default=0)
    pairs = [
        (c, many) for c in cases if c["heads"] == few
        for many in cases if many["heads"] > few and many["seqlen"] == c["seqlen"]
    ]  # fmt: skip
    if not pairs:
        return None
    small, large = pairs[0]
    shares = [hbm(c) / c["sm"] for c in (small, large)]
    return Finding(
        f"{shares[0]:.0%} of fa1's traffic reaches HBM with {small['heads']} heads, "
        f"{shares[1]:.0%} with {large['heads']}",
        f"forward, d 64, S {small['seqlen']}; L2 of {results['io']['l2_bytes'] / 1e6:.0f} MB",
        "holds where O does not fit L2" if shares[0] < 0.5 < shares[1] else "not reached",
    )


def larger_tiles(results: Results) -> Finding | None:
    """fa3 with Q tiles of two sizes, at the same S: counted and predicted."""
    small = counted(results, method="fa3, 128 rows")
    large = [
        c
        for s in small
        for c in counted(results, method="fa3", direction="forward",
                         **{k: s[k] for k in ("seqlen", "d", "heads")})
    ]  # fmt: skip
    if not large or large[0]["model"] == small[0]["model"]:
        return None
    got, want = (small[0][k] / large[0][k] for k in ("sm", "model"))
    return Finding(
        f"{got:.2f}× the bytes with smaller Q tiles; by the loops {want:.2f}×",
        f"fa3, forward, d {small[0]['d']}, S {small[0]['seqlen']}, between L2 and the SMs",
        "holds" if abs(got / want - 1) < 0.05 else "not reached: other bytes than predicted",
    )


def memory_bound(results: Results) -> Finding | None:
    """The share of a copy's bandwidth that standard attention uses."""
    values = {
        d: [hbm(c) / c["ms"] * 1e-9 / results["io"]["ceilings"]["copy_tbps"]
            for c in over_s(results, "standard", d)]
        for d in ("forward", "backward")
    } if counted(results) else {}  # fmt: skip
    if not values:
        return None
    figure = "; ".join(f"{d} {span([100 * x for x in v], ' %', 2)}" for d, v in values.items())
    return Finding(
        figure + " of a copy's speed",
        lengths(over_s(results, "standard", "forward")),
        judged([min(v) for v in values.values()], 0.7,
               "the softmax between the matmuls does not read as fast as a copy"),
    )  # fmt: skip


def speed_over_standard(method: str, least: float, why: str, direction: str = "forward") -> Measure:
    """Times over standard attention's, from io.json's unprofiled calls."""

    def measure(results: Results) -> Finding | None:
        cases = counted(results, method=method, direction=direction)
        cases = [c for c in cases if c["heads"] == max(x["heads"] for x in cases)]
        values = [
            s["ms"] / c["ms"]
            for c in cases
            for s in counted(results, method="standard",
                             **{k: c[k] for k in ("direction", "seqlen", "d", "heads")})
        ]  # fmt: skip
        if not values:
            return None
        sizes, dims = ({c[key] for c in cases} for key in ("seqlen", "d"))
        conditions = (
            f"{direction}, bf16, d {min(dims)}–{max(dims)}, S {min(sizes)}–{max(sizes)},"
            f" {cases[0]['heads']} heads, full"
        )
        return Finding(f"{method} {span(values)}", conditions, judged(values, least, why))

    return measure


def few_heads(results: Results) -> Finding | None:
    """fa2 over fa1 with few heads and with many, at the same S."""
    found: dict[int, dict[str, float]] = {}
    for method in ("fa1", "fa2"):
        for c in counted(results, method=method, direction="forward", d=64):
            if c["seqlen"] == 4096:
                found.setdefault(c["heads"], {})[method] = c["ms"]
    values = {h: t["fa1"] / t["fa2"] for h, t in sorted(found.items()) if len(t) == 2}
    if len(values) < 2:
        return None
    few, many = list(values.values())[0], list(values.values())[-1]
    figure = ", ".join(f"{v:.1f}× with {h} heads" for h, v in values.items())
    return Finding(f"fa2 over fa1: {figure}", "forward, d 64, S 4096, batch 1",
                   "holds" if few > 2 * many else "not reached")  # fmt: skip


# ------------------------------------------------------------------------------------------ memory
def linear_memory(results: Results) -> Finding | None:
    """Exponents of growth."""
    memory = results.get("memory")
    if memory is None:
        return None
    found = {
        name: [r["exponent"] for r in rows.values() if "exponent" in r]
        for name, rows in memory["providers"].items()
        if name in (*flash_ext.VARIANTS, "standard")
    }
    ours = [e for name, values in found.items() if name != "standard" for e in values]
    figure = ", ".join(f"{name} S^{span(v, '')}" for name, v in found.items() if v)
    holds = ours and max(ours) < memory["exponent_limit"]
    return Finding(figure, memory_conditions(memory), "holds" if holds else "not reached")


def memory_conditions(memory: Json) -> str:
    """The shape of memory.json."""
    shape = memory["shape"]
    mask = "causal" if shape["causal"] else "full"
    return f"batch {shape['batch']}, {shape['heads']} heads of {shape['d']}, {mask}"


def memory_saved(seqlen: int, least: float) -> Measure:
    """Standard attention's memory over each variant's, forward and backward together."""

    def measure(results: Results) -> Finding | None:
        memory = results.get("memory")
        if memory is None:
            return None
        size = {n: r["both"]["bytes"].get(str(seqlen)) for n, r in memory["providers"].items()}
        base = size.get("standard")
        values = {n: base / size[n] for n in flash_ext.VARIANTS if base and size.get(n)}
        if not values:
            return None
        figure = ", ".join(f"{n} {v:.1f}×" for n, v in values.items())
        conditions = f"S {seqlen}, forward and backward, {memory_conditions(memory)}"
        return Finding(figure, conditions, judged(list(values.values()), least,
                                                  "dq is summed in float32"))  # fmt: skip

    return measure


def memory_by_length(results: Results) -> Finding | None:
    """The forward's memory, standard attention's over the variants'."""
    memory = results.get("memory")
    if memory is None:
        return None
    size = {n: r["forward"]["bytes"] for n, r in memory["providers"].items()}
    wanted = {"1024": 15, "2048": 30, "4096": 63, "8192": 126}
    found: dict[str, list[float]] = {
        n: [size["standard"][s] / size[n][s] for s in wanted]
        for n in flash_ext.VARIANTS
        if set(wanted) <= set(size.get(n, {})) & set(size.get("standard", {}))
    }
    if not found:
        return None
    reached = [n for n, v in found.items()
               if all(x >= w for x, w in zip(v, wanted.values(), strict=True))]  # fmt: skip
    figure = "; ".join(f"{n} " + ", ".join(f"{x:.0f}×" for x in v) for n, v in found.items())
    verdict = "holds" if len(reached) == len(found) else (
        f"holds partly: {' and '.join(reached)}; fa1 also keeps O in float32" if reached
        else "not reached: outputs count too"
    )  # fmt: skip
    return Finding(figure, f"forward, {memory_conditions(memory)}", verdict)


# Why a variant ran no longer than standard attention.
SHORT = {"slow": "was not tried where a call takes seconds", "stopped": "ran out of memory too"}


def standard_stops(results: Results) -> Finding | None:
    """Where standard attention runs out of memory, and the variants do not."""
    memory = results.get("memory")
    row = (memory or {}).get("providers", {}).get("standard", {}).get("both", {})
    if memory is None or "stopped" not in row:
        return None
    both = {n: r["both"] for n, r in memory["providers"].items()}
    ran = {n: max(map(int, r["bytes"]), default=0) for n, r in both.items()}  # 0: at no length
    ours = {n: ran[n] for n in flash_ext.VARIANTS if n in ran}
    stop = ran["standard"]
    short = [n for n, longest in ours.items() if longest <= stop]
    why = next((words for end, words in SHORT.items() if all(end in both[n] for n in short)),
               "did not run longer")  # fmt: skip
    figure = f"standard attention {f'runs up to S {stop}' if stop else 'did not run'}; "
    figure += ", ".join(f"{n} ran at {s}" if s else f"{n} did not run" for n, s in ours.items())
    return Finding(figure, f"forward and backward, {memory_conditions(memory)}",
                   judged([longest > stop for longest in ours.values()], 1,
                          f"{' and '.join(short)} {why}"))  # fmt: skip


# ---------------------------------------------------------------------------------------- numerics
def numerics_pairs(results: Results) -> Iterator[tuple[Json, str, float, float]]:
    """(cell, variant, its largest error over standard's of a tensor, its error)."""
    for c in results.get("numerics", {}).get("cells", []):
        for name in flash_ext.VARIANTS:
            for tensor in ("out", "dq", "dk", "dv"):
                mine = c["providers"].get(name, {}).get(tensor, {})
                reference = c["providers"].get("standard", {}).get(tensor, {})
                # A reference that is all NaN, or exact, has no ratio.
                if mine and reference.get("rms"):
                    error = math.inf if "finite" in mine else mine["rms"]
                    yield c, name, error / reference["rms"], error


def exact(results: Results) -> Finding | None:
    """RMS errors against float64, over those of standard attention in the same type."""
    values = [ratio for *_, ratio, _ in numerics_pairs(results)]
    if not values:
        return None
    return Finding(
        f"RMS error {span(values)} that of standard attention in the same type",
        f"{numerics_conditions(results)}; out and all gradients, {len(values)} pairs",
        "holds" if max(values) <= 1 else judged([1 / max(values)], 0.5, "see docs/walkthrough.md"),
    )


def numerics_conditions(results: Results) -> str:
    """What numerics.json spans."""
    cells = results["numerics"]["cells"]
    dtypes, sizes, kinds = ({c[k] for c in cells} for k in ("dtype", "seqlen", "distribution"))
    return (
        f"{' and '.join(sorted(dtypes))}, d {results['numerics']['d']},"
        f" S {min(sizes)}–{max(sizes)}, {len(kinds)} distributions, both masks"
    )


def stable(results: Results) -> Finding | None:
    """Whether every result is finite where the naive form is not."""
    cells = results.get("numerics", {}).get("cells", [])
    broken = [c for c in cells if "finite" in c["providers"].get("naive", {}).get("out", {})]
    if not broken:
        return None
    bad = sum(
        "finite" in tensor
        for c in broken
        for name in flash_ext.VARIANTS
        for tensor in c["providers"].get(name, {}).values()
    )
    kinds = sorted({c["distribution"] for c in broken})
    return Finding(
        f"the naive form gives NaN in {len(broken)} of {len(cells)} cells, the variants in {bad}",
        f"{', '.join(kinds)}",
        "holds" if bad == 0 else "not reached: a result that is no number",
    )


# ------------------------------------------------------------------------------------------- speed
def measured_grid(results: Results, ours: str, direction: str, peer: str = "") -> Json:
    """The last run that has the standard grid of a variant, and of a peer; {} where none has."""
    for name in ("compare", "compare_full"):
        run: Json = results.get(name, {})
        found = standard_cells(run.get("cells", []), direction)
        if any({ours, peer or ours} <= {n for n, r in c["providers"].items() if "ms" in r}
               for c in found):  # fmt: skip
            return run
    return {}


def over(ours: str, peer: str, direction: str, least: float, others: str) -> Measure:
    """Ratios on the standard grid."""

    def measure(results: Results) -> Finding | None:
        run = measured_grid(results, ours, direction, peer)
        cells = standard_cells(run.get("cells", []), direction)
        values = ratios(cells, ours, peer)
        if not values:
            return None
        reached = sum(v >= least for v in values)
        figure = f"{span(values)}, geometric mean {geometric_mean(values):.2f}×"
        verdict = "holds" if reached == len(values) else (
            f"holds partly: {reached} of {len(values)} cells reach {least:g}×{others}" if reached
            else "not reached: in no cell"
        )  # fmt: skip
        return Finding(figure, f"standard grid, {direction}, {len(values)} cells", verdict)

    return measure


def of_peak(ours: str, direction: str, least: float, why: str) -> Measure:
    """The best speed on the standard grid over the data sheet's."""

    def measure(results: Results) -> Finding | None:
        run = measured_grid(results, ours, direction)
        peak = PEAK.get(run.get("device", ""))
        found = [
            (c["providers"][ours]["tflops"], c)
            for c in standard_cells(run.get("cells", []), direction)
            if "tflops" in c["providers"].get(ours, {})
        ]
        if not peak or not found:
            return None
        best, c = max(found, key=lambda f: f[0])
        where = f"{direction}, d {c['d']}, S {c['seqlen']}, {'causal' if c['causal'] else 'full'}"
        return Finding(f"{best:.0f} TFLOP/s, {best / peak:.0%} of {peak:.0f}", where,
                       judged([best / peak], least, why))  # fmt: skip

    return measure


def recomputation(results: Results) -> Finding | None:
    """fa1's backward, which recomputes S and P, over standard attention's, which reads them."""
    return speed_over_standard("fa1", 1.0, WIDE_O, "backward")(results)


# ---------------------------------------------------------------------------------------- training
def training(model: str, least: float, why: str) -> Measure:
    """Steps with the fastest variant over steps with standard attention."""

    def measure(results: Results) -> Finding | None:
        values, where = [], []
        for c in results.get("train", {}).get("cells", []):
            if c["model"] != model or (model == "small" and c["seqlen"] != 1024):
                continue
            speeds = {n: r["tokens_per_second"] for n, r in c["providers"].items()
                      if "tokens_per_second" in r}  # fmt: skip
            mine = [speeds[n] for n in flash_ext.VARIANTS if n in speeds]
            if mine and "standard" in speeds:
                values.append(max(mine) / speeds["standard"])
                where.append(str(c["seqlen"]))
        if not values:
            return None
        return Finding(span(values), f"{model}, S {', '.join(where)}, the fastest variant",
                       judged(values, least, why))  # fmt: skip

    return measure


def fp8_speed(results: Results) -> Finding | None:
    """The fastest forward in FP8."""
    name = FP8_PROVIDERS[0].name
    found = [
        (c["providers"][name]["tflops"], c)
        for c in fp8_cells(results.get("compare_fp8", {}).get("cells", []))
        if "tflops" in c["providers"].get(name, {})
    ]
    if not found:
        return None
    best, c = max(found, key=lambda f: f[0])
    where = f"forward, d {c['d']}, S {c['seqlen']}, {'causal' if c['causal'] else 'full'}"
    why = "[note 016](notes/016-fp8.md)"
    return Finding(f"{best:.0f} TFLOP/s", where, judged([best], CLOSE * 1200, why))


def fp8_error(results: Results) -> Finding | None:
    """RMSE with one scale per tensor over that of flash_ext.fp8.attention."""
    rows = fp8_errors.with_ours(results.get("numerics", {}).get("fp8", {}).get("outliers", []))
    if not rows:
        return None
    values = [fp8_errors.gain(row) for row in rows]
    figure = ", ".join(f"{v:.2f}×" for v in values)
    where = "; ".join(f"d {r['d']}, {r['seqlen']} keys" for r in rows)
    return Finding(figure, where, judged(values, fp8_errors.GAIN, fp8_errors.SHAPE))


WIDE_O = "its O, m and l pass through HBM in float32 at every step, where O does not fit L2"
MMA = "mma.sync, which FA2 is made of, reaches some two thirds of a Hopper GPU's matmul speed"
MODELS_DIFFER = (
    "the papers' baselines run masks, dropout and softmax as kernels of their own on an A100; here"
    " the H200 moves twice the bytes, standard attention is leaner, attention's share is smaller,"
    " and the smallest models wait for the CPU"
)

CLAIMS = (
    Claim("standard attention moves Θ(Nd + N²) elements through HBM", "FA1, theorem 2",
          standard_io),
    Claim("FlashAttention moves Θ(N²d²/M) elements, M the on-chip memory", "FA1, theorem 2",
          flash_io),
    Claim("up to 9× fewer bytes of HBM than standard attention", "FA1, figure 2",
          hbm_saved("fa1", 9, WIDE_O)),
    Claim("the same, of FA2", "FA2, §3.1", hbm_saved("fa2", 9, "short sequences")),
    Claim("on-chip reuse decides over HBM traffic", "FA1, §3.2", l2_catches),
    Claim("larger tiles, fewer bytes", "FA1, §4.1 and figure 2", larger_tiles),
    Claim("standard attention is bound by memory, not by arithmetic", "FA1, §2.1", memory_bound),
    Claim("extra memory O(N), standard attention's O(N²)", "FA1, theorem 1", linear_memory),
    Claim("10× less memory at S 2k", "FA1, §1", memory_saved(2048, 10)),
    Claim("20× less memory at S 4k", "FA1, §4.3", memory_saved(4096, 20)),
    Claim("15×, 30×, 63× and 126× less at S 1k, 2k, 4k and 8k: N² elements over Nd",
          "FA1, theorem 1, worked out", memory_by_length),
    Claim("runs at S 64k, where standard attention runs out of memory", "FA1, §4.3",
          standard_stops),
    Claim("exact: no approximation", "FA1, theorem 1", exact),
    Claim("online softmax is as stable as the safe one", "Milakov and Gimelshein 2018", stable),
    Claim("2–4× as fast as standard attention", "FA1, §4.3", speed_over_standard("fa1", 2, WIDE_O)),
    Claim("recomputing S and P makes the backward pass faster, in spite of more FLOPs",
          "FA1, §3.1", recomputation),
    Claim("recomputation itself costs less than 5 % of the time", "FA1, §3.1",
          lambda _: Finding("–", "–", "not measured: it cannot be switched off; the row above has"
                            " the whole")),
    Claim("30–50 % of peak forward (A100)", "FA2, §1", of_peak("fa1", "forward", 0.30, MMA)),
    Claim("25–35 % of peak backward (A100)", "FA2, §1", of_peak("fa1", "backward", 0.25, MMA)),
    Claim("FA2 about 2× as fast as FA1, forward", "FA2, §4.1",
          over("fa2", "fa1", "forward", 2, ", those where many heads fill the GPU for fa1 do not")),
    Claim("FA2 about 2× as fast as FA1, backward", "FA2, §4.1",
          over("fa2", "fa1", "backward", 2, ", those where many heads fill the GPU do not")),
    Claim("parallel over the sequence: faster where heads are few", "FA2, §3.2", few_heads),
    Claim("FA2 up to 9× as fast as standard attention", "FA2, §4.1",
          speed_over_standard("fa2", 9, MMA)),
    Claim("FA2 at 73 % of peak forward (A100)", "FA2, §4.1", of_peak("fa2", "forward", 0.73, MMA)),
    Claim("FA3 1.5–2.0× as fast as FA2, forward", "FA3, §4.1",
          over("fa3", "fa2", "forward", 1.5, ", the shortest S do not")),
    Claim("FA3 1.5–1.75× as fast as FA2, backward", "FA3, §4.1",
          over("fa3", "fa2", "backward", 1.5, ", the shortest S do not")),
    Claim("FA3 at 740 TFLOP/s, 75 % of peak (H100)", "FA3, §4.1",
          of_peak("fa3", "forward", 0.75, "see the roofline")),
    Claim("FP8 close to 1.2 PFLOP/s", "FA3, §4.1", fp8_speed),
    Claim("FP8 with 2.6× lower error by blocks and incoherent processing", "FA3, §4.3", fp8_error),
    Claim("GPT-2 trains 3× as fast (S 1k)", "FA1, §4.1", training("small", 3, MODELS_DIFFER)),
    Claim("BERT-large trains 15 % faster (S 512)", "FA1, §4.1",
          training("bert-large", 1.15, MODELS_DIFFER)),
    Claim("2.4× on long-range arena (S 1k–4k)", "FA1, §4.1",
          training("long-range", 2.4, MODELS_DIFFER)),
    Claim("better models: 0.7 of perplexity, 6.4 points of accuracy, by longer contexts",
          "FA1, §4.2",
          lambda _: Finding("–", "–", "not measured: the arithmetic is the same, see exact")),
)  # fmt: skip


def rows(results: Results) -> list[list[str]]:
    """The table's rows."""
    found = []
    for claim in CLAIMS:
        finding = claim.measure(results)
        parts = (finding.figure, finding.conditions, finding.verdict) if finding else (
            UNKNOWN, "", UNKNOWN)  # fmt: skip
        found.append([claim.text, claim.source, *parts])
    return found
