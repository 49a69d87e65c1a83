"""flash_ext under SDPA: what is registered and undone, the translation, the way back to torch.

Would catch an override or a cuDNN switch that outlives restore(), an import that activates, scores
scaled or masked otherwise than aten's ops are, results with other strides than theirs, and calls
that flash_ext does not support and yet takes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from flash_ext import ops
from flash_ext.integrations import sdpa

OPS = tuple(f"aten::{name}" for name in (sdpa._FORWARD, sdpa._BACKWARD))
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
    found = {name: Original() for name in (sdpa._FORWARD, sdpa._BACKWARD)}
    monkeypatch.setattr(sdpa, "_original", found.__getitem__)
    monkeypatch.setattr(ops, "cuda_missing", None)
    yield found
    sdpa.restore()


def overridden() -> list[bool]:
    return [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in OPS]


def inputs(layout: str, dtype=torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    tensors = torch.randn(4, *SHAPES[layout], device=device, dtype=dtype)
    return tensors if layout == "bhsd" else tensors.transpose(2, 3)


no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA kernels")


@no_cuda
def test_activate_and_restore(originals):
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    assert overridden() == [False, False]
    for _ in range(2):
        sdpa.activate()
        assert overridden() == [True, True] and current_flash_attention_impl() == sdpa.NAME
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):
        sdpa.restore()
        assert overridden() == [False, False] and current_flash_attention_impl() is None
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


@no_cuda
def test_with_block(originals):
    with pytest.raises(KeyError), sdpa.activated():
        assert overridden() == [True, True]
        raise KeyError
    assert overridden() == [False, False] and current_flash_attention_impl() is None
    sdpa.activate()
    with sdpa.activated():
        pass
    assert current_flash_attention_impl() == sdpa.NAME


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
    assert overridden() == [False, False]


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
        monkeypatch.setattr(sdpa, "_has_kernel", lambda *tensors: False)
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
