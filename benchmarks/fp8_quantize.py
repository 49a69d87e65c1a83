"""Quantization to FP8: bytes per second of each kind, beside a copy or sum of as many bytes.

    python benchmarks/fp8_quantize.py               # on the GPU, under a minute
    python benchmarks/fp8_quantize.py --device cpu  # a smoke test

'bytes' is what the passes over memory read and write: block scales have one (two bytes read and one
written for each element), the others read everything once more for the maxima, and the mean only
reads. The peer is torch's copy_ between two tensors, which together have as many bytes, in turns
with the call: 'ratio' is its time over the call's, 1 where the call is as fast. Of the mean it is
torch's sum: before a call L2 is filled with writes, so what only reads has these written to memory
beside its own bytes, while of a copy's bytes half are writes, of which as many stay in L2.

No call is timed before its first rows agree with the CPU kernels.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from common import Json
from timing import Timer
from torch import Tensor

from flash_ext import fp8

ELEMENT = 2  # bytes of bfloat16
LIMIT = 0.85  # of the peer's speed
CHECKED = 300  # rows, of two heads
# (batch, seqlen, heads, head_dim)
GPU_SHAPES = (
    (1, 16384, 32, 128),
    (1, 16384, 32, 64),
    (1, 16384, 16, 256),
    (1, 16384, 32, 96),
    (1, 16384, 8, 128),
    (16, 1024, 32, 128),
)
CPU_SHAPES = ((1, 512, 2, 64),)


# A method's name, and what `flash_ext.fp8.quantize` gets; "mean" is token_mean.
KINDS: dict[str, Json] = {
    "block": {},
    "block, rotation": {"signs": True},
    "block, rotation, mean subtracted": {"signs": True, "mean": True},
    "block, int8, rotation": {"signs": True, "dtype": torch.int8},
    "block, int8, rotation, mean subtracted": {"signs": True, "mean": True, "dtype": torch.int8},
    "channel": {},
    "head": {},
    "tensor": {},
    "tensor, rotation": {"signs": True},
    "mean": {},
}


def bytes_per_element(method: str) -> int:
    """Of all passes."""
    if method == "mean":
        return ELEMENT
    return (ELEMENT if method.startswith("block") else 2 * ELEMENT) + 1


def call_of(method: str, x: Tensor) -> Callable[[], Any]:
    """What is timed."""
    if method == "mean":
        return lambda: fp8.token_mean(x)
    options = {"scales": method.partition(",")[0]} | KINDS[method]
    if "signs" in options:
        generator = torch.Generator().manual_seed(0)
        options["signs"] = fp8.random_signs(x.shape[-1], generator=generator).to(x.device)
    if "mean" in options:
        options["mean"] = fp8.token_mean(x)
    return lambda: fp8.quantize(x, **options)


def check(method: str, x: Tensor) -> None:
    """Compare with the CPU kernels on a few rows; raises where results differ."""
    few = x[:1, :CHECKED, :2].contiguous()
    (got, want) = (call_of(method, y)() for y in (few, few.cpu()))
    if method == "mean":
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
        return
    if "mean" in KINDS[method]:  # the means differ by rounding
        torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-4, atol=0)
        return
    for a, b in zip(got, want, strict=True):
        if not torch.equal(a.cpu().float(), b.float()):
            raise RuntimeError(f"{method}: the result differs from the CPU kernels'")


def measure(method: str, shape: tuple[int, ...], timer: Timer, min_time: float) -> Json:
    """The call and its peer, in turns."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=timer.device)
    check(method, x)
    size = math.prod(shape) * bytes_per_element(method)
    source, target = (
        torch.empty(size // 2, dtype=torch.uint8, device=timer.device) for _ in range(2)
    )
    peers = {"copy": lambda: target.copy_(source), "sum": lambda: x.view(-1).sum()}
    peer = "sum" if method == "mean" else "copy"  # what has the same bytes to move
    calls = {"call": call_of(method, x), "peer": peers[peer]}
    times = timer.timed(calls, min_time)
    ms, peer_ms = (float(times[name]["ms"]) for name in calls)
    return {
        "bytes": size,
        **times["call"],
        "peer": peer,
        "peer_ms": peer_ms,
        "gbps": round(size / ms * 1e-6, 1),
        "peer_gbps": round(size / peer_ms * 1e-6, 1),
        "ratio": round(peer_ms / ms, 3),
    }


def main() -> int:
    """Run; on a GPU the exit status is 1 if a kind is slower than ``LIMIT``."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    parser.add_argument("--min-time", type=float, default=0.05, help="seconds for each call")
    args = parser.parse_args()
    recorder = common.begin("fp8_quantize", args)
    timer, cuda = Timer(recorder.device), recorder.device.type == "cuda"
    for shape, method in itertools.product(GPU_SHAPES if cuda else CPU_SHAPES, KINDS):
        cell = dict(zip(("batch", "seqlen", "heads", "d"), shape, strict=True))
        recorder.add({"method": method} | cell, measure(method, shape, timer, args.min_time))
    recorder.close()
    slow = sum(line["result"]["ratio"] < LIMIT for line in recorder.lines)
    if cuda and slow:
        print(f"{slow} of {len(recorder.lines)} run at less than {LIMIT:.0%} of their peer's speed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
