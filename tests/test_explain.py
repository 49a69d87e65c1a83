"""explain: says what would run, and for what would not, the same reason that running gives.

Would catch an explanation that disagrees with `attention`, and a CPU-only install that does not say
what is missing and how to get it.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from attention_testing import VARIANTS, Problem, device_obstacle, fastest

import flash_ext


def some_inputs(device: str, **make) -> list[torch.Tensor]:
    make = {"dtype": torch.bfloat16} | make
    return [torch.randn(1, 8, 2, 64, device=device, **make) for _ in range(3)]


def test_what_runs(device: str) -> None:
    explanation = flash_ext.explain(*some_inputs(device), causal=True)
    assert explanation.variant == explanation.backward == fastest(Problem(), device)
    assert explanation.why_backward is None
    assert tuple(explanation.reasons) == VARIANTS
    for variant, reason in explanation.reasons.items():
        expected = device_obstacle(variant, device)
        assert reason is None if expected is None else expected in reason
    assert device in explanation.device
    text = str(explanation)
    assert len(text.splitlines()) >= 5
    assert all(word in text for word in (*VARIANTS, device))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_named_variant(variant: str, device: str) -> None:
    assert flash_ext.explain(*some_inputs(device), variant=variant).variant == variant


@pytest.mark.parametrize(
    ("argument", "options"),
    (
        ("softcap", {"softcap": -3.0}),
        ("bias", {"bias": torch.zeros(9, 8, dtype=torch.bool)}),
        ("window_left", {"window": (-3, 0)}),
        ("dropout_p", {"dropout_p": 1.0}),
        ("variant", {"variant": "fa9"}),
    ),
)
def test_why_not(argument: str, options: dict, device: str) -> None:
    inputs = some_inputs(device)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    explanation = flash_ext.explain(*inputs, **options)
    assert explanation.variant is explanation.backward is explanation.why_backward is None
    with pytest.raises((ValueError, RuntimeError), match=argument):
        flash_ext.attention(*inputs, **options)
    if argument != "variant":
        assert all(argument in reason for reason in explanation.reasons.values())
        assert argument in str(explanation)


def test_bad_tensors_are_explained_too(device: str) -> None:
    q, k, v = some_inputs(device)
    explanation = flash_ext.explain(q, k[:, :, :, :32], v)
    assert explanation.variant is None
    assert all(reason.startswith("k must be") for reason in explanation.reasons.values())


@pytest.mark.parametrize("packed", (False, True))
def test_every_option_is_taken(packed: bool, device: str) -> None:
    inputs = some_inputs(device)
    attention = flash_ext.attention
    options = {
        "scale": 0.5,
        "causal": True,
        "window": (3, 0),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(2, device=device),
        "bias": torch.randn(8, device=device),
        "sink": torch.randn(2, device=device, dtype=torch.float16),
        "seqused_k": torch.tensor([5], dtype=torch.int32, device=device),
        "dropout_p": 0.1,
        "rng_state": torch.zeros(2, dtype=torch.int64, device=device),
        "deterministic": True,
        "variant": "auto",
        "return_lse": True,
    }
    if packed:
        cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device=device)
        inputs = [*(x[0] for x in inputs), cu_seqlens, cu_seqlens]
        attention = flash_ext.attention_varlen
    assert set(options) < set(inspect.signature(attention).parameters)
    attention(*inputs, **options)
    assert flash_ext.explain(*inputs, **options).variant is not None


def test_both_functions_have_the_same_options() -> None:
    dense, packed = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(function).parameters.items()
        }
        for function in (flash_ext.attention, flash_ext.attention_varlen)
    )
    added = {name: packed.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert dense == packed and all(
        default is inspect.Parameter.empty for _, default in added.values()
    )


def test_packed_inputs_without_their_offsets_are_explained(device: str) -> None:
    explanation = flash_ext.explain(*(x[0] for x in some_inputs(device)))
    assert explanation.variant is None
    assert all("cu_seqlens" in reason for reason in explanation.reasons.values())


def test_explaining_draws_no_random_numbers(device: str) -> None:
    inputs = some_inputs(device)
    torch.manual_seed(1)
    expected = flash_ext.attention(*inputs, dropout_p=0.5)
    torch.manual_seed(1)
    flash_ext.explain(*inputs, dropout_p=0.5)
    assert torch.equal(flash_ext.attention(*inputs, dropout_p=0.5), expected)


def test_an_unknown_option_is_an_error(device: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match="causl"):
        flash_ext.explain(*some_inputs(device), causl=True)


def test_says_whether_the_cuda_kernels_are_there() -> None:
    binary = flash_ext.explain(*some_inputs("cpu")).binary
    if Path(flash_ext.__file__).with_name("_C.abi3.so").exists():
        assert binary == "loaded"
    else:
        assert "not built" in binary and "pip install" in binary


@pytest.mark.gpu
def test_float32_on_cuda_is_explained() -> None:
    explanation = flash_ext.explain(*some_inputs("cuda", dtype=torch.float32))
    assert explanation.variant is None
    assert all("q must be" in reason for reason in explanation.reasons.values())
