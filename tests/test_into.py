"""`torch.ops.flash_ext.fwd_into` and `bwd_into`: the results of fwd and bwd, in given tensors.

Would catch a kernel that writes beside the heads or rows it is given, one that takes the strides of
results for granted, rows of unseen keys that are left as they were, and tensors that do not fit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_testing import assert_bitwise_equal

import flash_ext

Tensor = torch.Tensor
ops = torch.ops.flash_ext
CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "rows": 200, "rows_k": 137, "dim_v": 128},
    {"window_left": 30, "window_right": 0, "dim": 128},
    {"sink": True, "heads_k": 4},
    {"cu_seqlens": (0, 60, 60, 200), "rows": 200, "rows_k": 200, "causal": True},
    {"seqused_k": (70, 200), "batch": 2, "rows_k": 200, "causal": True},
    {"causal": True, "rows": 700, "rows_k": 700, "dim": 256, "heads_k": 1},
)


class Inputs:
    """Of a case: tensors and options."""

    def __init__(self, case: dict[str, Any], device: str) -> None:
        case = dict(case)
        rows, batch = case.pop("rows", 150), case.pop("batch", 1)
        rows_k, heads_k = case.pop("rows_k", 150), case.pop("heads_k", 2)
        dim = case.pop("dim", 64)
        dim_v = case.pop("dim_v", dim)
        like = {"device": device, "dtype": torch.bfloat16}
        torch.manual_seed(0)
        self.q = torch.randn(batch, rows, 4, dim, **like)
        self.k = torch.randn(batch, rows_k, heads_k, dim, **like)
        self.v = torch.randn(batch, rows_k, heads_k, dim_v, **like)
        self.dout = torch.randn(batch, rows, 4, dim_v, **like)
        edges = case.pop("cu_seqlens", None)
        numbers = {"dtype": torch.int32, "device": device}
        if edges is not None:
            self.q, self.k, self.v, self.dout = (x[0] for x in (self.q, self.k, self.v, self.dout))
            case["cu_seqlens_q"] = case["cu_seqlens_k"] = torch.tensor(edges, **numbers)
        if "seqused_k" in case:
            case["seqused_k"] = torch.tensor(case["seqused_k"], **numbers)
        if case.pop("sink", False):
            case["sink"] = torch.randn(4, device=device)
        self.options = case | {"deterministic": True}


def section(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor full of a number, and a section of it with x's shape: some heads of more rows."""
    *batch, rows, heads, dim = x.shape
    whole = x.new_full((*batch, rows + 3, heads + 4, dim), 3.0)
    return whole, whole[..., 1 : rows + 1, 2 : heads + 2, :]


def untouched(whole: Tensor, part: Tensor) -> bool:
    part.fill_(3.0)
    return bool((whole == 3.0).all())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("variant", flash_ext.VARIANTS)
def test_equal_to_results_of_their_own(case: dict[str, Any], variant: str, device: str) -> None:
    x = Inputs(case, device)
    if device == "cuda" and variant == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 needs a Hopper GPU")
    options = x.options | {"variant": variant}
    out, lse = ops.fwd(x.q, x.k, x.v, **options)
    whole, into = section(out)
    assert_bitwise_equal(ops.fwd_into(into, x.q, x.k, x.v, **options), lse)
    assert_bitwise_equal(into.contiguous(), out)
    assert untouched(whole, into)
    tensors = (x.dout, None, x.q, x.k, x.v, out, lse)
    *gradients, _, dsink = ops.bwd(*tensors, **options)
    sections = [section(gradient) for gradient in gradients]
    found = ops.bwd_into(*(part for _, part in sections), *tensors, **options)
    assert_bitwise_equal(found, dsink)
    for gradient, (whole, part) in zip(gradients, sections, strict=True):
        assert_bitwise_equal(part.contiguous(), gradient)
        assert untouched(whole, part)


