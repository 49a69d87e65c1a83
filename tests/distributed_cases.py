"""The cases of a sequence split over ranks, and processes that run them: CPU and GPU alike.

`run_ranks` starts so many processes with a function of this module; whatever one of them raises
fails the test with its traceback.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import random
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import attention_testing
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flash_ext
from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import algorithms, engines, request, transport

Tensor = torch.Tensor
SLOW_IMPORTS = [
    *("torch", "torch.distributed.tensor", "torch._dynamo.testing", "pytest", "hypothesis"),
    *("flash_ext.integrations.distributed", "distributed_cases"),
]
"""What every process would take seconds to import: a server does, once, and forks them."""

FEW_KEYS = itertools.cycle((algorithms.FEW_KEYS, 0))
"""By turns: a backward pass of the all-gather is one call, or as many as its plan has."""

EXACT = 1e-10
"""How far float64 results may be from those of the whole sequence."""


@dataclass(frozen=True)
class Case:
    """A call, its layout and the whole sequence's sizes."""

    method: str = "all_gather"
    layout: str = "zigzag"
    rows: int = 24
    heads_q: int = 4
    heads_k: int = 2
    dim: int = 8
    dim_v: int = 8
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    sink: bool = False
    alibi: str = ""
    """"h" or "bh"."""

    documents: tuple[int, ...] | None = None
    two_levels: bool = False
    transport: str = "auto"

    def __str__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        )
        return ", ".join(changed)


CAUSAL = {"causal": True}
MASKS: tuple[dict[str, Any], ...] = (
    {},
    CAUSAL,
    {"window": (5, -1), **CAUSAL},
    {"window": (3, 4)},
    {"window": (-1, 6)},
    {"softcap": 2.0, "scale": 0.7, **CAUSAL},
)
DOCUMENTS = ((0, 4, 4, 15, 29), (0, 1, 9, 37))


def cases(ranks: int) -> Iterator[Case]:
    """Those for so many ranks: all, and every other one for an odd number."""
    yield from itertools.islice(_cases(ranks), 0, None, 1 + ranks % 2)


def _cases(ranks: int) -> Iterator[Case]:
    """All that run with so many ranks, whose heads Ulysses can divide."""
    heads = {"heads_q": 4 * ranks, "heads_k": 2 * ranks}
    for method in cp.METHODS:
        for options, rows in zip(MASKS, itertools.cycle((24, 29, 30)), strict=False):
            yield Case(method, rows=rows, options=options, batch=2, **heads)
        for layout in ("contiguous", "zigzag"):
            yield Case(method, layout, 31, options=CAUSAL, sink=True, dim=6, dim_v=10, **heads)
            window = {"window": (4, 3)}
            yield Case(method, layout, 23, options=window, sink=True, **heads)
        yield Case(method, rows=3, options=CAUSAL, **heads)  # ranks without a row
        yield Case(method, rows=24, options=CAUSAL, heads_q=2 * ranks, heads_k=1)
        yield Case(method, rows=29, heads_q=3 * ranks, heads_k=3 * ranks, options=CAUSAL)
        for documents, layout in itertools.product(DOCUMENTS[:2], cp.LAYOUTS):
            common = {"layout": layout, "rows": documents[-1], "documents": documents, **heads}
            yield Case(method, options=CAUSAL, sink=True, **common)
        for layout in cp.LAYOUTS[::2]:
            common = {"layout": layout, "rows": 29, "documents": DOCUMENTS[0], **heads}
            yield Case(method, options={"window": (3, 2)}, **common)
        tail = {"rows": 40, "documents": DOCUMENTS[0], **heads}
        yield Case(method, "document_zigzag", options=CAUSAL, **tail)
    yield Case("auto", options=CAUSAL, **heads)
    for alibi, options in (("h", CAUSAL), ("bh", {"window": (7, 0)})):
        for method, layout in itertools.product(
            ("all_gather", "ulysses"), ("zigzag", "contiguous")
        ):
            yield Case(method, layout, 29, options=options, alibi=alibi, batch=2, **heads)
    yield Case("ulysses", options={"window": (4, 2)}, alibi="h", **heads)
    yield Case("auto", options={}, alibi="h", **heads)
    documents = DOCUMENTS[0]
    yield Case("all_gather", rows=29, options=CAUSAL, alibi="h", documents=documents, **heads)
    for method, options in itertools.product(("all_gather", "ring"), (CAUSAL, {"window": (3, 4)})):
        common = {"options": options, "sink": True, "two_levels": True, **heads}
        yield Case(method, rows=37, batch=2, **common)
        yield Case(method, rows=29, documents=documents, **common)


