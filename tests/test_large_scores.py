"""Finite scores of any size give finite, right results: out, lse and gradients.

Would catch an exponent that is a fused product minus a rounded one, whose difference grows with the
score until P is 0 or infinite; an lse, which float32 rounds, from which the backward pass finds P;
splits of the keys merged by such an lse; and equal scores that count as one.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from attention_testing import nan_filled_outputs

import flash_ext

VARIANTS = flash_ext.VARIANTS
NAMES = ("out", "lse", "dq", "dk", "dv")

SIZES = {  # of the elements of q and k, by the size of their scores
    "3e10, one key": (torch.bfloat16, 6e4, 1),
    "1e5": (torch.float16, 3e2, 200),
    "1e8": (torch.float16, 3e3, 150),
    "1e9": (torch.float16, 1e4, 130),
    "1e12": (torch.bfloat16, 1.3e5, 300),
    "1e37": (torch.bfloat16, 1e18, 70),
}


def tensors(
    device: str, dtype: torch.dtype, size: float, keys: int, equal: bool, queries: int, heads: int
) -> list[torch.Tensor]:
    """q, k, v and dout; q and k of one number, or normal."""
    generator = torch.Generator().manual_seed(1)

    def make(rows: int, heads: int, factor: float, constant: bool) -> torch.Tensor:
        x = torch.randn(2, rows, heads, 64, generator=generator, dtype=torch.float64)
        x = torch.ones_like(x) if constant else x
        return (factor * x).to(dtype).to(device)

    return [
        make(queries, 4, size, equal),
        make(keys, heads, size, equal),
        make(keys, heads, 1.0, False),
        make(queries, 4, 1.0, False),
    ]


def results(module: ModuleType, q, k, v, dout, **options) -> dict[str, torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if module is flash_ext:
        options["return_lse"] = True
    with nan_filled_outputs():
        out, lse = module.attention(q, k, v, **options)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=True))


def assert_right(actual, inputs, noise: float = 0.0, **options) -> None:
    """To the rounding of P and dS to the input type, and of dP - delta to float32.

    noise: what float32's rounding of the scores themselves may do to P.
    """
    q, k, v, dout = inputs
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for n, x in options.items()}  # fmt: skip
    ref = results(flash_ext.reference, *(x.double() for x in inputs), **wide)
    eps = torch.finfo(q.dtype).eps
    scale = options.get("scale") or q.shape[-1] ** -0.5
    dp = (dout.double().abs().max() * v.double().abs().max() * v.shape[-1]).item()
    for name, x in actual.items():
        assert not int((~x.isfinite()).sum()), f"{name} is not finite"
        error = (x.double() - ref[name]).abs().max().item()
        largest = ref[name].abs().max().item()
        bound = (4 * eps + noise) * largest
        if name == "lse":
            bound = 1e-6 * largest + 1e-4
        elif name in ("dq", "dk"):
            other = (k if name == "dq" else q).double().abs().max().item()
            bound += (eps / 16 + noise) * dp * scale * other
        assert error <= bound, f"{name}: {error:.3e} is above {bound:.3e}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("equal", (True, False), ids=("equal", "random"))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("name", SIZES)
def test_large_scores(name: str, causal: bool, equal: bool, variant: str, device: str) -> None:
    if device == "cpu" and variant not in flash_ext.CPU_VARIANTS:
        pytest.skip("not on the CPU")
    inputs = tensors(device, *SIZES[name], equal, SIZES[name][2], 4)
    actual = results(flash_ext, *inputs, causal=causal, variant=variant)
    assert_right(actual, inputs, 0.05 if name == "1e5" else 0.0, causal=causal)


def options_of(name: str, device: str) -> dict:
    lowest = torch.finfo(torch.float32).min
    return {
        "sink below": {"sink": torch.full((4,), 1e3, device=device)},
        "sink above": {"sink": torch.full((4,), 3e10, device=device)},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 1.0, 2.0, 1e4], device=device)},
        "bias": {"bias": torch.randn(2, 4, 130, 130, device=device) * 1e9},
        "all keys at the lowest bias": {
            "bias": torch.where(
                torch.ones(130, 130, device=device, dtype=torch.bool).triu(1)
                | (torch.arange(130, device=device) < 9)[:, None], lowest, 0.0
            )
        },
        "softcap": {"softcap": 1e8},
        "window": {"window": (20, 5)},
        "scale": {"scale": 30.0},
    }[name]  # fmt: skip


@pytest.mark.parametrize("variant", ("fa1", "fa2", "auto"))
@pytest.mark.parametrize(
    "name",
    ("sink below", "sink above", "alibi", "bias", "all keys at the lowest bias", "softcap",
     "window", "scale"),
)  # fmt: skip
def test_options(name: str, variant: str, device: str) -> None:
    inputs = tensors(device, torch.float16, 1e4, 130, False, 130, 4)
    options = options_of(name, device)
    if name == "all keys at the lowest bias":
        # In float32 these scores are all the lowest number; float64 tells them apart.
        actual = results(flash_ext, *inputs, **options, variant=variant)
        mean = inputs[2].double().mean(1, keepdim=True)
        assert (actual["out"][:, :9].double() - mean).abs().max() < 1e-3
        assert all(x.isfinite().all() for x in actual.values())
        return
    actual = results(flash_ext, *inputs, **options, variant=variant)
    assert_right(actual, inputs, **options)


def many_keys(keys: int, device: str) -> int:
    """The CPU's kernels have no splits: a few of their tiles of keys are as good as many."""
    return keys if device == "cuda" else min(keys, 700)


