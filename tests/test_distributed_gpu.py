"""A sequence split over 2 and 4 GPUs, by copy engines and by NCCL: distributed_cases.py, enlarged.

    python -m pytest -n 0 tests/test_distributed_gpu.py   # where GPUs are fewer, it skips

Would catch a kernel that reads what has not arrived, a buffer that is reused while it is sent or
read, copies that are kernels, and what only a GPU has: its combining kernel, TMA on strided keys,
torch's context_parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import distributed_cases
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import Case, check_by_rule, mesh_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from flash_ext.integrations import distributed as cp
from flash_ext.integrations import sdpa
from flash_ext.integrations.distributed import request, symmetric
from flash_ext.integrations.distributed.on_device import MOST_RESULTS

RANKS = (2, 4)
REPEATS = 20


def enlarged(case: Case) -> Case:
    """Many tiles, of the head dims that models have."""
    options = dict(case.options)
    if "window" in options:
        options["window"] = tuple(30 * side if side > 0 else side for side in options["window"])
    documents = case.documents
    if documents is not None:
        documents = tuple(41 * edge for edge in documents)
    rows = case.rows if case.rows < 8 else 41 * case.rows
    dims = {"dim": 16 * case.dim, "dim_v": 16 * case.dim_v}
    return dataclasses.replace(case, rows=rows, options=options, documents=documents, **dims)


def check_cases(ranks: int, device: str, transport: str = "copy_engines") -> None:
    mesh = mesh_of(ranks, device)
    for number, case in enumerate(distributed_cases.cases(ranks)):
        case = dataclasses.replace(enlarged(case), transport=transport)
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        check_by_rule(case, mesh if case.two_levels else None, dtype, "auto")


def check_collectives(ranks: int, device: str) -> None:
    check_cases(ranks, device, "collectives")


def check_variants(ranks: int, device: str) -> None:
    heads = {"heads_q": 4 * ranks, "heads_k": 2 * ranks}
    for method, variant in itertools.product(cp.METHODS, flash_ext.VARIANTS):
        if torch.cuda.get_device_capability()[0] != 9 and variant == "fa3":
            continue
        case = Case(method, rows=29, options={"causal": True}, **heads)
        check_by_rule(enlarged(case), None, torch.bfloat16, variant)


def tensors(ranks: int, device: str, rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v of the whole sequence, and this rank's dout."""
    torch.manual_seed(rows)
    like = {"device": device, "dtype": torch.bfloat16}
    whole = [torch.randn(1, rows, n * ranks, 128, **like) for n in (4, 2, 2)]
    return whole, cp.shard(torch.randn_like(whole[0]))


