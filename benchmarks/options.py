"""What each option costs, packed sequences of mixed lengths, and gradients that repeat.

    python benchmarks/options.py                 # all tables, under a minute on an H200
    python benchmarks/options.py --only mix
    python benchmarks/options.py --device cpu    # a smoke test

options: the plain call and the same call with one option on take turns (bf16, B 4, S 4096, 16
heads, d 64 and 128); an option's cost is the ratio of the medians.
mix: packed self-attention over sequences of a long-tailed mix of lengths, beside torch's
varlen_attn. FLOPs are 4 H d sum(len^2), halved when causal, times 2.5 for backward.
deterministic: the plain backward call, as usual and deterministic, of flash_ext's variants, of
flash-attn 4 and of SDPA's backends under torch.use_deterministic_algorithms; with many and few
heads.
bias: one matrix a head, for all batch elements as in T5, in structure prediction (a pair bias) and
in Swin's windows, or one for each; with its gradient backward. Beside SDPA's backends with the bias
as attn_mask, and cuEquivariance.
softcap: causal, Gemma 2's shape among others, beside flash-attn 3 and 4.
dropout: BERT's shape and long ones, beside SDPA's flash and cuDNN backends, whose numbers differ.

No call is timed before its first heads agree with float32 standard attention.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import common
import torch
from common import SHAPES, Json
from providers import PEERS, Provider, check, collect, prepared, refusal, running
from timing import Timer
from torch import Tensor

import flash_ext
import flash_ext.reference

REPEATS = " deterministic"
REPEATING = (
    ("fa3", "fa2"),
    ("flash", "cudnn", "flash_attn_4"),
)  # variants and peers of the third table
PLAIN = "plain"
# (variant, direction) of the second table; the first one has fa1 as well, whose backward would take
# as long as all the others.
MIXED = tuple(itertools.product(("fa3", "fa2"), ("forward", "backward")))
MEASURED = *MIXED, ("fa1", "forward")
SIZES = SHAPES["options"]
OPTIONS: dict[str, str] = SIZES["words"]
# Of the tables of single shapes: by head dim lists of batch, tokens, heads, KV heads (not said: as
# many) and the matrices of a bias (not said: one).
SHAPED_PEERS = {
    "bias": ("efficient", "cudnn", "cuequivariance"),
    "softcap": ("flash_attn_3", "flash_attn_4"),
    "dropout": ("flash", "cudnn"),
}
SHAPED = {name: {int(d): x for d, x in SIZES[name].items()} for name in SHAPED_PEERS}
MASKS = {"bias": (False,), "softcap": (True,)}  # causal or not, of tables with one of both
TABLES = ("options", "mix", "deterministic", *SHAPED)
BACKWARD_ONLY = ("gradient of bias", "gradient of lse", "deterministic")


def sizes_on(device: torch.device) -> Namespace:
    """The sizes of all tables on a device."""
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    return Namespace(**SIZES["cpu" if cpu else "cuda"], dtype=dtype)


@dataclass(frozen=True)
class Call:
    """The arguments of flash_ext.attention, or of attention_varlen if there is a cu_seqlens_q.

    A tensor option that requires a gradient gets one, as q, k and v do backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Json = field(default_factory=dict)
    through_lse: bool = False  # the loss uses lse too
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def attend(self, module: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of flash_ext or of its reference."""
        packed = "cu_seqlens_q" in self.options
        function = module.attention_varlen if packed else module.attention
        return function(self.q, self.k, self.v, **self.options, **more)

    def refusal(self, variant: str, direction: str) -> str | None:
        return refusal(variant, self.q, self.k, self.v, direction == "backward", **self.options)

    def first_heads(self) -> Call:
        """The query heads of the first key head in float32, and of a dense call only the first
        batch entry: this part can be checked exactly without the memory for the rest."""
        group = self.q.shape[-2] // self.k.shape[-2]
        dense = self.q.dim() == 4

        def part(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            found = x[:1] if dense and name in ("q", "k", "v", "bias", "seqused_k") else x
            if name in ("q", "k", "v"):
                found = found[..., : group if name == "q" else 1, :]
            elif name in ("bias", "sink", "alibi_slopes"):
                found = found[:, :group] if name == "bias" else found[..., :group]
            if not found.is_floating_point():
                return found
            return found.detach().float().requires_grad_(x.requires_grad)

        kept = {n: part(n, x) for n, x in self.options.items() if n != "deterministic"}
        few = {name: part(name, getattr(self, name)) for name in ("q", "k", "v")}
        return replace(self, **few, options=kept, around=contextlib.nullcontext)


Attend = Callable[[Call], tuple[Tensor, Any]]  # -> out, lse


def ours(variant: str) -> Attend:
    return lambda call: call.attend(flash_ext, variant=variant, return_lse=True)


def exact(call: Call) -> tuple[Tensor, Tensor]:
    """Standard attention in the inputs' type."""
    return call.attend(flash_ext.reference)


def varlen_attn(longest: int) -> Attend:
    def attend(call: Call) -> tuple[Tensor, None]:
        from torch.nn.attention.varlen import varlen_attn as function

        cu, window = call.options["cu_seqlens_q"], (-1, 0 if call.options["causal"] else -1)
        lengths = cu, cu, longest, longest
        return function(call.q, call.k, call.v, *lengths, window_size=window), None

    return attend


def peer(provider: Provider) -> Attend:
    """A provider with the options of a call; a bias is SDPA's attn_mask."""

    def attend(call: Call) -> tuple[Tensor, None]:
        q, k, v = (provider.view(x) for x in (call.q, call.k, call.v))
        with provider.around():
            if "bias" not in call.options:
                return provider.view(provider.attend(q, k, v, **call.options)), None
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return provider.view(sdpa(q, k, v, attn_mask=call.options["bias"])), None

    return attend


def cuequivariance(call: Call) -> tuple[Tensor, None]:
    """Its triangle attention, where each batch element is a row."""
    from cuequivariance_torch import triangle_attention as function

    q, k, v = (x.transpose(1, 2)[None] for x in (call.q, call.k, call.v))
    return function(q, k, v, call.options["bias"][None])[0].transpose(1, 2), None


def peers_of(table: str) -> dict[str, Attend]:
    """The peers of a table of single shapes that are installed."""
    names = SHAPED_PEERS[table]
    found = {p.name: peer(p) for p in collect([], [x for x in names if x in PEERS])[0]}
    if "cuequivariance" in names and importlib.util.find_spec("cuequivariance_torch"):
        found["cuequivariance"] = cuequivariance
    return found


@contextlib.contextmanager
def peer_context(provider: Provider, repeats: bool) -> Iterator[None]:
    """A provider's own, and torch's switch without its filling of new tensors, which takes time."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(repeats)
    try:
        with provider.around():
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def forward(call: Call, attend: Attend) -> Callable[[], tuple[Tensor, ...]]:
    """The forward call to be timed, without gradients; it returns out."""

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return attend(call)[:1]

    return run


def backward(
    call: Call, attend: Attend, dout: Tensor, dlse: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """The backward call to be timed, on a graph built here; it returns dq, dk and dv first."""
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    with call.around():
        out, lse = attend(replace(call, q=leaves[0], k=leaves[1], v=leaves[2]))
    leaves += [x for x in call.options.values() if isinstance(x, Tensor) and x.requires_grad]
    outputs, grads = ((out, lse), (dout, dlse)) if call.through_lse else ((out,), (dout,))

    def run() -> tuple[Tensor, ...]:
        with call.around():
            return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return run


def option_calls(sizes: Namespace, d: int, causal: bool, device: torch.device) -> dict[str, Call]:
    """The plain call, and for each of ``OPTIONS`` the same call with it."""
    batch, seqlen, heads = sizes.batch, sizes.seqlen, sizes.heads
    normal = partial(torch.randn, dtype=sizes.dtype, device=device)
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    q, k, v = (normal(batch, seqlen, heads, d) for _ in range(3))
    plain = Call(q, k, v, {"causal": causal})

    def option(**more: object) -> Call:
        return replace(plain, options=plain.options | more)

    width, grouped = seqlen // 4, heads // 4
    bias = normal(1, heads, seqlen, seqlen)
    cu_seqlens = integers(range(0, (batch + 1) * seqlen, seqlen))
    packed = option(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    unaligned = (
        normal(batch, seqlen, heads * d + 1)[..., : heads * d].unflatten(2, (heads, d))
        for _ in range(3)
    )
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)
    return {
        PLAIN: plain,
        "window": option(window=(width - 1, 0) if causal else (width // 2, width // 2 - 1)),
        "GQA 4": replace(plain, k=k[:, :, :grouped].contiguous(), v=v[:, :, :grouped].contiguous()),
        "softcap": option(softcap=50.0), "ALiBi": option(alibi_slopes=slopes),
        "bias": option(bias=bias), "gradient of bias": option(bias=bias.detach().requires_grad_()),
        "bool mask": option(bias=torch.rand(batch, 1, seqlen, seqlen, device=device) < 0.9),
        "sink": option(sink=torch.zeros(heads, device=device).requires_grad_()),
        "dropout": option(dropout_p=0.1, rng_state=torch.tensor([1, 2], device=device)),
        "seqused_k": option(seqused_k=integers([seqlen] * batch)),
        "varlen": replace(packed, q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1)),
        "unaligned rows": Call(*unaligned, plain.options),
        "Dv half of D": replace(plain, v=v[..., : d // 2].contiguous()),
        "gradient of lse": replace(plain, through_lse=True),
        "deterministic": option(deterministic=True),
    }  # fmt: skip


def add_rates(results: dict[str, Json], flops: float) -> None:
    """TFLOP/s of each call that was timed."""
    for result in (r for r in results.values() if "ms" in r):
        result["tflops"] = round(flops / result["ms"] * 1e-9, 4)


def add_ratios(results: dict[str, Json], base: Callable[[str], str | None]) -> None:
    """Each call's time over that of the call that `base` names."""
    for name, result in results.items():
        if "ms" in result and "ms" in (over := results.get(base(name) or "", {})):
            result["ratio"] = round(result["ms"] / over["ms"], 4)


class Bench:
    """Checks and times calls on one device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds, self.timer = device, rounds, Timer(device)

    def times(self, calls: dict[str, tuple[Call, Attend]], direction: str) -> dict[str, Json]:
        """The time of every call, taken in turns, or why there is none."""
        ready, reasons = prepared({
            name: partial(self.prepare, call, attend, direction)
            for name, (call, attend) in calls.items()
        })  # fmt: skip
        times = self.timer.timed(ready, 0, self.rounds)
        return {name: times.get(name) or reasons[name] for name in calls}

    def prepare(self, call: Call, attend: Attend, direction: str) -> Callable[[], object]:
        """What to time, once its first heads are right."""
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        dout = torch.randn(shape, dtype=call.q.dtype, device=self.device)
        dlse = torch.randn(call.q.shape[:-1], device=self.device).transpose(-1, -2)
        is_forward = direction == "forward"
        run = forward(call, attend) if is_forward else backward(call, attend, dout, dlse)
        if "dropout_p" in call.options and "rng_state" not in call.options:
            return run  # with random numbers of its own
        part = call.first_heads()
        if is_forward:
            want = forward(part, exact)()
        else:
            rows, group = part.q.shape[0], part.q.shape[-2]
            few = dout[:rows, ..., :group, :].float()
            want = backward(part, exact, few, dlse[:rows, :group])()[:3]
        pairs = [(x[: y.shape[0], ..., : y.shape[-2], :], y)
                 for x, y in zip(run(), want, strict=False)]  # fmt: skip
        # Packed tensors stand for a batch of one.
        check((x if x.dim() == 4 else x[None], y if y.dim() == 4 else y[None]) for x, y in pairs)
        return run

    def those_that_run(self, kinds: Iterable[tuple[str, str]], d: int) -> list[tuple[str, str]]:
        """The (variant, direction) pairs that run on this device with this head dim."""
        return [(v, way) for v, way in kinds if v in running(self.device, d, way != "forward")]

    def options(self, sizes: Namespace, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The first table's cells of one head dim and mask."""
        calls = option_calls(sizes, d, causal, self.device)
        for variant, direction in self.those_that_run(MEASURED, d):
            asked = {n: x for n, x in calls.items()
                     if direction == "backward" or n not in BACKWARD_ONLY}  # fmt: skip
            reasons = {name: call.refusal(variant, direction) for name, call in asked.items()}
            refused = {n: {"skipped": x, "refused": True} for n, x in reasons.items() if x}
            chosen = {n: (x, ours(variant)) for n, x in asked.items() if n not in refused}
            results = self.times(chosen, direction)
            add_ratios(results, lambda _: PLAIN)
            yield {"variant": variant, "direction": direction}, results | refused

    def mix(self, sizes: Namespace, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The second table's cells of one head dim and mask."""
        lengths = sizes.mix
        heads = max(1, sizes.hidden // d)
        tensors = torch.randn(3, sum(lengths), heads, d, dtype=sizes.dtype, device=self.device)
        ends = itertools.accumulate(lengths, initial=0)
        cu = torch.tensor(list(ends), dtype=torch.int32, device=self.device)
        call = Call(*tensors, {"causal": causal, "cu_seqlens_q": cu, "cu_seqlens_k": cu})
        flops = 4 * heads * d * sum(n * n for n in lengths) * (0.5 if causal else 1)
        for variant, direction in self.those_that_run(MIXED, d):
            attends = {"as drawn": ours(variant), "varlen_attn": varlen_attn(max(lengths))}
            results = self.times({n: (call, x) for n, x in attends.items()}, direction)
            add_rates(results, flops if direction == "forward" else 2.5 * flops)
            yield {"variant": variant, "direction": direction, "heads": heads}, results

    def deterministic(self, sizes: Namespace, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The third table's cell of one head dim and mask."""
        known = running(self.device, d, gradients=True)
        peers = list(REPEATING[1]) if self.device.type == "cuda" else []
        providers, _ = collect([v for v in REPEATING[0] if v in known], peers)
        for batch, seqlen, heads in sizes.repeating:
            shape, dtype = (batch, seqlen, heads, d), sizes.dtype
            tensors = torch.randn(3, *shape, dtype=dtype, device=self.device)
            call = Call(*tensors, {"causal": causal})
            calls: dict[str, tuple[Call, Attend]] = {}
            for provider, repeats in itertools.product(providers, (False, True)):
                name = f"{provider.name}{REPEATS * repeats}"
                if provider.heads_first:  # SDPA
                    around = partial(peer_context, provider, repeats)
                    calls[name] = replace(call, around=around), peer(provider)
                else:
                    asked = replace(call, options=call.options | {"deterministic": repeats})
                    calls[name] = asked, (ours(provider.name) if provider.ours else peer(provider))
            results = self.times(calls, "backward")
            add_rates(results, 10 * math.prod(shape) * seqlen * (0.5 if causal else 1))
            add_ratios(results, lambda n: n.removesuffix(REPEATS) if n.endswith(REPEATS) else None)
            size = {"batch": batch, "seqlen": seqlen, "heads": heads}
            yield {"direction": "backward"} | size, results

    def shaped(
        self, table: str, sizes: Namespace, d: int, causal: bool
    ) -> Iterator[tuple[Json, Json]]:
        """The cells of a table of single shapes, of one head dim."""
        normal = partial(torch.randn, dtype=sizes.dtype, device=self.device)
        on_gpu = self.device.type == "cuda"
        shapes = SHAPED[table].get(d, []) if on_gpu else [(2, 40, 2), (2, 40, 2, 1, 2)]
        peers = peers_of(table) if on_gpu else {}
        for direction, shape in itertools.product(("forward", "backward"), shapes):
            batch, seqlen, heads, kv_heads, biases = (*shape, *(shape[2], 1)[len(shape) - 3 :])
            q, k, v = (normal(batch, seqlen, h, d) for h in (heads, kv_heads, kv_heads))
            plain = Call(q, k, v, {"causal": causal})
            size: Json = {"batch": batch, "seqlen": seqlen, "heads": heads}
            if kv_heads != heads:
                size["kv_heads"] = kv_heads
            option: Json = {"softcap": 50.0} if table == "softcap" else {"dropout_p": 0.1}
            if table == "bias":
                bias = normal(biases, heads, seqlen, seqlen)
                option = {"bias": bias.requires_grad_(direction == "backward")}
                size["per_batch"] = biases > 1
            theirs = call = replace(plain, options=plain.options | option)
            if table == "dropout":
                numbers = {"rng_state": torch.tensor([1, 2], device=self.device)}
                call = replace(call, options=call.options | numbers)
            taken = (x for x in ("fa2", "fa3") if not call.refusal(x, direction))
            calls = {PLAIN: (plain, ours("fa3" if on_gpu else "fa2"))}
            calls |= {x: (call, ours(x)) for x in taken}
            calls |= {name: (theirs, attend) for name, attend in peers.items()}
            yield {"direction": direction} | size, self.times(calls, direction)
            common.free_memory(self.device)


def size_of(table: str, sizes: Namespace) -> Json:
    """What the cells of a table have in common."""
    cell: Json = {"batch": sizes.batch, "seqlen": sizes.seqlen, "heads": sizes.heads}
    if table == "mix":
        cell = {"tokens": sum(sizes.mix), "sequences": len(sizes.mix)}
        cell |= {"shortest": min(sizes.mix), "longest": max(sizes.mix)}
    shown = {} if table in SHAPED or table == "deterministic" else cell
    return {"dtype": str(sizes.dtype).removeprefix("torch.")} | shown


def failed(result: Json) -> bool:
    """Whether a call of flash_ext was wrong or failed."""
    peers = "varlen_attn", *REPEATING[1], *itertools.chain(*SHAPED_PEERS.values())
    return any("skipped" in r and "refused" not in r and name.removesuffix(REPEATS) not in peers
               for name, r in result["results"].items())  # fmt: skip


def main() -> int:
    parser = common.parser(__doc__, device=True)
    add = parser.add_argument
    add("--only", choices=TABLES, help="one of the tables")
    add("--d", nargs="*", type=int, help="head dims, default 64 and 128")
    add("--rounds", type=int, default=15, help="calls of each kind")
    args = parser.parse_args()
    recorder = common.begin("options", args)
    sizes = sizes_on(recorder.device)
    bench = Bench(recorder.device, args.rounds)
    shapes = [
        (table, d, causal)
        for table in ([args.only] if args.only else TABLES)
        for d in args.d or SHAPED.get(table, sizes.head_dims)
        for causal in MASKS.get(table, (False, True))
    ]
    for name, d, causal in common.progress(shapes, len(shapes), "cells"):
        table = partial(bench.shaped, name) if name in SHAPED else getattr(bench, name)
        for cell, results in table(sizes, d, causal):
            whole = {"table": name} | size_of(name, sizes) | cell | {"d": d, "causal": causal}
            recorder.add(whole, {"results": results})
        common.free_memory(recorder.device)
    return recorder.close(failed)


if __name__ == "__main__":
    sys.exit(main())
