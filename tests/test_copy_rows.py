"""The kernel that copies rows to aligned memory and back, on the host.

Would catch, without a GPU: a row that comes from another place or goes to one, a column past the
head dim that is no zero, an element beside a result that is written, loads wider than rows are
aligned, and a tensor of several that is copied only in part.
"""

from __future__ import annotations

import math
import random
from types import ModuleType

import pytest
import torch
from compiled import small_kernels

POISON = 7777


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return small_kernels("flash_ext_copies")


def in_poison(sizes: tuple[int, ...], source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A view (B, S, H, D) of random strides and address, and all of its memory."""
    strides, stride = [1], sizes[3] + source.choice((0, 0, 1, 2, 4, 7))
    for size in (sizes[2], sizes[1], sizes[0]):
        strides.insert(0, stride)
        stride *= size
        stride += source.choice((0, 0, 1, 2, 4))
    if source.random() < 0.5:  # SDPA's layout: heads before rows
        rows, heads = sizes[1], sizes[2]
        strides[2], strides[1] = strides[2] * rows, strides[2]
        stride = strides[0] = max(strides[0], strides[2] * heads)
        stride *= sizes[0]
    offset = source.choice((0, 1, 2, 4, 8))
    memory = torch.full((stride + 16,), POISON, dtype=torch.int16)
    return memory.as_strided(sizes, strides, offset), memory


def described(native: ModuleType, x: torch.Tensor, copy: torch.Tensor) -> object:
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return native.Tensor(x.data_ptr(), strides[:3], list(x.shape), copy.data_ptr())


@pytest.mark.parametrize("back", (False, True))
@pytest.mark.parametrize("seed", range(40))
def test_rows_are_copied(seed: int, back: bool, native: ModuleType) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    tensors, checks = [], []
    for _ in range(source.randrange(1, 6)):
        cols = source.choice((1, 8, 20, 36, 59, 60, 64, 100, 180, 250, 256))
        sizes = (source.choice((0, 1, 3)), source.randrange(1, 70), source.randrange(1, 5), cols)
        given, memory = in_poison(sizes, source)
        copy = torch.full((*sizes[:3], -(-cols // 8) * 8), POISON, dtype=torch.int16)
        values = torch.randint(-5000, 5000, sizes, dtype=torch.int16)
        if back:
            copy[..., :cols] = values
        else:
            given.copy_(values)
        found = described(native, given, copy)
        unit = found.unit_bytes()
        assert given.data_ptr() % unit == 0 and unit in (2, 4, 8)
        assert (
            all(2 * n % unit == 0 for i, n in enumerate(given.stride()[:3]) if sizes[i] > 1)
            and 2 * cols % unit == 0
        )
        tensors.append(found)
        checks.append((given, memory, copy, values))
    assert native.copy_rows(tensors, back)
    for given, memory, copy, values in checks:
        if not back:
            cols = values.shape[3]
            assert torch.equal(copy[..., :cols], values) and not copy[..., cols:].any()
            continue
        assert torch.equal(given, values)
        given.fill_(POISON)
        assert bool((memory == POISON).all())


def test_repeated_rows_are_written_each(native: ModuleType) -> None:
    row = torch.arange(64, dtype=torch.int16)
    given, copy = row.expand(2, 50, 1, 64), torch.zeros(2, 50, 1, 64, dtype=torch.int16)
    assert native.copy_rows([described(native, given, copy)], False)
    assert torch.equal(copy, given)


def test_units_are_as_wide_as_rows_are_aligned(native: ModuleType) -> None:
    memory = torch.zeros(4 * math.prod((3, 5, 264)), dtype=torch.int16)
    copy = torch.zeros(1)

    def unit(cols: int, offset: int = 0, padding: int = 0) -> int:
        strides = ((cols + padding) * 15, (cols + padding) * 3, cols + padding, 1)
        x = memory.as_strided((4, 5, 3, cols), strides, offset)
        return int(described(native, x, copy).unit_bytes())

    assert [unit(cols) for cols in (20, 36, 60, 100, 250, 59)] == [8, 8, 8, 8, 4, 2]
    assert [unit(64, offset) for offset in (0, 1, 2, 4)] == [8, 2, 4, 8]
    assert [unit(64, padding=x) for x in (0, 1, 2, 4)] == [8, 2, 4, 8]
