"""The autograd node in C++ (`flash_ext/_node.py`): which calls have it, and that it is as good.

Would catch an op of ATen that has changed, gradients unlike those of `bwd`, a mode that no longer
sees flash_ext's ops, an lse without a gradient, a checkpoint that gets k for q where it recomputes
the other node, and memory that a call does not give back.

On the CPU ATen's op has no kernels: for a test's time it gets those of `fwd` and `bwd`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_testing import assert_bitwise_equal
from test_pytorch import BWD, FWD, Record
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import _node, ops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's, anomaly mode's

IN_CPP, IN_PYTHON = "ScaledDotProductFusedAttentionOverrideableBackward0", "_ForwardBackward"


def _fwd(q, k, v, attn_bias=None, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    out, lse = FWD(q, k, v, causal=is_causal, scale=scale)
    return out, lse, None, None, 0, 0, None, None, None


def _bwd(dout, q, k, v, attn_bias, mask, out, lse, *rest, scale=None):
    *_, is_causal, _, _ = rest
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    return *BWD(dout, None, q, k, v, out, lse, causal=is_causal, scale=scale)[:3], None


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cuda":
        yield
        return
    library = Library("aten", "IMPL")
    library.impl(_node.NAME, _fwd, "CPU")
    library.impl(f"{_node.NAME}_backward", _bwd, "CPU")
    monkeypatch.setattr(ops, "_aten_fwd", _node.find())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    _node.register()
    yield
    library._destroy()


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
    """Else flash_ext does without, at a cost: see whether _node.py and bindings.cpp can follow."""
    assert _node.find() is not None
    with monkeypatch.context() as patch:
        patch.setattr(_node, "fake_kernels", None)
        assert _node.find() is None
    monkeypatch.setattr(_node, "_BACKWARD_SCHEMA", "another")
    assert _node.find() is None
    monkeypatch.setattr(_node, "NAME", "no_such_op")
    assert _node.find() is None


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


OPTIONS = {
    "lse": {"return_lse": True},
    "window": {"window": (9, 9)},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.5},
    "deterministic": {"deterministic": True},
    "variant": {"variant": "fa2"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_calls_with_options_do_not(case: str, device: str) -> None:
    result = flash_ext.attention(*leaves(device), **OPTIONS[case])
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
    "deterministic algorithms": deterministic_algorithms,
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


def test_kernels_of_others_are_left_alone() -> None:
    """They have another layout, and torch's own fake kernel."""
    _node.register()
    backward = getattr(torch.ops.aten, f"{_node.NAME}_backward")

    def strides() -> list:
        with FakeTensorMode():
            q, k, v, out = torch.empty(4, 2, 5, 3, 8).transpose(2, 3).unbind()
            lse, none = torch.empty(2, 3, 5), torch.empty(0)
            given = out, q, k, v, none, [True, True, True, False], out, lse, none, none, 5, 5
            try:
                found = backward(*given, 0.0, False, none, none)
            except NotImplementedError:  # torch 2.11
                return []
            return [x.stride() for x in found[:3]]

    with FlopCounterMode(display=False) as counter:
        found = strides()
    assert counter.get_total_flops() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(op_implementations_dict, backward.default)
        assert found == strides()


# --- That it is as good ---


@pytest.mark.parametrize("options", ({}, {"causal": True, "scale": 0.3}), ids=str)
@pytest.mark.parametrize("dim", (64, 59))  # on Hopper GPUs fa3 and fa2
@pytest.mark.parametrize("heads", (4, 2))
def test_results_are_those_of_the_ops(heads: int, dim: int, options: dict, device: str) -> None:
    tensors = leaves(device, heads=heads, dim=dim, keys=230)
    out = flash_ext.attention(*tensors, **options)
    assert node_of(out) == IN_CPP
    assert_bitwise_equal(out.detach(), FWD(*(x.detach() for x in tensors), **options)[0])
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, dout)
    assert_same_gradients(found, gradients(tensors, dout, **options))


def test_gradients_of_any_layout(device: str) -> None:
    """Of the leaves and of dout; a sum's dout is one number, expanded."""
    tensors = [x.detach().transpose(1, 2).contiguous() for x in leaves(device)]
    tensors = [x.transpose(1, 2).requires_grad_() for x in tensors]
    out = flash_ext.attention(*tensors)
    one = torch.ones((), device=device, dtype=out.dtype).expand(out.shape)
    columns = torch.randn_like(out).transpose(1, 3).contiguous().transpose(1, 3)
    for dout in (one, columns):
        found = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        assert_same_gradients(found, gradients(tensors, dout.contiguous()))


@pytest.mark.parametrize("sizes", ({"batch": 0}, {"rows": 0}, {"keys": 0}), ids=str)
def test_empty_tensors(sizes: dict, device: str) -> None:
    tensors = leaves(device, **sizes)
    out = flash_ext.attention(*tensors)
    assert not out.any()
    for x, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("bad", ("dimensions", "types", "strides", "heads"))
def test_errors_are_those_of_the_op(bad: str, device: str) -> None:
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
    assert messages[0] == messages[1]


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


@pytest.mark.parametrize("where", ("forward", "backward"))
def test_a_checkpoint_recomputes_the_other_node(where: str, device: str) -> None:
    """A mode is on in one of the passes alone, so its node is in Python. q and k look alike."""
    tensors = leaves(device, heads=4)
    dout = torch.randn_like(tensors[0])
    with Record() if where == "forward" else contextlib.nullcontext():
        out = checkpoint(flash_ext.attention, *tensors, use_reentrant=False)
    with Record() if where == "backward" else contextlib.nullcontext():
        out.backward(dout)
    assert_same_gradients([x.grad for x in tensors], gradients(tensors, dout))


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


def test_compiled_autograd(device: str) -> None:
    """The compiler's idea of the gradients' strides is that of the kernels."""
    torch._dynamo.reset()
    tensors = [x.detach().transpose(1, 2).contiguous() for x in leaves(device)]
    tensors = [x.transpose(1, 2).requires_grad_() for x in tensors]
    out = flash_ext.attention(*tensors)
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
