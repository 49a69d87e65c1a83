"""Every kind of bad input: refused before anything runs, by a message that names the argument.

Would catch a check that is missing on one device (the kernel would read out of bounds), a message
that names the wrong argument, and `check` and `fwd` disagreeing about what runs. CUDA leaves the
values of cu_seqlens and seqused_k unchecked unless FLASH_EXT_DEBUG=1: those have tests of their
own.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_testing import VARIANTS, Problem, device_unsupported_reason, fastest

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


def good_packed(device: str) -> Arguments:
    """The same for two packed sequences, with every option that is a tensor."""
    a = good(device)
    dense = ("dout", "q", "k", "v", "out")
    a |= {name: a[name].flatten(0, 1) for name in dense}
    a |= {name: a[name].transpose(0, 1).flatten(1) for name in ("lse", "dlse")}
    make = {"device": device}
    return a | {
        "cu_seqlens_q": torch.tensor([0, 4, 10], dtype=torch.int32, **make),
        "cu_seqlens_k": torch.tensor([0, 8, 14], dtype=torch.int32, **make),
        "seqused_k": torch.tensor([5, 6], dtype=torch.int32, **make),
        "alibi_slopes": torch.rand(2, 4, **make),
        "bias": torch.randn(1, 4, 1, 9, **make),
        "sink": torch.randn(4, **make),
    }


def shaped(name: str, *shape: int) -> Callable[[Arguments], Arguments]:
    """Replaces one tensor by one of another shape."""
    return lambda a: {name: a[name].new_zeros(shape)}


def typed(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to(dtype)}


def strided(name: str) -> Callable[[Arguments], Arguments]:
    """Replaces one tensor by a view whose last dimension is not contiguous."""
    return lambda a: {name: torch.stack((a[name], a[name]), -1)[..., 0]}


def missing(name: str) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: None}


def option(**options: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: options


def state(*shape: int, dtype: torch.dtype = torch.int64, p: float = 0.1) -> Callable:
    return lambda a: {
        "dropout_p": p,
        "rng_state": torch.zeros(shape, dtype=dtype, device=a["q"].device),
    }


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable:
    return lambda a: {name: torch.zeros(shape, dtype=dtype, device=a["q"].device)}


NAN, INF = float("nan"), float("inf")


def mask(**changes: Any) -> Callable[[Arguments], Arguments]:
    """The tensors of a mask for `good`, of which some have other shapes, or are given."""
    shapes = {"kv_tiles": (1, 1, 1, 8), "q_tiles": (1, 1, 1, 8), "words": (1, 1, 128, 4)}

    def make(a: Arguments) -> Arguments:
        given = shapes | changes
        others = {name: given.pop(name) for name in set(given) - set(shapes)}
        ints = {"dtype": torch.int32, "device": a["q"].device}
        tensors = {
            f"mask_{name}": torch.zeros(x, **ints) if isinstance(x, tuple) else x
            for name, x in given.items()
        }
        return tensors | {
            name: x.to(a["q"].device) if isinstance(x, torch.Tensor) else x
            for name, x in others.items()
        }

    return make


def ints(*shape: int, **more: Any) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.int32} | more)


MASK_CASES = {
    "a mask without queries' blocks": ("mask_q_tiles", mask(q_tiles=None)),
    "a mask without keys' blocks": ("mask_kv_tiles", mask(kv_tiles=None)),
    "a mask without words": ("mask_words", mask(words=None)),
    "a mask and lengths": ("seqused_k", mask(seqused_k=ints(2))),
    "a mask and causal": ("causal", mask(causal=True)),
    "a mask and a window left": ("window_left", mask(window_left=3)),
    "a mask and a window right": ("window_right", mask(window_right=0)),
    "a mask of another batch": ("mask_kv_tiles", mask(kv_tiles=(3, 1, 1, 8))),
    "a mask of other heads": ("mask_kv_tiles", mask(kv_tiles=(1, 3, 1, 8))),
    "a mask of more blocks": ("mask_kv_tiles", mask(kv_tiles=(1, 1, 2, 8))),
    "a mask of more blocks of keys": ("mask_q_tiles", mask(q_tiles=(1, 1, 2, 8))),
    "a mask without runs": ("mask_kv_tiles", mask(kv_tiles=(1, 1, 1, 4))),
    "a mask of 10 runs": ("mask_q_tiles", mask(q_tiles=(1, 1, 1, 10))),
    "a mask of three dimensions": ("mask_q_tiles", mask(q_tiles=(1, 1, 8))),
    "lists of two batches": ("mask_q_tiles", mask(q_tiles=(2, 1, 1, 8))),
    "lists of two heads": ("mask_q_tiles", mask(q_tiles=(1, 4, 1, 8))),
    "words of two batches": ("mask_words", mask(words=(2, 1, 128, 4))),
    "words of queries alone": ("mask_words", mask(words=(1, 1, 5, 4))),
    "one interval": ("mask_words", mask(words=(1, 1, 128, 2))),
    "bits of more blocks": ("mask_words", mask(words=(1, 1, 1, 2, 128, 4))),
    "a mask in int64": (
        "mask_kv_tiles",
        lambda a: mask()(a) | tensor("mask_kv_tiles", 1, 1, 1, 8, dtype=torch.int64)(a),
    ),
    "words with gaps": (
        "mask_words",
        lambda a: mask()(a) | {"mask_words": ints(1, 1, 128, 8, device=a["q"].device)[..., ::2]},
    ),
    "words not aligned": (
        "mask_words",
        lambda a: (
            mask()(a) | {"mask_words": ints(513, device=a["q"].device)[1:].view(1, 1, 128, 4)}
        ),
    ),
}


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
    "heads that do not divide": (
        "q",
        lambda a: {n: a[n].new_zeros(2, 7, 3, 32) for n in "kv"},
    ),
    "more key heads than query heads": (
        "q",
        lambda a: {n: a[n].new_zeros(2, 7, 8, 32) for n in "kv"},
    ),
    "no key heads": (
        "k's number of heads must be at least 1",
        lambda a: {n: a[n].new_zeros(2, 7, 0, 32) for n in "kv"},
    ),
    "no heads": (
        "k's number of heads must be at least 1",
        lambda a: {n: a[n].new_zeros(2, 7, 0, 32) for n in "qkv"},
    ),
    "head dim 257": ("q", lambda a: {n: a[n].new_zeros(2, 7, 2, 257) for n in "qkv"}),
    "v of head dim 257": ("v", shaped("v", 2, 7, 2, 257)),
    "v of head dim 0": ("v", shaped("v", 2, 7, 2, 0)),
    "head dim 0": ("q", lambda a: {n: a[n].new_zeros(2, 7, 2, 0) for n in "qkv"}),
    "q not contiguous": ("q", strided("q")),
    "k not contiguous": ("k", strided("k")),
    "v not contiguous": ("v", strided("v")),
    "scale nan": ("scale", option(scale=NAN)),
    "scale infinite": ("scale", option(scale=INF)),
    "scale infinite in float32": ("scale", option(scale=1e300)),
    "scale -2^127": ("scale", option(scale=-(2.0**127))),
    "scale too large for softcap": ("scale", option(scale=2.0**118, softcap=2.0**-10)),
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
    "negative softcap": ("softcap", option(softcap=-1.0)),
    "softcap infinite": ("softcap", option(softcap=INF)),
    "softcap nan": ("softcap", option(softcap=NAN)),
    "softcap infinite in float32": ("softcap", option(softcap=1e300)),
    "softcap 2^127": ("softcap", option(softcap=2.0**127)),
    "softcap 0 in float32": ("softcap", option(softcap=1e-300)),
    "softcap subnormal in float32": ("softcap", option(softcap=1e-39)),
    "slopes of other heads": ("alibi_slopes", tensor("alibi_slopes", 2)),
    "slopes of another batch": ("alibi_slopes", tensor("alibi_slopes", 1, 4)),
    "slopes of three dimensions": ("alibi_slopes", tensor("alibi_slopes", 2, 4, 1)),
    "slopes of q's type": ("alibi_slopes", tensor("alibi_slopes", 4, dtype=torch.bfloat16)),
    "slopes not contiguous": (
        "alibi_slopes",
        lambda a: {"alibi_slopes": torch.zeros(2, 8, device=a["q"].device)[:, ::2]},
    ),
    "bias of three dimensions": ("bias", tensor("bias", 4, 5, 7)),
    **MASK_CASES,
    "bias of another batch": ("bias", tensor("bias", 3, 1, 1, 1)),
    "bias of key heads": ("bias", tensor("bias", 1, 2, 5, 7)),
    "bias of too few queries": ("bias", tensor("bias", 1, 4, 4, 7)),
    "bias of too many keys": ("bias", tensor("bias", 2, 4, 5, 8)),
    "bias of another 16-bit type": ("bias", tensor("bias", 1, 1, 5, 7, dtype=torch.float16)),
    "bias float64": ("bias", tensor("bias", 1, 1, 5, 7, dtype=torch.float64)),
    "bias int32": ("bias", tensor("bias", 1, 1, 5, 7, dtype=torch.int32)),
    "sink of other heads": ("sink", tensor("sink", 2)),
    "sink of each batch": ("sink", tensor("sink", 2, 4)),
    "sink of q's type": ("sink", tensor("sink", 4, dtype=torch.bfloat16)),
    "sink not contiguous": (
        "sink",
        lambda a: {"sink": torch.zeros(8, device=a["q"].device)[::2]},
    ),
    "seqused_k of another batch": ("seqused_k", tensor("seqused_k", 3, dtype=torch.int32)),
    "seqused_k int64": ("seqused_k", tensor("seqused_k", 2, dtype=torch.int64)),
    "seqused_k not contiguous": (
        "seqused_k",
        lambda a: {"seqused_k": torch.ones(4, dtype=torch.int32, device=a["q"].device)[::2]},
    ),
    "cu_seqlens for four dimensions": (
        "q",
        lambda a: {
            name: torch.zeros(3, dtype=torch.int32, device=a["q"].device)
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        },
    ),
    "only cu_seqlens_q": (
        "cu_seqlens_q and cu_seqlens_k",
        tensor("cu_seqlens_q", 3, dtype=torch.int32),
    ),
    "only cu_seqlens_k": (
        "cu_seqlens_q and cu_seqlens_k",
        tensor("cu_seqlens_k", 3, dtype=torch.int32),
    ),
    "unknown variant": ("variant", option(variant="fa9")),
    "empty variant": ("variant", option(variant="")),
}

PACKED_CASES = {
    "q of four dimensions": ("q", shaped("q", 2, 5, 4, 32)),
    "k of four dimensions": ("k", shaped("k", 2, 7, 2, 32)),
    "v of two dimensions": ("v", shaped("v", 14, 64)),
    "k of another head dim": ("k", shaped("k", 14, 2, 40)),
    "v of another total": ("v", shaped("v", 13, 2, 32)),
    "no cu_seqlens_q": ("cu_seqlens_q and cu_seqlens_k", missing("cu_seqlens_q")),
    "no cu_seqlens_k": ("cu_seqlens_q and cu_seqlens_k", missing("cu_seqlens_k")),
    "no cu_seqlens at all": (
        "q",
        lambda a: {"cu_seqlens_q": None, "cu_seqlens_k": None},
    ),
    "cu_seqlens_q int64": ("cu_seqlens_q", typed("cu_seqlens_q", torch.int64)),
    "cu_seqlens_k float": ("cu_seqlens_k", typed("cu_seqlens_k", torch.float32)),
    "cu_seqlens_q empty": ("cu_seqlens_q", shaped("cu_seqlens_q", 0)),
    "cu_seqlens_q a matrix": ("cu_seqlens_q", shaped("cu_seqlens_q", 1, 3)),
    "cu_seqlens_k of another batch": ("cu_seqlens_k", shaped("cu_seqlens_k", 4)),
    "cu_seqlens_q not contiguous": ("cu_seqlens_q", strided("cu_seqlens_q")),
    "cu_seqlens_k not contiguous": ("cu_seqlens_k", strided("cu_seqlens_k")),
    "seqused_k of another batch": ("seqused_k", shaped("seqused_k", 3)),
    "slopes of another batch": ("alibi_slopes", shaped("alibi_slopes", 3, 4)),
    "bias of another batch": ("bias", shaped("bias", 3, 1, 1, 1)),
    "bias of other heads": ("bias", shaped("bias", 1, 2, 1, 1)),
    "bias of three dimensions": ("bias", shaped("bias", 4, 5, 7)),
    "sink of other heads": ("sink", shaped("sink", 2)),
}


def offsets(name: str, *values: int) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: torch.tensor(values, dtype=torch.int32, device=a["q"].device)}


OFFSET_CASES = {
    # what is wrong: (what the message says, the change)
    "does not start at 0": (
        "cu_seqlens_q[0] must be 0, got 1",
        offsets("cu_seqlens_q", 1, 4, 10),
    ),
    "decreases": (
        "cu_seqlens_k[2] must be from 8 (the entry before) to 14 (all rows), got 6",
        offsets("cu_seqlens_k", 0, 8, 6),
    ),
    "negative": (
        "cu_seqlens_q[1] must be from 0 (the entry before) to 10 (all rows), got -2",
        offsets("cu_seqlens_q", 0, -2, 10),
    ),
    "passes the total": (
        "cu_seqlens_k[2] must be from 8 (the entry before) to 14 (all rows), got 15",
        offsets("cu_seqlens_k", 0, 8, 15),
    ),
    "more keys than the sequence has": (
        "seqused_k[1] must be from 0 to the sequence's 6 keys, got 7",
        offsets("seqused_k", 8, 7),
    ),
    "fewer keys than none": (
        "seqused_k[0] must be from 0 to the sequence's 8 keys, got -1",
        offsets("seqused_k", -1, 0),
    ),
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

PACKED_BACKWARD_CASES = {
    "dout of another total": ("dout", shaped("dout", 11, 4, 32)),
    "out of four dimensions": ("out", shaped("out", 2, 5, 4, 32)),
    "lse by rows": ("lse", shaped("lse", 10, 4)),
    "dlse of four dimensions": ("dlse", shaped("dlse", 2, 4, 5, 1)),
    "dlse not contiguous": ("dlse", strided("dlse")),
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

PACKED_ON_CUDA_CASES = {
    f"{name} on the CPU": (name, lambda a, name=name: {name: a[name].cpu()})
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "bias", "sink")
}


def call(op: str, arguments: Arguments) -> Any:
    """Run an op on those of the arguments that it takes: tensors by position, options by name."""
    tensors = ("q", "k", "v")
    backward = ("dout", "dlse", "q", "k", "v", "out", "lse")
    options = {name: x for name, x in arguments.items() if name not in backward}
    names = backward if op.endswith("bwd") else tensors
    return getattr(torch.ops.flash_ext, op)(*(arguments[name] for name in names), **options)


def named(argument: str) -> str:
    return rf"flash_ext: ({argument})\b"


def refuse(op: str, argument: str, change: Callable, arguments: Arguments) -> str:
    """Checks that the op refuses the changed arguments by name; returns the message."""
    call(op, arguments)  # what is refused below is the change
    with pytest.raises(ERRORS, match=named(argument)) as caught:
        call(op, arguments | change(arguments))
    message = str(caught.value)
    assert " must be " in message and ", got " in message
    return message


@pytest.mark.all_cases
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", FORWARD_CASES)
def test_bad_arguments(case: str, op: str, device: str) -> None:
    refuse(op, *FORWARD_CASES[case], good(device))


@pytest.mark.all_cases
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", PACKED_CASES)
def test_bad_packed_arguments(case: str, op: str, device: str) -> None:
    refuse(op, *PACKED_CASES[case], good_packed(device))


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_bad_arguments_of_the_backward_op(case: str, device: str) -> None:
    refuse("bwd", *BACKWARD_CASES[case], good(device))


@pytest.mark.parametrize("case", PACKED_BACKWARD_CASES)
def test_bad_packed_arguments_of_the_backward_op(case: str, device: str) -> None:
    refuse("bwd", *PACKED_BACKWARD_CASES[case], good_packed(device))


@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", OFFSET_CASES)
def test_the_cpu_names_the_bad_offset(case: str, op: str) -> None:
    said, change = OFFSET_CASES[case]
    argument = said.partition("[")[0]
    assert said in refuse(op, argument, change, good_packed("cpu"))


@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("used", ((7, 8), (-1, 7)))
def test_the_cpu_names_the_bad_number_of_keys(used: tuple, op: str) -> None:
    index = 1 if used[1] > 7 else 0
    said = f"seqused_k[{index}] must be from 0 to the sequence's 7 keys, got {used[index]}"
    assert said in refuse(op, "seqused_k", offsets("seqused_k", *used), good("cpu"))


BAD_OFFSETS_ON_CUDA = """
import torch
q = torch.zeros(10, 1, 64, dtype=torch.float16, device="cuda")
offsets = lambda *x: torch.tensor(x, dtype=torch.int32, device="cuda")
good = offsets(0, 4, 10)
import flash_ext
flash_ext.attention_varlen(q, q, q, good, good)
bad_offsets = (offsets(1, 4, 10), offsets(0, 8, 6), offsets(0, -2, 10), offsets(0, 4, 1 << 30))
for bad, used in (*((x, None) for x in bad_offsets), (good, offsets(4, 7)), (good, offsets(-1, 6))):
    try:
        flash_ext.attention_varlen(q, q, q, good, bad, seqused_k=used)
        torch.cuda.synchronize()
        print("ran")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("debug", (False, True))
