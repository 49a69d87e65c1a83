"""Decoding with splits by length (csrc/schedule/split_by_length.cuh): sequences of any lengths.

Would catch a cluster that has no keys, or those of another sequence, tile or head; results of
splits in each other's memory; a sequence whose splits do not all count; lengths that a CUDA graph
keeps from its capture; results that depend on the order in which clusters end; and more clusters
than the grid has.

The sequences of a batch are short and long, so some have many clusters and most have one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_testing import (
    FP8,
    KERNEL_DIMS,
    Problem,
    assert_accurate,
    assert_bitwise_equal,
    attend,
    device_unsupported_reason,
    expected_forward,
    make_inputs,
    nan_filled_outputs,
)
from compiled import small_kernels
from test_8_bit_keys import check as check_8_bit_keys
from test_pages import in_pages, run

from flash_ext import ops

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (2500, 0)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "alibi": {"alibi": "h"},
    "all": {"causal": True, "window": (3000, 0), "softcap": 3.0, "sink": True},
}


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def lengths(batch: int, capacity: int, seed: int) -> tuple[int, ...]:
    """Of which some are 0, 1 or the capacity, and most are short."""
    rng = random.Random(seed)
    usual = [int(capacity ** rng.random()) for _ in range(batch)]
    return tuple(rng.choice((0, 1, capacity, rng.randint(0, capacity), n, n, n)) for n in usual)


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert_bitwise_equal(x, y)


def problem(batch: int, capacity: int, seed: int = 0, **fields: Any) -> Problem:
    usual = {"heads_q": 8, "heads_k": 2, "head_dim": 128, "loss": "out", "seqlen_q": 1}
    used = lengths(batch, capacity, seed)
    return Problem(batch=batch, seqlen_k=capacity, seqused_k=used, seed=seed, **usual | fields)


# --- Which cluster has which work, on the host ---


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return small_kernels("flash_ext_split_by_length")


@pytest.mark.parametrize("seed", range(8))
def test_each_cluster_of_a_tile_is_found_once(seed: int, native: ModuleType) -> None:
    """Tile by tile, first those that have several clusters, and their own memory, enough of it."""
    rng = random.Random(seed)
    sequences = rng.choice((1, 3, 31, 33, 70))
    work = [(rng.choice((0, 1, 1, 3)), int(5000 ** rng.random()) - 1) for _ in range(sequences)]
    clusters, least = rng.choice((1, sequences, 2 * sequences)), rng.choice((64, 128, 512))
    most = native.most(clusters, least)
    tiles = [(n, tile) for n, (count, _) in enumerate(work) for tile in range(count)]
    found = [native.find(clusters, least, work, i) for i in range(len(tiles) + most)]
    firsts = [(i, x) for i, x in enumerate(found) if x[0] >= 0 and x[2] == 0]
    several = [x[3] > 1 for _, x in firsts]
    assert several == sorted(several, reverse=True)
    assert sorted(x[:2] for _, x in firsts) == tiles
    number = 0
    for i, (sequence, tile, _, splits, stored) in firsts:
        assert i == number and (splits == 1 or least <= work[sequence][1] / splits)
        for cluster, x in enumerate(found[i : i + splits]):
            assert x[:4] == (sequence, tile, cluster, splits)
            assert splits == 1 or x[4] == stored == i
        number += splits
    assert all(x[0] < 0 for x in found[number:])
    assert sum(x[3] for (_, x), more in zip(firsts, several, strict=True) if more) <= most


@pytest.mark.parametrize("blocks", (1, 63, 640, 4096, 4097))
@pytest.mark.parametrize("of_each", (1, 2, 3, 15))
def test_equal_lengths_have_equal_clusters(of_each: int, blocks: int, native: ModuleType) -> None:
    """As many as the host wants, if they have the least number of keys."""
    for sequences in (2, 37):
        found = native.find(sequences * of_each, 64, [(1, blocks)] * sequences, 0)
        assert found[3] == of_each or blocks / of_each < 65


# --- Attention ---


@torch.no_grad()
def check(p: Problem, pages: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make_inputs(p, "cuda")
    if pages:
        out, lse = run(in_pages(p, inputs, pages), variant="fa3")
    else:
        with nan_filled_outputs():
            out, lse = attend(p, inputs, return_lse=True, variant="fa3")
    assert_accurate({"out": out, "lse": lse}, expected_forward(p, inputs), p.dtype)
    return out, lse


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_random_lengths(seed: int) -> None:
    """Dense and in pages."""
    rng = random.Random(seed)
    heads = rng.choice(((8, 2), (8, 8), (16, 2), (7, 1), (32, 8)))
    p = problem(rng.choice((2, 3, 7, 16, 33, 64)), rng.choice((2100, 4096, 6000, 9000)), seed,
                heads_q=heads[0], heads_k=heads[1], seqlen_q=rng.choice((1, 1, 2, 4)),
                **OPTIONS[rng.choice(list(OPTIONS))])  # fmt: skip
    check(p)
    check(p, rng.choice((1, 16, 24, 256)))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", KERNEL_DIMS, ids=str)
@pytest.mark.parametrize("seqlen_q", (1, 5))
def test_head_dims(seqlen_q: int, dims: tuple[int, int]) -> None:
    p = problem(9, 5000, 3, head_dim=dims[0], head_dim_v=dims[1], dtype=torch.float16,
                seqlen_q=seqlen_q, causal=True)  # fmt: skip
    check(p)
    check(p, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    for batch in (3, 24):
        p = problem(batch, 7000, 5, **OPTIONS[name])
        check(p)
        check(p, 48)


@pytest.mark.gpu
def test_equal_lengths() -> None:
    for used in (0, 1, 4000):
        p = dataclasses.replace(problem(12, 4000), seqused_k=(used,) * 12)
        check(p)
        check(p, 16)


@pytest.mark.gpu
def test_one_long_sequence() -> None:
    """First, in the middle and last: its clusters are more than are combined at a time."""
    for place in (0, 8, 19):
        used = [100] * 20
        used[place] = 30000
        p = Problem(20, 1, 30000, 8, 8, 32, seqused_k=tuple(used), loss="out")
        check(p, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", (300, 700))
def test_more_sequences_than_threads(batch: int) -> None:
    used = [i * 7 % 60 for i in range(batch)]
    used[batch - 2] = 2100
    p = Problem(batch, 1, 2100, 2, 1, 64, seqused_k=tuple(used), loss="out")
    check(p, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", (0, 16, 7))
def test_varlen(pages: int) -> None:
    """Sequences of one query or none; the rows after them become zeros."""
    for seed in range(3):
        rng = random.Random(seed)
        lengths_q = tuple(rng.choice((1, 1, 1, 0)) for _ in range(21))
        p = Problem(lengths_q=lengths_q, lengths_k=lengths(21, 6000, seed), heads_q=8, heads_k=2,
                    head_dim=128, causal=True, loss="out", seed=seed,
                    tail=lengths_q.count(0))  # fmt: skip
        out, _ = check(p, pages)
        assert not out[None][~p.used_rows("q").cuda()].any()


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", (5000, 12000))
def test_8_bit_keys(capacity: int) -> None:
    for batch in (2, 11):
        p = problem(batch, capacity, 9, kv_dtype=FP8, k_descale="fine", v_descale="fine")
        check_8_bit_keys(p, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pages", (0, 16))
@torch.no_grad()
def test_a_graph_has_the_lengths_of_its_replay(pages: int) -> None:
    """Also after a replay with other numbers of clusters: the counters are zeros again."""
    p = dataclasses.replace(problem(15, 8000), seqused_k=(8000,) * 15)
    inputs = make_inputs(p, "cuda")
    call: dict[str, Any] = {name: getattr(inputs, name) for name in ("q", "k", "v", "seqused_k")}
    call = in_pages(p, inputs, pages, more=0) if pages else call
    used = call["seqused_k"]
    graph = torch.cuda.CUDAGraph()
    run(call, variant="fa3")
    with torch.cuda.graph(graph):
        out, lse = ops.forward(**call, variant="fa3")
    for seed in range(12):
        new = (8000,) * 15 if seed == 5 else (0,) * 15 if seed == 6 else lengths(15, 8000, seed)
        used.copy_(torch.tensor(new, dtype=torch.int32))
        for x in (out, lse):
            x.fill_(float("nan"))
        graph.replay()
        assert_same((out, lse), run(call, variant="fa3"))


@pytest.mark.gpu
@torch.no_grad()
def test_bitwise_repeatable() -> None:
    p = problem(33, 9000, 2, heads_q=32, heads_k=8)
    inputs = make_inputs(p, "cuda")
    first = attend(p, inputs, return_lse=True, variant="fa3")
    noise = torch.empty(1 << 24, device="cuda")
    for i in range(200):
        if i % 10 == 0:
            noise.normal_()  # where the next workspace may be
        assert_same(attend(p, inputs, return_lse=True, variant="fa3"), first)


@pytest.mark.gpu
@torch.no_grad()
def test_num_splits_of_one_does_not_depend_on_the_batch() -> None:
    """The option num_splits = 1 of flash-attn: a sequence alone has the same bits."""
    p = problem(9, 6000, 4)
    call = in_pages(p, make_inputs(p, "cuda"), 16) | {"batch_invariant": True}
    out, lse = run(call)
    for b in (0, 4, 8):
        alone = {name: call[name][b : b + 1] for name in ("q", "page_table", "seqused_k")}
        assert_same(run(call | alone), (out[b : b + 1], lse[b : b + 1]))
