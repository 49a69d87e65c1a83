"""Errors of FP8 attention on inputs with outliers, the experiment of FlashAttention-3, table 3.

    python benchmarks/fp8_errors.py                 # under a minute on an H200
    python benchmarks/fp8_errors.py --device cpu    # a smoke test

Inputs are N(0, 1) + N(0, 100) Bernoulli(0.001), float16, without a mask. 'rmse' is the root mean
square difference from float64 standard attention on these inputs, so that rounding them counts, the
mean over seeds; 'rmse_max' is that of the worst seed. The inputs of a seed are the same on every
device. The tests of FP8 use the functions here.
"""

from __future__ import annotations

import statistics
import sys

import common
import torch
from fp8_providers import METHODS
from torch import Tensor

import flash_ext
import flash_ext.reference

SIXTEEN_BITS = {"flash_ext, float16": torch.float16, "flash_ext, bfloat16": torch.bfloat16}
# Lengths by head dim; heads, queries of which errors are taken, and seeds.
SEQLENS, CPU_SEQLENS = {128: 8192, 256: 12288}, {64: 1024}
SIZES, CPU_SIZES = (4, 2048, 6), (1, 128, 2)


def with_outliers(
    seqlen: int, heads: int, dim: int, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the paper's experiment, float16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = [torch.randn(1, seqlen, heads, dim) for _ in range(3)]
        for x in inputs:
            x += (torch.rand_like(x) < 1e-3) * 10 * torch.randn_like(x)
    q, k, v = (x.half().to(device) for x in inputs)
    return q, k, v


def rmse(got: Tensor, want: Tensor) -> float:
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


def main() -> int:
    recorder = common.begin("fp8_errors", common.parser(__doc__, device=True).parse_args())
    cuda = recorder.device.type == "cuda"
    heads, rows, seeds = SIZES if cuda else CPU_SIZES
    for dim, seqlen in (SEQLENS if cuda else CPU_SEQLENS).items():
        found = [
            outlier_errors(seqlen, heads, dim, seed, recorder.device, rows) for seed in range(seeds)
        ]
        cell = {"experiment": "outliers", "d": dim, "seqlen": seqlen, "heads": heads, "rows": rows,
                "seeds": seeds}  # fmt: skip
        methods: common.Json = {}
        for name in found[0]:
            errors = [of_seed[name] for of_seed in found]
            both = {"rmse": statistics.fmean(errors), "rmse_max": max(errors)}
            methods[name] = {what: float(f"{x:.4g}") for what, x in both.items()}
        recorder.add(cell, {"methods": methods})
    return recorder.close()


if __name__ == "__main__":
    sys.exit(main())
