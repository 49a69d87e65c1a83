"""The error rule of attention_testing.py: it passes what is right, and sees a single wrong row.

Would catch a rule that looks only at the largest error: under a causal mask the last rows are so
small next to the first that they could hold anything.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_testing import (
    CPU_VARIANTS,
    Problem,
    assert_accurate,
    make_inputs,
    reference_results,
    run,
)

FULL = Problem(1, 1000, 1000, 2, 1, 64)
CAUSAL = dataclasses.replace(FULL, causal=True)


def smallest_row(name: str) -> tuple[torch.Tensor, ...]:
    """The indices of the row whose numbers are the smallest."""
    sizes = reference_results(CAUSAL, "cpu").ref[name].abs().amax(-1)
    return torch.unravel_index(sizes.argmin(), sizes.shape)


def judge(
    problem: Problem, actual: dict[str, torch.Tensor], name: str, whole: bool = False
) -> None:
    """By the rule, or only by its part for whole tensors."""
    expected = reference_results(problem, "cpu")
    expected = expected._replace(size={}) if whole else expected
    assert_accurate({name: actual[name]}, expected, problem.dtype)


@pytest.mark.parametrize(("name", "factor"), [("out", 0.5), ("dq", 0.5), ("dk", 0), ("dv", -1)])
def test_one_small_row_is_wrong(name: str, factor: float) -> None:
    actual = run(CAUSAL, "fa2", "cpu")
    judge(CAUSAL, actual, name)
    actual[name][smallest_row(name)] *= factor
    judge(CAUSAL, actual, name, whole=True)
    with pytest.raises(AssertionError, match=f"{name}: row .* is off"):
        judge(CAUSAL, actual, name)


@pytest.mark.parametrize("name", ("out", "dq", "dk", "dv"))
def test_every_row_is_too_small(name: str) -> None:
    """As where one key in eighty is left out: no single number shows it."""
    actual = run(FULL, "fa2", "cpu")
    judge(FULL, actual, name)
    actual[name] = (actual[name].double() * 0.988).to(FULL.dtype)
    judge(FULL, actual, name, whole=True)
    with pytest.raises(AssertionError, match=f"{name}: .* apart"):
        judge(FULL, actual, name)


def test_one_wrong_lse() -> None:
    actual = run(CAUSAL, "fa2", "cpu")
    actual["lse"][0, 0, 0] += 1e-3
    with pytest.raises(AssertionError, match="lse: not float32"):
        judge(CAUSAL, actual, "lse")


@pytest.mark.parametrize("seed", (0, 1))
def test_rounding_of_small_gradients_of_scores_passes(seed: int) -> None:
    """With dS rounded to float16, which is a grid below its normal numbers, and all else exact.

    Large q make products of that grid's half steps larger than dk itself; dk of other rows must
    still be right.
    """
    problem = Problem(3, 1, 700, 6, 2, 40, dtype=torch.float16, logit_gain=40.0, loss="out",
                      seed=seed)  # fmt: skip
    inputs = make_inputs(problem, "cpu")
    q, k, v, dout = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = (x.repeat_interleave(3, dim=2) for x in (k, v))
    p = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 40**-0.5).softmax(-1)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    of_heads = torch.einsum("bhqk,bqhd->bkhd", ds.half().double(), q) * 40**-0.5
    dk = of_heads.unflatten(2, (2, 3)).sum(3).half()
    judge(problem, {"dk": dk}, "dk")
    sizes = reference_results(problem, "cpu").ref["dk"].abs().amax(-1)
    row = torch.unravel_index(sizes.argmax(), sizes.shape)
    dk[row] *= 0.9
    with pytest.raises(AssertionError, match="dk: "):
        judge(problem, {"dk": dk}, "dk")


@pytest.mark.parametrize("variant", CPU_VARIANTS)
@pytest.mark.parametrize(
    "options",
    (
        {"loss": "out", "window": (1, 0)},  # dq and dk nearly cancel
        {"loss": "out", "logit_gain": 30.0},  # one key takes all
        {"loss": "out", "softcap": 0.1, "dropout_p": 0.9},
        {"dtype": torch.float16, "bias": "bhqk", "sink": True},
        {"dtype": torch.float32, "alibi": "h", "head_dim": 8},
    ),
    ids=str,
)
def test_what_is_right_passes(options: dict, variant: str) -> None:
    problem = dataclasses.replace(CAUSAL, **{"seqlen_q": 200, "seqlen_k": 300} | options)
    actual = run(problem, variant, "cpu")
    actual.pop("dsink", None)
    assert_accurate(actual, reference_results(problem, "cpu"), problem.dtype)
