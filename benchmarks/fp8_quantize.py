"""Quantization to FP8: bytes per second of each kind, beside a copy or sum of as many bytes.

    python benchmarks/fp8_quantize.py               # on the GPU, under a minute
    python benchmarks/fp8_quantize.py --device cpu  # a smoke test

'bytes' is what the passes over memory read and write: block scales have one (two bytes read and one
written for each element), the others read everything once more for the maxima, and the mean only
reads. The peer is torch's copy_ between two tensors, which together have as many bytes, in turns
with the call: 'ratio' is its time over the call's, 1 where the call is as fast. Of the mean it is
torch's sum: before a call L2 is filled with writes, so what only reads has these written to memory
beside its own bytes, while of a copy's bytes half are writes, of which as many stay in L2.
"""

from __future__ import annotations

import itertools
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
# Scales, whether rows are rotated and the mean is subtracted, and the type; or only the mean.
KINDS: dict[str, Json] = {
    "block": {"scales": "block"},
    "block, rotation": {"scales": "block", "signs": True},
    "block, int8, rotation, mean subtracted": {
        "scales": "block", "signs": True, "mean": True, "dtype": torch.int8,
    },
    "channel": {"scales": "channel"},
    "head": {"scales": "head"},
    "tensor": {"scales": "tensor"},
    "mean": {},
}  # fmt: skip


def call_of(kind: str, x: Tensor) -> tuple[Callable[[], Any], int]:
    """What is timed, and the bytes that it moves."""
    options = dict(KINDS[kind])
    if not options:
        return lambda: fp8.token_mean(x), x.numel() * ELEMENT
    if "signs" in options:
        options["signs"] = fp8.random_signs(x.shape[-1], device=x.device)
    if "mean" in options:
        options["mean"] = fp8.token_mean(x)
    reads = ELEMENT if options["scales"] == "block" else 2 * ELEMENT
    return lambda: fp8.quantize(x, **options), x.numel() * (reads + 1)


def measure(kind: str, shape: tuple[int, ...], timer: Timer, min_time: float) -> Json:
    """The call and its peer, in turns."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=timer.device)
    call, size = call_of(kind, x)
    source, target = torch.empty(2, size // 2, dtype=torch.uint8, device=timer.device)
    peers = {"copy": lambda: target.copy_(source), "sum": lambda: x.view(-1).sum()}
    peer = "sum" if kind == "mean" else "copy"  # what has the same bytes to move
    times = timer.timed({"call": call, "peer": peers[peer]}, min_time)
    ms, peer_ms = (float(times[name]["ms"]) for name in ("call", "peer"))
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
    for shape, kind in itertools.product(GPU_SHAPES if cuda else CPU_SHAPES, KINDS):
        cell = dict(zip(("batch", "seqlen", "heads", "d"), shape, strict=True))
        recorder.add({"method": kind} | cell, measure(kind, shape, timer, args.min_time))
    recorder.close()
    return int(cuda and any(line["result"]["ratio"] < LIMIT for line in recorder.lines))


if __name__ == "__main__":
    sys.exit(main())
