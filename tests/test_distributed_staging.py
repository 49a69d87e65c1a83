"""Memory that other ranks read: when it is written again, and how much of it there is.

Would catch a region that is given out while a rank may still read it, regions at places that differ
between ranks, memory that grows with every call, and copies of elements at the wrong place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import flash_ext
from flash_ext.integrations.distributed import engines, local, plan, transport
from flash_ext.integrations.distributed.algorithms import Gather
from flash_ext.integrations.distributed.engines import ALIGNMENT, GRAIN, CopyEngines, Staging
from flash_ext.integrations.distributed.sharding import sharding


class Alone:
    """A window without anybody else, which counts."""

    log = ""

    rank = 0

    def __init__(self, capacity: int) -> None:
        self.buffers = [torch.empty(0)]
        self.capacity, self.met, self.drained, self.followed = capacity, 0, 0, 0

    def follow(self) -> None:
        self.followed += 1

    def drain(self) -> None:
        self.drained += 1

    def meet(self) -> None:
        self.met += 1
        Alone.log += "meet "

    def mark(self) -> Callable[[Any], Callable[[], None]]:
        marked = Alone.log.count("meet")

        def begin(copies: Any) -> Callable[[], None]:
            Alone.log += f"pull{marked} "
            return lambda: None

        return begin


def test_no_region_is_written_while_it_may_be_read() -> None:
    """At random: what is open, or closed without a barrier since, is not given out again."""
    draw = random.Random(0)
    for _ in range(50):
        opened: list[Alone] = []
        staging = Staging(lambda n, opened=opened: opened.append(Alone(n)) or opened[-1])
        in_use: list[list] = []  # region, and barriers when it was closed
        barriers = 0
        for _ in range(60):
            met = sum(window.met for window in opened)
            region = staging.take(draw.choice((1, 700, 40_000, 3_000_000, 40_000_000)))
            assert region.last <= region.window.capacity and region.first % ALIGNMENT == 0
            barriers += sum(window.met for window in opened) - met  # those that made room
            for other, closed in in_use:
                if other.window is region.window and (closed is None or closed >= barriers):
                    assert region.last <= other.first or other.last <= region.first
            staging.meet(region.window)
            barriers += 1
            in_use.append([region, None])
            for entry in in_use:
                if entry[1] is None and draw.random() < 0.6:
                    staging.close(entry[0])
                    entry[1] = barriers
        assert sum(window.met for window in opened) == barriers


def test_memory_stops_growing() -> None:
    """The same calls again take no more memory; a call that raised leaves nothing behind."""
    opened: list[Alone] = []
    staging = Staging(lambda n: opened.append(Alone(n)) or opened[-1])

    def call(raises: bool = False) -> None:
        staging.abandon()
        keys = staging.take(5 << 20)
        staging.meet(keys.window)
        if raises:
            return
        before = None
        for _ in range(3):
            gradients = staging.take(3 << 20)
            staging.meet(gradients.window)
            if before is not None:
                staging.close(before)
            before = gradients
        staging.close(keys)
        staging.close(before)

    for _ in range(3):
        call()
    windows, size = len(opened), staging.capacity
    for number in range(20):
        call(raises=number % 4 == 0)
    assert (len(opened), staging.capacity) == (windows, size)
    assert size <= 2 * (5 + 3 + 3 + 1) << 20 and size % GRAIN == 0
    assert opened[-1].drained == 5


def test_large_memory_is_used_again_at_once() -> None:
    """From a size on a barrier makes room instead of more memory."""
    opened: list[Alone] = []
    staging = Staging(lambda n: opened.append(Alone(n)) or opened[-1])
    for _ in range(5):
        region = staging.take(700 << 20)
        staging.meet(region.window)
        staging.close(region)
    assert [window.capacity for window in opened] == [700 << 20]


def test_no_memory_is_an_error_that_passes() -> None:
    """After a window that could not be made, smaller calls work, and nothing is given out twice."""
    staging = Staging(lambda n: Alone(n) if n < 3 << 30 else wrong(n))
    first = staging.take(1 << 20)
    staging.meet(first.window)
    with pytest.raises(RuntimeError, match="no memory"):
        staging.take(4 << 30)
    second = staging.take(1 << 20)
    assert second.window is not first.window or second.first >= first.last
    staging.close(first)
    staging.close(second)
    with pytest.raises(RuntimeError, match="no memory"):
        staging.take(4 << 30)
    third = staging.take(1 << 20)
    assert third.last <= third.window.capacity == staging.capacity


def wrong(capacity: int) -> Alone:
    raise RuntimeError(f"no memory for {capacity} bytes")


def test_pulls_are_in_the_order_of_need() -> None:
    """They follow one another on one stream: the next keys go before sums, which wait for kernels;
    and what is gathered waits for one barrier only, its own. The first keys are written."""

    def opened(capacity: int) -> Alone:
        window = Alone(capacity)
        window.buffers = [torch.zeros(capacity, dtype=torch.uint8)] * 2
        return window

    def pieces(heads: int, returns: bool) -> tuple[int, ...]:
        return (1, 6, 1) if returns else (1, 7)

    def method() -> Gather:
        transport = CopyEngines(Staging(opened), shards, 0)
        return Gather(transport, plan.gathered(shards, 0, plan.Mask(None, 0)), pieces)

    shards = sharding(32, 2)
    q, k, v = (torch.zeros(1, 16, 8, 8) for _ in range(3))
    Alone.log = ""
    saved = method().forward(q, k, v, {})
    assert Alone.log == "meet pull1 "
    Alone.log = ""
    method().backward(saved, torch.zeros_like(q), None, {})
    assert Alone.log == "meet pull1 meet pull2 pull1 meet pull3 meet pull4 "


class Counting(TorchDispatchMode):
    """How many ops of torch are dispatched, views included."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout, most", [("document_zigzag", 50), ("zigzag", 55)])
