"""flash_ext under SDPA: what is registered and undone, the translation, the way back to torch.

Would catch an override or a cuDNN switch that outlives restore(), an import that activates, scores
scaled or masked otherwise than aten's ops are, results with other strides than theirs, calls that
flash_ext does not support and yet takes, and Python on the way to those that it does.

On the CPU, where torch has no kernels of these ops, csrc/api/sdpa.cpp is compiled for flash_ext's
CPU kernels and overrides stand-ins for torch's.
"""

from __future__ import annotations

import inspect
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiled import load_host_side
from forked import run_python
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flash_ext
from flash_ext import ops, tiled
from flash_ext.integrations import sdpa
from flash_ext.ops import torch_private

FORWARD, BACKWARD = (f"_scaled_dot_product_flash_attention{x}" for x in ("", "_backward"))
EFFICIENT, EFFICIENT_BACKWARD = (
    f"_scaled_dot_product_efficient_attention{x}" for x in ("", "_backward")
)
FLASH, FLASH_OUT, FLASH_BACKWARD = (
    f"_flash_attention_{x}" for x in ("forward", "forward_no_dropout_inplace", "backward")
)
NAMES = tuple(sdpa._schemas())
SHAPES = {"bhsd": (2, 4, 6, 8), "bshd": (2, 6, 4, 8)}


def aten(name: str):
    return getattr(torch.ops.aten, name).default


class Original:
    """In place of a kernel of torch: records how it is called, and returns tensors of nothing."""

    def __init__(self, name: str) -> None:
        self.returns = [str(x.type) for x in aten(name)._schema.returns]
        self.calls: list[tuple] = []

    def call_boxed(self, keys, *arguments, **keywords):
        self.calls.append((arguments, keywords))
        results = tuple(7 if x == "int" else torch.full((1,), 7.0) for x in self.returns)
        return results if len(results) > 1 else results[0]


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Original]]:
    """As if the CPU were the GPU, with kernels of SDPA in torch and of flash_ext."""
    load_host_side()
    found = {name: Original(name) for name in NAMES}
    monkeypatch.setattr(sdpa, "_DEVICE", "CPU")
    monkeypatch.setattr(sdpa, "_original", found.__getitem__)
    monkeypatch.setattr(ops, "cuda_missing", None)
    yield found
    sdpa.restore()


@pytest.fixture
def active(originals: dict[str, Original]) -> dict[str, Original]:
    sdpa.activate()
    return originals


