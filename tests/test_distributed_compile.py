"""A sequence split over ranks in graphs of torch.compile: no break, and the results of eager calls.

Would catch a call that breaks the graph, a gradient that the graph lacks or gives to another input,
documents that make it compile again and again, fake results of other shapes than the real ones, and
an error of one rank that the others do not learn of.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import torch.distributed as dist
from distributed_cases import EXACT, mesh_of, run_ranks
from grids import cover
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import functional

Tensor = torch.Tensor
HEADS, DIM, DIM_V = 4, 8, 6
DOCUMENTS = (0, 5, 5, 19, 41)


def tensors(rows: int, packed: bool, ranks: int, **where: Any) -> list[Tensor]:
    """This rank's q, k and v, and a sink: leaves, float64."""
    generator = torch.Generator().manual_seed(rows)
    found = []
    for heads, dim in ((HEADS, DIM), (ranks, DIM), (ranks, DIM_V)):
        shape = (rows, heads, dim) if packed else (2, rows, heads, dim)
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        found.append(cp.shard(whole, 0 if packed else 1, **where).detach())
    found.append(torch.randn(HEADS, generator=generator, dtype=torch.float64))
    return [x.requires_grad_() for x in found]


def with_gradients(call: Callable[..., Any], leaves: list[Tensor], *more: Any) -> list[Tensor]:
    """The results of a call, and the gradients of its leaves."""
    found = call(*leaves, *more)
    results = found if isinstance(found, tuple) else (found,)
    loss = sum(x.sin().sum() for x in results)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=EXACT)


def model(method: str, group: Any = None, **options: Any) -> Callable[..., Any]:
    """Attention with something before and after it, which are in the same graph."""

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, cu_seqlens: Any = None) -> Any:
        found = cp.attention(
            q * 0.5, k, v.tanh(), sink=sink, cu_seqlens=cu_seqlens, method=method, group=group,
            **options,
        )  # fmt: skip
        return found if isinstance(found, tuple) else found * 2

    return call


def check_graphs(ranks: int, device: str) -> None:
    """Every method, both layouts of packed documents, lse too; with 4 ranks those of two levels.

    Without gradients, which is another graph, once for each method."""
    masks: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (7, 3), "softcap": 2.0})
    mesh = mesh_of(ranks, device) if ranks == 4 else None
    calls = [(method, None) for method in (*cp.METHODS, "auto")]
    if mesh is not None:
        calls = [("all_gather", mesh), ("ring", mesh)]
    without_gradients = {method for method, _ in calls}
    for (method, group), mask, packed in cover("cpu", calls, masks, (False, True)):
        torch._dynamo.reset()
        layout = "document_zigzag" if packed and mask.get("causal") else "zigzag"
        documents = torch.tensor(DOCUMENTS, dtype=torch.int32) if packed else None
        where = {"group": group, "layout": layout, "cu_seqlens": documents}
        leaves = tensors(DOCUMENTS[-1], packed, ranks, **where)
        options = {**mask, "layout": layout, "seqlen": DOCUMENTS[-1], "return_lse": packed}
        call = model(method, group, **options)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        expected = with_gradients(call, leaves, documents)
        same(with_gradients(compiled, leaves, documents), expected)
        if method in without_gradients:
            without_gradients.remove(method)
            with torch.no_grad():
                found = compiled(*leaves, documents)
            same(list(found) if packed else [found], expected[: 1 + packed])


def check_uses(ranks: int, device: str) -> None:
    """Under autocast, checkpointed, with documents as a tuple, and an error at run time."""
    leaves = tensors(24, False, ranks)
    call = model("all_gather", causal=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        halves = [x.detach().float() for x in leaves]
        found = compiled(*halves)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, call(*halves))

    def again(*x: Tensor) -> Tensor:
        return checkpoint(call, *x, use_reentrant=False)

    expected = with_gradients(call, leaves)
    same(
        with_gradients(torch.compile(again, backend="aot_eager", fullgraph=True), leaves), expected
    )
    packed = tensors(41, True, ranks, cu_seqlens=DOCUMENTS)
    call = model("ring", causal=True, seqlen=41)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    same(with_gradients(compiled, packed, DOCUMENTS), with_gradients(call, packed, DOCUMENTS))
    cut = torch.compile(lambda x: 2 * cp.shard(2 * x) + cp.position_ids(24), backend="aot_eager")
    x = torch.randn(3, 24)
    torch.testing.assert_close(cut(x), 4 * cp.shard(x) + cp.position_ids(24))
    wrong = torch.compile(model("ring", softcap=9.0), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"k's number of rows on rank 0 must be .*\(on rank 0"):
        first = int(dist.get_rank() == 0)  # whose queries are fewer than its keys
        wrong(leaves[0][:, first:], *leaves[1:])


