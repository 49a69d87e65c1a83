"""The CUDA kernels that make masks of blocks, on the host, against the CPU's ops.

Would catch, without a GPU: a run, a word or a hull that differs, an entry outside the row that is
written, a byte outside the mask that is read, and a key whose bit is elsewhere.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import small_kernels
from mask_model import POISON, blocks_of, kinds_of_rows
from test_mask_ops import random_documents, random_intervals, random_mask, used
from torch import Tensor

ops = torch.ops.flash_ext


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return small_kernels("flash_ext_make_mask")


def described(native: ModuleType, x: Tensor | None) -> object:
    if x is None:
        return native.Input(0, [0] * 4)
    strides = [0 if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return native.Input(x.data_ptr(), strides)


def make(
    native: ModuleType,
    like: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    dense: Tensor | None = None,
    intervals: Tensor | None = None,
    kinds: Tensor | None = None,
    documents: object = None,
) -> list[Tensor]:
    """The mask, like the CPU's, in poison."""
    made = [torch.full_like(x, POISON) for x in like]
    if dense is not None:
        shape = (*sizes[:2], blocks_of(sizes[2]), blocks_of(sizes[3]))
        kinds = torch.full(shape, 77, dtype=torch.uint8)
    hulls = torch.empty((*sizes[:2], blocks_of(sizes[2]), 4), dtype=torch.int32)
    inputs = [described(native, x) for x in (dense, intervals, kinds)]
    inputs.append(native.Documents() if documents is None else documents)
    pointers = [x.data_ptr() for x in (hulls, *made)] + [0] * (3 - len(made))
    assert native.make(list(sizes), *inputs, *pointers, [x.shape[3] for x in made[:2]])
    return made


def compare(made: list[Tensor], want: tuple[Tensor, ...]) -> None:
    for found, expected in zip(made[:2], want[:2], strict=True):
        assert used(found) == used(expected)
        for row in found.flatten(0, -2).tolist():
            assert set(row[4 + row[2] :]) <= {POISON}


def compare_dense(native: ModuleType, mask: Tensor) -> None:
    want = ops.mask_from_dense(mask)
    made = make(native, want, tuple(mask.shape), dense=mask)
    compare(made, want)
    partial = kinds_of_rows(want[0], want[2].shape[3]) == 2
    assert torch.equal(made[2][partial], want[2][partial])
    assert (made[2][~partial] == POISON).all(), "words of blocks without them are not written"


@pytest.mark.parametrize(
    "sizes",
    ((1, 1, 1, 1), (2, 1, 128, 256), (1, 2, 300, 720), (1, 1, 257, 333), (1, 1, 5, 4500)),
)
def test_dense_masks(sizes: tuple[int, ...], native: ModuleType) -> None:
    compare_dense(native, random_mask(*sizes))


@pytest.mark.parametrize("case", ("keys", "transposed", "odd", "every second", "octets"))
def test_dense_masks_in_any_strides(case: str, native: ModuleType) -> None:
    mask = random_mask(1, 2, 260, 272)
    octets = torch.randint(256, (1, 1, 130, 256), dtype=torch.uint8)
    octets[..., ::3] = 0
    octets[..., 1::7] = 128
    views = {
        "keys": mask[..., :1].expand(-1, -1, -1, 290),
        "transposed": mask.mT,
        "odd": mask[:, :, 1:, 3:],
        "every second": mask[..., ::2],
        "octets": octets.view(torch.bool),
    }
    if case == "octets":  # bytes other than 0 and 1 are for the kernels alone
        want = ops.mask_from_dense(octets != 0)
        made = make(native, want, tuple(octets.shape), dense=views[case])
        compare(made, want)
        assert torch.equal(made[2][:, :, :1], want[2][:, :, :1])
    else:
        compare_dense(native, views[case])


