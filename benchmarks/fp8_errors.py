"""Errors of FP8 attention: outliers, the number of keys, one key among many.

What numerics.py --fp8 measures, and the tests of FP8 too. The inputs of a seed are the same on
every device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from common import Finding, Json
from distributions import DISTRIBUTIONS
from fp8_inputs import EMULATION, METHODS, OURS, PER_TENSOR, SCALE_ROWS, Quantized
from torch import Tensor

import flash_ext
import flash_ext.reference

DEFINITIONS = {
    "outliers": (
        "Inputs N(0, 1) + N(0, 100) Bernoulli(0.001), float16, without a mask (FlashAttention-3, "
        "table 3). 'rmse' is the root mean square difference from float64 standard attention on "
        "these inputs, so that rounding them counts, the mean over seeds; 'rmse_max' is that of "
        "the worst seed."
    ),
    "length": (
        "The root mean square difference from float64 standard attention on the dequantized "
        "inputs, over the root mean square of that. Inputs are standard normal, values with 'mean' "
        "added, quantized as flash_ext.fp8.attention does. Of many queries the first are checked; "
        "with few queries the keys are split over SMs."
    ),
    "needle": (
        "One key among many has more than half of each query's weight. 'from_bf16' is the largest "
        "difference from attention in bfloat16 on the same numbers, over the largest result, "
        "'from_float64' that from float64."
    ),
}
# The paper's, and ours: what the documents hold the results against.
GAIN, RMSE = 2.6, 9.1e-3  # of blocks and rotation over one scale per tensor; of blocks and rotation
SHAPE = "the paper gives no shape, and the errors depend on it"
GROWTH = 1.2  # from the fewest keys to the most
NEEDLE = 2e-2

SEQLENS = {128: 8192, 256: 12288}  # of the outliers, by head dim
SIXTEEN_BITS = {"flash_ext, float16": torch.float16, "flash_ext, bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    seqlens: dict[int, int]
    heads: int
    rows: int  # queries, of which errors are taken
    seeds: int
    keys: tuple[int, ...]
    needle_keys: int
    queries: tuple[int, ...]  # many of them, so that keys are not split, and few


GPU = Sizes(SEQLENS, 4, 2048, 6, (2048, 8192, 32768, 131072), 131072, (16384, 64))
CPU = Sizes({64: 1024}, 1, 128, 2, (512, 2048), 2048, (64,))  # a smoke test


# ------------------------------------------------------------------------------------- experiments
def with_outliers(
    seqlen: int, heads: int, dim: int, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the paper's experiment, float16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = {name: torch.randn(1, seqlen, heads, dim) for name in ("q", "k", "v")}
        DISTRIBUTIONS["outliers"](inputs)
    q, k, v = (x.half().to(device) for x in inputs.values())
    return q, k, v


def rmse(got: Tensor, want: Tensor) -> float:
    """Root mean square difference."""
    return float((got.double() - want).square().mean().sqrt())


def outlier_errors(
    seqlen: int, heads: int, dim: int, seed: int, device: torch.device | str, rows: int
) -> dict[str, float]:
    """RMSE of every method, and of both types of 16 bits, over the first rows."""
    q, k, v = with_outliers(seqlen, heads, dim, seed, device)
    few = q[:, :rows]
    exact, _ = flash_ext.reference.attention(few.double(), k.double(), v.double())
    found = {
        name: rmse(flash_ext.attention(few.to(dtype), k.to(dtype), v.to(dtype)), exact)
        for name, dtype in SIXTEEN_BITS.items()
    }
    for name, method in METHODS.items():
        found[name] = rmse(method(q, k, v, seed).first_queries(rows).attend(), exact)
    return found


def length_error(
    keys: int,
    mean: float,
    device: torch.device | str,
    *,
    heads: int = 1,
    dim: int = 64,
    queries: int = 64,
    checked: int = 64,
) -> float:
    """RMS error over RMS result, of values of this mean."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, queries, heads, dim, generator=generator)
    k, v = (torch.randn(1, keys, heads, dim, generator=generator) for _ in range(2))
    x = METHODS[OURS](*(y.to(device, torch.bfloat16) for y in (q, k, v + mean)))
    want = x.first_queries(checked).exact()
    return float((x.attend()[:, :checked] - want).norm() / want.norm())


