"""How options act and combine, beyond the numbers of the grid.

Would catch an option that is ignored, a default that differs from its documented meaning, wrong
results at sizes of zero or in fully masked rows, and gradients that are wrong only when they arrive
in an unusual layout.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_testing import (
    VARIANTS,
    Inputs,
    Problem,
    assert_all_bitwise_equal,
    assert_bitwise_equal,
    assert_is_sink,
    attend,
    check,
    dense_mask,
    make_inputs,
    nan_filled_outputs,
    reference_results,
    run,
    runnable,
)

import flash_ext

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize("head_dim", (64, 59, 40))
def test_scale_defaults_to_one_over_root_d(head_dim: int, variant: str, device: str) -> None:
    default = run(Problem(head_dim=head_dim), variant, device, deterministic=True)
    scaled = Problem(head_dim=head_dim, scale=1 / math.sqrt(head_dim))
    assert_all_bitwise_equal(run(scaled, variant, device, deterministic=True), default)


def test_causal_is_a_right_window_of_zero(variant: str, device: str) -> None:
    base = {"seqlen_q": 100, "seqlen_k": 150}
    for left in (-1, 20):
        results = [
            run(Problem(**base, causal=causal, window=window), variant, device, deterministic=True)
            for causal, window in ((True, (left, -1)), (False, (left, 0)), (True, (left, 9)))
        ]
        assert_all_bitwise_equal(results[1], results[0])
        assert_all_bitwise_equal(results[2], results[0])


def test_a_window_wider_than_the_sequence_hides_nothing(variant: str, device: str) -> None:
    full = run(Problem(1, 70, 90), variant, device, deterministic=True)
    for window in ((90, 90), (10**9, 2**31 - 1), (2**31 - 1, -1), (2**40, 2**62)):
        wide = run(Problem(1, 70, 90, window=window), variant, device, deterministic=True)
        assert_all_bitwise_equal(wide, full)


@pytest.mark.parametrize("seqlens", ((1, 7), (7, 1), (5, 9), (9, 5)))
def test_causal_aligns_bottom_right(seqlens: tuple[int, int], variant: str, device: str) -> None:
    """Each visible key contributes 1 to out: with V = 1/weight the sum counts the keys."""
    seqlen_q, seqlen_k = seqlens
    visible = dense_mask(*seqlens, causal=True, window=(-1, -1))
    q = torch.zeros(1, seqlen_q, 1, 16, device=device, dtype=torch.float16)
    k = torch.zeros(1, seqlen_k, 1, 16, device=device, dtype=torch.float16)
    v = torch.eye(seqlen_k, 16, device=device, dtype=torch.float16)[None, :, None]
    out, lse = flash_ext.attention(q, k, v, causal=True, variant=variant, return_lse=True)
    assert torch.equal(out[0, :, 0, :seqlen_k].cpu() != 0, visible)
    torch.testing.assert_close(lse[0, 0].cpu(), visible.sum(1).log())


@pytest.mark.parametrize("window", ((-1, 0), (0, 0), (3, 2)))
def test_fully_masked_rows(window: tuple[int, int], variant: str, device: str) -> None:
    problem = Problem(2, 200, 90, 4, 2, window=window)
    rows = ~dense_mask(200, 90, False, window, device).any(1)
    assert rows.any()
    results = run(problem, variant, device)
    assert not results["out"][:, rows].any()
    assert (results["lse"][:, :, rows] == -torch.inf).all()
    assert not results["dq"][:, rows].any()
    check(problem, variant, device)


def test_queries_that_see_nothing_move_no_gradient(variant: str, device: str) -> None:
    """Every row is masked (Sq - Sk exceeds the window everywhere): all gradients are exactly 0."""
    problem = Problem(1, 300, 1, window=(-1, 0), loss="both")
    inputs = make_inputs(problem, device)
    q = inputs.q.detach()[:, :200].requires_grad_()  # all of them before the diagonal of 300 x 1
    with nan_filled_outputs():
        out, lse = flash_ext.attention(
            q, inputs.k[:, :0], inputs.v[:, :0], variant=variant, return_lse=True
        )
        (dq,) = torch.autograd.grad((out, lse), q, (torch.ones_like(out), torch.ones_like(lse)))
    assert not out.any() and not dq.any() and (lse == -torch.inf).all()
    results = run(problem, variant, device)
    assert not results["dq"][:, :299].any()


@pytest.mark.parametrize(
    "problem",
    (
        Problem(4, 5, 1, 4, 2, 64, loss="out"),
        Problem(2, 130, 130, 4, 2, 128, window=(0, 0), loss="out"),
        Problem(2, 70, 190, 2, 2, 40, torch.float16, causal=True, window=(0, -1), loss="out"),
    ),
    ids=str,
)
def test_one_visible_key(problem: Problem, variant: str, device: str) -> None:
    """out is that key's value and does not depend on q or k: dP - D cancels up to float32."""
    results = run(problem, variant, device)
    ref = reference_results(problem, device).ref
    torch.testing.assert_close(results["out"].double(), ref["out"], rtol=0, atol=0)
    assert results["dq"].abs().max() < 1e-4 and results["dk"].abs().max() < 1e-4


