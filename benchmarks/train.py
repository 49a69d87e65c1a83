"""Training speed end to end: tokens per second and peak memory of a GPT with each attention.

    python benchmarks/train.py                   # GPT-2 small's size, under a minute on an H200
    python benchmarks/train.py --model medium bert-large llama
    python benchmarks/train.py --seq 4096 --providers fa1 fa2 fa3 sdpa cudnn
    python benchmarks/train.py --device cpu      # a smoke test

The model and its step are those of examples/train_gpt.py: bytes of Python's standard library, bf16
autocast, AdamW, gradient clipping, about 16,384 tokens a step. "sdpa" is torch's attention, which
chooses its backend; "standard" has three passes, its softmax in float32 by autocast. A provider
that does not run or fit into memory is left out, with the reason. So is one whose step the GPU ends
before the CPU has enqueued it: that time would be Python's.

"small" and "medium" are GPT-2's sizes. "llama" has four layers with the attention of Llama 3.1 8B,
"bert-large" the shape of BERT-large: the same model and loss without the mask.

Every provider trains its own model, from the same weights on the same batches. They take turns: one
step that is not timed, then the timed steps one right after the other. 'ms' is the median step,
'peak_bytes' one step's peak extra memory with the weights and AdamW's state, as if no other model
were there. A provider whose loss does not stay with standard attention's (SDPA's, if that did not
run) at every step is called wrong, and has no speed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import common
import torch
from common import SHAPES, Json
from providers import PEERS, VARIANTS, Provider, attempt, collect, running
from timing import step_times
from torch import Tensor

sys.path.append(str(common.ROOT / "examples"))
import train_gpt  # noqa: E402

TOKENS, CPU_TOKENS = 16384, 128  # a step's


DEFAULTS = {"causal": True, "kv_heads": 0, "rate": 1e-4}  # kv_heads = 0: heads
MODELS = {name: SimpleNamespace(**DEFAULTS | size) for name, size in SHAPES["train"].items()}
MEGABYTES = 1  # of text: many times what the steps read
WARM_UP = 3
SDPA = "sdpa"
REFERENCES = ("standard", SDPA)  # whose losses the others' must equal: the first that trained
LOSS_LIMIT = 2**-10  # relative; what roundings do is below a tenth of it
CPU_BOUND = 0.9  # of a step's time: beyond it the GPU waits for what the CPU has not enqueued


def sdpa() -> Provider:
    """torch's attention with the backend it chooses itself."""
    return replace(PEERS["flash"](), name=SDPA, around=nullcontext)


def in_model(provider: Provider, causal: bool = True) -> train_gpt.Attention:
    """A provider as the model calls it, within what must be around it: (B, S, H, D) in and out."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return provider.view(provider.attend(*map(provider.view, (q, k, v)), causal))

    return attention


def loss_difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference at the same step, relative to the loss where it is above 1; NaN counts
    as infinite."""
    differences = [abs(a - b) / max(abs(b), 1) for a, b in zip(losses, reference, strict=True)]
    return max(d if math.isfinite(d) else math.inf for d in differences)


class Trainee:
    """One provider's model in training after its first steps, and what was measured of it."""

    def __init__(
        self, provider: Provider, config: train_gpt.Config, chunks: list[Tensor],
        causal: bool = True
    ) -> None:  # fmt: skip
        self.device = torch.device(config.device)
        with self.device:  # the weights are drawn there
            self.training = train_gpt.Training(in_model(provider, causal), config)
        self.around = provider.around
        self.chunks = iter(chunks)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []  # until a step that began on an idle GPU was enqueued
        for _ in range(WARM_UP - 1):
            self.step()
        self.rest()
        extra = common.peak_extra_memory(self.step, self.device)
        self.rest()
        self.peak_bytes = extra + self.state_bytes()

    def step(self) -> None:
        """One step; the GPU is not waited for."""
        with self.around():
            self.losses.append(self.training.step(next(self.chunks)))

    def turn(self, steps: int) -> Trainee:
        """A step that is not timed, then ``steps`` that are."""
        start = time.perf_counter()
        self.step()
        self.host_seconds.append(time.perf_counter() - start)
        self.seconds += step_times(self.step, steps, self.device)
        self.rest()
        return self

    def rest(self) -> None:
        """Wait for the device, and free the gradients: the next provider needs the memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.training.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """What stays between steps: the weights and the optimizer's state."""
        states = self.training.optimizer.state.values()
        kept = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in [*self.training.model.parameters(), *kept])


