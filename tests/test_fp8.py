"""8-bit inputs: float8_e4m3fn with descales, forward only; or q and k in int8.

Would catch a descale of another block, head or channel, one that is ignored, P or O in less
precision than the paper's, statistics of rounded numbers, memory read next to the rows (NaN bytes),
and a call without kernels that runs all the same.

The rule is that of attention_testing.py. What `pt` stands for is standard attention in float32 of
the same numbers, with P rounded to FP8 and out to its dtype; `ref` rounds nothing. A row may be
off by half a step of P, 2^-4, of P |V| in addition: the largest error of a few numbers is a matter
of luck, and P is rounded relative to another maximum. Hopper adds the products of FP8 numbers with
about 14 bits, which the GPU's lse shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_testing import (
    FP8,
    QK_8_BITS,
    Inputs,
    Problem,
    _apart,
    _largest,
    assert_bitwise_equal,
    attend,
    device_unsupported_reason,
    make_inputs,
    nan_filled_outputs,
)

import flash_ext
import flash_ext.reference
from flash_ext.cpu.fp8 import P_SCALE_LOG2
from flash_ext.ops.options import DESCALE_ROWS

from fp8_providers import METHODS, OURS, Quantized  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
ERRORS = (ValueError, RuntimeError)
STEP = 2.0**-4
"""Half a step of e4m3, relative."""


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """The tests on a GPU run where it has fa3."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def problem(*sizes: Any, **fields: Any) -> Problem:
    """With a descale of another shape for each of q, k and v, unless they are given."""
    descales = {"q_descale": "head", "k_descale": "fine", "v_descale": "fine"}
    return Problem(*sizes, **{"dtype": FP8, **descales, **fields})


Results = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def run(p: Problem, inputs: Inputs, variant: str = "auto", **options: Any) -> Results:
    with nan_filled_outputs():
        return attend(p, inputs, variant=variant, return_lse=True, **options)


@torch.no_grad()
def assert_accurate(p: Problem, inputs: Inputs, results: Results) -> None:
    """The rule of this file."""
    out, lse = results
    dtype = p.out_dtype or torch.bfloat16
    exact = dataclasses.replace(p, out_dtype=torch.float64)
    ref, ref_lse = attend(exact, inputs, flash_ext.reference)
    pt, _ = attend(p, inputs, flash_ext.reference)
    size, _ = attend(exact, with_positive_values(inputs), flash_ext.reference)
    assert out.dtype == pt.dtype == dtype and out.shape == ref.shape
    assert lse.dtype == torch.float32 and lse.shape == ref_lse.shape
    assert not out.isnan().any() and not lse.isnan().any()

    masked = ref_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, masked), "lse is -inf in the wrong rows"
    eps = 2.0**-10 * max(1.0, p.logit_gain) if lse.is_cuda else 1e-5
    off = (lse - ref_lse).masked_fill(masked, 0.0).abs()
    allowed = eps * (1 + ref_lse.masked_fill(masked, 0.0).abs())
    assert (off <= allowed).all(), f"lse: off by {_largest(off)}"

    out, pt = out.double(), pt.double()
    rounded = ref.to(dtype)
    rounding = _largest((rounded + 0.3 - 0.3).double() - rounded.double())
    error, bound = _largest(out - ref), 2 * _largest(pt - ref) + 2 * rounding
    assert error <= bound, f"out: max error {error:.3e} is above the bound {bound:.3e}"
    if out.numel() == 0:
        return
    rows, plain, most = (x.abs().amax(-1) for x in (out - ref, pt - ref, size))
    eps = torch.finfo(dtype).eps
    excess = rows - (2 * plain + (STEP + 2 * eps) * most + torch.finfo(dtype).tiny)
    assert (excess <= 0).all(), f"out: a row is off by more than its bound by {excess.max():.3e}"
    apart, allowed = _apart(out, ref), 2 * _apart(pt, ref) + eps**2 / 4
    assert apart <= allowed, f"out: {apart:.3e} apart, more than {allowed:.3e}"


def with_positive_values(inputs: Inputs) -> Inputs:
    """|V|, whose attention is how large out would be if nothing in it cancelled."""
    v = inputs.v.float().abs().to(FP8)
    return dataclasses.replace(inputs, v=v)


def check(p: Problem, device: str, variant: str = "auto") -> Results:
    inputs = make_inputs(p, device)
    results = run(p, inputs, variant)
    assert_accurate(p, inputs, results)
    if p.packed:
        assert not results[0][None][~p.used_rows("q").to(device)].any(), "rows without a sequence"
    return results


# --- Options ---

