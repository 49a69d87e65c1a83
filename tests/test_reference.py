"""Standard attention, the reference, against formulas written here and against PyTorch's own.

Would catch a reference that is wrong in the same way as the kernels: mask, bias and sequences are
written out from the contract here, not taken from what the reference and the CPU kernels share.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from attention_testing import Inputs, Problem, attend, dense_mask, make_inputs

import flash_ext
from flash_ext.dropout import keep_mask, keep_scale
from flash_ext.reference import attention, online_softmax, safe_softmax

PLAIN = (
    Problem(2, 5, 9, 4, 2, 16),
    Problem(2, 9, 5, 4, 2, 16, causal=True),
    Problem(1, 7, 7, 3, 1, 8, window=(2, 0)),
    Problem(1, 9, 5, 2, 2, 8, window=(-1, 0), scale=0.7),
    Problem(2, 12, 20, 2, 1, 8, window=(3, 4), causal=True),
)
PACKED = Problem(0, 0, 0, 4, 2, 8, lengths_q=(5, 0, 7, 3), lengths_k=(6, 4, 0, 9), head_dim_v=3)
OPTIONS = (
    {"softcap": 1.5},
    {"alibi": "h", "causal": True},
    {"alibi": "bh"},
    {"bias": "bhqk"},
    {"bias": "1h1k", "window": (3, 2)},
    {"bias": "b1q1"},
    {"bias": "11qk", "bias_type": "bool", "sink": True},
    {"sink": True, "causal": True},
    {"dropout_p": 0.3},
    {"softcap": 2.0, "alibi": "h", "bias": "1hqk", "sink": True, "dropout_p": 0.2, "causal": True},
)
WITH_OPTIONS = tuple(
    dataclasses.replace(base, **options)
    for base in (
        Problem(2, 7, 10, 4, 2, 8, head_dim_v=5),
        Problem(2, 10, 7, 2, 2, 8, seqused_k=(4, 0)),
        PACKED,
        dataclasses.replace(PACKED, seqused_k=(2, 9, 5, 0), tail=0),
    )
    for options in OPTIONS
)
SHORT_BIAS = tuple(
    dataclasses.replace(PACKED, bias=bias, bias_type=bias_type, bias_short=3)
    for bias in ("b1qk", "1hq1", "111k")
    for bias_type in ("float32", "bool")
)


def sequence_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None, b: int) -> torch.Tensor:
    """Sequence b, (seqlen, heads, dim)."""
    return x[b] if cu_seqlens is None else x[cu_seqlens[b] : cu_seqlens[b + 1]]


def bias_at(bias: torch.Tensor, *place: int) -> float:
    """The bias of (batch, head, row, column): from the contract."""
    if any(size != 1 and at >= size for size, at in zip(bias.shape, place, strict=True)):
        return -math.inf
    at = tuple(0 if size == 1 else at for size, at in zip(bias.shape, place, strict=True))
    value = bias[at].item()
    return value if bias.dtype != torch.bool else 0.0 if value else -math.inf


def row(problem: Problem, inputs: Inputs, b: int, h: int, i: int) -> tuple[torch.Tensor, float]:
    """out and lse of row i of head h of sequence b, from the definition."""
    p = problem
    seqlen_q, seqlen_k = p.sequences()[b]
    q = sequence_of(inputs.q, inputs.cu_seqlens_q, b)
    k, v = (sequence_of(x, inputs.cu_seqlens_k, b) for x in (inputs.k, inputs.v))
    keep = torch.ones(p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    if p.dropout_p:
        keep = keep_mask(inputs.rng_state, p.dropout_p, *keep.shape) * keep_scale(p.dropout_p)
    visible = dense_mask(seqlen_q, seqlen_k, p.causal, p.window)
    kv_head = h // (p.heads_q // p.heads_k)
    scale = p.head_dim**-0.5 if p.scale is None else p.scale
    out = torch.zeros(v.shape[-1], dtype=q.dtype)
    weights = [inputs.sink[h].exp().item()] if p.sink else []
    for j in range(seqlen_k):
        score = scale * (q[i, h] @ k[j, kv_head]).item()
        if p.softcap:
            score = p.softcap * math.tanh(score / p.softcap)
        if p.alibi:
            slope = inputs.alibi_slopes[b, h] if p.alibi == "bh" else inputs.alibi_slopes[h]
            score -= slope.item() * abs(i + seqlen_k - seqlen_q - j)
        if p.bias:
            score += bias_at(inputs.bias, b, h, i, j)
        if not visible[i, j] or score == -math.inf:
            continue
        weights.append(math.exp(score))
        out += weights[-1] * keep[b, h, i, j] * v[j, kv_head]
    total = sum(weights)
    return out / total if total else out, math.log(total) if total else -math.inf


def from_the_definition(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one row at a time. In rows without a sequence, out = 0 and lse = -inf."""
    out = torch.zeros_like(inputs.q[..., :1]).expand(*inputs.q.shape[:-1], problem.dim_v).clone()
    lse = torch.full(out.shape[:-1], -math.inf, dtype=out.dtype)
    for b, (seqlen_q, _) in enumerate(problem.sequences()):
        for i, h in itertools.product(range(seqlen_q), range(problem.heads_q)):
            out_b, lse_b = (sequence_of(x, inputs.cu_seqlens_q, b) for x in (out, lse))
            out_b[i, h], lse_b[i, h] = row(problem, inputs, b, h, i)
    return out, lse.mT


