"""Bitwise repeatability where it is promised, run after run.

Would catch a race in shared memory, a missing barrier, an atomic in a path called deterministic, a
reduction whose order depends on timing, and an output element that keeps old memory.
"""

from __future__ import annotations

import pytest
import torch
from attention_testing import (
    SQUARE_DIMS,
    VARIANTS,
    Problem,
    assert_all_bitwise_equal,
    assert_bitwise_equal,
    attend,
    make_inputs,
    run,
)
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext

OPTIONS = (
    {"softcap": 2.0, "alibi": "bh"},
    {"sink": True, "seqused_k": (0, 100, 130)},
    {"head_dim_v": 72, "causal": True},
    {"softcap": 2.0, "alibi": "h", "sink": True, "window": (50, 10), "seqused_k": (0, 100, 130)},
    {"lengths_q": (100, 0, 33), "lengths_k": (130, 9, 70), "sink": True},
    {"bias": "bhqk"},
    {"bias": "11qk", "bias_type": "float32", "sink": True},
    {"bias": "1h1k", "lengths_q": (100, 64, 33), "lengths_k": (130, 9, 70)},
    {"bias": "b111", "dropout_p": 0.2},
)


def every_option(dims: tuple[int, ...]) -> list[Problem]:
    return [
        Problem(**{"batch": 3, "seqlen_q": 100, "seqlen_k": 130} | option, heads_q=4, head_dim=d)
        for d in dims
        for option in OPTIONS
    ]


