"""DTensors over two ranks: results and gradients of the whole, and what is split how.

Would catch a rule that gathers what it could compute in parts, a gradient that lacks the other
rank's share, key heads that meet the wrong queries, parts that drop by the same mask, replicas that
drop by different ones, and a model whose tensor-parallel training differs from that on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from attention_testing import FP8, Problem, attend, device_unsupported_reason, make_inputs
from distributed_cases import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flash_ext

RANKS = 2
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

BATCH, HEADS, NOTHING, SEQUENCE = Shard(0), Shard(2), Replicate(), Shard(1)
DENSE = Problem(2, 20, 30, 4, 2, 16, causal=True)
EVERYTHING = dataclasses.replace(
    DENSE, alibi="bh", bias="bhqk", bias_type="float32", sink=True, seqused_k=(30, 7), softcap=3.0
)
BROADCAST = dataclasses.replace(DENSE, alibi="h", bias="11qk", bias_type="float32", sink=True)
SELF = dataclasses.replace(DENSE, seqlen_q=29, seqlen_k=29)
WINDOW = dataclasses.replace(SELF, window=(7, 3), causal=False, sink=True, softcap=3.0)
SELF_ALIBI = dataclasses.replace(SELF, alibi="bh")
MQA = dataclasses.replace(DENSE, heads_k=1)
PACKED = Problem(
    lengths_q=(9, 0, 12), lengths_k=(9, 3, 12), heads_q=4, heads_k=2, head_dim=16, alibi="h",
    sink=True, tail=0,
)  # fmt: skip
# Of q, k and v; of out; and of the gradients of q, k, v and the rest.
CASES = (
    (DENSE, (HEADS,) * 3, HEADS, (HEADS,) * 3),
    (DENSE, (BATCH,) * 3, BATCH, (BATCH,) * 3),
    (DENSE, (NOTHING,) * 3, NOTHING, (NOTHING,) * 3),
    (DENSE, (SEQUENCE,) * 3, NOTHING, (NOTHING,) * 3),
    (SELF, (SEQUENCE,) * 3, SEQUENCE, (SEQUENCE,) * 3),
    (SELF, (SEQUENCE, NOTHING, NOTHING), SEQUENCE, (SEQUENCE,) * 3),
    (WINDOW, (SEQUENCE,) * 3, SEQUENCE, (SEQUENCE, SEQUENCE, SEQUENCE, Partial())),
    (SELF_ALIBI, (SEQUENCE,) * 3, SEQUENCE, (SEQUENCE,) * 3),
    (dataclasses.replace(SELF_ALIBI, causal=False), (SEQUENCE,) * 3, NOTHING, (NOTHING,) * 3),
    (DENSE, (NOTHING, HEADS, NOTHING), HEADS, (HEADS,) * 3),
    (EVERYTHING, (HEADS,) * 3, HEADS, (HEADS, HEADS, HEADS, Shard(1), Shard(0))),
    (EVERYTHING, (BATCH,) * 3, BATCH, (BATCH, BATCH, BATCH, Shard(0), Partial())),
    (BROADCAST, (HEADS,) * 3, HEADS, (HEADS, HEADS, HEADS, Partial(), Shard(0))),
    (BROADCAST, (BATCH,) * 3, BATCH, (BATCH, BATCH, BATCH, Partial(), Partial())),
    (MQA, (HEADS, NOTHING, NOTHING), HEADS, (HEADS, Partial(), Partial())),
    (dataclasses.replace(DENSE, batch=3), (BATCH,) * 3, BATCH, (BATCH,) * 3),
    (dataclasses.replace(DENSE, batch=1), (BATCH,) * 3, NOTHING, (NOTHING,) * 3),
    (dataclasses.replace(DENSE, heads_q=9, heads_k=3), (HEADS,) * 3, NOTHING, (NOTHING,) * 3),
    (PACKED, (Shard(1),) * 3, Shard(1), (Shard(1), Shard(1), Shard(1), Shard(0))),
    (PACKED, (Shard(0),) * 3, NOTHING, (NOTHING,) * 4),
)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(
        whole.double(), expected.double(), rtol=2e-2, atol=2e-2, msg=lambda m: f"{what}: {m}"
    )


def distributed(problem: Problem, mesh: DeviceMesh, placements) -> tuple:
    """The same call on whole tensors and on DTensors: (inputs, inputs)."""
    inputs = make_inputs(problem, mesh.device_type)
    parts = {
        name: distribute_tensor(getattr(inputs, name).detach(), mesh, [placement] * mesh.ndim)
        for name, placement in zip("qkv", placements, strict=True)
    }
    for name in ("bias", "sink"):
        if getattr(inputs, name) is not None:
            parts[name] = distribute_tensor(getattr(inputs, name).detach(), mesh)
    return inputs, dataclasses.replace(
        inputs, **{name: x.requires_grad_() for name, x in parts.items()}
    )


def check_cases(mesh: DeviceMesh) -> None:
    for problem, placements, of_out, of_gradients in CASES:
        what = f"{problem} {placements}"
        whole, parts = distributed(problem, mesh, placements)
        options = {"return_lse": True, "deterministic": True}
        expected, comm = attend(problem, whole, **options), CommDebugMode()
        with comm:
            out, lse = attend(problem, parts, **options)
        silent = len(set(placements)) == 1 and placements[0] == of_out != SEQUENCE
        if silent and all(x is None for x in (whole.bias, whole.sink)):
            assert comm.get_total_counts() == 0, what
        assert out.placements == (of_out,), f"{what}: {out.placements}"
        close(out, expected[0], what)
        finite = torch.isfinite(expected[1])
        close(lse.full_tensor()[finite], expected[1][finite], what)
        leaves = parts.leaves()
        found = torch.autograd.grad(
            (out, lse), tuple(leaves.values()),
            tuple(distribute_tensor(x, mesh) for x in (whole.dout, whole.dlse)),
        )  # fmt: skip
        exact = torch.autograd.grad(
            expected, tuple(whole.leaves().values()), (whole.dout, whole.dlse)
        )
        for name, x, e, placement in zip(leaves, found, exact, of_gradients, strict=True):
            assert x.placements == (placement,), f"{what}, {name}: {x.placements}"
            close(x, e, f"{what}, {name}")


def check_explained(mesh: DeviceMesh) -> None:
    """What runs on a rank's part, or the reason that the call itself gives."""
    whole, parts = distributed(DENSE, mesh, (SEQUENCE, HEADS, HEADS))
    plain = flash_ext.explain(whole.q, whole.k, whole.v, causal=True)
    explanation = flash_ext.explain(parts.q, parts.k, parts.v, causal=True)
    assert explanation.variant == plain.variant is not None
    assert str(explanation) == str(plain)
    inputs = make_inputs(SELF, mesh.device_type)
    split = [
        distribute_tensor(x.detach(), mesh, [SEQUENCE]) for x in (inputs.q, inputs.k, inputs.v)
    ]
    with CommDebugMode() as communication:
        explanation = flash_ext.explain(*split, causal=True)
    assert explanation.variant is not None and not communication.get_total_counts(), (
        communication.get_comm_counts()
    )
    explanation = flash_ext.explain(parts.q, parts.k, parts.v, softcap=-1.0)
    assert explanation.variant is None and "softcap must be" in str(explanation)


