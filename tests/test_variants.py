"""Which variant runs what: a named one runs or raises with its reason, "auto" always runs.

Would catch a kernel that is launched on what it cannot compute, a reason that names something else,
"auto" that raises where another variant runs or passes by the fastest one, and what
the package declares of its variants, by which all other tests leave cases out, unlike the kernels.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_testing import (
    LAYOUTS,
    SQUARE_DIMS,
    VARIANTS,
    Problem,
    assert_all_bitwise_equal,
    assert_bitwise_equal,
    attend,
    backward_of,
    check,
    device_unsupported_reason,
    fastest,
    make_inputs,
    run,
    unsupported_reason,
)

import flash_ext

ERRORS = (ValueError, RuntimeError)  # from Python and from C++
BASE = Problem(2, 70, 130, 4, 2, 64, causal=True)
PROBLEMS = {
    "plain": BASE,
    "dropout": dataclasses.replace(BASE, dropout_p=0.1),
    "bias": dataclasses.replace(BASE, bias="1hqk"),
    "bool mask": dataclasses.replace(BASE, bias="b11k", bias_type="bool"),
    "head dim 59": dataclasses.replace(BASE, head_dim=59, head_dim_v=64),
    "head dim 100": dataclasses.replace(BASE, head_dim=100),
    "values of 33": dataclasses.replace(BASE, head_dim_v=33),
    "values of 8": dataclasses.replace(BASE, head_dim_v=8),
    "head dim 8": dataclasses.replace(BASE, head_dim=8),
    "head dim 200": dataclasses.replace(BASE, head_dim=200),
    "head dim 256": dataclasses.replace(BASE, head_dim=256),
    "head dims 192, 128": dataclasses.replace(BASE, head_dim=192, head_dim_v=128),
    "float16": dataclasses.replace(BASE, dtype=torch.float16),
    "scale": dataclasses.replace(BASE, scale=-0.3),
    "one by one": Problem(1, 1, 1),
    "window": dataclasses.replace(BASE, window=(20, -1)),
    "softcap": dataclasses.replace(BASE, softcap=5.0),
    "large softcap": dataclasses.replace(BASE, softcap=3000.0),
    "alibi": dataclasses.replace(BASE, alibi="bh"),
    "sink": dataclasses.replace(BASE, sink=True),
    "used keys": dataclasses.replace(BASE, seqused_k=(0, 99)),
    "packed": Problem(lengths_q=(70, 0, 3), lengths_k=(9, 5, 70)),
    "no keys": Problem(2, 70, 0),
    "nothing": Problem(0, 0, 0),
    **{layout: dataclasses.replace(BASE, layout=layout) for layout in LAYOUTS},
}
every_problem = pytest.mark.parametrize("what", PROBLEMS)


def explain(problem: Problem, device: str, **options: object) -> flash_ext.Explanation:
    inputs = make_inputs(problem, device)
    given = {"causal": problem.causal, "window": problem.window, "softcap": problem.softcap}
    given |= {"dropout_p": problem.dropout_p} | inputs.options() | options
    tensors = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return flash_ext.explain(*tensors, **given)


@every_problem
def test_explain_agrees_with_what_is_declared(what: str, device: str) -> None:
    problem = PROBLEMS[what]
    explanation = explain(problem, device)
    assert explanation.variant == fastest(problem, device)
    assert explanation.backward == backward_of(explanation.variant, problem)
    assert (explanation.why_backward is None) == (explanation.backward == explanation.variant)
    for variant, reason in explanation.reasons.items():
        expected = unsupported_reason(variant, problem, device)
        assert reason is None if expected is None else expected in reason, reason


@every_problem
def test_a_named_variant_runs_or_raises(what: str, device: str) -> None:
    """With the reason that explain gives, before any output is made."""
    problem = PROBLEMS[what]
    inputs = make_inputs(problem, device)
    for variant, reason in explain(problem, device).reasons.items():
        if reason is None:
            attend(problem, inputs, variant=variant)
            assert explain(problem, device, variant=variant).variant == variant
            continue
        with pytest.raises(ERRORS, match="variant") as caught:
            attend(problem, inputs, variant=variant)
        assert f"flash_ext: {reason}" in str(caught.value) and repr(variant) in reason
        assert explain(problem, device, variant=variant).variant is None


@every_problem
def test_auto_is_the_fastest_that_runs(what: str, device: str) -> None:
    """It is right, and has the named variant's bits, but on a CPU, where it has its own tiles."""
    problem = PROBLEMS[what].well_conditioned()
    auto = check(problem, "auto", device, deterministic=True)
    if device != "cpu":
        named = run(problem, fastest(problem, device), device, deterministic=True)
        assert_all_bitwise_equal(auto, named)


