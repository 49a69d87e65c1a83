"""What a call costs the CPU, by providers and by ways to call flash_ext.

    python benchmarks/host.py                      # under a minute
    python benchmarks/host.py --variants fa3 --peers cudnn

On tensors so small that the GPU's work is nothing: forward without gradients, and forward and
backward through autograd; both eager and under torch.compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import common
import torch
from common import Json
from providers import PEERS, Provider, Workload, collect, command_line, running, variant
from results import Recorder
from timing import Around, Timer
from torch import Tensor

import flash_ext
from flash_ext.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_ext.integrations import sdpa

SDPA = "sdpa"
WINDOW = 64
SHAPE = (1, 128, 4, 64)
PEERS_TIMED = ("flash", "cudnn", "flash_attn_4")
FORWARD, BOTH, COMPILED = "forward", "forward and backward", ", compiled"


@dataclass(frozen=True)
class Packed(Provider):
    """Takes (total, H, D); of one sequence, so that its views are of the same memory."""

    def view(self, x: Tensor) -> Tensor:
        """(1, S, H, D) to (S, H, D), and back."""
        return x.squeeze(0) if x.dim() == 4 else x.unsqueeze(0)


def bare_node(forward: Any, backward: Any) -> Any:
    """An autograd.Function with nothing in it but two calls: what a node in Python costs."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            out, lse = forward(*tensors)
            ctx.save_for_backward(*tensors, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            return backward(dout, None, *ctx.saved_tensors)[:3]

    return Bare.apply


def providers(device: torch.device, rows: int) -> list[Provider]:
    """Ways to call, on tensors (1, rows, H, D). SDPA's own choice of a backend first."""
    by_itself = replace(PEERS["flash"](), name=SDPA, around=Provider.around)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device)
    fwd, bwd = torch.ops.flash_ext.fwd.default, torch.ops.flash_ext.bwd.default
    options = {"causal": True, "window_left": WINDOW}
    node = bare_node(lambda *x: fwd(*x, **options), lambda *x: bwd(*x, **options))

    def window(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_ext.attention(q, k, v, causal=causal, window=(WINDOW, -1))

    def varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_ext.attention_varlen(q, k, v, offsets, offsets, causal=causal)

    def drop_in(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_attn_func(q, k, v, causal=causal)

    def drop_in_varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_attn_varlen_func(q, k, v, offsets, offsets, rows, rows, causal=causal)

    return [
        by_itself,
        replace(by_itself, name="activated", around=sdpa.activated),
        Provider("window", window),
        Packed("varlen", varlen),
        Provider("flash_attn_func", drop_in),
        Packed("flash_attn_varlen_func", drop_in_varlen),
        Provider("bare_node", lambda q, k, v, causal: node(q, k, v)),
    ]


def compiled_provider(provider: Provider) -> Provider:
    """The provider under torch.compile, which identifies a function by its code object.

    Two providers with the same code would run the same graph, so each has its own copy.
    """
    attend = provider.attend
    assert isinstance(attend, FunctionType)
    code = attend.__code__.replace(co_name=f"attend_{provider.name}")
    copy = FunctionType(
        code, attend.__globals__, code.co_name, attend.__defaults__, attend.__closure__
    )
    return replace(provider, attend=torch.compile(copy, fullgraph=True))


def calls(timer: Timer, providers: list[Provider]) -> tuple[Json, Json]:
    """The CPU's time for one call of each: forward, and forward with backward."""
    dtype = torch.float32 if timer.device.type == "cpu" else torch.bfloat16
    work = Workload(SHAPE, dtype, timer.device)
    forward: dict[str, tuple[Callable[[], object], Around]] = {}
    step: dict[str, tuple[Callable[[], object], Around]] = {}
    skipped: Json = {}
    for provider in providers:
        name, around = provider.name, provider.around
        both = work.bare(provider, causal=True), work.step(provider, causal=True)
        try:
            with around():
                both[1]()
                with torch.no_grad():
                    both[0]()
        except Exception as error:
            skipped[name] = {"skipped": common.first_line(error)}
            continue
        forward[name], step[name] = ((call, around) for call in both)
    return (
        skipped | timer.host(forward, gradients=False),
        skipped | timer.host(step, gradients=True),
    )


def measure(timer: Timer, plain: list[Provider]) -> dict[str, Json]:
    """The CPU's time for one call of every provider, by what the call is."""
    eager = calls(timer, [*providers(timer.device, SHAPE[1]), *plain])
    compiled = calls(timer, [compiled_provider(p) for p in plain])
    names = (FORWARD, BOTH, FORWARD + COMPILED, BOTH + COMPILED)
    return dict(zip(names, (*eager, *compiled), strict=True))


def main() -> int:
    """Run; the exit status is 1 if a variant of flash_ext failed."""
    args = command_line(__doc__, PEERS_TIMED).parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    names = args.variants or running(device)
    found, missing = collect(names, args.peers)
    recorder = Recorder("host", common.describe_setup(device), args)
    for what, times in measure(Timer(device), [variant("auto"), *found]).items():
        cell = dict(zip(("batch", "seqlen", "heads", "d"), SHAPE, strict=True))
        recorder.add({"call": what} | cell, {"providers": times})
    for name, reason in missing.items():
        print(f"  not importable: {name}: {reason}")
    recorder.close()
    return int(any("skipped" in line["result"]["providers"][n]
                   for line in recorder.lines for n in names))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