def test_a_piece_is_few_ops(layout: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls forward and backward, their kernels aside: each takes the host microseconds."""

    def opened(capacity: int) -> Alone:
        window = Alone(capacity)
        window.buffers = [torch.zeros(capacity, dtype=torch.uint8)] * 2
        return window

    def forward(into, q, k, v, **options):  # type: ignore[no-untyped-def]
        return torch.empty(q.shape[1], q.shape[0])

    monkeypatch.setattr(local, "fwd_into", forward)
    monkeypatch.setattr(local, "bwd_into", lambda *tensors, **options: torch.empty(0))
    monkeypatch.setattr(flash_ext.ops, "sum_rows", lambda *arguments: None)
    documents = tuple(range(0, 2001, 80))
    shards, mask = sharding(2000, 2, layout, documents), plan.Mask(None, 0, documents)
    q, k, v = (
        torch.zeros(1, shards.lengths[0], heads, 16, dtype=torch.bfloat16) for heads in (16, 8, 8)
    )
    counted = []
    for pieces in ((8,), 8 * (1,)):
        transport = CopyEngines(Staging(opened), shards, 0)
        method = Gather(transport, plan.gathered(shards, 0, mask), lambda *_, x=pieces: x)
        for _ in range(2):
            with Counting() as counting:
                saved = method.forward(q, k, v, {})
                method.backward(saved, torch.zeros_like(q), None, {})
        counted.append(counting.count)
    assert counted[1] - counted[0] <= 2 * 7 * most, counted


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first to the last element of one have addresses of the other's."""

    def end(x: torch.Tensor) -> int:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr() + (last + 1) * x.element_size()

    return max(x.data_ptr(), y.data_ptr()) < min(end(x), end(y))


def test_gradients_are_not_written_where_keys_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one piece, whose keys are read in place, where no more memory is taken."""
    monkeypatch.setattr(engines, "LARGE", 3 << 20)

    def opened(capacity: int) -> Alone:
        window = Alone(capacity)
        window.buffers = [torch.zeros(capacity, dtype=torch.uint8)] * 2
        return window

    shards = sharding(4096, 2)
    transport = CopyEngines(Staging(opened), shards, 0)
    method = Gather(transport, plan.gathered(shards, 0, plan.Mask(None, 0)))
    q, k, v = (torch.zeros(2, 2048, 1, 64) for _ in range(3))
    calls = 0

    def backward(call, tensors, options, into):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        for x in (tensors.k, tensors.v):
            for gradient in into[1:]:
                assert not _overlap(x, gradient)

    monkeypatch.setattr(local, "backward_of_views", backward)
    method.backward((q, k, v, q, q[..., 0].mT), q, None, {})
    assert calls == 2


def test_the_first_transfer_follows_too() -> None:
    """A later one, on another stream, must wait for it."""
    opened: list[Alone] = []
    staging = Staging(lambda n: opened.append(Alone(n)) or opened[-1])
    staging.take(1)
    assert opened[0].followed == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_are_exact(dtype: torch.dtype) -> None:
    """Of strided tensors, aligned and not; NaNs too keep their bits."""
    draw = random.Random(0)
    for _ in range(200):
        shape = (
            draw.choice((1, 3)),
            draw.randint(1, 5),
            draw.randint(1, 4),
            draw.choice((1, 6, 8)),
        )
        whole = torch.randn(*(n + draw.choice((0, 1, 8)) for n in shape)).to(dtype)
        whole[0, 0, 0, 0] = torch.nan
        x = whole[tuple(slice(w - n, w) for w, n in zip(whole.shape, shape, strict=True))]
        x = x.transpose(0, 1) if draw.random() < 0.5 else x
        out = torch.zeros(*x.shape[:-1], x.shape[-1] + draw.choice((0, 1, 8)), dtype=dtype)
        transport.copy(out[..., : x.shape[-1]], x)
        expected = torch.zeros_like(out)
        expected[..., : x.shape[-1]] = x
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        index = torch.randperm(len(x), dtype=torch.int32)
        transport.pick(out[..., : x.shape[-1]], x, index)
        assert torch.equal(out.view(torch.uint8), expected[index].view(torch.uint8))


@pytest.mark.parametrize(
    "spans", [((3, 8), (12, 17)), ((12, 17), (3, 8)), ((0, 4), (9, 20)), ((5, 7),), ()]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_are_written_to_all(batch: int, spans: tuple[tuple[int, int], ...]) -> None:
    """Each to its place, and to no other, of more tensors than one call takes."""
    count = sum(b - a for a, b in spans)
    x = torch.randn(batch, count, 2, 12)[..., 4:]
    outs = list(torch.full((18, 20, batch, 2, 16), torch.nan)[..., 8:].unbind())
    transport.copy_to_all(outs, spans, x)
    expected = torch.full((20, batch, 2, 8), torch.nan)
    at = 0
    for a, b in spans:
        expected[a:b] = x[:, at : at + b - a].transpose(0, 1)
        at += b - a
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_few_copies_of_many_spans() -> None:
    """However many documents there are, a transfer is one copy from each rank."""
    copies: list[int] = []

    class Counting(Alone):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            self.buffers = [torch.zeros(capacity, dtype=torch.uint8)] * 4

        def mark(self) -> Callable[[Any], Callable[[], None]]:
            return lambda given: copies.append(len(given)) or (lambda: None)

    # Span by span; the last rank of a zigzag has one.
    for documents, expected in (
        (None, [7, 5, 6, 6]),
        (tuple(range(0, 321, 20)), [4, 3, 3, 3]),
    ):
        shards = sharding(320, 4, "document_zigzag" if documents else "zigzag", documents)
        transport = CopyEngines(Staging(Counting), shards, 1)
        x = torch.zeros(1, shards.lengths[1], 4, 8)
        begin = transport.gather((x,), (2, 2), "")
        for piece in (0, 1):
            begin(piece).wait()  # of the second piece its own rows are a copy, too
        (whole,) = transport.to_heads((x,), "").wait()
        transport.to_rows((whole,), (x,), "").wait()
        transport.scatter((x,), "")[1]([]).wait()
        assert copies == expected, documents
        copies.clear()


def test_totals_write_every_row() -> None:
    """Of few parts and of more than one call takes, with an index and without."""
    draw = random.Random(0)
    for _ in range(100):
        count = draw.randint(1, 12)
        whole = torch.zeros(1, count, 2, 4, dtype=torch.float64)
        parts = []
        for _ in range(draw.choice((0, 1, 3, 8, 9, 20))):
            a, b = sorted((draw.randint(0, count), draw.randint(0, count)))
            part = torch.randn(1, b - a, 2, 4, dtype=torch.float64)
            whole[:, a:b] += part
            parts.append(((a, b), (part, -part)))
        index = torch.tensor(draw.choices(range(count), k=draw.randint(1, 20)), dtype=torch.int32)
        for rows_of in (None, index):
            expected = whole if rows_of is None else whole[:, rows_of]
            found = torch.full_like(expected, torch.nan), torch.full_like(expected, torch.nan)
            transport.total(parts, found, rows_of)
            torch.testing.assert_close(found, (expected, -expected))
        if parts:
            a, b = parts[0][0]
            found = torch.full_like(whole, torch.nan), torch.full_like(whole, torch.nan)
            for x, part in zip(found, parts[0][1], strict=True):
                x[:, a:b] = part
            transport.add_in_place(parts, found)
            torch.testing.assert_close(found, (whole, -whole))


def test_sums_are_rounded_once() -> None:
    """Also of more parts than are kept at a time."""
    values = torch.tensor([1.0] + 9 * [2**-9], dtype=torch.bfloat16).view(-1, 1, 1, 1, 1)
    for count in range(2, 11):
        exact = values[:count].float().sum().to(torch.bfloat16)
        out = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
        transport.add_up(values[:count], out)
        assert out == exact
        sums = transport.Sum(torch.empty(1, 2, 1, 1, dtype=torch.bfloat16))
        for x in values[:count]:
            sums.add(x, first=1)
        assert torch.equal(sums.found().flatten(), torch.stack([torch.zeros_like(exact), exact]))