REPEATED = [
    pytest.param("cpu", 3, Problem(2, 90, 600, 4, 2, 64, causal=True, dropout_p=0.1)),
    *(pytest.param("cpu", 3, problem) for problem in every_option((40,))),
    *(
        pytest.param("cuda", 1000, problem, marks=pytest.mark.gpu)
        for problem in every_option((40, *SQUARE_DIMS))
    ),
    *(
        pytest.param("cuda", runs, problem, marks=pytest.mark.gpu)
        for runs, problem in (
            (1000, Problem(2, 300, 300, 4, 2, 64, causal=True)),
            (1000, Problem(2, 257, 400, 4, 4, 128, torch.float16)),
            (1000, Problem(2, 257, 400, 4, 4, 128, torch.float16, dropout_p=0.17)),
            (1000, Problem(1, 200, 333, 2, 1, 256, window=(100, 20))),
            (1000, Problem(1, 130, 260, 2, 2, 40, causal=True, layout="odd_offset")),
            (200, Problem(4, 1024, 1024, 16, 4, 64, causal=True)),
            (200, Problem(4, 1024, 1024, 16, 16, 128)),
            (200, Problem(4, 777, 1000, 8, 2, 192, causal=True)),
            (200, Problem(4, 777, 1000, 8, 2, 192, head_dim_v=128)),
            (200, Problem(4, 777, 1000, 8, 2, 256, causal=True)),
        )
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "runs", "problem"), REPEATED, ids=str)
def test_every_run_has_the_same_bits(
    device: str, runs: int, problem: Problem, variant: str
) -> None:
    """fa1 promises it for every backward pass, the others where deterministic is set."""
    inputs = make_inputs(problem, device)
    leaves = inputs.leaves()

    def once() -> tuple[torch.Tensor, ...]:
        deterministic = variant != "fa1"
        out, lse = attend(
            problem, inputs, deterministic=deterministic, variant=variant, return_lse=True
        )
        outputs = (inputs.dout, inputs.dlse)
        grads = torch.autograd.grad((out, lse), tuple(leaves.values()), outputs)
        return (out.detach(), lse.detach(), *grads)

    first = once()
    # Counted on the device: a comparison that waits would hide timing-dependent differences.
    different = torch.zeros(len(first), dtype=torch.int64, device=device)
    for _ in range(runs):
        for index, (x, expected) in enumerate(zip(once(), first, strict=True)):
            bits = torch.int32 if x.dtype == torch.float32 else torch.int16
            different[index] += (x.view(bits) != expected.view(bits)).any()
    counts = dict(zip(("out", "lse", *leaves), different.tolist(), strict=True))
    assert not any(counts.values()), f"runs of {runs} that differ: {counts}"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize(
    "problem",
    (
        Problem(2, 2048, 2048, 16, 16, 64),
        Problem(2, 1531, 1531, 16, 4, 128, causal=True),
        Problem(1, 4096, 4096, 4, 4, 128, torch.float16, causal=True),
        Problem(1, 640, 3000, 40, 8, 96, window=(900, 100)),
        Problem(lengths_q=(900, 0, 1500, 64), lengths_k=(1000, 9, 1500, 700), heads_q=8, heads_k=8),
    ),
    ids=str,
)
def test_every_stream_has_the_same_bits(problem: Problem, variant: str) -> None:
    """Calls on three streams run beside each other, so that CTAs start in any order."""
    inputs = make_inputs(problem, "cuda")
    leaves = tuple(inputs.leaves().values())

    def forward() -> torch.Tensor:
        return attend(problem, inputs, deterministic=True, variant=variant, return_lse=True)[0]

    def once(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    first = once(forward())
    torch.cuda.synchronize()
    # A backward pass runs on the stream of its forward pass, and its results are that stream's.
    runs = []
    for stream in (torch.cuda.Stream() for _ in range(3)):
        with torch.cuda.stream(stream):
            runs.append((stream, forward(), torch.zeros((), dtype=torch.int64, device="cuda")))
    for _ in range(60):
        for stream, out, different in runs:
            with torch.cuda.stream(stream):
                for x, expected in zip(once(out), first, strict=True):
                    different += (x.view(torch.int16) != expected.view(torch.int16)).any()
    torch.cuda.synchronize()
    assert [int(different) for _, _, different in runs] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", SQUARE_DIMS)
@pytest.mark.parametrize("bias", ("", "1hqk", "b11k"))
def test_most_repeats_while_the_device_is_full(bias: str, head_dim: int, variant: str) -> None:
    """More CTAs than the device holds at once; only dq may vary, and only without deterministic."""
    problem = Problem(4, 512, 512, 32, 32, head_dim, causal=True, bias=bias)
    inputs = make_inputs(problem, "cuda")
    first = run(problem, variant, "cuda", inputs=inputs)
    for _ in range(20):
        again = run(problem, variant, "cuda", inputs=inputs)
        for name in first.keys() - {"dq"}:
            assert_bitwise_equal(again[name], first[name], name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_the_batch(variant: str, device: str) -> None:
    """A sequence gives the same bits alone as in a batch (out, lse, and all of a fixed order)."""
    inputs = make_inputs(Problem(3, 150, 190, 4, 2, 64, causal=True), device)
    leaves = (inputs.q, inputs.k, inputs.v)

    def results(part: slice) -> dict[str, torch.Tensor]:
        parts = [x.detach()[part].requires_grad_() for x in leaves]
        out, lse = flash_ext.attention(
            *parts, causal=True, deterministic=True, variant=variant, return_lse=True
        )
        grads = torch.autograd.grad(out, parts, inputs.dout[part])
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    whole = results(slice(0, 3))
    alone = results(slice(1, 2))
    if device == "cpu":  # the CPU kernels batch their matrix products: same up to rounding
        for name in whole:
            torch.testing.assert_close(alone[name], whole[name][1:2], rtol=0.02, atol=0.02)
    else:
        assert_all_bitwise_equal(alone, {name: x[1:2] for name, x in whole.items()})


class RecordOptions(TorchDispatchMode):
    """Records `deterministic` of every flash_ext op that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "flash_ext":
            self.seen.append(kwargs.get("deterministic", False))
        return func(*args, **kwargs)


@pytest.mark.parametrize("asked", (None, False, True))
@pytest.mark.parametrize("torch_setting", (False, True))
def test_deterministic_follows_torch_unless_given(asked: bool | None, torch_setting: bool) -> None:
    q = torch.randn(1, 4, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(torch_setting)
    try:
        with RecordOptions() as record:
            flash_ext.attention(q, q, q, deterministic=asked).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    wanted = torch_setting if asked is None else asked
    assert record.seen == [wanted, wanted]  # forward, backward
