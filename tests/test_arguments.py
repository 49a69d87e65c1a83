"""Numbers and constants in every form that callers give them, at every function that takes them.

Would catch a gradient that is lost in silence (SDPA raises), a number that a tensor holds and that
is no longer taken, a pair of integers that is refused for its type, and a pair of others that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import flash_ext
from flash_ext import flash_attn as fa2
from flash_ext import flash_attn_interface as fa3

Tensor = torch.Tensor
Call = Callable[..., Any]

HEADS, ROWS = 4, 6


def inputs(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, ROWS, HEADS, 16, dtype=dtype) for _ in range(3)]


def offsets() -> Tensor:
    return torch.arange(0, 2 * ROWS + 1, ROWS, dtype=torch.int32)


def packed(function: Call, *longest: int) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        tensors = (x.flatten(0, 1) for x in (q, k, v))
        return function(*tensors, offsets(), offsets(), *longest, **options)

    return call


def stacked(function: Call) -> Call:
    return lambda q, k, v, **options: function(torch.stack((q, k, v), 2), **options)


NUMBERS = ("scale", "softcap", "dropout_p")
OF_FA2 = ("softmax_scale", "softcap", "dropout_p")
OF_FA3 = ("softmax_scale", "softcap")
CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "attention": (flash_ext.attention, NUMBERS),
    "attention_varlen": (packed(flash_ext.attention_varlen), NUMBERS),
    "explain": (flash_ext.explain, NUMBERS),
    "fp8": (flash_ext.fp8.attention, NUMBERS[:1]),
    "fp8 varlen": (packed(flash_ext.fp8.attention_varlen), NUMBERS[:1]),
    "fa2": (fa2.flash_attn_func, OF_FA2),
    "fa2 packed": (stacked(fa2.flash_attn_qkvpacked_func), OF_FA2),
    "fa2 varlen": (packed(fa2.flash_attn_varlen_func, ROWS, ROWS), OF_FA2),
    "fa3": (fa3.flash_attn_func, OF_FA3),
    "fa3 packed": (stacked(fa3.flash_attn_qkvpacked_func), OF_FA3),
    "fa3 varlen": (packed(fa3.flash_attn_varlen_func, ROWS, ROWS), OF_FA3),
}
ARGUMENTS = [(name, number) for name, (_, numbers) in CALLS.items() for number in numbers]
LOST = "must be a constant, since it gets no gradient .* got a tensor that requires one"


# --- Gradients ---


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_that_wants_a_gradient(name: str, argument: str, shape: tuple[int, ...]) -> None:
    call, _ = CALLS[name]
    number = torch.full(shape, 0.5, requires_grad=True)
    for q in (inputs()[0], inputs()[0].requires_grad_()):
        with pytest.raises(ValueError, match=f"flash_ext: {argument} {LOST}"):
            call(q, *inputs()[1:], **{argument: number})
    call(*inputs(), **{argument: number.detach()})
    with torch.no_grad():  # where nothing gets a gradient
        call(*inputs(), **{argument: number})


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_number_in_a_tensor(name: str, argument: str) -> None:
    call, _ = CALLS[name]
    results = []
    for number in (0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float64(0.5)):
        torch.manual_seed(1)
        results.append(call(*inputs(), **{argument: number}))
    for x in results[1:]:
        assert torch.equal(x, results[0]) if isinstance(x, Tensor) else x == results[0]
    with pytest.raises(ValueError, match=f"{argument} must be a number, got a tensor of shape"):
        call(*inputs(), **{argument: torch.ones(2)})


@pytest.mark.parametrize("name", ("attention", "attention_varlen", "fa2"))
def test_slopes_that_want_a_gradient(name: str) -> None:
    call, _ = CALLS[name]
    slopes = torch.rand(HEADS, requires_grad=True)
    with pytest.raises(ValueError, match=f"flash_ext: alibi_slopes {LOST}"):
        call(*inputs(), alibi_slopes=slopes)
    call(*inputs(), alibi_slopes=slopes.detach())


@pytest.mark.parametrize("name", ("q_descale", "k_descale", "v_descale"))
@pytest.mark.parametrize("call", [flash_ext.attention, fa3.flash_attn_func])
def test_descales_that_want_a_gradient(name: str, call: Call) -> None:
    tensors = [x.to(torch.float8_e4m3fn) for x in inputs()]
    with pytest.raises(ValueError, match=f"flash_ext: {name} {LOST}"):
        call(*tensors, **{name: torch.ones(2, HEADS, requires_grad=True)})


def test_constants_of_the_ops_themselves() -> None:
    q, k, v = inputs()
    fwd, bwd = torch.ops.flash_ext.fwd, torch.ops.flash_ext.bwd
    slopes = torch.rand(HEADS, requires_grad=True)
    with pytest.raises(ValueError, match=f"alibi_slopes {LOST}"):
        fwd(q, k, v, alibi_slopes=slopes)
    out, lse = fwd(q, k, v)
    sink = torch.zeros(HEADS, requires_grad=True)
    dq, *_ = bwd(out, None, q, k, v, out, lse, sink=sink)
    with pytest.raises(RuntimeError, match="gradient of a gradient is not supported"):
        dq.sum().backward()


TRANSFORMS: dict[str, Call] = {
    "grad": torch.func.grad,
    "jacfwd": torch.func.jacfwd,
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.vmap(lambda i: f(x) * i)(torch.ones(2)).sum()
    ),
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(x.expand(2, *x.shape)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("argument", ("scale", "softcap", "alibi_slopes"))
def test_transforms(argument: str, transform: str) -> None:
    value = torch.rand(HEADS) if argument == "alibi_slopes" else torch.tensor(0.5)
    tensors = inputs(torch.float32)

    def loss(x: Tensor) -> Tensor:
        return flash_ext.attention(*tensors, **{argument: x}).sum()

    with pytest.raises(ValueError, match=f"{argument} {LOST}"):
        TRANSFORMS[transform](loss)(value)


@pytest.mark.parametrize("argument", ("scale", "alibi_slopes"))
def test_tangents(argument: str) -> None:
    value = torch.rand(HEADS) if argument == "alibi_slopes" else torch.tensor(0.5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(ValueError, match=f"{argument} {LOST}"):
            flash_ext.attention(*inputs(), **{argument: dual})
        flash_ext.attention(*inputs(), **{argument: value})


# --- Pairs ---

PAIRS = {
    "tuple": (2, 1),
    "list": [2, 1],
    "tensor": torch.tensor([2, 1]),
    "narrow tensor": torch.tensor([2, 1], dtype=torch.int8),
    "tensors": (torch.tensor(2), torch.tensor([1])),
    "array": np.array([2, 1]),
    "numbers of numpy": (np.int32(2), np.int64(1)),
    "range": range(2, 0, -1),
}
NO_PAIRS = {
    "number": 2,
    "nothing": None,
    "one": (2,),
    "three": (2, 1, 0),
    "floats": (2.0, 1.0),
    "tensor of floats": torch.tensor([2.0, 1.0]),
    "array of floats": np.array([2.0, 1.0]),
    "matrix": torch.tensor([[2, 1], [2, 1]]),
    "scalar": torch.tensor(2),
    "text": "21",
    "a side of none": (2, None),
    "set": {2, 1},
    "infinity": (2, math.inf),
}


def window_of(name: str) -> str:
    return "window_size" if name.startswith("fa") else "window"


@pytest.mark.parametrize("name", CALLS)
def test_pairs(name: str) -> None:
    call, _ = CALLS[name]
    window = window_of(name)
    expected = call(*inputs(), **{window: (2, 1)})
    for pair in PAIRS.values():
        found = call(*inputs(), **{window: pair})
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    for unlimited in ([-1, -1], torch.tensor([-1, -1]), np.array([-1, -1])):
        found, plain = call(*inputs(), **{window: unlimited}), call(*inputs())
        assert torch.equal(found, plain) if isinstance(found, Tensor) else found == plain


@pytest.mark.parametrize("pair", NO_PAIRS.values(), ids=NO_PAIRS)
@pytest.mark.parametrize("name", CALLS)
def test_no_pairs(name: str, pair: Any) -> None:
    call, _ = CALLS[name]
    with pytest.raises(ValueError, match=f"flash_ext: {window_of(name)} must be a pair of ints"):
        call(*inputs(), **{window_of(name): pair})


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("module", (fa2, fa3))
def test_pairs_of_a_cache(module: Any, pair: Any) -> None:
    q, k, v = inputs()
    expected = module.flash_attn_with_kvcache(q, k, v, window_size=(2, 1))
    assert torch.equal(module.flash_attn_with_kvcache(q, k, v, window_size=pair), expected)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_pairs_of_the_reference(pair: Any) -> None:
    tensors = inputs(torch.float32)
    expected = flash_ext.reference.attention(*tensors, window=(2, 1))
    for x, y in zip(flash_ext.reference.attention(*tensors, window=pair), expected, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_context_parallelism(one_rank: None) -> None:
    from flash_ext.integrations import distributed

    expected = distributed.attention(*inputs(), window=(2, 1))
    for pair in PAIRS.values():
        assert torch.equal(distributed.attention(*inputs(), window=pair), expected)
    for pair in NO_PAIRS.values():
        with pytest.raises(ValueError, match="flash_ext: window must be a pair of ints"):
            distributed.attention(*inputs(), window=pair)
    for name, shape in (("scale", ()), ("softcap", ()), ("alibi_slopes", (HEADS,))):
        with pytest.raises(ValueError, match=f"flash_ext: {name} {LOST}"):
            x = torch.ones(shape, requires_grad=True)
            distributed.attention(*inputs(), causal=True, **{name: x})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", [(2, 1), [2, 1]])
def test_pairs_are_compiled(pair: Any) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, side: int) -> Tensor:
        return flash_ext.attention(q, k, v, window=type(pair)((pair[0], side)))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for side in (1, 2, 3):
        torch.testing.assert_close(compiled(*inputs(), side), run(*inputs(), side))