def check_new_documents(ranks: int, device: str) -> None:
    """Steps with other documents, as many and more, and other numbers of rows: as a tensor they
    compile twice, for sizes as they are and for any."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = model("all_gather", causal=True)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    packings = [(0, 3, 20, 40), (0, 9, 11, 40), (0, 2, 3, 30, 48), (0, 40), (0, 1, 2, 3, 4, 64)]
    for number, edges in enumerate(packings):
        documents = torch.tensor(edges)
        leaves = tensors(edges[-1], True, ranks, cu_seqlens=documents)
        same(with_gradients(compiled, leaves, documents), with_gradients(call, leaves, documents))
        assert counter.frame_count == (1 if number < 2 else 2), (number, counter.frame_count)


def check_opcheck(ranks: int, device: str) -> None:
    """On all ranks at once, since the ops communicate; gradients of out, lse or both in turn.

    Of the calls of a method, dense and packed, the forward of one is traced, the backward of the
    other.
    """
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    traced = (*quick, "test_aot_dispatch_dynamic")
    across = dist.group.WORLD.group_name
    for number, (packed, method) in enumerate(itertools.product((False, True), cp.METHODS)):
        documents = torch.tensor(DOCUMENTS) if packed else None
        where = {"layout": "zigzag", "cu_seqlens": documents}
        *leaves, sink = tensors(DOCUMENTS[-1], packed, ranks, **where)
        settings = (
            documents, None, sink, across, "", method, "auto", "zigzag", DOCUMENTS[-1], True, -1,
            -1, True, None, 0.0, False, "auto",
        )  # fmt: skip
        ops = torch.ops.flash_ext
        torch.library.opcheck(
            ops.context_parallel.default, (*leaves, *settings),
            test_utils=traced if number % 2 else quick,
        )  # fmt: skip
        out, lse = (x.detach() for x in ops.context_parallel(*leaves, *settings))
        saved = (*(x.detach() for x in (*leaves, out, lse)), documents, None, sink.detach())
        dout, dlse = ((out, lse), (out, None), (None, lse))[(number + packed) % 3]
        arguments = (dout, dlse, *saved, *settings[3:])
        torch.library.opcheck(
            ops.context_parallel_backward.default, arguments,
            test_utils=quick if number % 2 else traced,
        )  # fmt: skip


def check_without_the_name(ranks: int, device: str) -> None:
    """A torch that does not find groups by their names: outside of the graph."""
    leaves = tensors(24, False, ranks)
    call = model("all_gather", causal=True)
    torch._dynamo.reset()
    with mock.patch.object(functional, "graphs_available", False):
        compiled = torch.compile(call, backend="aot_eager")
        same(with_gradients(compiled, leaves), with_gradients(call, leaves))
    torch._dynamo.reset()


def check_inductor(ranks: int, device: str) -> None:
    torch._dynamo.reset()
    leaves = tensors(24, False, ranks)
    call = model("ulysses", causal=True)
    compiled = torch.compile(call, fullgraph=True)
    same(with_gradients(compiled, leaves), with_gradients(call, leaves))


def test_two_ranks() -> None:
    run_ranks(
        2, "cpu", check_graphs, check_uses, check_new_documents, check_opcheck,
        check_without_the_name,
    )  # fmt: skip


@pytest.mark.share(0)
def test_two_levels() -> None:
    run_ranks(4, "cpu", check_graphs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote torch's folder")
def test_inductor() -> None:
    run_ranks(2, "cpu", check_inductor)
