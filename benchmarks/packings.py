"""What packed documents that change with every step cost a sequence split over ranks.

    torchrun --nproc-per-node 4 benchmarks/packings.py                # GPUs, beside each other
    torchrun --nproc-per-node 2 benchmarks/packings.py --device cpu --tokens 2000 --documents 50
    python benchmarks/packings.py --alone 8                           # one rank of eight, no GPU

A step is --layers calls of `flash_ext.integrations.distributed.attention` with the same documents,
forward and backward. Steps with documents that no step had before are timed beside steps with the
same ones again, each packing with itself, so both have the same work and "auto" the same method.
Prints JSON.

With --alone there are no other ranks, kernels or copies: a step is what the host does until a call
has its plan and the numbers of it that go to a device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
from common import Json
from torch import Tensor

from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import request

METHODS = (*cp.METHODS, "auto")
LAYOUTS = ("document_zigzag", "zigzag")


def packings(args: argparse.Namespace, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """cu_seqlens of so many documents, in all so many tokens, cut at random: none twice."""
    draw = random.Random(seed)
    free = args.tokens - args.documents * args.shortest
    while True:
        cuts = sorted(draw.sample(range(1, free + args.documents), args.documents - 1))
        inner = (cut + (i + 1) * (args.shortest - 1) for i, cut in enumerate(cuts))
        yield (0, *inner, args.tokens)


class Steps:
    """Steps of a rank with one method and layout."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, method: str, layout: str
    ) -> None:
        self.layers, self.device, self.layout, self.method = args.layers, device, layout, method
        self.tokens = torch.zeros(args.tokens, dtype=torch.int64, device=device)
        # Ranks have a row more or less of each document.
        self.most = args.tokens // dist.get_world_size() + 2 * args.documents
        self.rows = self.buffers(args)

    def buffers(self, args: argparse.Namespace) -> list[Tensor]:
        """q, k and v, of more rows than a rank has."""
        like: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        heads = (args.heads[0], args.heads[1], args.heads[1])
        return [torch.randn(self.most, h, args.dim, **like) for h in heads]

    def step(self, edges: tuple[int, ...]) -> None:
        """One step."""
        where: dict[str, Any] = {"layout": self.layout, "cu_seqlens": edges}
        count = len(cp.shard(self.tokens, 0, **where))
        for _ in range(self.layers):
            tensors = [x[:count].detach().requires_grad_() for x in self.rows]
            out = cp.attention(*tensors, causal=True, method=self.method, **where)
            torch.autograd.grad(out, tensors, out)

    def meet(self) -> None:
        """All ranks have done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


class Alone(Steps):
    """Steps of a rank without others: plans alone."""

    def buffers(self, args: argparse.Namespace) -> list[Tensor]:
        """As `Steps` says; nobody reads them."""
        heads = (args.heads[0], args.heads[1], args.heads[1])
        return [torch.zeros(1, h, args.dim).expand(self.most, h, args.dim) for h in heads]

    def step(self, edges: tuple[int, ...]) -> None:
        """As `Steps` says."""
        asked = request.Request(self.method, "auto", self.layout, None, True, (-1, -1), True)
        groups = request.groups_of(None)
        count = cp.sharding(edges[-1], groups.ranks, self.layout, edges).lengths[groups.rank]
        tensors = [x[:count] for x in self.rows]
        for _ in range(self.layers):
            core, _ = request.prepare(asked, groups, *tensors, edges, {})
            for calls in getattr(core, "steps", None) or [getattr(core, "inner", core).calls]:
                for call in calls:
                    if call.packed is not None:
                        call.packed.on(self.device)

    def meet(self) -> None:
        """As `Steps` says."""


def timed(steps: Steps, call: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds until a step was enqueued, and until it was done."""
    steps.meet()
    start = time.perf_counter()
    call()
    enqueued = time.perf_counter()
    if steps.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (enqueued - start), 1e3 * (time.perf_counter() - start)


def times(steps: Steps, args: argparse.Namespace) -> Json:
    """Of new packings, and of each of them again at once, on this rank."""
    every = packings(args)
    found: dict[str, list[tuple[float, float]]] = {"new": [], "same": []}
    for number in range(args.warm_up + args.steps):
        edges = next(every)
        for of_name in found.values():
            took = timed(steps, lambda edges=edges: steps.step(edges))
            if number >= args.warm_up:
                of_name.append(took)
    result: Json = {}
    for name, pairs in found.items():
        host, whole = zip(*pairs, strict=True)
        result[f"host_ms_{name}"] = statistics.median(host)
        result |= {f"ms_{name}": statistics.median(whole), f"most_ms_{name}": max(whole)}
    more = [new[0] - same[0] for same, new in zip(found["same"], found["new"], strict=True)]
    return result | {"host_ms_more": statistics.median(more), "least_host_ms_more": min(more)}


def work(args: argparse.Namespace, device: torch.device) -> Json:
    """This rank's results."""
    kind = Alone if args.alone else Steps
    cells: list[Json] = []
    for layout, method in itertools.product(args.layouts, args.methods):
        steps = kind(args, device, method, layout)
        cells.append({"method": method, "layout": layout} | times(steps, args))
    ranks = dist.get_world_size()
    names = ("alone", "tokens", "documents", "shortest", "layers", "heads", "dim", "steps")
    about = {name: getattr(args, name) for name in names}
    setup = common.describe_setup(device)
    return {**setup, **about, "ranks": ranks, "cells": cells}


def alone(args: argparse.Namespace) -> Json:
    """As one of so many ranks, with a backend that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.alone)

    def exchange(group: object, mine: list[Any]) -> list[Any]:
        return args.alone * mine

    with mock.patch.multiple(request, _exchange=exchange, EVERY=10**9):
        return work(args, torch.device("cpu"))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--alone", type=int, default=0, help="so many ranks, of which only one runs")
    add("--rank", type=int, default=0, help="which one; or the one that prints")
    add("--tokens", type=int, default=131072, help="of all ranks")
    add("--documents", type=int, default=1000)
    add("--shortest", type=int, default=16, help="tokens that each document has at least")
    add("--layers", type=int, default=1, help="calls in a step")
    add("--heads", type=int, nargs=2, default=(32, 8), help="of q and of k")
    add("--dim", type=int, default=128)
    add("--steps", type=int, default=30, help="that are timed")
    add("--warm-up", type=int, default=5)
    add("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    add("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    return parser.parse_args(given)


def main() -> None:
    args = parse()
    if args.alone:
        torch.set_num_threads(1)
        found = alone(args)
    else:
        place = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
        if args.device == "cuda":
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        found = work(args, place if args.device == "cuda" else torch.device("cpu"))
    if dist.get_rank() == args.rank:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