@pytest.mark.parametrize("loss", ("out", "lse", "both"))
def test_sizes_of_zero(loss: str, variant: str, device: str) -> None:
    for batch, seqlen_q, seqlen_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)):
        for causal in (False, True):
            problem = Problem(batch, seqlen_q, seqlen_k, 4, 2, 64, causal=causal, loss=loss)
            results = run(problem, variant, device)
            assert results["out"].shape == (batch, seqlen_q, 4, 64)
            assert results["lse"].shape == (batch, 4, seqlen_q)
            assert not any(results[name].any() for name in ("out", "dq", "dk", "dv"))
            assert (results["lse"] == -torch.inf).all()


@pytest.mark.parametrize("window", ((-1, 0), (0, 0), (3, 2)))
def test_fully_masked_rows_with_a_sink(window: tuple[int, int], variant: str, device: str) -> None:
    """out = 0 and lse is the sink itself; so too where there are no keys at all."""
    rows = ~dense_mask(200, 90, False, window, device).any(1)
    results = run(problem := Problem(2, 200, 90, 4, 2, window=window, sink=True), variant, device)
    sink = make_inputs(problem, device).sink.detach()
    assert rows.any() and not results["out"][:, rows].any() and not results["dq"][:, rows].any()
    assert_is_sink(results["lse"][:, :, rows], sink)
    results = run(problem := Problem(2, 50, 0, 4, 2, window=window, sink=True), variant, device)
    sink = make_inputs(problem, device).sink.detach()
    assert not results["out"].any()
    assert_is_sink(results["lse"], sink)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("gain", (100.0, 1000.0))
def test_huge_logits_stay_finite(
    gain: float, dtype: torch.dtype, variant: str, device: str
) -> None:
    """Scores up to 1e5 and down to -1e5: a softmax without its maximum overflows at 89."""
    for causal in (False, True):
        problem = Problem(1, 130, 300, dtype=dtype, logit_gain=gain, scale=1.0, causal=causal)
        results = run(problem, variant, device)
        assert all(x.isfinite().all() for name, x in results.items() if name in ("out", "lse"))
        assert not any(x.isnan().any() for x in results.values())


@pytest.mark.parametrize(
    "options", ({}, {"dropout_p": 0.5}, {"sink": True}, {"bias": "1hqk"}, {"softcap": 1.0}), ids=str
)
def test_nan_is_not_hidden(options: dict, variant: str, device: str) -> None:
    """A NaN key makes every row that sees it NaN, in every result: no row passes for keyless."""
    problem = Problem(1, 70, 90, **options)
    inputs = make_inputs(problem, device)
    inputs.k = inputs.k.detach().clone()
    inputs.k[:, 17] = torch.nan
    inputs.k.requires_grad_()
    if inputs.bias is not None:
        with torch.no_grad():
            inputs.bias.nan_to_num_(neginf=0.0)
    results = run(problem, variant, device, inputs=inputs)
    assert all(x.isnan().all() for x in results.values())