def check_inference(mesh: DeviceMesh) -> None:
    """The first call of a process, without any autograd; only k is split."""
    whole, parts = distributed(DENSE, mesh, (NOTHING, HEADS, HEADS))
    with torch.inference_mode():
        out = flash_ext.attention(whole.q.detach(), parts.k, parts.v, causal=True)
    close(out, attend(DENSE, whole), "inference")


def check_two_dimensions(mesh: DeviceMesh) -> None:
    """A mesh for the batch and one for the heads."""
    square = init_device_mesh(mesh.device_type, (1, RANKS), mesh_dim_names=("data", "tensor"))
    inputs = make_inputs(DENSE, mesh.device_type)
    q, k, v = (distribute_tensor(x.detach(), square, [BATCH, HEADS])
               for x in (inputs.q, inputs.k, inputs.v))  # fmt: skip
    out = flash_ext.attention(q, k, v, causal=True)
    assert out.placements == (BATCH, HEADS)
    close(out, attend(DENSE, inputs), "two dimensions")
    inputs = make_inputs(SELF, mesh.device_type)
    for shape, placements in (
        ((1, RANKS), [BATCH, SEQUENCE]),
        ((RANKS, 1), [SEQUENCE, HEADS]),
        ((1, RANKS), [SEQUENCE, HEADS]),
        ((RANKS, 1), [HEADS, SEQUENCE]),
    ):
        square = init_device_mesh(mesh.device_type, shape)
        q, k, v = (distribute_tensor(x.detach(), square, placements)
                   for x in (inputs.q, inputs.k, inputs.v))  # fmt: skip
        out = flash_ext.attention(q, k, v, causal=True)
        assert out.placements == tuple(placements)
        close(out, attend(SELF, inputs), "two dimensions, one of them the sequence")


def check_fp8(mesh: DeviceMesh) -> None:
    """Descales follow the batch elements and heads that they belong to."""
    if device_unsupported_reason("fa3", mesh.device_type) and mesh.device_type == "cuda":
        return
    problem = dataclasses.replace(
        DENSE, dtype=FP8, seqlen_k=150, q_descale="fine", k_descale="head", v_descale="fine"
    )
    whole = make_inputs(problem, mesh.device_type)
    expected = attend(problem, whole, variant="fa3")
    for placement in (HEADS, BATCH):
        parts = {
            name: DTensor.from_local(
                getattr(whole, name).chunk(RANKS, placement.dim)[mesh.get_rank()].contiguous(),
                mesh,
                [placement],
            )
            for name in "qkv"
        }
        out = attend(problem, dataclasses.replace(whole, **parts), variant="fa3")
        assert out.placements == (placement,) and out.dtype == torch.bfloat16
        close(out, expected, f"FP8 {placement}")


