"""The papers' claims beside our figures, and the measured parts of docs/walkthrough.md.

FA1 is Dao et al. 2022 (arXiv 2205.14135), FA2 Dao 2023 (2307.08691), FA3 Shah et al. 2024
(2407.08608). A figure follows from the results, and stands beside the conditions that it holds for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp8_errors
from cells import fp8_cells
from common import Json
from fp8_inputs import OURS
from fp8_providers import FP8_PROVIDERS
from providers import LABELS
from ratios import geometric_mean, ratios

import flash_ext

from . import figures
from .tables import NOWHERE, device_of, has_grid, load, main_gpu, mask_of, select, span, table

PEAK = 989.0  # dense TFLOP/s in bf16 and fp16, of the data sheets of an H100 and an H200
PASSES = ("forward", "backward")
VARIANTS = flash_ext.VARIANTS
Found = tuple[str, str]  # the figure, and its conditions


class NotMeasured(Exception):
    """The results that a claim needs are not there."""


class Claim:
    """One sentence of a paper, and how it is measured here: by `figure` of a folder and of what
    is given after it, which may raise NotMeasured."""

    def __init__(
        self, text: str, source: str, figure: Callable[..., Found], *given: Any, **named: Any
    ) -> None:
        self.text, self.source = text, source
        self.figure = lambda folder: figure(folder, *given, **named)

    def measure(self, folder: Path) -> Found | None:
        """None if it is not measured."""
        try:
            return self.figure(folder)
        except NotMeasured:
            return None


def some(rows: list[Json]) -> list[Json]:
    """These rows; NotMeasured if there is none."""
    if not rows:
        raise NotMeasured
    return rows


def rows_of(subject: str, folder: Path, **wanted: object) -> list[Json]:
    """The rows of a subject with these values."""
    return some(select(load(subject, folder), **wanted))


# --------------------------------------------------------------------------------------- HBM and SM
def counted(folder: Path, **wanted: object) -> list[Json]:
    """Cases of io.py, by S."""
    cases = [c for c in rows_of("io", folder, **wanted) if "sm" in c]
    return sorted(some(cases), key=lambda c: c["seqlen"])


def most_heads(folder: Path, **wanted: object) -> list[Json]:
    """Those with as many heads as any."""
    cases = counted(folder, **wanted)
    return select(cases, heads=max(c["heads"] for c in cases))


def hbm(case: Json) -> float:
    """Bytes between HBM and L2."""
    return float(case["hbm_read"] + case["hbm_written"])


def beside(folder: Path, case: Json, method: str) -> list[Json]:
    """The same case of another method."""
    same = {k: case[k] for k in ("direction", "seqlen", "d", "heads")}
    return select(load("io", folder), method=method, **same)


def lengths(cases: list[Json]) -> str:
    """The conditions of cases over S."""
    ends = f"S {cases[0]['seqlen']}–{cases[-1]['seqlen']}"
    return f"bf16, d {cases[0]['d']}, {cases[0]['heads']} heads, {ends}, full"


def over_s(
    folder: Path, value: Callable[[Json], float], words: str, unit: str = "", digits: int = 3
) -> Found:
    """A range over S of standard attention, at head dim 64 and all heads."""
    found = {d: most_heads(folder, method="standard", direction=d, d=64) for d in PASSES}
    texts = [f"{d} {span([value(c) for c in f], unit, digits)}" for d, f in found.items()]
    return "; ".join(texts) + words, lengths(found["forward"])


def of_copy(folder: Path) -> Found:
    """The share of a copy's bandwidth that standard attention uses."""
    copy = rows_of("io", folder, limits=True)[0]["copy_tbps"]

    def share(case: Json) -> float:
        return 100 * hbm(case) / case["ms"] * 1e-9 / float(copy)

    return over_s(folder, share, " of a copy's speed", " %", 2)


def flash_io(folder: Path) -> Found:
    """Bytes between L2 and the SMs over those of N^2 d^2 / M elements."""
    texts = []
    for name, direction in itertools.product(VARIANTS, PASSES):
        # Up to 1k the terms in N d, which the bound leaves out, are not small.
        cases = most_heads(folder, method=name, direction=direction, d=64)
        cases = some([c for c in cases if c["seqlen"] > 1024])
        by_tile: dict[int, list[float]] = {}
        for c in cases:
            by_tile.setdefault(c["shared_bytes"], []).append(c["sm"] / c["theta"])
        texts.append(f"{name} {direction} " + ", ".join(span(v, "") for v in by_tile.values()))
    return "; ".join(texts) + " times that", lengths(cases) + "; one range for each tile size"


