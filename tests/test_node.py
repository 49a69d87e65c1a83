"""The autograd node in C++ (`flash_ext/ops/node.py`): which calls have it, and that it is as good.

Would catch an op of ATen that has changed, gradients unlike those of `bwd`, a mode that no longer
sees flash_ext's ops, an lse without a gradient, a checkpoint that gets k for q where it recomputes
the other node, and memory that a call does not give back.

On the CPU ATen's op has no kernels: it gets csrc/api/node.cpp, compiled for the CPU kernels of
`fwd` and `bwd`, and for a test's time CPU tensors pass for CUDA ones.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_testing import assert_bitwise_equal
from compiled import load_host_side
from test_pytorch import BWD, FWD, Record
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_ext.ops import call, node

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's, anomaly mode's

IN_CPP, IN_PYTHON = "ScaledDotProductFusedAttentionOverrideableBackward0", "_ForwardBackward"


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cuda":
        yield
        return
    load_host_side()
    monkeypatch.setattr(call, "node_forward", node.find("CPU"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    yield


def leaves(
    device: str, batch: int = 2, rows: int = 200, keys: int = 200, heads: int = 2, dim: int = 64
) -> list[torch.Tensor]:
    """q, k, v of 4 and `heads` heads, in a type that the device has kernels for."""
    torch.manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    shapes = (rows, 4), (keys, heads), (keys, heads)
    return [
        torch.randn(batch, *shape, dim, device=device, dtype=dtype, requires_grad=True)
        for shape in shapes
    ]


def node_of(out: torch.Tensor) -> str:
    return out.grad_fn.name()


def assert_same_gradients(actual, expected) -> None:
    """Of q, k and v. dq of the GPU's kernels is a sum in any order."""
    (dq, *dkv), (expected_dq, *expected_dkv) = actual, expected
    torch.testing.assert_close(dq, expected_dq)
    for a, e in zip(dkv, expected_dkv, strict=True):
        assert_bitwise_equal(a, e)


def gradients(tensors, dout, **options) -> tuple[torch.Tensor, ...]:
    """Of the ops themselves."""
    tensors = [x.detach() for x in tensors]
    return BWD(dout, None, *tensors, *FWD(*tensors, **options), **options)[:3]


# --- Which calls have it ---