@pytest.mark.parametrize("keys", (255, 256, 300, 303))
@pytest.mark.parametrize("first", (0, 1, 3, 16))
def test_nothing_outside_the_mask_is_read(first: int, keys: int, native: ModuleType) -> None:
    memory = torch.ones(first + 140 * keys, dtype=torch.bool)
    mask = memory[first:].view(1, 1, 140, keys)
    mask.copy_(random_mask(1, 1, 140, keys))
    native.loads()
    compare_dense(native, mask)
    lowest, highest = native.loads()
    assert mask.data_ptr() <= lowest < highest <= mask.data_ptr() + mask.numel()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (2, 1, 300, 700), (1, 2, 5000, 900), (1, 1, 9, 0)))
def test_intervals(sizes: tuple[int, ...], seed: int, native: ModuleType) -> None:
    *of_queries, seqlen_k = sizes
    intervals = random_intervals(*of_queries, seqlen_k=seqlen_k, seed=seed)
    if seed % 3 == 0:
        intervals = intervals.mT.contiguous().mT
    want = ops.mask_from_intervals(intervals, seqlen_k)
    made = make(native, want, sizes, intervals=intervals)
    compare(made, want)
    assert torch.equal(made[2], want[2])


@pytest.mark.parametrize("seed", range(24))
def test_documents(seed: int, native: ModuleType) -> None:
    first_keys, *sizes, options = random_documents(seed)
    want = ops.mask_from_documents(first_keys, *sizes, **options)
    batch = want[0].shape[0]
    ids, offsets = options.get("ids"), [options.get(f"cu_seqlens_{x}") for x in "qk"]
    of_ids = (0, [0] * 4) if ids is None else (ids.data_ptr(), [*ids.stride(), 0, 0])
    first_tokens = torch.empty((batch, want[0].shape[2], 2), dtype=torch.int32)
    documents = native.Documents(
        native.Input(*of_ids),
        ids is not None and ids.dtype == torch.int64,
        [0 if x is None else x.data_ptr() for x in (first_tokens, *offsets, first_keys)],
        [
            0 if offsets[0] is None else len(offsets[0]) - 1,
            *(options[f"window_{side}"] for side in ("left", "right")),
            options["first_keys_in_window"],
            int(len(first_keys) > 1),
        ],
    )
    made = make(native, want, (batch, 1, *sizes), documents=documents)
    compare(made, want)
    assert torch.equal(made[2], want[2])


@pytest.mark.parametrize("seed", range(8))
def test_blocks(seed: int, native: ModuleType) -> None:
    kinds = torch.randint(2, (2, 3, 4, 70), dtype=torch.uint8) * 255
    kinds = kinds.mT.contiguous().mT if seed % 2 else kinds
    intervals = random_intervals(1, 1, 390, seqlen_k=9000, seed=seed).expand(2, 3, -1, -1)
    want = ops.mask_from_blocks(kinds, intervals)
    made = make(native, want, (2, 3, 390, 70 * 128), intervals=intervals, kinds=kinds)
    compare(made, want)
    assert torch.equal(made[2], want[2])


@pytest.mark.parametrize("sizes", ((1, 1), (7, 3), (40, 100), (3, 0), (0, 3), (64, 65)))
def test_kinds(sizes: tuple[int, int], native: ModuleType) -> None:
    kinds = torch.randint(3, (2, 2, *sizes), dtype=torch.uint8)
    kinds[0, 0] = 1
    kinds[1, 1, sizes[0] // 2 :] = 2
    want = ops.mask_from_kinds(kinds)
    given: Any = kinds if kinds.numel() else torch.zeros(1, dtype=torch.uint8).expand(kinds.shape)
    held = torch.zeros(1, dtype=torch.uint8)  # an empty tensor has no address
    given = given if kinds.numel() else held.as_strided((1, 1, 1, 1), (0, 0, 0, 0))
    made = make(native, want, (2, 2, *(128 * x for x in sizes)), kinds=given)
    compare(made, want)
