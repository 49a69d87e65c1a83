"""What packed documents that change with every step cost a sequence split over ranks.

    torchrun --nproc-per-node 4 benchmarks/packings.py                # GPUs, beside each other
    torchrun --nproc-per-node 2 benchmarks/packings.py --device cpu --tokens 2000 --documents 50
    python benchmarks/packings.py --alone 8                           # one rank of eight, no GPU

A step is a call of `flash_ext.integrations.distributed.attention`, forward and backward. Steps with
new documents are timed beside steps with known ones. Prints JSON; "resident_mib" is the process's
memory at ten of the steps. With --alone a step is the host's work: no other ranks, no kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
from common import Json
from distributed import joined
from torch import Tensor

from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import request

METHODS = (*cp.METHODS, "auto")
LAYOUTS = ("document_zigzag", "zigzag")
SHORTEST = 16  # tokens of a document


def packings(args: argparse.Namespace, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """cu_seqlens of so many documents, in all so many tokens, cut at random: none twice."""
    draw = random.Random(seed)
    free = args.tokens - args.documents * SHORTEST
    while True:
        cuts = sorted(draw.sample(range(1, free + args.documents), args.documents - 1))
        inner = (cut + (i + 1) * (SHORTEST - 1) for i, cut in enumerate(cuts))
        yield (0, *inner, args.tokens)


class Steps:
    """Steps of a rank with one method and layout."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, method: str, layout: str
    ) -> None:
        self.args, self.device, self.layout, self.method = args, device, layout, method
        self.groups = request.groups_of(None)
        self.tokens = torch.zeros(args.tokens, dtype=torch.int64, device=device)
        # Of more rows than a rank has: up to one more of each document. Plans alone read none.
        most = args.tokens // self.groups.ranks + 2 * args.documents
        (heads, kv_heads), dtype = args.heads, torch.bfloat16
        self.rows = [
            torch.randn(1 if args.alone else most, h, args.dim, device=device, dtype=dtype)
            .expand(most, -1, -1) for h in (heads, kv_heads, kv_heads)
        ]  # fmt: skip

    def step(self, edges: tuple[int, ...]) -> None:
        """A call and its gradients, or what the host does before them."""
        where: dict[str, Any] = {"layout": self.layout, "cu_seqlens": edges}
        groups = self.groups
        if self.args.alone:
            count = cp.sharding(edges[-1], groups.ranks, self.layout, edges).lengths[groups.rank]
        else:
            count = len(cp.shard(self.tokens, 0, **where))
        tensors = [x[:count].detach().requires_grad_() for x in self.rows]
        if self.args.alone:
            self.plan(tensors, edges)
        else:
            out = cp.attention(*tensors, causal=True, method=self.method, **where)
            torch.autograd.grad(out, tensors, out)

    def plan(self, tensors: list[Tensor], edges: tuple[int, ...]) -> None:
        """A call's plan, and its numbers on the device."""
        asked = request.Request(self.method, "auto", self.layout, None, True, (-1, -1), True)
        core, _ = request.prepare(asked, self.groups, *tensors, edges, {})
        for calls in getattr(core, "steps", None) or [getattr(core, "inner", core).calls]:
            for call in calls:
                if call.packed is not None:
                    call.packed.on(self.device)

    def time(self, edges: tuple[int, ...]) -> tuple[float, float]:
        """Milliseconds until a step was enqueued, and until it was done."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        if not self.args.alone:
            dist.barrier()
        start = time.perf_counter()
        self.step(edges)
        enqueued = time.perf_counter()
        wait()
        return 1e3 * (enqueued - start), 1e3 * (time.perf_counter() - start)


def times(steps: Steps, args: argparse.Namespace) -> Json:
    """Of new packings, and of each of them again at once, on this rank."""
    every = packings(args)
    found: dict[str, list[tuple[float, float]]] = {"new": [], "same": []}
    for _ in range(args.warm_up):
        edges = next(every)
        steps.time(edges), steps.time(edges)
    resident = []  # at most, until then
    for edges in itertools.islice(every, args.steps):
        for of_name in found.values():
            of_name.append(steps.time(edges))
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    result: Json = {"resident_mib": resident[:: max(1, args.steps // 10)]}
    for name, pairs in found.items():
        host, whole = zip(*pairs, strict=True)
        result |= {f"host_ms_{name}": statistics.median(host), f"most_ms_{name}": max(whole),
                   f"ms_{name}": statistics.median(whole)}  # fmt: skip
    more = [new[0] - same[0] for same, new in zip(found["same"], found["new"], strict=True)]
    return result | {"host_ms_more": statistics.median(more), "least_host_ms_more": min(more)}


def work(args: argparse.Namespace, device: torch.device) -> Json:
    cells = [
        {"method": method, "layout": layout} | times(Steps(args, device, method, layout), args)
        for layout, method in itertools.product(args.layouts, args.methods)
    ]
    ranks = {"ranks": dist.get_world_size(), "cells": cells}
    return vars(args) | common.describe_setup(device) | ranks


def alone(args: argparse.Namespace) -> Json:
    """As one of so many ranks, with a backend that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.alone)

    def exchange(group: object, mine: list[Any]) -> list[Any]:
        return args.alone * mine

    torch.set_num_threads(1)
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
    add("--heads", type=int, nargs=2, default=(32, 8), help="of q and of k")
    add("--dim", type=int, default=128)
    add("--methods", nargs="*", default=METHODS, choices=METHODS)
    add("--layouts", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    add("--steps", type=int, default=30, help="that are timed")
    add("--warm-up", type=int, default=5)
    return parser.parse_args(given)


def main() -> None:
    args = parse()
    found = alone(args) if args.alone else work(args, joined(args.device))
    if dist.get_rank() == args.rank:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