def test_bad_offsets_on_cuda(debug: bool) -> None:
    """With FLASH_EXT_DEBUG=1 refused by name; without it, nothing outside the tensors is read."""
    environment = os.environ | {"FLASH_EXT_DEBUG": "1" if debug else "0"}
    command = [sys.executable, "-c", BAD_OFFSETS_ON_CUDA]
    root = Path(flash_ext.__file__).parent.parent
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    if debug:
        assert [re.search(r"\w+\[\d\] must be", line).group() for line in lines] == [
            *(f"cu_seqlens_k[{index}] must be" for index in (0, 2, 1, 2)),
            *(f"seqused_k[{index}] must be" for index in (1, 0)),
        ]
    else:
        assert lines == ["ran"] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", ON_CUDA_CASES)
def test_bad_arguments_on_cuda(case: str, op: str) -> None:
    refuse(op, *ON_CUDA_CASES[case], good("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("fwd", "check", "bwd"))
@pytest.mark.parametrize("case", PACKED_ON_CUDA_CASES)
def test_bad_packed_arguments_on_cuda(case: str, op: str) -> None:
    refuse(op, *PACKED_ON_CUDA_CASES[case], good_packed("cuda"))


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
        ({"softcap": -1.0}, "softcap"),
        ({"bias": torch.zeros(7, 7, device=device)}, "bias"),
        ({"sink": torch.zeros(3, device=device)}, "sink"),
        ({"alibi_slopes": torch.zeros(3, device=device)}, "alibi_slopes"),
        ({"seqused_k": torch.zeros(2, device=device)}, "seqused_k"),
        ({"variant": "flash"}, "variant"),
    ):
        with pytest.raises(ERRORS, match=named(argument)):
            flash_ext.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="causl"):
        flash_ext.attention(q, k, v, causl=True)
    cu_seqlens = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ERRORS, match=named("q")):
        flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)
    with pytest.raises(ERRORS, match=named("q") + ".*packed sequences come .*to attention_varlen"):
        flash_ext.attention(q[0], k[0], v[0])
    for name, offsets in (("q", (None, cu_seqlens)), ("k", (cu_seqlens, None))):
        with pytest.raises(ERRORS, match=f"cu_seqlens_{name} must be a tensor, got None"):
            flash_ext.attention_varlen(q[0], k[0], v[0], *offsets)
    with pytest.raises(
        TypeError, match="'cu_seqlens_q'; here it is an argument of attention_varlen"
    ):
        flash_ext.attention(q, k, v, cu_seqlens_q=cu_seqlens)