class Whole:
    """The inputs of the whole sequence, and what standard attention makes of them."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(case.rows)
        like = {"dtype": torch.float64, "generator": generator}
        rows, batch = case.rows, case.batch

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, **like).to(dtype).to(device)

        self.case = case
        self.q = random(batch, rows, case.heads_q, case.dim)
        self.k = random(batch, rows, case.heads_k, case.dim)
        self.v = random(batch, rows, case.heads_k, case.dim_v)
        self.dout = random(batch, rows, case.heads_q, case.dim_v)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        self.dlse = random(batch, case.heads_q, rows).to(statistics)
        self.sink = random(case.heads_q).to(statistics) if case.sink else None
        self.alibi: Tensor | None = None
        if case.alibi:
            shape = (case.heads_q,) if case.alibi == "h" else (batch, case.heads_q)
            self.alibi = (torch.rand(shape, **like) * 0.3).to(statistics).to(device)

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """out, lse and all gradients, by standard attention in this dtype."""
        case = self.case
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in (self.q, self.k, self.v))
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {"dq": q, "dk": k, "dv": v}
        options = dict(case.options)
        if self.sink is not None:
            options["sink"] = leaves["dsink"] = self.sink.to(statistics, copy=True).requires_grad_()
        if self.alibi is not None:
            options["alibi_slopes"] = self.alibi.to(statistics)
        if case.documents is None:
            out, lse = flash_ext.reference.attention(q, k, v, **options)
        else:
            edges = torch.tensor(case.documents, dtype=torch.int32, device=q.device)
            out, lse = flash_ext.reference.attention_varlen(
                q[0], k[0], v[0], edges, edges, **options
            )
            out, lse = out[None], lse[None]
        gradients = torch.autograd.grad(
            (out, lse), tuple(leaves.values()), (self.dout.to(dtype), self.dlse.to(statistics))
        )
        found = {"out": out.detach(), "lse": lse.detach()}
        return found | dict(zip(leaves, gradients, strict=True))


def split_call(whole: Whole, group: Any, variant: str = "auto") -> dict[str, Tensor]:
    """out, lse and all gradients from the ranks, joined to whole tensors on every rank."""
    case = whole.case
    where = {"group": group, "layout": case.layout, "cu_seqlens": case.documents}
    joining = where | {"seqlen": case.rows}
    parts = [cp.shard(x, 1, **where).detach() for x in (whole.q, whole.k, whole.v)]
    dout, dlse = cp.shard(whole.dout, 1, **where), cp.shard(whole.dlse, 2, **where)
    if case.documents is not None:
        parts, dout, dlse = [x[0] for x in parts], dout[0], dlse[0]
    leaves = [x.requires_grad_() for x in parts]
    options = dict(case.options)
    if whole.sink is not None:
        options["sink"] = whole.sink.detach().clone().requires_grad_()
        leaves.append(options["sink"])
    if whole.alibi is not None:
        options["alibi_slopes"] = whole.alibi
    few_keys = mock.patch.object(algorithms, "FEW_KEYS", next(FEW_KEYS))
    with attention_testing.nan_filled_outputs(), few_keys:
        out, lse = cp.attention(
            *parts, method=case.method, transport=case.transport, seqlen=case.rows,
            variant=variant, return_lse=True, **where, **options,
        )  # fmt: skip
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    found = {"out": out.detach(), "lse": lse.detach()}
    found |= dict(zip(("dq", "dk", "dv"), gradients[:3], strict=True))
    if case.documents is not None:
        found = {name: x[None] for name, x in found.items()}
    found = {name: cp.unshard(x, 2 if name == "lse" else 1, **joining) for name, x in found.items()}
    if whole.sink is not None:
        found["dsink"] = gradients[3].clone()
        dist.all_reduce(found["dsink"])
    return found


def check_exact(case: Case, group: Any) -> None:
    """float64 on the CPU: equal to the whole sequence's up to the order of sums."""
    whole = Whole(case, torch.float64, "cpu")
    found = split_call(whole, group)
    if case.rows % dist.get_world_size() != dist.get_rank():
        return  # one rank judges for all: every rank has the joined results
    expected = whole.expected(torch.float64)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=0, atol=EXACT, msg=lambda m, n=name: f"{case}: {n}: {m}"
        )


def check_by_rule(
    case: Case, group: Any, dtype: torch.dtype, variant: str, device: str = "cuda"
) -> None:
    """The rule of attention_testing, in a GPU's dtypes."""
    whole = Whole(case, dtype, device)
    found = split_call(whole, group, variant)
    expected = attention_testing.Expected(whole.expected(torch.float64), whole.expected(dtype))
    if "dsink" in found and case.heads_q < attention_testing.HANDFUL:
        del found["dsink"]  # a handful of numbers: the rule judges them by luck
    try:
        attention_testing.assert_accurate(found, expected, dtype)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


