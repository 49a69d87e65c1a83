"""A sequence split over 2, 3 and 4 processes on the CPU: equal to the whole, in every way.

Would catch a chunk in the wrong place, keys that a rank misses or counts twice, a partial result
with the wrong weight, a gradient that lacks a rank's share or goes to another rank's rows, heads
that meet other heads' keys, a document that sees another across ranks, and ranks that wait for each
other for ever where they disagree.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import distributed_cases
import gpu_test_report  # noqa: F401  (puts benchmarks/ on the path)
import torch.distributed as dist
from distributed_cases import Case, check_exact, mesh_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import flash_ext
from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import cost, methods, symmetric


def check_cases(ranks: int, device: str) -> None:
    """All with 2 ranks; 3 have one half of them, 4 the other half and all of two levels."""
    mesh = mesh_of(ranks, device)
    for number, case in enumerate(distributed_cases.cases(ranks)):
        if ranks < 4 or number % 2 or case.two_levels:
            check_exact(case, mesh if case.two_levels else None)


def check_batch(ranks: int, device: str) -> None:
    """shard, unshard and position_ids are of one order, and shard has a gradient."""
    groups = (None, dist.group.WORLD, init_device_mesh(device, (ranks,)), mesh_of(ranks, device))
    documents = (0, 5, 5, 23)
    for group in groups:
        for layout in cp.LAYOUTS:
            for rows in (23, 24, 2):
                if layout == "document_zigzag" and rows != 23:
                    continue
                where = {"group": group, "layout": layout}
                if rows == 23:
                    where["cu_seqlens"] = documents
                x = torch.arange(2.0 * rows * 3).view(2, rows, 3).requires_grad_()
                part = cp.shard(x, **where)
                assert torch.equal(cp.unshard(part, seqlen=rows, **where), x)
                part.sum().backward()
                total = x.grad.clone()
                dist.all_reduce(total)
                assert torch.equal(total, torch.ones_like(total))
                positions = cp.position_ids(rows, **where)
                labels = cp.shard(torch.arange(rows), 0, **where)
                if rows == 23:
                    labels = torch.where(labels >= 5, labels - 5, labels)
                assert torch.equal(positions, labels)
    with pytest.raises(ValueError, match="x's dimension 1 must be this rank's"):
        cp.unshard(torch.zeros(1, 99), seqlen=4)


def inputs(rows: int = 8, heads: int = 4, **like: Any) -> list[torch.Tensor]:
    return [torch.randn(1, rows, heads, 8, **like) for _ in range(3)]


def check_uses(ranks: int, device: str) -> None:
    """Without lse, without gradients, under autocast, checkpointed, with cu_seqlens as a tensor."""
    torch.manual_seed(0)
    q, k, v = inputs(8 * ranks, 2 * ranks)
    expected, _ = flash_ext.reference.attention(q, k, v, causal=True)
    parts = [cp.shard(x) for x in (q, k, v)]
    for method in cp.METHODS:
        with torch.no_grad():
            out = cp.attention(*parts, causal=True, method=method)
        torch.testing.assert_close(cp.unshard(out), expected)
        with torch.autocast(device, torch.bfloat16):
            out = cp.attention(*parts, causal=True, method=method)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(cp.unshard(out).float(), expected, rtol=2e-2, atol=2e-2)
        leaf = parts[1].clone().requires_grad_()
        cp.attention(parts[0], leaf, parts[2], method=method).sum().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
        again = parts[1].clone().requires_grad_()
        call = partial(cp.attention, method=method)
        checkpoint(call, parts[0], again, parts[2], use_reentrant=False).sum().backward()
        torch.testing.assert_close(again.grad, leaf.grad)
    edges = torch.tensor([0, 3, 8 * ranks], dtype=torch.int32)
    for layout in cp.LAYOUTS:
        packed = [cp.shard(x[0], 0, layout=layout, cu_seqlens=edges) for x in (q, k, v)]
        out = cp.attention(*packed, cu_seqlens=edges, layout=layout, causal=True)
        whole = flash_ext.reference.attention_varlen(q[0], k[0], v[0], edges, edges, causal=True)
        joined = cp.unshard(out, 0, layout=layout, cu_seqlens=edges)
        torch.testing.assert_close(joined, whole[0])


def check_default_device(ranks: int, device: str) -> None:
    """Another default device moves no tensor of a call, and none that a cache keeps for later."""
    heads = {"heads_q": 2 * ranks, "heads_k": ranks}
    documents = (0, 2, 9, 33)  # of no other check: what is kept is made here
    for method, layout in itertools.product(cp.METHODS, cp.LAYOUTS):
        common = {"options": {"causal": True}, "sink": True, **heads}
        for more in ({"rows": 27}, {"rows": 33, "documents": documents}):
            if layout == "document_zigzag" and "documents" not in more:
                continue
            case = Case(method, layout, **common, **more)
            whole = distributed_cases.Whole(case, torch.float64, device)
            with torch.device("meta"):
                found = distributed_cases.split_call(whole, None)
                where = {"layout": layout, "cu_seqlens": case.documents}
                assert cp.position_ids(case.rows, device=device, **where).device.type == device
            again = distributed_cases.split_call(whole, None)
            for name, x in whole.expected(torch.float64).items():
                for result in (found[name], again[name]):
                    torch.testing.assert_close(result, x, rtol=0, atol=distributed_cases.EXACT)


def raises(message: str, *tensors: torch.Tensor, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        cp.attention(*tensors, **options)


def check_disagreement(ranks: int, device: str) -> None:
    """Every rank raises, and says what differs; then a good call works again."""
    first = dist.get_rank() == 0
    raises("heads of q is .* on rank 0, .* on rank 1", *inputs(heads=4 if first else 2))
    raises("batch is 1 on rank 0, 2 on rank 1", *(x.expand(1 if first else 2, -1, -1, -1)
                                                  for x in inputs()))  # fmt: skip
    double = {"dtype": torch.float32 if first else torch.float64}
    raises("dtypes of q, k and v is .*float32.* on rank 0, .*float64", *inputs(**double))
    raises("causal is True on rank 0, False on rank 1", *inputs(), causal=first)
    transport = "collectives" if first else "auto"
    raises("transport is 'collectives' on rank 0", *inputs(), transport=transport)
    raises("method is 'ring' on rank 0", *inputs(), method="ring" if first else "all_gather")
    raises("layout is", *inputs(), layout="zigzag" if first else "contiguous")
    raises("softcap", *inputs(), softcap=1.0 if first else 2.0)
    raises("gradients wanted is", *(x.requires_grad_(first) for x in inputs()))
    raises(r"seqlen \(which .*\) is 16 on rank 0, 14 on rank 1", *inputs(rows=8 if first else 7))
    sink = {"sink": torch.zeros(4)} if first else {}
    raises("sink is .*on rank 0, None on rank 1", *inputs(), **sink)
    packed = [x[0] for x in inputs(heads=4)]
    raises("cu_seqlens is", *packed, cu_seqlens=(0, 3 if first else 4, 8 * ranks))
    # What is wrong on one rank only is said on all.
    q, k, v = inputs()
    raises(r"k's number of rows on rank 0 must be 8 .*\(on rank 0", q, k[:, :5] if first else k, v)
    out = cp.attention(*inputs(), causal=True)
    assert out.isfinite().all()


def check_refusals(ranks: int, device: str) -> None:
    q, k, v = inputs()
    slopes = torch.ones(4)
    raises("layout must be", q, k, v, layout="stripes")
    raises("method must be 'auto' or 'all_gather'", q, k, v, method="star")
    raises("transport must be 'auto' or 'collectives'", q, k, v, transport="pigeons")
    raises("transport must be .*copy engines are of GPUs, not of cpu", q, k, v,
           transport="copy_engines")  # fmt: skip
    raises("alibi_slopes need method 'ulysses', or 'all_gather'", q, k, v, alibi_slopes=slopes,
           method="ring", causal=True)  # fmt: skip
    raises("alibi_slopes need method 'ulysses'", q, k, v, alibi_slopes=slopes, method="all_gather")
    raises("number must divide q's heads", *inputs(heads=2 * ranks + 1), method="ulysses")
    raises("cu_seqlens must be given", q, k, v, layout="document_zigzag")
    raises("q must be of shape .* with cu_seqlens", q, k, v, cu_seqlens=(0, 8 * ranks))
    raises("cu_seqlens must be from 0 on", q[0], k[0], v[0], cu_seqlens=(0, 9, 8, 8 * ranks))
    raises(r"alibi_slopes must be of shape \(heads_q\)", q[0], k[0], v[0],
           cu_seqlens=(0, 8 * ranks), alibi_slopes=slopes[None])  # fmt: skip
    raises("softcap must be", q, k, v, softcap=-1.0)
    raises("variant must be", q, k, v, variant="fa9")
    raises("sink must be", q, k, v, sink=torch.zeros(3))
    raises("window must be", q, k, v, window=3)
    raises("seqlen|number of rows", q, k, v, seqlen=8 * ranks + 2 * ranks)


def check_hosts(ranks: int, device: str) -> None:
    """Context parallel across hosts, of each of which the group has one rank, say beside tensor
    parallel within: the links are those between hosts, however many processes a host has."""
    machines = []
    for host in ("one", f"number {dist.get_rank()}"):
        group = dist.new_group()
        said = mock.patch.object(symmetric, "_host", return_value=host)
        torchrun = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8")
        exchanges = mock.patch.object(symmetric, "_every", side_effect=symmetric._every)
        with said, torchrun, exchanges as exchange:
            for _ in range(3):
                machines.append(methods.machine_of(torch.device("cuda"), group, False))
            assert exchange.call_count == 1
            assert methods.machine_of(torch.device("cuda"), group, True) == cost.ENGINES
            assert methods.machine_of(torch.device("cpu"), group, False) == cost.CPU
    assert machines == 3 * [cost.ONE_HOST] + 3 * [cost.MANY_HOSTS]


def check_benchmark(ranks: int, device: str) -> None:
    """benchmarks/distributed.py runs, with a number for everything that it promises."""
    import distributed as benchmark

    benchmark.FEWEST_ROUNDS = 1
    small = ["--device", device, "--lengths", "32", "--seconds", "0.1", "--methods"]
    recorder = mock.Mock() if dist.get_rank() == 0 else None
    found = benchmark.work(benchmark.parse([*small, "all_gather", "ring", "ulysses"]), recorder)
    added = [call.args for call in recorder.add.call_args_list] if recorder else []
    assert [cell | result for cell, result in added] == (found if recorder else [])
    for result in found:
        assert "error" not in result, result
        for name in ("forward", "backward"):
            numbers = ("ms", "tflops", "kernels_ms", "share")
            assert all(result[name][number] > 0 for number in numbers), result
    assert benchmark.failed(found) == 0
    with mock.patch.object(benchmark, "measure", side_effect=RuntimeError("why")):
        found = benchmark.work(benchmark.parse([*small, "ring"]))
    assert [(x["provider"], x["error"]) for x in found] == [("ring zigzag", "RuntimeError: why")]
    assert benchmark.failed(found) == 1
    assert benchmark.failed([{"provider": "ring-flash-attn ring", "error": "no"}]) == 0


def check_a_missing_rank(ranks: int, device: str) -> None:
    """Last: the group is of no use afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="exchange of shapes and options .* not complete"):
            cp.attention(*inputs(), group=group)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=1))
    shards = cp.sharding(8 * ranks, ranks)
    if dist.get_rank() == 0:
        from flash_ext.integrations.distributed.transport import Collectives

        transport = Collectives(group, shards)
        with pytest.raises(RuntimeError, match="piece 2 of 3 did not complete"):
            transport.gather_rows(torch.zeros(8, 2), "all-gather of K and V, piece 2 of 3").wait()
    dist.barrier()


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.share(0)), 4])
def test_equal_to_the_whole(ranks: int) -> None:
    run_ranks(ranks, "cpu", check_cases, check_batch)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.share(0))])
def test_copies_are_equal_to_the_whole(ranks: int) -> None:
    run_ranks(ranks, "cpu", distributed_cases.check_copies)


def test_two_ranks() -> None:
    """Here also the uses, and what is refused."""
    run_ranks(
        2, "cpu", check_default_device, check_cases, check_batch, check_uses, check_refusals,
        check_disagreement, check_hosts, check_benchmark, check_a_missing_rank,
    )  # fmt: skip


def test_one_rank() -> None:
    """Alone nothing travels."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for method in cp.METHODS:
            check_exact(Case(method, rows=13, options={"causal": True}, sink=True), None)
            documents = (0, 1, 9, 37)
            check_exact(Case(method, "document_zigzag", 37, documents=documents), None)
    finally:
        dist.destroy_process_group()