def test_the_cpu_has_no_fa3() -> None:
    q = torch.randn(1, 5, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"variant 'fa3' needs a Hopper GPU; on a CPU take .*'fa2'"
    ):
        flash_ext.attention(q, q, q, variant="fa3")
    out, lse = torch.ops.flash_ext.fwd(q.detach(), q.detach(), q.detach())
    with pytest.raises(ValueError, match="variant 'fa3' needs a Hopper GPU"):
        torch.ops.flash_ext.bwd(out, None, *(q.detach(),) * 3, out, lse, variant="fa3")


fa3 = pytest.mark.parametrize("variant", ["fa3"])


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.gpu
@fa3
@pytest.mark.parametrize("which", "qkv")
def test_one_row_expanded_over_the_sequence(which: str, variant: str) -> None:
    """A row stride of 0: no tensor map has one, so fa3 copies it."""
    inputs = {name: some(2, 90, 4, 64) for name in "qkv"}
    inputs[which] = inputs[which][:, :1].expand(2, 90, 4, 64)
    explanation = flash_ext.explain(**inputs)
    assert explanation.variant == variant and explanation.copied == which
    assert f"rows of {which} are copied to aligned memory first" in str(explanation)
    expected = flash_ext.attention(**{n: x.contiguous() for n, x in inputs.items()})
    for name in ("auto", variant):
        assert_bitwise_equal(flash_ext.attention(**inputs, variant=name), expected)
    single = {name: x[:, :1] for name, x in inputs.items()}  # its stride is never used
    assert flash_ext.explain(**single).copied is None
    assert_bitwise_equal(flash_ext.attention(**single, variant=variant), single["v"].contiguous())


def gradients(dout: torch.Tensor, inputs: dict, causal: bool, variant: str) -> dict:
    """dq, dk and dv by one variant of the same out and lse."""
    out, lse = torch.ops.flash_ext.fwd(**inputs, causal=causal, variant="fa2")
    results = torch.ops.flash_ext.bwd(
        dout, None, *inputs.values(), out, lse, causal=causal, deterministic=True, variant=variant
    )
    return dict(zip(("dq", "dk", "dv"), results, strict=False))


@pytest.mark.gpu
@fa3
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", (24, 40, 72, 104, *SQUARE_DIMS))
def test_whose_kernels_compute_the_gradients(head_dim: int, causal: bool, variant: str) -> None:
    """Those that explain names: their bits tell, since dQ is summed in another order."""
    inputs = {name: some(2, 300, 4, head_dim) for name in "qkv"}
    dout = some(2, 300, 4, head_dim)
    explanation = flash_ext.explain(**inputs, causal=causal, variant=variant)
    assert explanation.backward == backward_of(variant, Problem(head_dim=head_dim))
    own, fa2 = (gradients(dout, inputs, causal, name) for name in (variant, "fa2"))
    if explanation.backward == variant:
        assert not all(torch.equal(own[name], fa2[name]) for name in own)
        assert "gradients:  fa3\n" in str(explanation)
    else:
        assert_all_bitwise_equal(own, fa2)


@pytest.mark.gpu
@fa3
@pytest.mark.parametrize("what", ("one row", "odd row", "odd address", "other strides"))
def test_gradients_of_out_that_fa3_cannot_address(what: str, variant: str) -> None:
    """They are copied; strides by themselves are no reason."""
    inputs = {name: some(2, 90, 4, 64) for name in "qkv"}
    dout = {
        "one row": some(2, 1, 4, 64).expand(2, 90, 4, 64),
        "odd row": some(2, 90, 4 * 64 + 1)[..., : 4 * 64].unflatten(-1, (4, 64)),
        "odd address": some(2 * 90 * 4 * 64 + 1)[1:].view(2, 90, 4, 64),
        "other strides": some(4, 90, 2, 72).transpose(0, 2)[..., :64],
    }[what]
    contiguous = dout.clone(memory_format=torch.contiguous_format)
    mine, copied = (gradients(x, inputs, True, variant) for x in (dout, contiguous))
    assert not torch.equal(mine["dq"], gradients(dout, inputs, True, "fa2")["dq"])
    assert_all_bitwise_equal(mine, copied)


@pytest.mark.gpu
@fa3
def test_more_key_tiles_than_can_be_counted(variant: str) -> None:
    """2^24 and more of 64 keys, which only the backward pass counts."""
    q = some(1, 1, 1, 64).expand(4096, -1, -1, -1)
    k = some(1, 64 * 4096, 1, 64).expand(4096, -1, -1, -1)
    explanation = flash_ext.explain(q, k, k, variant=variant)
    assert explanation.backward == "fa2" and "2^24 tiles" in explanation.why_backward
    explanation = flash_ext.explain(q[1:], k[1:], k[1:], variant=variant)
    assert explanation.backward == variant and explanation.why_backward is None


