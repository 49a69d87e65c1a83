"""The ops as PyTorch sees them: opcheck, compile, gradcheck, streams and CUDA graphs.

Would catch a fake kernel whose shapes, types or strides differ from the real one's, a graph break,
a gradient that only looks right in 16 bits, a launch on the wrong stream, a hidden host
synchronisation, and dropout that is frozen into a CUDA graph.
"""

from __future__ import annotations

import pytest
import torch
from attention_testing import (
    VARIANTS,
    Problem,
    assert_bitwise_equal,
    make_inputs,
    options_of,
)
from torch._dynamo.testing import CompileCounterWithBackend

import flash_ext

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's own

OPCHECK_PROBLEMS = (
    Problem(2, 33, 70, 4, 2, 64, causal=True),
    Problem(1, 70, 33, 3, 3, 40, window=(9, 3), dropout_p=0.3, scale=0.2),
    Problem(2, 33, 33, 2, 1, 59, layout="bhsd"),
    Problem(2, 20, 40, 2, 2, 32, layout="packed"),
)


def op_options(problem: Problem, rng_state: torch.Tensor | None, variant: str) -> dict:
    options = options_of(problem)
    left, right = options.pop("window")
    return options | {
        "window_left": left,
        "window_right": right,
        "rng_state": rng_state,
        "deterministic": True,
        "variant": variant,
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", OPCHECK_PROBLEMS, ids=str)
def test_opcheck(problem: Problem, variant: str, device: str) -> None:
    inputs = make_inputs(problem, device)
    options = op_options(problem, inputs.rng_state, variant)
    leaves = (inputs.q, inputs.k, inputs.v)
    torch.library.opcheck(torch.ops.flash_ext.fwd.default, leaves, options)
    tensors = [x.detach() for x in leaves]
    # check asks what the device can do: it is never traced.
    torch.library.opcheck(
        torch.ops.flash_ext.check.default, tensors, options, test_utils="test_schema"
    )
    out, lse = torch.ops.flash_ext.fwd(*tensors, **options)
    for dlse in (None, inputs.dlse):
        torch.library.opcheck(
            torch.ops.flash_ext.bwd.default, (inputs.dout, dlse, *tensors, out, lse), options
        )


@pytest.mark.parametrize("layout", ("bshd", "bhsd", "sbhd", "packed", "expanded_heads"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_outputs_match_real_ones(variant: str, layout: str, device: str) -> None:
    """Shapes, types, devices and strides, of both ops and every layout of the inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem = Problem(2, 33, 47, 4, 2, 40, layout=layout)
    inputs = make_inputs(problem, device)
    options = op_options(problem, None, variant)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]

    def both(dout, dlse, *tensors):
        out, lse = torch.ops.flash_ext.fwd(*tensors, **options)
        return out, lse, *torch.ops.flash_ext.bwd(dout, dlse, *tensors, out, lse, **options)

    real = both(inputs.dout, inputs.dlse, *tensors)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (inputs.dout, inputs.dlse, *tensors)]
        fake = both(*fakes)
    for name, r, f in zip(
        ("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), real, fake, strict=True
    ):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device), name
        assert r.stride() == f.stride(), name


def compiled_equals_eager(problem: Problem, device: str, compiled, **options) -> None:
    inputs = make_inputs(problem, device)
    arguments = (inputs.q, inputs.k, inputs.v)

    def forward(q, k, v, rng_state):
        return flash_ext.attention(
            q, k, v, **options_of(problem), rng_state=rng_state, return_lse=True, **options
        )

    expected = forward(*arguments, inputs.rng_state)
    actual = compiled(forward)(*arguments, inputs.rng_state)
    grads = (inputs.dout, inputs.dlse)
    expected_grads = torch.autograd.grad(expected, arguments, grads)
    actual_grads = torch.autograd.grad(actual, arguments, grads)
    for a, e in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        assert_bitwise_equal(a.detach(), e.detach())


COMPILED = (
    Problem(2, 65, 65, 4, 2, 64, causal=True),
    Problem(2, 40, 70, 2, 2, 40, window=(20, 3), dropout_p=0.2),
    Problem(1, 40, 70, 3, 1, 59, layout="bhsd"),
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


def test_compiles_with_inductor(device: str) -> None:
    torch._dynamo.reset()
    compiled_equals_eager(
        COMPILED[0], device, lambda f: torch.compile(f, fullgraph=True), deterministic=True
    )


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
    assert len(set(compiled_frames)) == 1, "new sizes must not compile anew"


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
    Problem(1, 5, 7, 2, 1, 3),
    Problem(1, 5, 7, 2, 2, 3, causal=True),
    Problem(1, 6, 6, 2, 1, 4, window=(2, 1)),
    Problem(2, 4, 6, 2, 1, 3, dropout_p=0.4, scale=0.7),
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", GRADCHECK_PROBLEMS, ids=str)
def test_gradcheck(problem: Problem, variant: str) -> None:
    """Numerical derivatives of out and lse in float64."""
    inputs = make_inputs(problem, "cpu")
    leaves = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def forward(q, k, v):
        return flash_ext.attention(
            q,
            k,
            v,
            **options_of(problem),
            rng_state=inputs.rng_state,
            variant=variant,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(forward, leaves)


def test_gradient_of_a_gradient_is_refused(device: str) -> None:
    inputs = make_inputs(Problem(1, 9, 9), device)
    out = flash_ext.attention(inputs.q, inputs.k, inputs.v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_ext: .*gradient of a gradient"):
        dq.float().sum().backward()


def test_every_option_has_a_default(device: str) -> None:
    """The ops called with positional tensors only: every option has a default."""
    inputs = make_inputs(Problem(1, 9, 9), device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = torch.ops.flash_ext.fwd(*tensors)
    gradients = torch.ops.flash_ext.bwd(torch.ones_like(out), None, *tensors, out, lse)
    assert [tuple(x.shape) for x in gradients[3:]] == [(0,), (0,)]  # no bias, no sink


# --- CUDA: memory, streams and graphs ---


def device_step(inputs, problem: Problem, variant: str) -> tuple[torch.Tensor, ...]:
    leaves = (inputs.q, inputs.k, inputs.v)
    out, lse = flash_ext.attention(
        *leaves,
        **options_of(problem),
        rng_state=inputs.rng_state,
        deterministic=True,
        variant=variant,
        return_lse=True,
    )
    grads = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return (out.detach(), lse.detach(), *grads)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_grows_with_the_sequence_not_its_square(variant: str) -> None:
    """Of forward and backward together; a score matrix of the longer one would hold 512 MiB."""
    peaks = []
    for seqlen in (2048, 8192):
        problem = Problem(1, seqlen, seqlen, 4, 4, 64, causal=True)
        inputs = make_inputs(problem, "cuda")
        device_step(inputs, problem, variant)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        device_step(inputs, problem, variant)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # The allocator leaves up to 1 MiB of a reused block unsplit, in each of some eight tensors.
    assert peaks[1] <= 4 * peaks[0] + (8 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_on_the_current_stream(variant: str) -> None:
    """The stream is kept busy before q is written: a launch elsewhere would read the old q."""
    problem = Problem(2, 257, 300, 4, 2, 64, causal=True)
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
def test_runs_on_the_inputs_device() -> None:
    """Not on the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
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
def test_graph_replay_draws_from_torchs_generator() -> None:
    """Without an rng_state the captured randint advances at each replay."""
    inputs = make_inputs(Problem(1, 64, 64), "cuda")
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    graph, (out,) = capture(lambda: (flash_ext.attention(*tensors, dropout_p=0.5),))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)