def overridden() -> bool:
    found = {torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{x}", "CPU") for x in NAMES}
    assert len(found) == 1, "some are and some are not"
    return found.pop()


def inputs(layout: str, dtype=torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    tensors = torch.randn(4, *SHAPES[layout], device=device, dtype=dtype)
    return tensors if layout == "bhsd" else tensors.transpose(2, 3)


def test_activate_and_restore(originals):
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    of_torch = F.scaled_dot_product_attention
    assert not overridden()
    for _ in range(2):
        sdpa.activate()
        assert overridden() and current_flash_attention_impl() == sdpa.NAME
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert F.scaled_dot_product_attention is not of_torch
    for _ in range(2):
        sdpa.restore()
        assert not overridden() and current_flash_attention_impl() is None
        assert F.scaled_dot_product_attention is of_torch
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


def test_a_choice_of_backends_made_meanwhile_stays(originals):
    """`restore` gives cuDNN's backend back, and changes nothing that was set after `activate`."""
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            sdpa.activate()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        sdpa.restore()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_with_block(originals):
    with pytest.raises(KeyError), sdpa.activated():
        assert overridden()
        raise KeyError
    assert not overridden() and current_flash_attention_impl() is None
    sdpa.activate()
    with sdpa.activated():
        pass
    assert current_flash_attention_impl() == sdpa.NAME


def test_blocks_of_two_threads(originals):
    """The one that ends first leaves flash_ext to the other."""
    entered, ended = threading.Event(), threading.Event()

    def other() -> None:
        with sdpa.activated():
            entered.set()
            ended.wait(10)
            assert overridden()

    with ThreadPoolExecutor(1) as pool:
        with sdpa.activated():
            block = pool.submit(other)
            assert entered.wait(10)
        assert overridden()
        ended.set()
        block.result()
    assert not overridden() and current_flash_attention_impl() is None


def test_blocks_within_blocks(originals):
    with sdpa.activated():
        with sdpa.activated():
            sdpa.activate()
        assert overridden()
    assert not overridden()


def test_another_implementation(originals):
    """Is active again after a block; one that takes over within the block stays."""
    seen = []

    class Other:
        def remove(self) -> None:
            seen.append("removed")

    torch.nn.attention.register_flash_attention_impl("other", register_fn=Other)
    torch.nn.attention.activate_flash_attention_impl("other")
    with sdpa.activated():
        assert seen == ["removed"] and overridden()
    assert current_flash_attention_impl() == "other" and not overridden()
    torch.nn.attention.restore_flash_attention_impl()
    with sdpa.activated():
        torch.nn.attention.activate_flash_attention_impl("other")
        assert not overridden()
    assert current_flash_attention_impl() == "other"
    torch.nn.attention.restore_flash_attention_impl()


ACTIVATE_OVER_KERNELS = """
import sys, warnings, torch
from flash_ext import ops
from flash_ext.integrations import sdpa
warnings.simplefilter("error")
if sys.argv[1] == "cpu":
    import compiled
    compiled.load_host_side()
    ops.cuda_missing, sdpa._DEVICE = None, "CPU"
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in sdpa._schemas():
        library.impl(name, lambda *x, **y: "torch's", "CPU")
for _ in range(2):
    sdpa.activate()
    sdpa.restore()
try:
    warnings.warn("a word of warning")
except UserWarning:
    sys.exit(0)
sys.exit("no warnings any more")
"""


@pytest.mark.parametrize("where", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_activation_says_nothing(where):
    """The dispatcher warns of every override; other warnings are heard as before."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    found = run_python("-c", ACTIVATE_OVER_KERNELS, where, cwd=tests.parent, env=environment)
    assert found.returncode == 0 and not found.stderr, found.stderr


def test_handle_is_removed_twice(originals):
    handle = sdpa._register()
    handle.remove()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        handle.remove()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert not overridden()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has them")
def test_torch_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(ops, "cuda_missing", None)
    with pytest.raises(RuntimeError, match="no CUDA kernels of SDPA"):
        sdpa.activate()
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("name", NAMES)
def test_torch_with_other_ops(originals, monkeypatch, name):
    monkeypatch.setitem(sdpa._SCHEMAS, name, "(Tensor query) -> Tensor")
    with pytest.raises(RuntimeError, match="has changed the ops of SDPA's backends"):
        sdpa.activate()
    assert not overridden() and current_flash_attention_impl() is None


def test_flash_ext_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(ops, "cuda_missing", "not built. Build them")
    with pytest.raises(RuntimeError, match="the CUDA kernels are not built"):
        sdpa.activate()


@pytest.mark.parametrize("name", sdpa._API)
def test_torch_without_the_interface(monkeypatch, name):
    monkeypatch.delattr(torch.nn.attention, name)
    for call in (sdpa.activate, sdpa.restore):
        with pytest.raises(RuntimeError, match=f"torch 2.11 or newer.*{name}"):
            call()


def test_import_activates_nothing():
    code = (
        "import torch, flash_ext.integrations.sdpa as s; from torch.nn.attention import *;"
        "assert s.NAME not in list_flash_attention_impls();"
        "assert current_flash_attention_impl() is None"
    )
    run_python("-c", code, check=True)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_translation(layout, is_causal, scale, active):
    """The ops as SDPA calls them, against its math backend."""
    dout, *leaves = inputs(layout)
    leaves = [x.detach().requires_grad_() for x in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)

    out, lse, cum_q, cum_k, *rest = aten(FORWARD)(*leaves, 0.0, is_causal, scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert out.stride() == torch.empty_like(leaves[0]).stride()
    assert lse.shape == out.shape[:3] and lse.dtype == torch.float32
    assert (cum_q, cum_k, *rest[:2]) == (None, None, 6, 6)
    seed, offset, debug = rest[2:]
    assert seed.shape == (2,) and offset.shape == ()
    assert seed.dtype == offset.dtype == torch.uint64 and not debug.numel()

    for rows in (dout, dout.mT.contiguous().mT):
        actual = torch.autograd.grad(out, leaves, rows, retain_graph=True)
        gradients = torch.autograd.grad(expected, leaves, rows, retain_graph=True)
        for x, y, like in zip(actual, gradients, leaves, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            assert x.stride() == torch.empty_like(like).stride()
    assert not any(x.calls for x in active.values())


def test_what_has_no_backward_is_torchs(active):
    """At head dim 248 of tests/native/host.cpp: torch could not go on with this forward."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.zeros(1, 2, 6, 248, dtype=dtype)
        assert aten(FORWARD)(x, x, x)[0].shape == (1,)
    assert len(active[FORWARD].calls) == 3


def test_a_call_that_is_refused_says_nothing_of_others(active):
    """Of 77 queries there is no kernel in tests/native/host.cpp."""
    odd, usual = (torch.zeros(1, 2, n, 232, dtype=torch.bfloat16) for n in (77, 6))
    assert aten(FORWARD)(odd, odd, odd)[0].shape == (1,)
    assert aten(FORWARD)(usual, usual, usual)[0].shape == usual.shape
    assert len(active[FORWARD].calls) == 1


def layouts(**kind) -> Iterator[torch.Tensor]:
    """(B, H, S, D) tensors with rows in any order, with gaps, and expanded."""
    random.seed(0)
    for _ in range(300):
        sizes = [random.choice((1, 2, 3)) for _ in range(3)] + [8]
        order = random.sample(range(3), 3)
        padded = [sizes[dim] + random.choice((0, 0, 1)) for dim in order] + [
            random.choice((8, 8, 16))
        ]
        x = torch.randn(padded, **kind).permute(*(order.index(dim) for dim in range(3)), 3)
        x = x[tuple(slice(size) for size in sizes)]
        if random.random() < 0.2:
            dim = random.randrange(3)
            x = x.narrow(dim, 0, 1).expand(*(-1 if d != dim else sizes[d] for d in range(4)))
        if random.random() < 0.2 and 1 in x.shape[:3]:
            strides = list(x.stride())
            strides[x.shape.index(1)] = random.choice((0, 1, 5, 1000))
            x = x.as_strided(x.shape, strides)
        yield x


def test_strides_are_those_of_empty_like(active):
    """Which is what torch.compile takes the ops to give."""
    for x in layouts():
        out, lse, *_, state, unused, _ = aten(FORWARD)(x, x, x)
        assert out.stride() == torch.empty_like(x).stride(), (x.shape, x.stride())
        expected = flash_ext.attention(*[x.transpose(1, 2)] * 3).transpose(1, 2)
        torch.testing.assert_close(out, expected)
        rest = (None, None, 1, 1, 0.0, False, state, unused)
        found = aten(BACKWARD)(torch.ones_like(out), x, x, x, out, lse, *rest)
        for gradient in found:
            assert gradient.stride() == torch.empty_like(x).stride(), (x.shape, x.stride())
    assert not any(x.calls for x in active.values())


@pytest.mark.parametrize("asked", (False, True))
def test_deterministic_algorithms(asked, active, monkeypatch):
    """The flag counts that is up when the gradients are computed."""
    seen, backward = [], tiled.backward

    def spy(variant, tensors, options, need_dbias):
        seen.append(options.deterministic)
        return backward(variant, tensors, options, need_dbias)

    monkeypatch.setattr(tiled, "backward", spy)
    tensors, offsets = packed_inputs("cpu", torch.float32)
    leaves = [x.requires_grad_() for x in inputs("bhsd")[1:].clone().unbind()]
    packed = [x.requires_grad_() for x in tensors[:3]]
    masked = mask_inputs()[:3]
    outs = (
        aten(FORWARD)(*leaves)[0],
        aten(FLASH)(*packed, *offsets, 7, 9, 0.0, True, False)[0],
        aten(EFFICIENT)(*masked, None, True)[0],
    )
    torch.use_deterministic_algorithms(asked)
    try:
        for out in outs:
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [asked] * 3


CASES = (
    *("dropout", "debug", "empty", "no kernel"),
    *("strides", "dimensions", "sizes", "dtypes", "integers"),
)


@pytest.mark.parametrize("case", CASES)
def test_falls_back(case, active):
    q, k, v, dout = inputs("bhsd")
    if case == "no kernel":
        q, k, v = (x.repeat(1, 1, 1, 33) for x in (q, k, v))
    if case == "empty":
        k, v = k[:, :, :0], v[:, :, :0]
    if case == "strides":
        v = v.mT.contiguous().mT
    if case == "dimensions":
        q = q[0]
    if case == "sizes":
        k = k[:, :, :5]
    if case == "dtypes":
        k = k.half()
    if case == "integers":
        q, k, v = q.long(), k.long(), v.long()
    p, debug = 0.1 * (case == "dropout"), case == "debug"
    out, *_, max_q, _, _, _, _ = aten(FORWARD)(q, k, v, p, True, debug, scale=2.0)
    assert out.item() == 7 and max_q == q.shape[2]
    ((arguments, keywords),) = active[FORWARD].calls
    given = (q, k, v, p, True, debug)
    assert_same_arguments(arguments, given if debug else given[:-1])  # except the default
    assert keywords == {"scale": 2.0}
    _, *plain = inputs("bhsd", torch.bfloat16)  # has a kernel, whatever had none before it
    assert aten(FORWARD)(*plain)[0].shape == plain[0].shape
    if debug:
        return
    given = (dout, q, k, v, q, q, None, None, 6, 6, p, True, q, k)
    assert [x.item() for x in aten(BACKWARD)(*given, scale=2.0)] == [7, 7, 7]
    ((arguments, keywords),) = active[BACKWARD].calls
    assert_same_arguments(arguments, given)
    assert keywords == {"scale": 2.0}


def assert_same_arguments(actual, expected) -> None:
    for x, y in zip(actual, expected, strict=True):
        if isinstance(y, torch.Tensor):
            assert x.data_ptr() == y.data_ptr() and x.shape == y.shape
        else:
            assert x == y


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="before torch 2.13 they are lost",
)
@pytest.mark.parametrize(
    "error", (RuntimeError("the grapes are sour"), torch.OutOfMemoryError("CUDA out of memory. 1"))
)
def test_errors_of_torch_are_heard(error, originals, monkeypatch):
    def fail(*arguments, **keywords):
        raise error

    monkeypatch.setattr(originals[FORWARD], "call_boxed", fail)
    sdpa.activate()
    q, k, v, _ = inputs("bhsd")
    with pytest.raises(type(error), match=str(error)):
        aten(FORWARD)(q, k, v, 0.5)
    assert aten(FORWARD)(q, k, v)[0].shape == q.shape


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops whose original kernels have run."""
    ran, find = [], sdpa._original

    def original(name):
        kernel = find(name)

        class Recorded:
            def call_boxed(self, *arguments, **keywords):
                ran.append(name)
                return kernel.call_boxed(*arguments, **keywords)

        return Recorded()

    monkeypatch.setattr(sdpa, "_original", original)
    return ran


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_on_the_gpu(layout, is_causal, compiled, torchs):
    dout, *leaves = inputs(layout, torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    gradients = torch.autograd.grad(expected, leaves, dout)
    attend = F.scaled_dot_product_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager")
    with sdpa.activated(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attend(*leaves, is_causal=is_causal)
        actual = torch.autograd.grad(out, leaves, dout)
    assert not torchs
    for x, y in zip((out, *actual), (expected, *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    for x, like in zip((out, *actual), (leaves[0], *leaves), strict=True):
        assert x.stride() == torch.empty_like(like).stride()
    attend(*leaves, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_under_cuda_graphs_of_torch_compile():
    """Which let no result lie outside of their memory, and nothing else inside."""
    dout, *leaves = inputs("bhsd", torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(2 * q, k, v, is_causal=True)

    compiled = torch.compile(attend, mode="reduce-overhead")
    with sdpa.activated(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = attend(*leaves)
        gradients = torch.autograd.grad(expected, leaves, dout)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                alone = compiled(*leaves).clone()
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*leaves)
            actual = [out.clone(), *torch.autograd.grad(out, leaves, dout)]
            for x, y in zip((alone, *actual), (expected, expected, *gradients), strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
            attend(*leaves)  # outside of a graph, between two


@pytest.mark.gpu
def test_layouts_on_the_gpu(torchs):
    """The kernels write out and the gradients where torch's would, padding aside."""
    with sdpa.activated():
        for x in layouts(dtype=torch.bfloat16, device="cuda"):
            leaves = [x.detach().requires_grad_() for _ in range(3)]
            out = aten(FORWARD)(*leaves)[0]
            dout = torch.randn_like(out)
            found = out, *torch.autograd.grad(out, leaves, dout)
            leaves = [x.detach().transpose(1, 2).requires_grad_() for _ in range(3)]
            out = flash_ext.attention(*leaves)
            expected = out, *torch.autograd.grad(out, leaves, dout.transpose(1, 2))
            for a, e in zip(found, expected, strict=True):
                assert a.stride() == torch.empty_like(x).stride()
                torch.testing.assert_close(a, e.transpose(1, 2), rtol=1e-2, atol=1e-2)
    assert not torchs


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", ("nested", "dropout"))
def test_what_else_sdpa_is_given(tensors, torchs):
    """Nested tensors run on flash_ext, dropout on torch's kernels, with gradients."""
    torch.manual_seed(0)
    if tensors == "nested":
        parts = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 70, 33)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        y = x.transpose(1, 2)
    else:
        x = torch.randn(2, 4, 70, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = x

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3 * (tensors == "dropout"))
            (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        return out.detach(), gradient

    with sdpa.activated():
        out, gradient = run()
    if tensors == "dropout":
        assert {FORWARD, BACKWARD} <= set(torchs) and gradient.isfinite().all()
        return
    assert not torchs
    torch_out, torch_gradient = run()
    # One tensor is q, k and v: its gradient is a sum of three, rounded, in which delta's rounding
    # error, of out's, counts for each column. Torch's kernels have the same.
    for n, part in enumerate(parts):
        leaf = part.double()[None].requires_grad_()
        expected = flash_ext.reference.attention(leaf, leaf, leaf)[0]
        (expected_gradient,) = torch.autograd.grad(expected.sum(), leaf)
        for ours, theirs, truth in (
            (out.transpose(1, 2), torch_out.transpose(1, 2), expected.detach()),
            (gradient, torch_gradient, expected_gradient),
        ):
            error, torchs_error = (
                (y.unbind()[n].double() - truth[0]).abs().max().item() for y in (ours, theirs)
            )
            assert error <= 1.5 * torchs_error + 1e-3


@pytest.mark.gpu
def test_dropout_stays_with_torch(torchs):
    _, *leaves = inputs("bhsd", torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]
    mask = torch.rand(6, 6, device="cuda") < 0.8
    for options in ({}, {"attn_mask": mask}):
        with sdpa.activated():
            torch.manual_seed(1)
            out = F.scaled_dot_product_attention(*leaves, **options, dropout_p=0.3)
            out.sum().backward()
        assert all(x.grad.isfinite().all() for x in leaves)
    # And the ops that torch's own kernels call.
    assert set(torchs) >= {FORWARD, BACKWARD, EFFICIENT, EFFICIENT_BACKWARD}


# --- attn_mask: the efficient backend ---

BROADCASTS = [tuple(dim for dim in range(4) if number >> dim & 1) for number in range(16)]
"""The dimensions of (B, H, Sq, Sk) in which a mask has size 1."""
broadcasts = pytest.mark.parametrize(
    "broadcast", BROADCASTS, ids=lambda dims: "".join("bhqk"[dim] for dim in dims) or "full"
)


def mask_inputs(rows=6, keys=9, dim=16, dim_v=16, dtype=torch.float16, device="cpu"):
    """q, k, v and the gradient of out; SDPA's layout, of memory (B, S, H, D)."""
    torch.manual_seed(0)
    shapes = [(rows, dim), (keys, dim), (keys, dim_v), (rows, dim_v)]
    tensors = (torch.randn(2, n, 4, d, device=device, dtype=dtype) for n, d in shapes)
    return [x.transpose(1, 2).requires_grad_() for x in tensors]


def mask_of(broadcast, kind: str, rows=6, keys=9, dtype=torch.float16, device="cpu"):
    shape = [1 if dim in broadcast else n for dim, n in enumerate((2, 4, rows, keys))]
    if kind == "bool":
        return torch.rand(shape, device=device) < 0.7
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(kind == "gradient")


def given_to_aten(mask: torch.Tensor, q, k) -> torch.Tensor:
    """As SDPA does."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return mask.expand(*q.shape[:3], k.shape[2])


def by_math(q, k, v, mask, dout, **options):
    """out and all gradients by torch's math backend in float64."""
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with_gradient = mask is not None and mask.requires_grad
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().double().requires_grad_(with_gradient)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*exact, attn_mask=mask, **options)
    leaves = [*exact, mask] if with_gradient else exact
    return out, *torch.autograd.grad(out, leaves, dout.detach().double())


def assert_near(actual, expected, tolerance=5e-3) -> None:
    """Of out, dq, dk, dv and, perhaps, a mask's gradient, which is a sum of entries."""
    scores = actual[0][..., 0].numel() * actual[2].shape[2]
    for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.shape == y.shape
        summed = scores / x.numel() if n == 4 else 1
        atol = tolerance * summed**0.5
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=atol)


