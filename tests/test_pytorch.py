"""What a model needs of an op apart from its result: autocast, torch.func, checkpointing, export.

Would catch a transform that sees constants where there are derivatives, statistics or slopes that
autocast rounds, a vmap that mixes its elements or calls the op once for each, an op that selective
checkpointing does not recognize, FLOPs that differ from SDPA's, and a graph that only this process
can run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_testing import Problem, assert_bitwise_equal, make_inputs
from forked import run_python
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import flash_ext

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's own

FWD, BWD = torch.ops.flash_ext.fwd.default, torch.ops.flash_ext.bwd.default
ENTRIES = {"attention": flash_ext.attention, "op": lambda *x, **o: FWD(*x, **o)[0]}
entries = pytest.mark.parametrize("entry", ENTRIES)


class Record(TorchDispatchMode):
    """The calls of the ops' kernels: what was called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (FWD, BWD):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def count(self, op) -> int:
        return sum(func is op for func, *_ in self.calls)


def randn(*shape: int, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In a type that the device has kernels for."""
    dtype = dtype or (torch.float64 if device == "cpu" else torch.bfloat16)
    return torch.randn(*shape, device=device, dtype=dtype)


def qkv(device: str, *batch: int, seqlen: int = 9, dtype: torch.dtype | None = None):
    torch.manual_seed(0)
    heads = (4, 2, 2)
    return [randn(*batch, seqlen, h, 16, device=device, dtype=dtype) for h in heads]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """As a whole, of numbers that went through roundings of 16 bits on the GPU."""
    limit = 1e-2 if expected.is_cuda else 1e-6
    assert (actual.double() - expected.double()).norm() <= limit * expected.double().norm()


# --- Autocast ---


@entries
def test_autocast(entry: str, device: str) -> None:
    """q, k and v are cast, whatever type each has, and their gradients come back in it."""
    leaves = qkv(device, 2, dtype=torch.float32)
    leaves[1] = leaves[1].half()
    leaves = [x.requires_grad_() for x in leaves]
    with torch.autocast(device, torch.bfloat16):
        out = ENTRIES[entry](*leaves, causal=True)
        with torch.autocast(device, enabled=False), pytest.raises((ValueError, RuntimeError)):
            ENTRIES[entry](*leaves)
    cast = [x.detach().bfloat16().requires_grad_() for x in leaves]
    expected = flash_ext.attention(*cast, causal=True)
    assert_bitwise_equal(out.detach(), expected.detach())
    dout = torch.randn_like(out)
    expected_grads = torch.autograd.grad(expected, cast, dout)
    for actual, e, leaf in zip(
        torch.autograd.grad(out, leaves, dout), expected_grads, leaves, strict=True
    ):
        assert actual.dtype == leaf.dtype
        torch.testing.assert_close(actual.bfloat16(), e)


@entries
@pytest.mark.parametrize("gradients", (False, True))
def test_autocast_leaves_the_rest_alone(entry: str, gradients: bool, device: str) -> None:
    tensors = qkv(device, 1, dtype=torch.float32)
    tensors = [x.requires_grad_(gradients) for x in tensors]
    options = {
        "alibi_slopes": torch.rand(4, device=device),
        "sink": torch.randn(4, device=device),
        "bias": torch.randn(1, 4, 9, 9, device=device),
    }
    with torch.autocast(device, torch.bfloat16), Record() as record:
        out = ENTRIES[entry](*tensors, **options)
        if gradients:
            out.sum().backward()
    (_, given, given_options), *rest = record.calls
    assert all(x.dtype == torch.bfloat16 for x in given)
    for name, x in options.items():
        assert_bitwise_equal(given_options[name], x)
    assert len(rest) == gradients
    assert all(x.dtype == torch.float32 for _, args, _ in rest for x in args[6:])  # lse


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_autocast_casts_nothing_that_is_refused(dtype: torch.dtype, device: str) -> None:
    tensors = [torch.ones(1, 8, 2, 16, device=device).to(dtype) for _ in range(3)]
    for entry in ENTRIES.values():
        with torch.autocast(device, torch.bfloat16), pytest.raises((ValueError, RuntimeError)) as e:
            entry(*tensors)
        assert "q must be float16" in str(e.value)


def test_meta_tensors_under_autocast() -> None:
    tensors = [x.to("meta") for x in qkv("cpu", 1)]
    for device in ("cpu", "cuda"):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cpu"):
            assert flash_ext.attention(*tensors).shape == tensors[0].shape


def test_autocast_leaves_float64_alone() -> None:
    tensors = qkv("cpu", 1, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_ext.attention(*tensors).dtype == torch.float64


def test_autocast_compiled(device: str) -> None:
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in qkv(device, 2, dtype=torch.float32)]

    def forward(*tensors):
        with torch.autocast(device, torch.bfloat16):
            return flash_ext.attention(*tensors, causal=True, deterministic=True)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for attend in (forward, compiled):
        out = attend(*leaves)
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out.float().sum(), leaves)
        if attend is forward:
            expected = (out.detach(), *grads)
    for actual, e in zip((out.detach(), *grads), expected, strict=True):
        assert_bitwise_equal(actual, e)


# --- torch.func ---


@entries
def test_grad_and_vjp(entry: str, device: str) -> None:
    attend = partial(ENTRIES[entry], causal=True, deterministic=True)
    leaves = [x.requires_grad_() for x in qkv(device, 2)]
    dout = randn(2, 9, 4, 16, device=device)
    out = attend(*leaves)
    expected = torch.autograd.grad(out, leaves, dout)
    tensors = [x.detach() for x in leaves]
    found = grad(lambda *x: (attend(*x) * dout).sum(), argnums=(0, 1, 2))(*tensors)
    value, pullback = vjp(attend, *tensors)
    assert_bitwise_equal(value, out.detach())
    for actual, pulled, e in zip(found, pullback(dout), expected, strict=True):
        assert_bitwise_equal(actual, e)
        assert_bitwise_equal(pulled, e)


def test_grad_by_bias_and_sink(device: str) -> None:
    tensors = qkv(device, 1)
    bias, sink = randn(1, 4, 9, 9, device=device), torch.randn(4, device=device)
    loss = lambda bias, sink: flash_ext.attention(*tensors, bias=bias, sink=sink).sum()  # noqa: E731
    leaves = [bias.requires_grad_(), sink.requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, e in zip(grad(loss, (0, 1))(bias.detach(), sink.detach()), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_gradients_of_a_model_for_each_sample(device: str) -> None:
    """vmap of grad, as for differentially private training."""
    model = torch.nn.Linear(16, 48, device=device)
    weights = {name: x.detach() for name, x in model.named_parameters()}
    samples = torch.randn(3, 9, 16, device=device)

    def loss(weights, sample):
        x = functional_call(model, weights, (sample,)).view(1, 9, 3, 16).to(like.dtype)
        return flash_ext.attention(*x.split(1, dim=2), causal=True).float().square().sum()

    like = qkv(device, 1)[0]

    found = vmap(grad(loss), in_dims=(None, 0))(weights, samples)
    for i, sample in enumerate(samples):
        for name, e in grad(loss)(weights, sample).items():
            assert_near(found[name][i], e)


def test_jacobian(device: str) -> None:
    q, k, v = qkv(device, 1, seqlen=3)
    jacobian = jacrev(lambda v: flash_ext.attention(q, k, v))(v)
    # out is linear in v.
    product = torch.einsum("bshdtujk,tujk->bshd", jacobian.double(), v.double())
    assert_near(product, flash_ext.attention(q, k, v))


NESTED = {
    "by the same": lambda loss, q, k: grad(lambda q: grad(loss)(q, k).sum())(q),
    "by another": lambda loss, q, k: grad(lambda k: grad(loss)(q, k).sum())(k),
    "through autograd": lambda loss, q, k: grad(loss)(q.requires_grad_(), k).sum().backward(),
}


@entries
@pytest.mark.parametrize("how", NESTED)
def test_gradient_of_a_gradient_is_refused(how: str, entry: str, device: str) -> None:
    """Rather than taken to be zero."""
    q, k, v = qkv(device, 1)
    with pytest.raises(RuntimeError, match="flash_ext: the gradient of a gradient"):
        NESTED[how](lambda q, k: ENTRIES[entry](q, k, v).float().square().sum(), q, k)


FORWARD_MODE = {
    "jvp": lambda attend, q: jvp(attend, (q,), (q,)),
    "jacfwd": lambda attend, q: jacfwd(attend)(q),
    "hessian": lambda attend, q: hessian(lambda q: attend(q).sum())(q),
}


@entries
@pytest.mark.parametrize("how", (*FORWARD_MODE, "dual numbers", "dual numbers without grad"))
def test_forward_mode_is_refused(how: str, entry: str, device: str) -> None:
    """Rather than taken to be zero."""
    q, k, v = qkv(device, 1)
    attend = lambda q: ENTRIES[entry](q, k, v)  # noqa: E731
    with pytest.raises(RuntimeError, match="flash_ext: forward-mode derivatives"):
        if how in FORWARD_MODE:
            FORWARD_MODE[how](attend, q)
        with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled("without" not in how):
            attend(torch.autograd.forward_ad.make_dual(q, q))


# --- vmap ---

SIZE = 3
BATCH = 2
# Options by name: shape, the mapped dimension if any, and how the values are drawn.
MAPPED = {
    "plain": {},
    "slopes": {"alibi_slopes": ((4,), None)},
    "slopes of batches": {"alibi_slopes": ((BATCH, 4), None)},
    "mapped slopes": {"alibi_slopes": ((4, SIZE), 1)},
    "mapped slopes of batches": {"alibi_slopes": ((BATCH, SIZE, 4), 1)},
    "bias": {"bias": ((1, 4, 9, 9), None)},
    "bias of batches": {"bias": ((BATCH, 1, 1, 9), None)},
    "mapped bias": {"bias": ((1, 4, SIZE, 9, 9), 2)},
    "sink": {"sink": ((4,), None)},
    "mapped sink": {"sink": ((SIZE, 4), 0)},
    "lengths": {"seqused_k": ((BATCH,), None)},
    "mapped lengths": {"seqused_k": ((BATCH, SIZE), 1)},
    "dropout": {"rng_state": ((2,), None)},
}


def mapped_options(case: str, device: str) -> tuple[dict, dict]:
    options, dims = {}, {}
    for name, (shape, dim) in MAPPED[case].items():
        dims[name] = dim
        if name == "seqused_k":
            options[name] = torch.randint(0, 9, shape, device=device, dtype=torch.int32)
        elif name == "rng_state":
            options[name] = torch.tensor([1, 2], device=device)
        else:
            dtype = qkv(device)[0].dtype if device == "cpu" else torch.float32
            options[name] = torch.rand(shape, device=device, dtype=dtype)
    return options, dims


@pytest.mark.parametrize("in_dims", ((0, 0, 0), (0, None, 2), (-1, 1, None)), ids=str)
@pytest.mark.parametrize("case", MAPPED)
def test_vmap(case: str, in_dims: tuple, device: str) -> None:
    """out, lse and the gradients of every tensor, against a loop over the elements."""
    tensors = [
        one if dim is None else every.movedim(0, dim)
        for dim, every, one in zip(
            in_dims, qkv(device, SIZE, BATCH), qkv(device, BATCH), strict=True
        )
    ]
    options, dims = mapped_options(case, device)
    fixed = {"causal": True, "deterministic": True, "dropout_p": 0.3 * (case == "dropout")}
    names = tuple(options)
    argnums = (0, 1, 2, *(3 + i for i, name in enumerate(names) if name in ("bias", "sink")))
    douts = randn(SIZE, BATCH, 9, 4, 16, device=device)
    dlses = torch.randn(SIZE, BATCH, 4, 9, device=device)

    def outputs(q, k, v, *rest):
        given = dict(zip(names, rest, strict=True))
        return flash_ext.attention(q, k, v, return_lse=True, **given, **fixed)

    def gradients(dout, dlse, *arguments):
        def loss(*arguments):
            out, lse = outputs(*arguments)
            return (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0) * dlse).sum()

        return grad(loss, argnums)(*arguments)

    arguments = (*tensors, *(options[n] for n in names))
    every_dim = (*in_dims, *(dims[n] for n in names))
    with Record() as record:
        found = vmap(outputs, every_dim)(*arguments)
    assert record.count(FWD) == (1 if case == "plain" else SIZE)
    with Record() as record:
        found += vmap(gradients, (0, 0, *every_dim))(douts, dlses, *arguments)
    assert record.count(BWD) == (1 if case == "plain" else SIZE)
    for i in range(SIZE):
        one = [
            x if d is None else x.select(d, i).contiguous()
            for x, d in zip(arguments, every_dim, strict=True)
        ]
        expected = (*outputs(*one), *gradients(douts[i], dlses[i], *one))
        for actual, e in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[i], e)


def test_vmap_of_packed_sequences(device: str) -> None:
    tensors = [x.flatten(1, 2) for x in qkv(device, SIZE, BATCH)]
    cu_seqlens = torch.tensor([0, 5, 5, 16], dtype=torch.int32, device=device)
    attend = lambda q, k, v: flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)  # noqa: E731
    for found, *one in zip(vmap(attend)(*tensors), *tensors, strict=True):
        assert_bitwise_equal(found, attend(*one))


def test_vmap_along_the_last_dimension(device: str) -> None:
    """Of calls that run one by one, whose elements are then not contiguous."""
    tensors = [x.movedim(0, -1).contiguous() for x in qkv(device, SIZE, BATCH)]
    sinks = torch.randn(tensors[0].shape[2], SIZE, device=device)
    attend = lambda q, k, v, s: flash_ext.attention(q, k, v, sink=s)  # noqa: E731
    found = vmap(attend, in_dims=-1)(*tensors, sinks)
    for i in range(SIZE):
        one = [x[..., i].contiguous() for x in (*tensors, sinks)]
        assert_bitwise_equal(found[i], attend(*one))


def test_gradients_within_autocast_are_those_without(device: str) -> None:
    """A backward pass begun under autocast computes in the dtype of its forward pass."""
    leaves = [x.requires_grad_() for x in qkv(device, BATCH)]
    out = flash_ext.attention(*leaves, causal=True, deterministic=True)
    expected = torch.autograd.grad(out, leaves, out.detach(), retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(out, leaves, out.detach())
    for x, e in zip(found, expected, strict=True):
        assert_bitwise_equal(x, e)


def test_vmap_refuses_what_a_call_refuses(device: str) -> None:
    """Nothing is expanded that the op itself does not expand."""
    q, k, v = qkv(device, SIZE, 2)
    slopes = torch.rand(1, 4, device=device)
    for tensors, options in (
        ((q, k[:, :1], v[:, :1]), {}),
        ((q[:, :1], k, v), {}),
        ((q[:, 0], k[:, 0], v[:, 0]), {}),
        ((q, k, v), {"alibi_slopes": slopes}),
    ):
        with pytest.raises((ValueError, RuntimeError)) as plain:
            flash_ext.attention(*(x[0] for x in tensors), **options)
        with pytest.raises((ValueError, RuntimeError)) as mapped:
            vmap(partial(flash_ext.attention, **options))(*tensors)
        assert str(mapped.value).split(", got")[0] == str(plain.value).split(", got")[0]


def test_vmap_with_a_mask_for_each(device: str) -> None:
    tensors = qkv(device, SIZE, BATCH)
    for randomness in ("same", "different"):
        attend = vmap(partial(flash_ext.attention, dropout_p=0.5), randomness=randomness)
        out = attend(*(x[:1].expand(SIZE, *x.shape[1:]) for x in tensors))
        assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_gradients_of_several_losses_at_once(device: str) -> None:
    inputs = make_inputs(Problem(3, 9, 9), device)
    out = flash_ext.attention(inputs.q, inputs.k, inputs.v)
    douts = torch.stack([inputs.dout, 2 * inputs.dout])
    batched = torch.autograd.grad(out, inputs.q, douts, retain_graph=True, is_grads_batched=True)
    for dq, dout in zip(batched[0], douts, strict=True):
        torch.testing.assert_close(
            dq, torch.autograd.grad(out, inputs.q, dout, retain_graph=True)[0]
        )


# --- Checkpointing ---


def block(q, k, v):
    return torch.tanh(flash_ext.attention(torch.tanh(q), k, v, causal=True, dropout_p=0.2))


def saving(saved: CheckpointPolicy):
    def policy(context, op, *arguments, **options):
        return saved if op is FWD else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


POLICIES = {CheckpointPolicy.MUST_SAVE: 1, CheckpointPolicy.MUST_RECOMPUTE: 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(policy: CheckpointPolicy, device: str) -> None:
    """The op is named in a policy; the mask of dropout is the same when it is recomputed."""
    leaves = [x.requires_grad_() for x in qkv(device, 2)]
    dout = randn(2, 9, 4, 16, device=device)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(*leaves), leaves, dout)
    torch.manual_seed(1)
    with Record() as record:
        out = checkpoint(block, *leaves, use_reentrant=False, context_fn=saving(policy))
        actual = torch.autograd.grad(out, leaves, dout)
    assert record.count(FWD) == POLICIES[policy] and record.count(BWD) == 1
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_compiled(policy: CheckpointPolicy, device: str) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in qkv(device, 2)]
    graphs = []

    def keep(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )

    context_fn = saving(policy)

    @partial(torch.compile, fullgraph=True, backend=backend)
    def forward(*leaves):
        return checkpoint(block, *leaves, use_reentrant=False, context_fn=context_fn)

    forward(*leaves).sum().backward()
    assert sum(targets.count(FWD) for targets in graphs) == POLICIES[policy]
    assert sum(targets.count(BWD) for targets in graphs) == 1


# --- FLOPs ---


def flops(run) -> dict:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_flop_counts()["Global"]


def test_flops_are_those_of_sdpa(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(device, 2, dtype=torch.bfloat16))
    ours = flops(lambda: flash_ext.attention(q, k, v, causal=True).sum().backward())
    # SDPA without its flash backend: plain matmuls.
    k, v = (x.detach().repeat_interleave(2, dim=2).requires_grad_() for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        forward = flops(lambda: F.scaled_dot_product_attention(q, k, v).detach())
        matmuls = sum(forward.values())
    assert ours[torch.ops.flash_ext.fwd] == matmuls
    assert ours[torch.ops.flash_ext.bwd] == 2.5 * matmuls


def test_flops_of_heads_of_two_sizes(device: str) -> None:
    q, k = (randn(1, s, 2, 16, device=device) for s in (5, 7))
    v = randn(1, 7, 2, 24, device=device)
    q.requires_grad_()
    found = flops(lambda: flash_ext.attention(q, k, v).sum().backward())
    assert found[torch.ops.flash_ext.fwd] == 2 * 2 * 5 * 7 * (16 + 24)
    assert found[torch.ops.flash_ext.bwd] == 2 * 2 * 5 * 7 * (3 * 16 + 2 * 24)


def test_flops_of_packed_sequences(device: str) -> None:
    q, k, v = qkv(device, seqlen=20)
    offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 9), (0, 9, 20)))
    used = torch.tensor([9, 2], dtype=torch.int32, device=device)
    arguments = (q, k, v, *offsets)
    for options, pairs in (({}, 3 * 9 + 6 * 11), ({"seqused_k": used}, 3 * 9 + 6 * 2)):
        found = flops(lambda o=options: flash_ext.attention_varlen(*arguments, **o))
        assert found[torch.ops.flash_ext.fwd] == 2 * 4 * pairs * (16 + 16)


def test_flops_of_packed_sequences_without_values() -> None:
    """Two sequences of unknown lengths are taken to be equally long."""
    q, k, v = (x.to("meta") for x in qkv("cpu", seqlen=20))
    cu_seqlens = torch.zeros(3, dtype=torch.int32, device="meta")
    found = flops(lambda: flash_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens))
    assert found[torch.ops.flash_ext.fwd] == 2 * 4 * 2 * 10 * 10 * (16 + 16)


# --- Export ---


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_ext.attention(q * 2, k, v, causal=True).relu()


class Attention(torch.nn.Module):
    """Of which inductor has nothing to compile but the call."""

    def forward(self, q, k, v):
        return flash_ext.attention(q, k, v, causal=True)


def exported(
    model: torch.nn.Module, device: str
) -> tuple[torch.export.ExportedProgram, list[torch.Tensor]]:
    tensors = qkv(device, 2, seqlen=11, dtype=torch.bfloat16)
    batch, seqlen = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "seqlen"))
    shapes = tuple({0: batch, 1: seqlen} for _ in tensors)
    return torch.export.export(model, tuple(tensors), dynamic_shapes=shapes), tensors


def test_export_with_other_sizes(tmp_path: Path, device: str) -> None:
    program, _ = exported(Model(), device)
    assert FWD in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch, seqlen in ((2, 11), (5, 40)):
        tensors = qkv(device, batch, seqlen=seqlen, dtype=torch.bfloat16)
        assert_bitwise_equal(loaded(*tensors), Model()(*tensors))


RUN_PACKAGE = """
import sys, torch, flash_ext
tensors, expected = torch.load(sys.argv[2])
model = torch._inductor.aoti_load_package(sys.argv[1])
torch.testing.assert_close(model(*tensors), expected)
"""


@pytest.mark.share(0)
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote torch's folder")
def test_aot_inductor_in_a_new_process(tmp_path: Path) -> None:
    """Which only has to import flash_ext, for its library."""
    program, _ = exported(Attention(), "cpu")
    quickly = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={f"aot_inductor.{name}": value for name, value in quickly.items()},
    )
    tensors = qkv("cpu", 5, seqlen=40, dtype=torch.bfloat16)
    torch.save((tensors, Attention()(*tensors)), tmp_path / "data.pt")
    root = Path(flash_ext.__file__).parent.parent
    run_python("-c", RUN_PACKAGE, package, tmp_path / "data.pt", check=True, cwd=root)


# --- CUDA graphs ---


@pytest.mark.gpu
def test_graph_replay_drops_alike_forward_and_backward() -> None:
    """Each replay draws a mask, and its backward pass has the same: out is linear in v."""
    q, k, v = (x.requires_grad_() for x in qkv("cuda", 2, seqlen=200))
    dout = randn(2, 200, 4, 16, device="cuda")

    def step():
        out = flash_ext.attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, _, dv = step()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.detach().clone())
        through_out = (out.double() * dout.double()).sum()
        through_v = (v.double() * dv.double()).sum()
        torch.testing.assert_close(through_out, through_v, rtol=2e-2, atol=1.0)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
