"""Every kind of bad input: refused before anything runs, by a message that names the argument.

Would catch a check that is missing on one device (the kernel would read out of bounds), a message
that names the wrong argument, and `check` and `fwd` disagreeing about what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_testing import VARIANTS

import flash_ext

ERRORS = (ValueError, RuntimeError)  # from Python and from C++; NotImplementedError is the latter

Arguments = dict[str, Any]


def good(device: str) -> Arguments:
    """Arguments of `bwd` that work; `fwd` and `check` take those of them that they know."""
    make = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, n, h, 32, **make) for n, h in ((5, 4), (7, 2), (7, 2)))
    out, lse = torch.ops.flash_ext.fwd(q, k, v)
    return {
        "dout": torch.randn_like(out),
        "dlse": torch.randn_like(lse),
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
    }


def shaped(name: str, *shape: int) -> Callable[[Arguments], Arguments]:
    """Replaces one tensor by one of another shape."""
    return lambda a: {name: a[name].new_zeros(shape)}


def typed(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to(dtype)}


def strided(name: str) -> Callable[[Arguments], Arguments]:
    """Replaces one tensor by a view whose last dimension is not contiguous."""
    return lambda a: {name: torch.stack((a[name], a[name]), -1)[..., 0]}


def option(**options: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: options


def state(*shape: int, dtype: torch.dtype = torch.int64, p: float = 0.1) -> Callable:
    return lambda a: {
        "dropout_p": p,
        "rng_state": torch.zeros(shape, dtype=dtype, device=a["q"].device),
    }


def tensor_option(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable:
    return lambda a: {name: torch.zeros(shape, dtype=dtype, device=a["q"].device)}


NAN, INF = float("nan"), float("inf")

FORWARD_CASES = {
    # what is wrong: (the argument the message names, the change to good arguments)
    "q of three dimensions": ("q", shaped("q", 5, 4, 32)),
    "k of three dimensions": ("k", shaped("k", 7, 2, 32)),
    "v of five dimensions": ("v", shaped("v", 1, 2, 7, 2, 32)),
    "integer q": ("q", typed("q", torch.int32)),
    "integers throughout": ("q", lambda a: {n: a[n].to(torch.int32) for n in "qkv"}),
    "k of another type": ("k", typed("k", torch.float16)),
    "v of another type": ("v", typed("v", torch.float32)),
    "k of another batch": ("k", shaped("k", 3, 7, 2, 32)),
    "v of another batch": ("v", shaped("v", 1, 7, 2, 32)),
    "k of another head dim": ("k", shaped("k", 2, 7, 2, 40)),
    "v of another length": ("v", shaped("v", 2, 8, 2, 32)),
    "v of other heads": ("v", shaped("v", 2, 7, 4, 32)),
    "v of another head dim": ("v", shaped("v", 2, 7, 2, 40)),
    "heads that do not divide": (
        "q",
        lambda a: {n: a[n].new_zeros(2, 7, 3, 32) for n in "kv"},
    ),
    "more key heads than query heads": (
        "q",
        lambda a: {n: a[n].new_zeros(2, 7, 8, 32) for n in "kv"},
    ),
    "no key heads": ("q|k", lambda a: {n: a[n].new_zeros(2, 7, 0, 32) for n in "kv"}),
    "head dim 257": ("q", lambda a: {n: a[n].new_zeros(2, 7, 2, 257) for n in "qkv"}),
    "head dim 0": ("q", lambda a: {n: a[n].new_zeros(2, 7, 2, 0) for n in "qkv"}),
    "q not contiguous": ("q", strided("q")),
    "k not contiguous": ("k", strided("k")),
    "v not contiguous": ("v", strided("v")),
    "scale nan": ("scale", option(scale=NAN)),
    "scale infinite": ("scale", option(scale=INF)),
    "window_left -2": ("window_left", option(window_left=-2)),
    "window_right -2": ("window_right", option(window_right=-2)),
    "window_right -5 though causal": ("window_right", option(window_right=-5, causal=True)),
    "negative dropout": ("dropout_p", option(dropout_p=-0.1)),
    "dropout of everything": ("dropout_p", state(2, p=1.0)),
    "dropout above 1": ("dropout_p", state(2, p=1.5)),
    "dropout nan": ("dropout_p", state(2, p=NAN)),
    "no rng_state": ("rng_state", option(dropout_p=0.1)),
    "rng_state int32": ("rng_state", state(2, dtype=torch.int32)),
    "rng_state float": ("rng_state", state(2, dtype=torch.float32)),
    "rng_state too long": ("rng_state", state(3)),
    "rng_state a matrix": ("rng_state", state(1, 2)),
    "unknown variant": ("variant", option(variant="fa9")),
    "empty variant": ("variant", option(variant="")),
}

UNSUPPORTED_CASES = {
    "softcap": option(softcap=30.0),
    "alibi_slopes": tensor_option("alibi_slopes", 4),
    "bias": tensor_option("bias", 1, 1, 5, 7, dtype=torch.bfloat16),
    "sink": tensor_option("sink", 4),
    "cu_seqlens_q": tensor_option("cu_seqlens_q", 3, dtype=torch.int32),
    "cu_seqlens_k": tensor_option("cu_seqlens_k", 3, dtype=torch.int32),
    "seqused_k": tensor_option("seqused_k", 2, dtype=torch.int32),
}

BACKWARD_CASES = {
    "dout of another shape": ("dout", shaped("dout", 2, 6, 4, 32)),
    "dout of another type": ("dout", typed("dout", torch.float32)),
    "dout not contiguous": ("dout", strided("dout")),
    "out of another shape": ("out", shaped("out", 2, 5, 2, 32)),
    "out of another type": ("out", typed("out", torch.float16)),
    "out not contiguous": ("out", strided("out")),
    "lse of another shape": ("lse", shaped("lse", 2, 5, 4)),
    "lse of another type": ("lse", typed("lse", torch.float64)),
    "dlse of another shape": ("dlse", shaped("dlse", 2, 4, 6)),
    "dlse of another type": ("dlse", typed("dlse", torch.bfloat16)),
}

ON_CUDA_CASES = {
    "float32": ("q", lambda a: {n: a[n].float() for n in "qkv"}),
    "float64": ("q", lambda a: {n: a[n].double() for n in "qkv"}),
    "k on the CPU": ("k", lambda a: {"k": a["k"].cpu()}),
    "v on the CPU": ("v", lambda a: {"v": a["v"].cpu()}),
    "q on the CPU": ("q|k", lambda a: {"q": a["q"].cpu()}),
    "rng_state on the CPU": (
        "rng_state",
        lambda a: {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)},
    ),
}


def call(op: str, arguments: Arguments) -> Any:
    """Run an op on those of the arguments that it takes: tensors by position, options by name."""
    tensors = ("q", "k", "v")
    backward = ("dout", "dlse", "q", "k", "v", "out", "lse")
    options = {name: x for name, x in arguments.items() if name not in backward}
    names = backward if op == "bwd" else tensors
    return getattr(torch.ops.flash_ext, op)(*(arguments[name] for name in names), **options)


def named(argument: str) -> str:
    return rf"flash_ext: ({argument})\b"


def refuse(op: str, argument: str, change: Callable, device: str, **options: Any) -> str:
    """Checks that the op refuses the changed arguments by name; returns the message."""
    arguments = good(device)
    call(op, arguments | options)  # what is refused below is the change
    with pytest.raises(ERRORS, match=named(argument)) as caught:
        call(op, arguments | options | change(arguments))
    return str(caught.value)


@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", FORWARD_CASES)
def test_bad_arguments(case: str, op: str, device: str) -> None:
    argument, change = FORWARD_CASES[case]
    message = refuse(op, argument, change, device)
    assert "must be" in message and "got" in message or "not supported" in message


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("name", UNSUPPORTED_CASES)
def test_options_that_are_not_supported_yet(name: str, op: str, variant: str, device: str) -> None:
    message = refuse(op, name, UNSUPPORTED_CASES[name], device, variant=variant)
    assert "not supported" in message and variant in message


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_bad_arguments_of_the_backward_op(case: str, device: str) -> None:
    argument, change = BACKWARD_CASES[case]
    refuse("bwd", argument, change, device)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", ON_CUDA_CASES)
def test_bad_arguments_on_cuda(case: str, op: str) -> None:
    argument, change = ON_CUDA_CASES[case]
    refuse(op, argument, change, "cuda")


@pytest.mark.gpu
def test_a_refusal_leaves_the_device_usable() -> None:
    arguments = good("cuda")
    for argument, change in FORWARD_CASES.values():
        with pytest.raises(ERRORS, match=named(argument)):
            call("fwd", arguments | change(arguments))
    torch.cuda.synchronize()
    call("bwd", arguments)
    torch.cuda.synchronize()


def test_the_public_function_says_the_same(device: str) -> None:
    a = good(device)
    q, k, v = a["q"], a["k"], a["v"]
    for options, argument in (
        ({"window": (-2, 0)}, "window_left"),
        ({"window": (0, -7)}, "window_right"),
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"softcap": 1.0}, "softcap"),
        ({"variant": "flash"}, "variant"),
    ):
        with pytest.raises(ERRORS, match=named(argument)):
            flash_ext.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="causl"):
        flash_ext.attention(q, k, v, causl=True)


def test_a_named_variant_runs_or_raises(device: str) -> None:
    """`check` returns the index of what fwd runs."""
    a = good(device)
    for index, variant in enumerate(VARIANTS):
        assert call("check", a | {"variant": variant}) == index
    assert VARIANTS[call("check", a)] == "fa2"
