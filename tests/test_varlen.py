"""Packed sequences and seqused_k: every shape a batch may have, tails, and bad offsets.

Would catch a sequence that reads or writes its neighbor's rows, a tile scheduler that loses a
sequence (empty, tiny, or one long among short ones), a mask aligned to the longest length instead
of the sequence's own, rows past the last sequence left as they were, a launch that depends on what
the host once knew of the lengths, and offsets trusted blindly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    VARIANTS,
    Inputs,
    Problem,
    assert_accurate,
    assert_all_bitwise_equal,
    assert_is_sink,
    check,
    expected_results,
    make_inputs,
    nan_filled_outputs,
    reference_results,
    run,
    skip_unsupported,
)
from grids import MASKS, alternate, every_case

import flash_ext

DRAW = random.Random(0)
EDGES = (63, 64, 65, 127, 128, 129)
BATCHES = {
    # what: (queries, keys) of each sequence
    "self": ((113, 1, 0, 70), (113, 1, 0, 70)),
    "cross": ((113, 1, 30, 70), (203, 40, 7, 1)),
    "queries only": ((5, 64, 3), (0, 64, 0)),
    "keys only": ((0, 64, 0), (7, 64, 3)),
    "edges": (EDGES, EDGES),
    "opposite edges": (EDGES, EDGES[::-1]),
    "one long": ((1, 0, 700, 2), (3, 4, 900, 1)),
    "tiny": tuple(tuple(DRAW.randrange(6) for _ in range(200)) for _ in "qk"),
}
# The CPU takes one sequence after the other. Its tiles of D 40 are of 40 queries and 820 keys.
ON_THE_CPU = BATCHES | {
    "one long": ((1, 0, 130, 2), (3, 4, 900, 1)),
    "tiny": tuple(lengths[:40] for lengths in BATCHES["tiny"]),
}
NOTHING = {
    "no sequence": ((), ()),
    "no rows": ((0, 0), (0, 0)),
    "no queries": ((0, 0), (5, 70)),
    "no keys": ((5, 70), (0, 0)),
}


def batches(device: str) -> Iterable[tuple[tuple[int, ...], ...]]:
    return (BATCHES if device == "cuda" else ON_THE_CPU).values()


def packed(device: str) -> Iterator[Problem]:
    """Every kind of batch with every mask; head dims and tails in rotation."""
    dims = ((40, 40), (24, 24), (64, 128), (64, 32), *KERNEL_DIMS)
    masks = (*MASKS, {"window": (33, 9)})
    repeats = range(4 if device == "cuda" else 1)
    for index, ((lengths_q, lengths_k), mask, _) in enumerate(
        itertools.product(batches(device), masks, repeats)
    ):
        d, dv = dims[index % len(dims)] if device == "cuda" else dims[index % 2]
        yield Problem(
            lengths_q=lengths_q, lengths_k=lengths_k, tail=index % 3 * 35, **mask,
            head_dim=d, head_dim_v=dv,
        )  # fmt: skip


def packed_with_options(device: str) -> Iterator[Problem]:
    """Every kind of batch with options that are indexed by sequence and position."""
    options = (
        {"alibi": "bh", "sink": True},
        {"bias": "bhqk", "causal": True},
        {"bias": "11qk", "bias_type": "float32", "bias_short": 3, "sink": True},
        {"bias": "1h1k", "bias_type": "bool", "softcap": 1.5},
        {"dropout_p": 0.3, "window": (40, 10)},
        {"layout": "packed", "alibi": "h", "causal": True},
    )
    dims = (64, 128, 40, 256, 96, 32, 24) if device == "cuda" else (64, 40)
    grid = itertools.product(batches(device), options)
    for index, ((lengths_q, lengths_k), option) in enumerate(grid):
        d = dims[index % len(dims)]
        yield Problem(lengths_q=lengths_q, lengths_k=lengths_k, head_dim=d, **option)


def used_keys(device: str) -> Iterator[Problem]:
    """Fewer keys than there are: none, some, all, more than there are (clamped), below 0."""
    dims = (24, 40, 64, 128, 192, 256) if device == "cuda" else (64,)
    masks = (*MASKS, {"window": (33, 9)}, {"window": (-1, -1), "sink": True, "dropout_p": 0.2})
    sequences = (
        {"batch": 6, "seqlen_q": 70, "seqlen_k": 140},
        {"lengths_q": (70, 3, 0, 70, 90, 5), "lengths_k": (140, 140, 9, 140, 64, 140)},
    )
    for d, mask, which in itertools.product(dims, masks, sequences):
        yield Problem(**which, **mask, head_dim=d, seqused_k=(64, 0, 5, 139, 1000, -3))


def grids(device: str) -> Iterator[Problem]:
    return alternate(
        itertools.chain(*(x(device) for x in (packed, packed_with_options, used_keys)))
    )


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("device", "problem", "variant"), every_case(grids))
def test_against_float64(device: str, problem: Problem, variant: str) -> None:
    check(problem, variant, device, deterministic=problem.seed % 2 == 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options",
    ({}, {"sink": True, "causal": True}, {"alibi": "bh"}, {"bias": "bhqk", "alibi": "bh"}),
    ids=str,
)
@pytest.mark.parametrize("tail", (0, 7))
@pytest.mark.parametrize("lengths", NOTHING.values(), ids=NOTHING)
def test_nothing_to_do(
    lengths: tuple[tuple[int, ...], ...], tail: int, options: dict, variant: str, device: str
) -> None:
    """No batch, no rows, no keys: zeros, and lse -inf, or the sink where there are queries."""
    lengths_q, lengths_k = lengths
    problem = Problem(lengths_q=lengths_q, lengths_k=lengths_k, tail=tail, **options)
    skip_unsupported(variant, problem, device)
    results = run(problem, variant, device)
    total = sum(lengths_q)
    assert results["out"].shape == (total + tail, 2, 64)
    assert results["lse"].shape == (2, total + tail)
    assert (results["lse"][:, total:] == -torch.inf).all()
    if problem.sink:
        sink = make_inputs(problem, device).sink.detach()
        assert_is_sink(results["lse"][:, :total], sink)
    else:
        assert (results["lse"] == -torch.inf).all()
    assert results["dq"].shape == (total + tail, 2, 64)
    for name in results.keys() - {"lse", "dsink"}:
        assert not results[name].any(), name


def one_sequence(inputs: Inputs, problem: Problem, index: int) -> tuple[Inputs, slice, slice]:
    """The dense inputs of one packed sequence, and which rows of q and k are its."""
    rows = []
    for lengths in (problem.lengths_q, problem.lengths_k):
        stop = sum(lengths[: index + 1])
        rows.append(slice(stop - lengths[index], stop))
    q, k = rows

    def of_sequence(x: torch.Tensor) -> torch.Tensor:
        return x[index : index + 1] if x.shape[0] > 1 else x

    alone = Inputs(
        *(
            x.detach()[None, r].requires_grad_()
            for x, r in ((inputs.q, q), (inputs.k, k), (inputs.v, k))
        ),
        dout=inputs.dout[None, q],
        dlse=inputs.dlse[None, :, q],
        alibi_slopes=inputs.alibi_slopes,
        sink=inputs.sink,
    )
    if problem.alibi == "bh":
        alone.alibi_slopes = of_sequence(inputs.alibi_slopes)
    if inputs.bias is not None:
        bias = of_sequence(inputs.bias.detach())
        bias = bias[:, :, : problem.lengths_q[index] if "q" in problem.bias else 1]
        bias = bias[..., : problem.lengths_k[index] if "k" in problem.bias else 1]
        alone.bias = bias.requires_grad_(inputs.bias.requires_grad)
    return alone, q, k


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"causal": True, "softcap": 2.0},
        {"window": (40, 9), "alibi": "bh", "sink": True},
        {"head_dim_v": 96, "alibi": "h"},
        {"bias": "bhqk", "head_dim_v": 96},
    ),
    ids=str,
)
def test_each_sequence_as_if_alone(options: dict, variant: str, device: str) -> None:
    """Packing changes nothing: on the CPU no bit, on the GPU nothing that the rule would see."""
    lengths_q, lengths_k = BATCHES["cross"]
    packed = Problem(lengths_q=lengths_q, lengths_k=lengths_k, heads_q=4, **options)
    skip_unsupported(variant, packed, device)
    inputs = make_inputs(packed, device)
    whole = run(packed, variant, device, deterministic=True, inputs=inputs)
    for index, (seqlen_q, seqlen_k) in enumerate(packed.sequences()):
        alone, q, k = one_sequence(inputs, packed, index)
        dense = dataclasses.replace(
            packed, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, lengths_q=None, lengths_k=None
        )
        expected = run(dense, variant, device, deterministic=True, inputs=alone)
        actual = {
            "out": whole["out"][None, q],
            "lse": whole["lse"][None, :, q],
            "dq": whole["dq"][None, q],
            "dk": whole["dk"][None, k],
            "dv": whole["dv"][None, k],
        }
        if packed.bias:
            actual["dbias"] = whole["dbias"][index : index + 1, :, :seqlen_q, :seqlen_k]
        expected.pop("dsink", None)  # a sum over the sequences
        if device == "cpu":
            assert_all_bitwise_equal(actual, expected)
        else:
            assert_accurate(actual, expected_results(dense, alone), packed.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_neighbours_do_not_matter(variant: str, device: str) -> None:
    """Other numbers in one sequence change no bit of the others."""
    problem = Problem(lengths_q=(70, 65, 3), lengths_k=(90, 129, 64), causal=True, sink=True)
    inputs = make_inputs(problem, device)
    first = run(problem, variant, device, deterministic=True, inputs=inputs)
    with torch.no_grad():
        inputs.q[70:135] = torch.nan
        inputs.k[90:219] = torch.nan
        inputs.v[90:219] = torch.nan
    second = run(problem, variant, device, deterministic=True, inputs=inputs)
    for rows, names in (((70, 135), ("out", "dq")), ((90, 219), ("dk", "dv"))):
        for name in names:
            assert second[name][rows[0] : rows[1]].isnan().any()
            for result in (first, second):
                result[name][rows[0] : rows[1]] = 0
    for result in (first, second):
        result["lse"][:, 70:135] = 0
        del result["dsink"]
    assert_all_bitwise_equal(second, first)


def with_lengths(problem: Problem, lengths_q: tuple, lengths_k: tuple) -> Problem:
    """The same buffers with other sequences: what is left of the total is the tail."""
    total = sum(problem.lengths_q) + problem.tail
    assert total == sum(problem.lengths_k) + problem.tail, "one tail for q and k"
    tail = total - sum(lengths_q)
    assert tail == total - sum(lengths_k) >= 0
    return dataclasses.replace(problem, lengths_q=lengths_q, lengths_k=lengths_k, tail=tail)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("options", ({"causal": True}, {"sink": True, "alibi": "bh"}), ids=str)
def test_graph_replay_with_other_lengths(
    options: dict, deterministic: bool, variant: str, device: str
) -> None:
    """A captured call follows what cu_seqlens hold at each replay. (The CPU calls again.)"""
    base = Problem(lengths_q=(100, 100, 100), lengths_k=(100, 100, 100), loss="both", **options)
    inputs = make_inputs(base, device)
    static = Inputs(**{f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)})

    def call() -> dict[str, torch.Tensor]:
        return run(base, variant, device, deterministic=deterministic, inputs=static)

    if device == "cuda":
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call()
    for lengths_q, lengths_k in (
        ((300, 0, 7), (1, 299, 7)),
        ((1, 2, 3), (3, 2, 1)),
        ((0, 0, 0), (0, 0, 0)),
        ((64, 129, 100), (90, 103, 100)),
    ):
        problem = with_lengths(base, lengths_q, lengths_k)
        fresh = make_inputs(problem, device)
        with torch.no_grad():
            for field in dataclasses.fields(Inputs):
                new = getattr(fresh, field.name)
                if new is not None:
                    getattr(static, field.name).copy_(new)
        if device == "cuda":
            graph.replay()
            results = captured
        else:
            results = call()
        assert_accurate(results, reference_results(problem, device), problem.dtype)


BAD_OFFSETS = {
    # what is wrong: (cu_seqlens_q, the entry that the message must name)
    "does not start at 0": ((1, 40, 90, 100), 0),
    "negative": ((0, -5, 90, 100), 1),
    "decreasing": ((0, 60, 40, 100), 2),
    "past the end": ((0, 40, 90, 5000), 3),
    "far past the end": ((0, 40, 2**31 - 1, 2**31 - 1), 2),
    "far below 0": ((0, 40, -(2**31), 100), 2),
}


def call_with_offsets(offsets: tuple[int, ...], side: str, variant: str, device: str) -> None:
    """Forward and backward of 100 rows with the given cu_seqlens of q or k, good ones elsewhere."""
    make = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(100, 2, 64, **make, requires_grad=True) for _ in range(3))
    cu_seqlens = {x: torch.tensor((0, 40, 90, 100), dtype=torch.int32) for x in "qk"}
    cu_seqlens[side] = torch.tensor(offsets, dtype=torch.int32)
    cu_q, cu_k = (cu_seqlens[x].to(device) for x in "qk")
    out = flash_ext.attention_varlen(q, k, v, cu_q, cu_k, variant=variant)
    out.sum().backward()


@pytest.mark.all_cases
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", "qk")
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_are_named(
    what: str, side: str, variant: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first bad entry: always on the CPU, on the GPU where FLASH_EXT_DEBUG asks for it."""
    offsets, entry = BAD_OFFSETS[what]
    monkeypatch.setenv("FLASH_EXT_DEBUG", "1")
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"cu_seqlens_{side}\[{entry}\]"
    ) as caught:
        call_with_offsets(offsets, side, variant, device)
    assert f"got {offsets[entry]}" in str(caught.value)


