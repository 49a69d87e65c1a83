"""Packed documents that change with every step: what a new packing costs, and what it gives.

Would catch a plan that differs from one made document by document, a loop over documents on the
host or many ops of torch, a copy to the GPU for each stream, an exchange between ranks for each
packing, memory that grows with every packing, ranks with different documents that nobody notices,
and tensors of a mode that a cache keeps for all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from forked import run_python

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import gpu_test_report  # noqa: F401  (puts benchmarks/ on the path)
import torch.distributed as dist
from distributed_cases import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext.integrations import distributed as cp
from flash_ext.integrations.distributed import methods, on_device, plan, request
from flash_ext.integrations.distributed.on_device import MOST_RESULTS, Kept, kept
from flash_ext.integrations.distributed.packing import Call, Mask

Span = tuple[int, int]
CAUSAL = Mask(None, 0)


def packing(documents: int, seed: int, shortest: int = 16) -> tuple[int, ...]:
    """cu_seqlens of so many documents, none shorter than 2 · 8 ranks have chunks."""
    draw = random.Random(seed)
    lengths = (draw.randint(shortest, 240) for _ in range(documents))
    return (0, *itertools.accumulate(lengths))


# -------------------------------------------------------------- plans, document by document
def segments(spans: list[Span], documents: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(row of the rank, first and last row of the sequence, document) of each part of a span."""
    at = 0
    for a, b in spans:
        for number, (c, d) in enumerate(itertools.pairwise(documents)):
            if max(a, c) < min(b, d):
                yield at + max(a, c) - a, max(a, c), min(b, d), number
        at += b - a


