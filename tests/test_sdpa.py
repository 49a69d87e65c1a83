"""flash_ext under SDPA: what is registered and undone, the translation, the way back to torch.

Would catch an override or a cuDNN switch that outlives restore(), an import that activates, scores
scaled or masked otherwise than aten's ops are, results with other strides than theirs, and calls
that flash_ext does not support and yet takes.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flash_ext
from flash_ext import ops
from flash_ext.integrations import _varlen, sdpa

NAMES = tuple(sdpa._overrides())
SHAPES = {"bhsd": (2, 4, 6, 8), "bshd": (2, 6, 4, 8)}


class Original:
    """A kernel of torch, which records how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def call_boxed(self, *arguments, **keywords):
        self.calls.append((arguments, keywords))
        return "torch's"


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Original]]:
    """As if this torch had CUDA kernels of SDPA and flash_ext's were built."""
    found = {name: Original() for name in NAMES}
    monkeypatch.setattr(sdpa, "_original", found.__getitem__)
    monkeypatch.setattr(ops, "cuda_missing", None)
    yield found
    sdpa.restore()


def overridden() -> bool:
    found = {
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in NAMES
    }
    assert len(found) == 1, "some are and some are not"
    return found.pop()


def inputs(layout: str, dtype=torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    tensors = torch.randn(4, *SHAPES[layout], device=device, dtype=dtype)
    return tensors if layout == "bhsd" else tensors.transpose(2, 3)


no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA kernels")


@no_cuda
def test_activate_and_restore(originals):
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    assert not overridden()
    for _ in range(2):
        sdpa.activate()
        assert overridden() and current_flash_attention_impl() == sdpa.NAME
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):
        sdpa.restore()
        assert not overridden() and current_flash_attention_impl() is None
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


@no_cuda
def test_with_block(originals):
    with pytest.raises(KeyError), sdpa.activated():
        assert overridden()
        raise KeyError
    assert not overridden() and current_flash_attention_impl() is None
    sdpa.activate()
    with sdpa.activated():
        pass
    assert current_flash_attention_impl() == sdpa.NAME


@no_cuda
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


@no_cuda
def test_blocks_within_blocks(originals):
    with sdpa.activated():
        with sdpa.activated():
            sdpa.activate()
        assert overridden()
    assert not overridden()


@no_cuda
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
ops.cuda_missing = None
library = torch.library.Library("aten", "IMPL", "CUDA")
if torch.version.cuda is None:
    for name in sdpa._overrides():
        library.impl(name, lambda *x, **y: "torch's", "CUDA")
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
    root = Path(sdpa.__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", ACTIVATE_OVER_KERNELS], cwd=root, capture_output=True, text=True
    )
    assert found.returncode == 0 and not found.stderr, found.stderr


@no_cuda
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