def meta(*arguments):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]


@broadcasts
@pytest.mark.parametrize("kind", ("gradient", "float", "bool"))
def test_masks(broadcast, kind, active):
    """The op as SDPA calls it, against its math backend."""
    q, k, v, dout = mask_inputs()
    mask = mask_of(broadcast, kind)
    leaves = [q, k, v, mask] if kind == "gradient" else [q, k, v]
    bias = given_to_aten(mask, q, k)
    seen = []
    if kind == "gradient":
        bias.register_hook(seen.append)
    out, lse, seed, offset = aten(EFFICIENT)(q, k, v, bias, True, scale=0.3)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert_near((out, *gradients), by_math(q, k, v, mask, dout, scale=0.3))
    assert not any(x.calls for x in active.values())

    torchs_out, torchs_lse, *_ = aten(EFFICIENT)(*meta(q, k, v, bias, True))
    assert out.stride() == torchs_out.stride()
    assert lse.shape == torchs_lse.shape and lse.dtype == torch.float32
    assert seed.shape == offset.shape == () and seed.dtype == offset.dtype == torch.int64
    if seen:  # the memory of the mask's own gradient alone
        assert seen[0].shape == bias.shape
        assert seen[0].untyped_storage().nbytes() == mask.nbytes


@pytest.mark.parametrize("keys", (9, 16))
@broadcasts
def test_gradient_of_a_mask_outside_of_autograd(broadcast, keys, active):
    """As compiled graphs call the backward op: with torch's strides, which they rely on, and for
    each element its own gradient, which they sum."""
    q, k, v, dout = (x.detach() for x in mask_inputs(keys=keys))
    mask = mask_of(broadcast, "float", keys=keys)
    bias = given_to_aten(mask, q, k)
    out, lse, *state = aten(EFFICIENT)(q, k, v, bias, True)
    for needed in (True, False):
        given = (dout, q, k, v, bias, out, lse, *state, 0.0, [True, True, True, needed])
        found = aten(EFFICIENT_BACKWARD)(*given)
        expected = by_math(q, k, v, bias.clone().requires_grad_(needed), dout)
        assert_near((out, *found[: 3 + needed]), expected)
        for x, like in zip(found, aten(EFFICIENT_BACKWARD)(*meta(*given)), strict=True):
            assert (x is None) == (like is None)
            assert x is None or x.stride() == like.stride()
    assert not any(x.calls for x in active.values())


