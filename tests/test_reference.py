"""Standard attention, the yardstick, against formulas written here and against PyTorch's own.

Would catch a yardstick that is wrong in the same way as the kernels: the mask here is written out
from the contract, not taken from flash_ext.mask, which the reference and the CPU kernels share.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_testing import Problem, dense_mask, make_inputs, yardstick

from flash_ext.dropout import keep_mask, keep_scale
from flash_ext.reference import attention, online_softmax, safe_softmax

PROBLEMS = (
    Problem(2, 5, 9, 4, 2, 16),
    Problem(2, 9, 5, 4, 2, 16, causal=True),
    Problem(1, 7, 7, 3, 1, 8, window=(2, 0)),
    Problem(1, 9, 5, 2, 2, 8, window=(-1, 0), scale=0.7),
    Problem(2, 12, 20, 2, 1, 8, window=(3, 4), causal=True),
    Problem(1, 20, 33, 2, 2, 8, dropout_p=0.3),
)


def elementwise(q, k, v, problem: Problem, rng_state) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one query at a time, from the definition."""
    p = problem
    visible = dense_mask(p.seqlen_q, p.seqlen_k, p.causal, p.window)
    keep = torch.ones(p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    if p.dropout_p:
        keep = keep_mask(rng_state, p.dropout_p, *keep.shape) * keep_scale(p.dropout_p)
    scale = p.scale if p.scale is not None else p.head_dim**-0.5
    out = torch.zeros_like(q)
    lse = torch.full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=q.dtype)
    for b in range(p.batch):
        for h in range(p.heads_q):
            kv_head = h // (p.heads_q // p.heads_k)
            for i in range(p.seqlen_q):
                keys = visible[i].nonzero()[:, 0]
                if len(keys) == 0:
                    continue
                scores = k[b, keys, kv_head] @ q[b, i, h] * scale
                lse[b, h, i] = scores.exp().sum().log()
                weights = (scores - lse[b, h, i]).exp() * keep[b, h, i, keys]
                out[b, i, h] = weights @ v[b, keys, kv_head]
    return out, lse


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_from_the_definition(problem: Problem) -> None:
    inputs = make_inputs(problem, "cpu")
    q, k, v = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v))
    expected_out, expected_lse = elementwise(q, k, v, problem, inputs.rng_state)
    ref, _ = yardstick(problem, "cpu")
    torch.testing.assert_close(ref["out"], expected_out)
    torch.testing.assert_close(ref["lse"], expected_lse)


@pytest.mark.parametrize("problem", PROBLEMS[:-1], ids=str)
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