def check_dropout(mesh: DeviceMesh) -> None:
    """Two equal halves drop unalike; the backward pass has the forward's masks."""
    torch.manual_seed(0)
    like = {"device": mesh.device_type, "dtype": torch.bfloat16}
    q, k, v = torch.randn(3, 1, 40, 1, 16, **like).expand(3, 1, 40, RANKS, 16).unbind()
    rng_state = torch.tensor([1, 2], device=mesh.device_type)
    q, k, v = (distribute_tensor(x.contiguous(), mesh, [HEADS]).requires_grad_() for x in (q, k, v))
    out = flash_ext.attention(q, k, v, dropout_p=0.5, rng_state=rng_state)
    whole = out.full_tensor().detach()
    assert not torch.equal(whole[:, :, 0], whole[:, :, 1])
    (dv,) = torch.autograd.grad(out, v, out.detach())
    through_out = whole.double().square().sum()  # out is linear in v
    through_v = (v.full_tensor().double() * dv.full_tensor().double()).sum()
    torch.testing.assert_close(through_out, through_v, rtol=2e-2, atol=2e-2)


def check_replicated_dropout(mesh: DeviceMesh) -> None:
    """Generators that differ; out and gradients that are marked as replicated are."""
    torch.manual_seed(dist.get_rank())
    square = init_device_mesh(mesh.device_type, (RANKS, 1), mesh_dim_names=("data", "tensor"))
    cases = ((mesh, [NOTHING]), (mesh, [SEQUENCE]), (square, [NOTHING, HEADS]))
    compiled = torch.compile(flash_ext.attention, backend="aot_eager", fullgraph=True)
    for attention in (flash_ext.attention, compiled):
        for of_case, placements in cases:
            inputs = make_inputs(DENSE, mesh.device_type)
            leaves = [
                distribute_tensor(x.detach(), of_case, placements).requires_grad_()
                for x in (inputs.q, inputs.k, inputs.v)
            ]
            out = attention(*leaves, dropout_p=0.5)
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for x in (out, *gradients):
                assert x.placements[0] == NOTHING
                each = DTensor.from_local(
                    x.to_local()[None], of_case, [Shard(0), NOTHING][: of_case.ndim]
                )
                first, second = each.full_tensor()
                assert torch.equal(first, second), f"{attention} {placements}"


def check_compiled(mesh: DeviceMesh) -> None:
    whole, parts = distributed(DENSE, mesh, (HEADS,) * 3)
    attend_compiled = torch.compile(
        lambda q, k, v: flash_ext.attention(q, k, v, causal=True), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    out = attend_compiled(parts.q, parts.k, parts.v)
    assert out.placements == (HEADS,)
    expected = attend(DENSE, whole)
    close(out, expected, "compiled")
    dout = distribute_tensor(whole.dout, mesh)
    (dq,) = torch.autograd.grad(out, parts.q, dout)
    close(dq, torch.autograd.grad(expected, whole.q, whole.dout)[0], "compiled dq")


class Attention(nn.Module):
    """Grouped-query self-attention of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 16)) for f in (self.q, self.k, self.v))
        return self.out(flash_ext.attention(q, k, v, causal=True).flatten(2))


def check_model(mesh: DeviceMesh) -> None:
    """As in docs/integrations/distributed.md: a training step has the same loss and gradients."""
    for use_local_output in (False, True):  # DTensors in the attention, or this rank's heads
        torch.manual_seed(1)
        model = Attention().to(mesh.device_type, torch.bfloat16)
        x = torch.randn(2, 12, 32, device=mesh.device_type, dtype=torch.bfloat16)
        expected = model(x)
        expected.square().sum().backward()
        gradients = {name: w.grad.clone() for name, w in model.named_parameters()}
        model.zero_grad()
        colwise = ColwiseParallel(use_local_output=use_local_output)
        plan = {"q": colwise, "k": colwise, "v": colwise, "out": RowwiseParallel()}
        out = parallelize_module(model, mesh, plan)(x)
        out.square().sum().backward()
        close(out, expected, "model")
        for name, w in model.named_parameters():
            assert w.placements[0].is_shard() or name == "out.bias"
            close(w.grad, gradients[name], name)


CHECKS = (
    check_inference,
    check_explained,
    check_cases,
    check_two_dimensions,
    check_fp8,
    check_dropout,
    check_replicated_dropout,
    check_compiled,
    check_model,
)


def check_all(ranks: int, device: str) -> None:
    mesh = init_device_mesh(device, (ranks,))
    for check in CHECKS:
        check(mesh)


def test_two_ranks(device: str, need_gpus: Callable[[int], None]) -> None:
    if device == "cuda":
        need_gpus(RANKS)
    run_ranks(RANKS, device, check_all)