def meeting(q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> tuple[Any, ...] | None:
    """Rows of q and of k, window, own and aligned of two parts of one document."""
    (at_q, a, b, _), (at_k, c, d, _) = q, k
    left, right = mask.left, mask.right
    a, b = (
        max(a, c - right) if right is not None else a,
        min(b, d + left) if left is not None else b,
    )
    if a >= b:
        return None
    c, d = (
        max(c, a - left) if left is not None else c,
        min(d, b + right) if right is not None else d,
    )
    if c >= d:
        return None
    sides = [-1 if left is None else left + d - b, -1 if right is None else right - (d - b)]
    if b != d:
        sides = [
            -1 if x >= most else x for x, most in zip(sides, (d - c - 1, b - a - 1), strict=True)
        ]
    rows_q, rows_k = ((at + x - s[1], at + y - s[1])
                      for at, s, x, y in ((at_q, q, a, b), (at_k, k, c, d)))  # fmt: skip
    own = k[1] <= q[1] and q[2] <= k[2]
    return rows_q, rows_k, tuple(sides), own, b == d


def plain(q: list[Span], k: list[Span], mask: Mask) -> list[tuple[Any, ...]]:
    """The calls, in the order of `described`."""
    assert mask.documents is not None
    pairs = [meeting(x, y, mask) for x in segments(q, mask.documents)
             for y in segments(k, mask.documents) if x[3] == y[3]]  # fmt: skip
    runs: list[list[tuple[Any, ...]]] = []
    for pair in sorted((x for x in pairs if x is not None), key=lambda x: (not x[3], x[0], x[1])):
        for run in runs:
            (_, q_end), (_, k_end), *alike, _ = run[-1]
            if alike == list(pair[2:4]) and q_end == pair[0][0] and k_end <= pair[1][0]:
                run.append(pair)
                break
        else:
            runs.append([pair])
    found = []
    for run in runs:
        q0, k0, q1, k1 = run[0][0][0], run[0][1][0], run[-1][0][1], run[-1][1][1]
        of_q, of_k = [[*(x[i][0] - first for x in run), last - first]
                      for i, (first, last) in enumerate(((q0, q1), (k0, k1)))]  # fmt: skip
        used: list[int] | None = [x[1][1] - x[1][0] for x in run]
        if used == [b - a for a, b in itertools.pairwise(of_k)]:
            used = None
        packed = (None, None, None) if len(run) == 1 else (of_q, of_k, used)
        found.append(((q0, q1), (k0, k1), *run[0][2:4], *packed, all(x[4] for x in run)))
    return found


def described(call: Call) -> tuple[Any, ...]:
    """A call in plain numbers."""
    packed: tuple[Any, ...] = (None, None, None)
    if call.packed is not None:
        options = call.packed.on(torch.device("cpu"))
        found = (options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
        packed = tuple(None if x is None else x.tolist() for x in found)
    return call.q, call.k, call.window, call.own, *packed, call.aligned


def test_plans_are_those_of_document_by_document() -> None:
    """Bit by bit: with documents that are shorter than there are chunks, with empty ones, windows
    that end within a chunk, and rows after the last document."""
    draw = random.Random(0)
    for _ in range(250):
        lengths = draw.choice(((0, 1, 2, 5, 9, 14), (0, 1, 2, 3, 3, 40), (16, 17, 30, 64)))
        count = draw.randint(1, draw.choice((3, 8, 30)))
        documents = (0, *itertools.accumulate(draw.choices(lengths, k=count)))
        sides = itertools.product((None, 0, 1, 4, 11, 2**31 - 1), repeat=2)
        left, right = draw.choice(((None, 0), *sides))
        mask = Mask(left, right, documents)
        rows, ranks = documents[-1] + draw.choice((0, 0, 4)), draw.randint(1, 5)
        shards = cp.sharding(rows, ranks, draw.choice(cp.LAYOUTS), documents)
        for rank, spans in enumerate(shards.spans):
            calls = plan.gathered(shards, rank, mask)
            assert [described(x) for x in calls] == plain(list(spans), [(0, rows)], mask)
            for t, calls in enumerate(plan.ring(shards, rank, mask)):
                keys = list(shards.spans[(rank - t) % ranks])
                assert [described(x) for x in calls] == plain(list(spans), keys, mask)
                assert calls == () or t < plan.ring_steps(shards, mask)


@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("layout", ["zigzag", "document_zigzag"])
def test_plans_of_documents_that_all_ranks_share(layout: str, right: int | None) -> None:
    """Without a window, documents of as many rows as there are chunks or more: these plans come
    from whole chunks and blocks. With rows after the last document as well."""
    draw = random.Random(1)
    for ranks, count, more in itertools.product((2, 3, 4), (2, 3, 9), (0, 5)):
        lengths = [draw.randint(2 * ranks, 40) for _ in range(count)]
        documents = (0, *itertools.accumulate(lengths))
        mask, rows = Mask(None, right, documents), documents[-1] + more
        shards = cp.sharding(rows, ranks, layout, documents)
        for rank, spans in enumerate(shards.spans):
            calls = plan.gathered(shards, rank, mask)
            assert [described(x) for x in calls] == plain(list(spans), [(0, rows)], mask)
            for source, of_source in enumerate(shards.spans):
                calls = plan.step(shards, rank, source, mask)
                assert [described(x) for x in calls] == plain(list(spans), list(of_source), mask)
        assert plan.calls_in_a_step(shards, mask) >= len(plan.step(shards, ranks - 1, 0, mask))


def steps_of_python(documents: int, layout: str, work: Any) -> int:
    """How many functions are called, of Python and of C, for a packing that nobody has seen."""
    edges = packing(documents, seed=documents)
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        shards = cp.sharding(edges[-1], 8, layout, edges)
        work(shards, Mask(None, 0, edges))
        shards.of_rank(torch.empty(edges[-1], 1), 3, 0)
        shards.positions(3)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("layout", cp.LAYOUTS)
@pytest.mark.parametrize(
    "work",
    [
        lambda shards, mask: plan.gathered(shards, 3, mask),
        lambda shards, mask: plan.ring(shards, 3, mask),
        methods.work,
    ],
    ids=["gathered", "ring", "work"],
)
def test_no_loop_over_documents(layout: str, work: Any) -> None:
    """Planning a thousand documents takes Python no more steps than a hundred."""
    few, many = (steps_of_python(count, layout, work) for count in (100, 1000))
    assert 0 < many <= 1.2 * few + 20


class Counting(TorchDispatchMode):
    """How many ops of torch are dispatched."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


MOST_OPS = {
    ("document_zigzag", "all_gather"): 64,
    ("document_zigzag", "ring"): 52,
    ("document_zigzag", "ulysses"): 45,
    ("document_zigzag", "auto"): 70,
    ("zigzag", "all_gather"): 45,
    ("zigzag", "ring"): 42,
    ("zigzag", "ulysses"): 12,
    ("zigzag", "auto"): 62,
}
"""Ops of torch, views included, that a new packing may take more than the same one again. Each
takes the host microseconds, however few numbers it has. "auto" takes an all-gather here, and looks
at the pairs first."""


def check_ops(ranks: int, device: str) -> None:
    """A new packing of a thousand documents takes the host few ops."""
    import packings as benchmark

    args = benchmark.parse(["--tokens", "131072", "--alone", str(ranks)])
    every = benchmark.packings(args)
    for (layout, method), most in MOST_OPS.items():
        steps = benchmark.Steps(args, torch.device(device), method, layout)
        tokens = torch.zeros(args.tokens, dtype=torch.int64)

        def ops(
            edges: tuple[int, ...],
            steps: Any = steps,
            tokens: torch.Tensor = tokens,
            layout: str = layout,
        ) -> int:
            with Counting() as counting:
                cp.shard(tokens, 0, layout=layout, cu_seqlens=edges)
                steps.step(edges)
            return counting.count

        for _ in range(2):  # the first ones agree, and make what is for all packings
            ops(next(every))
        edges = next(every)
        # Modes are off while something that is kept is made; here it is to count.
        with mock.patch.object(on_device, "ordinary_tensors", contextlib.nullcontext):
            new, same = ops(edges), ops(edges)
        assert 0 < new - same <= most, (layout, method, new, same)


class Stream:
    """A stream of a GPU that is not there."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waits_for = number, []

    def record_event(self) -> str:
        return f"event of {self.cuda_stream}"

    def wait_event(self, event: str) -> None:
        self.waits_for.append(event)


def test_numbers_are_copied_once_for_all_streams() -> None:
    """Other streams wait for the copy, and its memory for what they do; a graph that is captured
    waits for nothing."""
    streams, copies, used = [Stream(i) for i in range(3)], [], []
    gpu, current, captures = torch.device("cuda", 0), streams[0], False

    def moved(x: torch.Tensor, device: torch.device) -> Any:
        copies.append(current)
        return SimpleNamespace(nbytes=x.nbytes, record_stream=used.append)

    some = on_device.Numbers(torch.arange(5, dtype=torch.int32))
    with (
        mock.patch.object(on_device, "moved", moved),
        mock.patch.object(torch.cuda, "current_stream", lambda device: current),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: captures),
    ):
        found = some.on(gpu)
        for stream in (*streams[:2], *streams[:2]):
            current = stream
            assert some.on(gpu) is found
        assert copies == streams[:1]
        assert streams[1].waits_for == ["event of 0"] and streams[1] in used
        current, captures = streams[2], True
        assert some.on(gpu) is found and streams[2].waits_for == [] and streams[2] not in used
        on_device.Numbers(torch.arange(5, dtype=torch.int32)).on(gpu)  # of the graph alone
        captures = False
        on_device.Numbers(torch.arange(5, dtype=torch.int32)).on(gpu)
        assert copies == [streams[0], streams[2], streams[2]]


# -------------------------------------------------------------- what is kept
def caches() -> dict[str, Kept[Any]]:
    modules = {name: x for name, x in sys.modules.items() if name.startswith(cp.__name__)}
    return {
        f"{name}.{key}": x
        for name, module in modules.items()
        for key, x in vars(module).items()
        if isinstance(x, Kept)
    }


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_flat() -> None:
    """After some packings the next ones take no more of it."""
    sizes = []
    for number in range(640):
        edges = packing(1000, seed=number)
        shards = cp.sharding(edges[-1], 8, "document_zigzag", edges)
        mask = Mask(None, 0, edges)
        plan.gathered(shards, 3, mask)
        methods.work(shards, mask)
        if number % 4 == 0:
            plan.ring(shards, 3, mask)
            shards.orders(torch.device("cpu"), padded=True)
        sizes.append(resident())
    found = {name: (x.nbytes, x.most_bytes) for name, x in caches().items()}
    assert len(found) > 8 and all(0 <= size <= most for size, most in found.values()), found
    assert max(sizes[256:]) - max(sizes[:256]) < 16 << 20, sizes[::64]


def test_results_are_kept_up_to_their_bytes() -> None:
    calls: list[int] = []

    @kept(most_bytes=10_000)
    def zeros(count: int) -> torch.Tensor:
        calls.append(count)
        return torch.zeros(count, dtype=torch.uint8, device="cpu")

    first = zeros(4000)
    assert zeros(3000) is zeros(3000) and zeros(4000) is first and calls == [4000, 3000]
    zeros(4001)  # which leaves no room for the one that was asked for least recently
    assert zeros(4000) is first and zeros(3000) is not None and calls == [4000, 3000, 4001, 3000]
    zeros(20_000)
    assert zeros.nbytes > 20_000 and zeros(20_000) is zeros(20_000)  # alone
    for count in range(2 * MOST_RESULTS):
        zeros(count)
    assert zeros.nbytes < 10_000
    zeros.clear()
    assert zeros.nbytes == 0


def test_what_is_kept_is_ordinary() -> None:
    """Whatever modes are on when it is made: later calls have others."""
    edges = packing(40, seed=7, shortest=1)
    for number, mode in enumerate((torch.inference_mode, FakeTensorMode)):
        documents = (*edges, edges[-1] + 1 + number)
        with mode():
            shards = cp.sharding(documents[-1], 2, "document_zigzag", documents)
            shards.orders(torch.device("cpu"))
            plan.gathered(shards, 0, Mask(None, 0, documents))
        assert cp.sharding(documents[-1], 2, "document_zigzag", documents) is shards
        x = torch.ones(documents[-1], requires_grad=True)
        shards.of_rank(x, 0, 0).sum().backward()
        assert x.grad.nonzero().squeeze(1).tolist() == shards.positions(0).sort().values.tolist()
        for call in plan.gathered(shards, 0, Mask(None, 0, documents)):
            assert type(call.packed.numbers.host) is torch.Tensor
            assert not call.packed.numbers.host.is_inference()

    def part(y: torch.Tensor) -> torch.Tensor:
        return cp.sharding(edges[-1], 2, "document_zigzag", edges).of_rank(y, 0, 0)

    y = torch.ones(edges[-1])
    grad = torch.func.grad(lambda y: part(y).sum())(y)
    assert int(grad.sum()) == len(part(y))
    shards = cp.sharding(edges[-1], 2, "document_zigzag", edges)
    for x in (shards.parts, *shards.orders(torch.device("cpu"))):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(x)


# ------------------------------------------------------------------------------------------ ranks
def attend(documents: tuple[int, ...], layout: str = "zigzag", **options: Any) -> None:
    """A call of this rank's rows, forward and backward."""
    shards = cp.sharding(documents[-1], dist.get_world_size(), layout, documents)
    rows = shards.lengths[dist.get_rank()]
    q, k, v = (torch.ones(rows, 2, 4).requires_grad_() for _ in range(3))
    out = cp.attention(q, k, v, causal=True, cu_seqlens=documents, layout=layout, **options)
    out.sum().backward()


def check_exchanges(ranks: int, device: str) -> None:
    """Steps with new documents and new numbers of rows, of several layers: one exchange."""
    for method, layout in itertools.product((*cp.METHODS, "auto"), cp.LAYOUTS):
        spied = mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object)
        with spied as exchange:
            for step, _ in itertools.product(range(6), range(4)):
                attend((0, 3 + step, 20, 40 + 8 * step), layout, method=method)
        assert exchange.call_count == 1, (method, layout)


