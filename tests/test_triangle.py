"""`flash_ext.triangle_attention`: against the formula of cuEquivariance's documentation in float64.

Would catch a mask that hides keys of other rows or none, a bias of another batch element, a
gradient of the bias that is not summed over rows, a NaN where a row sees nothing, and a shape that
cuEquivariance accepts and this refuses.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_ext

NAMES = ("q", "k", "v", "bias")


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float):
    """out, lse and max; rows without keys see all."""
    scores = torch.einsum("bnhqd,bnhkd->bnhqk", q, k) * scale + bias
    if mask is not None:
        mask = mask | ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf)
    largest = scores.amax(-1)
    numbers = torch.finfo(scores.dtype)
    p = (scores - largest.clamp(min=numbers.min)[..., None]).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=numbers.tiny)
    return torch.einsum("bnhqk,bnhkd->bnhqd", p.to(v), v), scores.logsumexp(-1), largest


def tensors(
    batch: int, rows: int, heads: int, queries: int, keys: int, dim: int,
    dtype: torch.dtype, device: str, bias_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """Of a model's layout: heads after tokens in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, rows, n, heads, dim) for n in (queries, keys, keys)]
    qkv = [torch.randn(x, generator=generator).to(device, dtype).transpose(2, 3) for x in shapes]
    bias = torch.randn(batch, 1, heads, queries, keys, generator=generator)
    return [*qkv, bias.to(device, bias_dtype or dtype)]


def some_keys(batch: int, rows: int, keys: int, device: str) -> Tensor:
    """Of other rows other keys; row 1 sees none, row 2 all."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch, rows, 1, 1, keys, generator=generator) < 0.7
    mask[:, 1], mask[:, 2] = False, True
    return mask.to(device)


def found_and_expected(
    inputs: list[Tensor], mask: Tensor | None, scale: float | None, **options: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """out and gradients: ours, in float64, and by standard attention in the inputs' dtype."""
    generator = torch.Generator().manual_seed(2)
    results = []
    for kind in ("ours", "ref", "pt"):
        dtype = torch.float64 if kind == "ref" else inputs[0].dtype
        leaves = [x.detach().to(dtype if kind != "ours" else x.dtype) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in leaves]
        if kind == "ours":
            given = {} if options else {"mask": mask}
            out = flash_ext.triangle_attention(*leaves, scale=scale, **given, **options)
        else:
            out = formula(*leaves, mask, scale or inputs[0].shape[-1] ** -0.5)[0]
        if not results:
            dout = torch.randn(out.shape, generator=generator).to(inputs[0])
        grads = torch.autograd.grad(out, leaves, dout.to(out))
        results.append(dict(zip(("out", *NAMES), (out.detach(), *grads), strict=True)))
    return results[0], results[1], results[2]


@pytest.mark.parametrize("hidden", [None, "mask", "lengths"])
@pytest.mark.parametrize(("batch", "dim", "scale"), [(1, 16, None), (2, 20, 0.3), (1, 32, None)])
def test_against_the_formula(batch, dim, scale, hidden):
    inputs = tensors(batch, 4, 2, 9, 11, dim, torch.float64, "cpu")
    mask, options = None, {}
    if hidden == "mask":
        mask = some_keys(batch, 4, 11, "cpu")
    elif hidden == "lengths":
        lengths = torch.tensor([11, 0, 3, 7], dtype=torch.int32).expand(batch, 4)
        options = {"kv_lengths": lengths[..., None, None, None]}
        mask = torch.arange(11) < options["kv_lengths"]
    ours, ref, _ = found_and_expected(inputs, mask, scale, **options)
    for name, x in ref.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("dim", "scale", "size"), [(15, 1e-4, 1), (32, 1e-5, 1), (16, 0.25, 1e5), (24, 1e-3, 1)]
)
def test_float16_hides_keys_at_any_scale(dim, scale, size, device):
    """Where v would show a hidden key: of scales that make little of -2^15, and large biases."""
    q, k, v, bias = tensors(1, 4, 2, 9, 11, dim, torch.float16, device)
    mask = some_keys(1, 4, 11, device)
    visible = (mask | ~mask.any(-1, keepdim=True))[:, :, 0, 0, :, None].unsqueeze(2)
    bias = (size * bias.float()).requires_grad_()
    found = flash_ext.triangle_attention(q, k, v.where(visible, 3e4), bias, mask=mask, scale=scale)
    expected = formula(*(x.double() for x in (q, k, v, bias)), mask, scale)[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 0, 4), (1, 3, 0)], ids=("B", "N", "K"))
