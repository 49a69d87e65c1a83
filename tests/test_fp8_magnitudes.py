"""8 bits at every magnitude that bfloat16 holds: subnormal numbers, zeros, up to the largest.

Would catch a scale or its inverse that overflows or is 0, descales whose product is, a sum that
overflows in a rotation or a mean, small numbers that become 0, and a softmax that loses its
maximum's digits. All results are to be finite and as accurate as with numbers around 1, as long as
standard attention of the same inputs has finite scores.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from attention_testing import FP8, QK_8_BITS, device_unsupported_reason, nan_filled_outputs

import flash_ext
from flash_ext import fp8
from flash_ext.cpu.quantize import butterflies, hadamard_dim

Tensor = torch.Tensor

EXPONENTS = (-133, -130, -126, -120, -110, -84, -66, -40, 0, 40, 66, 84, 100, 118, 122, 125)
"""Of two: numbers of this size have scales, squares and sums on either side of float32's ends."""

DEPTH = -126  # below, bfloat16 is subnormal


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """The tests on a GPU run where it has fa3."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def normal(*shape: int, exponent: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    """Normal numbers times 2^exponent, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-3.9, 3.9) + mean
    largest = torch.finfo(torch.bfloat16).max
    return (x * 2.0**exponent).clamp(-largest, largest).bfloat16()


def problem(of_q: int, of_k: int, of_v: int, device: str, *sizes: int) -> tuple[Tensor, ...]:
    """q, k and v of these sizes; keys with a mean. No length is a multiple of a tile's."""
    seqlen_q, seqlen_k, head_dim = sizes or (140, 205, 64)
    q = normal(1, seqlen_q, 4, head_dim, exponent=of_q)
    k = normal(1, seqlen_k, 2, head_dim, exponent=of_k, seed=1, mean=0.25)
    v = normal(1, seqlen_k, 2, head_dim, exponent=of_v, seed=2)
    return q.to(device), k.to(device), v.to(device)