def check_disagreement(ranks: int, device: str) -> None:
    """Documents that differ between ranks are found: at the first call, or with FLASH_EXT_DEBUG at
    once, with what differs; otherwise some calls later, by all ranks in the same one."""
    same, different = (0, 5, 32), (0, 5 + dist.get_rank(), 32)
    options = {"method": "all_gather", "softcap": 3.0}  # of no call before
    names = r"cu_seqlens is \(0, 5, 32\) on rank 0, \(0, 6, 32\) on rank 1"
    with pytest.raises(ValueError, match=names):
        attend(different, **options)
    attend(same, **options)
    with mock.patch.dict(os.environ, FLASH_EXT_DEBUG="1"):
        attend(same, **options)
        with pytest.raises(ValueError, match=names):
            attend(different, **options)
    with mock.patch.object(request, "EVERY", 4):
        for _ in range(9):
            attend(same, **options)
        attend(different, **options)
        calls = 0
        with pytest.raises(ValueError, match="cu_seqlens, or the number of rows, was not the same"):
            while calls < 8:
                calls += 1
                attend(same, **options)
    every = [0] * ranks
    dist.all_gather_object(every, calls)
    assert len(set(every)) == 1
    # What is wrong with a rank's own is said at once.
    with pytest.raises(ValueError, match="cu_seqlens must be from 0 on"):
        attend((0, 9, 5, 32), **options)
    q = torch.ones(7, 2, 4)
    with pytest.raises(ValueError, match="q's number of rows on rank"):
        cp.attention(q, q, q, causal=True, cu_seqlens=(0, 4, 32), **options)