@pytest.mark.gpu
@fa3
@pytest.mark.parametrize("step", (8, 24, 64))
def test_rows_that_overlap(step: int, variant: str) -> None:
    """Each row a few elements further than the one before: sliding windows over a signal."""
    q = some(2, 300, 4, 64)
    k, v = (
        some(2, 4, 400 * step + 64).as_strided(
            (2, 400, 4, 64), (4 * (400 * step + 64), step, 400 * step + 64, 1)
        )
        for _ in range(2)
    )
    actual = flash_ext.attention(q, k, v, causal=True, variant=variant, return_lse=True)
    copies = (k.contiguous(), v.contiguous())
    expected = flash_ext.attention(q, *copies, causal=True, variant=variant, return_lse=True)
    for a, e in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, e)


@pytest.mark.gpu
@fa3
def test_addresses_on_odd_boundaries(variant: str) -> None:
    """2 to 14 bytes off: copied; 16 bytes off: as anywhere."""
    flat = some(2 * 90 * 2 * 64 + 16)
    k = v = some(2, 90, 2, 64)
    for offset in range(0, 17):
        q = flat[offset : offset + 2 * 90 * 2 * 64].view(2, 90, 2, 64)
        assert flash_ext.explain(q, k, v).copied == ("q" if offset % 8 else None), offset
        expected = flash_ext.attention(q.clone(), k, v, variant=variant)
        assert_bitwise_equal(flash_ext.attention(q, k, v, variant=variant), expected)


@pytest.mark.gpu
@fa3
@pytest.mark.parametrize("head_dim", (20, 36, 59, 60, 100, 250))
def test_results_of_odd_head_dims(head_dim: int, variant: str) -> None:
    """Contiguous, and equal to the first columns of inputs that are padded with zeros."""
    padding = (0, -head_dim % 8)
    inputs = [some(2, 300, heads, head_dim).requires_grad_() for heads in (4, 2, 2)]
    padded = [torch.nn.functional.pad(x.detach(), padding).requires_grad_() for x in inputs]
    options = {"causal": True, "scale": 0.1, "deterministic": True, "variant": variant}
    dout = some(2, 300, 4, head_dim)
    out = flash_ext.attention(*inputs, **options)
    expected = flash_ext.attention(*padded, **options)
    grads = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(expected, padded, torch.nn.functional.pad(dout, padding))
    for a, e in zip((out, *grads), (expected, *wanted), strict=True):
        assert a.is_contiguous()
        assert_bitwise_equal(a.detach(), e[..., :head_dim].detach().contiguous())


@pytest.mark.gpu
@fa3
def test_few_queries_read_unaligned_keys_in_place(variant: str) -> None:
    q, cache = some(4, 1, 8, 64), some(4, 4096, 2, 8 * 64 + 1)
    k, v = (cache[:, :, i, :-1].unflatten(-1, (8, 64)) for i in range(2))
    for window, runs in (((-1, -1), variant), ((200, 0), "fa2")):
        explanation = flash_ext.explain(q, k, v, window=window)
        assert explanation.variant == runs, window
        assert explanation.copied == ("k, v" if runs == variant else None)
        auto, named = (
            flash_ext.attention(q, k, v, window=window, variant=name) for name in ("auto", runs)
        )
        assert_bitwise_equal(auto, named)


@pytest.mark.gpu
@fa3
def test_more_tiles_than_can_be_counted(variant: str) -> None:
    """2^24 and more, here of one query each; one less than that many runs."""
    v = some(1, 1, 64, 64)
    q = v.expand(1 << 18, -1, -1, -1)
    with pytest.raises(ERRORS, match=r"needs fewer than 2\^24 tiles"):
        flash_ext.attention(q, q, q, variant=variant)
    assert flash_ext.explain(q, q, q).variant == "fa2"
    assert bool((flash_ext.attention(q, q, q) == v).all())
    fewer = q[:-1]
    assert bool((flash_ext.attention(fewer, fewer, fewer, variant=variant) == v).all())


@pytest.mark.gpu
def test_other_gpus_get_the_reason() -> None:
    """Where there is no Hopper GPU, and only there, fa3 says so."""
    reason = device_unsupported_reason("fa3", "cuda")
    if reason is None:
        pytest.skip("this is a Hopper GPU")
    q = some(1, 40, 2, 64)
    with pytest.raises(ERRORS, match=f"variant 'fa3' {reason}"):
        flash_ext.attention(q, q, q, variant="fa3")
    assert flash_ext.explain(q, q, q).variant == "fa2"


def test_variants_are_listed_oldest_first() -> None:
    assert VARIANTS == ("fa1", "fa2", "fa3")
    assert tuple(v for v in VARIANTS if v in flash_ext.CPU_VARIANTS) == flash_ext.CPU_VARIANTS
