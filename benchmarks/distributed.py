"""Speed of one sequence split over GPUs: per GPU, beside the same work without communication.

    python benchmarks/distributed.py                       # all GPUs of this machine
    python benchmarks/distributed.py --methods ring --transport collectives --peers none
    torchrun --nproc-per-node 4 benchmarks/distributed.py  # the same, also on several machines
    python benchmarks/distributed.py --device cpu          # a smoke test with gloo

Causal self-attention with the heads of Llama 3.1 8B, one sequence of so many tokens in all. Every
method of `flash_ext.integrations.distributed`; torch's context_parallel with cuDNN, by each of its
rotations. packings.py has packed documents.

Each rank is a process with one GPU; before each call all ranks and their GPUs meet. 'ms' is the
median of the slowest rank's times. A method and its kernels alone take turns, since a GPU at its
power limit gets slower. Backward is one torch.autograd.grad call on a graph that was built before.
'tflops' is per GPU: 4 H D FLOP a visible pair, 2.5 times that backward, over all ranks.
'kernels_ms' is the method's kernels alone, on the slowest rank and on keys that are there already,
and 'share' that over 'ms'. 'peak_bytes' is the most memory a rank's allocator held, inputs
included. 'launch_bound' marks a call that the CPU may have delayed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Json, first_line
from results import Recorder, add_output
from timing import balanced_orders
from torch import Tensor

from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import local, plan, symmetric

CAUSAL = plan.Mask(None, 0, None)
LAYOUT = "zigzag"
LENGTHS, CPU_LENGTHS = (32768, 131072, 1048576), (256,)
MOST_ROUNDS, FEWEST_ROUNDS = 20, 2
AHEAD = 20_000_000  # cycles that the GPU waits, so that the host is ahead when a call begins
FACTORS = {"forward": 1.0, "backward": 2.5}  # of the forward's FLOPs
TIMEOUT = timedelta(minutes=2)  # until a collective that hangs ends


@dataclass(frozen=True)
class Cell:
    rows: int  # of one sequence, on all ranks
    ranks: int
    heads_q: int = 32
    heads_k: int = 8
    dim: int = 128


# ------------------------------------------------------------------------------------- providers
@dataclass
class Provider:
    """One way to compute a cell on this rank."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    dout: Tensor
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    facts: Json = field(default_factory=dict)

    def backward_of(self, out: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


TORCH = "torch cudnn_attention {}"


class Ranks:
    """This rank's part of a cell: inputs, and everything that providers share."""

    def __init__(self, cell: Cell, device: torch.device, dtype: torch.dtype) -> None:
        self.cell, self.device, self.dtype = cell, device, dtype
        self.rank = dist.get_rank()
        self.rows = cp.sharding(cell.rows, cell.ranks, LAYOUT).lengths[self.rank]

    def inputs(self, rows: int) -> tuple[list[Tensor], Tensor]:
        """q, k and v, requiring gradients, and dout: (1, rows, H, D)."""
        normal = partial(torch.randn, device=self.device, dtype=self.dtype)
        q, dout = normal(2, 1, rows, self.cell.heads_q, self.cell.dim)
        k, v = normal(2, 1, rows, self.cell.heads_k, self.cell.dim)
        return [x.requires_grad_() for x in (q, k, v)], dout


def ours(ranks: Ranks, method: str, transport: str) -> Provider:
    leaves, dout = ranks.inputs(ranks.rows)
    given = {"layout": LAYOUT, "seqlen": ranks.cell.rows, "transport": transport}
    forward = partial(cp.attention, *leaves, causal=True, method=method, **given)
    engines = symmetric.has_engines(transport, dist.group.WORLD, ranks.device)
    facts = {"transport": "copy_engines" if engines else "collectives"}
    return Provider(forward, leaves, dout, facts=facts)


class Kernels:
    """The kernels of a rank alone, on random keys: of some rows and all heads, the calls of the
    all-gather, or of all rows and some heads, those of Ulysses."""

    def __init__(self, ranks: Ranks, by_heads: bool) -> None:
        cell = ranks.cell
        by_rows = 1 if by_heads else cell.ranks
        rank = 0 if by_heads else ranks.rank
        shards = cp.sharding(cell.rows, by_rows, LAYOUT)
        self.calls = plan.as_batch(plan.gathered(shards, rank, CAUSAL))
        (q, _, _), dout = ranks.inputs(shards.lengths[rank])
        (_, k, v), _ = ranks.inputs(cell.rows)
        self.q, self.dout, self.k, self.v = (
            x.detach()[:, :, : max(1, x.shape[2] * by_rows // cell.ranks)].contiguous()
            for x in (q, dout, k, v)
        )
        batch, rows, heads, dim = self.dout.shape
        self.out = torch.zeros_like(self.dout)
        self.lse = torch.zeros(batch, heads, rows, device=ranks.device)
        for call in self.calls:
            out, lse = local.forward(call, self.q, self.k, self.v, {})
            self.out[:, slice(*call.q)], self.lse[..., slice(*call.q)] = out, lse

    def forward(self) -> None:
        for call in self.calls:
            local.forward(call, self.q, self.k, self.v, {})

    def backward_of(self, out: object) -> Callable[[], None]:
        given = self.dout, None, self.q, self.k, self.v, self.out, self.lse, {}

        def backward() -> None:
            for call in self.calls:
                local.backward(call, *given)

        return backward


def torchs(ranks: Ranks, rotation: str) -> Provider:
    """torch's context_parallel with cuDNN: causal, its own zigzag."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cell = ranks.cell
    mesh = init_device_mesh(ranks.device.type, (cell.ranks,))
    leaves, dout = ranks.inputs(cell.rows // cell.ranks)
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        set_rotate_method(rotation)
        buffers = [torch.zeros(2 * cell.ranks, device=ranks.device)]  # it cannot do without one
        parallel = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), parallel:
            yield

    return Provider(
        # Looked up in each call: context_parallel puts its own function there.
        lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True),
        heads_first,
        dout.transpose(1, 2),
        around,
    )


def providers(ranks: Ranks, args: argparse.Namespace) -> dict[str, Callable[[], Provider]]:
    """Names and makers of all that are asked for."""
    transport = f", {args.transport}" if args.transport != "auto" else ""
    found = {
        f"{x} {LAYOUT}{transport}": partial(ours, ranks, x, args.transport) for x in args.methods
    }
    if ranks.device.type == "cuda" and args.peers == "all":
        found |= {TORCH.format(x): partial(torchs, ranks, x) for x in ("allgather", "alltoall")}
    return found


# ---------------------------------------------------------------------------------------- timing
class Clock:
    """Times calls on all ranks at once."""

    def __init__(self, device: torch.device, limit: float) -> None:
        self.device, self.limit, self.cuda = device, limit, device.type == "cuda"
        self.late: set[str] = set()
        self._one = torch.ones(1, device=device)

    def meet(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def once(self, call: Callable[[], object]) -> tuple[float, bool]:
        """Seconds of one call on this rank, and whether the CPU may have delayed it."""
        self.meet()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start, False
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        dist.all_reduce(self._one, dist.ReduceOp.MAX)  # enqueued: no GPU begins before the others
        begin.record()
        call()
        end.record()
        late = begin.query()  # the GPU has come to the call before it was enqueued
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, late

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' numbers."""
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found.item())

    def median(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds of each call on the slowest rank; they take turns. `late` names those that the
        CPU delayed in most rounds, on any rank."""
        first = sum(self.slowest(self.once(call)[0]) for call in calls.values())
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(self.limit / max(first, 1e-6))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        late = dict.fromkeys(calls, 0)
        orders = itertools.islice(itertools.cycle(balanced_orders(list(calls))), rounds)
        for name in itertools.chain.from_iterable(orders):
            seconds, was_late = self.once(calls[name])
            times[name].append(self.slowest(seconds))
            late[name] += was_late
        self.late = {name for name in calls if self.slowest(late[name]) > rounds / 2}
        return {name: statistics.median(values) for name, values in times.items()}


def measure(provider: Provider, clock: Clock, cell: Cell, kernels: Kernels | None) -> Json:
    """Times, memory and rates of one provider, in turns with its kernels alone if it is ours."""
    result: Json = dict(provider.facts)
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    with provider.around():
        provider.backward_of(provider.forward())()
    clock.meet()
    if clock.cuda:
        result["peak_bytes"] = int(clock.slowest(torch.cuda.max_memory_allocated()))
    every: dict[str, Any] = {"ms": provider} | ({"kernels_ms": kernels} if kernels else {})
    pairs = sum(plan.visible_pairs(cp.sharding(cell.rows, 1), CAUSAL))
    for which, factor in FACTORS.items():
        with provider.around():
            if which == "backward":
                calls = {name: each.backward_of(each.forward()) for name, each in every.items()}
            else:
                calls = {name: torch.no_grad()(each.forward) for name, each in every.items()}
            found = clock.median(calls)
        flops = 4.0 * cell.heads_q * cell.dim * pairs * factor / cell.ranks
        result[which] = {"ms": found["ms"] * 1e3, "tflops": flops / found["ms"] / 1e12}
        if "ms" in clock.late:
            result[which]["launch_bound"] = True
        if alone := found.get("kernels_ms"):
            result[which] |= {"kernels_ms": alone * 1e3, "share": alone / found["ms"]}
    return result


def run_cell(ranks: Ranks, args: argparse.Namespace) -> Iterator[tuple[Json, Json]]:
    """Every provider of one cell, and its result."""
    clock = Clock(ranks.device, args.seconds)
    for name, make in providers(ranks, args).items():
        common.free_memory(ranks.device)
        method, _, _ = name.partition(" ")
        try:
            kernels = Kernels(ranks, method == "ulysses") if method in cp.METHODS else None
            result = measure(make(), clock, ranks.cell, kernels)
        except Exception as wrong:  # a peer that is absent or cannot, on every rank
            result = {"error": first_line(wrong)}
        yield {"kind": "causal"} | asdict(ranks.cell) | {"provider": name}, result


# ------------------------------------------------------------------------------------- processes
def joined(device: str, timeout: timedelta | None = None) -> torch.device:
    """This rank's device, after it has joined the others that torchrun has started."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    return torch.device(device, torch.cuda.current_device() if device == "cuda" else None)


def work(args: argparse.Namespace, recorder: Recorder | None = None) -> list[Json]:
    """This rank's part of everything, in a default group that exists; rank 0 has a recorder."""
    cpu, ranks = args.device == "cpu", dist.get_world_size()
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if cpu else torch.bfloat16
    torch.manual_seed(dist.get_rank())
    found: list[Json] = []
    heads = (2 * ranks, ranks, 16) if cpu else ()
    lengths = args.lengths or (CPU_LENGTHS if cpu else LENGTHS)
    asked = [Cell(rows, ranks, *heads) for rows in lengths]
    for cell in common.progress(asked, len(asked), "cells") if recorder else asked:
        for what, result in run_cell(Ranks(cell, device, dtype), args):
            found.append(what | result)
            if recorder:
                recorder.add(what, result)
    return found


def failed(found: list[Json]) -> int:
    """1 if a method of this package has an error in place of a result."""
    return int(any("error" in x and x["provider"].split()[0] in cp.METHODS for x in found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    add = parser.add_argument
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cuda", "cpu"], default=default)
    add("--ranks", type=int, help="processes; default: a GPU each, on a CPU 2")
    add("--lengths", type=int, nargs="*", help=f"tokens in all; default {LENGTHS}")
    add("--methods", nargs="*", default=list(cp.METHODS), choices=cp.METHODS)
    add("--transport", choices=["auto", "collectives"], default="auto")
    add("--peers", choices=["all", "none"], default="all")
    add("--seconds", type=float, default=4.0, help="for the rounds of a provider in a cell")
    add_output(parser)
    return parser.parse_args(given)


def main() -> int:
    args = parse()
    if "RANK" not in os.environ:  # a process for each rank, this script again
        ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return subprocess.call([sys.executable, *torchrun, __file__, *sys.argv[1:]])
    joined(args.device, TIMEOUT)
    recorder = common.begin("distributed", args) if dist.get_rank() == 0 else None
    found = work(args, recorder)
    if recorder:
        recorder.close()
    dist.destroy_process_group()
    return failed(found)


if __name__ == "__main__":
    sys.exit(main())
