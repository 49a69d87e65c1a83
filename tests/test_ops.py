"""The ops as PyTorch sees them: opcheck, compile, gradcheck, streams and CUDA graphs.

Would catch a fake kernel whose shapes, types or strides differ from the real one's, a graph break,
a gradient that only looks right in 16 bits, a launch on the wrong stream, a hidden host
synchronisation, and dropout or sequence lengths that are frozen into a CUDA graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_testing import (
    VARIANTS,
    Inputs,
    Problem,
    assert_bitwise_equal,
    attend,
    make_inputs,
    options_of,
    runnable,
)
from grids import cover
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext.functional import attention_options

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's own

PACKED = Problem(
    lengths_q=(33, 0, 20), lengths_k=(20, 9, 40), heads_q=4, heads_k=2, head_dim=32, causal=True
)
EVERYTHING = {
    "head_dim_v": 24,
    "softcap": 2.0,
    "alibi": "h",
    "bias": "1hqk",
    "sink": True,
    "dropout_p": 0.1,
}
EVERYTHING_ON_HOPPER = EVERYTHING | {"bias": "", "dropout_p": 0.0}  # what fa3 has
OPTION_PROBLEMS = (
    Problem(2, 33, 40, 4, 2, 40, head_dim_v=24, softcap=2.0),
    Problem(2, 33, 40, 4, 2, 32, alibi="bh", bias="b1qk", layout="bhsd"),
    Problem(2, 33, 40, 4, 2, 32, bias="1h1k", bias_type="float32", seqused_k=(0, 33)),
    Problem(2, 33, 40, 4, 2, 32, bias="11qk", bias_type="bool", sink=True),
    Problem(2, 33, 40, 4, 2, 32, window=(9, 3), seqused_k=(0, 33), **EVERYTHING_ON_HOPPER),
    PACKED,
    dataclasses.replace(PACKED, seqused_k=(3, 9, 0), **EVERYTHING_ON_HOPPER),
    dataclasses.replace(PACKED, seqused_k=(3, 9, 0), bias_short=5, **EVERYTHING),
)
OPCHECK_PROBLEMS = (
    Problem(2, 33, 70, 4, 2, 64, causal=True),
    Problem(1, 70, 33, 3, 3, 40, window=(9, 3), dropout_p=0.3, scale=0.2),
    Problem(2, 33, 33, 2, 1, 59, layout="bhsd"),
    Problem(2, 20, 40, 2, 2, 32, layout="packed"),
    *OPTION_PROBLEMS,
)


def op_arguments(problem: Problem, inputs: Inputs, variant: str) -> tuple[tuple, dict]:
    """The positional arguments of fwd and its options."""
    options = attention_options(
        inputs.q,
        **options_of(problem),
        **inputs.options(),
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        deterministic=True,
        variant=variant,
    )
    return (inputs.q, inputs.k, inputs.v), options


def detached(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", OPCHECK_PROBLEMS, ids=str)
def test_opcheck(problem: Problem, variant: str, device: str) -> None:
    inputs = make_inputs(problem, device)
    leaves, options = op_arguments(problem, inputs, variant)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += ("test_aot_dispatch_dynamic",)
    # On a CPU each problem traces one of the two ops; test_compiles_as_one_graph has both.
    of_fwd = tests[:3] if device == "cpu" and OPCHECK_PROBLEMS.index(problem) % 2 else tests
    torch.library.opcheck(torch.ops.flash_ext.fwd.default, leaves, options, test_utils=of_fwd)
    tensors, options = detached((leaves, options))
    # check asks what the device can do: it is never traced.
    torch.library.opcheck(
        torch.ops.flash_ext.check.default, tensors, options, test_utils="test_schema"
    )
    out, lse = torch.ops.flash_ext.fwd(*tensors, **options)
    index = OPCHECK_PROBLEMS.index(problem)
    traced = (0, 1) if device == "cuda" else (index // 2 % 2,) if index % 2 else ()
    for number, (dlse, need_dbias) in enumerate(((None, True), (inputs.dlse, False))):
        torch.library.opcheck(
            torch.ops.flash_ext.bwd.default,
            (inputs.dout, dlse, *tensors, out, lse),
            options | {"need_dbias": need_dbias},
            test_utils=tests[:3] if number not in traced else tests,
        )


FAKE_PROBLEMS = (
    *(
        Problem(2, 33, 47, 4, 2, 40, layout=layout)
        for layout in ("bshd", "bhsd", "sbhd", "packed", "expanded_heads")
    ),
    *OPTION_PROBLEMS,
)


@pytest.mark.parametrize("need_dbias", (True, False))
@pytest.mark.parametrize("problem", FAKE_PROBLEMS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_outputs_match_real_ones(
    variant: str, problem: Problem, need_dbias: bool, device: str
) -> None:
    """Shapes, types, devices and strides, of both ops and every layout of the inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = make_inputs(problem, device)
    arguments = (inputs.dout, inputs.dlse, *op_arguments(problem, inputs, variant))

    def both(dout, dlse, tensors, options):
        out, lse = torch.ops.flash_ext.fwd(*tensors, **options)
        gradients = torch.ops.flash_ext.bwd(
            dout, dlse, *tensors, out, lse, **options, need_dbias=need_dbias
        )
        return out, lse, *gradients

    real = both(*detached(arguments))
    with FakeTensorMode() as mode:  # where any wish for a tensor's value is an error
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake = both(*detached(fakes))
    for name, r, f in zip(
        ("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), real, fake, strict=True
    ):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device), name
        assert r.stride() == f.stride(), name