def standard(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = flash_ext.reference.attention(q.double(), k.double(), v.double(), **options)
    return out, lse


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, and of finite numbers."""
    assert got.isfinite().all()
    return float((got.double() - want).norm() / want.norm())


# --- Quantization ---

FORMS: dict[str, dict[str, Any]] = {
    "tensor": {"scales": "tensor"},
    "head": {"scales": "head"},
    "block": {"scales": "block"},
    "channel": {"scales": "channel"},
    "int8": {"scales": "block", "dtype": torch.int8},
}


def by_row(descale: Tensor, scales: str, rows: int) -> Tensor:
    """Of one sequence: what its (rows, H, D) are multiplied by."""
    if scales == "tensor":
        return descale
    if scales == "block":
        return descale[0].repeat_interleave(128, -1)[:, :rows].mT[..., None]
    return descale[0] if scales == "channel" else descale[0][:, None]


def hadamard(dim: int) -> Tensor:
    """Orthonormal, in float64."""
    return butterflies(torch.eye(dim, dtype=torch.float64)) / math.sqrt(hadamard_dim(dim))


@pytest.mark.parametrize("smooth", (False, True))
@pytest.mark.parametrize("rotated", (False, True))
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("form", FORMS)
def test_quantize(form: str, exponent: int, rotated: bool, smooth: bool, device: str) -> None:
    scales = FORMS[form]["scales"]
    if (rotated or smooth) and scales == "channel":
        pytest.skip("a rotation mixes the channels, and a mean is of k")
    for dim in (16, 96, 256):
        x = normal(1, 300, 2, dim, exponent=exponent, mean=0.5 * smooth).to(device)
        signs = fp8.random_signs(dim, device=device) if rotated else None
        mean = fp8.token_mean(x) if smooth else None
        x_8bit, descale = fp8.quantize(x, **FORMS[form], signs=signs, mean=mean)
        assert descale.isfinite().all() and (descale > 0).all()
        exact = x[0].double() - (0 if mean is None else mean[0].double())
        if signs is not None:
            exact = (exact * signs) @ hadamard(dim).to(device)
        got = x_8bit[0].double() * by_row(descale, scales, 300).double()
        # Less a mean, small numbers have steps of 2^-134, rotated of 2^-126 / sqrt(D).
        least = (2.0**-129 if rotated else 2.0**-135) if smooth else 0.0
        error = (got - exact).norm()
        assert error <= 0.03 * exact.norm() + least * math.sqrt(exact.numel())


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_mean(exponent: int, device: str) -> None:
    """Sums of many large numbers, and shares of small ones."""
    for rows in (1, 3, 700, 5000):
        x = normal(1, rows, 2, 32, exponent=exponent, mean=0.75).to(device)
        mean, exact = fp8.token_mean(x), x.double().mean(1)
        allowed = 1e-5 * 2.0**exponent + 2.0**-140
        assert (mean.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("form", FORMS)
def test_zeros_beside_any_magnitude(form: str, device: str) -> None:
    """Blocks, channels and rows of zeros stay zeros, and do not change their neighbors."""
    scales = FORMS[form]["scales"]
    signs = None if scales == "channel" else fp8.random_signs(64, device=device)
    for exponent in EXPONENTS:
        x = normal(1, 300, 2, 64, exponent=exponent).to(device)
        x[:, :130], x[:, 290], x[:, :, 1, 7] = 0, 0, 0
        x_8bit, descale = fp8.quantize(x, **FORMS[form], signs=signs)
        got = x_8bit[0].double() * by_row(descale, scales, 300).double()
        assert not got[:130].any() and not got[290].any() and got.isfinite().all()
        if signs is None:
            assert not got[:, 1, 7].any()
        assert (descale == 1).sum() == {"block": 2, "int8": 2, "channel": 1}.get(form, 0)


@pytest.mark.parametrize("signed", (False, True))
@pytest.mark.parametrize("exponent", (-126, 0, 118, 125))
def test_what_is_not_finite_spoils_no_more(exponent: int, signed: bool, device: str) -> None:
    """Beside numbers of any size a NaN or infinity has its row, and no part in scales."""
    x = normal(1, 130, 2, 64, exponent=exponent).to(device)
    clean = x.clone()
    for row, bad in ((3, math.nan), (5, math.inf), (129, -math.inf)):
        x[0, row, 1, 9], clean[0, row, 1] = bad, 0
        x[0, row, 1, 10:] = 0
        x[0, row, 1, :9] = 0
    signs = fp8.random_signs(64, device=device) if signed else None
    (got, descale), (want, clean_descale) = (fp8.quantize(y, signs=signs) for y in (x, clean))
    assert torch.equal(descale, clean_descale)
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[0, [3, 5, 129], 1, slice(None) if signed else 9] = True
    assert torch.equal(got.float().isnan(), spoilt)
    got, want = (y.view(torch.uint8).masked_fill(spoilt, 0) for y in (got, want))
    assert torch.equal(got, want)


# --- Attention ---

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (50, 20)},
    "not incoherent": {"incoherent": False},
    "not smooth": {"smooth_k": False},
}


def of_reference(options: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in options.items() if n not in ("incoherent", "smooth_k")}


@torch.no_grad()
def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    with nan_filled_outputs():
        out, lse = fp8.attention(*tensors, return_lse=True, **options)
    return out, lse


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_one_as_large_as_the_other_is_small(name: str, dtype: torch.dtype, device: str) -> None:
    """Scores are as with numbers around 1."""
    options = OPTIONS[name]
    for exponent in EXPONENTS:
        of_k = -max(exponent, DEPTH) if exponent < 0 else -exponent
        q, k, v = problem(exponent, of_k, exponent, device)
        want, want_lse = standard(q, k, v, **of_reference(options))
        out, lse = attend(q, k, v, qk_dtype=dtype, **options)
        # Below, out itself has few digits in bfloat16.
        rounding = distance(want.bfloat16(), want) if exponent <= DEPTH else 0.0
        assert distance(out, want) < 0.1 + rounding
        seen = want_lse > -math.inf
        assert torch.equal(lse > -math.inf, seen)
        assert (lse.double() - want_lse)[seen].abs().max() < 0.15


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_near_zero(name: str, dtype: torch.dtype, device: str) -> None:
    """q, k or both so small that scores are 0, or all of them: out is the mean of v."""
    options = OPTIONS[name]
    for of_q, of_k in ((-40, -40), (-66, -66), (-83, -83), (-126, -126), (-133, 60), (0, -130)):
        q, k, v = problem(of_q, of_k, 0, device)
        want, want_lse = standard(q, k, v, **of_reference(options))
        out, lse = attend(q, k, v, qk_dtype=dtype, **options)
        assert distance(out, want) < 0.1
        seen = want_lse > -math.inf
        assert torch.equal(lse > -math.inf, seen)
        assert (lse.double() - want_lse)[seen].abs().max() < 1e-3


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("zero", ("q", "k", "v", "qk", "qkv"))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_zero_tensors(dtype: torch.dtype, zero: str, causal: bool, device: str) -> None:
    for exponent in (-130, 0, 120):
        tensors = dict(zip("qkv", problem(*(exponent,) * 3, device), strict=True))
        for name in zero:
            tensors[name].zero_()
        q, k, v = tensors.values()
        if not set("qk") & set(zero):
            q, k = problem(0, 0, 0, device)[:2]
        want, want_lse = standard(q, k, v, causal=causal)
        out, lse = attend(q, k, v, qk_dtype=dtype, causal=causal)
        if "v" in zero:
            assert not out.any()
        else:
            rounding = distance(want.bfloat16(), want) if exponent < DEPTH else 0.0
            assert distance(out, want) < 0.1 + rounding
        seen = want_lse > -math.inf
        assert (lse.double() - want_lse)[seen].abs().max() < 0.15


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_blocks_of_different_magnitudes(dtype: torch.dtype, causal: bool, device: str) -> None:
    """Each block of 128 keys has its own, one of them is 0; and so has each channel of v."""
    q, k, v = problem(0, 0, 0, device, 300, 520, 128)
    for block, exponent in enumerate((-100, 0, -133, -20)):
        k[:, 128 * block : 128 * (block + 1)] *= 2.0**exponent
    k[:, 512:] = 0
    v *= torch.tensor([2.0, 0.5, 0.0, 2.0**-100, 2.0**100], device=device).repeat(26)[:128].to(v)
    want, want_lse = standard(q, k, v, causal=causal)
    out, lse = attend(q, k, v, qk_dtype=dtype, causal=causal, smooth_k=False)
    assert (lse.double() - want_lse)[want_lse > -math.inf].abs().max() < 0.15
    for first in range(5):
        if first != 2:
            assert distance(out[..., first::5], want[..., first::5]) < 0.1
    assert not out[..., 2::5].any()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
def test_large_scores(head_dim: int, dtype: torch.dtype, causal: bool, device: str) -> None:
    """One key has all of the weight: the one that standard attention of the 8-bit numbers finds.

    Rows of a causal mask have large negative maxima at first, too.
    """
    for of_q, of_k in ((12, 12), (20, 20), (40, 40), (58, 58), (-60, 125), (125, -60)):
        q, k, v = problem(of_q, of_k, 0, device, 150, 300, head_dim)
        (q8, q_descale), (k8, k_descale) = (fp8.quantize(x, dtype) for x in (q, k))
        v8, v_descale = fp8.quantize(v, scales="channel")
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        options = descales | {"causal": causal}
        with nan_filled_outputs():
            out, lse = flash_ext.attention(q8, k8, v8, return_lse=True, **options)
        want, want_lse = flash_ext.reference.attention(
            q8, k8, v8, out_dtype=torch.float64, **options
        )
        assert out.isfinite().all() and lse.isfinite().all()
        assert ((lse.double() - want_lse).abs() <= 1e-3 * want_lse.abs()).all()
        # The weight is a power of two only if the maximum is not rounded; otherwise its four bits
        # are off by up to 1/16.
        same = (out.double() - want).abs().amax(-1) < 0.07 * want.abs().amax(-1)
        assert same.float().mean() > 0.98  # the GPU's sums of e4m3 have 14 bits


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_large_negative_scores_before_small_ones(dtype: torch.dtype, device: str) -> None:
    """Keys are read from the last one on. What they are multiplied by must not stay."""
    q = torch.ones(1, 64, 1, 64, device=device, dtype=torch.bfloat16)
    k = normal(1, 640, 1, 64, exponent=-2).to(device)
    k[:, 256:] = -(2.0**40)
    v = normal(1, 640, 1, 64, exponent=0, seed=2).to(device)
    (q8, q_descale), (k8, k_descale) = (fp8.quantize(x, dtype) for x in (q, k))
    v8, v_descale = fp8.quantize(v, scales="channel")
    options = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = flash_ext.attention(q8, k8, v8, return_lse=True, **options)
    want, want_lse = standard(q, k, v)
    assert distance(out, want) < 0.1
    assert (lse.double() - want_lse).abs().max() < 0.05


# --- Descales of a caller ---


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kind", ("one", "head", "fine"))
@pytest.mark.parametrize("which", ("q", "k", "v", "qk"))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_a_descale_of_0(
    dtype: torch.dtype, which: str, kind: str, causal: bool, device: str
) -> None:
    """It makes scores 0, and so out the mean of v; of v it makes out 0."""
    q, k, v = (20 * x for x in problem(0, 0, 0, device))
    q, k, v = q.to(dtype), k.to(dtype), v.to(FP8)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "one": dict.fromkeys("qkv", ()),
        "head": dict.fromkeys("qkv", (1, 2)),
        "fine": {"q": (1, 4, 2), "k": (1, 2, 2), "v": (1, 2, 64)},
    }
    for value in (0.0, 1e-45, 1e-38, 1e-25):
        descales = {
            f"{name}_descale": torch.full(
                shapes[kind][name], value if name in which else 0.05, device=device
            )
            for name in "qkv"
        }
        options = descales | {"causal": causal}
        with nan_filled_outputs():
            out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
        want, want_lse = flash_ext.reference.attention(q, k, v, out_dtype=torch.float64, **options)
        assert out.isfinite().all() and lse.isfinite().all()
        assert (lse.double() - want_lse).abs().max() < 1e-3
        if which == "v":
            assert out.abs().max() <= 448 * value
        else:
            assert distance(out, want) < 0.05


# --- Gradients ---


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("name", ("plain", "causal", "not incoherent", "not smooth"))
def test_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    options = OPTIONS[name]
    for of_q, of_k in ((-66, 66), (66, -66), (-100, 100), (100, -100), (-40, -40), (-66, -66)):
        q, k, v = (x.requires_grad_() for x in problem(of_q, of_k, 0, device))
        out, lse = fp8.attention(q, k, v, return_lse=True, qk_dtype=dtype, **options)
        generator = torch.Generator().manual_seed(5)
        dout, dlse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, lse))
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = standard(*doubles, **of_reference(options))
        want = torch.autograd.grad(exact, doubles, (dout.double(), dlse.double()))
        of_out = distance(out.detach(), exact[0].detach())
        assert of_out < 0.12
        for a, b in zip(got, want, strict=True):
            assert distance(a, b) < 2 * of_out


@pytest.mark.parametrize("exponents", [*itertools.product((-133, -126, 0), repeat=2)], ids=str)
def test_gradients_of_small_inputs_are_finite(exponents: tuple[int, int], device: str) -> None:
    tensors = [x.requires_grad_() for x in problem(*exponents, -130, device)]
    out, lse = fp8.attention(*tensors, causal=True, return_lse=True)
    loss = out.float().sum() + lse.where(lse.isfinite(), 0).sum()
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, tensors))
