"""Short sequences: kernels/short/, of which all scores of a head are one tile.

Would catch rows or keys past the sequence that count, a head of the walk that is computed twice or
with the tiles of another one, a gradient of the bias that misses heads of a CTA or CTAs of a bias,
sums in another order from run to run, and a stage that is overwritten while it is read.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from attention_testing import (
    Problem,
    assert_all_bitwise_equal,
    check,
    make_inputs,
    run,
)
from grids import BIAS_PATTERNS, HALF_TYPES, MASKS
from test_bias import kernels_of
from test_large_scores import SIZES, assert_right, results, tensors

import flash_ext

VARIANTS = ("fa2", "fa3", "auto")
MOST = 64  # queries, and keys


def lengths() -> Iterator[Problem]:
    """Every number of queries, and of keys; head dims, types, masks and layouts drawn."""
    draw = random.Random(1)
    keys = draw.sample(range(1, MOST + 1), MOST)
    masks = (*MASKS, {"window": (9, 3)}, {"window": (-1, 5)})
    for seqlen_q, seqlen_k in zip(range(1, MOST + 1), keys, strict=True):
        yield Problem(
            draw.randrange(1, 9),
            *(seqlen_q, seqlen_k),
            *draw.choice(((3, 3), (3, 3), (4, 2))),
            draw.choice((32, 64, 16, 24, 40, 48, 8, 56)),
            draw.choice(HALF_TYPES),
            layout=draw.choice(("bshd", "bhsd", "packed", "expanded_batch", "odd_row")),
            head_dim_v=draw.choice((None, None, 32, 16)),
            loss=draw.choice(("both", "both", "out", "lse")),
            seed=seqlen_q,
            **draw.choice(masks),
        ).well_conditioned()


def biases() -> Iterator[Problem]:
    """Every way to broadcast, with heads for one CTA and for several."""
    draw = random.Random(2)
    masks = (*MASKS, {"window": (20, 30)})
    for pattern, bias_type in itertools.product(BIAS_PATTERNS, ("input", "float32", "bool")):
        seqlen = draw.choice(((49, 49), (64, 64), (33, 61), (64, 17), (16, 40)))
        yield Problem(
            draw.choice((3, 40, 150)),
            *seqlen,
            *draw.choice(((3, 3), (2, 2), (5, 5))),
            draw.choice((32, 64, 24)),
            draw.choice(HALF_TYPES),
            bias=pattern,
            bias_type=bias_type,
            seed=draw.randrange(1000),
            **draw.choice(masks),
        ).well_conditioned()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[:2])
@pytest.mark.parametrize("problem", tuple(lengths()), ids=str)
def test_every_length(problem: Problem, variant: str) -> None:
    check(problem, variant, "cuda", deterministic=problem.seed % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[:2])
@pytest.mark.parametrize("problem", tuple(biases()), ids=str)
def test_every_bias(problem: Problem, variant: str) -> None:
    check(problem, variant, "cuda", deterministic=problem.seed % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("d", (32, 64))
@pytest.mark.parametrize("pattern", ("", "1hqk", "bhqk", "11q1", "b11k"))
def test_many_heads_are_repeatable(pattern: str, d: int) -> None:
    """More than the GPU works on at a time, walked by CTAs with several each: the same bits."""
    problem = Problem(400, 49, 49, 3, 3, d, bias=pattern)
    first = check(problem, "auto", "cuda")
    for _ in range(10):
        assert_all_bitwise_equal(run(problem, "auto", "cuda"), first)


@pytest.mark.gpu
@pytest.mark.parametrize("equal", (True, False), ids=("equal", "random"))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("name", tuple(SIZES)[1:])
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_large_scores(name: str, causal: bool, equal: bool, with_bias: bool) -> None:
    """Whose lse is too coarse: P comes from references."""
    dtype, size, _ = SIZES[name]
    inputs = tensors("cuda", dtype, size, 57, equal, 57, 4)
    options = {"causal": causal}
    if with_bias:
        options["bias"] = torch.zeros(1, 4, 57, 57, device="cuda")
    actual = results(flash_ext, *inputs, **options, variant="fa2")
    assert_right(actual, inputs, 0.05 if name == "1e5" else 0.0, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_at_the_lowest_bias(variant: str) -> None:
    """All their scores are the lowest number: out is the mean of v."""
    inputs = tensors("cuda", torch.float16, 1e4, 57, False, 57, 4)
    bias = torch.zeros(57, 57, device="cuda")
    bias[:9] = bias[9:, 40:] = torch.finfo(torch.float32).min
    actual = results(flash_ext, *inputs, bias=bias, variant=variant)
    mean = inputs[2].double().mean(1, keepdim=True)
    assert (actual["out"][:, :9].double() - mean).abs().max() < 1e-3
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ("1hqk", "bhqk"))
def test_large_bias(pattern: str) -> None:
    problem = Problem(5, 49, 57, 2, 2, 32, bias=pattern, bias_type="float32")
    inputs = make_inputs(problem, "cuda")
    with torch.no_grad():
        inputs.bias[:, :, 30:] = -20000.0
        inputs.bias[:, :, :9] = 40000.0
        inputs.bias[:, :, 11:14] = -torch.inf
    found = check(problem, "auto", "cuda", inputs=inputs)
    assert (found["lse"][:, :, 11:14] == -torch.inf).all()
    assert not found["out"][:, 11:14].any() and not found["dq"][:, 11:14].any()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ("", "1hqk"))
def test_a_nan_stays_in_its_head(bias: str) -> None:
    """And a NaN in q in its row."""
    problem = Problem(300, 49, 49, 3, 3, 32, bias=bias)
    inputs = make_inputs(problem, "cuda")
    clean = run(problem, "auto", "cuda", inputs=inputs)
    with torch.no_grad():
        inputs.q[7, 20, 1] = torch.nan
        inputs.k[9, 48, 2] = torch.nan
    dirty = run(problem, "auto", "cuda", inputs=inputs)
    assert dirty["out"][7, 20, 1].isnan().all() and dirty["out"][9, :, 2].isnan().all()
    for name in ("out", "dq", "dk", "dv"):
        for batch, head in ((7, 1), (9, 2)):
            x, y = dirty[name], clean[name]
            if name in ("out", "dq") and batch == 7:
                x[batch, 20, head] = y[batch, 20, head]
            else:
                x[batch, :, head] = y[batch, :, head]
        assert_all_bitwise_equal({name: dirty[name]}, {name: clean[name]})


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernels_that_run(variant: str) -> None:
    """One forward and one backward, and a sum of dbias where several CTAs have a bias."""
    if variant == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for pattern, sums in (("", False), ("1hqk", True), ("bhqk", False)):
        kernels = kernels_of(Problem(40, 49, 49, 2, 2, 32, bias=pattern), variant)
        assert "ShortForward" in kernels and "ShortBackward" in kernels
        assert ("short_dbias" in kernels) == sums
        assert "preprocess" not in kernels and "Fa3" not in kernels