def test_logits_far_below_zero(variant: str, device: str) -> None:
    """All scores near -1e4: the maximum must start below any of them, not at zero."""
    q = torch.full((1, 70, 2, 64), 12.5, device=device, dtype=torch.float16)
    k = -torch.full((1, 200, 2, 64), 12.5, device=device, dtype=torch.float16)
    v = torch.randn(1, 200, 2, 64, device=device).half()
    out, lse = flash_ext.attention(q, k, v, scale=1.0, variant=variant, return_lse=True)
    expected = torch.full_like(lse, -(12.5**2) * 64 + math.log(200))
    torch.testing.assert_close(lse, expected)
    mean = v.float().mean(1, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.float(), mean, atol=2e-3, rtol=0)


@pytest.mark.parametrize("scale", (0.0, 1e-32, 1e-25))
def test_no_scale_to_speak_of_averages(scale: float, variant: str, device: str) -> None:
    check(Problem(1, 50, 70, scale=scale), variant, device)


@pytest.mark.parametrize("kind", ("expanded", "transposed", "sliced", "reversed_heads"))
def test_gradient_of_out_in_any_layout(kind: str, variant: str, device: str) -> None:
    problem = Problem(2, 70, 90, 4, 2, 64, causal=True)
    inputs = make_inputs(problem, device)
    leaves = (inputs.q, inputs.k, inputs.v)
    shape, dtype = inputs.q.shape, inputs.q.dtype
    make = {
        "expanded": lambda: torch.randn(1, 1, 1, 1, device=device, dtype=dtype).expand(shape),
        "transposed": lambda: torch.randn(*reversed(shape), device=device, dtype=dtype).permute(
            3, 2, 1, 0
        ),
        "sliced": lambda: torch.randn(*shape[:3], 2 * shape[3], device=device, dtype=dtype)[
            ..., ::2
        ],
        "reversed_heads": lambda: (
            torch.randn(*shape[:2], shape[3], shape[2], device=device, dtype=dtype).mT
        ),
    }[kind]
    dout = make()
    assert dout.shape == shape

    def gradients(dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flash_ext.attention(*leaves, causal=True, deterministic=True, variant=variant)
        return torch.autograd.grad(out, leaves, dout)

    for actual, expected in zip(gradients(dout), gradients(dout.contiguous()), strict=True):
        assert_bitwise_equal(actual, expected)


def test_gradient_of_lse_in_any_layout(variant: str, device: str) -> None:
    problem = Problem(2, 70, 90, 4, 2, 64)
    inputs = make_inputs(problem, device)
    leaves = (inputs.q, inputs.k)

    def gradients(dlse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, lse = flash_ext.attention(
            *leaves, inputs.v, deterministic=True, variant=variant, return_lse=True
        )
        return torch.autograd.grad(lse, leaves, dlse)

    for dlse in (inputs.dlse.mT.contiguous().mT, inputs.dlse.new_ones(()).expand(2, 4, 70)):
        for actual, expected in zip(gradients(dlse), gradients(dlse.contiguous()), strict=True):
            assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("zero", ("out", "lse", "both"))
def test_gradients_that_are_zeros_without_memory(zero: str, variant: str, device: str) -> None:
    """Autograd's own tensor for zeros, which has strides but no elements."""
    inputs = make_inputs(Problem(2, 70, 90, 4, 2, 64), device)
    leaves = (inputs.q, inputs.k, inputs.v)
    out, lse = flash_ext.attention(*leaves, deterministic=True, variant=variant, return_lse=True)

    def gradients(make_zeros) -> tuple[torch.Tensor, ...]:
        given = [
            make_zeros(x.shape, device=device, dtype=x.dtype) if zero in (name, "both") else dx
            for name, x, dx in (("out", out, inputs.dout), ("lse", lse, inputs.dlse))
        ]
        return torch.autograd.grad((out, lse), leaves, given, retain_graph=True)

    of_zeros = gradients(torch.zeros)
    for actual, expected in zip(gradients(torch._efficientzerotensor), of_zeros, strict=True):
        assert_bitwise_equal(actual, expected)


def test_gradients_of_broadcast_keys_add_up(variant: str, device: str) -> None:
    """k and v expanded over heads in the graph: autograd sums what bwd returns per head."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 2, 80, 4, 64, generator=generator).to(device, torch.float16)
    q = numbers[0].requires_grad_()
    k, v = (x[:, :, :1].requires_grad_() for x in numbers[1:])
    expanded = [x.expand(2, 80, 4, 64) for x in (k, v)]
    mha = flash_ext.attention(q, *expanded, variant=variant)
    mqa = flash_ext.attention(q, k, v, variant=variant)
    torch.testing.assert_close(mha, mqa, atol=2e-3, rtol=0)
    dout = torch.ones_like(mha)
    for first, second in zip(
        torch.autograd.grad(mha, (q, k, v), dout),
        torch.autograd.grad(mqa, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(first, second, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("wanted", ((0,), (1,), (2,), (0, 2)))
def test_gradients_of_only_some_inputs(wanted: tuple[int, ...], variant: str, device: str) -> None:
    inputs = make_inputs(Problem(1, 40, 50), device)
    leaves = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    for index in wanted:
        leaves[index].requires_grad_()
    out = flash_ext.attention(*leaves, deterministic=True, variant=variant)
    some = torch.autograd.grad(out, [leaves[i] for i in wanted], inputs.dout)
    everything = (inputs.q, inputs.k, inputs.v)
    out = flash_ext.attention(*everything, deterministic=True, variant=variant)
    expected = torch.autograd.grad(out, everything, inputs.dout)
    for index, grad in zip(wanted, some, strict=True):
        assert_bitwise_equal(grad, expected[index])


def test_outputs_are_contiguous_and_typed(variant: str, device: str) -> None:
    for layout in ("bhsd", "sbhd", "expanded_heads"):
        problem = Problem(2, 30, 40, 4, 2, 64, torch.float16, layout=layout)
        results = run(problem, variant, device)
        inputs = make_inputs(problem, device)
        for name in ("out", "dq", "dk", "dv"):
            like = inputs.q if name in ("out", "dq") else inputs.k
            assert results[name].shape == like.shape and results[name].dtype == torch.float16
        assert results["lse"].dtype == torch.float32
        assert results["out"].is_contiguous() and results["lse"].is_contiguous()


def test_inputs_are_left_alone(variant: str, device: str) -> None:
    inputs = make_inputs(Problem(2, 130, 70, causal=True), device)
    leaves = (inputs.q, inputs.k, inputs.v)
    before = [x.detach().clone() for x in (*leaves, inputs.dout, inputs.dlse)]
    out, lse = flash_ext.attention(*leaves, causal=True, variant=variant, return_lse=True)
    torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    for x, old in zip((*leaves, inputs.dout, inputs.dlse), before, strict=True):
        assert_bitwise_equal(x.detach(), old)


def test_memory_is_kept_only_while_needed(variant: str, device: str) -> None:
    """Without gradients nothing is saved, and the result has no history."""
    inputs = make_inputs(Problem(1, 40, 50), device)
    with torch.no_grad():
        out = flash_ext.attention(inputs.q, inputs.k, inputs.v, variant=variant)
    assert not out.requires_grad and out.grad_fn is None
    with torch.inference_mode():
        again = flash_ext.attention(inputs.q, inputs.k, inputs.v, variant=variant)
    assert_bitwise_equal(again, out)


def test_auto_is_one_of_the_variants(variant: str, device: str) -> None:
    """auto runs the variant that check names, to the bit (on a CPU with different tiles)."""
    inputs = make_inputs(Problem(1, 40, 50), device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    chosen = VARIANTS[torch.ops.flash_ext.check(*tensors)[0]]
    auto = flash_ext.attention(*tensors)
    named = flash_ext.attention(*tensors, variant=variant)
    if variant == chosen and device != "cpu":
        assert_bitwise_equal(named, auto)
    else:
        torch.testing.assert_close(named, auto, atol=2e-2, rtol=2e-2)


def test_no_query_heads(variant: str, device: str) -> None:
    q, k = (torch.randn(1, 5, heads, 32, device=device, dtype=torch.bfloat16) for heads in (0, 1))
    v = torch.randn_like(k)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = flash_ext.attention(q, k, v, variant=variant, return_lse=True)
    assert out.shape == (1, 5, 0, 32) and lse.shape == (1, 0, 5)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq.shape == q.shape and not dk.any() and not dv.any()


def outputs(problem: Problem, inputs: Inputs, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out in float32, and lse."""
    with torch.no_grad():
        out, lse = attend(problem, inputs, variant=variant, return_lse=True)
    return out.float(), lse


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Equal up to the rounding of bfloat16 in out, of float32 in lse."""
    torch.testing.assert_close(actual[0], expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-4, rtol=1e-5)


@pytest.mark.options(bias="bhqk")
@pytest.mark.parametrize("alibi", ("h", "bh"))
@pytest.mark.parametrize("causal", (False, True))
def test_alibi_is_a_bias_of_distances(causal: bool, alibi: str, variant: str, device: str) -> None:
    """-slope |i + Sk - Sq - j|, here as a float32 bias."""
    problem = Problem(2, 70, 150, 4, 2, causal=causal, alibi=alibi)
    inputs = make_inputs(problem, device)
    expected = outputs(problem, inputs, variant)
    i, j = torch.arange(70, device=device)[:, None], torch.arange(150, device=device)
    slopes, inputs.alibi_slopes = inputs.alibi_slopes, None
    inputs.bias = -slopes.view(-1, 4, 1, 1) * (i + 80 - j).abs()
    assert_same(outputs(problem, inputs, variant), expected)


@pytest.mark.parametrize(
    "problem",
    (
        Problem(1, 300, 700, 2, 2, 64, alibi="h"),
        Problem(1, 700, 300, 2, 1, 128, torch.float16, alibi="h"),
        Problem(1, 500, 900, 2, 2, 64, alibi="h", window=(400, -1), logit_gain=8.0),
        Problem(lengths_q=(300, 0, 500), lengths_k=(700, 9, 300), alibi="bh", causal=True),
    ),
    ids=str,
)
def test_alibi_on_both_sides_of_the_diagonal(problem: Problem, variant: str, device: str) -> None:
    """Tiles that need no mask, before, on and after the diagonal."""
    check(problem, variant, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    (
        *(
            Problem(2, 1100, 1300, 16, 16, d, alibi="bh", causal=causal)
            for d in (64, 128)
            for causal in (False, True)
        ),
        Problem(2, 1100, 1300, 16, 4, 64, torch.float16, softcap=5.0, logit_gain=8.0),
        # Scores up to 5/8 of the cap have a series of tanh: all, all of most tiles, few.
        *(
            Problem(2, 1100, 1300, 16, 4, d, softcap=15.0, logit_gain=gain, causal=d == 128)
            for d in (64, 128, 256)
            for gain in (1.0, 2.5, 6.0)
        ),
        *(
            Problem(2, 1000, 1300, 16, 4, d, bias=bias, causal=causal)
            for d in (32, 64)
            for bias, causal in (("1hqk", False), ("bhqk", True), ("b11k", True))
        ),
        *(
            Problem(2, 1100, 1300, 16, 4, d, causal=True, dropout_p=p)
            for d in (64, 128)
            for p in (0.17, 0.001)
        ),
    ),
    ids=str,
)
def test_options_of_many_tiles(problem: Problem, variant: str) -> None:
    """More of them than the GPU has SMs: fa3's usual tiles, and not the small ones."""
    check(problem, variant, "cuda")


@pytest.mark.options(bias="1h1k")
def test_sink_is_a_first_key_without_a_value(variant: str, device: str) -> None:
    """A key of score `sink` and value 0, here through a bias on a key of zeros."""
    problem = Problem(2, 70, 150, 4, 2, sink=True)
    inputs = make_inputs(problem, device)
    expected = outputs(problem, inputs, variant)
    inputs.k, inputs.v = (
        torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 1, 0)) for x in (inputs.k, inputs.v)
    )
    inputs.bias = torch.zeros(1, 4, 1, 151, device=device)
    inputs.bias[0, :, 0, 0], inputs.sink = inputs.sink.detach(), None
    assert_same(outputs(problem, inputs, variant), expected)