@pytest.mark.parametrize("case", ("leaf", "expanded twice", "function"))
def test_gradient_of_an_expanded_mask(case, active):
    """Strides of 0 that are not SDPA's expansion: each element has its own gradient."""
    q, k, v, dout = mask_inputs()
    mask = mask_of((0, 2), "float").expand(2, 4, 6, 9).requires_grad_()
    if case == "function":  # without a node of expand() after it

        class Expanded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x[:1, :, :1].expand_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        mask = mask.detach().clone().requires_grad_()
        bias = Expanded.apply(mask)
    else:
        bias = mask if case == "leaf" else mask.expand(2, 4, 6, 9)
    out = aten(EFFICIENT)(q, k, v, bias, True)[0]
    gradients = torch.autograd.grad(out, (q, k, v, mask), dout)
    expected = by_math(q, k, v, mask.detach().clone().requires_grad_(), dout)
    assert_near((out, *gradients), expected)
    assert not any(x.calls for x in active.values())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_a_mask_for_each_element_of_vmap(active):
    """An element's mask is not summed over the others, in whichever way torch batches the op."""
    q, k, v, dout = (x.detach() for x in mask_inputs())
    masks = torch.stack([mask_of((0, 2), "float") for _ in range(3)])
    examples = torch.randn(3, *q.shape).half()

    def loss(mask, q):
        out = aten(EFFICIENT)(q, k, v, given_to_aten(mask, q, k), True)[0]
        return (out * dout).sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(masks, examples)
    for n, mask in enumerate(masks):
        out, dq, dk, dv, dmask = by_math(examples[n], k, v, mask.clone().requires_grad_(), dout)
        assert_near((out, found[1][n], dk, dv, found[0][n]), (out, dq, dk, dv, dmask))
    node = masks[0].clone().requires_grad_().expand(2, 4, 6, 9).grad_fn
    assert torch_private.sizes_before_expand(node, (2, 4, 6, 9)) == (1, 4, 1, 9)
    assert torch_private.sizes_before_expand(node, (6, 4, 6, 9)) is None
    assert not any(x.calls for x in active.values())