def hbm_saved(folder: Path, method: str) -> Found:
    """How many times fewer bytes of HBM than standard attention, forward and backward."""
    by_heads: dict[int, list[float]] = {}
    for c in counted(folder, method=method):
        values = [hbm(s) / hbm(c) for s in beside(folder, c, "standard")]
        by_heads.setdefault(c["heads"], []).extend(values)
    texts = [f"{span(v)} with {h} heads" for h, v in sorted(by_heads.items()) if v]
    return "; ".join(texts), f"{method}, forward and backward, bf16, d 64–256"


def l2_catches(folder: Path) -> Found:
    """HBM bytes over L2-to-SM bytes of fa1 with few heads and with many."""
    cases = counted(folder, method="fa1", direction="forward", d=64)
    few = min(cases, key=lambda c: c["heads"])
    many = max(select(cases, seqlen=few["seqlen"]), key=lambda c: c["heads"])
    shares = [f"{hbm(c) / c['sm']:.0%}" for c in (few, many)]
    l2 = rows_of("io", folder, limits=True)[0]["l2_bytes"]
    return (
        f"{shares[0]} of fa1's traffic reaches HBM with {few['heads']} heads, "
        f"{shares[1]} with {many['heads']}",
        f"forward, d 64, S {few['seqlen']}; L2 of {l2 / 1e6:.0f} MB",
    )


def larger_tiles(folder: Path) -> Found:
    """fa3 with Q tiles of two sizes, at the same S: counted and predicted."""
    for small in counted(folder, method="fa3, 128 rows"):
        for large in beside(folder, small, "fa3"):
            if large["model"] != small["model"]:
                got, want = (small[k] / large[k] for k in ("sm", "model"))
                where = f"d {small['d']}, S {small['seqlen']}, between L2 and the SMs"
                return (f"{got:.2f}× the bytes with smaller Q tiles; by the loops {want:.2f}×",
                        f"fa3, forward, {where}")  # fmt: skip
    raise NotMeasured


def over_standard(folder: Path, method: str, direction: str = "forward") -> Found:
    """Standard attention's times over a variant's, from io.py's unprofiled calls."""
    cases = most_heads(folder, method=method, direction=direction)
    values = [s["ms"] / c["ms"] for c in cases for s in beside(folder, c, "standard")]
    sizes, dims = ({c[key] for c in cases} for key in ("seqlen", "d"))
    conditions = (
        f"{direction}, bf16, d {min(dims)}–{max(dims)}, S {min(sizes)}–{max(sizes)},"
        f" {cases[0]['heads']} heads, full"
    )
    return f"{method} {span(values)}", conditions


def few_heads(folder: Path) -> Found:
    """fa2 over fa1 with few heads and with many, at the same S."""
    values = [
        (c["heads"], c["ms"] / other["ms"])
        for c in counted(folder, method="fa1", direction="forward", d=64, seqlen=4096)
        for other in beside(folder, c, "fa2")
    ]
    figure = ", ".join(f"{v:.1f}× with {h} heads" for h, v in sorted(values))
    return f"fa2 over fa1: {figure}", "forward, d 64, S 4096, batch 1"


# ------------------------------------------------------------------------------------------ memory
def memory_of(folder: Path, **wanted: object) -> tuple[list[Json], str]:
    """The rows of memory.py, and the shape of its calls."""
    rows = rows_of("memory", folder, **wanted)
    r = rows[0]
    return rows, f"batch {r['batch']}, {r['heads']} heads of {r['d']}, {mask_of(r)}"


def linear_memory(folder: Path) -> Found:
    """Exponents of growth."""
    rows, shape = memory_of(folder)
    found = {
        name: [r["exponent"] for r in select(rows, provider=name) if "exponent" in r]
        for name in (*VARIANTS, "standard")
    }
    return ", ".join(f"{name} S^{span(v, '')}" for name, v in found.items() if v), shape


