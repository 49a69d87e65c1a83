"""Training speed end to end: tokens per second and peak memory of a GPT with each attention.

    python benchmarks/train.py                   # GPT-2 small's size, under a minute on an H200
    python benchmarks/train.py --model medium bert-large long-range
    python benchmarks/train.py --seq 4096 --providers fa1 fa2 fa3 sdpa cudnn
    python benchmarks/train.py --model llama --minutes 2    # no turn begins later than that
    python benchmarks/train.py --activation      # other models, with and without sdpa.activate()
    python benchmarks/train.py --fp8             # a trained model evaluated in FP8; over a minute
    python benchmarks/train.py --device cpu      # a smoke test

The model and its training step are those of examples/train_gpt.py: bytes of Python's standard
library, bf16 autocast, AdamW, gradient clipping, about 16,384 tokens a step. "sdpa" is torch's
scaled_dot_product_attention, which chooses its backend; the result file says which. "standard" is
standard attention in three passes; autocast computes its softmax in float32. A provider that does
not run or does not fit into memory is left out, with the reason.

"small" and "medium" are GPT-2's sizes. "llama" has four layers with the attention of Llama 3.1 8B:
32 query heads of 128 on 8 key heads. "bert-large" and "long-range" have the shapes of BERT-large
and of the small encoders of long-range arena, where every position attends to all: the same model
and the same loss without the mask. What they learn (a byte that they see) means nothing, the time
of a step does. The papers trained on A100s, with dropout, padding and other tasks.

Before a provider trains, its attention must agree with float32 standard attention at the model's
shape; and its loss must stay with standard attention's (SDPA's, if that did not run) at every step.
One that does not is called wrong, and has no speed.

Results go to benchmarks/results/<device>/train.json, each cell (a model at a sequence length) as
soon as it is measured. A run with the same device, versions and source digest adds its cells to
that file or replaces them. Those of --fp8 go to train_fp8.json. After --minutes no cell begins, and
one that has begun ends with the round in which that happens, its first at the earliest.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import activation
import common
import fp8_model
import torch
from common import Json, say
from providers import (
    PEERS,
    VARIANTS,
    Provider,
    Workload,
    collect,
    relative_error,
    running,
    wrong,
)
from timing import Timer, step_times
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.append(str(common.ROOT / "examples"))
import train_gpt  # noqa: E402

TOKENS, CPU_TOKENS = 16384, 128  # a step's


@dataclass(frozen=True)
class Size:
    """A model's shape, and the sequence lengths it is trained at."""

    layers: int
    heads: int
    width: int
    seqlens: tuple[int, ...]
    causal: bool = True
    kv_heads: int = 0  # 0: heads
    rate: float = 1e-4  # AdamW's, at once: six times that enlarges roundings (docs/notes/010)


MODELS = {
    "small": Size(12, 12, 768, (1024, 8192)),
    "medium": Size(24, 16, 1024, (1024,)),
    # At the others' rate a model so wide diverges.
    "llama": Size(4, 32, 4096, (4096, 16384), kv_heads=8, rate=5e-5),
    "bert-large": Size(24, 16, 1024, (512,), causal=False),
    "long-range": Size(4, 4, 256, (1024, 2048, 4096), causal=False),
    "tiny": Size(2, 2, 32, (16, 64)),  # smoke tests
    "tiny-llama": Size(2, 4, 64, (16,), kv_heads=2),
}
MEGABYTES = 1  # of text: many times what the steps read
WARM_UP = 3
SDPA = "sdpa"
REFERENCES = ("standard", SDPA)  # whose losses the others' must equal: the first that trained
LOSS_LIMIT = 2**-10  # relative; what roundings do is below a tenth of it

METHOD = (
    "One process; every provider trains a model of its own, from the same weights on the same "
    f"batches. After {WARM_UP} steps each, the providers take turns, round by round. A turn is one "
    "step that is not timed, then the timed steps one right after the other, between CUDA events "
    "(on a CPU the wall clock). 'ms' is the median step of all turns. 'peak_bytes' is one step's "
    "peak extra memory with the weights and AdamW's state added, as if no other model were there. "
    "'attention' is one layer's attention alone at the model's shape, forward and backward with a "
    "cold L2, and 'share' that of all layers over the step."
)


def sdpa() -> Provider:
    """torch's attention with the backend it chooses itself."""
    return replace(PEERS["flash"](), name=SDPA, label="SDPA", around=nullcontext)