class SharedFiles:
    """A window of memory that processes share, in place of that of GPUs.

    Copies run at once, or when somebody waits for them, by lot: each of them could run so late on a
    GPU. Memory is NaN at first.
    """

    def __init__(self, group: Any, draw: random.Random, capacity: int) -> None:
        self.group, self.rank, self.draw = group, dist.get_rank(group), draw
        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, group=group, group_src=0)
        files = [Path(folder[0]) / str(rank) for rank in range(dist.get_world_size(group))]
        files[self.rank].write_bytes(b"\xff" * capacity)
        dist.barrier(group)
        like = {"size": capacity, "dtype": torch.uint8}
        self.buffers = [torch.from_file(str(file), shared=True, **like) for file in files]
        dist.barrier(group)
        files[self.rank].unlink()
        self.queue: list[Any] = []

    def follow(self) -> None:
        pass

    def drain(self) -> None:
        self.run(len(self.queue))

    def run(self, count: int) -> None:
        """The first copies, in their order, as many as have not run yet."""
        for i, copies in enumerate(self.queue[:count]):
            for out, x in copies:
                assert out.is_contiguous() and x.is_contiguous() and out.dtype == x.dtype
                assert out.shape == x.shape
                out.copy_(x)
            self.queue[i] = ()

    def meet(self) -> None:
        dist.barrier(self.group)

    def mark(self) -> Callable[[Any], Callable[[], object]]:
        def begin(copies: Any) -> Callable[[], object]:
            self.queue.append(copies)
            count = len(self.queue)
            if self.draw.random() < 0.5:
                self.run(count)
            return lambda: self.run(count)

        return begin


def check_copies(ranks: int, device: str) -> None:
    """The transport by copies, over shared memory; regions are few and are used again soon.

    Every case of several spans a rank both span by span and reordered, the others by turns.
    """
    stagings: dict[Any, engines.Staging] = {}
    draw = random.Random(dist.get_rank())
    before = request.make, engines.GRAIN, engines.LARGE, engines.FEW_SPANS

    def make(name: str, device: torch.device, group: Any, shards: cp.Sharding) -> Any:
        if dist.get_world_size(group) == 1:
            return transport.Collectives(group, shards)
        if group not in stagings:
            stagings[group] = engines.Staging(functools.partial(SharedFiles, group, draw))
        return engines.CopyEngines(stagings[group], shards, dist.get_rank(group))

    mesh = mesh_of(ranks, device)
    # With 3 ranks the even ones of all.
    chosen = list(cases(ranks)) if ranks % 2 else list(cases(ranks))[1::2]
    request.make, engines.GRAIN = make, engines.ALIGNMENT
    try:
        for number, case in enumerate(chosen):
            engines.LARGE = before[2] if number % 3 else 8192
            limits = (0, 99) if case.layout == "document_zigzag" else (99 * (number % 2),)
            for engines.FEW_SPANS in limits:
                check_exact(case, mesh if case.two_levels else None)
    finally:
        request.make, engines.GRAIN, engines.LARGE, engines.FEW_SPANS = before


def mesh_of(ranks: int, device: str) -> DeviceMesh:
    """(across, within)."""
    within = 2 if ranks % 2 == 0 else ranks
    return init_device_mesh(device, (ranks // within, within), mesh_dim_names=("across", "within"))


def _process(
    rank: int, ranks: int, device: str, port: int, errors: Any, checks: tuple[Callable[..., None]]
) -> None:
    gc.freeze()  # what the server has imported, no collection looks at
    warnings.simplefilter("ignore")
    os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)  # ranks share memory, not a context
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=120))
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        for check in checks:
            check(ranks, device)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        raise


def run_ranks(ranks: int, device: str, *checks: Callable[..., None]) -> None:
    """Call each of `checks`, functions (ranks, device) of a module, on every rank."""
    for _ in range(5):
        failure = _run_ranks(ranks, device, *checks)
        if failure is None:
            return
        if "EADDRINUSE" not in failure:  # another process was quicker to take the port
            break
    pytest.fail(failure)


def _run_ranks(ranks: int, device: str, *checks: Callable[..., None]) -> str | None:
    """What failed, or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_IMPORTS)
    errors = context.SimpleQueue()
    processes = torch.multiprocessing.start_processes(
        _process,
        (ranks, device, port, errors, checks),
        ranks,
        join=False,
        start_method="forkserver",
    )
    try:
        while not processes.join(timeout=120):
            pass
    except Exception as error:
        return errors.get() if not errors.empty() else str(error)
    return None