def test_nothing(shape):
    batch, rows, keys = shape
    inputs = tensors(batch, rows, 2, 5, keys, 16, torch.float32, "cpu")
    inputs = [x.requires_grad_() for x in inputs]
    out, lse, largest = flash_ext.triangle_attention(*inputs, return_aux=True)
    assert out.shape == (batch, rows, 2, 5, 16) and not out.any()
    assert lse.shape == largest.shape == out.shape[:-1]
    assert torch.equal(flash_ext.triangle_attention(*inputs), out)
    out.sum().backward()


def test_auxiliary_results():
    inputs, mask = tensors(2, 4, 2, 9, 11, 16, torch.float32, "cpu"), some_keys(2, 4, 11, "cpu")
    for visible in (None, mask):
        found = flash_ext.triangle_attention(*inputs, mask=visible, return_aux=True)
        expected = formula(*(x.double() for x in inputs), visible, 16**-0.5)
        assert [x.dtype for x in found] == [torch.float32] * 3
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_shapes_without_a_batch():
    inputs, mask = tensors(1, 4, 2, 9, 11, 16, torch.float32, "cpu"), some_keys(1, 4, 11, "cpu")
    expected = flash_ext.triangle_attention(*inputs, mask=mask)
    found = flash_ext.triangle_attention(*(x[0] for x in inputs), mask=mask[0].float())
    assert torch.equal(found, expected) and found.shape == (1, 4, 2, 9, 16)


def test_types_of_bias():
    """Others than q's and float32 become float32, whole numbers and bool too."""
    q, k, v, bias = tensors(1, 3, 2, 9, 11, 16, torch.float32, "cpu")
    for other in (bias.double(), bias > 0, (4 * bias).int()):
        found = flash_ext.triangle_attention(q, k, v, other)
        assert torch.equal(found, flash_ext.triangle_attention(q, k, v, other.float()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 2)}, "q must be of shape"),
        ({"k": (1, 4, 2, 11, 8)}, "k must be of shape"),
        ({"bias": (1, 4, 2, 9, 11)}, "bias must be of shape"),
        ({"mask": (1, 4, 1, 9, 11)}, "mask must be of shape"),
        ({"kv_lengths": (1, 4)}, "kv_lengths must be of shape"),
        ({"kv_lengths": (1, 4, 1, 1, 1)}, "kv_lengths must be integers"),
        ({"scale": -1.0, "mask": (1, 4, 1, 1, 11)}, "scale must be above 0 with mask"),
    ],
)
def test_refused(change, message):
    given = dict(zip(NAMES, tensors(1, 4, 2, 9, 11, 16, torch.float32, "cpu"), strict=True))
    given |= {n: torch.ones(x) if isinstance(x, tuple) else x for n, x in change.items()}
    with pytest.raises(ValueError, match=message):
        flash_ext.triangle_attention(**given)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "rows", "heads", "keys", "dim"), [
    (1, 70, 4, 200, 32), (2, 9, 4, 300, 24), (1, 40, 8, 129, 64), (1, 9, 2, 70, 20),
])  # fmt: skip
def test_accuracy(batch, rows, heads, keys, dim, bias_dtype, masked, device):
    """The error is at most twice standard attention's, and a rounding."""
    if device == "cpu":
        rows, keys = min(rows, 5), min(keys, 70)
    inputs = tensors(batch, rows, heads, keys, keys, dim, torch.bfloat16, device, bias_dtype)
    mask = some_keys(batch, rows, keys, device) if masked else None
    ours, ref, pt = found_and_expected(inputs, mask, None)
    again, _, _ = found_and_expected(inputs, mask, None)
    assert torch.equal(ours["bias"], again["bias"])
    for name, x in ref.items():
        error = float((ours[name].double() - x).abs().max())
        rounding = float(((x.to(torch.bfloat16) + 0.3 - 0.3).double() - x).abs().max())
        bound = 2 * float((pt[name].double() - x).abs().max()) + 2 * rounding
        assert error <= bound, f"{name}: {error:.3e} above {bound:.3e}"


def test_compiled():
    """No break in the graph, and the same numbers."""
    inputs, mask = tensors(1, 3, 2, 5, 6, 16, torch.float32, "cpu"), some_keys(1, 3, 6, "cpu")
    leaves = [x.requires_grad_() for x in inputs]
    compiled = torch.compile(flash_ext.triangle_attention, fullgraph=True, backend="aot_eager")
    outs = [f(*leaves, mask=mask) for f in (flash_ext.triangle_attention, compiled)]
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in outs]
    for x, y in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
def test_its_variant_on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper alone has fa3")
    q, _, _, bias = tensors(1, 8, 4, 256, 256, 32, torch.bfloat16, "cuda", torch.float32)
    x = torch.nn.functional.pad(q[0].transpose(1, 2), (0, 8))
    assert flash_ext.explain(x, x, x, bias=bias[0]).variant == "fa3"