@pytest.mark.parametrize(
    "options", ({"scale": 1e-300}, {"scale": 0.0}, {"softcap": 2.0**-10}, {"softcap": 1.7e38})
)
def test_the_ends_of_what_scale_and_softcap_may_be(options: dict, device: str) -> None:
    """Scores that vanish are all equal; a very large cap changes nothing."""
    a = good(device)
    q, k, v = a["q"], a["k"], a["v"]
    out, lse = flash_ext.attention(q, k, v, **options, return_lse=True)
    if options.get("softcap", 0.0) > 1:
        expected = flash_ext.attention(q, k, v).float()
    else:
        within = options.get("softcap", 0.0) + 1e-5
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)), rtol=0, atol=within)
        expected = v.float().mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def test_dtypes_are_named_once_each() -> None:
    for dtype, wanted in (
        (torch.float32, "float32 or bool"),
        (torch.bfloat16, "bfloat16, float32 or bool"),
        (torch.float64, "float64 or bool"),
    ):
        q = torch.zeros(1, 5, 1, 8, dtype=dtype)
        bias = torch.zeros(5, 5, dtype=torch.float16)
        with pytest.raises(ERRORS, match=f"bias must be {wanted}, got float16$"):
            flash_ext.attention(q, q, q, bias=bias)