@no_cuda
def test_torch_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(ops, "cuda_missing", None)
    with pytest.raises(RuntimeError, match="no CUDA kernels of SDPA"):
        sdpa.activate()
    assert current_flash_attention_impl() is None


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
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_translation(layout, is_causal, scale):
    """The kernels as aten would call them, on CPU tensors, against SDPA's math backend."""
    dout, *leaves = inputs(layout)
    leaves = [x.detach().requires_grad_() for x in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    gradients = torch.autograd.grad(expected, leaves, dout)
    q, k, v = (x.detach() for x in leaves)

    kernel = sdpa._forward_kernel(None)
    out, lse, cum_q, cum_k, *rest = kernel(None, q, k, v, 0.0, is_causal, scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert out.stride() == torch.empty_like(q).stride()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert (cum_q, cum_k, *rest[:2]) == (None, None, 6, 6)
    seed, offset, debug = rest[2:]
    assert seed.shape == (2,) and seed.dtype == offset.dtype == torch.uint64 and not debug.numel()

    kernel = sdpa._backward_kernel(None)
    options = (None, None, 6, 6, 0.0, is_causal, seed, offset)
    actual = kernel(None, dout, q, k, v, out, lse, *options, scale=scale)
    for x, y, like in zip(actual, gradients, (q, k, v), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        assert x.stride() == torch.empty_like(like).stride()


@pytest.mark.parametrize("case", ["dropout", "debug", "empty", "no kernel"])
def test_falls_back(case, monkeypatch):
    q, k, v, dout = inputs("bhsd")
    if case == "no kernel":
        monkeypatch.setattr(sdpa, "has_kernel", lambda *tensors: False)
    if case == "empty":
        k, v = k[:, :, :0], v[:, :, :0]
    p, debug = 0.1 * (case == "dropout"), case == "debug"
    original = Original()
    assert sdpa._forward_kernel(original)("keys", q, k, v, p, True, debug, scale=2.0) == "torch's"
    ((arguments, keywords),) = original.calls
    assert arguments == ("keys", q, k, v, p, True, debug) and keywords == {"scale": 2.0}
    if debug:
        return
    original = Original()
    given = ("keys", dout, q, k, v, q, q, None, None, 6, 6, p, True, "seed", "offset")
    assert sdpa._backward_kernel(original)(*given, scale=2.0) == "torch's"
    ((arguments, keywords),) = original.calls
    assert all(x is y for x, y in zip(arguments, given, strict=True)) and keywords["scale"] == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_on_the_gpu(layout, is_causal, compiled, monkeypatch):
    dout, *leaves = inputs(layout, torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    gradients = torch.autograd.grad(expected, leaves, dout)
    ran = []
    for name in ("forward", "backward"):
        call = getattr(sdpa, name)
        monkeypatch.setattr(sdpa, name, lambda *a, c=call, n=name: ran.append(n) or c(*a))
    attend = F.scaled_dot_product_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager")
    with sdpa.activated():
        out = attend(*leaves, is_causal=is_causal)
        actual = torch.autograd.grad(out, leaves, dout)
    assert ran == ["forward", "backward"]
    for x, y in zip((out, *actual), (expected, *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    attend(*leaves, is_causal=is_causal)
    assert len(ran) == 2


@pytest.mark.gpu
def test_dropout_and_masks_stay_with_torch():
    _, *leaves = inputs("bhsd", torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]
    mask = torch.rand(6, 6, device="cuda") < 0.8
    for options in ({"dropout_p": 0.3}, {"attn_mask": mask}):
        with sdpa.activated():
            torch.manual_seed(1)
            out = F.scaled_dot_product_attention(*leaves, **options)
            out.sum().backward()
        assert all(x.grad.isfinite().all() for x in leaves)


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


@pytest.fixture
def flash_ops_on_cpu() -> Iterator[list[str]]:
    """The overrides as kernels of the CPU, where torch has none; which of them ran."""
    library, ran = torch.library.Library("aten", "IMPL", "CPU"), []
    for name, make in sdpa._overrides().items():
        if name not in (sdpa._FORWARD, sdpa._BACKWARD):
            kernel = make(Original())
            recorded = lambda *a, _n=name, _k=kernel, **o: ran.append(_n) or _k(*a, **o)  # noqa: E731
            library.impl(name, recorded, "CPU", with_keyset=True)
    yield ran
    library._destroy()


@windows
def test_varlen_attn(window, flash_ops_on_cpu):
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
    assert flash_ops_on_cpu == [_varlen.FORWARD, _varlen.BACKWARD]


@pytest.mark.skipif(not hasattr(torch.ops.aten, _varlen.FORWARD_OUT), reason="since torch 2.13")
def test_varlen_attn_out(flash_ops_on_cpu):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    tensors, offsets = packed_inputs("cpu", torch.float32, heads_k=2)
    out = torch.full_like(tensors[0], torch.nan)
    _, lse = varlen_attn_out(
        out, *tensors[:3], *offsets, max(LENGTHS_Q), max(LENGTHS_K), window_size=(-1, 0),
        enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    expected, _ = expected_of(tensors, offsets, (-1, 0))
    assert_like(out, expected, torch.float32)
    assert lse.shape == (4, sum(LENGTHS_Q)) and flash_ops_on_cpu == [_varlen.FORWARD_OUT]


def call_forward(original, tensors, offsets, dropout_p=0.0, debug=False, **more):
    q, k, v, _ = tensors
    kernel = _varlen.forward_kernel(original)
    return kernel("keys", q, k, v, *offsets, 7, 9, dropout_p, True, debug, **more)


def test_dense_flash_op():
    """(B, S, H, D) without offsets, of the strides of the inputs."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs("bhsd"))
    out, lse, *rest = call_forward(None, (q, k, v, dout), (None, None), scale=0.3)
    expected = flash_ext.reference.attention(q, k, v, causal=True, scale=0.3)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-5)
    assert out.stride() == torch.empty_like(q).stride()
    assert [x.dtype for x in rest[:2]] == [torch.uint64] * 2 and not rest[2].numel()


def test_used_keys_of_a_cache():
    tensors, offsets = packed_inputs("cpu", torch.float32)
    used = torch.tensor([5, 0, 2], dtype=torch.int32)
    out = call_forward(None, tensors, offsets, seqused_k=used, num_splits=1)[0]
    q, k, v, _ = tensors
    expected = flash_ext.attention_varlen(q, k, v, *offsets, causal=True, seqused_k=used)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "case", ["dropout", "debug", "pages", "slopes", "one offset", "long offsets", "no kernel"]
)
def test_varlen_falls_back(case, monkeypatch):
    tensors, offsets = packed_inputs("cpu", torch.float32)
    more, call = {}, {"dropout_p": 0.1 * (case == "dropout"), "debug": case == "debug"}
    if case == "pages":
        more = {"block_table": torch.zeros(3, 1, dtype=torch.int32)}
    if case == "slopes":
        more = {"alibi_slopes": torch.rand(4)}
    if case == "one offset":
        offsets[1] = None
    if case == "long offsets":
        offsets = [x.long() for x in offsets]
    if case == "no kernel":
        monkeypatch.setattr(_varlen, "has_kernel", lambda *tensors: False)
    original = Original()
    assert call_forward(original, tensors, offsets, **call, **more, scale=2.0) == "torch's"
    ((arguments, keywords),) = original.calls
    given = ("keys", *tensors[:3], *offsets, 7, 9, call["dropout_p"], True, call["debug"])
    assert all(x is y or x == y for x, y in zip(arguments, given, strict=True))
    assert keywords == more | {"scale": 2.0}
    if case in ("debug", "pages", "slopes"):
        return
    original, (q, k, v, dout) = Original(), tensors
    given = (dout, q, k, v, q, q, *offsets, 7, 9, call["dropout_p"], True, "state", "unused")
    assert _varlen.backward_kernel(original)("keys", *given, scale=2.0) == "torch's"
    ((arguments, keywords),) = original.calls
    assert all(x is y for x, y in zip(arguments[1:], given, strict=True)) and keywords["scale"] == 2


@pytest.mark.gpu
@windows
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn_on_the_gpu(window, compiled, monkeypatch):
    # Torch 2.11 has is_causal in place of window_size.
    has_window = "window_size" in inspect.signature(varlen_attn).parameters
    if not has_window and window[0] != -1:
        pytest.skip("this torch's varlen_attn has no windows")
    more = {"window_size": window} if has_window else {"is_causal": window == (-1, 0)}
    tensors, offsets = packed_inputs("cuda", torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    expected, expected_gradients = expected_of(tensors, offsets, window)
    ran = []
    for name in ("forward", "backward"):
        call = getattr(_varlen, name)
        monkeypatch.setattr(_varlen, name, lambda *a, c=call, n=name: ran.append(n) or c(*a))

    def attend(*leaves):
        return varlen_attn(*leaves, *offsets, max(LENGTHS_Q), max(LENGTHS_K), **more)

    run = torch.compile(attend, backend="aot_eager") if compiled else attend
    with sdpa.activated():
        out = run(*leaves)
        gradients = torch.autograd.grad(out, leaves, tensors[3])
    assert ran == ["forward", "backward"]
    for x, y in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert_like(x, y, torch.bfloat16)
    attend(*leaves)
    assert len(ran) == 2
