"""A sequence split over 2 and 4 GPUs, with NCCL: the cases of distributed_cases.py, enlarged.

    python -m pytest -n 0 tests/test_distributed_gpu.py   # where GPUs are fewer, it skips

Would catch a kernel that reads what has not arrived, a buffer that is reused while it is sent, and
what only a GPU has: its combining kernel, TMA on strided keys, torch's context_parallel.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import distributed_cases
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import Case, check_by_rule, mesh_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from flash_ext.integrations import distributed as cp
from flash_ext.integrations import sdpa

RANKS = (2, 4)
REPEATS = 20


def enlarged(case: Case) -> Case:
    """Many tiles, of the head dims that models have."""
    options = dict(case.options)
    if "window" in options:
        options["window"] = tuple(30 * side if side > 0 else side for side in options["window"])
    documents = case.documents
    if documents is not None:
        documents = tuple(41 * edge for edge in documents)
    rows = case.rows if case.rows < 8 else 41 * case.rows
    dims = {"dim": 16 * case.dim, "dim_v": 16 * case.dim_v}
    return dataclasses.replace(case, rows=rows, options=options, documents=documents, **dims)


def check_cases(ranks: int, device: str) -> None:
    mesh = mesh_of(ranks, device)
    for number, case in enumerate(distributed_cases.cases(ranks)):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        check_by_rule(enlarged(case), mesh if case.two_levels else None, dtype, "auto")


def check_variants(ranks: int, device: str) -> None:
    heads = {"heads_q": 4 * ranks, "heads_k": 2 * ranks}
    for method, variant in itertools.product(cp.METHODS, flash_ext.VARIANTS):
        if torch.cuda.get_device_capability()[0] != 9 and variant == "fa3":
            continue
        case = Case(method, rows=29, options={"causal": True}, **heads)
        check_by_rule(enlarged(case), None, torch.bfloat16, variant)


def check_races(ranks: int, device: str) -> None:
    """The same call again and again gives the same bits: nothing is read before it has arrived."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(1, 4096, 4 * ranks, 128, **like)
    k, v = (torch.randn(1, 4096, 2 * ranks, 128, **like) for _ in range(2))
    dout = cp.shard(torch.randn_like(q))
    for method in cp.METHODS:
        results = []
        for _ in range(REPEATS):
            leaves = [cp.shard(x).detach().requires_grad_() for x in (q, k, v)]
            out = cp.attention(*leaves, causal=True, method=method, deterministic=True)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        for found in results[1:]:
            for x, first in zip(found, results[0], strict=True):
                assert torch.equal(x, first), method


def check_no_host_wait(ranks: int, device: str) -> None:
    """Nothing in a call waits for the device."""
    like = {"device": device, "dtype": torch.bfloat16}
    leaves = [torch.randn(1, 256, 4 * ranks, 64, **like).requires_grad_() for _ in range(3)]
    for method in cp.METHODS:
        for warm in (True, False):
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            try:
                out = cp.attention(*leaves, causal=True, method=method)
                torch.autograd.grad(out, leaves, torch.ones_like(out))
            finally:
                torch.cuda.set_sync_debug_mode("default")


def check_context_parallel(ranks: int, device: str) -> None:
    """torch's own context_parallel, with flash_ext under SDPA's flash backend."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (ranks,))
    like = {"device": device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, 4, 512 * ranks, 64, **like) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    exact = (expected.detach(), *torch.autograd.grad(expected, whole, dout))
    buffers = [x.clone() for x in (q, k, v, dout, *exact)]
    with (
        sdpa.activated(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
    ):
        *parts, of_rank, out_here, dq_here, dk_here, dv_here = (x.clone() for x in buffers)
        leaves = [x.requires_grad_() for x in parts]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        found = (out, *torch.autograd.grad(out, leaves, of_rank))
        for x, e in zip(found, (out_here, dq_here, dk_here, dv_here), strict=True):
            torch.testing.assert_close(x.float(), e.float(), rtol=2e-2, atol=2e-2)


CHECKS = (
    check_cases,
    check_variants,
    check_races,
    check_no_host_wait,
    check_context_parallel,
)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_split_over_gpus(check, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    run_ranks(ranks, "cuda", check)