def chosen_backend(work: Workload, causal: bool) -> str:
    """Which backend torch's attention chooses for these inputs."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (work.q, work.k, work.v))
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=grouped)
    return SDPBackend(choice).name.lower()


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
    """One provider's model in training, and what was measured of it."""

    def __init__(
        self,
        provider: Provider,
        config: train_gpt.Config,
        chunks: list[Tensor],
        causal: bool = True,
    ) -> None:
        self.device = torch.device(config.device)
        with self.device:  # the weights are drawn there
            self.training = train_gpt.Training(in_model(provider, causal), config)
        self.around = provider.around
        self.chunks = iter(chunks)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self) -> None:
        """One step; the GPU is not waited for."""
        with self.around():
            self.losses.append(self.training.step(next(self.chunks)))

    def warm_up(self) -> None:
        """The first steps, and the peak memory of the last of them."""
        for _ in range(WARM_UP - 1):
            self.step()
        self.rest()
        extra = common.peak_extra_memory(self.step, self.device)
        self.rest()
        self.peak_bytes = extra + self.state_bytes()

    def turn(self, steps: int) -> None:
        """A step that is not timed, then ``steps`` that are."""
        self.step()
        self.seconds += step_times(self.step, steps, self.device)
        self.rest()

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
        self.args = args
        self.device = torch.device(args.device)
        self.providers = providers
        self.end = time.monotonic() + 60 * args.minutes
        self.data = train_gpt.standard_library(MEGABYTES)

    def config(self, size: Size, seqlen: int) -> train_gpt.Config:
        """The model and its training at a sequence length."""
        batch = max(1, self.args.tokens // seqlen)
        steps = WARM_UP + self.args.rounds * (1 + self.args.steps)
        return train_gpt.Config(
            size.layers, size.heads, size.width, seqlen, batch, steps, self.args.device,
            MEGABYTES, size.rate, kv_heads=size.kv_heads,
        )  # fmt: skip

    def cell(self, model: str, seqlen: int) -> Iterator[Json]:
        """Measure a cell; yields it, not complete before the last time, after each turn."""
        size = MODELS[model]
        config = self.config(size, seqlen)
        results: Json = {p.name: {} for p in self.providers}
        cell: Json = {
            "model": model,
            "causal": size.causal,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads or config.heads,
            "width": config.width,
            "rate": size.rate,
            "seqlen": seqlen,
            "batch": config.batch,
            "dtype": str(config.dtype).removeprefix("torch."),
            "rounds": 0,
            "steps": self.args.steps,
            "date": common.now(),
            "providers": results,
        }
        self.attention(config, size.causal, cell)
        chunks = list(itertools.islice(train_gpt.batches(self.data, config), config.steps))
        trainees: dict[str, Trainee] = {}
        for turn in range(self.args.rounds + 1):
            if turn > 1 and self.late():  # the losses of all are of the same steps
                break
            cell["rounds"] = turn
            shift = turn % len(self.providers)
            for provider in self.providers[shift:] + self.providers[:shift]:
                name = provider.name
                if "skipped" not in results[name]:
                    try:
                        if turn == 0:
                            trainees[name] = Trainee(provider, config, chunks, size.causal)
                            trainees[name].warm_up()
                        else:
                            trainees[name].turn(self.args.steps)
                    except Exception as error:  # most often: out of memory
                        results[name]["skipped"] = common.first_line(error)
                    if "skipped" in results[name]:
                        trainees.pop(name, None)
                        self.release()
                yield cell
        self.judge(config, cell, trainees)

    def attention(self, config: train_gpt.Config, causal: bool, cell: Json) -> None:
        """Check every provider's attention at the model's shape, and time it by itself."""
        shape = (config.batch, config.seq, config.heads, config.width // config.heads)
        work = Workload(shape, config.dtype, self.device, kv_heads=config.kv_heads)
        exact = work.exact(causal, gradients=True)
        timer = Timer(self.device)
        calls: dict[str, Callable[[], object]] = {}
        estimates = {}
        for provider in self.providers:
            name, result = provider.name, cell["providers"][provider.name]
            step = work.step(provider, causal)

            def call(
                step: Callable[[], tuple[Tensor, ...]] = step, provider: Provider = provider
            ) -> tuple[Tensor, ...]:
                with provider.around():
                    return step()

            try:
                got = [work.forward(provider, causal)(), *map(provider.view, call())]
                errors = [relative_error(x, want) for x, want in zip(got, exact, strict=True)]
                whole, block = map(max, zip(*errors, strict=True))
                if bad := wrong(whole, block):
                    result |= bad
                    continue
                result["error"] = float(f"{whole:.3g}")
                estimates[name] = timer.estimate(call)
                calls[name] = call
            except Exception as error:
                result["skipped"] = common.first_line(error)
            finally:
                got = None
        for name, samples in timer.compare(calls, estimates, 0.05).items() if calls else ():
            cell["providers"][name]["attention"] = samples.summary()
        if SDPA in calls:
            cell["sdpa_backend"] = chosen_backend(work, causal)
        del work, exact, timer, calls
        self.release()

    def judge(self, config: train_gpt.Config, cell: Json, trainees: dict[str, Trainee]) -> None:
        """The results of the trainings: the speeds of those whose losses are right."""
        losses = {name: torch.stack(t.losses).tolist() for name, t in trainees.items()}
        reference = next((name for name in REFERENCES if name in losses), None)
        cell["reference"] = reference
        for name, trainee in trainees.items():
            result = cell["providers"][name]
            result["losses"] = [round(x, 6) if math.isfinite(x) else None for x in losses[name]]
            result["peak_bytes"] = trainee.peak_bytes
            difference = loss_difference(losses[name], losses[reference]) if reference else 0.0
            if math.isfinite(difference):
                result["loss_difference"] = float(f"{difference:.3g}")
            if not difference <= LOSS_LIMIT or None in result["losses"]:
                result["skipped"] = f"WRONG RESULT: loss off by {difference:.2g} of {reference}'s"
                result["wrong"] = True
                continue
            seconds = statistics.median(trainee.seconds)
            q1, _, q3 = statistics.quantiles(trainee.seconds * 2, n=4, method="inclusive")
            result |= {
                "ms": round(seconds * 1e3, 4),
                "q1_ms": round(q1 * 1e3, 4),
                "q3_ms": round(q3 * 1e3, 4),
                "tokens_per_second": round(config.batch * config.seq / seconds, 1),
                "share": round(config.layers * result["attention"]["ms"] * 1e-3 / seconds, 4),
            }

    def late(self) -> bool:
        """Whether no more time is left."""
        return time.monotonic() > self.end

    def release(self) -> None:
        """Give unused memory back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def key(cell: Json) -> tuple[str, int]:
    """What identifies a cell of the result file."""
    return cell["model"], cell["seqlen"]


def print_cell(cell: Json, labels: dict[str, str]) -> None:
    """One line per provider."""
    model = f"{cell['layers']} layers, {cell['heads']} heads, width {cell['width']}"
    shape = f"{cell['dtype']}, B {cell['batch']}, S {cell['seqlen']}"
    print(f"\n{cell['model']}: {model}, {shape}")
    print(f"  {'':<20}{'tokens/s':>11}{'over SDPA':>11}{'peak MiB':>10}{'attention':>11}"
          f"{'last loss':>11}{'difference':>12}")  # fmt: skip
    base = cell["providers"].get(SDPA, {}).get("tokens_per_second", math.nan)
    for name, r in cell["providers"].items():
        if "skipped" in r:
            print(f"  {labels[name]:<20} {r['skipped']}")
            continue
        speed, peak = r["tokens_per_second"], r["peak_bytes"] / 2**20
        last, difference = r["losses"][-1], r["loss_difference"]
        print(f"  {labels[name]:<20}{speed:>11,.0f}{speed / base:>11.3f}{peak:>10,.0f}"
              f"{r['share']:>11.1%}{last:>11.4f}{difference:>12.1e}")  # fmt: skip
    if "sdpa_backend" in cell:
        print(f"  SDPA chose {cell['sdpa_backend']}; losses are held against {cell['reference']}'s")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    common.add_device(parser, choices=["cuda", "cpu"])
    add("--model", nargs="+", choices=list(MODELS), help="default: small, on a CPU tiny")
    add("--seq", nargs="+", type=int, help="sequence lengths, default: the model's")
    add("--providers", nargs="+", choices=[*VARIANTS, SDPA, *PEERS],
        help="default: variants that run; sdpa; flash, cudnn, flash-attn 4; standard")  # fmt: skip
    add("--rounds", type=int, help="turns of each provider, default 4; of --activation 20")
    add("--steps", type=int, help="timed steps in a turn, default 4; of --activation 10")
    add("--minutes", type=float, default=math.inf, help="begin no cell and no round later")
    add("--activation", action="store_true", help="only whole steps with and without activation")
    add("--fp8", action="store_true", help="only a trained model, evaluated in FP8 too")
    add("--out", help="result file, default benchmarks/results/<device>/train.json")
    args = parser.parse_args()
    rounds, steps = (activation.ROUNDS, activation.STEPS) if args.activation else (4, 4)
    args.rounds = rounds if args.rounds is None else args.rounds
    args.steps = steps if args.steps is None else args.steps
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    cpu = args.device == "cpu"
    args.model = args.model or ["tiny" if cpu else "small"]
    args.tokens = CPU_TOKENS if cpu else TOKENS
    args.sizes = (
        []
        if args.activation or args.fp8
        else [(m, s) for m in args.model for s in args.seq or MODELS[m].seqlens]
    )
    if args.providers is None:
        ours = running(torch.device(args.device))
        peers = [SDPA] if cpu else [SDPA, "flash", "cudnn", "flash_attn_4"]
        args.providers = [*reversed(ours), *peers, "standard"]
    return args


def main() -> int:
    """Run; the exit status is 1 if a variant of flash_ext was wrong or failed somewhere."""
    args = parse()
    started = time.monotonic()
    warnings.filterwarnings("ignore")  # SDPA explains there what it then raises
    torch.manual_seed(0)
    ours = [name for name in args.providers if name in VARIANTS]
    peers = [name for name in args.providers if name in PEERS]
    providers, missing = collect(ours, peers)
    if SDPA in args.providers:
        providers.insert(len(ours), sdpa())
    bench = Bench(args, providers)
    name = "train_fp8.json" if args.fp8 else "train.json"
    path = common.result_path(bench.device, name, args.out)
    result = common.describe_setup(bench.device) | {
        "method": METHOD,
        "extra_bytes": common.EXTRA_MEMORY,
        "loss_limit": LOSS_LIMIT,
        "not_importable": missing,
        "labels": {p.name: p.label for p in providers},
    }
    old = {"cells": [], "labels": {}} | common.earlier(path, result)
    result["labels"] = old["labels"] | result["labels"]

    cells = {key(cell): cell for cell in old["cells"]}
    measured: dict[tuple[str, int], Json] = {}
    activated = old.get("activation", {})
    result |= {"activation": activated} if activated else {}

    def store() -> None:
        result["seconds"] = round(time.monotonic() - started, 1)
        kept = cells | measured
        common.write_json(path, result | {"cells": [kept[k] for k in sorted(kept)]})

    def run() -> Iterator[Json]:
        for model, seqlen in args.sizes:
            if bench.late():
                say(f"left out, no time: {model}, S {seqlen}")
                continue
            for cell in bench.cell(model, seqlen):
                yield cell
            measured[key(cell)] = cell
            store()
            bench.release()  # one length's models must not crowd out the next

    turns = len(args.sizes) * (args.rounds + 1) * len(providers)
    for _ in common.progress(run(), turns, "turns"):
        pass
    if args.activation:
        cases = common.progress(activation.CASES.items(), len(activation.CASES), "models")
        results = {n: activation.measure(make, bench.device, args.rounds, args.steps)
                   for n, make in cases}  # fmt: skip
        result["activation"] = {
            "method": activation.METHOD, "batch": activation.BATCH, "models": results
        }  # fmt: skip
    if args.fp8:
        configs = fp8_model.GPU if bench.device.type == "cuda" else fp8_model.CPU
        trained = common.progress(map(fp8_model.measure, configs), len(configs), "models")
        result["fp8"] = {"method": fp8_model.METHOD, "models": list(trained)}
    if bench.device.type == "cuda":
        result["nvidia_smi_at_end"] = common.nvidia_smi(bench.device)
    store()

    print(f"{result['device']}, torch {result['torch']}, source {result['digest']}")
    bad = []
    if args.activation:
        activation.print_results(results)
        bad = [name for name, r in results.items() if "skipped" in r]
    if args.fp8:
        fp8_model.print_results(result["fp8"]["models"])
        bad += [n for m in result["fp8"]["models"] for n in fp8_model.OURS
                if "skipped" in m["attentions"][n]]  # fmt: skip
    for cell in measured.values():
        print_cell(cell, result["labels"])
        bad += [name for name in ours if "skipped" in cell["providers"][name]]
        for name, r in cell["providers"].items():
            if r.get("wrong"):
                say(f"!!! {name}, S {cell['seqlen']}: {r['skipped']} !!!")
    for name, reason in missing.items():
        print(f"  not importable: {name}: {reason}")
    print(f"\nwritten: {path}, after {result['seconds']:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
