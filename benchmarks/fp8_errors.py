"""Errors of FP8 attention: outliers, the number of keys, one key among many.

    python benchmarks/fp8_errors.py                 # under a minute on an H200
    python benchmarks/fp8_errors.py --device cpu    # a smoke test

Outliers: inputs N(0, 1) + N(0, 100) Bernoulli(0.001), float16, without a mask (FlashAttention-3,
table 3). 'rmse' is the root mean square difference from float64 standard attention on these inputs,
so that rounding them counts, the mean over seeds; 'rmse_max' is that of the worst seed.

Keys: the root mean square difference from float64 standard attention on the dequantized inputs,
over the root mean square of that. Inputs are standard normal, values with 'mean' added, quantized
as flash_ext.fp8.attention does. Of many queries the first are checked; with few queries the keys
are split over SMs.

Needle: one key among many has more than half of each query's weight. 'from_bf16' is the largest
difference from attention in bfloat16 on the same numbers, over the largest result, 'from_float64'
the one from float64.

The inputs of a seed are the same on every device. The tests of FP8 use the functions here.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import common
import torch
from common import Json
from fp8_inputs import EMULATION, METHODS, OURS, PER_TENSOR, SCALE_ROWS, Quantized
from torch import Tensor

import flash_ext
import flash_ext.reference

# The paper's, and ours: the limits of the tests.
GAIN, RMSE = 2.6, 9.1e-3  # of blocks and rotation over one scale per tensor; of blocks and rotation
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


def rounded(value: float) -> float:
    """For a result file."""
    return float(f"{value:.4g}")


def outlier_rows(device: torch.device, sizes: Sizes) -> Iterator[tuple[Json, Json]]:
    """Cells and results of the first experiment, one for each head dim."""
    for dim, seqlen in sizes.seqlens.items():
        found = [
            outlier_errors(seqlen, sizes.heads, dim, seed, device, sizes.rows)
            for seed in range(sizes.seeds)
        ]
        probe = METHODS[OURS](*with_outliers(2 * SCALE_ROWS, 1, dim, 0, device))
        cell = {"experiment": "outliers", "d": dim, "seqlen": seqlen, "heads": sizes.heads,
                "rows": sizes.rows, "seeds": sizes.seeds}  # fmt: skip
        methods = {
            name: {
                "rmse": rounded(statistics.fmean(f[name] for f in found)),
                "rmse_max": rounded(max(f[name] for f in found)),
            }
            for name in found[0]
        }
        yield cell, {"by": probe.variant() or EMULATION, "methods": methods}


def measure(device: torch.device) -> Iterator[tuple[Json, Json]]:
    """The cells of all experiments, with their results."""
    cuda = device.type == "cuda"
    sizes = GPU if cuda else CPU
    yield from outlier_rows(device, sizes)
    dim, heads = (128, 2) if cuda else (64, 1)
    for queries in sizes.queries:
        for mean in (0.0, 1.0):
            for keys in sizes.keys:
                cell = {"experiment": "length", "queries": queries, "mean": mean, "keys": keys,
                        "d": dim}  # fmt: skip
                error = length_error(keys, mean, device, heads=heads, dim=dim, queries=queries)
                yield cell, {"error": rounded(error)}
        for where in (0.0, 0.37, 1.0):
            cell = {"experiment": "needle", "queries": queries, "where": where}
            found = needle_errors(sizes.needle_keys, where, device, queries=queries)
            yield cell | {"keys": sizes.needle_keys}, {n: rounded(x) for n, x in found.items()}


def gain(row: Json) -> float:
    """How many times less the error of ours is than the error with one scale per tensor."""
    return float(row["methods"][PER_TENSOR]["rmse"] / row["methods"][OURS]["rmse"])


def main() -> int:
    """Run."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    args = parser.parse_args()
    recorder = common.begin("fp8_errors", args)
    for cell, result in measure(recorder.device):
        recorder.add(cell, result)
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