def test_a_mask_that_hides_all_keys(active):
    q, k, v, dout = mask_inputs()
    mask = torch.zeros(6, 9, dtype=torch.float16)
    mask[2] = -torch.inf
    mask.requires_grad_()
    out = aten(EFFICIENT)(q, k, v, given_to_aten(mask, q, k), True)[0]
    gradients = torch.autograd.grad(out, (q, k, v, mask), dout)
    assert_near((out, *gradients), by_math(q, k, v, mask, dout))
    assert not out[:, :, 2].any() and not gradients[3][2].any()


@pytest.mark.parametrize("rows", (1, 31, 32, 33))
def test_efficient_without_a_mask(rows, active):
    """lse has torch's number of rows; head dims of v unlike those of q."""
    q, k, v, dout = mask_inputs(rows, keys=rows, dim_v=24)
    for causal in (False, True):
        out, lse, *_ = aten(EFFICIENT)(q, k, v, None, True, is_causal=causal)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert_near((out, *gradients), by_math(q, k, v, None, dout, is_causal=causal))
        scores = q.double() @ k.double().mT / 4
        if causal:
            scores = scores + torch.full((rows, rows), -torch.inf).double().triu(1)
        torchs = torch.full((2, 4, (rows + 31) // 32 * 32), torch.inf)
        torchs[..., :rows] = scores.logsumexp(-1)
        torch.testing.assert_close(lse, torchs, rtol=1e-3, atol=1e-3)
        alone, no_lse, *_ = aten(EFFICIENT)(q, k, v, None, False, is_causal=causal)
        assert no_lse.shape == (2, 4, 0) and torch.equal(alone, out)
    assert not any(x.calls for x in active.values())


MASK_CASES = (
    *("dropout", "float32", "top left", "empty", "no kernel", "no backward", "strides"),
    *("dimensions", "sizes", "dtypes", "bias", "dtype of bias"),
)


@pytest.mark.parametrize("case", MASK_CASES)
def test_masks_fall_back(case, active):
    q, k, v, dout = (x.detach() for x in mask_inputs())
    bias = torch.zeros(2, 4, 6, 9, dtype=torch.float16)
    p, causal = 0.1 * (case == "dropout"), case == "top left"
    if case == "float32":
        q, k, v, bias = (x.float() for x in (q, k, v, bias))
    if case == "empty":
        k, v, bias = k[:, :, :0], v[:, :, :0], bias[..., :0]
    if case == "no kernel":
        q, k = (x.repeat(1, 1, 1, 17) for x in (q, k))
    if case == "no backward":
        q, k = (F.pad(x, (0, 248 - 16)) for x in (q, k))
    if case == "strides":
        v = v.mT.contiguous().mT
    if case == "dimensions":
        q = q[0]
    if case == "sizes":
        k = k[:, :, :5]
    if case == "dtypes":
        k = k.float()
    if case == "bias":
        bias = bias[:, :, :1]
    if case == "dtype of bias":
        bias = bias.bfloat16()
    given = (q, k, v, bias, True, p, causal)
    assert [x.item() for x in aten(EFFICIENT)(*given, scale=2.0)] == [7] * 4
    ((arguments, keywords),) = active[EFFICIENT].calls
    assert_same_arguments(arguments, given[: len(arguments)])
    assert not any(given[len(arguments) :])  # the defaults
    assert keywords == {"scale": 2.0}
    given = (dout, q, k, v, bias, q, q, q, q, p, [True, True, False, True], causal)
    assert [x.item() for x in aten(EFFICIENT_BACKWARD)(*given, scale=2.0)] == [7] * 4
    ((arguments, keywords),) = active[EFFICIENT_BACKWARD].calls
    assert_same_arguments(arguments, given[: len(arguments)])
    assert not any(given[len(arguments) :])
    assert keywords == {"scale": 2.0}


def test_backward_without_lse_is_torchs(active):
    q, k, v, dout = (x.detach() for x in mask_inputs())
    mask = mask_of((), "gradient")
    out = aten(EFFICIENT)(q, k, v, mask, False)[0]
    with pytest.raises(RuntimeError, match="shape"):  # of the stand-in's result
        torch.autograd.grad(out, mask, dout)
    assert len(active[EFFICIENT_BACKWARD].calls) == 1


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("kind", ("gradient", "bool"))
@pytest.mark.filterwarnings("ignore")
def test_compiled_masks(backend, kind, active):
    """The strides of results are those that the compiler expects of torch's kernels."""

    def attend(q, k, v, mask):
        return aten(EFFICIENT)(2 * q, k, v, given_to_aten(mask, q, k), True)[0].sin()

    q, k, v, dout = mask_inputs()
    mask = mask_of((0, 2), kind)
    leaves = [q, k, v, mask] if kind == "gradient" else [q, k, v]
    expected = attend(q, k, v, mask)
    gradients = torch.autograd.grad(expected, leaves, dout)
    compiled = torch.compile(attend, backend=backend)
    out = compiled(q, k, v, mask)
    actual = torch.autograd.grad(out, leaves, dout)
    assert_near((out, *actual), [x.double() for x in (expected, *gradients)])
    assert not any(x.calls for x in active.values())


def test_masks_under_another_autograd(active, monkeypatch):
    """Without torch's name for the node that runs, the mask's gradient has the size of all."""
    monkeypatch.setattr(torch_private, "autograd_node", lambda: None)
    q, k, v, dout = mask_inputs()
    mask = mask_of((0,), "gradient")
    out = aten(EFFICIENT)(q, k, v, given_to_aten(mask, q, k), True)[0]
    gradients = torch.autograd.grad(out, (q, k, v, mask), dout)
    assert_near((out, *gradients), by_math(q, k, v, mask, dout))


@pytest.mark.gpu
@broadcasts
@pytest.mark.parametrize("kind", ("gradient", "float", "bool"))
@pytest.mark.parametrize("keys", (49, 64))
def test_masks_on_the_gpu(broadcast, kind, keys, torchs):
    q, k, v, dout = mask_inputs(37, keys, 64, 64, torch.bfloat16, "cuda")
    mask = mask_of(broadcast, kind, 37, keys, torch.bfloat16, "cuda")
    leaves = [q, k, v, mask] if kind == "gradient" else [q, k, v]
    with sdpa.activated():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(out, leaves, dout)
    assert not torchs
    assert_near((out, *gradients), by_math(q, k, v, mask, dout), 3e-2)
    assert out.stride() == F.scaled_dot_product_attention(q, k, v).stride()


LARGE_MASKS = ((2, 1, 1, 600), (600, 600), (4, 600, 600), (2, 4, 600, 600))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[flash_ext.Mask]:
    """The masks that are made."""
    found, make = [], flash_ext.Mask.dense
    monkeypatch.setattr(
        flash_ext.Mask, "dense", lambda *a, **b: found.append(make(*a, **b)) or found[-1]
    )
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 128, 72, 256))
@pytest.mark.parametrize("shape", LARGE_MASKS, ids=str)
def test_a_large_bool_mask_is_made_once(shape, dim, torchs, made):
    """For several layers and steps, and again after a write; with gradients, GQA and autocast."""
    q, k, v, dout = mask_inputs(600, 600, dim, dim, torch.bfloat16, "cuda")
    visible = torch.rand(shape, device="cuda") < 0.7
    with sdpa.activated():
        for step in range(2):
            for _ in range(2):
                out = F.scaled_dot_product_attention(q, k, v, visible, scale=0.1)
                found = out, *torch.autograd.grad(out, (q, k, v), dout)
            assert_near(found, by_math(q, k, v, visible, dout, scale=0.1), 3e-2)
            assert len(made) == step + 1 and not torchs
            visible[..., : 100 * (step + 1)] = False
        few = [x[:, :2].detach().requires_grad_() for x in (k, v)]
        with torch.autocast("cuda", torch.bfloat16):
            out = F.scaled_dot_product_attention(q, *few, attn_mask=visible, enable_gqa=True)
        found = out, *torch.autograd.grad(out, (q, *few), dout)
        assert len(made) == 3
        assert_near(found, by_math(q, *few, visible, dout, enable_gqa=True), 3e-2)
        out = F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention(q, k, v).stride() == out.stride() == found[0].stride()