def float64_inputs(problem: Problem) -> Inputs:
    return make_inputs(problem, "cpu").upcast(torch.float64)


@pytest.mark.parametrize("problem", (*PLAIN, *WITH_OPTIONS, *SHORT_BIAS), ids=str)
def test_from_the_definition(problem: Problem) -> None:
    inputs = float64_inputs(problem)
    with torch.no_grad():
        expected = from_the_definition(problem, inputs)
        actual = attend(problem, inputs, flash_ext.reference)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("problem", (*WITH_OPTIONS, *SHORT_BIAS), ids=str)
def test_gradients_never_hold_a_nan(problem: Problem) -> None:
    """First and second ones, though unused rows are NaN and some rows see no key."""
    inputs = float64_inputs(problem)
    out, lse = attend(problem, inputs, flash_ext.reference)
    leaves = tuple(inputs.leaves().values())
    loss = out.square().sum() + lse[lse > -math.inf].square().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    assert all(x.isfinite().all() for x in grads)
    second = torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)
    assert all(x.isfinite().all() for x in second)


@pytest.mark.parametrize("bias_type", ("input", "bool"))
def test_a_row_that_the_bias_hides(bias_type: str) -> None:
    problem = Problem(1, 4, 5, 2, 1, 4, bias="1hqk", bias_type=bias_type)
    inputs = float64_inputs(problem)
    with torch.no_grad():
        inputs.bias[0, 1, 2] = False if bias_type == "bool" else -math.inf
    out, lse = attend(problem, inputs, flash_ext.reference)
    assert not out[0, 2, 1].any() and lse[0, 1, 2] == -math.inf
    leaves = inputs.leaves()
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (inputs.dout, inputs.dlse))
    grads = dict(zip(leaves, grads, strict=True))
    assert all(x.isfinite().all() for x in grads.values())
    assert not grads["dq"][0, 2, 1].any()
    if bias_type == "input":
        assert not grads["dbias"][0, 1, 2].any()


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(
    "options",
    (
        {"softcap": 1.5, "alibi": "bh"},
        {"bias": "bhqk", "causal": True},
        {"bias": "1h1k", "sink": True},
        {"sink": True, "seqused_k": (3, 0)},
    ),
    ids=str,
)
def test_gradcheck_twice(options: dict) -> None:
    problem = dataclasses.replace(Problem(2, 3, 4, 2, 1, 3, head_dim_v=2, sink=True), **options)
    inputs = float64_inputs(problem)
    # Numerical differences need numbers, so rows that no sequence uses and hidden ones hold some.
    leaves = [
        x.detach().nan_to_num(nan=0.5, neginf=-1).requires_grad_() for x in inputs.leaves().values()
    ]

    def forward(*tensors):
        names = (name.removeprefix("d") for name in inputs.leaves())
        new = dataclasses.replace(inputs, **dict(zip(names, tensors, strict=True)))
        return attend(problem, new, flash_ext.reference)

    assert torch.autograd.gradcheck(forward, leaves)
    assert torch.autograd.gradgradcheck(forward, leaves)


@pytest.mark.parametrize("problem", PLAIN, ids=str)
def test_gradients_are_finite_and_pytorchs(problem: Problem) -> None:
    """Against autograd through F.scaled_dot_product_attention, on the rows that see a key."""
    p = problem
    inputs = make_inputs(p, "cpu")
    visible = dense_mask(p.seqlen_q, p.seqlen_k, p.causal, p.window)
    rows = visible.any(1)
    leaves = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    expected = F.scaled_dot_product_attention(
        q[:, :, rows], k, v, attn_mask=visible[rows], scale=p.scale, enable_gqa=True
    ).transpose(1, 2)
    dout = inputs.dout.double()
    expected_grads = torch.autograd.grad(expected, leaves, dout[:, rows])

    out, _ = attention(*leaves, scale=p.scale, causal=p.causal, window=p.window)
    torch.testing.assert_close(out[:, rows], expected)
    assert not out[:, ~rows].any()
    grads = torch.autograd.grad(out, leaves, dout)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_softmaxes_agree() -> None:
    x = torch.randn(3, 5, 100, dtype=torch.float64) * 100
    expected = x.softmax(-1)
    torch.testing.assert_close(safe_softmax(x), expected)
    for block in (1, 7, 32, 100, 128):
        torch.testing.assert_close(online_softmax(x, block), expected)