def many_documents(rows: int) -> dict[str, Any]:
    """Options of packed documents, of which every rank has many spans."""
    return {"layout": "document_zigzag", "cu_seqlens": tuple(range(0, rows + 1, rows // 16))}


def results(
    whole: list[torch.Tensor],
    dout: torch.Tensor,
    method: str,
    transport: str,
    packed: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv of this rank."""
    leaves = [cp.shard(x, **(packed or {})).detach().requires_grad_() for x in whole]
    out = cp.attention(
        *(x[0] if packed else x for x in leaves), causal=True, method=method, transport=transport,
        deterministic=True, seqlen=whole[0].shape[1], **(packed or {}),
    )  # fmt: skip
    return (out.detach(), *torch.autograd.grad(out, leaves, dout[0] if packed else dout))


def check_races(ranks: int, device: str) -> None:
    """The same call again and again gives the same bits: nothing is read before it has arrived, and
    nothing is written while it is read. Ranks are late by turns."""
    whole, dout = tensors(ranks, device, 4096)
    transports = ("copy_engines", "collectives")
    packings = (None, many_documents(4096))
    for method, transport, packed in itertools.product(cp.METHODS, transports, packings):
        first = results(whole, dout, method, transport, packed)
        for number in range(REPEATS):
            if number % (ranks + 1) == dist.get_rank():
                torch.cuda._sleep(3_000_000)
            found = results(whole, dout, method, transport, packed)
            for x, expected in zip(found, first, strict=True):
                assert torch.equal(x, expected), (method, transport, packed, number)


def check_growth(ranks: int, device: str) -> None:
    """Lengths that come and go, unequal numbers of rows, methods by turns: shared memory grows and
    is used again, and results are those of collectives."""
    lengths = (515, 4099, 130, 9001, 2048, ranks - 1, 12290, 4099)
    calls = [(rows, cp.METHODS[i % 3]) for i, rows in enumerate(lengths)]
    inputs = {rows: tensors(ranks, device, rows) for rows in lengths}
    found = [results(*inputs[rows], method, "copy_engines") for rows, method in calls]
    for (rows, method), copied in zip(calls, found, strict=True):
        for x, y in zip(copied, results(*inputs[rows], method, "collectives"), strict=True):
            assert torch.allclose(x, y, rtol=2e-2, atol=2e-2), (rows, method)


def check_streams(ranks: int, device: str) -> None:
    """Calls on other streams, by turns, use the same shared memory."""
    whole, dout = tensors(ranks, device, 2048)
    first = results(whole, dout, "all_gather", "copy_engines")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for number in range(12):
        with torch.cuda.stream(streams[number % 3]):
            found.append(results(whole, dout, cp.METHODS[0], "copy_engines"))
    torch.cuda.synchronize()
    for each in found:
        assert all(torch.equal(x, y) for x, y in zip(each, first, strict=True))


def check_copies_are_no_kernels(ranks: int, device: str) -> None:
    """Beside the attention kernels only copies run, no kernel of NCCL and none that copies."""
    whole, dout = tensors(ranks, device, 8192)
    for method in cp.METHODS:
        for _ in range(3):  # until memory for others no longer grows
            results(whole, dout, method, "auto")
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            results(whole, dout, method, "auto")
            torch.cuda.synchronize()
        names: dict[str, list[str]] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                names.setdefault(str(event.device_resource_id), []).append(event.name)
        every = [name for of_stream in names.values() for name in of_stream]
        assert not any("nccl" in name.lower() for name in every), (method, every)
        copies = [of for of in names.values() if all("emcpy" in name for name in of)]
        assert copies, (method, {stream: sorted(set(of)) for stream, of in names.items()})


def packings(rows: int, ranks: int, count: int) -> list[tuple[int, ...]]:
    """cu_seqlens that differ, of documents that every rank has as many rows of."""
    draw, chunk = random.Random(rows), 2 * ranks
    return [
        (0, *(chunk * x for x in sorted(draw.sample(range(1, rows // chunk), 11))), rows)
        for _ in range(count)
    ]


def check_capture(ranks: int, device: str) -> None:
    """A CUDA graph of a call and its backward pass, replayed with other values, and after as many
    other packings as caches hold. It does not hold barriers between the GPUs, but collectives."""
    rows = 256 * ranks
    like = {"device": device, "dtype": torch.bfloat16}
    draws = [torch.randn(2, 256, n * ranks, 64, **like) for n in (4, 2, 2, 4)]
    first, second = ([x[i] for x in draws] for i in (0, 1))
    edges, *others = packings(rows, ranks, 1 + 2 * MOST_RESULTS)
    of_gpu = torch.device(device, torch.cuda.current_device())
    assert symmetric.has_engines("auto", dist.group.WORLD, of_gpu)
    for method, packed in itertools.product(cp.METHODS, (False, True)):
        where = {"layout": "document_zigzag", "cu_seqlens": edges} if packed else {}
        leaves = [x.clone() if packed else x[None].clone() for x in first[:3]]
        dout = first[3].clone() if packed else first[3][None].clone()

        def call(
            transport: str,
            leaves: list[torch.Tensor] = leaves,
            dout: torch.Tensor = dout,
            method: str = method,
            **where: Any,
        ) -> tuple[torch.Tensor, ...]:
            inputs = [x.detach().requires_grad_() for x in leaves]
            out = cp.attention(
                *inputs, causal=True, method=method, transport=transport, deterministic=True,
                seqlen=rows, **where,
            )  # fmt: skip
            return (out.detach(), *torch.autograd.grad(out, inputs, dout))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for transport in ("auto", "auto", "collectives"):
                call(transport, **where)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            assert not symmetric.has_engines("auto", dist.group.WORLD, of_gpu)
            found = call("auto", **where)
        if packed:
            for other in others:  # after which nothing of this packing is kept for others
                call("auto", layout="document_zigzag", cu_seqlens=other)
        for x, y in zip((*leaves, dout), second, strict=True):
            x.copy_(y if packed else y[None])
        graph.replay()
        torch.cuda.synchronize()
        for x, expected in zip(found, call("collectives", **where), strict=True):
            assert torch.equal(x, expected), (method, packed)


def check_no_host_wait(ranks: int, device: str) -> None:
    """Nothing in a call waits for the device, nor for the other ranks: with documents that change
    with every step neither."""
    like = {"device": device, "dtype": torch.bfloat16}
    leaves = [torch.randn(1, 256, 4 * ranks, 64, **like).requires_grad_() for _ in range(3)]
    no_exchange = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError)
    layouts = (None, "document_zigzag", "zigzag")
    for (method, layout), watched in itertools.product(
        itertools.product((*cp.METHODS, "auto"), layouts), (2, 64)
    ):
        tensors = [x[0] for x in leaves] if layout else leaves
        edges = packings(256 * ranks, ranks, 9) if layout else [None] * 9
        for number, documents in enumerate(edges):
            warm = number < 4  # until shared memory is large enough
            where = {"layout": layout, "cu_seqlens": documents} if layout else {}
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            try:
                with (
                    contextlib.nullcontext() if warm else no_exchange,
                    mock.patch.object(request, "EVERY", watched),
                ):
                    out = cp.attention(*tensors, causal=True, method=method, **where)
                    torch.autograd.grad(out, leaves, torch.ones_like(out))
            finally:
                torch.cuda.set_sync_debug_mode("default")


def check_copies_to_the_gpu(ranks: int, device: str) -> None:
    """A new packing costs a copy of its plan's numbers, and one of its rows' order if ranks have
    many spans: for all layers, streams and passes."""
    rows = 256 * ranks
    whole = [torch.randn(rows, n * ranks, 64, device=device).bfloat16() for n in (4, 2, 2)]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    every = iter(packings(rows, ranks, 40))
    for method, layout in itertools.product((*cp.METHODS, "auto"), ("document_zigzag", "zigzag")):
        *others, new = itertools.islice(every, 5)

        def step(edges: tuple[int, ...], method: str = method, layout: str = layout) -> None:
            where = {"layout": layout, "cu_seqlens": edges}
            leaves = [cp.shard(x, 0, **where).detach().requires_grad_() for x in whole]
            for _ in range(3):
                out = cp.attention(*leaves, causal=True, method=method, **where)
                torch.autograd.grad(out, leaves, torch.ones_like(out))

        with mock.patch.object(request, "EVERY", 10**9):
            for edges in others:
                step(edges)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=activities) as profile:
                step(new)
                torch.cuda.synchronize()
        copies = [event.name for event in profile.events() if "HtoD" in event.name]
        assert len(copies) <= 1 + (layout == "document_zigzag"), (method, layout, copies)


def check_documents_that_change(ranks: int, device: str) -> None:
    """Many packings, none twice, with unequal numbers of rows: results are those of one GPU, and
    memory does not grow once caches are full."""
    torch.manual_seed(0)
    rows, sizes = 512 * ranks, []
    whole = [torch.randn(rows, n * ranks, 64, device=device).bfloat16() for n in (2, 1, 1)]
    draw = random.Random(0)
    for number in range(6 * MOST_RESULTS):
        edges = (0, *sorted(draw.sample(range(1, rows), 19)), rows)
        where = {"layout": cp.LAYOUTS[number % 3], "cu_seqlens": edges}
        parts = [cp.shard(x, 0, **where) for x in whole]
        out = cp.attention(*parts, causal=True, method=cp.METHODS[number % 4 % 3], **where)
        if number % 16 == 0:
            documents = torch.tensor(edges, dtype=torch.int32, device=device)
            expected = flash_ext.attention_varlen(*whole, documents, documents, causal=True)
            joined = cp.unshard(out, 0, **where)
            torch.testing.assert_close(joined, expected, rtol=2e-2, atol=2e-2)
        del out, parts
        sizes.append(torch.cuda.memory_allocated())
    half = len(sizes) // 2
    assert max(sizes[half:]) < max(sizes[:half]) + (4 << 20), sizes[::16]


def check_compiled(ranks: int, device: str) -> None:
    """In a graph of torch.compile, with documents that change: results are those of eager calls."""
    rows = 256 * ranks
    like = {"device": device, "dtype": torch.bfloat16}
    leaves = [torch.randn(256, n * ranks, 64, **like).requires_grad_() for n in (4, 2, 2)]
    for method in cp.METHODS:

        def model(q: Any, k: Any, v: Any, cu_seqlens: Any, method: str = method) -> Any:
            out = cp.attention(
                q * 0.5, k, v, cu_seqlens=cu_seqlens, layout="document_zigzag", seqlen=rows,
                causal=True, method=method, deterministic=True,
            )  # fmt: skip
            return out * 2

        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        for edges in packings(rows, ranks, 4):
            found = []
            for call in (model, compiled):
                out = call(*leaves, torch.tensor(edges))
                found.append((out, *torch.autograd.grad(out.float().sin().sum(), leaves)))
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def check_context_parallel(ranks: int, device: str) -> None:
    """torch's own context_parallel, with flash_ext under SDPA's flash backend."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (ranks,))
    like = {"device": device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, 4, 512 * ranks, 64, **like) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    exact = (expected.detach(), *torch.autograd.grad(expected, whole, dout))
    buffers = [x.clone() for x in (q, k, v, dout, *exact)]
    with (
        sdpa.activated(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
    ):
        *parts, of_rank, out_here, dq_here, dk_here, dv_here = (x.clone() for x in buffers)
        leaves = [x.requires_grad_() for x in parts]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        found = (out, *torch.autograd.grad(out, leaves, of_rank))
        for x, e in zip(found, (out_here, dq_here, dk_here, dv_here), strict=True):
            torch.testing.assert_close(x.float(), e.float(), rtol=2e-2, atol=2e-2)


CHECKS = (
    check_cases,
    check_collectives,
    check_variants,
    check_races,
    check_growth,
    check_streams,
    check_copies_are_no_kernels,
    check_capture,
    check_no_host_wait,
    check_copies_to_the_gpu,
    check_documents_that_change,
    check_compiled,
    check_context_parallel,
)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_split_over_gpus(check, ranks: int, need_gpus: Callable[[int], None]) -> None:
    need_gpus(ranks)
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    run_ranks(ranks, "cuda", check)