def needle_errors(
    keys: int, where: float, device: torch.device | str, *, dim: int = 128, queries: int = 2
) -> dict[str, float]:
    """The smallest weight of the key at ``where``, from 0 to 1, and what FP8 makes of it.

    Two rows of q are repeated to ``queries``: the numbers are the same whether keys are split or
    not.
    """
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 2, 2, dim, generator=generator)
    k, v = (torch.randn(1, keys, 1, dim, generator=generator) for _ in range(2))
    place = int(where * (keys - 1))
    k[:, place] = q.mean(dim=(1, 2), keepdim=True)[:, 0] * 4.7
    x = Quantized(*(y.to(device).to(torch.float8_e4m3fn) for y in (q, k, v)))
    exact = x.exact()
    largest = float(exact.abs().max())
    value = x.v[:, place].double()
    weights = (exact * value).sum(-1) / value.square().sum(-1)
    many = x._replace(q=x.q.repeat(1, queries // 2, 1, 1))
    plain = flash_ext.attention(*(y.to(torch.bfloat16) for y in many[:3])).double()
    out = many.attend(out_dtype=torch.bfloat16).double()
    return {
        "weight": float(weights.min()),
        "from_bf16": float((out - plain).abs().max()) / largest,
        "from_float64": float((out[:, :2] - exact).abs().max()) / largest,
    }


# ----------------------------------------------------------------------------------------- results
def rounded(value: float) -> float:
    """For a result file."""
    return float(f"{value:.4g}")


def outlier_rows(device: torch.device, sizes: Sizes) -> Iterator[Json]:
    """A row for each head dim."""
    for dim, seqlen in sizes.seqlens.items():
        found = [
            outlier_errors(seqlen, sizes.heads, dim, seed, device, sizes.rows)
            for seed in range(sizes.seeds)
        ]
        probe = METHODS[OURS](*with_outliers(2 * SCALE_ROWS, 1, dim, 0, device))
        yield {
            "d": dim, "seqlen": seqlen, "heads": sizes.heads, "rows": sizes.rows,
            "seeds": sizes.seeds, "by": probe.variant() or EMULATION,
            "methods": {
                name: {
                    "rmse": rounded(statistics.fmean(f[name] for f in found)),
                    "rmse_max": rounded(max(f[name] for f in found)),
                }
                for name in found[0]
            },
        }  # fmt: skip


def measure(device: torch.device) -> Json:
    """Everything, for the result file."""
    sizes = GPU if device.type == "cuda" else CPU
    dim, heads = (128, 2) if device.type == "cuda" else (64, 1)
    length = [
        {
            "queries": queries, "mean": mean, "keys": keys, "d": dim,
            "error": rounded(length_error(keys, mean, device, heads=heads, dim=dim,
                                          queries=queries)),
        }
        for queries in sizes.queries for mean in (0.0, 1.0) for keys in sizes.keys
    ]  # fmt: skip
    needle = [
        {"queries": queries, "where": where, "keys": sizes.needle_keys}
        | {
            name: rounded(value)
            for name, value in needle_errors(
                sizes.needle_keys, where, device, queries=queries
            ).items()
        }
        for queries in sizes.queries
        for where in (0.0, 0.37, 1.0)
    ]
    return {
        "definitions": DEFINITIONS,
        "outliers": list(outlier_rows(device, sizes)),
        "length": length,
        "needle": needle,
    }


# ------------------------------------------------------------------------------------------- goals
def findings(found: Json) -> Iterator[Finding]:
    """The goals for what ``measure`` returned."""
    for row in with_ours(found["outliers"]):
        size = f"outliers, d {row['d']}, {row['seqlen']} keys"
        ours = row["methods"][OURS]["rmse"]
        by = "" if row["by"] != EMULATION else f" ({EMULATION})"
        yield Finding(
            f"{size}: error with {PER_TENSOR} over that of flash_ext.fp8.attention: at least"
            f" {GAIN:g}×",
            f"{gain(row):.2f}×{by}",
            gain(row) >= GAIN,
            SHAPE,
        )
        yield Finding(
            f"{size}: RMSE of flash_ext.fp8.attention at most {RMSE:.1e}",
            f"{ours:.2e}{by}",
            ours <= RMSE,
            SHAPE,
        )
    growth = list(growths(found["length"]))
    if growth:
        keys = sorted({r["keys"] for r in found["length"]})
        yield Finding(
            f"error with {keys[-1]} keys over that with {keys[0]}: at most {GROWTH:g}×",
            " – ".join(f"{x:.2f}×" for x in sorted({min(growth), max(growth)})),
            max(growth) <= GROWTH,
        )
    if found["needle"]:
        worst = max(r["from_bf16"] for r in found["needle"])
        keys = max(r["keys"] for r in found["needle"])
        yield Finding(
            f"one key among {keys}: difference from bf16 at most {NEEDLE:g} of the largest result",
            f"{worst:.1e}",
            worst <= NEEDLE,
        )


def with_ours(rows: list[Json]) -> list[Json]:
    """Those that have what flash_ext.fp8.attention does now: older sources did something else."""
    return [row for row in rows if OURS in row["methods"]]


def gain(row: Json) -> float:
    """How many times less the error of ours is than that with one scale per tensor."""
    return row["methods"][PER_TENSOR]["rmse"] / row["methods"][OURS]["rmse"]


def growths(length: list[Json]) -> Iterator[float]:
    """Of each kind of inputs, the error with the most keys over that with the fewest."""
    kinds = {(r["queries"], r["mean"]) for r in length}
    for kind in sorted(kinds):
        by_keys = {r["keys"]: r["error"] for r in length if (r["queries"], r["mean"]) == kind}
        fewest = by_keys[min(by_keys)]
        yield by_keys[max(by_keys)] / fewest if fewest else math.inf


def print_results(found: Json) -> None:
    """All of it, in lines."""
    for row in found["outliers"]:
        print(f"\noutliers, d {row['d']}, {row['seqlen']} keys, by {row['by']}: RMSE, mean of"
              f" {row['seeds']} seeds and worst")  # fmt: skip
        for name, r in row["methods"].items():
            print(f"  {name:<52}{r['rmse']:10.2e}{r['rmse_max']:10.2e}")
    print("\nrelative error by keys")
    for r in found["length"]:
        print(f"  d {r['d']}, {r['queries']} queries, values of mean {r['mean']:g},"
              f" {r['keys']} keys: {r['error']:.3e}")  # fmt: skip
    print("\none key among many")
    for r in found["needle"]:
        print(f"  {r['queries']} queries, {r['keys']} keys, at {r['where']:g}: weight"
              f" {r['weight']:.2f}, from bf16 {r['from_bf16']:.1e}, from float64"
              f" {r['from_float64']:.1e}")  # fmt: skip
    for finding in findings(found):
        print(finding)