@pytest.mark.parametrize("window", (128, None, (1, 2, 3), (None, 0), "ab"))
def test_a_window_that_is_no_pair(window: Any, device: str) -> None:
    a = good(device)
    q, k, v = a["q"], a["k"], a["v"]
    for call_it in (flash_ext.attention, flash_ext.explain):
        with pytest.raises(ERRORS, match="flash_ext: window must be a pair of ints"):
            call_it(q, k, v, window=window)


@pytest.mark.parametrize("name", ("q", "k", "v", "alibi_slopes", "bias", "sink"))
def test_what_is_no_tensor(name: str, device: str) -> None:
    a = good(device)
    tensors = {n: a[n] for n in "qkv"}
    found = {
        "a value of type ndarray": torch.zeros(4).numpy(),
        "a value of type list": [0.0] * 4,
        "a nested tensor": torch.nested.nested_tensor(
            [torch.zeros(n, 4, 32) for n in (3, 5)], layout=torch.jagged, device=device
        ),
    }
    if name in tensors:
        found["None"] = None
    for got, bad in found.items():
        for options in ({}, {"dropout_p": 0.1, "sink": torch.zeros(4, device=device)}):
            with pytest.raises(ERRORS, match=f"flash_ext: {name} must be a .*tensor.*, got {got}$"):
                flash_ext.attention(**tensors | options | {name: bad})
        with pytest.raises(ERRORS, match=f"flash_ext: {name} must be a .*tensor.*, got {got}$"):
            flash_ext.explain(**tensors | {name: bad})


