"""`torch.ops.flash_ext.combine_parts` of two parts, in place and from one tensor to another:
attention over some keys added to that over others.

Would catch a wrong weight, a NaN from rows that see no key, rows beyond a section that are written,
a lane that reads lse after another has written it, and columns that are left out.
"""

from __future__ import annotations

import pytest
import torch
from attention_testing import assert_bitwise_equal

import flash_ext

Tensor = torch.Tensor
combine_parts = torch.ops.flash_ext.combine_parts


def combine(
    out: Tensor,
    lse: Tensor,
    o_partial: Tensor,
    lse_partial: Tensor,
    out_before: Tensor | None = None,
) -> None:
    """A part of all rows added to (out_before, lse)."""
    before = out if out_before is None else out_before
    assert combine_parts(out, lse, [before, o_partial], [lse, lse_partial], [0, 0]) is None


def parts(
    shape: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, o_partial and lse_partial; one row in five has no key, on either side."""
    generator = torch.Generator().manual_seed(seed)
    batch, rows, heads, _ = shape
    found = []
    for kind in (out_dtype, dtype):
        out = torch.randn(shape, generator=generator)
        lse = torch.randn((batch, heads, rows), generator=generator) * 10
        empty = torch.rand(lse.shape, generator=generator) < 0.2
        lse = lse.masked_fill(empty, -torch.inf)
        out = out.masked_fill(empty.mT[..., None], 0).to(kind)
        found += [out.to(device), lse.to(device)]
    return tuple(found)


def expected(out: Tensor, lse: Tensor, o_partial: Tensor, lse_partial: Tensor) -> tuple:
    """In float64."""
    lse, lse_partial = lse.double(), lse_partial.double()
    whole = torch.logaddexp(lse, lse_partial)
    weights = (torch.exp(x - whole).nan_to_num(0.0).mT[..., None] for x in (lse, lse_partial))
    a, b = weights
    return a * out.double() + b * o_partial.double(), whole


def close(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    for x, e in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), e, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 128), (1, 130, 8, 64), (2, 7, 2, 256), (1, 3, 5, 10), (1, 1, 1, 1),
              (3, 4, 2, 33), (1, 0, 2, 8), (1, 9, 2, 200)],
)  # fmt: skip
def test_equals_the_formula(shape, dtype: torch.dtype, device: str) -> None:
    out, lse, o_partial, lse_partial = parts(shape, device, dtype)
    exact = expected(out, lse, o_partial, lse_partial)
    combine(out, lse, o_partial, lse_partial)
    close((out, lse), exact)


@pytest.mark.parametrize("shape", [(2, 37, 3, 128), (1, 21, 5, 33), (1, 9, 2, 200)])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("before", [None, torch.bfloat16, torch.float16, torch.float32])
def test_results_of_16_bits_are_rounded_once(before, into, shape, device: str) -> None:
    """In place, and from one tensor to another, of which all is written: any pair of types."""
    start, lse, *part = parts(shape, device, torch.bfloat16, before or into)
    exact = expected(start, lse, *part)
    wide, wide_lse = start.to(torch.float32, copy=True), lse.clone()
    combine(wide, wide_lse, *part)
    out, kept = start, start.clone()
    if before is not None:
        out = torch.full(shape, torch.nan, dtype=into, device=device)
    combine(out, lse, *part, start if before is not None else None)
    close((wide, wide_lse), exact)
    assert_bitwise_equal(lse, wide_lse)
    assert_bitwise_equal(out, wide.to(into))
    if before is not None:
        assert_bitwise_equal(start, kept)


def test_one_tensor_without_aligned_rows(device: str) -> None:
    """Each in turn starts one column later than the others."""
    for shifted in range(3):
        out, lse, o_partial, lse_partial = parts((1, 9, 3, 128), device, torch.bfloat16)
        exact = expected(out, lse, o_partial, lse_partial)
        tensors = [torch.zeros_like(out), o_partial, out.clone()]
        moved = torch.nn.functional.pad(tensors[shifted], (1, 3))[..., 1:-3]
        tensors[shifted] = moved
        combine(tensors[0], lse, tensors[1], lse_partial, tensors[2])
        close((tensors[0], lse), exact)


def test_results_without_keys_are_not_read(device: str) -> None:
    """Whatever memory holds where lse is -inf, on either side."""
    out, lse, o_partial, lse_partial = parts((2, 9, 3, 64), device, torch.bfloat16)
    exact = expected(out, lse, o_partial, lse_partial)
    for x, of in ((out, lse), (o_partial, lse_partial)):
        x.masked_fill_((of == -torch.inf).mT[..., None], torch.nan)
    combine(out, lse, o_partial, lse_partial)
    close((out, lse), exact)


def test_sections_of_rows_with_strides(device: str) -> None:
    """Only the section is written; heads, rows and columns may be parts of larger tensors."""
    out, lse, o_partial, lse_partial = parts((2, 40, 6, 48), device, torch.bfloat16)
    rows, heads, columns = slice(3, 30), slice(1, 5), slice(1, 34)
    views = (
        out[:, rows, heads, columns],
        lse[:, heads, rows],
        o_partial[:, rows, heads, columns],
        lse_partial[:, heads, rows],
    )
    exact = expected(*(x.clone() for x in views))
    before = out.clone(), lse.clone()
    combine(*views)
    close(views[:2], exact)
    for x, old, part in ((out, before[0], views[0]), (lse, before[1], views[1])):
        changed = x.clone()
        if x is out:
            changed[:, rows, heads, columns] = old[:, rows, heads, columns]
        else:
            changed[:, heads, rows] = old[:, heads, rows]
        assert_bitwise_equal(changed, old)
        assert part.isfinite().any()


def test_float64_on_the_cpu() -> None:
    x = [t.double() for t in parts((2, 9, 3, 20), "cpu", torch.float32)]
    exact = expected(*(t.clone() for t in x))
    combine(*x)
    for found, e in zip(x[:2], exact, strict=True):
        torch.testing.assert_close(found, e, rtol=1e-14, atol=1e-14)


def test_keys_in_two_parts_are_all_keys(device: str) -> None:
    """Attention over the first keys, then the others, beginning with nothing; no key anywhere."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, 50, 4, 64, **like) for _ in range(3))
    out = torch.zeros(1, 50, 4, 64, device=device)
    lse = torch.full((1, 4, 50), -torch.inf, device=device)
    nothing = torch.zeros_like(q), torch.full_like(lse, -torch.inf)
    combine(out, lse, *nothing)
    assert not out.any() and (lse == -torch.inf).all()
    for keys in (slice(0, 20), slice(20, 50)):
        part = flash_ext.attention(q, k[:, keys], v[:, keys], return_lse=True)
        combine(out, lse, *part)
    exact = flash_ext.reference.attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-4)


def test_nothing_is_recorded(device: str) -> None:
    out, lse, *partial = parts((1, 6, 2, 16), device, torch.bfloat16)
    combine(out, lse, *(x.requires_grad_() for x in partial))
    assert not out.requires_grad and not lse.requires_grad