@pytest.mark.options(bias="b1qk")
def test_bool_bias_is_one_of_infinities(variant: str, device: str) -> None:
    problem = Problem(2, 70, 150, 4, 2, bias="b1qk", bias_type="bool")
    inputs = make_inputs(problem, device)
    expected = outputs(problem, inputs, variant)
    inputs.bias = torch.zeros_like(inputs.bias, dtype=torch.float32).masked_fill(
        ~inputs.bias, -torch.inf
    )
    assert_same(outputs(problem, inputs, variant), expected)


@pytest.mark.parametrize("head_dim_v", (1, 8, 33, 64))
def test_values_of_another_width_are_columns_of_wider_ones(
    head_dim_v: int, variant: str, device: str
) -> None:
    """The first Dv columns of out need only the first Dv columns of v."""
    problem = Problem(2, 70, 150, 4, 2, head_dim=64)
    inputs = make_inputs(problem, device)
    out, lse = outputs(problem, inputs, variant)
    narrow = Inputs(inputs.q, inputs.k, inputs.v[..., :head_dim_v])
    assert_same(outputs(problem, narrow, variant), (out[..., :head_dim_v], lse))


@pytest.mark.parametrize(
    "head_dims", ((17, 161), (24, 24), (64, 64), (128, 128), (192, 192), (256, 256))
)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_gradients_where_softcap_saturates(
    head_dims: tuple[int, int], dtype: torch.dtype, variant: str, device: str
) -> None:
    """tanh is nearly 1 there, and 1 - tanh^2 what is left of it: no P of 16 bits tells it."""
    d, dv = head_dims
    for scale, causal in ((0.4, False), (0.2, True)):
        problem = Problem(
            4, 15, 15, 2, 2, d, dtype, head_dim_v=dv, softcap=0.7, scale=scale, causal=causal
        )
        check(runnable(variant, problem), variant, device)