def test_torch_has_the_op_as_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise flash_ext works without it, slower. Do node.py and attention.cpp follow?"""
    assert node.find() is not None
    monkeypatch.setattr(node, "_BACKWARD_SCHEMA", "another")
    assert node.find() is None
    monkeypatch.setattr(node, "NAME", "no_such_op")
    assert node.find() is None


@pytest.mark.parametrize("wanted", ("qkv", "q", "k", "v"))
def test_plain_calls_have_it(wanted: str, device: str) -> None:
    tensors = leaves(device)
    for name, x in zip("qkv", tensors, strict=True):
        x.requires_grad_(name in wanted)
    for options in ({}, {"causal": True}, {"scale": 0.3}, {"causal": True, "scale": 0.3}):
        assert node_of(flash_ext.attention(*tensors, **options)) == IN_CPP
    with torch.autocast(device, torch.bfloat16):
        out = flash_ext.attention(*(x.detach().float().requires_grad_() for x in tensors))
    assert node_of(out) == IN_CPP and out.dtype == torch.bfloat16


def options_of(case: str, device: str, dtype: torch.dtype) -> dict:
    """Options of a call of leaves() with two sequences, by name."""
    numbers = {
        "plain": {},
        "causal, scale": {"causal": True, "scale": 0.3},
        "window": {"window": (9, 3)},
        "wide window": {"window": (10**12, 7)},
        "softcap": {"softcap": 2.7},
        "variant": {"variant": "fa1"},
        "deterministic": {"deterministic": True},
        "all numbers": {
            "scale": -0.3, "window": (0, 40), "softcap": 0.1, "variant": "fa2",
            "deterministic": True,
        },
    }  # fmt: skip
    if case in numbers:
        return numbers[case]
    torch.manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {
        "alibi_slopes": torch.rand(2, 4, device=device, dtype=wide),
        "bias": torch.randn(1, 4, 1, 200, device=device, dtype=wide, requires_grad=True),
        "seqused_k": torch.tensor([150, 0], dtype=torch.int32, device=device),
    }
    if case == "all":
        return tensors | {"causal": True, "variant": "fa1", "softcap": 3.0}
    if case == "mask":
        return {"bias": tensors["bias"].detach() > 0}
    return {case: tensors[case]}


CASES = (
    *("plain", "causal, scale", "window", "wide window", "softcap", "variant", "deterministic"),
    *("all numbers", "alibi_slopes", "bias", "mask", "seqused_k", "all"),
)

IN_PYTHON_ONLY = {
    "lse": lambda like: {"return_lse": True},
    "dropout": lambda like: {"dropout_p": 0.5},
    "sink": lambda like: {"sink": like.new_zeros(4)},
}


@pytest.mark.parametrize("case", IN_PYTHON_ONLY)
def test_calls_that_have_it_in_python(case: str, device: str) -> None:
    tensors = leaves(device)
    like = tensors[0].detach()
    like = like if device == "cpu" else like.float()
    result = flash_ext.attention(*tensors, **IN_PYTHON_ONLY[case](like))
    for x in result if isinstance(result, tuple) else (result,):
        assert node_of(x) == IN_PYTHON


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "a dispatch mode": Record,
    "a function mode": lambda: torch.device("cpu"),
    "dual numbers": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_calls_that_something_else_is_to_see_do_not(context: str, device: str) -> None:
    tensors = leaves(device)
    with CONTEXTS[context]():
        assert node_of(flash_ext.attention(*tensors)) == IN_PYTHON
        with torch.no_grad():
            assert flash_ext.attention(*tensors).grad_fn is None


def test_modes_see_the_ops(device: str) -> None:
    with Record() as record:
        flash_ext.attention(*leaves(device)).sum().backward()
    assert record.count(FWD) == record.count(BWD) == 1


# --- That it is as good ---


def assert_as_in_python(attend: Callable, wanted: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """out and the gradients of `wanted`, against the node in Python."""
    out = attend()
    assert node_of(out) == IN_CPP
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, dout)
    monkeypatch.setattr(call, "node_forward", None)
    expected = attend()
    assert node_of(expected) == IN_PYTHON
    assert_bitwise_equal(out.detach(), expected.detach())
    expected = torch.autograd.grad(expected, wanted, dout)
    assert_same_gradients(found[:3], expected[:3])
    torch.testing.assert_close(found[3:], expected[3:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dim", (64, 59))  # on Hopper GPUs fa3 and fa2
@pytest.mark.parametrize("heads", (4, 2))
def test_results_are_those_in_python(
    heads: int, dim: int, case: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves(device, heads=heads, dim=dim)
    options = options_of(case, device, tensors[0].dtype)
    wanted = [*tensors, *(x for x in options.values() if getattr(x, "requires_grad", False))]
    assert_as_in_python(lambda: flash_ext.attention(*tensors, **options), wanted, monkeypatch)


@pytest.mark.parametrize("alike", (True, False), ids=("one cu_seqlens", "two"))
@pytest.mark.parametrize("case", CASES)
def test_packed_sequences(
    case: str, alike: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [x.detach().flatten(0, 1).requires_grad_() for x in leaves(device)]
    offsets = [[0, 180, 400], [0, 180, 400] if alike else [0, 200, 400]]
    q, k = (torch.tensor(x, dtype=torch.int32, device=device) for x in offsets)
    options = options_of(case, device, tensors[0].dtype)
    wanted = [*tensors, *(x for x in options.values() if getattr(x, "requires_grad", False))]

    def attend() -> torch.Tensor:
        return flash_ext.attention_varlen(*tensors, q, q if alike else k, **options)

    assert_as_in_python(attend, wanted, monkeypatch)


@pytest.mark.parametrize("packed", (False, True))
def test_drop_in(packed: bool, device: str) -> None:
    tensors = leaves(device)
    if packed:
        offsets = torch.tensor([0, 200, 400], dtype=torch.int32, device=device)
        tensors = [x.detach().flatten(0, 1).requires_grad_() for x in tensors]
        out = flash_attn_varlen_func(*tensors, offsets, offsets, 200, 200, window_size=(7, 0))
    else:
        out = flash_attn_func(*tensors, window_size=(7, 0))
    assert node_of(out) == IN_CPP


def test_options_are_those_of_their_own_call(device: str) -> None:
    """A call that fails leaves its options to none; nor do threads and later calls mix them."""
    q, k, v = leaves(device)
    with pytest.raises((ValueError, RuntimeError), match="flash_ext: "):
        flash_ext.attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v, window=(1, 1))
    expected = FWD(q, k, v)[0].detach()
    assert_bitwise_equal(flash_ext.attention(q, k, v).detach(), expected)
    windows = [(i, 0) for i in range(40)]
    expected = [FWD(q, k, v, window_left=i, window_right=0)[0].detach() for i, _ in windows]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda x: flash_ext.attention(q, k, v, window=x).detach(), windows)
        for x, y in zip(found, expected, strict=True):
            assert_bitwise_equal(x, y)
    with pytest.raises(RuntimeError, match="no dropout_p here"):
        getattr(torch.ops.aten, node.NAME)(q, k, v, dropout_p=0.5)


def test_graph_that_is_kept(device: str) -> None:
    tensors = leaves(device)
    out = flash_ext.attention(*tensors, window=(9, 3))
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    assert_same_gradients(torch.autograd.grad(out, tensors, dout), first)


@pytest.mark.parametrize("case", ("lse", "dropout", "sink"))
def test_the_node_in_python_lets_go_after_its_backward(case: str, device: str) -> None:
    """Of what it saved, though out is still there."""
    q, k, v = leaves(device)
    like = q.detach() if device == "cpu" else q.detach().float()
    key = k * 1
    result = flash_ext.attention(q, key, v, **IN_PYTHON_ONLY[case](like))
    out = result[0] if isinstance(result, tuple) else result
    out.sum().backward()
    saved = weakref.ref(key)
    del key
    assert saved() is None


@pytest.mark.parametrize("options", ({}, {"window": (9, 3)}), ids=str)
def test_gradient_of_a_gradient(options: dict, device: str) -> None:
    """The gradient itself is fine; its own is refused as the node in Python refuses it."""
    tensors = leaves(device)
    out = flash_ext.attention(*tensors, **options)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    found = torch.autograd.grad(out, tensors, dout, create_graph=True)
    assert_same_gradients([x.detach() for x in found], expected)
    with pytest.raises(RuntimeError, match="flash_ext: the gradient of a gradient is not supp"):
        torch.autograd.grad(found[0].sum(), tensors)


def test_batched_gradients(device: str) -> None:
    tensors = leaves(device)
    out = flash_ext.attention(*tensors, window=(9, 3))
    douts = torch.randn(3, *out.shape, device=device, dtype=out.dtype)
    found = torch.autograd.grad(out, tensors, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        torch.testing.assert_close([x[i] for x in found], list(expected))


def test_gradients_of_any_layout(device: str) -> None:
    """Of the leaves and of dout; a sum's dout is one number, expanded, and zeros have no memory."""
    tensors = [x.detach().transpose(1, 2).contiguous() for x in leaves(device)]
    tensors = [x.transpose(1, 2).requires_grad_() for x in tensors]
    out = flash_ext.attention(*tensors)
    one = torch.ones((), device=device, dtype=out.dtype).expand(out.shape)
    columns = torch.randn_like(out).transpose(1, 3).contiguous().transpose(1, 3)
    none = torch._efficientzerotensor(out.shape, device=device, dtype=out.dtype)
    for dout in (one, columns, none):
        found = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        assert_same_gradients(found, gradients(tensors, dout.clone().contiguous()))


