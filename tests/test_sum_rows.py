"""`torch.ops.flash_ext.sum_rows` and `combine_parts`: what several calls have written, added up;
and `copy_rows`.

Would catch a part at the wrong rows, a row beyond a part that is read, a sum that is rounded before
it is complete, a NaN from rows that see no key, and an argument that is taken although it does not
fit.
"""

from __future__ import annotations

import pytest
import torch
from attention_testing import assert_bitwise_equal

Tensor = torch.Tensor
sum_rows = torch.ops.flash_ext.sum_rows
combine_parts = torch.ops.flash_ext.combine_parts
copy_rows = torch.ops.flash_ext.copy_rows

SPANS = ((0, 23), (4, 9), (-3, 6), (20, 40), (7, 7), (0, 23), (22, 23))
"""First and last rows of parts, of a sequence of 23."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def some(count: int, shape: tuple[int, int, int], device: str) -> tuple[list[Tensor], list[int]]:
    """Parts (B, rows, H, D), of all dtypes by turns, and their first rows."""
    generator = torch.Generator().manual_seed(count)
    batch, heads, dim = shape
    parts = []
    for i in range(count):
        first, last = SPANS[i % len(SPANS)]
        x = torch.randn((batch, last - first, heads, dim), generator=generator)
        parts.append(x.to(device, DTYPES[i % 3]))
    return parts, [SPANS[i % len(SPANS)][0] for i in range(count)]


def exact(parts: list[Tensor], firsts: list[int], rows: int, weights: list | None = None) -> Tensor:
    """In float64, row by row; 0 where there is none."""
    batch, _, heads, dim = parts[0].shape
    total = torch.zeros(batch, rows, heads, dim, dtype=torch.float64)
    for i, (x, first) in enumerate(zip(parts, firsts, strict=True)):
        for row in range(max(first, 0), min(first + x.shape[1], rows)):
            weight = 1.0 if weights is None else weights[i][:, row - first]
            total[:, row] += weight * x[:, row - first].double().cpu()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 128), (1, 2, 33), (1, 1, 200), (2, 5, 8)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_sums(count: int, shape, dtype: torch.dtype, device: str) -> None:
    parts, firsts = some(count, shape, device)
    out = torch.full((shape[0], 23, *shape[1:]), torch.nan, dtype=dtype, device=device)
    assert sum_rows(out, parts, firsts) is None
    wide = torch.empty_like(out, dtype=torch.float32)
    sum_rows(wide, parts, firsts)
    assert_bitwise_equal(out, wide.to(dtype))
    torch.testing.assert_close(wide.double().cpu(), exact(parts, firsts, 23), rtol=1e-6, atol=2e-6)


def test_rows_by_index(device: str) -> None:
    """Any rows in any order, some twice; rows of no part are zeros."""
    parts, firsts = some(4, (2, 3, 64), device)
    index = torch.tensor([22, 0, 5, 5, 39, 11, 8, 40], dtype=torch.int32, device=device)
    out = torch.full((2, 8, 3, 64), torch.nan, device=device)
    sum_rows(out, parts, firsts, index)
    expected = exact(parts, firsts, 41)[:, index.long().cpu()]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-6, atol=2e-6)


def test_in_place_and_strided(device: str) -> None:
    """out is the first part; all are sections of wider tensors, whose other columns stay."""
    wide = [torch.randn(23, 2, 3, 96, device=device).bfloat16() for _ in range(3)]
    views = [x.transpose(0, 1)[..., 32:64] for x in wide]
    expected = sum(x.float() for x in views).bfloat16()
    before = wide[0].clone()
    sum_rows(views[0], views, [0, 0, 0])
    assert_bitwise_equal(views[0], expected)
    assert_bitwise_equal(wide[0][..., :32], before[..., :32])
    assert_bitwise_equal(wide[0][..., 64:], before[..., 64:])


def test_nothing_is_zeros(device: str) -> None:
    out = torch.full((1, 5, 2, 8), torch.nan, device=device)
    lse = torch.zeros(1, 2, 5, device=device)
    sum_rows(out, [], [])
    assert not out.any()
    combine_parts(out.fill_(torch.nan), lse, [], [], [])
    assert not out.any() and (lse == -torch.inf).all()
    sum_rows(out[:, :0], [out], [0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_attention_over_some_keys_each(count: int, dtype: torch.dtype, device: str) -> None:
    """Rows without a key in some parts, and in all; whatever their results hold."""
    parts, firsts = some(count, (2, 3, 48), device)
    generator = torch.Generator().manual_seed(0)
    lse_parts = []
    for x in parts:
        lse = torch.randn((2, 3, x.shape[1]), generator=generator) * 10
        lse = lse.masked_fill(torch.rand(lse.shape, generator=generator) < 0.3, -torch.inf)
        lse_parts.append(lse.to(device))
    whole = torch.full((2, 3, 23), -torch.inf, dtype=torch.float64)
    for lse, first in zip(lse_parts, firsts, strict=True):
        for row in range(max(first, 0), min(first + lse.shape[2], 23)):
            here = lse[..., row - first].double().cpu()
            whole[..., row] = torch.logaddexp(whole[..., row], here)
    weights = []
    for lse, first in zip(lse_parts, firsts, strict=True):
        rows = torch.arange(lse.shape[2]) + first
        of_all = whole[..., rows.clamp(0, 22)]
        weights.append((lse.double().cpu() - of_all).exp().nan_to_num(0.0).mT[..., None])
    expected = exact(parts, firsts, 23, weights)
    for x, lse in zip(parts, lse_parts, strict=True):
        x.masked_fill_((lse == -torch.inf).mT[..., None], torch.nan)
    out = torch.full((2, 23, 3, 48), torch.nan, dtype=dtype, device=device)
    lse = torch.full((2, 3, 23), torch.nan, device=device)
    combine_parts(out, lse, parts, lse_parts, firsts)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), whole, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 128), (1, 2, 33), (1, 1, 264)])
def test_rows_are_written_to_several(shape, dtype: torch.dtype, device: str) -> None:
    """Sections of wider tensors, whose other columns stay; 264 columns are more than one pass."""
    batch, heads, dim = shape
    x = torch.randn(batch, 23, heads, dim + 8, device=device).to(dtype)[..., 8:]
    for count in (1, 2, 16):
        wide = torch.full((count, 23, batch, heads, dim + 16), 7.0, device=device, dtype=dtype)
        assert copy_rows([y.transpose(0, 1)[..., 8:-8] for y in wide], x) is None
        for y in wide:
            assert_bitwise_equal(y[..., 8:-8], x.transpose(0, 1))
            assert (y[..., :8] == 7).all() and (y[..., -8:] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda outs, x: ([], x), "outs must be 1 to 16 tensors, got 0"),
        (lambda outs, x: (9 * outs, x), "outs must be 1 to 16 tensors, got 18"),
        (lambda outs, x: (outs, x[0]), r"x must be of shape \(batch, seqlen, heads"),
        (lambda outs, x: (outs, x[:, 1:]), r"x must be of shape .*\(1, 5, 2, 16"),
        (lambda outs, x: (outs, x.int()), "x must be float16.* or float32, got int32"),
        (lambda outs, x: ([outs[0], outs[1][..., 1:]], x), r"outs\[1\] must be of shape"),
        (lambda outs, x: ([outs[0], outs[1].half()], x), r"outs\[1\] must be float32, got fl"),
        (lambda outs, x: ([outs[0], outs[1].mT.contiguous().mT], x), r"outs\[1\] must be"),
        (lambda outs, x: ([outs[0], outs[1].transpose(1, 2).contiguous().transpose(1, 2)], x),
         r"outs\[1\] must be of the strides of outs\[0\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(change, message: str, device: str) -> None:
    outs = [torch.full((1, 5, 2, 16), 7.0, device=device) for _ in range(2)]
    x = torch.zeros(1, 5, 2, 16, device=device)
    with pytest.raises((ValueError, RuntimeError), match=message):
        copy_rows(*change(outs, x))
    assert all((out == 7).all() for out in outs)


def test_they_are_well_formed_ops(device: str) -> None:
    parts, firsts = some(3, (1, 2, 16), device)
    out = torch.zeros(1, 23, 2, 16, device=device)
    index = torch.arange(23, dtype=torch.int32, device=device)
    torch.library.opcheck(sum_rows, (out, parts, firsts))
    torch.library.opcheck(sum_rows, (out, parts, firsts, index))
    torch.library.opcheck(copy_rows, ([out, out.clone()], torch.ones_like(out)))
    lse_parts = [torch.zeros(1, 2, x.shape[1], device=device) for x in parts]
    lse = torch.zeros(1, 2, 23, device=device)
    torch.library.opcheck(combine_parts, (out, lse, parts, lse_parts, firsts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"out": x["out"][0]}, r"out must be of shape \(batch, seqlen, heads"),
        (lambda x: x | {"out": x["out"].int()}, "out must be float16.* or float32, got int32"),
        (lambda x: x | {"parts": 9 * x["parts"][:1]}, "parts must be at most 8 tensors, got 9"),
        (lambda x: x | {"firsts": [0]}, "firsts must be one number for each of parts, got 1"),
        (lambda x: x | {"parts": [x["parts"][0], x["parts"][1][..., :8]]}, r"parts\[1\] must be"),
        (lambda x: x | {"parts": [x["parts"][0].int(), x["parts"][1]]}, r"parts\[0\] must be f"),
        (lambda x: x | {"index": x["index"].long()}, "index must be int32, got int64"),
        (lambda x: x | {"index": x["index"][:3]}, r"index must be of shape .*\(23"),
    ],
)
def test_wrong_arguments_are_refused(change, message: str, device: str) -> None:
    parts, firsts = some(2, (1, 2, 16), device)
    given = change(
        {
            "out": torch.full((1, 23, 2, 16), 7.0, device=device),
            "parts": parts,
            "firsts": firsts,
            "index": torch.arange(23, dtype=torch.int32, device=device),
        }
    )
    with pytest.raises((ValueError, RuntimeError), match=message):
        sum_rows(**given)
    assert (given["out"] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"lse": x["lse"][:, :1]}, r"lse must be of shape .*\(1, 2, 23"),
        (lambda x: x | {"lse": x["lse"].half()}, "lse must be float32, got float16"),
        (lambda x: x | {"lse": x["lse"].mT.contiguous().mT}, "lse must be contiguous in its last"),
        (
            lambda x: x | {"parts": [x["parts"][0].mT.contiguous().mT, x["parts"][1]]},
            r"parts\[0\] must be contiguous in its last",
        ),
        (lambda x: x | {"lse_parts": x["lse_parts"][:1]}, "lse_parts must be one tensor for each"),
        (
            lambda x: x | {"lse_parts": [x["lse_parts"][0], x["lse_parts"][1][..., 1:]]},
            r"lse_parts\[1\] must be of shape .*\(1, 2, 5",
        ),
    ],
)
def test_wrong_statistics_are_refused(change, message: str, device: str) -> None:
    parts, firsts = some(2, (1, 2, 16), device)
    given = change(
        {
            "out": torch.full((1, 23, 2, 16), 7.0, device=device),
            "lse": torch.zeros(1, 2, 23, device=device),
            "parts": parts,
            "lse_parts": [torch.zeros(1, 2, x.shape[1], device=device) for x in parts],
            "firsts": firsts,
        }
    )
    with pytest.raises((ValueError, RuntimeError), match=message):
        combine_parts(**given)
    assert (given["out"] == 7).all()
