"""How calls fall into tiles and tiles to CTAs: none, one, a few more than CTAs, very many.

Would catch a persistent loop that stops early, repeats or loses a tile, carries O, m or a barrier's
phase from one tile to the next, a counter that is not back at its start for the replay of a CUDA
graph, and rows beyond a sequence's end that a copy brings in.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    VARIANTS,
    Problem,
    assert_all_bitwise_equal,
    assert_bitwise_equal,
    attend,
    check,
    make_inputs,
    run,
)

import flash_ext

pytestmark = pytest.mark.parametrize("variant", VARIANTS)

dims = pytest.mark.parametrize(
    ("device", "head_dim", "head_dim_v"),
    [("cpu", 64, 64), *(pytest.param("cuda", *x, marks=pytest.mark.gpu) for x in KERNEL_DIMS)],
)


@dims
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "lengths",
    ((1, 1), (1, 64), (16, 30), (64, 16), (64, 64), (65, 65), (128, 96), (129, 97), (192, 128)),
    ids=str,
)
def test_a_single_tile(
    lengths: tuple[int, int], causal: bool, head_dim: int, head_dim_v: int, variant: str,
    device: str,
) -> None:  # fmt: skip
    """One CTA at work, most often for one step."""
    problem = Problem(1, *lengths, 1, 1, head_dim, head_dim_v=head_dim_v, causal=causal)
    check(problem.well_conditioned(), variant, device)
    run(problem, variant, device)  # as it is: one batch, one head


@dims
def test_one_step_a_tile(head_dim: int, head_dim_v: int, variant: str, device: str) -> None:
    """Each tile's first step is its last: prologue and epilogue meet, tile after tile."""
    for seqlen_k, mask in itertools.product((1, 9, 64), ({}, {"causal": True})):
        heads = 64 if device == "cuda" else 2
        problem = Problem(2, 700, seqlen_k, heads, heads // 2, head_dim, head_dim_v=head_dim_v)
        check(dataclasses.replace(problem, **mask, loss="both"), variant, device)


@dims
@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window": (70, 30)}), ids=str)
def test_many_more_tiles_than_ctas(
    mask: dict, head_dim: int, head_dim_v: int, variant: str, device: str
) -> None:
    """A thousand tiles and more, of several steps, with Sq above, at and below Sk."""
    heads, batch = (64, 4) if device == "cuda" else (2, 2)
    for seqlen_q, seqlen_k in ((400, 70), (400, 400), (130, 530)):
        problem = Problem(batch, seqlen_q, seqlen_k, heads, heads // 4 or 1, head_dim, **mask)
        check(dataclasses.replace(problem, head_dim_v=head_dim_v), variant, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("more", (-2, -1, 0, 1))
@pytest.mark.parametrize("times", (1, 2, 3))
def test_about_as_many_tiles_as_multiprocessors(
    times: int, more: int, head_dim: int, variant: str
) -> None:
    """One tile a head, of too few keys for splits. Equal heads give equal bits."""
    heads = times * torch.cuda.get_device_properties(0).multi_processor_count + more
    q, k, v = make_inputs(Problem(1, 100, 300, 1, 1, head_dim), "cuda").leaves().values()
    expected = flash_ext.attention(q, k, v, causal=True, variant=variant, return_lse=True)
    q, k, v = (x.detach().expand(1, -1, heads, -1) for x in (q, k, v))
    out, lse = flash_ext.attention(q, k, v, causal=True, variant=variant, return_lse=True)
    assert_bitwise_equal(out, expected[0].detach().expand_as(out))
    assert_bitwise_equal(lse, expected[1].detach().expand_as(lse))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "head_dim_v"), KERNEL_DIMS)
@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window": (70, 30)}), ids=str)
def test_about_as_many_heads_as_multiprocessors(
    mask: dict, head_dim: int, head_dim_v: int, variant: str
) -> None:
    """Few tiles a head, all of which a CTA may take under a mask."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for heads, seqlen_q, seqlen_k in ((multiprocessors, 300, 150), (multiprocessors - 4, 384, 90)):
        problem = Problem(1, seqlen_q, seqlen_k, heads, heads, head_dim, **mask)
        check(dataclasses.replace(problem, head_dim_v=head_dim_v), variant, "cuda")


@dims
def test_tiles_without_keys_among_others(
    head_dim: int, head_dim_v: int, variant: str, device: str
) -> None:
    """Causal with Sq above Sk: whole tiles, and parts of one, see nothing; the next CTA's do."""
    heads = 24 if device == "cuda" else 2
    for seqlen_q, seqlen_k in ((700, 100), (600, 1), (513, 257)):
        problem = Problem(2, seqlen_q, seqlen_k, heads, 2, head_dim, head_dim_v=head_dim_v)
        for mask in ({"causal": True}, {"window": (-1, 3)}, {"window": (5, 0), "sink": True}):
            results = check(dataclasses.replace(problem, **mask, loss="both"), variant, device)
            assert not results["out"][:, : seqlen_q - seqlen_k - 10].any()


@dims
def test_sequences_of_all_lengths_side_by_side(
    head_dim: int, head_dim_v: int, variant: str, device: str
) -> None:
    """Empty ones, ones without keys, of one row, of a tile, of many, in every order."""
    some = (0, 1, 300, 0, 64, 129) if device == "cuda" else (0, 1, 70)
    lengths = tuple(itertools.product(some, repeat=2))
    problem = Problem(
        lengths_q=tuple(a for a, _ in lengths),
        lengths_k=tuple(b for _, b in lengths),
        heads_q=4, head_dim=head_dim, head_dim_v=head_dim_v, causal=True, sink=True,
    )  # fmt: skip
    check(problem, variant, device)
    check(dataclasses.replace(problem, causal=False, sink=False), variant, device)


@dims
@pytest.mark.parametrize("poison", (torch.nan, torch.inf, -torch.inf))
def test_what_lies_beyond_a_sequence_is_not_seen(
    poison: float, head_dim: int, head_dim_v: int, variant: str, device: str
) -> None:
    """Rows past seqused_k, of no sequence, and of the neighbor: not a bit of them."""
    lengths = (1, 63, 130, 65, 200, 7)
    packed = Problem(lengths_q=lengths, lengths_k=lengths, seqused_k=(1, 60, 129, 64, 0, 7), tail=9)
    dense = Problem(4, 150, 260, seqused_k=(1, 128, 259, 70))
    for base, mask in itertools.product((packed, dense), ({}, {"causal": True})):
        problem = dataclasses.replace(base, heads_q=4, head_dim=head_dim, head_dim_v=head_dim_v)
        problem = dataclasses.replace(problem, **mask)
        results = []
        for value in (0.0, poison):
            inputs = make_inputs(problem, device)
            with torch.no_grad():
                for x, side in ((inputs.q, "q"), (inputs.k, "k"), (inputs.v, "k")):
                    unused = ~problem.used_rows(side).to(device)
                    x[unused[0] if problem.packed else unused] = value
            results.append(run(problem, variant, device, deterministic=True, inputs=inputs))
        assert_all_bitwise_equal(results[1], results[0])
        assert not any(x.isnan().any() for x in results[1].values())


@dims
@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
def test_neighbours_are_not_seen(
    poison: float, head_dim: int, head_dim_v: int, variant: str, device: str
) -> None:
    """Every second sequence is poison; the others keep every bit."""
    lengths = (33, 1, 64, 128, 200, 130, 95, 64, 1)
    problem = Problem(
        lengths_q=lengths, lengths_k=lengths, heads_q=4, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=True,
    )  # fmt: skip
    stops = list(itertools.accumulate(lengths))
    sick = torch.zeros(stops[-1] + problem.tail, dtype=torch.bool, device=device)
    for stop, length in list(zip(stops, lengths, strict=True))[1::2]:
        sick[stop - length : stop] = True
    results = []
    for value in (1.0, poison):
        inputs = make_inputs(problem, device)
        with torch.no_grad():
            for x in (inputs.q, inputs.k, inputs.v):
                x[sick] = value
        found = run(problem, variant, device, deterministic=True, inputs=inputs)
        found["lse"] = found["lse"].T
        results.append({name: x[~sick] for name, x in found.items()})
    assert_all_bitwise_equal(results[1], results[0])


# --- CUDA graphs ---


def forward(problem: Problem, inputs, variant: str) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return attend(problem, inputs, variant=variant, return_lse=True)


REPLAYED = (
    Problem(1, 60, 60, 1, 1),  # one tile
    Problem(4, 500, 500, 16, 4, 128, causal=True),  # more than CTAs
    Problem(2, 700, 90, 16, 4, 128, causal=True),  # many without keys
    Problem(lengths_q=(300, 0, 7, 900), lengths_k=(300, 0, 7, 900), heads_q=16, causal=True),
    Problem(4, 300, 300, 8, 8, 256, seqused_k=(300, 0, 5, 200)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", REPLAYED, ids=str)
def test_a_graph_replayed_again_and_again(problem: Problem, variant: str) -> None:
    """Several calls in one graph, on memory that other work writes in between, 20 times over."""
    inputs = make_inputs(problem, "cuda")
    other = make_inputs(Problem(2, 300, 300, 8, 8, 64), "cuda")
    expected = forward(problem, inputs, variant)
    beside = forward(Problem(2, 300, 300, 8, 8, 64), other, variant)

    def step() -> list[torch.Tensor]:
        results = [*forward(problem, inputs, variant)]
        # Takes the scratch memory that the call gave back, and fills it.
        scratch = [torch.full((2,), value, dtype=torch.int64, device="cuda") for value in (-1, 5)]
        results += forward(Problem(2, 300, 300, 8, 8, 64), other, variant)
        del scratch
        return results + [*forward(problem, inputs, variant)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(20):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        for actual, wanted in zip(captured, (*expected, *beside, *expected), strict=True):
            assert_bitwise_equal(actual, wanted)


@pytest.mark.gpu
def test_two_graphs_in_turns(variant: str) -> None:
    """Each has its own memory and its own count of tiles; eager calls come in between."""
    problems = [Problem(2, 600, 600, 16, 16, 128, causal=True), Problem(2, 900, 200, 8, 8)]
    inputs = [make_inputs(p, "cuda") for p in problems]
    expected = [forward(p, i, variant) for p, i in zip(problems, inputs, strict=True)]
    graphs, results = [], []
    for p, i in zip(problems, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(forward(p, i, variant))
        graphs.append(graph)
    for turn in range(20):
        which = turn % 3 % 2
        for x in results[which]:
            x.fill_(torch.nan)
        graphs[which].replay()
        if turn % 4 == 0:
            forward(problems[1 - which], inputs[1 - which], variant)
        for actual, wanted in zip(results[which], expected[which], strict=True):
            assert_bitwise_equal(actual, wanted)