@pytest.mark.parametrize("sizes", ({"batch": 0}, {"rows": 0}, {"keys": 0}), ids=str)
def test_empty_tensors(sizes: dict, device: str) -> None:
    tensors = leaves(device, **sizes)
    out = flash_ext.attention(*tensors)
    assert not out.any()
    for x, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("options", ("", "causal", "q_descale", "out_dtype"))
def test_fp8_is_refused(options: str, device: str) -> None:
    """By the node in C++, and with options that only Python's has by that one."""
    q, k, v = (x.detach().to(torch.float8_e4m3fn).requires_grad_() for x in leaves(device))
    values = {
        "causal": True,
        "q_descale": torch.ones((), device=device),
        "out_dtype": torch.float16,
    }
    given = {options: values[options]} if options else {}
    with pytest.raises(RuntimeError, match="no variant has a backward for 8-bit inputs"):
        flash_ext.attention(q, k, v, **given)


@pytest.mark.parametrize("option", ("q_descale", "k_descale", "v_descale", "out_dtype"))
def test_options_of_fp8_come_to_cpp_by_their_names(option: str, device: str) -> None:
    if device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("in the tests' way to the CPU kernels torch before 2.13 loses the messages")
    announce = getattr(torch.ops.flash_ext, f"node_options_{device.upper()}")
    value = torch.float16 if option == "out_dtype" else torch.ones(2, 2, device=device)
    number = announce(**{option: value})
    with pytest.raises((ValueError, RuntimeError), match=f"flash_ext: {option} must be None"):
        getattr(torch.ops.aten, node.NAME)(*leaves(device), dropout_p=number)


@pytest.mark.parametrize("rows", (99, 98))
def test_out_of_memory_is_what_torch_raises(rows: int, device: str) -> None:
    """By C++ itself, and through autograd, in calls for which tests/native/host.cpp has none."""
    if device == "cuda":
        pytest.skip("tests/test_errors.py lets the GPU's run out")
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. 1 of 2 GiB$"):
        flash_ext.attention(*leaves(device, rows=rows)).sum().backward()


