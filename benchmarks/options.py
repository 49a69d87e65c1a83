"""What each option costs, a mix of sequence lengths, and gradients that repeat bit by bit.

    python benchmarks/options.py                 # all tables, about a minute on an H200
    python benchmarks/options.py --only mix
    python benchmarks/options.py --device cpu    # a smoke test

First table: bf16, B 4, S 4096, 16 heads, head dims 64 and 128, causal and full. The plain call
and the same call with one option on take turns, round by round; an option's cost is the ratio of
the medians. Its range says how far the quartiles of the two would move that ratio.

Second table: packed self-attention over sequences of a long-tailed mix of lengths, in the order
drawn, ascending and descending, beside a dense call of about equal FLOPs and torch's varlen_attn.
FLOPs are 4 H d sum(len^2), halved when causal, times 2.5 for backward.

Third table: the backward call of the first table's plain one, as usual and deterministic, of
flash_ext's variants and of SDPA's backends under torch.use_deterministic_algorithms.

No call is timed before its first heads agree with float32 standard attention.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
from calls import Attend, Call, backward, forward
from common import Json, say
from providers import (
    Provider,
    collect,
    relative_error,
    running,
    wrong,
)
from results import Recorder
from timing import Timer
from torch import Tensor

TABLES = ("options", "mix", "deterministic")  # each a method of Bench
PLAIN = "plain"
SEED = 55  # of the lengths: 16 sequences, so 1k in the mean, and the longest is 8192
# (variant, direction) of the first table; fa1's backward would take as long as all the others. The
# second table leaves fa1 out.
MEASURED = (
    *(("fa3", "forward"), ("fa3", "backward")),
    *(("fa2", "forward"), ("fa2", "backward")),
    ("fa1", "forward"),
)
MIXED = MEASURED[:4]
NOTHING: Mapping[str, Any] = {}
REPEATS = " deterministic"
REPEATING = ("fa3", "fa2"), ("flash", "cudnn")  # variants and peers of the third table
OPTIONS = {  # in words
    PLAIN: "no option beside causal",
    "window": "each query sees a quarter of S keys at most",
    "GQA 4": "four query heads share a key head",
    "softcap": "softcap=50",
    "ALiBi": "slopes (H)",
    "bias": "(1, H, S, S), without gradient",
    "gradient of bias": "the same, with gradient",
    "bool mask": "(B, 1, S, S), 90 % True",
    "sink": "with gradient",
    "dropout": "dropout_p=0.1",
    "seqused_k": "every key of every sequence",
    "varlen": "the same sequences, packed",
    "unaligned rows": "row strides that are no multiple of 16 bytes",
    "Dv half of D": "a quarter fewer FLOPs forward",
    "gradient of lse": "the loss uses out and lse",
    "deterministic": "deterministic=True",
}
BACKWARD_ONLY = ("gradient of bias", "gradient of lse", "deterministic")


@dataclass(frozen=True)
class Sizes:
    """The sizes of both tables."""

    batch: int
    seqlen: int
    heads: int
    head_dims: tuple[int, ...]
    tokens: int  # of the mix
    longest: int
    hidden: int
    rounding: int  # the dense call's sequence length is a multiple of it
    dtype: torch.dtype


GPU = Sizes(4, 4096, 16, (64, 128), 16384, 8192, 2048, 128, torch.bfloat16)
CPU = Sizes(1, 64, 4, (64, 128), 256, 128, 128, 16, torch.float32)


def option_calls(sizes: Sizes, d: int, causal: bool, device: torch.device) -> dict[str, Call]:
    """The plain call, and for each of ``OPTIONS`` the same call with it."""
    batch, seqlen, heads = sizes.batch, sizes.seqlen, sizes.heads
    normal = functools.partial(torch.randn, dtype=sizes.dtype, device=device)
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
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
    state = torch.tensor([1, 2], device=device)
    return {
        PLAIN: plain,
        "window": option(window=(width - 1, 0) if causal else (width // 2, width // 2 - 1)),
        "GQA 4": replace(plain, k=k[:, :, :grouped].contiguous(), v=v[:, :, :grouped].contiguous()),
        "softcap": option(softcap=50.0),
        "ALiBi": option(alibi_slopes=slopes),
        "bias": option(bias=bias),
        "gradient of bias": option(bias=bias.detach().requires_grad_()),
        "bool mask": option(bias=torch.rand(batch, 1, seqlen, seqlen, device=device) < 0.9),
        "sink": option(sink=torch.zeros(heads, device=device).requires_grad_()),
        "dropout": option(dropout_p=0.1, rng_state=state),
        "seqused_k": option(seqused_k=integers([seqlen] * batch)),
        "varlen": replace(packed, q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1)),
        "unaligned rows": Call(*unaligned, plain.options),
        "Dv half of D": replace(plain, v=v[..., : d // 2].contiguous()),
        "gradient of lse": replace(plain, through_lse=True),
        "deterministic": option(deterministic=True),
    }


def draw_lengths(tokens: int, longest: int, seed: int = SEED) -> list[int]:
    """Log-normal lengths, cut at ``longest``, until they add up to ``tokens``."""
    source = random.Random(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = round(source.lognormvariate(math.log(longest / 20), 1.5))
        lengths.append(min(max(1, drawn), longest, left))
    return lengths


def dense_seqlen(lengths: list[int], batch: int, rounding: int) -> int:
    """S of a dense call with ``batch`` sequences and about the FLOPs of these lengths."""
    exact = math.sqrt(sum(n * n for n in lengths) / batch)
    return max(rounding, round(exact / rounding) * rounding)


def varlen_attn(longest: int) -> Attend:
    """torch.nn.attention.varlen.varlen_attn; ImportError where this torch lacks it."""
    from torch.nn.attention.varlen import varlen_attn as function

    by_window = "window_size" in inspect.signature(function).parameters

    def attend(call: Call) -> tuple[Tensor, None]:
        causal, cu = call.options["causal"], call.options["cu_seqlens_q"]
        mask = {"window_size": (-1, 0 if causal else -1)} if by_window else {"is_causal": causal}
        return function(call.q, call.k, call.v, cu, cu, longest, longest, **mask), None

    return attend


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


def peer(provider: Provider) -> Attend:
    """A provider that knows no options."""

    def attend(call: Call) -> tuple[Tensor, None]:
        q, k, v = (provider.view(x) for x in (call.q, call.k, call.v))
        return provider.view(provider.attend(q, k, v, call.options["causal"])), None

    return attend


def ours(variant: str) -> Attend:
    """A variant of flash_ext."""
    return lambda call: call.attend(variant)


def context_of_calls(
    context: Callable[[], AbstractContextManager[object]], run: Callable[[], object]
) -> Callable[[], object]:
    """The same call, each time in a new context."""

    def inside() -> object:
        with context():
            return run()

    return run if context is contextlib.nullcontext else inside


class Bench:
    """Checks and times calls on one device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds
        self.timer = Timer(device)

    def times(
        self,
        calls: dict[str, tuple[Call, Callable[[], Attend]]],
        direction: str,
        around: Mapping[str, Callable[[], AbstractContextManager[object]]] = NOTHING,
    ) -> dict[str, Json]:
        """The time of every call, taken in turns, or why there is none; ``around`` is by name."""
        ready: dict[str, Callable[[], object]] = {}
        estimates: dict[str, tuple[float, float]] = {}
        results: dict[str, Json] = {}
        for name, (call, attend) in calls.items():
            try:
                context = around.get(name, contextlib.nullcontext)
                with context():
                    run, error, block = self.prepare(call, attend(), direction)
                run = context_of_calls(context, run)
                if bad := wrong(error, block):
                    say(f"!!! {name}, {direction}: {bad['skipped']} !!!")
                    results[name] = bad
                    continue
                estimates[name] = self.timer.estimate(run)
            except Exception as failure:  # one option's failure must not end the run
                results[name] = {"skipped": common.first_line(failure)}
                continue
            ready[name] = run
            results[name] = {}
        if ready:
            for name, samples in self.timer.compare(ready, estimates, 0, self.rounds).items():
                results[name] = samples.summary()
        return results

    def prepare(
        self, call: Call, attend: Attend, direction: str
    ) -> tuple[Callable[[], object], float, float]:
        """What to time, and the relative errors of its first heads."""
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        dout = torch.randn(shape, dtype=call.q.dtype, device=self.device)
        exact = call.first_heads().to(torch.float32)
        rows, group = exact.q.shape[0], exact.q.shape[-2]
        if direction == "forward":
            run: Callable[[], object] = forward(call, attend)
            pairs = [(run()[:rows, ..., :group, :], forward(exact, Call.exact)())]
        else:
            dlse = None
            if call.through_lse:
                dlse = torch.randn(call.q.shape[:-1], device=self.device).transpose(-1, -2)
            run = backward(call, attend, dout, dlse)
            want = backward(
                exact, Call.exact, dout[:rows, ..., :group, :].float(),
                None if dlse is None else dlse[:rows, :group],
            )()  # fmt: skip
            got = run()
            pairs = [(got[n][:rows, ..., : want[n].shape[-2], :], want[n])
                     for n in ("dq", "dk", "dv")]  # fmt: skip
        # Packed tensors stand for a batch of one.
        pairs = [tuple(x if x.dim() == 4 else x[None] for x in pair) for pair in pairs]
        errors = [relative_error(*pair) for pair in pairs]
        return run, max(e[0] for e in errors), max(e[1] for e in errors)

    def those_that_run(self, kinds: Iterable[tuple[str, str]], d: int) -> list[tuple[str, str]]:
        """The (variant, direction) pairs that run on this device with this head dim."""
        variants = {way: running(self.device, d, way != "forward") for _, way in kinds}
        return [kind for kind in kinds if kind[0] in variants[kind[1]]]

    def options(self, sizes: Sizes, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The first table's cells of one head dim and mask."""
        calls = option_calls(sizes, d, causal, self.device)
        for variant, direction in self.those_that_run(MEASURED, d):
            asked = {
                name: call
                for name, call in calls.items()
                if direction == "backward" or name not in BACKWARD_ONLY
            }
            refusals = {
                name: call.refusal(variant, direction != "forward") for name, call in asked.items()
            }
            chosen = {
                name: (call, functools.partial(ours, variant))
                for name, call in asked.items()
                if refusals[name] is None
            }
            results = self.times(chosen, direction)
            results |= {n: {"skipped": r, "refused": True} for n, r in refusals.items() if r}
            plain = results[PLAIN]
            for result in results.values():
                if "ms" in plain and "ms" in result:
                    result["ratio"] = round(result["ms"] / plain["ms"], 4)
                    result["ratio_range"] = [
                        round(result["q1_ms"] / plain["q3_ms"], 4),
                        round(result["q3_ms"] / plain["q1_ms"], 4),
                    ]
            yield {"variant": variant, "direction": direction}, results

    def mix(self, sizes: Sizes, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The second table's cells of one head dim and mask."""
        drawn = draw_lengths(sizes.tokens, sizes.longest)
        batch, seqlen = 2, dense_seqlen(drawn, 2, sizes.rounding)
        heads = max(1, sizes.hidden // d)
        normal = functools.partial(torch.randn, dtype=sizes.dtype, device=self.device)
        tensors = [normal(sum(drawn), heads, d) for _ in range(3)]

        def packed(lengths: list[int]) -> Call:
            ends = itertools.accumulate(lengths, initial=0)
            cu = torch.tensor(list(ends), dtype=torch.int32, device=self.device)
            return Call(*tensors, {"causal": causal, "cu_seqlens_q": cu, "cu_seqlens_k": cu})

        dense = Call(*(normal(batch, seqlen, heads, d) for _ in range(3)), {"causal": causal})
        for variant, direction in self.those_that_run(MIXED, d):
            attend = functools.partial(ours, variant)
            calls = {
                "dense": (dense, attend),
                "as drawn": (packed(drawn), attend),
                "ascending": (packed(sorted(drawn)), attend),
                "descending": (packed(sorted(drawn, reverse=True)), attend),
                "varlen_attn": (packed(drawn), functools.partial(varlen_attn, max(drawn))),
            }
            results = self.times(calls, direction)
            factor = 4 * heads * d * (0.5 if causal else 1) * (2.5 if direction != "forward" else 1)
            for name, result in results.items():
                if "ms" in result:
                    squares = batch * seqlen**2 if name == "dense" else sum(n * n for n in drawn)
                    result["tflops"] = round(factor * squares / result["ms"] * 1e-9, 4)
            speed = results["dense"].get("tflops")
            for result in results.values():
                if speed and "tflops" in result:
                    result["over_dense"] = round(result["tflops"] / speed, 4)
            yield {"variant": variant, "direction": direction, "heads": heads}, results

    def deterministic(self, sizes: Sizes, d: int, causal: bool) -> Iterator[tuple[Json, Json]]:
        """The third table's cell of one head dim and mask."""
        normal = functools.partial(torch.randn, dtype=sizes.dtype, device=self.device)
        shape = (sizes.batch, sizes.seqlen, sizes.heads, d)
        call = Call(*(normal(shape) for _ in range(3)), {"causal": causal})
        variants, peers = REPEATING
        known = running(self.device, d, gradients=True)
        asked = [v for v in variants if v in known]
        providers, _ = collect(asked, list(peers) if self.device.type == "cuda" else [])
        calls: dict[str, tuple[Call, Callable[[], Attend]]] = {}
        around = {}
        for provider, repeats in itertools.product(providers, (False, True)):
            name = f"{provider.name}{REPEATS * repeats}"
            if provider.ours:
                options = call.options | {"deterministic": repeats}
                calls[name] = replace(call, options=options), functools.partial(ours, provider.name)
            else:
                calls[name] = call, functools.partial(peer, provider)
                around[name] = functools.partial(peer_context, provider, repeats)
        results = self.times(calls, "backward", around)
        factor = 10 * math.prod(shape) * sizes.seqlen * (0.5 if causal else 1)
        for name, result in results.items():
            if "ms" in result:
                result["tflops"] = round(factor / result["ms"] * 1e-9, 4)
                usual = results[name.removesuffix(REPEATS)]
                if name.endswith(REPEATS) and "ms" in usual:
                    result["ratio"] = round(result["ms"] / usual["ms"], 4)
        yield {"direction": "backward"}, results


def size_of(table: str, sizes: Sizes) -> Json:
    """What the cells of a table have in common."""
    dtype = str(sizes.dtype).removeprefix("torch.")
    if table != "mix":
        return {"dtype": dtype, "batch": sizes.batch, "seqlen": sizes.seqlen, "heads": sizes.heads}
    lengths = draw_lengths(sizes.tokens, sizes.longest)
    return {
        "dtype": dtype, "tokens": sum(lengths), "sequences": len(lengths),
        "shortest": min(lengths), "longest": max(lengths), "dense_batch": 2,
        "dense_seqlen": dense_seqlen(lengths, 2, sizes.rounding),
    }  # fmt: skip


def failed(results: Json) -> bool:
    """Whether a call of flash_ext was wrong or failed."""
    peers = "varlen_attn", *REPEATING[1]
    return any("skipped" in r and "refused" not in r and n.removesuffix(REPEATS) not in peers
               for n, r in results.items())  # fmt: skip


def main() -> int:
    """Run; the exit status is 1 if a call of flash_ext was wrong or failed, or time was short."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    common.add_device(parser)
    add("--only", choices=TABLES, help="one of the tables")
    add("--d", nargs="*", type=int, help="head dims, default 64 and 128")
    add("--rounds", type=int, default=15, help="calls of each kind")
    add("--budget", type=float, default=90, help="seconds after which no further cell starts")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    sizes = GPU if device.type == "cuda" else CPU
    bench = Bench(device, args.rounds)
    recorder = Recorder("options", common.describe_setup(device), args)
    tables = [args.only] if args.only else list(TABLES)
    shapes = list(itertools.product(tables, args.d or sizes.head_dims, (False, True)))
    bad = False
    for name, d, causal in common.progress(shapes, len(shapes), "cells"):
        if time.monotonic() - started > args.budget:
            say(f"over the budget of {args.budget:g} s: {name}, d {d} is left out")
            bad = True
            continue
        for cell, results in getattr(bench, name)(sizes, d, causal):
            whole = {"table": name} | size_of(name, sizes) | cell | {"d": d, "causal": causal}
            recorder.add(whole, {"results": results})
            bad |= failed(results)
        common.free_memory(device)  # one shape's graphs must not crowd out the next
    recorder.close()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