KINDS = ("scalar", "one", "head", "fine")
BASE = problem(2, 200, 300, 4, 2, 64)
OPTIONS: dict[str, tuple[Problem, dict[str, Any]]] = {
    # the problem with the option, and what takes it away
    "scale": (dataclasses.replace(BASE, scale=0.3), {"scale": None}),
    "negative scale": (dataclasses.replace(BASE, scale=-0.3), {"scale": 0.3}),
    "causal": (dataclasses.replace(BASE, causal=True), {"causal": False}),
    "window": (dataclasses.replace(BASE, window=(40, 9)), {"window": (-1, -1)}),
    "sink": (dataclasses.replace(BASE, sink=True), {"sink": None}),
    "seqused_k": (dataclasses.replace(BASE, seqused_k=(129, 40)), {"seqused_k": None}),
    "out_dtype": (dataclasses.replace(BASE, out_dtype=torch.float16), {"out_dtype": None}),
    **{
        f"{name}: {kind}": (dataclasses.replace(BASE, **{name: kind}), {name: None})
        for name in ("q_descale", "k_descale", "v_descale")
        for kind in KINDS
    },
}


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts(option: str, dtype: torch.dtype, device: str) -> None:
    """It gives what standard attention gives with it, and not what that gives without it."""
    p, without = OPTIONS[option]
    p = dataclasses.replace(p, dtype=dtype)
    inputs = make_inputs(p, device)
    results = run(p, inputs)
    assert_accurate(p, inputs, results)
    fields = {field.name for field in dataclasses.fields(Inputs)}
    of_inputs = {name: x for name, x in without.items() if name in fields}
    others = {name: x for name, x in without.items() if name not in fields}
    with pytest.raises(AssertionError):
        assert_accurate(
            dataclasses.replace(p, **others), dataclasses.replace(inputs, **of_inputs), results
        )


def test_without_descales_they_are_1(device: str) -> None:
    p = problem(2, 130, 150, 4, 2, 64, q_descale="", k_descale="", v_descale="")
    inputs = make_inputs(p, device)
    plain = run(p, inputs)
    assert_accurate(p, inputs, plain)
    one = torch.ones((), device=device)
    of_heads, of_blocks = one.expand(2, 2), one.expand(2, 2, 2)
    for descales in (
        (one, one[None], of_heads),
        (of_heads, of_heads, one.expand(2, 2, 64)),
        (one.expand(2, 4, 2), of_blocks, one),
    ):
        given = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        for a, e in zip(run(p, dataclasses.replace(inputs, **given)), plain, strict=True):
            assert_bitwise_equal(a, e)


def assert_descales_of_k_and_v_are_their_own(
    p: Problem, inputs: Inputs, run: Callable[[Problem, Inputs], Results]
) -> None:
    """The same of channels of v and blocks of 300 keys, in a batch of 2 with 2 heads of 64."""
    device = inputs.q.device
    out, _ = run(p, inputs)
    for b, head, channel in itertools.product((0, 1), (0, 1), (0, 1, 2, 3, 37, 63)):
        descale = torch.ones(2, 2, 64, device=device)
        descale[b, head, channel] = 8
        changed, _ = run(p, dataclasses.replace(inputs, v_descale=descale))
        factor = torch.ones_like(out)
        factor[b, :, 2 * head : 2 * head + 2, channel] = 8
        assert_bitwise_equal(changed, out * factor)
    for b, head, block in itertools.product((0, 1), (0, 1), (0, 1, 2)):
        # With all other keys of the head at 0 a block of keys is a shift of lse.
        descale = torch.full((2, 2, 3), 2.0**-20, device=device)
        descale[b, head, block] = 1
        _, changed = run(p, dataclasses.replace(inputs, k_descale=descale))
        heads = (changed - math.log(300)).abs().amax(-1) > 1e-2
        expected = torch.zeros_like(heads)
        expected[b, 2 * head : 2 * head + 2] = True
        assert torch.equal(heads, expected)


def test_every_block_head_and_channel_has_its_own(device: str) -> None:
    """One descale at a time, a factor of 8: what changes is what it belongs to, exactly."""
    p = problem(2, 300, 300, 4, 2, 64, q_descale="", k_descale="", v_descale="")
    inputs = make_inputs(p, device)
    out, _ = run(p, inputs)
    for b, head, block in itertools.product((0, 1), (0, 3), (0, 1, 2)):
        descale = torch.ones(2, 4, 3, device=device)
        descale[b, head, block] = 8
        changed, _ = run(p, dataclasses.replace(inputs, q_descale=descale))
        rows = (changed != out).any(-1)
        expected = torch.zeros_like(rows)
        expected[b, 128 * block : 128 * (block + 1), head] = True
        assert torch.equal(rows, expected)
    assert_descales_of_k_and_v_are_their_own(p, inputs, run)