@pytest.mark.parametrize("bad", ("dimensions", "types", "strides", "heads"))
def test_errors_are_those_of_the_op(bad: str, device: str) -> None:
    if device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("in the tests' way to the CPU kernels torch before 2.13 loses the messages")
    q, k, v = leaves(device)
    if bad == "dimensions":
        q = q[0]
    if bad == "types":
        k = k.float()
    if bad == "strides":
        v = v.transpose(1, 3).contiguous().transpose(1, 3)
    if bad == "heads":
        q = q[:, :, :3]
    messages = []
    for attend in (flash_ext.attention, FWD):
        with pytest.raises((ValueError, RuntimeError), match="flash_ext: ") as error:
            attend(q, k, v)
        messages.append(str(error.value))
    assert messages[1] in messages[0]  # on the CPU it has come through Python


@pytest.mark.parametrize(
    "within",
    (torch.autograd.graph.save_on_cpu, torch.autograd.detect_anomaly),
    ids=("saved on the CPU", "anomaly mode"),
)
def test_gradients_within(within: Callable, device: str) -> None:
    tensors = leaves(device)
    dout = torch.randn_like(tensors[0])
    with within():
        found = torch.autograd.grad(flash_ext.attention(*tensors), tensors, dout)
    assert_same_gradients(found, gradients(tensors, dout))


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(use_reentrant: bool, device: str) -> None:
    tensors = leaves(device)
    dout = torch.randn_like(tensors[0])
    out = checkpoint(flash_ext.attention, *tensors, use_reentrant=use_reentrant)
    out.backward(dout)
    assert_same_gradients([x.grad for x in tensors], gradients(tensors, dout))


@pytest.mark.parametrize("case", ("plain", "all"))
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_a_checkpoint_recomputes_the_other_node(where: str, case: str, device: str) -> None:
    """A mode is on in only one of the passes, so its node is in Python. q and k look alike."""
    tensors = leaves(device, heads=4)
    dout = torch.randn_like(tensors[0])
    options = options_of(case, device, tensors[0].dtype)
    expected = torch.autograd.grad(flash_ext.attention(*tensors, **options), tensors, dout)
    with Record() if where == "forward" else contextlib.nullcontext():
        out = checkpoint(flash_ext.attention, *tensors, use_reentrant=False, **options)
    with Record() if where == "backward" else contextlib.nullcontext():
        out.backward(dout)
    assert_same_gradients([x.grad for x in tensors], expected)


def test_inputs_that_changed_are_refused(device: str) -> None:
    tensors = leaves(device)
    out = flash_ext.attention(*tensors)
    with torch.no_grad():
        tensors[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_flops_of_the_backward_pass_alone(device: str) -> None:
    q, k, v = leaves(device)
    out = flash_ext.attention(q, k, v)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * q.shape[0] * q.shape[2] * 200 * 200 * 64
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
    offsets = torch.tensor([0, 100, 400], dtype=torch.int32, device=device)
    out = flash_ext.attention_varlen(q, k, v, offsets, offsets)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * q.shape[1] * (100 * 100 + 300 * 300) * 64


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("options", ({}, {"window": (9, 3), "softcap": 2.0}), ids=str)
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote torch's folder")
def test_compiled_autograd(options: dict, device: str) -> None:
    """The compiler's idea of the gradients' strides is that of the kernels."""
    torch._dynamo.reset()
    tensors = [x.detach().transpose(1, 2).contiguous() for x in leaves(device)]
    tensors = [x.transpose(1, 2).requires_grad_() for x in tensors]
    out = flash_ext.attention(*tensors, **options)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(lambda x: torch.compile(x, fullgraph=True)):
        out.backward(dout)
    assert_same_gradients([x.grad for x in tensors], expected)


# --- CUDA: graphs and memory ---


def step(tensors, dout) -> tuple[torch.Tensor, ...]:
    out = flash_ext.attention(*tensors, causal=True)
    return out.detach(), *torch.autograd.grad(out, tensors, dout)


@pytest.mark.gpu
def test_graph_replay() -> None:
    tensors = leaves("cuda")
    dout = torch.randn_like(tensors[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(tensors, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(tensors, dout)
    for _ in range(2):
        with torch.no_grad():
            for x in (*tensors, dout):
                x.normal_()
        graph.replay()
        out, *expected = step(tensors, dout)
        assert_bitwise_equal(found[0], out)
        assert_same_gradients(found[1:], expected)


def lasting_memory() -> int:
    """Bytes that stay allocated: a thread of autograd's lets go of the last gradients a little
    after the call that returned them."""
    readings = []
    for _ in range(20):
        time.sleep(0.01)
        readings.append(torch.cuda.memory_allocated())
    return min(readings)


@pytest.mark.gpu
def test_memory_is_given_back() -> None:
    tensors = leaves("cuda")
    dout = torch.randn_like(tensors[0])
    step(tensors, dout)
    gc.collect()  # what other tests have left
    before = lasting_memory()
    for _ in range(100):
        step(tensors, dout)
    assert lasting_memory() == before