def test_softcap_bounds_the_scores(variant: str, device: str) -> None:
    """c tanh(s / c): no score beyond c, however large; and a far cap changes nothing."""
    huge = Problem(1, 70, 150, softcap=3.0, logit_gain=1000.0)
    _, lse = outputs(huge, make_inputs(huge, device), variant)
    assert (lse - math.log(150)).abs().max() <= 3.0
    far, none = (Problem(1, 70, 150, softcap=c) for c in (2e3, 0.0))
    inputs = make_inputs(none, device)
    assert_same(outputs(far, inputs, variant), outputs(none, inputs, variant))


def test_all_keys_used_is_none_given(variant: str, device: str) -> None:
    """seqused_k of Sk, and one below it as if the keys were sliced off.

    On CUDA, where it is not checked, one beyond Sk reads no more than there is.
    """
    problem = Problem(2, 70, 150, 4, 2, causal=True)
    inputs = make_inputs(problem, device)
    expected = outputs(problem, inputs, variant)
    for used in (150, 151, 2**31 - 1) if device == "cuda" else (150,):
        inputs.seqused_k = torch.full((2,), used, dtype=torch.int32, device=device)
        assert_same(outputs(problem, inputs, variant), expected)
    inputs.seqused_k.fill_(99)
    sliced = Inputs(inputs.q, inputs.k[:, :99], inputs.v[:, :99])
    assert_same(outputs(problem, inputs, variant), outputs(problem, sliced, variant))