def check_results(ranks: int, device: str) -> None:
    """Each step's own documents, of which ranks have many spans, and unequal numbers of rows."""
    torch.manual_seed(0)
    for step, method in enumerate((*cp.METHODS, *cp.METHODS)):
        edges = packing(12, seed=step, shortest=1)
        q, k, v = (torch.randn(edges[-1], 2, 8, dtype=torch.float64) for _ in range(3))
        documents = torch.tensor(edges, dtype=torch.int32)
        expected, _ = flash_ext.reference.attention_varlen(
            q, k, v, documents, documents, causal=True
        )
        where = {"layout": "document_zigzag", "cu_seqlens": edges}
        parts = [cp.shard(x, 0, **where) for x in (q, k, v)]
        out = cp.attention(*parts, causal=True, method=method, **where)
        torch.testing.assert_close(cp.unshard(out, 0, **where), expected)


def test_two_ranks() -> None:
    run_ranks(2, "cpu", check_exchanges, check_results, check_ops, check_disagreement)


def check_benchmark(ranks: int, device: str) -> None:
    import packings as benchmark

    small = ["--tokens", "300", "--documents", "6", "--heads", "2", "2", "--dim", "8"]
    args = benchmark.parse([*small, "--steps", "2", "--warm-up", "0"])
    found = benchmark.work(args, torch.device(device))
    assert len(found["cells"]) == len(benchmark.METHODS) * len(benchmark.LAYOUTS)
    for cell in found["cells"]:
        assert all(cell[f"{x}_{y}"] > 0 for x in ("host_ms", "ms") for y in ("same", "new")), cell


@pytest.mark.share(0)
def test_the_benchmark_runs() -> None:
    """benchmarks/packings.py, on two ranks, and for one of eight without the others."""
    run_ranks(2, "cpu", check_benchmark)
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "packings.py"
    small = ["--alone", "8", "--rank", "3", "--documents", "40", "--tokens", "2000", "--steps", "2"]
    found = json.loads(run_python(script, *small, "--warm-up", "1", check=True).stdout)
    assert found["ranks"] == 8 and all(x["host_ms_new"] > 0 for x in found["cells"])