def compiled_equals_eager(problem: Problem, device: str, compiled, **more) -> None:
    inputs = make_inputs(problem, device)
    cu_seqlens = (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if problem.packed else ()
    attention = flash_ext.attention_varlen if problem.packed else flash_ext.attention

    def forward(tensors, options):
        return attention(*tensors, **options, **options_of(problem), return_lse=True, **more)

    arguments = ((inputs.q, inputs.k, inputs.v, *cu_seqlens), inputs.options())
    leaves, grads = tuple(inputs.leaves().values()), (inputs.dout, inputs.dlse)
    expected, actual = forward(*arguments), compiled(forward)(*arguments)
    expected_grads = torch.autograd.grad(expected, leaves, grads)
    actual_grads = torch.autograd.grad(actual, leaves, grads)
    for a, e in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        assert_bitwise_equal(a.detach(), e.detach())


COMPILED = (
    Problem(2, 65, 65, 4, 2, 64, causal=True),
    Problem(2, 40, 70, 2, 2, 40, window=(20, 3), dropout_p=0.2),
    Problem(1, 40, 70, 3, 1, 59, layout="bhsd"),
    *OPTION_PROBLEMS,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", COMPILED, ids=str)
def test_compiles_as_one_graph(problem: Problem, variant: str, device: str) -> None:
    torch._dynamo.reset()
    compiled_equals_eager(
        problem,
        device,
        lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        variant=variant,
        deterministic=True,
    )


@pytest.mark.parametrize("problem", (COMPILED[0], OPTION_PROBLEMS[-1]), ids=str)
def test_compiles_with_inductor(problem: Problem, device: str) -> None:
    torch._dynamo.reset()
    compiled_equals_eager(
        problem, device, lambda f: torch.compile(f, fullgraph=True), deterministic=True
    )


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dynamic_shapes_compile_once(variant: str, device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def forward(q, k, v):
        return flash_ext.attention(q, k, v, causal=True, deterministic=True, variant=variant)

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    # No two sizes of the first call are equal: the compiler would take them for one size.
    compiled_frames = []
    for batch, seqlen_q, seqlen_k in ((2, 33, 64), (5, 50, 50), (3, 17, 129), (7, 130, 41)):
        inputs = make_inputs(Problem(batch, seqlen_q, seqlen_k, 6, 3, 40), device)
        leaves = (inputs.q, inputs.k, inputs.v)
        expected, actual = forward(*leaves), compiled(*leaves)
        assert_bitwise_equal(actual.detach(), expected.detach())
        expected_grads = torch.autograd.grad(expected, leaves, inputs.dout)
        for a, e in zip(
            torch.autograd.grad(actual, leaves, inputs.dout), expected_grads, strict=True
        ):
            assert_bitwise_equal(a, e)
        compiled_frames.append(counter.frame_count)
    assert len(set(compiled_frames)) == 1, "new sizes must not compile again"


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dynamic_lengths_compile_once(variant: str, device: str) -> None:
    """Packed sequences: other lengths, totals and numbers of sequences."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k):
        return flash_ext.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, variant=variant
        )

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    # Here too no two sizes of the first call are equal.
    compiled_frames = []
    for lengths_q, lengths_k in (
        ((9, 33, 0, 6), (40, 7, 20, 11)),
        ((5, 50), (20, 0)),
        ((70,) * 8, (70,) * 8),
    ):
        problem = Problem(
            lengths_q=lengths_q, lengths_k=lengths_k, heads_q=6, heads_k=3, head_dim=40
        )
        inputs = make_inputs(problem, device)
        arguments = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        assert_bitwise_equal(compiled(*arguments).detach(), forward(*arguments).detach())
        compiled_frames.append(counter.frame_count)
    assert len(set(compiled_frames)) == 1, "new lengths must not compile again"


def test_windows_compile_twice(device: str) -> None:
    """The first one as a constant, the second for all: torch.compile's way with numbers."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs(Problem(1, 40, 50, 4, 2, 16), device)
    leaves = (inputs.q, inputs.k, inputs.v)

    def forward(q, k, v, left, right):
        return flash_ext.attention(q, k, v, window=(left, right), deterministic=True)

    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for left, right in ((7, 3), (11, 5), (30, 2), (19, 20)):
        expected, actual = forward(*leaves, left, right), compiled(*leaves, left, right)
        assert_bitwise_equal(actual.detach(), expected.detach())
        gradients = (torch.autograd.grad(x, leaves, inputs.dout) for x in (actual, expected))
        for a, e in zip(*gradients, strict=True):
            assert_bitwise_equal(a, e)
    assert counter.frame_count == 2


def test_compiled_dropout_draws_a_fresh_mask_per_call(device: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(Problem(1, 40, 40), device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    compiled = torch.compile(
        lambda q, k, v: flash_ext.attention(q, k, v, dropout_p=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not torch.equal(compiled(*tensors), compiled(*tensors))


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing_recomputes_the_same_mask(use_reentrant: bool, device: str) -> None:
    """Checkpointing restores torch's generator, from which the mask's seed is drawn."""
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(Problem(1, 70, 70), device)
    leaves = (inputs.q, inputs.k, inputs.v)

    def forward(q, k, v):
        return flash_ext.attention(q, k, v, dropout_p=0.5, deterministic=True)

    torch.manual_seed(0)
    expected = torch.autograd.grad(forward(*leaves), leaves, inputs.dout)
    torch.manual_seed(0)
    for x in leaves:
        x.grad = None
    checkpoint(forward, *leaves, use_reentrant=use_reentrant).backward(inputs.dout)
    for x, e in zip(leaves, expected, strict=True):
        assert_bitwise_equal(x.grad, e)


GRADCHECK_PROBLEMS = (
    Problem(1, 3, 5, 2, 1, 2),
    Problem(1, 3, 4, 2, 2, 2, causal=True),
    Problem(1, 5, 5, 2, 1, 2, window=(2, 1)),
    Problem(1, 4, 6, 2, 1, 2, dropout_p=0.4, scale=0.7),
    Problem(1, 3, 4, 2, 1, 2, head_dim_v=3, softcap=0.8),
    Problem(2, 2, 3, 2, 1, 2, alibi="bh"),
    Problem(2, 3, 4, 2, 1, 2, sink=True, causal=True, seqused_k=(0, 3)),
    Problem(2, 3, 4, 2, 1, 2, bias="11qk", bias_type="bool", sink=True),
    *(  # each pair of whole and broadcast dimensions; all patterns: test_tiled.py
        Problem(2, 3, 4, 2, 1, 2, bias="".join(pattern))
        for pattern in cover("cpu", "b1", "h1", "q1", "k1")
    ),
    dataclasses.replace(
        Problem(lengths_q=(3, 0, 2), lengths_k=(2, 2, 4), heads_k=1, head_dim=2, bias_short=1),
        **EVERYTHING | {"head_dim_v": 3},
    ),
)


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", GRADCHECK_PROBLEMS, ids=str)
def test_gradcheck(problem: Problem, variant: str) -> None:
    """Numerical derivatives of out and lse in float64, by q, k, v, bias and sink."""
    inputs = make_inputs(problem, "cpu").upcast(torch.float64)
    leaves = inputs.leaves()

    def forward(*tensors):
        new = dict(zip((name.removeprefix("d") for name in leaves), tensors, strict=True))
        out, lse = attend(
            problem, dataclasses.replace(inputs, **new), variant=variant, return_lse=True
        )
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(forward, tuple(leaves.values()))


class RecordNeedDbias(TorchDispatchMode):
    """What the backward ops called under it were told, and which shape their dbias had."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.flash_ext.bwd.default:
            self.recorded = (kwargs.get("need_dbias", True), tuple(result[3].shape))
        return result


class RecordDlse(TorchDispatchMode):
    """Whether the backward ops called under it had a gradient of lse."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.flash_ext.bwd.default:
            self.recorded = args[1] is not None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_zeros_are_made_for_an_lse_without_a_gradient(variant: str, device: str) -> None:
    """The kernels would read them."""
    inputs = make_inputs(Problem(1, 20, 30), device)
    for used in (False, True):
        out, lse = attend(Problem(1, 20, 30), inputs, variant=variant, return_lse=True)
        loss = out.sum() + lse.sum() if used else out.sum()
        with RecordDlse() as record:
            loss.backward()
        assert record.recorded == used


@pytest.mark.options(bias="1hqk")
@pytest.mark.parametrize("variant", VARIANTS)
def test_dbias_is_computed_only_where_it_is_wanted(variant: str, device: str) -> None:
    problem = Problem(1, 20, 30, bias="1hqk", sink=True, causal=True)
    gradients = []
    for wanted in (True, False):
        inputs = make_inputs(problem, device)
        inputs.bias.requires_grad_(wanted)
        out = attend(problem, inputs, variant=variant, deterministic=True)
        with RecordNeedDbias() as record:
            out.backward(inputs.dout)
        assert record.recorded == (wanted, tuple(inputs.bias.shape) if wanted else (0,))
        assert (inputs.bias.grad is not None) == wanted
        gradients.append([x.grad for x in (inputs.q, inputs.k, inputs.v, inputs.sink)])
    for a, e in zip(*gradients, strict=True):
        assert_bitwise_equal(a, e)


def test_a_gradient_by_one_option_alone(device: str) -> None:
    """The sink or the bias is trained while everything else is frozen."""
    problem = Problem(1, 20, 30, bias="1h1k", sink=True)
    for name in ("bias", "sink"):
        inputs = make_inputs(problem, device)
        every = attend(problem, inputs)
        (expected,) = torch.autograd.grad(every, getattr(inputs, name), inputs.dout)
        for x in inputs.leaves().values():
            x.requires_grad_(False)
        leaf = getattr(inputs, name).requires_grad_()
        (actual,) = torch.autograd.grad(attend(problem, inputs), leaf, inputs.dout)
        torch.testing.assert_close(actual, expected)


def test_options_are_converted(device: str) -> None:
    """Slopes and sink of any type, and a bias of fewer dimensions; the sink's gradient follows."""
    problem = Problem(1, 20, 30, alibi="h", bias="11qk", sink=True)
    inputs = make_inputs(problem, device)
    sink = inputs.sink.detach().to(torch.bfloat16).requires_grad_()
    slopes = inputs.alibi_slopes.to(torch.bfloat16)
    bias = inputs.bias[0, 0].detach().requires_grad_()
    given = dataclasses.replace(inputs, sink=sink, alibi_slopes=slopes, bias=bias)
    plain = dataclasses.replace(inputs, sink=sink.float(), alibi_slopes=slopes.float())
    out, expected = attend(problem, given), attend(problem, plain)
    assert_bitwise_equal(out.detach(), expected.detach())
    out.backward(inputs.dout)
    assert sink.grad.dtype == torch.bfloat16 and bias.grad.shape == bias.shape


def test_gradient_of_a_gradient_is_refused(device: str) -> None:
    inputs = make_inputs(Problem(1, 9, 9), device)
    out = flash_ext.attention(inputs.q, inputs.k, inputs.v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), inputs.q, create_graph=True)
    with pytest.raises(
        RuntimeError, match="gradient of a gradient|derivative for .* not implemented"
    ):
        dq.float().sum().backward()


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("problem", (Problem(1, 9, 9), Problem(1, 9, 9, bias="1hqk")), ids=str)
def test_compiled_autograd(problem: Problem, device: str) -> None:
    """The backward pass of a graph that was recorded eagerly."""
    torch._dynamo.reset()
    gradients = []
    for enable in (torch._dynamo.compiled_autograd._enable, lambda _: contextlib.nullcontext()):
        inputs = make_inputs(problem, device)
        out = attend(problem, inputs, deterministic=True)
        with enable(lambda graph: torch.compile(graph, fullgraph=True, backend="eager")):
            out.backward(inputs.dout)
        gradients.append([x.grad for x in inputs.leaves().values()])
    for a, e in zip(*gradients, strict=True):
        assert_bitwise_equal(a, e)


def test_every_option_has_a_default(device: str) -> None:
    """The ops called with positional tensors only: every option has a default."""
    inputs = make_inputs(Problem(1, 9, 9), device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = torch.ops.flash_ext.fwd(*tensors)
    gradients = torch.ops.flash_ext.bwd(torch.ones_like(out), None, *tensors, out, lse)
    assert [tuple(x.shape) for x in gradients[3:]] == [(0,), (0,)]  # no bias, no sink


# --- CUDA: memory, streams and graphs ---


def device_step(inputs: Inputs, problem: Problem, variant: str) -> tuple[torch.Tensor, ...]:
    out, lse = attend(problem, inputs, deterministic=True, variant=variant, return_lse=True)
    leaves = tuple(inputs.leaves().values())
    grads = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return (out.detach(), lse.detach(), *grads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    ({}, EVERYTHING_ON_HOPPER, EVERYTHING | {"bias": ""}),
    ids=("plain", "everything on Hopper", "everything"),
)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_grows_with_the_sequence_not_its_square(
    variant: str, packed: bool, options: dict
) -> None:
    """Of forward and backward together; a score matrix of the longer one would hold 512 MiB."""
    peaks = []
    for seqlen in (2048, 8192):
        problem = Problem(1, seqlen, seqlen, 4, 4, 64, causal=True)
        problem = runnable(variant, dataclasses.replace(problem, **options))
        if packed:
            lengths = (seqlen - 100, 100)
            problem = dataclasses.replace(problem, lengths_q=lengths, lengths_k=lengths)
        inputs = make_inputs(problem, "cuda")
        device_step(inputs, problem, variant)
        found = []
        for _ in range(3):  # what other tests left may go within a step, and hide its peak
            torch.cuda.synchronize()
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            device_step(inputs, problem, variant)
            found.append(torch.cuda.max_memory_allocated() - before)
        peaks.append(max(found))
    # The allocator leaves up to 1 MiB of a reused block unsplit, in each of some eight tensors.
    assert peaks[1] <= 4 * peaks[0] + (8 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("variant", VARIANTS)
def test_short_sequences_need_hardly_more_memory(variant: str, head_dim: int) -> None:
    """Backward of 131,072 tokens in sequences of 16, beside that of one sequence."""
    tokens, heads = 131_072, 4
    peaks = []
    for length in (tokens, 16):
        q, k, v = (
            torch.randn(
                tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in range(3)
        )
        starts = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
        out = flash_ext.attention_varlen(q, k, v, starts, starts, window=(128, 0), variant=variant)
        dout = torch.randn_like(out)
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, (q, k, v), dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert all(x.isfinite().all() for x in grads)
    print(f"{variant} d {head_dim}: {peaks[0] / 2**20:.0f} and {peaks[1] / 2**20:.0f} MiB")
    assert peaks[1] <= 1.3 * peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"softcap": 1.5}), ids=("", "softcap"))
@pytest.mark.parametrize("variant", ("fa2", "fa3"))
def test_few_tiles_take_their_keys_in_parts(variant: str, options: dict) -> None:
    """Seen by the memory that the results of splits take in float32."""
    problem = Problem(1, 70, 4096, 4, 4, 64, **options)
    inputs = make_inputs(problem, "cuda")
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_ext.attention(*tensors, variant=variant, **options)
    peak = torch.cuda.max_memory_allocated() - before
    two_parts = 2 * out.numel() * 4
    assert peak > two_parts


@pytest.mark.gpu
def test_host_memory_is_given_back() -> None:
    inputs = make_inputs(Problem(1, 16, 16), "cuda")
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    resident = []
    for calls in (5_000, 50_000):
        for _ in range(calls):
            torch.ops.flash_ext.fwd(*tensors)
        torch.cuda.synchronize()
        resident.append(
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        )
    assert resident[1] - resident[0] < 1 << 20, "about 20 bytes a call"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    (
        Problem(2, 257, 300, 4, 2, 64, causal=True),
        Problem(2, 257, 300, 4, 2, 64, causal=True, seqused_k=(300, 9), **EVERYTHING_ON_HOPPER),
        Problem(2, 257, 300, 4, 2, 64, causal=True, seqused_k=(300, 9), **EVERYTHING),
        PACKED,
    ),
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_on_the_current_stream(variant: str, problem: Problem) -> None:
    """The stream is kept busy before q is written: a launch elsewhere would read the old q."""
    inputs, stale = (make_inputs(problem, "cuda") for _ in range(2))
    expected = device_step(inputs, problem, variant)
    with torch.no_grad():
        stale.q.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Once before, so that the allocator has this stream's memory and need not ask the driver.
        device_step(stale, problem, variant)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            stale.q.copy_(inputs.q)
        actual = device_step(stale, problem, variant)
        assert not stream.query(), "the call waited for the device"
    torch.cuda.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_streams_at_once(variant: str) -> None:
    """Calls that overlap share nothing: no static workspace, no static counter."""
    problems = [
        Problem(2, 500, 700, 4, 2, 64, causal=True, dropout_p=0.1, seed=1),
        Problem(1, 900, 300, 4, 4, 128, window=(200, 50), seed=2),
    ]
    problems = [runnable(variant, p) for p in problems]
    inputs = [make_inputs(p, "cuda") for p in problems]
    expected = [device_step(i, p, variant) for i, p in zip(inputs, problems, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list] = [[], []]
    for _ in range(20):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(device_step(inputs[which], problems[which], variant))
    torch.cuda.synchronize()
    for which, wanted in enumerate(expected):
        for actual in results[which]:
            for a, e in zip(actual, wanted, strict=True):
                assert_bitwise_equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_that_have_not_used_the_device(variant: str) -> None:
    """Such as autograd's, at the first backward pass: no CUDA context is current there."""
    problem = Problem(2, 100, 130, 4, 2, 64)
    inputs = make_inputs(problem, "cuda")
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    options = {"deterministic": True, "variant": variant}

    def forward() -> tuple[torch.Tensor, ...]:
        return torch.ops.flash_ext.fwd(q, k, v, **options)

    out, lse = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.ops.flash_ext.bwd(inputs.dout, None, q, k, v, out, lse, **options)

    for step in (forward, backward):
        step()  # leaves its memory to the allocator: the thread need ask the device for none
        with ThreadPoolExecutor(1) as fresh:
            results = fresh.submit(step).result()
        for actual, expected in zip(results, step(), strict=True):
            assert_bitwise_equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_deterministic_on_streams_of_two_priorities(head_dim: int, variant: str) -> None:
    """More CTAs than the device holds, some kept waiting by those of the stream that goes first.

    Would hang if CTAs that wait for their turn kept the one away whose turn it is.
    """
    problem = Problem(4, 1024, 1024, 16, 16, head_dim, causal=True)
    inputs = make_inputs(problem, "cuda")
    expected = device_step(inputs, problem, variant)
    torch.cuda.synchronize()
    results = []
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0, -1)]
    for index in range(40):
        with torch.cuda.stream(streams[index % len(streams)]):
            results.append(device_step(inputs, problem, variant))
    torch.cuda.synchronize()
    for actual in results:
        for a, e in zip(actual, expected, strict=True):
            assert_bitwise_equal(a, e)


@pytest.mark.gpu
def test_runs_on_the_inputs_device(need_gpus: Callable[[int], None]) -> None:
    """Not on the current one."""
    need_gpus(2)
    problem = Problem(1, 100, 100)
    expected = device_step(make_inputs(problem, "cuda:0"), problem, "auto")
    actual = device_step(make_inputs(problem, "cuda:1"), problem, "auto")
    for a, e in zip(actual, expected, strict=True):
        assert a.device.index == 1
        assert_bitwise_equal(a.to("cuda:0"), e)


def capture(step) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """The step as a CUDA graph, after the warm-up on a side stream that capture asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


GRAPH_PROBLEMS = (
    Problem(2, 130, 197, 4, 2, 64, causal=True, dropout_p=0.3),
    Problem(1, 300, 257, 2, 2, 128, window=(64, 10), dropout_p=0.5),
    Problem(1, 257, 300, 4, 1, 256, layout="odd_offset", dropout_p=0.17),
    Problem(2, 200, 200, 4, 2, 40, causal=True),
    Problem(2, 200, 200, 4, 2, 60, causal=True),
    Problem(2, 700, 900, 16, 4, 128, causal=True),  # more tiles than CTAs
    Problem(2, 3, 2000, 8, 2, 128),  # decoding
    Problem(2, 9, 2000, 16, 2, 128),  # splits of packed heads, which the last one combines
    Problem(1, 100, 4000, 2, 2, 64, causal=True),  # the same with rows of all warps
    Problem(40, 20, 4000, 32, 8, 64),  # packed heads, more tiles than CTAs
    Problem(2, 200, 150, 4, 2, 64, causal=True, seqused_k=(150, 70), **EVERYTHING_ON_HOPPER),
    Problem(2, 200, 150, 4, 2, 64, causal=True, seqused_k=(150, 70), **EVERYTHING),
    PACKED,
    dataclasses.replace(PACKED, **EVERYTHING_ON_HOPPER),
    dataclasses.replace(PACKED, **EVERYTHING),
)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", GRAPH_PROBLEMS, ids=str)
def test_graph_replay_equals_eager(problem: Problem, variant: str) -> None:
    """Replay reads what the tensors hold then: q and rng_state change in place between replays."""
    inputs = make_inputs(problem, "cuda")
    graph, results = capture(lambda: device_step(inputs, problem, variant))
    outs = []
    for seed in range(4):
        with torch.no_grad():
            inputs.q.copy_(torch.randn_like(inputs.q))
        if inputs.rng_state is not None:
            inputs.rng_state.copy_(torch.tensor([seed, seed << 32]))
        graph.replay()
        replayed = [x.clone() for x in results]
        for r, e in zip(replayed, device_step(inputs, problem, variant), strict=True):
            assert_bitwise_equal(r, e)
        outs.append(replayed[0])
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.options(dropout_p=0.5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_graph_replay_with_only_a_new_state(variant: str) -> None:
    """The mask alone changes; the same state brings the same bits back."""
    problem = Problem(1, 130, 130, dropout_p=0.5)
    inputs = make_inputs(problem, "cuda")
    graph, results = capture(lambda: device_step(inputs, problem, variant))

    def replay(seed: int) -> torch.Tensor:
        inputs.rng_state.fill_(seed)
        graph.replay()
        return results[0].clone()

    first, second, again = replay(1), replay(2), replay(1)
    assert_bitwise_equal(again, first)
    assert not torch.equal(second, first)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seqused_k", (None, (3, 40, 9)))
def test_graph_replay_with_other_lengths(seqused_k: tuple | None, variant: str) -> None:
    """The lengths are read on the device: a graph serves every way to cut the same rows."""
    problem = dataclasses.replace(PACKED, seqused_k=seqused_k, tail=0)
    inputs = make_inputs(problem, "cuda")
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse):
        x.detach().copy_(torch.randn_like(x))  # every row is some sequence's
    graph, results = capture(lambda: device_step(inputs, problem, variant))
    total_q, total_k = len(inputs.q), len(inputs.k)
    for offsets_q, offsets_k in (
        ((0, 1, 50, total_q), (0, 60, 60, total_k)),
        ((0, 0, 0, 10), (0, 0, 30, 31)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ):
        for cu_seqlens, offsets in (
            (inputs.cu_seqlens_q, offsets_q),
            (inputs.cu_seqlens_k, offsets_k),
        ):
            cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        replayed = [x.clone() for x in results]
        for r, e in zip(replayed, device_step(inputs, problem, variant), strict=True):
            assert_bitwise_equal(r, e)


@pytest.mark.gpu
def test_graph_replay_draws_from_torchs_generator() -> None:
    """Without an rng_state the captured randint advances at each replay."""
    inputs = make_inputs(Problem(1, 64, 64), "cuda")
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    graph, (out,) = capture(lambda: (flash_ext.attention(*tensors, dropout_p=0.5),))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)
