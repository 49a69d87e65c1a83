"""torch's own context_parallel, with flash_ext's kernels below SDPA's flash backend.

Would catch a kernel of ours that the ring of torch cannot use: a step whose keys are a half, an lse
of another form, gradients with the lse of all keys, and a call that goes to torch's kernel.

On the CPU csrc/api/sdpa.cpp is compiled for flash_ext's CPU kernels, as in test_sdpa.py. SDPA would
not choose the flash op there, so the op itself is called.
"""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import compiled
import torch.nn.functional as F
from distributed_cases import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_ext import ops
from flash_ext.integrations import sdpa


def check_on_the_cpu(ranks: int, device: str) -> None:
    compiled.load_host_side()
    ops.cuda_missing, sdpa._DEVICE = None, "CPU"
    taken: list[str] = []
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in sdpa._schemas():
        library.impl(name, lambda *x, name=name, **y: taken.append(name), "CPU")
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (ranks,))
    q, k, v, dout = torch.randn(4, 2, 3, 8 * ranks, 16).unbind()
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    exact = (expected.detach(), *torch.autograd.grad(expected, whole, dout))
    buffers = [x.clone() for x in (q, k, v, dout, *exact)]
    with (
        sdpa.activated(),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
    ):
        # torch wraps F's function, and puts the wrapper where the function's name says.
        assert F.scaled_dot_product_attention is not sdpa._sdpa
        *parts, of_rank, out_here, dq_here, dk_here, dv_here = (x.clone() for x in buffers)
        assert parts[0].shape[2] == 8
        leaves = [DTensor.from_local(x, mesh, [Shard(2)]).requires_grad_() for x in parts]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, True)[0]
        grad = DTensor.from_local(of_rank, mesh, [Shard(2)])
        found = (out, *torch.autograd.grad(out, leaves, grad))
        for x, e in zip(found, (out_here, dq_here, dk_here, dv_here), strict=True):
            torch.testing.assert_close(x.to_local(), e, rtol=1e-4, atol=1e-5)
    assert not taken


def test_on_the_cpu() -> None:
    compiled.load_host_side()  # once, not in every process
    run_ranks(2, "cpu", check_on_the_cpu)