def memory_saved(folder: Path, direction: str, *seqlens: int, digits: int = 1) -> Found:
    """Standard attention's memory over each variant's."""
    rows, shape = memory_of(folder, direction=direction)
    size = {r["provider"]: {int(s): x for s, x in r["bytes"].items()} for r in rows}
    whole = {n: x for n, x in size.items() if x.keys() >= set(seqlens)}
    if "standard" not in whole:
        raise NotMeasured
    one = len(seqlens) == 1
    texts = [
        f"{n} " + ", ".join(f"{whole['standard'][s] / whole[n][s]:.{digits}f}×" for s in seqlens)
        for n in VARIANTS if n in whole
    ]  # fmt: skip
    words = "forward and backward" if direction == "both" else direction
    where = f"S {seqlens[0]}, " if one else ""
    return (", " if one else "; ").join(texts), f"{where}{words}, {shape}"


def standard_stops(folder: Path) -> Found:
    """The longest S at which standard attention and the variants ran."""
    rows, shape = memory_of(folder, direction="both")
    ran = {r["provider"]: max(map(int, r["bytes"]), default=0) for r in rows}
    if "standard" not in ran:
        raise NotMeasured
    ours = ", ".join(f"{n} ran at {ran[n]}" for n in VARIANTS if n in ran)
    return (f"standard attention runs up to S {ran['standard']}; {ours}",
            f"forward and backward, {shape}")  # fmt: skip


# ---------------------------------------------------------------------------------------- numerics
def numerics_of(folder: Path) -> list[Json]:
    """The cells of attention."""
    return some([c for c in load("numerics", folder) if "distribution" in c])


def exact(folder: Path) -> Found:
    """RMS errors against float64, over those of standard attention in the same type."""
    cells, values = numerics_of(folder), []
    for c, name, tensor in itertools.product(cells, VARIANTS, ("out", "dq", "dk", "dv")):
        mine, reference = (c["providers"].get(n, {}).get(tensor, {}) for n in (name, "standard"))
        if mine and reference.get("rms"):  # a reference that is all NaN, or exact, has no ratio
            values.append((math.inf if "finite" in mine else mine["rms"]) / reference["rms"])
    dtypes, sizes, kinds = ({c[k] for c in cells} for k in ("dtype", "seqlen", "distribution"))
    return (
        f"RMS error {span(values)} the error of standard attention in the same type",
        f"{' and '.join(sorted(dtypes))}, d {cells[0]['d']}, S {min(sizes)}–{max(sizes)},"
        f" {len(kinds)} distributions, both masks; out and all gradients, {len(values)} pairs",
    )


def stable(folder: Path) -> Found:
    """Whether every result is finite where the naive form is not."""
    cells = numerics_of(folder)
    broken = [c for c in cells if "finite" in c["providers"].get("naive", {}).get("out", {})]
    bad = sum("finite" in x for c in broken for n in VARIANTS
              for x in c["providers"].get(n, {}).values())  # fmt: skip
    return (
        f"the naive form gives NaN in {len(broken)} of {len(cells)} cells, the variants in {bad}",
        ", ".join(sorted({c["distribution"] for c in some(broken)})),
    )


# --------------------------------------------------------------------------- speed and training
def over(folder: Path, ours: str, peer: str, direction: str) -> Found:
    """Ratios on the standard grid."""
    values = ratios(some(has_grid(folder, direction, ours, peer)), ours, peer)
    figure = f"{span(values)}, geometric mean {geometric_mean(values):.2f}×"
    return figure, f"standard grid, {direction}, {len(values)} cells"


def fastest(cells: list[Json], name: str) -> tuple[float, str]:
    """A provider's best speed, and where that is."""
    found = some([c for c in cells if "tflops" in c["providers"].get(name, {})])
    c = max(found, key=lambda c: c["providers"][name]["tflops"])
    return c["providers"][name]["tflops"], f"d {c['d']}, S {c['seqlen']}, {mask_of(c)}"


def of_peak(folder: Path, ours: str, direction: str) -> Found:
    """The best speed on the standard grid over the data sheet's."""
    best, where = fastest(has_grid(folder, direction, ours), ours)
    return f"{best:.0f} TFLOP/s, {best / PEAK:.0%} of {PEAK:.0f}", f"{direction}, {where}"