def by_hand(inputs: Inputs, name: str) -> torch.Tensor:
    """The numbers that one of q, k and v (B, S, H, D) stands for, in float64."""
    x, descale = (getattr(inputs, n) for n in (name, f"{name}_descale"))
    found = x.double()
    key_heads = inputs.k.shape[2]
    for b, row, head in itertools.product(*map(range, x.shape[:3])):
        if descale.dim() == 2:
            factor = descale[b, head * key_heads // x.shape[2]]
        else:
            factor = descale[b, head] if name == "v" else descale[b, head, row // 128]
        found[b, row, head] *= factor
    return found


@pytest.mark.parametrize("kind", ("head", "fine"))
def test_what_fp8_numbers_stand_for(kind: str, device: str) -> None:
    """Standard attention by their definition: of the reference, and of packed sequences too."""
    descales = {f"{name}_descale": kind for name in "qkv"}
    p = problem(2, 140, 150, 6, 2, 16, causal=True, **descales)
    inputs = make_inputs(p, "cpu")
    ref, ref_lse = flash_ext.reference.attention(
        *(by_hand(inputs, name) for name in "qkv"), causal=True
    )
    out, lse = attend(dataclasses.replace(p, out_dtype=torch.float64), inputs, flash_ext.reference)
    torch.testing.assert_close(out, ref)
    torch.testing.assert_close(lse, ref_lse)
    inputs = make_inputs(p, device)
    assert_accurate(p, inputs, run(p, inputs))

    p = dataclasses.replace(p, lengths_q=(140, 140), lengths_k=(150, 150), tail=0)
    packed = {name: getattr(inputs, name).flatten(0, 1) for name in "qkv"}
    for name, length in (("cu_seqlens_q", 140), ("cu_seqlens_k", 150)):
        offsets = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        packed[name] = offsets.to(device)
    inputs = dataclasses.replace(inputs, **packed)
    exact = dataclasses.replace(p, out_dtype=torch.float64)
    out, _ = attend(exact, inputs, flash_ext.reference)
    torch.testing.assert_close(out.cpu(), ref.flatten(0, 1))
    assert_accurate(p, inputs, run(p, inputs))


# --- Shapes ---

DIMS = (
    (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256),
    (16, 48), (80, 80), (112, 112), (208, 240), (256, 16),
)  # fmt: skip
SHAPES = (
    problem(2, 128, 128, 2, 2, 64),
    problem(1, 1, 1, 8, 8, 64),
    problem(2, 129, 127, 4, 4, 64, causal=True),
    problem(1, 257, 385, 4, 1, 64, causal=True, q_descale="fine"),
    problem(2, 100, 500, 6, 2, 64, window=(100, 30)),
    problem(2, 300, 40, 4, 2, 64, causal=True),  # rows without a key
    problem(3, 50, 300, 4, 2, 64, seqused_k=(0, 129, 300)),
    problem(lengths_q=(70, 0, 130, 5), lengths_k=(9, 5, 300, 0), q_descale="fine"),
    problem(lengths_q=(300, 129, 1), lengths_k=(300, 257, 130), causal=True, q_descale="fine"),
    problem(lengths_q=(100, 20), lengths_k=(260, 140), seqused_k=(130, 140), heads_q=4, heads_k=1),
    problem(2, 150, 260, 4, 2, 64, q_descale="fine", sink=True, window=(60, 0)),
    problem(2, 150, 260, 4, 2, 64, logit_gain=8.0),
    problem(lengths_q=(70, 0, 130, 5), lengths_k=(9, 5, 300, 0), head_dim=128),
    problem(
        lengths_q=(300, 129, 1),
        lengths_k=(300, 257, 130),
        head_dim=256,
        head_dim_v=208,
        causal=True,
    ),
    problem(3, 50, 300, 4, 2, 128, seqused_k=(0, 129, 300)),
    problem(1, 150, 260, 4, 2, 64, scale=-0.2),
    problem(1, 260, 700, 4, 2, 64, q_descale="fine", scale=-0.2, causal=True, sink=True),
    problem(2, 150, 260, 4, 2, 128, scale=-2.0, window=(60, 0)),
    problem(1, 260, 700, 4, 2, 64, scale=0.0, window=(200, 50)),
    problem(1, 150, 260, 4, 2, 64, scale=1e-35, causal=True),
)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", SHAPES, ids=str)
def test_shapes(p: Problem, dtype: torch.dtype, device: str) -> None:
    check(dataclasses.replace(p, dtype=dtype), device)


@pytest.mark.parametrize("masked", ({}, {"causal": True}, {"window": (70, 20)}), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_head_dims(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, masked: dict, device: str
) -> None:
    sizes = (2, 200, 300, 4, 2) if device == "cuda" else (1, 140, 150, 2, 1)
    check(problem(*sizes, head_dim, head_dim_v=head_dim_v, dtype=dtype, **masked), device)


@pytest.mark.parametrize("head_dim", (24, 33, 1))
def test_other_head_dims(head_dim: int, device: str) -> None:
    """fa3 needs rows on 16-byte boundaries; the CPU does not."""
    p = problem(2, 100, 130, 4, 2, head_dim)
    if device == "cpu":
        check(p, device)
        return
    with pytest.raises(ERRORS, match=r"variant 'fa3' needs rows of q .*16-byte boundaries"):
        run(p, make_inputs(p, device))


@pytest.mark.parametrize("masked", ({}, {"causal": True}, {"scale": -0.2}), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("head_dim", (32, 64, 96, 128, 192, 256))
def test_tiles_across_blocks_of_descales(
    head_dim: int, dtype: torch.dtype, masked: dict, device: str
) -> None:
    """Tiles of 96 or 192 keys have keys of two blocks, at any column."""
    sizes = (2, 520, 1100, 4, 2) if device == "cuda" else (1, 130, 520, 1, 1)
    check(problem(*sizes, head_dim, q_descale="fine", dtype=dtype, **masked), device)


@pytest.mark.parametrize(
    "layout", ("bhsd", "sbhd", "packed", "expanded_heads", "expanded_batch", "bshd")
)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128))  # on CUDA 64 transposes V itself
def test_strides_and_nan_bytes_beside_the_rows(
    head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> None:
    options = {"layout": layout, "q_descale": "fine", "dtype": dtype}
    p = problem(2, 150, 260, 4, 2, head_dim, causal=True, **options)
    check(p, device)
    packed = {"lengths_q": (70, 0, 130), "lengths_k": (90, 5, 140)}
    if not layout.startswith("expanded"):
        check(dataclasses.replace(p, **packed), device)


def test_poison_is_a_nan_byte() -> None:
    q = make_inputs(problem(1, 3, 3, 1, 1, 16), "cpu").q
    rows = torch.empty(0, dtype=FP8).set_(q.untyped_storage()).view(torch.uint8)
    assert set(rows.view(-1).tolist()) > {0x7F}


@pytest.mark.parametrize("sizes", ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)))
def test_sizes_of_zero(sizes: tuple[int, int, int], device: str) -> None:
    batch, seqlen_q, seqlen_k = sizes
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        p = problem(*sizes, 4, 2, head_dim, causal=causal, q_descale="fine")
        out, lse = run(p, make_inputs(p, device))
        assert out.shape == (batch, seqlen_q, 4, head_dim) and out.dtype == torch.bfloat16
        assert lse.shape == (batch, 4, seqlen_q) and (lse == -torch.inf).all()
        assert not out.any()


FEW_QUERIES = (
    # Split keys, and heads that share K and V packed into a tile.
    problem(1, 1, 9000, 8, 1, 128),
    problem(1, 4, 20000, 8, 1, 128, causal=True, q_descale="fine"),
    problem(1, 4, 20000, 8, 8, 64, sink=True),
    problem(2, 16, 5000, 32, 8, 128, causal=True),
    problem(2, 3, 6000, 10, 2, 64, window=(3000, 0)),
    problem(2, 1, 6000, 16, 2, 192, seqused_k=(5000, 77)),
    problem(1, 8, 6000, 8, 1, 64, scale=-0.2),
    problem(lengths_q=(1, 4, 0), lengths_k=(9000, 300, 40), heads_q=8, heads_k=1, causal=True),
    problem(1, 2, 20000, 4, 1, 192, head_dim_v=128, out_dtype=torch.float16),
    problem(2, 2, 9000, 8, 2, 256, causal=True, q_descale="fine"),
    problem(1, 3, 9000, 8, 1, 96, q_descale="fine"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", FEW_QUERIES, ids=str)
def test_few_queries(p: Problem, dtype: torch.dtype) -> None:
    check(dataclasses.replace(p, dtype=dtype), "cuda")


MANY_TILES = (
    problem(2, 2100, 2300, 8, 2, 64, causal=True, q_descale="fine"),
    problem(2, 2100, 2300, 8, 2, 128, q_descale="fine"),
    problem(1, 3000, 3000, 8, 8, 128, causal=True),
    problem(1, 3000, 3000, 8, 4, 192, causal=True, out_dtype=torch.float16),
    problem(lengths_q=(1500, 0, 900, 1300), lengths_k=(1500, 9, 2000, 1300), heads_q=8, heads_k=2),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", MANY_TILES, ids=str)
def test_many_tiles(p: Problem, dtype: torch.dtype) -> None:
    check(dataclasses.replace(p, dtype=dtype), "cuda", variant="fa3")


@pytest.mark.parametrize("options", ({"causal": True}, {"sink": True, "scale": -0.2}), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_results_repeat_bit_by_bit(dtype: torch.dtype, options: dict, device: str) -> None:
    sizes = (2, 700, 1900, 8, 2, 128) if device == "cuda" else (1, 130, 150, 2, 1, 32)
    p = problem(*sizes, dtype=dtype, **options)
    inputs = make_inputs(p, device)
    first = run(p, inputs)
    for _ in range(200 if device == "cuda" else 3):
        for a, e in zip(run(p, inputs), first, strict=True):
            assert_bitwise_equal(a, e)


def test_named_fa3_and_auto(device: str) -> None:
    """The same, but on the CPU, where "auto" has its own tiles."""
    p = problem(2, 150, 200, 4, 2, 64, causal=True)
    check(p, device, variant="fa3")
    explanation = flash_ext.explain(*(getattr(make_inputs(p, device), name) for name in "qkv"))
    assert explanation.variant == "fa3" and explanation.backward is None
    assert "backward for 8-bit inputs" in (explanation.why_backward or "")
    for name in ("fa1", "fa2"):
        assert f"variant '{name}' has no 8-bit inputs" in (explanation.reasons[name] or "")


# --- Precision ---


def quantized(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("dtype", (FP8, torch.int8))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_scores_far_below_zero(dim: int, dtype: torch.dtype, device: str) -> None:
    """Also of rows that see no key of the tile which is first, so that their maximum is not known
    from it."""
    q = torch.ones(1, 256, 1, dim, device=device).to(dtype)
    k = torch.full((1, 256, 1, dim), -8.0, device=device).to(dtype)
    v = torch.randn(1, 256, 1, dim, generator=torch.Generator().manual_seed(0)).to(device).to(FP8)
    out, lse = flash_ext.attention(q, k, v, causal=True, scale=150 / (8 * dim), return_lse=True)
    counts = torch.arange(1, 257, device=device)
    torch.testing.assert_close(lse[0, 0], counts.log() - 150, rtol=1e-5, atol=1e-3)
    mean = v[0, :, 0].float().cumsum(0) / counts[:, None]
    assert (out[0, :, 0].float() - mean).norm() < 0.05 * mean.norm()


def length_error(
    keys: int,
    mean: float,
    device: torch.device | str,
    *,
    heads: int = 1,
    dim: int = 64,
    queries: int = 64,
    checked: int = 64,
) -> float:
    """RMS error over RMS result, of values of this mean."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, queries, heads, dim, generator=generator)
    k, v = (torch.randn(1, keys, heads, dim, generator=generator) for _ in range(2))
    x = METHODS[OURS](*(y.to(device, torch.bfloat16) for y in (q, k, v + mean)))
    want = x.first_queries(checked).exact()
    return float((x.attend()[:, :checked] - want).norm() / want.norm())


def needle_errors(
    keys: int, where: float, device: torch.device | str, *, dim: int = 128, queries: int = 2
) -> dict[str, float]:
    """The smallest weight of the key at ``where``, from 0 to 1, and what FP8 makes of it.

    Two rows of q are repeated to ``queries``: the numbers are the same whether keys are split or
    not.
    """
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 2, 2, dim, generator=generator)
    k, v = (torch.randn(1, keys, 1, dim, generator=generator) for _ in range(2))
    place = int(where * (keys - 1))
    k[:, place] = q.mean(dim=(1, 2), keepdim=True)[:, 0] * 4.7
    x = Quantized(*(y.to(device).to(torch.float8_e4m3fn) for y in (q, k, v)))
    exact = x.exact()
    largest = float(exact.abs().max())
    value = x.v[:, place].double()
    weights = (exact * value).sum(-1) / value.square().sum(-1)
    many = x._replace(q=x.q.repeat(1, queries // 2, 1, 1))
    plain = flash_ext.attention(*(y.to(torch.bfloat16) for y in many[:3])).double()
    out = many.attend(out_dtype=torch.bfloat16).double()
    return {
        "weight": float(weights.min()),
        "from_bf16": float((out - plain).abs().max()) / largest,
        "from_float64": float((out[:, :2] - exact).abs().max()) / largest,
    }


MANY_KEYS = {"cpu": 1 << 15, "cuda": 1 << 17}


@pytest.mark.parametrize("mean", (0.0, 1.0))
@torch.no_grad()
def test_errors_do_not_grow_with_the_keys(mean: float, device: str) -> None:
    """Sums over tiles are in float32: 14 bits would not hold the sum of so many keys."""
    rows = 64 if device == "cuda" else 16
    long, short = (
        length_error(keys, mean, device, heads=heads, queries=rows, checked=rows)
        for keys, heads in ((MANY_KEYS[device], 1), (2048, 8))
    )
    assert long <= 1.2 * short


@pytest.mark.parametrize("where", (0.0, 0.37, 1.0))
@torch.no_grad()
def test_a_needle_among_many_keys(where: float, device: str) -> None:
    """One key that takes most of the weight, as float64 and bfloat16 find it."""
    found = needle_errors(MANY_KEYS[device], where, device)
    assert found["weight"] > 0.5
    assert max(found["from_bf16"], found["from_float64"]) <= 2e-2


def test_small_weights_count(device: str) -> None:
    """P down to 2^-12 of the maximum keeps digits, because of the factor before it is rounded."""
    q = torch.ones(1, 1, 1, 16, device=device).to(FP8)
    k = torch.zeros(1, 4096, 1, 16, device=device)
    k[:, 0] = 8.0
    v = torch.ones(1, 4096, 1, 16, device=device)
    v[:, 0] = 0.0
    scale = 12 * math.log(2) / 128  # a score of log(2^12), so that the others weigh as much
    out = flash_ext.attention(q, k.to(FP8), v.to(FP8), scale=scale)
    torch.testing.assert_close(
        out.float().mean(), torch.tensor(0.5, device=device), rtol=1e-2, atol=0
    )


def test_a_small_weight_keeps_its_digits() -> None:
    """1.125 · 2^-14 of the maximum is an e4m3 number after the factor 2^8, and rounded after 2^6.

    (On a GPU the factor of most rows is smaller, because their maximum may be stale.)
    """
    q = torch.ones(1, 1, 1, 16).to(FP8)
    k = torch.zeros(1, 4096, 1, 16)
    k[:, 0] = 8.0
    v = torch.ones(1, 4096, 1, 16)
    v[:, 0] = 0.0
    weight = 1.125 * 2.0**-14
    scale = -math.log(weight) / 128
    expected = torch.full((), 4095 * weight / (1 + 4095 * weight))
    for module in (flash_ext, flash_ext.reference):
        out = module.attention(q, k.to(FP8), v.to(FP8), scale=scale)
        out = out[0] if module is flash_ext.reference else out
        torch.testing.assert_close(out.float().mean(), expected, rtol=5e-3, atol=0)


def test_constants_of_the_kernels_are_the_references() -> None:
    """The reference writes its constants out, so that it sees a kernel's wrong one."""
    csrc, reference = ROOT / "csrc", flash_ext.reference
    assert reference.P_FACTOR == 2.0**P_SCALE_LOG2
    assert reference.ROWS_OF_A_DESCALE == DESCALE_ROWS
    params = (csrc / "problem" / "params.h").read_text()
    assert re.findall(r"int kDescaleRows = (\d+);", params) == [str(DESCALE_ROWS)]

    common = csrc / "kernels" / "common"
    exact, optimistic = (
        (common / f"{name}.cuh").read_text() for name in ("fp8_softmax", "fp8_optimistic_softmax")
    )
    assert re.findall(r"Softmax : Fp8SoftmaxBase<kCols, (\d+)>", exact) == [str(P_SCALE_LOG2)]
    (offset,) = map(int, re.findall(r"Softmax : Fp8SoftmaxBase<kCols, (\d+)>", optimistic))
    (headroom,) = map(float, re.findall(r"kHeadroom = (.*)f;", optimistic))
    assert 2.0 ** (offset - headroom) < reference.P_FACTOR


@pytest.mark.parametrize("size", (127, -128))
def test_int8_products_are_exact(size: int, device: str) -> None:
    """256 products of the largest numbers are 22 bits; float32 sums of e4m3 keep fewer."""
    q, k = (torch.full((1, n, 1, 256), size, dtype=torch.int8, device=device) for n in (3, 200))
    k[:, 100:, :, 0] -= 1 if size > 0 else -1
    q[:, 1, :, 0], q[:, 2] = 0, -127
    v = torch.zeros(1, 200, 1, 256, device=device).to(FP8)
    _, lse = flash_ext.attention(q, k, v, scale=2.0**-12, return_lse=True)
    ref, ref_lse = flash_ext.reference.attention(q.double(), k.double(), v.double(), scale=2.0**-12)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-6, atol=1e-4)


def test_p_is_rounded_to_fp8(device: str) -> None:
    """As in the paper: a weight of 0.53 is 67.84 / 128, and between 64 and 72 e4m3 has nothing."""
    q = torch.ones(1, 1, 1, 16, device=device).to(FP8)
    k = torch.zeros(1, 2, 1, 16, device=device)
    k[:, 0] = -1.0
    v = torch.zeros(1, 2, 1, 16, device=device)
    v[:, 0] = 1.0
    scale = -math.log(0.53) / 16
    out, lse = flash_ext.attention(q, k.to(FP8), v.to(FP8), scale=scale, return_lse=True)
    expected = torch.full_like(out, 64 / 128 / 1.53)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=0)
    expected = torch.full_like(lse, math.log(1.53))
    torch.testing.assert_close(lse, expected, rtol=1e-3, atol=0)


# --- What does not run ---

Arguments = dict[str, Any]


def good(device: str, packed: bool = False) -> Arguments:
    shapes = ((2, 130, 4, 64), (2, 300, 2, 64), (2, 300, 2, 32))
    tensors = [torch.zeros(shape, device=device).to(FP8) for shape in shapes]
    arguments = dict(zip("qkv", tensors, strict=True))
    if packed:
        arguments = {name: x.flatten(0, 1) for name, x in arguments.items()}
        for name, offsets in (("cu_seqlens_q", (0, 130, 260)), ("cu_seqlens_k", (0, 257, 600))):
            arguments[name] = torch.tensor(offsets, dtype=torch.int32, device=device)
    return arguments


def descale(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable:
    return lambda a: {name: torch.ones(shape, dtype=dtype, device=a["q"].device)}


REFUSED: dict[str, tuple[str, Callable[[Arguments], Arguments]]] = {
    # what is wrong: (how the message begins, the change to good arguments)
    "k in bfloat16": (
        "k must be of q's dtype float8_e4m3fn, got bfloat16",
        lambda a: {"k": a["k"].to(torch.bfloat16)},
    ),
    "q and v in bfloat16": (
        "v must be of k's dtype float8_e4m3fn, got bfloat16",
        lambda a: {n: a[n].to(torch.bfloat16) for n in "qv"},
    ),
    "v in e5m2": (
        "v must be of q's dtype float8_e4m3fn, got float8_e5m2",
        lambda a: {"v": a["v"].to(torch.float8_e5m2)},
    ),
    "k in int8": (
        "k must be of q's dtype float8_e4m3fn, got int8",
        lambda a: {"k": a["k"].to(torch.int8)},
    ),
    "all in int8": (
        "v must be float8_e4m3fn with q and k in int8, got int8",
        lambda a: {n: a[n].to(torch.int8) for n in "qkv"},
    ),
    "q in int8": (
        "k must be of q's dtype int8, got float8_e4m3fn",
        lambda a: {"q": a["q"].to(torch.int8)},
    ),
    "v in bfloat16 with int8": (
        "v must be float8_e4m3fn with q and k in int8, got bfloat16",
        lambda a: {n: a[n].to(torch.int8) for n in "qk"} | {"v": a["v"].to(torch.bfloat16)},
    ),
    "all in e5m2": ("q must be ", lambda a: {n: a[n].to(torch.float8_e5m2) for n in "qkv"}),
    "all in e4m3fnuz": ("q must be ", lambda a: {n: a[n].to(torch.float8_e4m3fnuz) for n in "qkv"}),
    "descales without FP8": (
        "q_descale must be None unless q has 8 bits, got one for bfloat16",
        lambda a: {n: a[n].to(torch.bfloat16) for n in "qkv"} | descale("q_descale")(a),
    ),
    "out_dtype without FP8": (
        "out_dtype must be None or q's dtype bfloat16, got float16",
        lambda a: {n: a[n].to(torch.bfloat16) for n in "qkv"} | {"out_dtype": torch.float16},
    ),
    "out in float32": (
        "out_dtype must be bfloat16 or float16 with 8-bit inputs, got float32",
        lambda a: {"out_dtype": torch.float32},
    ),
    "out in FP8": (
        "out_dtype must be bfloat16 or float16 with 8-bit inputs, got float8_e4m3fn",
        lambda a: {"out_dtype": FP8},
    ),
    "dropout": (
        "dropout_p must be 0 with 8-bit inputs (no variant has both), got 0.1",
        lambda a: {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)},
    ),
    "a bias": (
        "bias must be None with 8-bit inputs (no variant has both), got (1, 1, 1, 300)",
        lambda a: {"bias": torch.zeros(1, 1, 1, 300, device=a["q"].device)},
    ),
    "a bool bias": (
        "bias must be None with 8-bit inputs",
        lambda a: {"bias": torch.ones(1, 1, 130, 300, device=a["q"].device) > 0},
    ),
    "a descale in float64": (
        "k_descale must be float32, got float64",
        descale("k_descale", dtype=torch.float64),
    ),
    "two numbers": ("q_descale must be one number, of shape", descale("q_descale", 2)),
    "of each query head": (
        "q_descale must be one number, of shape (batch, heads_k) = (2, 2), or (batch, heads_q,"
        " blocks of 128 queries) = (2, 4, 2), got (2, 4)",
        descale("q_descale", 2, 4),
    ),
    "of another batch": ("k_descale must be one number, of shape", descale("k_descale", 1, 2)),
    "blocks of key heads for q": ("q_descale must be ", descale("q_descale", 2, 2, 2)),
    "too few blocks of queries": ("q_descale must be ", descale("q_descale", 2, 4, 1)),
    "too many blocks of keys": (
        "k_descale must be one number, of shape (batch, heads_k) = (2, 2), or (batch, heads_k,"
        " blocks of 128 keys) = (2, 2, 3), got (2, 2, 4)",
        descale("k_descale", 2, 2, 4),
    ),
    "blocks of query heads for k": ("k_descale must be ", descale("k_descale", 2, 4, 3)),
    "blocks for v": (
        "v_descale must be one number, of shape (batch, heads_k) = (2, 2), or (batch, heads_k,"
        " head_dim_v) = (2, 2, 32), got (2, 2, 3)",
        descale("v_descale", 2, 2, 3),
    ),
    "four dimensions": ("v_descale must be ", descale("v_descale", 2, 2, 32, 1)),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("op", ("fwd", "check"))
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, op: str, device: str) -> None:
    begin, change = REFUSED[what]
    arguments = good(device)
    run_op = getattr(torch.ops.flash_ext, op)
    run_op(**arguments)
    with pytest.raises(ERRORS) as caught:
        run_op(**arguments | change(arguments))
    message = str(caught.value)
    assert f"flash_ext: {begin}" in message and " must be " in message and ", got " in message


def test_out_dtype_may_be_qs(device: str) -> None:
    q = torch.randn(1, 5, 2, 32, device=device, dtype=torch.bfloat16)
    out = flash_ext.attention(q, q, q, out_dtype=torch.bfloat16)
    assert_bitwise_equal(out, flash_ext.attention(q, q, q))
    with pytest.raises(ValueError, match="out_dtype must be a torch.dtype, got 'bfloat16'"):
        flash_ext.attention(q, q, q, out_dtype="bfloat16")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="q_descale must be a tensor, got a value of type float"):
        flash_ext.attention(q, q, q, q_descale=0.5)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ("q_descale", "k_descale"))
def test_blocks_of_packed_sequences(name: str) -> None:
    """At least those of the longest: 130 queries, 343 keys. Only the CPU looks."""
    arguments = good("cpu", packed=True)
    heads, least = (4, 2) if name == "q_descale" else (2, 3)
    for blocks in (least, least + 3):
        torch.ops.flash_ext.fwd(**arguments, **{name: torch.ones(2, heads, blocks)})
    with pytest.raises(ValueError, match=rf"{name} must be .* at least {least}\), got"):
        torch.ops.flash_ext.fwd(**arguments, **{name: torch.ones(2, heads, least - 1)})
    with pytest.raises(ValueError, match=f"{name} must be "):
        torch.ops.flash_ext.fwd(**arguments, **{name: torch.ones(3, heads, least)})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("q_descale", "k_descale"))
def test_blocks_are_counted_in_debugging(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FLASH_EXT_DEBUG=1, on a GPU."""
    arguments = good("cuda", packed=True)
    heads, least = (4, 2) if name == "q_descale" else (2, 3)
    monkeypatch.setenv("FLASH_EXT_DEBUG", "1")
    for blocks in (least, least + 3):
        descale = torch.ones(2, heads, blocks, device="cuda")
        torch.ops.flash_ext.fwd(**arguments, **{name: descale})
    with pytest.raises(ERRORS, match=rf"{name} must be .* at least {least}\), got"):
        torch.ops.flash_ext.fwd(**arguments, **{name: descale[..., : least - 1]})


@pytest.mark.parametrize("variant", ("fa1", "fa2"))
def test_fa1_and_fa2_have_no_fp8(variant: str, device: str) -> None:
    for op in (torch.ops.flash_ext.fwd, torch.ops.flash_ext.check):
        with pytest.raises(ERRORS, match=f"variant '{variant}' has no 8-bit inputs"):
            op(**good(device), variant=variant)


@pytest.mark.parametrize("wanted", ("auto", "fa3"))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("option", ("softcap", "alibi_slopes"))
def test_neither_softcap_nor_alibi(
    option: str, dtype: torch.dtype, wanted: str, device: str
) -> None:
    """Of any size: by name, before anything runs, and `explain` says so too."""
    arguments = good(device)
    for name in "qk":
        arguments[name] = arguments[name].to(dtype)
    slopes = torch.zeros(4, device=device)
    name = "softcap" if option == "softcap" else "ALiBi"
    why = f"variant 'fa3' has no {name} with 8-bit inputs"
    for value in (0.5, 30.0, 3000.0) if option == "softcap" else (slopes, slopes.expand(2, 4)):
        given = {option: value, "variant": wanted}
        for op in (torch.ops.flash_ext.fwd, torch.ops.flash_ext.check, flash_ext.attention):
            with pytest.raises(ERRORS, match=why):
                op(**arguments, **given)
        assert why in (flash_ext.explain(**arguments, **given).reasons["fa3"] or "")


NO_BACKWARD = "no variant has a backward for 8-bit inputs"


@pytest.mark.parametrize("which", ("q", "k", "v", "sink"))
def test_nothing_may_require_a_gradient(which: str, device: str) -> None:
    arguments = good(device) | {"sink": torch.zeros(4, device=device)}
    arguments[which].requires_grad_()
    for return_lse in (False, True):
        with pytest.raises(RuntimeError, match=NO_BACKWARD):
            flash_ext.attention(**arguments, return_lse=return_lse)
    with pytest.raises(RuntimeError, match=NO_BACKWARD):
        torch.ops.flash_ext.fwd(**arguments)
    with torch.no_grad():
        assert flash_ext.attention(**arguments).dtype == torch.bfloat16


def test_there_is_no_backward(device: str) -> None:
    arguments = good(device)
    out, lse = torch.ops.flash_ext.fwd(**arguments)
    with pytest.raises(ERRORS, match=NO_BACKWARD):
        torch.ops.flash_ext.bwd(out, None, *arguments.values(), out, lse)


# --- PyTorch ---


def test_autocast_leaves_fp8_alone(device: str) -> None:
    p = problem(1, 70, 90, 2, 1, 32)
    inputs = make_inputs(p, device)
    plain = run(p, inputs)
    with torch.autocast(device, torch.bfloat16):
        for a, e in zip(run(p, inputs), plain, strict=True):
            assert_bitwise_equal(a, e)
        tensors = {name: getattr(inputs, name) for name in "qkv"}
        out, _ = torch.ops.flash_ext.fwd(**tensors, **inputs.options())
    assert_bitwise_equal(out, plain[0])


@pytest.mark.parametrize("out_dtype", (None, torch.float16))
def test_compile_and_fake_tensors(out_dtype: torch.dtype | None, device: str) -> None:
    p = problem(1, 70, 90, 2, 1, 32, q_descale="scalar", out_dtype=out_dtype)
    inputs = make_inputs(p, device)
    compiled = torch.compile(run.__wrapped__, fullgraph=False, backend="aot_eager")
    with torch.no_grad():
        results = compiled(p, inputs)
    for a, e in zip(results, run(p, inputs), strict=True):
        assert_bitwise_equal(a, e)
    q, k, v = (getattr(inputs, name).to("meta") for name in "qkv")
    out, lse = torch.ops.flash_ext.fwd(q, k, v, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16) and lse.dtype == torch.float32


def test_op_check(device: str) -> None:
    """But for what torch's own checks cannot do with FP8 numbers."""
    inputs = make_inputs(problem(1, 40, 50, 2, 1, 32, out_dtype=torch.float16), device)
    torch.library.opcheck(
        torch.ops.flash_ext.fwd.default,
        (inputs.q, inputs.k, inputs.v),
        {"causal": True, "out_dtype": torch.float16} | inputs.options(),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind: str, device: str) -> None:
    """Of the inputs and their descales, and of the inputs alone."""
    make = {"generator": torch.Generator().manual_seed(3)}
    q, k, v = (torch.randn(3, 2, 140, h, 32, **make).to(device) for h in (4, 2, 2))
    q8, k8, v8 = (quantized(x) for x in (q, k, v))
    shapes = {"scalar": [()] * 3, "one": [(1,)] * 3, "head": [(2, 2)] * 3}
    shapes["fine"] = [(2, 4, 2), (2, 2, 2), (2, 2, 32)]
    descales = [torch.rand(3, *shape, **make).to(device) + 0.5 for shape in shapes[kind]]

    def call(q, k, v, *descales):
        names = ("q_descale", "k_descale", "v_descale")
        given = dict(zip(names, descales, strict=True))
        return flash_ext.attention(q, k, v, return_lse=True, variant="fa3", **given)

    for dim in (0, None):
        given = descales if dim == 0 else [x[0] for x in descales]
        dims = (0, 0, 0, dim, dim, dim)
        results = torch.vmap(call, in_dims=dims)(q8, k8, v8, *given)
        for i in range(3):
            own = [x[i] if dim == 0 else x for x in given]
            for a, e in zip(results, call(q8[i], k8[i], v8[i], *own), strict=True):
                torch.testing.assert_close(a[i], e)


def test_descales_by_dimension() -> None:
    """What a mesh of devices splits of them."""
    from flash_ext.ops.options import dim_of

    for dims, batch, heads in ((0, None, None), (1, None, None), (2, 0, 1), (3, 0, 1)):
        for name in ("q_descale", "k_descale", "v_descale"):
            assert dim_of(name, dims, "batch") == batch
            assert dim_of(name, dims, "heads") == heads
    assert dim_of("alibi_slopes", 1, "heads") == 0 and dim_of("alibi_slopes", 2, "heads") == 1
