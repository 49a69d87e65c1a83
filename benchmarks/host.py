"""What a call costs the CPU: flash_ext's variants and their peers.

    python benchmarks/host.py                      # under a minute
    python benchmarks/host.py --variants fa3 --peers cudnn

On tensors so small that the GPU's work is nothing: forward without gradients, and forward and
backward through autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import common
import torch
from common import Json
from providers import Provider, Workload, collect, command_line, prepared, running, variant
from timing import Around, Timer

SHAPE = (1, 128, 4, 64)
PEERS_TIMED = ("flash", "cudnn", "flash_attn_4")
CALLS = ("forward", "forward and backward")


def times(timer: Timer, providers: list[Provider], gradients: bool) -> Json:
    """The CPU's time for one call of each: forward, or forward with backward."""
    dtype = torch.float32 if timer.device.type == "cpu" else torch.bfloat16
    work = Workload(SHAPE, dtype, timer.device)

    def prepare(provider: Provider) -> tuple[Callable[[], object], Around]:
        call = (work.step if gradients else work.bare)(provider, causal=True)
        with torch.set_grad_enabled(gradients), provider.around():
            call()
        return call, provider.around

    calls, skipped = prepared({p.name: partial(prepare, p) for p in providers})
    return skipped | timer.host(calls, gradients)


def main() -> int:
    args = command_line(__doc__, PEERS_TIMED).parse_args()
    recorder = common.begin("host", args)
    names = args.variants or running(recorder.device)
    found, missing = collect(names, args.peers)
    providers, timer = [variant("auto"), *found], Timer(recorder.device)
    cell = dict(zip(("batch", "seqlen", "heads", "d"), SHAPE, strict=True))
    for what, gradients in zip(CALLS, (False, True), strict=True):
        recorder.add({"call": what} | cell, {"providers": times(timer, providers, gradients)})
    return recorder.close(lambda r: any("skipped" in r["providers"][n] for n in names), missing)


if __name__ == "__main__":
    sys.exit(main())
