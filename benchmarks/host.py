"""compare.py --host: what a call costs the CPU, by providers and by ways to call flash_ext."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import common
import torch
from common import Json
from providers import PEERS, Provider, Workload
from timing import HOST_METHOD, Around, Timer
from torch import Tensor
from torch.nn.attention import SDPBackend

import flash_ext
from flash_ext.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_ext.integrations import sdpa

SDPA = "sdpa"  # the row with which all others are compared
WINDOW = 64
SHAPE = (1, 128, 4, 64)
PEERS_TIMED = ("flash", "cudnn", "flash_attn_4")
ROWS = {
    "forward": "providers",
    "forward and backward": "with_backward",
    "forward, compiled": "compiled",
    "forward and backward, compiled": "compiled_with_backward",
}


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
    """Of tensors (1, rows, H, D). SDPA's own choice of a backend first."""
    q = torch.zeros(1, 4, rows, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    backend = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name.lower()
    label = f"SDPA ({backend.removesuffix('_attention')})"
    by_itself = replace(PEERS["flash"](), name=SDPA, label=label, around=Provider.around)
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
        replace(by_itself, name="activated", label="SDPA, activated", around=sdpa.activated),
        Provider("window", "attention, window", window),
        Packed("varlen", "attention_varlen", varlen),
        Provider("flash_attn_func", "flash_attn_func", drop_in),
        Packed("flash_attn_varlen_func", "flash_attn_varlen_func", drop_in_varlen),
        Provider("bare_node", "a bare autograd.Function", lambda q, k, v, causal: node(q, k, v)),
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


def measure(timer: Timer, plain: list[Provider]) -> Json:
    """The CPU's time for one call of every provider, by ROWS."""
    ways = providers(timer.device, SHAPE[1])
    eager, eager_step = calls(timer, [*ways, *plain])
    compiled, compiled_step = calls(timer, [compiled_provider(p) for p in plain])
    return {
        "method": HOST_METHOD,
        "shape": SHAPE,
        "labels": {p.name: p.label for p in ways},
        "providers": eager,
        "with_backward": eager_step,
        "compiled": compiled,
        "compiled_with_backward": compiled_step,
    }


def show(times: Json, labels: dict[str, str]) -> None:
    """One line per provider, with its time over those of SDPA's choice and its flash backend."""
    labels = labels | times["labels"]
    bases = (SDPA, "flash")
    for what, results in ROWS.items():
        print(f"host time per call, {what}, (B, S, H, D) = {tuple(times['shape'])}")
        for name, r in times[results].items():
            value = f" not measured: {r.get('skipped')}"
            if "us" in r:
                value = f"{r['us']:8.1f} us ({r['q1_us']:.1f} - {r['q3_us']:.1f})"
                for base in bases:
                    if "us" in times[results].get(base, {}):
                        ratio = r["us"] / times[results][base]["us"]
                        value += f"  {ratio:.3f} x {labels.get(base, base)}"
            print(f"  {labels.get(name, name):<26}{value}")