def guards(nbytes: int) -> list[torch.Tensor]:
    """Tensors of a known content, with holes between them of the size of the next outputs."""
    every = [torch.full((nbytes,), 77, dtype=torch.uint8, device="cuda") for _ in range(32)]
    return every[::2]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("side", ("q", "k", "qk"))
def test_bad_offsets_touch_nothing_else(side: str, deterministic: bool, variant: str) -> None:
    """Unchecked, they give numbers of no meaning, but no write outside the outputs.

    Some rows at the ends of sequences are written twice, as their scores are large.
    tests/sanitize_cases.py has the same for reads.
    """
    total, far = 32768, 2**31 - 1  # outputs of 16 MiB: what is small comes from elsewhere
    make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(total, 4, 64, **make) for _ in range(3))
    dout = torch.randn_like(q)
    with torch.no_grad():
        q[[4, 5, 7999, 8000, 19999, 20000, total - 1]] *= 1e4
    for bad in (
        (5, 8000, 20000, total),
        (0, -5, -(2**31), total),
        (0, 20000, 8000, total),
        (0, 8000, total + 5000, total + 30000),
        (-30000, 8000, far, far),
        (far, far, -(2**31), 5),
    ):
        good = torch.tensor((0, 8000, 20000, total), dtype=torch.int32, device="cuda")
        broken = torch.tensor(bad, dtype=torch.int32, device="cuda")
        offsets = [broken if x in side else good for x in "qk"]
        around = guards(q.nbytes)
        out = flash_ext.attention_varlen(
            q, k, v, *offsets, deterministic=deterministic, variant=variant
        )
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        assert all(bool((guard == 77).all()) for guard in around), bad
        del around, out, gradients


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("first", ((5, 0), (0, 130), (300, 70)), ids=str)
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_rows_before_the_first_sequence(
    dim: int, first: tuple[int, int], deterministic: bool, variant: str
) -> None:
    """They belong to none: results and gradients are 0, those of the sequences as ever."""
    lengths = (100, 0, 231, 40)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    rows = [torch.randn(sum(lengths), 4, dim, **make) for _ in range(4)]
    q, k, v, dout = rows
    options = {"causal": True, "variant": variant, "return_lse": True,
               "deterministic": deterministic, "sink": torch.ones(4, device="cuda")}  # fmt: skip

    def call(before_q: int, before_k: int, after: int) -> list[torch.Tensor]:
        pads = (before_q, before_k, before_k, before_q)
        q, k, v, dout = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, pad, after), value=7.0)
            for x, pad in zip(rows, pads, strict=True)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        offsets = [
            torch.tensor(list(itertools.accumulate(lengths, initial=pad)), device="cuda").int()
            for pad in (before_q, before_k)
        ]
        with nan_filled_outputs():
            out, lse = flash_ext.attention_varlen(*leaves, *offsets, **options)
            gradients = torch.autograd.grad((out,), leaves, (dout,))
        return [out.detach(), lse.detach().T, *gradients]

    expected, actual = call(0, 0, 0), call(*first, 50)
    total = sum(lengths)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        pad = first[name in ("dk", "dv")]
        torch.testing.assert_close(x[pad : pad + total], y, atol=2e-2, rtol=2e-2, msg=name)
        nothing = -torch.inf if name == "lse" else 0
        assert (x[:pad] == nothing).all() and (x[pad + total :] == nothing).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_tensors_past_2_31_elements(
    variant: str, claim_gpu_memory: Callable[[int], None]
) -> None:
    """Rows whose offset int32 does not hold: the first, a middle and the last sequence."""
    heads, dim = 16, 128
    lengths = (300, *(4096,) * ((1 << 31) // (4096 * heads * dim)), 200)
    offsets = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (int(offsets[-1]) + 100, heads, dim)
    claim_gpu_memory(12 * 2 * math.prod(shape))  # q, k, v, out, their gradients, two in float32
    make = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v, dout = (torch.randn(shape, **make) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with nan_filled_outputs():
        out, lse = flash_ext.attention_varlen(
            q, k, v, offsets, offsets, causal=True, variant=variant, return_lse=True
        )
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    for index in (0, len(lengths) // 2, len(lengths) - 1):
        rows = slice(int(offsets[index]), int(offsets[index + 1]))
        dense = Problem(1, lengths[index], lengths[index], causal=True, loss="out")
        tensors = (x.detach()[None, rows].requires_grad_() for x in (q, k, v))
        inputs = Inputs(*tensors, dout=dout[None, rows])
        actual = {name: x.detach()[None, rows] for name, x in results.items() if name != "lse"}
        actual["lse"] = lse.detach()[None, :, rows]
        assert_accurate(actual, expected_results(dense, inputs), torch.bfloat16)
    for name in ("out", "dq", "dk", "dv"):
        assert not results[name][offsets[-1] :].any(), name