def test_a_named_variant_runs_or_raises(device: str) -> None:
    """`check` returns the indices of what fwd and bwd run."""
    a = good(device)
    for index, variant in enumerate(VARIANTS):
        if reason := device_unsupported_reason(variant, device):
            with pytest.raises(ERRORS, match=reason):
                call("check", a | {"variant": variant})
        else:
            assert call("check", a | {"variant": variant}) == (index, index, "", "")
    assert VARIANTS[call("check", a)[0]] == fastest(Problem(head_dim=32), device)


@pytest.mark.parametrize(
    "name", ("k", "v", "sink", "bias", "alibi_slopes", "seqused_k", "rng_state", "cu_seqlens_q")
)
def test_a_meta_tensor_among_others_is_refused(name: str, device: str) -> None:
    """The dispatcher would bring the call to the fake kernel, which computes nothing."""
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    packed = name == "cu_seqlens_q"
    shape = (10, 2, 16) if packed else (1, 10, 2, 16)
    tensors = {x: torch.randn(shape, **make) for x in "qkv"}
    options = {
        "sink": torch.zeros(2),
        "bias": torch.zeros(1, 2, 10, 10),
        "alibi_slopes": torch.zeros(2),
        "seqused_k": torch.full((1,), 5, dtype=torch.int32),
        "rng_state": torch.zeros(2, dtype=torch.int64),
    }
    options = {x: y.to("meta") for x, y in options.items() if x == name}
    if name == "rng_state":
        options["dropout_p"] = 0.5
    offsets = torch.tensor([0, 10], dtype=torch.int32, device=device)
    if packed:
        options |= {"cu_seqlens_q": offsets.to("meta"), "cu_seqlens_k": offsets}
    elif name in tensors:
        tensors[name] = tensors[name].detach().to("meta")
    call = flash_ext.attention_varlen if packed else flash_ext.attention
    for window in ((-1, -1), (3, 3)):
        with pytest.raises((ValueError, RuntimeError), match=f"{name} must be on q's device"):
            call(*tensors.values(), **options, window=window)


@pytest.mark.gpu
def test_out_of_memory_is_what_torch_raises() -> None:
    """Forward and backward, for `except torch.OutOfMemoryError` and batch-size finders."""
    q = torch.randn(1, 4096, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = flash_ext.attention(q, q, q)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(q.device).total_memory
    try:
        reserved = torch.cuda.memory_reserved() + (1 << 20)
        torch.cuda.set_per_process_memory_fraction(reserved / total)
        held = []  # what the allocator has left over from other tests
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
        for call in (lambda: flash_ext.attention(q, q, q), lambda: out.sum().backward()):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