@pytest.mark.gpu
def test_large_bool_masks_that_stay_with_torch(torchs, made):
    """What this package does not run, or torch is told to run otherwise."""
    q, k, v, dout = mask_inputs(600, 600, 64, 64, torch.bfloat16, "cuda")
    visible = torch.rand(600, 600, device="cuda") < 0.7
    sdpa_of = torch.nn.functional.scaled_dot_product_attention
    with sdpa.activated():
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(
                F.scaled_dot_product_attention(q, k, v, visible), sdpa_of(q, k, v, visible)
            )
        wide = [x.float() for x in (q, k, v)]
        F.scaled_dot_product_attention(*wide, attn_mask=visible)
        F.scaled_dot_product_attention(q, k, v, visible, dropout_p=0.1)
        F.scaled_dot_product_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], visible[:9, :9])
        attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        out = attend(q, k, v, visible)
        for wrong in (visible[:7], visible[None, None, None]):
            with pytest.raises((RuntimeError, IndexError)):  # torch's
                F.scaled_dot_product_attention(q, k, v, wrong)
    assert not made
    expected = by_math(q, k, v, visible, dout)[0]
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


TRACERS = {
    "fx": lambda module, _: torch.fx.symbolic_trace(module),
    "make_fx": lambda module, inputs: make_fx(module)(*inputs),
    "script": lambda module, _: torch.jit.script(module),
    "trace": lambda module, inputs: torch.jit.trace(module, inputs),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tracers_take_the_function_for_torchs(tracer, active):
    q, k, v, _ = (x.detach() for x in mask_inputs())
    visible = torch.rand(q.shape[-2], k.shape[-2]) < 0.7
    traced = TRACERS[tracer](Attention(), (q, k, v, visible))
    torch.testing.assert_close(traced(q, k, v, ~visible), Attention()(q, k, v, ~visible))


@pytest.mark.gpu
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_mask_is_no_constant_of_a_graph(tracer, torchs):
    q, k, v, dout = (x.detach() for x in mask_inputs(600, 600, 64, 64, torch.bfloat16, "cuda"))
    masks = [torch.rand(600, 600, device="cuda") < x for x in (0.7, 0.3)]
    with sdpa.activated():
        Attention()(q, k, v, masks[0])  # the mask is kept
        traced = TRACERS[tracer](Attention(), (q, k, v, masks[0]))
        found = [traced(q, k, v, x) for x in masks]
    for x, visible in zip(found, masks, strict=True):
        expected = by_math(q, k, v, visible, dout)[0]
        torch.testing.assert_close(x.double(), expected, rtol=3e-2, atol=3e-2)


def test_small_masks_stay_with_torch(active):
    """Also where no GPU is."""
    q, k, v, _ = mask_inputs()
    visible = torch.rand(6, 9) < 0.7
    out = F.scaled_dot_product_attention(q, k, v, visible)
    assert torch.equal(out, sdpa._torch_sdpa(q, k, v, visible))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("kind", ("gradient", "bool"))
@pytest.mark.parametrize("shape", ((4, 37, 49), (1, 1, 64), (2, 4, 37, 49), (37, 64)))
@pytest.mark.filterwarnings("ignore")
def test_compiled_masks_on_the_gpu(backend, kind, shape, torchs):
    """A graph that was compiled while flash_ext was active runs without it, and the other way."""
    keys = shape[-1]
    q, k, v, dout = mask_inputs(37, keys, 64, 64, torch.bfloat16, "cuda")
    mask = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    mask = mask.requires_grad_() if kind == "gradient" else mask > -1
    leaves = [q, k, v, mask] if kind == "gradient" else [q, k, v]
    expected = by_math(q, k, v, mask, dout)
    for first in (True, False):
        torch.compiler.reset()
        attend = torch.compile(F.scaled_dot_product_attention, backend=backend)
        for active in (first, not first):
            if active:
                sdpa.activate()
            try:
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    out = attend(q, k, v, attn_mask=mask)
                    gradients = torch.autograd.grad(out, leaves, dout)
            finally:
                sdpa.restore()
            assert_near((out, *gradients), expected, 3e-2)
    assert not torchs


@pytest.mark.gpu
def test_memory_of_the_gradient_of_a_mask(torchs):
    """Nothing as large as the scores of all sequences."""
    shape = (16, 4, 1024, 32)
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    mask = torch.randn(4, 1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with sdpa.activated():
        for _ in range(2):
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(out, [*leaves, mask], torch.ones_like(out))
            used = torch.cuda.max_memory_allocated() - before
    assert not torchs
    assert used < 16 * mask.nbytes / 2, used


# --- varlen_attn and the ops below it ---

LENGTHS_Q, LENGTHS_K = (5, 0, 7), (5, 3, 9)
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (3, 1)}
windows = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def packed_inputs(device: str, dtype: torch.dtype, heads_k: int = 4):
    torch.manual_seed(0)
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    tensors = [(total_q, 4), (total_k, heads_k), (total_k, heads_k), (total_q, 4)]
    tensors = [torch.randn(*shape, 16, device=device, dtype=dtype) for shape in tensors]
    offsets = [
        F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
        for lengths in (LENGTHS_Q, LENGTHS_K)
    ]
    return tensors, offsets


def expected_of(tensors, offsets, window, scale=None):
    """out and the gradients, sequence by sequence."""
    q, k, v, dout = tensors
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs = []
    cuts_q, cuts_k = (x.tolist() for x in offsets)
    for b in range(len(LENGTHS_Q)):
        rows, columns = slice(*cuts_q[b : b + 2]), slice(*cuts_k[b : b + 2])
        parts = [leaves[0][None, rows], *(x[None, columns] for x in leaves[1:])]
        outs.append(flash_ext.reference.attention(*parts, window=window, scale=scale)[0][0])
    out = torch.cat(outs)
    return out, torch.autograd.grad(out, leaves, dout.double())


def assert_like(actual, expected, dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@windows
def test_varlen_attn(window, active):
    """torch's function from end to end, with gradients, on the CPU kernels."""
    tensors, offsets = packed_inputs("cpu", torch.float32)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = varlen_attn(
        *leaves, *offsets, max(LENGTHS_Q), max(LENGTHS_K), scale=0.3, window_size=window
    )
    gradients = torch.autograd.grad(out, leaves, tensors[3])
    expected, expected_gradients = expected_of(tensors, offsets, window, 0.3)
    for x, y in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert_like(x, y, torch.float32)
    assert not any(x.calls for x in active.values())


@pytest.mark.skipif(FLASH_OUT not in NAMES, reason="since torch 2.13")
def test_varlen_attn_out(active):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    tensors, offsets = packed_inputs("cpu", torch.float32, heads_k=2)
    out = torch.full_like(tensors[0], torch.nan)
    _, lse = varlen_attn_out(
        out, *tensors[:3], *offsets, max(LENGTHS_Q), max(LENGTHS_K), window_size=(-1, 0),
        enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    expected, _ = expected_of(tensors, offsets, (-1, 0))
    assert_like(out, expected, torch.float32)
    assert lse.shape == (4, sum(LENGTHS_Q)) and not any(x.calls for x in active.values())


def call_forward(tensors, offsets, dropout_p=0.0, debug=False, **more):
    return aten(FLASH)(*tensors[:3], *offsets, 7, 9, dropout_p, True, debug, **more)


def test_dense_flash_op(active):
    """(B, S, H, D) without offsets, of the strides of the inputs."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs("bhsd"))
    out, lse, *rest = call_forward((q, k, v, dout), (None, None), scale=0.3)
    expected = flash_ext.reference.attention(q, k, v, causal=True, scale=0.3)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-5)
    assert out.stride() == torch.empty_like(q).stride()
    assert [x.dtype for x in rest[:2]] == [torch.uint64] * 2 and not rest[2].numel()


def test_used_keys_of_a_cache(active):
    tensors, offsets = packed_inputs("cpu", torch.float32)
    used = torch.tensor([5, 0, 2], dtype=torch.int32)
    splits = {"num_splits": 1} if FLASH_OUT in NAMES else {}
    out = call_forward(tensors, offsets, seqused_k=used, **splits)[0]
    q, k, v, _ = tensors
    expected = flash_ext.attention_varlen(q, k, v, *offsets, causal=True, seqused_k=used)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "case", ["dropout", "debug", "pages", "slopes", "one offset", "long offsets", "no kernel"]
)
def test_varlen_falls_back(case, active):
    tensors, offsets = packed_inputs("cpu", torch.float32)
    more, call = {}, {"dropout_p": 0.1 * (case == "dropout"), "debug": case == "debug"}
    if case == "pages" and FLASH_OUT not in NAMES:
        pytest.skip("since torch 2.13")
    if case == "pages":
        more = {"block_table": torch.zeros(3, 1, dtype=torch.int32)}
    if case == "slopes":
        more = {"alibi_slopes": torch.rand(4)}
    if case == "one offset":
        offsets[1] = None
    if case == "long offsets":
        offsets = [x.long() for x in offsets]
    if case == "no kernel":
        tensors = [x.repeat(1, 1, 17) for x in tensors]
    assert call_forward(tensors, offsets, **call, **more, scale=2.0)[0].item() == 7
    ((arguments, keywords),) = active[FLASH].calls
    given = (*tensors[:3], *offsets, 7, 9, call["dropout_p"], True, call["debug"])
    assert_same_arguments(arguments, given)
    assert keywords.pop("scale") == 2.0
    assert_same_arguments([x for x in keywords.values() if x is not None], more.values())
    if FLASH_OUT in NAMES:
        out = torch.zeros_like(tensors[0])
        assert aten(FLASH_OUT)(out, *given, **more, scale=2.0).item() == 7
        ((arguments, _),) = active[FLASH_OUT].calls
        assert_same_arguments(arguments, (out, *given))
    if case in ("debug", "pages", "slopes"):
        return
    q, k, v, dout = tensors
    given = (dout, q, k, v, q, q, *offsets, 7, 9, call["dropout_p"], True, q, k)
    found = aten(FLASH_BACKWARD)(*given, scale=2.0, window_size_left=3)
    assert [x.item() for x in found] == [7, 7, 7]
    ((arguments, keywords),) = active[FLASH_BACKWARD].calls
    assert_same_arguments(arguments, given)
    assert keywords == {"scale": 2.0, "window_size_left": 3}


@pytest.mark.gpu
@windows
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn_on_the_gpu(window, compiled, torchs):
    # Torch 2.11 has is_causal in place of window_size.
    has_window = "window_size" in inspect.signature(varlen_attn).parameters
    if not has_window and window[0] != -1:
        pytest.skip("this torch's varlen_attn has no windows")
    more = {"window_size": window} if has_window else {"is_causal": window == (-1, 0)}
    tensors, offsets = packed_inputs("cuda", torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    expected, expected_gradients = expected_of(tensors, offsets, window)

    def attend(*leaves):
        return varlen_attn(*leaves, *offsets, max(LENGTHS_Q), max(LENGTHS_K), **more)

    run = torch.compile(attend, backend="aot_eager") if compiled else attend
    with sdpa.activated():
        out = run(*leaves)
        gradients = torch.autograd.grad(out, leaves, tensors[3])
    assert not torchs
    for x, y in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert_like(x, y, torch.bfloat16)
    attend(*leaves)