def fp8_speed(folder: Path) -> Found:
    """The fastest forward in FP8."""
    best, where = fastest(fp8_cells(load("compare", folder)), FP8_PROVIDERS[0].name)
    return f"{best:.0f} TFLOP/s", f"forward, {where}"


def fp8_error(folder: Path) -> Found:
    """RMSE with one scale per tensor over that of flash_ext.fp8.attention."""
    rows = rows_of("fp8_errors", folder, experiment="outliers")
    rows = some([r for r in rows if OURS in r["methods"]])
    where = "; ".join(f"d {r['d']}, {r['seqlen']} keys" for r in rows)
    return ", ".join(f"{fp8_errors.gain(r):.2f}×" for r in rows), where


def training(folder: Path, model: str) -> Found:
    """Steps with the fastest variant over steps with standard attention."""
    values, where = [], []
    for c in rows_of("train", folder, model=model):
        speeds = {n: r["tokens_per_second"] for n, r in c["providers"].items()
                  if "tokens_per_second" in r}  # fmt: skip
        mine = [speeds[n] for n in VARIANTS if n in speeds]
        if mine and "standard" in speeds:
            values.append(max(mine) / speeds["standard"])
            where.append(str(c["seqlen"]))
    if not values:
        raise NotMeasured
    return span(values), f"{model}, S {', '.join(where)}, the fastest variant"


CLAIMS = (
    Claim("standard attention moves Θ(Nd + N²) elements through HBM", "FA1, theorem 2",
          over_s, lambda c: hbm(c) / c["theta"], " times that"),
    Claim("FlashAttention moves Θ(N²d²/M) elements, M the on-chip memory", "FA1, theorem 2",
          flash_io),
    Claim("up to 9× fewer bytes of HBM than standard attention", "FA1, figure 2",
          hbm_saved, "fa1"),
    Claim("the same, of FA2", "FA2, §3.1", hbm_saved, "fa2"),
    Claim("on-chip reuse decides over HBM traffic", "FA1, §3.2", l2_catches),
    Claim("larger tiles, fewer bytes", "FA1, §4.1 and figure 2", larger_tiles),
    Claim("standard attention is bound by memory, not by arithmetic", "FA1, §2.1", of_copy),
    Claim("extra memory O(N), standard attention's O(N²)", "FA1, theorem 1", linear_memory),
    Claim("10× less memory at S 2k", "FA1, §1", memory_saved, "both", 2048),
    Claim("20× less memory at S 4k", "FA1, §4.3", memory_saved, "both", 4096),
    Claim("15×, 30×, 63× and 126× less at S 1k, 2k, 4k and 8k: N² elements over Nd",
          "FA1, theorem 1, worked out",
          memory_saved, "forward", 1024, 2048, 4096, 8192, digits=0),
    Claim("runs at S 64k, where standard attention runs out of memory", "FA1, §4.3",
          standard_stops),
    Claim("exact: no approximation", "FA1, theorem 1", exact),
    Claim("online softmax is as stable as the safe one", "Milakov and Gimelshein 2018", stable),
    Claim("2–4× as fast as standard attention", "FA1, §4.3", over_standard, "fa1"),
    Claim("recomputing S and P makes the backward pass faster, in spite of more FLOPs",
          "FA1, §3.1", over_standard, "fa1", "backward"),
    Claim("30–50 % of peak forward (A100)", "FA2, §1", of_peak, "fa1", "forward"),
    Claim("25–35 % of peak backward (A100)", "FA2, §1", of_peak, "fa1", "backward"),
    Claim("FA2 about 2× as fast as FA1, forward", "FA2, §4.1", over, "fa2", "fa1", "forward"),
    Claim("FA2 about 2× as fast as FA1, backward", "FA2, §4.1", over, "fa2", "fa1", "backward"),
    Claim("parallel over the sequence: faster where heads are few", "FA2, §3.2", few_heads),
    Claim("FA2 up to 9× as fast as standard attention", "FA2, §4.1", over_standard, "fa2"),
    Claim("FA2 at 73 % of peak forward (A100)", "FA2, §4.1", of_peak, "fa2", "forward"),
    Claim("FA3 1.5–2.0× as fast as FA2, forward", "FA3, §4.1", over, "fa3", "fa2", "forward"),
    Claim("FA3 1.5–1.75× as fast as FA2, backward", "FA3, §4.1", over, "fa3", "fa2", "backward"),
    Claim("FA3 at 740 TFLOP/s, 75 % of peak (H100)", "FA3, §4.1", of_peak, "fa3", "forward"),
    Claim("FP8 close to 1.2 PFLOP/s", "FA3, §4.1", fp8_speed),
    Claim("FP8 with 2.6× lower error by blocks and incoherent processing", "FA3, §4.3", fp8_error),
    Claim("BERT-large trains 15 % faster (S 512)", "FA1, §4.1", training, "bert-large"),
)  # fmt: skip