@pytest.mark.parametrize(
    ("dtype", "factor", "lowest"),
    [(torch.bfloat16, 1.0, -1e9), (torch.bfloat16, 1.0, -1e8), (torch.float16, 2e3, -6e4)],
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 4000), (70, 4000), (700, 300)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_maximum_that_was_large(
    variant: str, queries: int, keys: int, dtype: torch.dtype, factor: float, lowest: float,
    device: str,
) -> None:  # fmt: skip
    """Keys of scores about -1e9 and -1e10, which rows see first or last, and usual ones.

    The exponents of the first are wrong by up to 64: in float16 P of that size is infinite, while
    lse, in float32, is not.
    """
    if device == "cpu" and variant not in flash_ext.CPU_VARIANTS:
        pytest.skip("not on the CPU")
    keys = many_keys(keys, device)
    q, k, v, dout = tensors(device, dtype, 1.0, keys, False, queries, 4)
    q, k = factor * (1 + q / 16), k / factor
    for below in (slice(100, None), slice(0, -100)):
        low = k.clone()
        low[:, below] = lowest
        inputs = [q, low, v, dout]
        assert_right(results(flash_ext, *inputs, variant=variant), inputs, 0.01)


@pytest.mark.parametrize("queries", (1, 5, 30, 70))
@pytest.mark.parametrize("heads", (1, 4))
@pytest.mark.parametrize("equal", (True, False), ids=("equal", "random"))
def test_splits_of_the_keys(equal: bool, heads: int, queries: int, device: str) -> None:
    """Few queries to many keys: split-KV, with splits of unequal lengths. Up to 64 rows, queries or
    those of a group, fa3 has a kernel of their own."""
    inputs = tensors(device, torch.bfloat16, 1e5, many_keys(4000, device), equal, queries, heads)
    assert_right(results(flash_ext, *inputs), inputs)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("queries", (20, 30))
def test_heads_of_a_group(queries: int, causal: bool, device: str) -> None:
    """fa3 packs 4 heads and as many queries into a tile, more than its kernel for few queries has.

    Keys are not split, so the tile's rows go to out at once: some of them, and all, are large.
    """
    q, k, v, dout = tensors(device, torch.bfloat16, 1.0, 300, False, queries, 1)
    large = q.clone()
    large[0, [3, 17, queries - 1], 1:3] *= 1e6
    for inputs in ([large, k, v, dout], [1e6 * q, k, v, dout]):
        assert_right(results(flash_ext, *inputs, causal=causal), inputs, causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_of_blocks(variant: str, device: str) -> None:
    """Some rows are large, or all, in partial blocks and in full ones, which have no words."""
    if device == "cpu" and variant not in flash_ext.CPU_VARIANTS:
        pytest.skip("not on the CPU")
    q, k, v, dout = tensors(device, torch.bfloat16, 1.0, 390, False, 390, 2)
    visible = torch.rand(390, 390, generator=torch.Generator().manual_seed(2)) < 0.5
    visible[:256, :256] = True
    visible[128:, 256:] = False
    visible = visible.to(device)
    mask = flash_ext.Mask.dense(visible)
    large = q.clone()
    large[0, [3, 17, 140, 299]] *= 1e6
    for inputs in ([large, k, v, dout], [1e6 * q, k, v, dout]):
        actual = results(flash_ext, *inputs, mask=mask, variant=variant)
        assert_right(actual, inputs, bias=visible)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_few_large_rows(variant: str, device: str) -> None:
    """Among others, which are as exact as without them."""
    if device == "cpu" and variant not in flash_ext.CPU_VARIANTS:
        pytest.skip("not on the CPU")
    inputs = tensors(device, torch.bfloat16, 1.0, 300, False, 300, 2)
    q, k, v, dout = inputs
    usual = results(flash_ext, q, k, v, dout, causal=True, variant=variant, deterministic=True)
    q = q.clone()
    q[0, [3, 17, 140, 299]] *= 1e6
    actual = results(flash_ext, q, k, v, dout, causal=True, variant=variant, deterministic=True)
    assert_right(actual, (q, k, v, dout), causal=True)
    assert torch.equal(actual["out"][1], usual["out"][1])
    assert torch.equal(actual["dq"][0, 4:17], usual["dq"][0, 4:17])


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("variant", ("auto", "fa1", "fa2"))
def test_float16_holds_what_dropout_keeps(variant: str, device: str) -> None:
    """With p near 1 the factor 1 / (1 - p) is up to 32,768: right results are in range here."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 600, 4, 64, device=device, dtype=torch.float16)
                     for _ in range(4))  # fmt: skip
    options = {"dropout_p": 0.99999, "rng_state": torch.tensor([5, 7], device=device)}
    inputs = (q, k, v * 5e-2, dout * 1e-2)
    actual = results(flash_ext, *inputs, **options, variant=variant)
    ref = results(flash_ext.reference, *(x.double() for x in inputs), **options)
    for name, x in actual.items():
        assert x.isfinite().all(), name
        error = (x.double() - ref[name]).abs().max().item()
        largest = ref[name].abs().max().item()
        assert error <= 4e-3 * largest, (name, error, largest)
    assert actual["dv"].abs().max() > 1 and actual["dq"].abs().max() > 0.1
