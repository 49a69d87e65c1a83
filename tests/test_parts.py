"""dK and dV of a KV head are rounded once, though parts of its queries are computed apart.

FA3's backward cuts a head's queries into parts where KV tiles are few (plan/cost.h), and sums the
gradients of the parts. Would catch parts that are rounded to 16 bits before they are summed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_testing import (
    VARIANTS,
    Inputs,
    Problem,
    assert_bitwise_equal,
    check,
    expected_results,
    make_inputs,
    run,
)

# fa3 cuts each of these, as test_plan.py checks: few keys, many query heads a KV head.
IN_PARTS = (
    Problem(9, 239, 1, 6, 1, 256),
    Problem(9, 239, 1, 9, 1, 256, window=(-1, 150)),
    Problem(2, 700, 1, 8, 1, 128, window=(-1, 400)),
    Problem(1, 2048, 2, 1, 1, 128),  # the queries of a head are cut
    Problem(1, 4200, 256, 6, 2, 64),  # groups first, then queries
    Problem(2, 1100, 64, 16, 1, 192, head_dim_v=128),
    Problem(2, 1100, 16, 6, 1, 192),
    Problem(1, 4096, 128, 8, 1, 96),
    Problem(1, 1030, 32, 7, 1, 32),
)


def with_exact_gradients(problem: Problem, device: str) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """Inputs whose dK and dV are sums of small multiples of a power of two, and these sums.

    All keys are equal, so a query that sees any gives each the weight 1/n. n is a power of two, or
    1 where not every query sees a key. v is 1 and −1 in turn, in one column, so out is 0 for n > 1
    and dS = ± dO / n in that column. With one key dS is 0.
    """
    p, n = problem, problem.seqlen_k
    inputs = make_inputs(p, "cpu")
    generator = torch.Generator().manual_seed(7)
    sign = torch.ones(n, dtype=torch.float64)
    sign[1::2] = -1
    with torch.no_grad():
        inputs.q.copy_(torch.randint(-3, 4, inputs.q.shape, generator=generator))
        inputs.k.copy_(
            torch.randint(-1, 2, (p.batch, 1, p.heads_k, p.head_dim), generator=generator)
        )
        inputs.v.zero_()
        inputs.v[..., 0] = sign[:, None]
        inputs.dout.copy_(torch.randint(0, 13, inputs.dout.shape, generator=generator))

    q, dout = inputs.q.detach().double(), inputs.dout.double()
    if p.window[1] >= 0:
        assert n == 1
        dout[:, : p.seqlen_q - 1 - p.window[1]] = 0  # rows that do not see the key
    dv = dout.unflatten(2, (p.heads_k, -1)).sum((1, 3)) / n
    dk = (dout[..., :1] * q).unflatten(2, (p.heads_k, -1)).sum((1, 3)) * p.scale / n
    rows = sign.view(1, -1, 1, 1)
    dv, dk = dv[:, None].expand(-1, n, -1, -1), dk[:, None] * (rows if n > 1 else 0)
    tensors = {name: getattr(inputs, name).detach().to(device) for name in ("q", "k", "v", "dout")}
    inputs = Inputs(**{n: x.requires_grad_(n != "dout") for n, x in tensors.items()})
    return inputs, {"dk": dk.to(device, p.dtype), "dv": dv.to(device, p.dtype)}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", IN_PARTS, ids=str)
def test_gradients_are_rounded_once(
    problem: Problem, variant: str, dtype: torch.dtype, device: str
) -> None:
    """Bit by bit: every sum here is exact in float32."""
    problem = dataclasses.replace(problem, dtype=dtype, scale=2.0**-4, loss="out")
    inputs, expected = with_exact_gradients(problem, device)
    for deterministic in (False, True) if device == "cuda" else (False,):
        actual = run(problem, variant, device, inputs=inputs, deterministic=deterministic)
        for name, x in expected.items():
            assert_bitwise_equal(actual[name] + 0.0, x + 0.0, name)  # −0 is 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", ["fa3"])
@pytest.mark.parametrize("problem", IN_PARTS, ids=str)
def test_random_gradients_in_parts(problem: Problem, variant: str, seed: int) -> None:
    """By the rule, and by that of flash-attn's own tests, which compares numbers in 16 bits."""
    problem = dataclasses.replace(problem, seed=seed, loss="out")
    actual = check(problem.well_conditioned(), variant, "cuda")
    inputs = make_inputs(problem, "cuda")
    actual = run(problem, variant, "cuda", inputs=inputs)
    expected = expected_results(problem, inputs)
    for name in ("dk", "dv") if problem.seqlen_k > 2 else ("dv",):  # with one key dk is 0
        ref, pt = expected.ref[name].to(problem.dtype), expected.pt[name]
        allowed = 2 * (pt - ref).abs().max() + 2 * (ref + 0.3 - 0.3 - ref).abs().max()
        assert (actual[name] - ref).abs().max() <= allowed, name