def claims_section(folder: Path) -> Iterator[str]:
    """The papers' claims, and what was measured for each."""
    rows = [[c.text, c.source, *found] for c in CLAIMS if (found := c.measure(folder))]
    if rows:
        yield table(["claim", "source", "measured here", "conditions"], rows, 4)


# ----------------------------------------------------------------------------------- walkthrough
def step(
    *names: str, claims: tuple[str, ...] = (), more: Callable[[Path], list[list[str]]] | None = None
) -> Callable[[], str]:
    """A step's figures and gains, on the GPU of which most is measured: those of claims, by their
    first words."""

    def section() -> str:
        folder = main_gpu()
        if folder is None:
            return NOWHERE
        parts = figures.pictures(folder, Path("docs/walkthrough.md"), *names)
        rows = more(folder) if more else []
        for words in claims:
            (claim,) = [c for c in CLAIMS if c.text.startswith(words)]
            if found := claim.measure(folder):
                rows.append([claim.text, *found])
        if rows:
            parts.append(table([f"measured, {device_of(folder)}", "", "conditions"], rows, 3))
        return "\n\n".join(parts) or NOWHERE

    return section


def softmax_step(folder: Path) -> list[list[str]]:
    """What the safe form is for."""
    rows = [r for r in load("numerics", folder) if "forms" in r]
    broken = [r for r in rows if "finite" in r["forms"]["naive"]]
    shares = ", ".join(f"{1 - r['forms']['naive']['finite']:.1%}" for r in broken)
    sizes = ", ".join(f"{r['largest']:g}" for r in broken)
    return [["entries that the naive form turns into NaN", shares, f"largest logits {sizes}"],
            ["the same, safe and online", "0", "the same logits"]] if broken else []  # fmt: skip


def one_step(after: str, before: str) -> Callable[[Path], list[list[str]]]:
    """One generation over the one before, in both directions, at one size of the grid."""

    def gains(folder: Path) -> list[list[str]]:
        rows = []
        for direction in PASSES:
            cells = has_grid(folder, direction, after, before)
            for c in select(cells, d=128, causal=False, seqlen=2048):
                a, b = (round(c["providers"][n]["tflops"], 1) for n in (after, before))
                words = f"{LABELS[after]} over {LABELS[before]}, {direction}"
                words = words.replace("flash_ext ", "")
                figure = f"{a:.0f} over {b:.0f} TFLOP/s, {a / b:.2f}×"
                rows.append([words, figure, "d 128, S 2048, full"])
        return rows

    return gains


STEPS: dict[str, Callable[[], str]] = {
    "three-passes": step(
        claims=("standard attention moves", "standard attention is bound"), more=softmax_step
    ),
    "online-softmax": step("numerics", claims=("online softmax is", "exact: no")),
    "tiling": step(
        "io", claims=("FlashAttention moves", "up to 9×", "on-chip reuse", "2–4× as fast")
    ),
    "recomputation": step(
        "memory", claims=("extra memory O(N)", "20× less", "recomputing S and P")
    ),
    "fa2": step(
        claims=("the same, of FA2", "FA2 about 2× as fast as FA1, forward", "parallel over"),
        more=one_step("fa2", "fa1"),
    ),
    "fa3": step(
        "roofline", claims=("FA3 1.5–2.0×", "FA3 1.5–1.75×", "FA3 at 740"),
        more=one_step("fa3", "fa2"),
    ),
    "all": step("speed", claims=("BERT-large",)),
}  # fmt: skip