class Bench:
    """Measures cells, each a model at a sequence length, on one device."""

    def __init__(self, args: argparse.Namespace, providers: list[Provider]) -> None:
        self.args, self.providers = args, providers
        self.device = torch.device(args.device)
        self.data = train_gpt.standard_library(MEGABYTES)

    def cell(self, model: str, seqlen: int) -> tuple[Json, Json]:
        """A model at a sequence length: what was measured, and the results."""
        size = MODELS[model]
        batch = max(1, self.args.tokens // seqlen)
        steps = WARM_UP + self.args.rounds * (1 + self.args.steps)
        config = train_gpt.Config(
            size.layers, size.heads, size.width, seqlen, batch, steps, self.args.device,
            MEGABYTES, size.rate, kv_heads=size.kv_heads,
        )  # fmt: skip
        cell: Json = {
            "model": model, "causal": size.causal, "layers": config.layers, "heads": config.heads,
            "kv_heads": config.kv_heads or config.heads, "width": config.width, "rate": size.rate,
            "seqlen": seqlen, "batch": config.batch,
            "dtype": str(config.dtype).removeprefix("torch."),
        }  # fmt: skip
        results: Json = {p.name: {} for p in self.providers}
        found: Json = {"rounds": 0, "steps": self.args.steps, "providers": results}
        chunks = list(itertools.islice(train_gpt.batches(self.data, config), config.steps))
        trainees: dict[str, Trainee] = {}
        for turn in range(self.args.rounds + 1):
            found["rounds"] = turn
            shift = turn % len(self.providers)
            for provider in self.providers[shift:] + self.providers[:shift]:
                name = provider.name
                if "skipped" in results[name]:
                    continue
                old = trainees.pop(name, None)
                trainee, reason = attempt(
                    partial(old.turn, self.args.steps) if old
                    else partial(Trainee, provider, config, chunks, size.causal)
                )  # fmt: skip
                if trainee is None:  # most often: out of memory
                    results[name] |= reason
                    del old
                    common.free_memory(self.device)
                else:
                    trainees[name] = trainee
        self.judge(config, found, trainees)
        return cell, found

    def judge(self, config: train_gpt.Config, found: Json, trainees: dict[str, Trainee]) -> None:
        """The results of the trainings: the speeds of those whose losses are right."""
        losses = {name: torch.stack(t.losses).tolist() for name, t in trainees.items()}
        reference = next((name for name in REFERENCES if name in losses), None)
        found["reference"] = reference
        for name, trainee in trainees.items():
            result = found["providers"][name]
            result["losses"] = [round(x, 6) if math.isfinite(x) else None for x in losses[name]]
            result["peak_bytes"] = trainee.peak_bytes
            difference = loss_difference(losses[name], losses[reference]) if reference else 0.0
            if math.isfinite(difference):
                result["loss_difference"] = float(f"{difference:.3g}")
            if not difference <= LOSS_LIMIT or None in result["losses"]:
                result["skipped"] = f"WRONG RESULT: loss off by {difference:.2g} of {reference}'s"
                result["wrong"] = True
                continue
            seconds, host = map(statistics.median, (trainee.seconds, trainee.host_seconds))
            if self.device.type == "cuda" and host > CPU_BOUND * seconds:
                result["skipped"] = f"the CPU takes {host * 1e3:.1f} ms of {seconds * 1e3:.1f} ms"
                result["cpu_bound"] = True
                continue
            result |= {
                "ms": round(seconds * 1e3, 4),
                "tokens_per_second": round(config.batch * config.seq / seconds, 1),
            }


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__, device=True, choices=["cuda", "cpu"])
    add = parser.add_argument
    add("--model", nargs="+", choices=list(MODELS), help="default: small, on a CPU tiny")
    add("--seq", nargs="+", type=int, help="sequence lengths, default: the model's")
    add("--providers", nargs="+", choices=[*VARIANTS, SDPA, *PEERS],
        help="default: variants that run; sdpa; flash, cudnn, flash-attn 4; standard")  # fmt: skip
    add("--rounds", type=int, default=4, help="turns of each provider")
    add("--steps", type=int, default=4, help="timed steps in a turn")
    args = parser.parse_args()
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    cpu = args.device == "cpu"
    args.tokens = CPU_TOKENS if cpu else TOKENS
    if args.providers is None:
        ours = running(torch.device(args.device))
        peers = [SDPA] if cpu else [SDPA, "flash", "cudnn", "flash_attn_4"]
        args.providers = [*reversed(ours), *peers, "standard"]
    return args


def main() -> int:
    args = parse()
    recorder = common.begin("train", args)
    ours, peers = ([x for x in args.providers if x in names] for names in (VARIANTS, PEERS))
    providers, missing = collect(ours, peers)
    if SDPA in args.providers:
        providers.insert(len(ours), sdpa())
    bench = Bench(args, providers)
    models = args.model or ["tiny" if args.device == "cpu" else "small"]
    sizes = [(m, s) for m in models for s in args.seq or MODELS[m].seqlens]
    for model, seqlen in common.progress(sizes, len(sizes), "cells"):
        recorder.add(*bench.cell(model, seqlen))
        common.free_memory(bench.device)

    def failed(result: Json) -> bool:
        found = [result["providers"][name] for name in ours]
        return any("skipped" in x and "cpu_bound" not in x for x in found)

    return recorder.close(failed, missing)


if __name__ == "__main__":
    sys.exit(main())