def test_wrong_tensors_are_refused(device: str) -> None:
    x = Inputs({}, device)
    out, lse = ops.fwd(x.q, x.k, x.v)
    for wrong, message in (
        (out[:, :-1], "out must be of shape"),
        (out.float(), "out must be of q's dtype"),
        (out.mT.contiguous().mT, "out must be"),
        (out.new_empty((*out.shape[:-1], 65))[..., 1:], "begin at multiples of 16 bytes"),
        (out[:, :, :1].expand_as(out), "rows of their own"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ops.fwd_into(wrong, x.q, x.k, x.v)
    tensors = (x.dout, None, x.q, x.k, x.v, out, lse)
    with pytest.raises((ValueError, RuntimeError), match="dk must be of shape"):
        ops.bwd_into(x.q.clone(), x.q.clone(), x.v.clone(), *tensors)


def test_what_autograd_has_saved_is_not_overwritten_unnoticed(device: str) -> None:
    """Every op that writes into given tensors counts as one in place."""
    x = Inputs({}, device)
    out, lse = ops.fwd(x.q, x.k, x.v)
    dq, dk, dv = x.q.clone(), x.k.clone(), x.v.clone()
    tensors = (x.dout, None, x.q, x.k, x.v, out.clone(), lse.clone())
    for written, write in (
        (out, lambda: ops.fwd_into(out, x.q, x.k, x.v)),
        (dv, lambda: ops.bwd_into(dq, dk, dv, *tensors)),
        (dq, lambda: ops.sum_rows(dq, [x.q], [0])),
        (dk, lambda: ops.copy_rows([dv, dk], x.k)),
        (lse, lambda: ops.combine_parts(out, lse, [out], [lse], [0])),
    ):
        factor = torch.ones_like(written, requires_grad=True)
        product = factor * written
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_what_has_no_place_is_refused(device: str) -> None:
    """8-bit inputs, whose results have another dtype, and a bias, whose gradient would be lost."""
    x = Inputs({}, device)
    out, lse = ops.fwd(x.q, x.k, x.v, **x.options)
    bias = {"bias": torch.zeros(1, 1, 1, 150, device=device)}
    in_8_bits = tuple(y.to(torch.float8_e4m3fn) for y in (x.q, x.k, x.v))
    tensors = (x.dout, None, x.q, x.k, x.v, out, lse)
    gradients = (x.q.clone(), x.k.clone(), x.v.clone())
    for message, call in (
        ("bias must be None", lambda: ops.fwd_into(out, x.q, x.k, x.v, **bias)),
        ("bias must be None", lambda: ops.bwd_into(*gradients, *tensors, **bias)),
        ("q must be float16 or bfloat16 where", lambda: ops.fwd_into(out, *in_8_bits)),
        ("q must be float16 or bfloat16 where", lambda: ops.fwd_into(in_8_bits[0], *in_8_bits)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


def test_nothing_is_recorded(device: str) -> None:
    """Inputs that require gradients give results that have none."""
    x = Inputs({}, device)
    out, lse = ops.fwd(x.q, x.k, x.v, **x.options)
    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    assert not ops.fwd_into(out, *leaves).requires_grad and not out.requires_grad
    into = [torch.empty_like(y) for y in leaves]
    assert not ops.bwd_into(*into, x.dout, None, *leaves, out, lse).requires_grad
    assert not any(y.requires_grad for y in into)
    registered = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(ops.fwd_into, (out, *leaves), test_utils=registered)


def test_opcheck(device: str) -> None:
    x = Inputs({"sink": True}, device)
    out, lse = ops.fwd(x.q, x.k, x.v, **x.options)
    torch.library.opcheck(ops.fwd_into, (out.clone(), x.q, x.k, x.v), x.options)
    gradients = (x.q.clone(), x.k.clone(), x.v.clone())
    tensors = (x.dout, None, x.q, x.k, x.v, out, lse)
    torch.library.opcheck(ops.bwd_into, (*gradients, *tensors), x.options)
