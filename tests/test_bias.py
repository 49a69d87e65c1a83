"""The bias and its gradient: every way to broadcast, every type, -inf where it hides keys.

Would catch a gradient that is not summed over a broadcast dimension or summed twice, a wrong stride
or head mapping of the bias, a NaN where whole rows or whole tiles are hidden, and a bias that is
read where no sequence has a position.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_testing import (
    LAYOUTS,
    SQUARE_DIMS,
    VARIANTS,
    Inputs,
    Problem,
    assert_accurate,
    assert_all_bitwise_equal,
    attend,
    check,
    expected_results,
    make_inputs,
    run,
    skip_unsupported,
)
from grids import BIAS_PATTERNS, HALF_TYPES, MASKS, alternate, cover, every_case

pytestmark = pytest.mark.options(bias="bhqk")

SEQUENCES = {
    "dense": {"batch": 3},
    "used": {"batch": 3, "seqused_k": (100, 0, 37)},
    "packed": {"lengths_q": (70, 0, 65, 9), "lengths_k": (130, 8, 64, 0)},
    "short": {"lengths_q": (70, 3, 65), "lengths_k": (130, 8, 64), "bias_short": 5},
}


def patterns(device: str) -> Iterator[Problem]:
    """Every way to broadcast, dense and packed; head dims, types and masks in rotation."""
    dims = (40, *SQUARE_DIMS) if device == "cuda" else (24, 64)
    lengths = (150, 290) if device == "cuda" else (70, 130)
    masks = (*MASKS, {"window": (33, 9)})
    grid = cover(device, BIAS_PATTERNS, tuple(SEQUENCES.values()), ("input", "float32"))
    problems = (
        Problem(
            **{"seqlen_q": lengths[0], "seqlen_k": lengths[1]} | sequences | masks[index % 3],
            head_dim=dims[index % 7 % len(dims)],
            bias=pattern,
            bias_type=bias_type,
        )
        for index, (pattern, sequences, bias_type) in enumerate(grid)
    )
    return alternate(problems)


def layouts(device: str) -> Iterator[Problem]:
    """Every layout of the bias in memory; in "bhsd" its last stride is not 1."""
    dims = (24, 40, 64, 128) if device == "cuda" else (40,)
    types = ("input", "float32", "bool")
    for index, (layout, d, bias_type) in enumerate(itertools.product(LAYOUTS, dims, types)):
        dtype = HALF_TYPES[index % 2]
        yield Problem(
            2, 70, 131, 4, 2, d, dtype, layout=layout, bias="bhqk", bias_type=bias_type, seed=index
        )


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("device", "problem", "variant"), every_case(patterns, layouts))
def test_against_float64(device: str, problem: Problem, variant: str) -> None:
    check(problem, variant, device, deterministic=problem.seed % 2 == 1)


every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@pytest.mark.parametrize("pattern", ("bhqk", "11qk", "b11k"))
@pytest.mark.parametrize("sink", (False, True))
def test_whole_rows_and_tiles_hidden(sink: bool, pattern: str, variant: str, device: str) -> None:
    """-inf for a first tile of keys, a last tile of keys, and every key of some queries."""
    problem = Problem(2, 200, 400, 4, 2, 64, bias=pattern, sink=sink)
    inputs = make_inputs(problem, device)
    with torch.no_grad():
        inputs.bias[..., :130] = inputs.bias[..., 270:] = -torch.inf
        if "q" in pattern:
            inputs.bias[..., 64:131, :] = -torch.inf
    results = check(problem, variant, device, inputs=inputs)
    assert not results["dbias"][(inputs.bias == -torch.inf)].any()
    if "q" in pattern:
        assert not results["out"][:, 64:131].any() and not results["dq"][:, 64:131].any()
        expected = inputs.sink.detach()[:, None] if sink else torch.tensor(-torch.inf)
        assert (results["lse"][:, :, 64:131] == expected.to(device)).all()


@every_variant
def test_everything_hidden(variant: str, device: str) -> None:
    for bias_type in ("input", "bool"):
        problem = Problem(2, 70, 90, 4, 2, 64, bias="b11k", bias_type=bias_type)
        inputs = make_inputs(problem, device)
        with torch.no_grad():
            inputs.bias.fill_(False if bias_type == "bool" else -torch.inf)
        results = run(problem, variant, device, inputs=inputs)
        assert (results.pop("lse") == -torch.inf).all()
        assert not any(x.any() for x in results.values())


@every_variant
@pytest.mark.parametrize("bias_type", ("input", "float32"))
def test_lowest_number_hides_like_infinity(bias_type: str, variant: str, device: str) -> None:
    """Masks made with torch.finfo(dtype).min: the same numbers where a row still sees a key."""
    for dtype in HALF_TYPES:
        problem = Problem(1, 70, 200, dtype=dtype, bias="1hqk", bias_type=bias_type)
        results = []
        lowest = torch.finfo(dtype if bias_type == "input" else torch.float32).min
        for value in (-torch.inf, lowest):
            inputs = make_inputs(problem, device)
            with torch.no_grad():
                inputs.bias[inputs.bias == -torch.inf] = value
                inputs.bias[..., :130] = value
                inputs.bias[..., 150] = 1.0
            results.append(run(problem, variant, device, deterministic=True, inputs=inputs))
        for name, x in results[0].items():  # not the bits: a hidden entry's gradient may be -0
            assert torch.equal(results[1][name], x), name


@every_variant
def test_every_key_at_the_lowest_number(variant: str, device: str) -> None:
    """A row of nothing but torch.finfo(dtype).min may come out as anything but NaN."""
    inputs = make_inputs(Problem(1, 70, 200, bias="1hqk", bias_type="float32"), device)
    with torch.no_grad():
        inputs.bias[:, :, :20] = torch.finfo(torch.float32).min
    results = run(Problem(1, 70, 200, bias="1hqk"), variant, device, inputs=inputs)
    assert not any(x.isnan().any() for x in results.values())


@every_variant
@pytest.mark.parametrize("bias_type", ("input", "float32", "bool"))
def test_other_gradients_do_not_depend_on_the_bias_gradient(
    bias_type: str, variant: str, device: str
) -> None:
    """Whether the bias needs a gradient changes no bit of the rest."""
    problem = Problem(2, 70, 130, 4, 2, 64, bias="1hqk", bias_type=bias_type, causal=True)
    with_gradient = run(problem, variant, device, deterministic=True)
    inputs = make_inputs(problem, device)
    inputs.bias = inputs.bias.detach()
    without = run(problem, variant, device, deterministic=True, inputs=inputs)
    assert "dbias" not in without and ("dbias" in with_gradient) == (bias_type != "bool")
    assert_all_bitwise_equal(with_gradient, without)


@every_variant
def test_gradient_of_the_bias_alone(variant: str, device: str) -> None:
    """q, k and v need none; the gradient is contiguous however the bias lies."""
    problem = Problem(2, 70, 130, 4, 2, 64, bias="bhqk", layout="bhsd")
    expected = run(problem, variant, device)["dbias"]
    inputs = make_inputs(problem, device)
    inputs.q, inputs.k, inputs.v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = attend(problem, inputs, variant=variant, return_lse=True)
    (dbias,) = torch.autograd.grad((out, lse), inputs.bias, (inputs.dout, inputs.dlse))
    assert dbias.is_contiguous() and not inputs.bias.is_contiguous()
    assert_all_bitwise_equal({"dbias": dbias}, {"dbias": expected})


@every_variant
@pytest.mark.parametrize("bias_type", ("input", "bool"))
def test_leading_dimensions_may_be_missing(bias_type: str, variant: str, device: str) -> None:
    """A bias of (Sq, Sk) or (Hq, Sq, Sk) is one with leading ones."""
    for pattern, missing in (("11qk", 2), ("1hqk", 1), ("111k", 3)):
        problem = Problem(2, 30, 50, 4, 2, 64, bias=pattern, bias_type=bias_type)
        whole = run(problem, variant, device, deterministic=True)
        inputs = make_inputs(problem, device)
        shape = inputs.bias.shape[missing:]
        inputs.bias = inputs.bias.detach().reshape(shape).requires_grad_(bias_type != "bool")
        fewer = run(problem, variant, device, deterministic=True, inputs=inputs)
        if "dbias" in whole:
            whole["dbias"] = whole["dbias"].reshape(shape)
        assert_all_bitwise_equal(fewer, whole)


@every_variant
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_broadcasting_sums_the_whole_gradient(sequences: dict, variant: str, device: str) -> None:
    """Of every pattern, against the gradient of the same bias repeated, up to float32 sums."""
    base = {"batch": 3, "seqlen_q": 70, "seqlen_k": 130} | sequences | {"bias_short": 0}
    problem = Problem(**base, heads_q=4, bias="bhqk", bias_type="float32", causal=True)
    skip_unsupported(variant, problem, device)
    shape = make_inputs(problem, device).bias.shape
    for pattern in BIAS_PATTERNS:
        inputs = make_inputs(dataclasses.replace(problem, bias=pattern), device)
        broadcast = run(problem, variant, device, inputs=inputs)["dbias"]
        whole = inputs.bias.detach().expand(shape).contiguous().requires_grad_()
        inputs = dataclasses.replace(inputs, bias=whole)
        repeated = run(problem, variant, device, inputs=inputs)["dbias"].double()
        dims = [dim for dim, size in enumerate(broadcast.shape) if size == 1]
        expected = repeated.sum(dims, keepdim=True) if dims else repeated
        tolerance = 1e-5 * (repeated.abs().sum(dims, keepdim=True) if dims else repeated.abs())
        assert ((broadcast - expected).abs() <= tolerance + 1e-6).all(), pattern


@pytest.mark.gpu
@every_variant
@pytest.mark.parametrize("bias_type", ("input", "bool"))
def test_bias_past_2_31_elements(
    bias_type: str, variant: str, claim_gpu_memory: Callable[[int], None]
) -> None:
    """Rows whose offset int32 does not hold. Only they and the first reach the loss."""
    seqlen, heads, dim = 50000, 2, 64
    claim_gpu_memory(10 * seqlen**2)  # bias, its gradient, that in float32, and what compares it
    rows = torch.tensor((0, 1, 42949, 42950, 49998, 49999), device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v = (torch.randn(1, seqlen, heads, dim, **make, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, seqlen, seqlen, **make)
    if bias_type == "bool":
        bias = bias > -1
    whole = Inputs(q, k, v, torch.zeros_like(q), torch.zeros(1, heads, seqlen, device="cuda"))
    whole.bias = bias.requires_grad_(bias_type != "bool")
    whole.dout[:, rows] = torch.randn(1, len(rows), heads, dim, **make)
    whole.dlse[..., rows] = 1.0
    # Only the same rows: what the rest adds to any gradient is 0.
    part = Inputs(q[:, rows], k, v, whole.dout[:, rows], whole.dlse[..., rows])
    part.bias = whole.bias[:, :, rows]
    for x in (part.q, part.bias):
        x.detach_().requires_grad_(x.is_floating_point())
    problem = Problem(1, len(rows), seqlen, heads, heads, dim, bias="11qk", bias_type=bias_type)
    expected = expected_results(problem, part)
    actual = run(problem, variant, "cuda", inputs=whole)
    for name in ("out", "dq"):
        actual[name] = actual[name][:, rows]
    actual["lse"] = actual["lse"][..., rows]
    if "dbias" in actual:
        sample = actual["dbias"][:, :, rows]
        actual["dbias"][:, :, rows] = 0
        assert not actual["dbias"].any(), "the other rows have no gradient"
        actual["dbias"] = sample
    assert_accurate(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("variant", ("fa1", "fa2"))
def test_a_bias_without_columns_hides_all_keys(variant: str, device: str) -> None:
    """It has no elements, and so no address."""
    lengths = {"seqlen_q": 70, "seqlen_k": 4, "lengths_q": (3, 70), "lengths_k": (4, 2)}
    problem = Problem(**lengths, bias="bhqk", bias_short=4)
    assert make_inputs(problem, device).bias.shape[-1] == 0
    check(problem, variant, device)


# --- The gradient by kernels/fa3/bias_gradient.cuh and stored_dbias.cuh, of Hopper GPUs ---


def gradients() -> Iterator[Problem]:
    """Every way to broadcast; head dims, lengths, types and masks in rotation."""
    masks = (*MASKS, {"window": (70, 30)})
    lengths = ((150, 290), (49, 49), (64, 64), (300, 130), (257, 129), (33, 500))
    grid = itertools.product(
        BIAS_PATTERNS, ("dense", "used", "packed", "short"), ("input", "float32")
    )
    problems = (
        Problem(
            **dict(zip(("seqlen_q", "seqlen_k"), lengths[index % 6], strict=True))
            | SEQUENCES[sequences]
            | masks[index // 2 % 3],
            head_dim=(32, 64, 128, 40, 96)[index % 5],
            head_dim_v=(None, None, 24)[index // 5 % 3],
            sink=index % 7 == 0,
            bias=pattern,
            bias_type=bias_type,
        )
        for index, (pattern, sequences, bias_type) in enumerate(grid)
    )
    return alternate(problems)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", gradients(), ids=str)
def test_gradient_against_float64(problem: Problem) -> None:
    """ "auto": Hopper GPUs run their kernel, whichever variant runs the rest."""
    check(problem, "auto", "cuda")


def stored_gradients() -> Iterator[Problem]:
    """An element of dbias is one of dS, or the sum of two; tiles that masks hide on every side."""
    masks = ({}, {"causal": True}, {"window": (100, 60)}, {"window": (40, -1)})
    lengths = ((150, 296), (300, 133), (257, 520), (33, 505), (520, 264), (1900, 72), (1, 1000))
    terms = (("bhqk", 3), ("1hqk", 1), ("1hqk", 2), ("11qk", 1))
    problems = (
        Problem(
            batch,
            *lengths[index % 7],
            head_dim=d,
            head_dim_v=24 if index % 9 == 0 else None,
            bias=pattern,
            bias_type="float32" if d <= 64 and index % 3 == 0 else "input",
            **mask,
        )
        for index, ((pattern, batch), d, mask) in enumerate(
            itertools.product(terms, (32, 64, 128, 40, 96), masks)
        )
    )
    yield from alternate(problems)
    # Wide windows that hide the first keys from all queries, in one part and in several.
    for lengths in ((33, 504), (1200, 2000), (4096, 8192)):
        window = (lengths[0] + 2, -1)
        yield Problem(1, *lengths, 1, 1, 64, window=window, bias="bhqk")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ("auto", "fa2"))
@pytest.mark.parametrize("problem", stored_gradients(), ids=str)
def test_stored_gradient_against_float64(problem: Problem, variant: str) -> None:
    """The backward stores it (kernels/fa3/stored_dbias.cuh); FA2 what is one term in 16 bits."""
    check(problem, variant, "cuda", deterministic=problem.seed % 2 == 1)


def tiles() -> Iterator[Problem]:
    """Rows that start on 16-byte boundaries, of every pattern: FA2 copies tiles of the bias."""
    lengths = ((150, 296), (300, 136), (33, 504), (64, 64), (1, 1000), (700, 72))
    masks = (*MASKS, {"window": (70, 30)}, {"window": (200, -1)})
    grid = itertools.product(BIAS_PATTERNS, ({}, {"seqused_k": (100, 0, 37)}), (32, 64, 128))
    problems = (
        Problem(
            3,
            *((150, 296) if sequences else lengths[index % 6]),
            heads_k=1 if index % 4 == 0 else 2,
            head_dim=d,
            bias=pattern,
            sink=index % 5 == 0,
            seed=index,
            **sequences,
            **masks[index % len(masks)],
        )
        for index, (pattern, sequences, d) in enumerate(grid)
    )
    yield from alternate(problems)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", tiles(), ids=str)
def test_tiles_against_float64(problem: Problem) -> None:
    check(problem, "fa2", "cuda", deterministic=problem.seed % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "d"), (("fa1", 64), ("fa2", 32), ("fa2", 64), ("fa2", 128)))
@pytest.mark.parametrize("pattern", ("1hqk", "11qk", "b1qk"))
def test_gradient_of_a_shared_bias(pattern: str, variant: str, d: int) -> None:
    """Several CTAs share a tile; its sums have an order."""
    for batch, rows, mask in ((29, (130, 264), {}), (5, (300, 136), {"causal": True}),
                              (40, (72, 77), {"window": (20, 9)})):  # fmt: skip
        problem = Problem(batch, *rows, 6, 2, d, bias=pattern, **mask)
        first = check(problem, variant, "cuda")["dbias"]
        for _ in range(3):
            again = run(problem, variant, "cuda")["dbias"]
            assert_all_bitwise_equal({"dbias": again}, {"dbias": first})


@pytest.mark.gpu
@pytest.mark.parametrize("keys", (1000, 1024))
@pytest.mark.parametrize("d", (32, 64, 128))
def test_tiles_of_rows_with_a_pad(d: int, keys: int) -> None:
    """Rows may be longer than the bias, and what they have beyond it is not read."""
    problem = Problem(2, 300, keys - 3, 4, 2, d, bias="bhqk")
    inputs = make_inputs(problem, "cuda")
    whole = torch.full((2, 4, 300, keys), torch.nan, dtype=inputs.q.dtype, device="cuda")
    whole[..., : keys - 3] = inputs.bias.detach()
    inputs.bias = whole[..., : keys - 3].requires_grad_()
    check(problem, "fa2", "cuda", inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("d", (32, 64, 128))
@pytest.mark.parametrize(
    ("pattern", "bias_type"), (("bhqk", "input"), ("bhqk", "float32"), ("1hqk", "input"))
)
def test_stored_gradient_is_repeatable(pattern: str, bias_type: str, d: int) -> None:
    """Also where CTAs add to it, each once: two terms have one sum in any order."""
    problem = Problem(2, 700, 1000, 6, 2, d, causal=True, bias=pattern, bias_type=bias_type)
    first = run(problem, "auto", "cuda")["dbias"]
    for _ in range(20):
        again = run(problem, "auto", "cuda")["dbias"]
        assert_all_bitwise_equal({"dbias": again}, {"dbias": first})
    other = run(problem, "fa2", "cuda")["dbias"]
    torch.testing.assert_close(first, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


# (batch, heads, CTAs of a cluster on 132 SMs), for tests/test_plan.py, too.
CLUSTERS = (
    *((n, 2, n) for n in range(1, 9)),
    *((40, 16, 5), (40, 23, 4), (40, 31, 3), (40, 38, 2), (40, 140, 2)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", (49, 128))
@pytest.mark.parametrize("d", (32, 64, 128))
@pytest.mark.parametrize(("batch", "heads", "ctas"), CLUSTERS)
def test_gradient_in_clusters(batch: int, heads: int, ctas: int, d: int, seqlen: int) -> None:
    """Of each size, with shares of one length and of several; the same bits in every run."""
    del ctas
    keys = min(seqlen, 64) if d == 128 else seqlen  # one tile
    problem = Problem(batch, seqlen, keys, heads, heads, d, bias="1hqk")
    first = check(problem, "auto", "cuda")["dbias"]
    for _ in range(20):
        again = run(problem, "auto", "cuda")["dbias"]
        assert_all_bitwise_equal({"dbias": again}, {"dbias": first})


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ("1111", "1h11", "b1q1", "111k", "11qk"))
def test_gradient_of_shared_heads_is_repeatable(pattern: str) -> None:
    """Walks that end within a head, and sums over rows, columns and the warps of a CTA."""
    problem = Problem(3, 700, 1000, 6, 2, 64, causal=True, bias=pattern, bias_type="float32")
    first = run(problem, "auto", "cuda")
    for _ in range(20):
        again = run(problem, "auto", "cuda")
        assert_all_bitwise_equal({"dbias": again["dbias"]}, {"dbias": first["dbias"]})
    other = run(problem, "fa2", "cuda")["dbias"]
    torch.testing.assert_close(first["dbias"], other, rtol=1e-3, atol=1e-2 * other.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("d", (32, 64, 128))
@pytest.mark.parametrize("value", (-20000.0, 40000.0))
@pytest.mark.parametrize("pattern", ("1hqk", "bhqk"))
def test_gradient_with_large_lse(pattern: str, value: float, d: int) -> None:
    """Whole rows of a large bias: their lse is too coarse, and P comes from references."""
    problem = Problem(3, 200, 300, 2, 2, d, bias=pattern, bias_type="float32")
    inputs = make_inputs(problem, "cuda")
    with torch.no_grad():
        inputs.bias[:, :, 30:90] = value
    check(problem, "auto", "cuda", inputs=inputs)


def kernels_of(problem: Problem, variant: str) -> str:
    """The names of the kernels that a forward and a backward run."""
    run(problem, variant, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(problem, variant, "cuda")
        torch.cuda.synchronize()
    return " ".join(event.name for event in profile.events())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "pattern", "keys", "stored"),
    (
        *((3, "bhqk", 104, True), (1, "1hqk", 104, True), (2, "1hqk", 104, True)),
        *((3, "bhqk", 101, True), (3, "1hqk", 104, False)),
    ),
)
def test_the_backward_stores_what_needs_no_sum(
    batch: int, pattern: str, keys: int, stored: bool
) -> None:
    """No kernel for the gradient then, on Hopper GPUs."""
    kernels = kernels_of(Problem(batch, 100, keys, 2, 2, 64, bias=pattern), "auto")
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert ("Fa3BiasGradient" in kernels) == (hopper and not stored)
    assert ("bias_gradient_kernel" in kernels) != hopper


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "pattern", "keys", "stored"),
    ((3, "bhqk", 104, True), (1, "1hqk", 104, True), (3, "bhqk", 101, False)),
)
def test_the_backward_of_fa2_stores_rows_of_16_bytes(
    batch: int, pattern: str, keys: int, stored: bool
) -> None:
    kernels = kernels_of(Problem(batch, 100, keys, 2, 2, 64, bias=pattern), "fa2")
    assert ("bias_gradient_kernel" in kernels) != stored


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ("fa2", "auto"))
def test_a_named_variant_computes_all_gradients(variant: str) -> None:
    """And where none is named Hopper GPUs run their kernel."""
    kernels = kernels_of(Problem(4, 100, 100, 2, 2, 64, bias="1hqk"), variant)
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert ("Fa3BiasGradient" in kernels) == (variant == "auto" and hopper)
    assert ("bias_gradient_kernel" in kernels) != ("Fa3BiasGradient" in kernels)
