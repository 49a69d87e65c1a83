"""The grid: out, lse, dq, dk, dv of every variant against float64, over sizes and options.

Would catch a wrong tile edge, mask, stride, head mapping, rescale, rounding or gradient anywhere in
the kernels, a read outside the valid rows (inputs are surrounded by NaN) and an output element
never written (outputs start as NaN). One list of problems serves both devices; the CPU runs a
thinner one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    LAYOUTS,
    SQUARE_DIMS,
    VARIANTS,
    Expected,
    Problem,
    assert_accurate,
    backward_of,
    check,
    device_unsupported_reason,
    make_inputs,
    run,
    runnable,
    standard_attention,
)
from grids import BIAS_PATTERNS, HALF_TYPES, HEADS, MASKS, alternate, cover, every_case, problems
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_ext

HEAD_DIMS = {
    "cpu": (1, 40, 59, 256),  # they change the size of tiles alone
    "cuda": (1, 8, 16, 24, 32, 40, 59, 64, 72, 80, 96, 104, 111, 128, 160, 192, 224, 248, 255, 256),
}
SHORT = {
    "cpu": ((1, 1), (1, 239), (239, 1), (3, 79), (130, 65), (113, 203)),
    "cuda": (
        *((1, 1), (1, 239), (239, 1), (3, 799), (799, 3), (127, 512), (512, 127)),
        *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    ),
}
LONG = {
    "cpu": ((300, 517),),
    "cuda": ((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (1, 4224), (2000, 1000)),
}
WINDOWS = (
    *((0, 0), (17, 5), (64, 0), (0, 64), (-1, 0), (-1, 7), (3, -1), (0, -1), (200, 200), (1000, 3)),
)
WINDOW_SHAPES = {
    "cpu": ((65, 130), (130, 65), (113, 203)),
    "cuda": ((1, 239), (3, 799), (799, 3), (113, 203), (203, 113), (256, 512), (512, 256)),
}


def head_dims_and_lengths(device: str) -> Iterator[Problem]:
    """Every head dimension with every short pair of lengths, full and causal."""
    grid = cover(device, HEAD_DIMS[device], SHORT[device], MASKS)
    return alternate(Problem(1, *lengths, head_dim=d, **mask) for d, lengths, mask in grid)


def windows(device: str) -> Iterator[Problem]:
    """Every window, with Sq below, at and above Sk: wholly masked rows and tiles on both sides."""
    dims = (32, 40, 64, 128, 256) if device == "cuda" else (40, 64)
    grid = cover(device, WINDOWS, WINDOW_SHAPES[device], dims)
    return alternate(Problem(1, *lengths, head_dim=d, window=w) for w, lengths, d in grid)


def windows_with_causal(device: str) -> Iterator[Problem]:
    """causal overrides the window's right side."""
    grid = cover(device, ((17, 5), (64, -1)), ((113, 203), (130, 65)), (64, 96))
    return alternate(
        Problem(1, *lengths, head_dim=d, causal=True, window=w) for w, lengths, d in grid
    )


def layouts(device: str) -> Iterator[Problem]:
    """Every layout of the inputs in memory, aligned and not."""
    dims = (24, 40, 59, *SQUARE_DIMS) if device == "cuda" else (40, 59, 64)
    lengths = ((130, 197), (197, 130)) if device == "cuda" else ((70, 97),)
    grid = cover(device, LAYOUTS, dims, lengths, MASKS)
    for index, (layout, d, (sq, sk), mask) in enumerate(grid):
        heads_q, heads_k = HEADS[index % 2]  # at least two key heads, or there is no stride
        yield Problem(
            2, sq, sk, heads_q, heads_k, d, HALF_TYPES[index // 2 % 2], **mask, layout=layout
        )


def head_groups(device: str) -> Iterator[Problem]:
    """Multi-head, grouped and multi-query attention, with more than one batch."""
    dims = (32, 64, 128, 256) if device == "cuda" else (64,)
    groups = ((1, 1), (5, 5), (6, 2), (6, 1), (16, 4))
    lengths = (100, 150) if device == "cuda" else (33, 70)
    for heads, d, dtype, mask in cover(device, groups, dims, HALF_TYPES, MASKS):
        yield Problem(3, *lengths, *heads, d, dtype, **mask)


def dropout(device: str) -> Iterator[Problem]:
    """Dropout with each kind of mask; the reference drops the same elements."""
    dims = (24, 40, 160, *SQUARE_DIMS) if device == "cuda" else (40, 64)
    lengths = ((113, 203), (256, 130)) if device == "cuda" else ((65, 130),)
    masks = (*MASKS, {"window": (33, 9)})
    grid = cover(device, (0.17, 0.5), dims, lengths, masks)
    return alternate(
        Problem(2, *pair, head_dim=d, dropout_p=p, **mask) for p, d, pair, mask in grid
    )


def scales(device: str) -> Iterator[Problem]:
    """Scales that are not 1/sqrt(D): small, zero, negative, and so large that logits reach 1e4."""
    pairs = ((0.01, 1.0), (0.0, 1.0), (-0.2, 1.0), (0.3, 1.0), (1.0, 50.0))
    for (scale, gain), d, mask, dtype in cover(device, pairs, (64, 96), MASKS, HALF_TYPES):
        yield Problem(
            1, 130, 190, head_dim=d, scale=scale, logit_gain=gain, dtype=dtype, seed=5, **mask
        )


def losses(device: str) -> Iterator[Problem]:
    """The loss uses out, lse or both; from lse alone dv is exactly 0."""
    dims = (24, 40, 64, 128, 192, 256) if device == "cuda" else (40, 64)
    for loss, d, mask, dtype in cover(
        device, ("out", "lse", "both"), dims, (*MASKS, {"window": (20, 3)}), HALF_TYPES
    ):
        yield Problem(1, 190, 130, 4, 2, head_dim=d, loss=loss, dtype=dtype, **mask)


def long_sequences(device: str) -> Iterator[Problem]:
    """Many tiles in both directions; one problem as long as the longest of the peers' tests."""
    dims = SQUARE_DIMS if device == "cuda" else (64,)
    masks = (*MASKS, {"window": (300, 0)})
    grid = itertools.product(LONG[device], dims, masks)
    yield from alternate(Problem(1, *pair, head_dim=d, **mask) for pair, d, mask in grid)
    if device == "cuda":
        for d, mask, dtype in itertools.product((64, 128), MASKS, HALF_TYPES):
            yield Problem(1, 4224, 4224, 2, 1, d, dtype, **mask)
        # Of many keys fa3 has other tiles at head dims 32 and 64, where there are enough of them,
        # and of many queries in the backward at 128.
        for mask, layout in itertools.product(MASKS, ("bshd", "packed")):
            for d, heads, loss in (
                (32, 4, "out"),
                (64, 6, "out"),
                (128, 2, "out"),
                (128, 2, "both"),
            ):
                yield Problem(1, 8200, 8250, heads, 1, d, layout=layout, loss=loss, **mask)
            yield Problem(1, 16500, 4100, 2, 1, 128, layout=layout, loss="both", **mask)
        yield Problem(1, 16500, 16600, 1, 1, 128, loss="both", causal=True)
        yield Problem(1, 16500, 4000, 2, 1, 128, window=(300, 100), seqused_k=(3900,))


def one_query(device: str) -> Iterator[Problem]:
    """Decoding with grouped heads: those of a group are rows of one tile, but where an option tells
    them apart."""
    dims = (*SQUARE_DIMS, 24, 40) if device == "cuda" else (64,)
    options = (
        {},
        {"causal": True},
        {"window": (50, 0)},
        {"window": (300, 7)},  # hides nothing
        {"softcap": 1.5},
        {"seqused_k": (300, 0, 129)},
        {"sink": True},
        {"alibi": "h"},
        {"alibi": "bh", "causal": True},
        {"bias": "bhqk"},
        {"dropout_p": 0.3},
        {"layout": "bhsd"},
        {"layout": "packed"},
        {"layout": "odd_row"},
    )
    groups = (1, 3, 8) if device == "cuda" else (3,)
    for d, group, option in itertools.product(dims, groups, options):
        yield Problem(3, 1, 300, 2 * group, 2, head_dim=d, **option)


def few_queries(device: str) -> Iterator[Problem]:
    """So few queries of grouped heads that fa3 packs them: the rows of a tile are the heads of a
    group. Groups that fill eight rows and that do not, queries that fill tiles and that do not."""
    dims = (*KERNEL_DIMS, (40, 72), (24, 24))
    options = (
        {},
        {"causal": True},
        {"window": (150, 0)},
        {"window": (300, 7), "sink": True},
        {"sink": True, "causal": True},
        {"softcap": 1.5, "causal": True},
        {"softcap": 20.0, "logit_gain": 40.0, "sink": True},
        {"seqused_k": (700, 0, 129)},
        {"layout": "bhsd", "causal": True},
        {"layout": "packed", "sink": True},
        {"layout": "expanded_heads"},
        {"lengths_q": (1, 5, 0, 3, 19), "lengths_k": (2700, 300, 5, 0, 40), "causal": True},
        {"lengths_q": (2, 1, 1), "lengths_k": (1, 900, 2000), "sink": True},
    )
    # The last groups take a tile for every query, and are too large for one.
    sizes = ((2, 2), (2, 9), (3, 1), (4, 4), (5, 17), (7, 3), (8, 16), (12, 20), (16, 5), (71, 2))
    sizes = (*sizes, (130, 1)) if device == "cuda" else ()  # no CPU kernel packs heads
    for (group, queries), option in itertools.product(sizes, options):
        d, dv = dims[(group + queries + len(option)) % len(dims)] if device == "cuda" else dims[0]
        heads_k = 1 if group > 16 else 2
        problem = Problem(3, queries, 700, group * heads_k, heads_k, d, head_dim_v=dv)
        yield dataclasses.replace(problem, dtype=HALF_TYPES[queries % 2], **option)
    if device == "cuda":
        for (d, dv), option in itertools.product(dims, options[:7]):  # and split keys
            yield Problem(1, 20, 5000, 16, 2, d, head_dim_v=dv, **option)


def few_tiles(device: str) -> Iterator[Problem]:
    """So few tiles of queries and so many keys that fa2 and fa3 split the keys: splits of different
    lengths, some without a key that a row sees."""
    dims = (*KERNEL_DIMS, (40, 72), (59, 37), (24, 24))
    options = (
        {},
        {"causal": True},
        {"window": (2500, 0)},
        {"window": (2000, 100), "sink": True},
        {"seqused_k": (2900, 1, 0)},
        {"sink": True, "causal": True},
        {"layout": "packed", "causal": True},
        {"lengths_q": (1, 200, 0, 3), "lengths_k": (4000, 2300, 5, 0), "sink": True},
        {"lengths_q": (1, 4, 0, 2), "lengths_k": (4000, 2300, 5, 1), "causal": True},
        {"softcap": 1.5, "causal": True},
        {"alibi": "bh", "window": (2000, 100)},
        {"bias": "bhqk", "sink": True},
        {"dropout_p": 0.3, "causal": True, "sink": True},
    )
    lengths = ((5, 3001), (70, 3001), (130, 2999), (600, 5003)) if device == "cuda" else ((1, 600),)
    for (d, dv), pair, option in itertools.product(
        dims if device == "cuda" else dims[:1], lengths, options
    ):
        yield Problem(3, *pair, 4, 2, head_dim=d, head_dim_v=dv, **option)


def many_tiles(device: str) -> Iterator[Problem]:
    """So many tiles of 128 queries that fa3 uses larger ones up to head dim 96."""
    options = (
        *MASKS,
        {"window": (700, 40)},
        {"seqused_k": (1010, 500, 1, 0)},
        {"sink": True, "causal": True},
        {"layout": "packed"},
        {"layout": "odd_row", "causal": True},
    )
    batch, heads, *lengths = (4, 8, 1000, 1010) if device == "cuda" else (4, 2, 70, 80)
    for d, dtype, option in cover(device, (24, 32, 40, 64), HALF_TYPES, options):
        yield Problem(batch, *lengths, heads, heads // 2, d, dtype, **option)
    if device == "cuda":  # of 192 rows
        for d, dtype, option in itertools.product((80, 96), HALF_TYPES, options):
            yield Problem(batch, 1150, 1010, heads, heads // 2, d, dtype, **option)


def empty(device: str) -> Iterator[Problem]:
    """A size of zero anywhere but in the heads and the head dimension."""
    for batch, sq, sk in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)):
        for mask in MASKS:
            yield Problem(batch, sq, sk, **mask)


# Query and value head dims.
PAIRS_OF_DIMS = {
    "cpu": ((40, 40), (64, 64), (64, 24), (40, 72)),
    "cuda": (
        *((d, d) for d in (24, 40, *SQUARE_DIMS)),
        *((192, 128), (32, 64), (64, 128), (128, 64), (96, 256), (40, 72)),
    ),
}


def each_option(device: str) -> Iterator[Problem]:
    """Every single option, with every mask, in every head dimension."""
    lengths = ((113, 203), (256, 130)) if device == "cuda" else ((65, 130),)
    options = (
        {},
        {"softcap": 1.5},
        {"softcap": 20.0, "logit_gain": 40.0},  # most scores at the cap
        {"alibi": "h"},
        {"alibi": "bh"},
        {"bias": "bhqk"},
        {"bias": "1hqk", "bias_type": "float32"},
        {"bias": "b1qk", "bias_type": "bool"},
        {"sink": True},
        {"seqused_k": (0, 70, 1000)},
    )
    masks = (*MASKS, {"window": (33, 9)})
    grid = cover(device, options, PAIRS_OF_DIMS[device], lengths, masks)
    return alternate(
        Problem(3, *pair, head_dim=d, head_dim_v=dv, **option, **mask)
        for option, (d, dv), pair, mask in grid
    )


def sinks(device: str) -> Iterator[Problem]:
    """So many heads that the rule can judge dsink, which has one number for each."""
    dims = (
        ((24, 24), (40, 40), (64, 128), (128, 128), (192, 128), (256, 256))
        if device == "cuda"
        else ((24, 40),)
    )
    options = ({}, {"causal": True}, {"window": (9, 5)}, {"seqused_k": (70, 0), "dropout_p": 0.2})
    grid = cover(device, options, dims, ("out", "lse", "both"), HALF_TYPES)
    lengths = (70, 90) if device == "cuda" else (33, 70)
    for index, (option, (d, dv), loss, dtype) in enumerate(grid):
        yield Problem(
            2, *lengths, 64, 16, d, dtype, head_dim_v=dv, sink=True, loss=loss, seed=index, **option
        )


def option_pairs(device: str) -> Iterator[tuple[int, dict]]:
    """All pairs of options, bias patterns in rotation: a number, and the fields of a problem."""
    lengths_q, lengths_k = ((70, 0, 33), (90, 12, 61))
    if device == "cuda":
        lengths_q, lengths_k = ((150, 0, 33), (290, 12, 161))
    options = {
        "causal": {"causal": True},
        "window": {"window": (40, 9)},
        "gqa": {"heads_q": 4},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi": "bh"},
        "bias": {"bias": "bhqk"},
        "bool_bias": {"bias": "bhqk", "bias_type": "bool"},
        "sink": {"sink": True},
        "varlen": {"lengths_q": lengths_q, "lengths_k": lengths_k},
        "seqused_k": {"seqused_k": (lengths_k[0] - 40, 0, 1000)},
        "head_dim_v": {"head_dim_v": 48},
        "dropout": {"dropout_p": 0.2},
        "unaligned": {"layout": "odd_offset"},
        "scale": {"scale": 0.3},
        "lse_loss": {"loss": "lse"},
    }
    base = {"batch": 3, "seqlen_q": lengths_q[0], "seqlen_k": lengths_k[0]}
    patterns = [pattern for pattern in BIAS_PATTERNS if "k" in pattern]
    for index, (one, other) in enumerate(itertools.combinations(options, 2)):
        if {one, other} == {"bias", "bool_bias"}:
            continue
        fields = base | options[one] | options[other]
        if "bias" in fields:
            fields["bias"] = patterns[index % len(patterns)]
        yield index, fields


def pairs_of_options(device: str) -> Iterator[Problem]:
    """All pairs of options, head dims in rotation."""
    dims = (40, *SQUARE_DIMS) if device == "cuda" else (40, 64)
    for index, fields in option_pairs(device):
        # Prime to the other cycles, so that all dims and types meet all options.
        dim, dtype = dims[index % 7 % len(dims)], HALF_TYPES[index % 3 % 2]
        yield Problem(**fields, head_dim=dim, dtype=dtype, seed=index)


def wide_types(device: str) -> Iterator[Problem]:
    """float32 on the CPU kernels."""
    if device == "cpu":
        for d, mask in itertools.product((8, 64), (*MASKS, {"window": (20, 3)})):
            yield Problem(1, 113, 203, 4, 2, d, torch.float32, dropout_p=0.2, **mask)


GRIDS = (
    head_dims_and_lengths,
    windows,
    windows_with_causal,
    layouts,
    head_groups,
    dropout,
    scales,
    losses,
    long_sequences,
    one_query,
    few_queries,
    few_tiles,
    many_tiles,
    empty,
    each_option,
    sinks,
    pairs_of_options,
    wide_types,
)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("device", "problem", "variant"), every_case(*GRIDS))
def test_against_float64(device: str, problem: Problem, variant: str) -> None:
    """Half of the problems ask for the deterministic backward pass."""
    check(problem, variant, device, deterministic=problem.seed % 2 == 1)


def gradients_of_fa3() -> Iterator[Problem]:
    """Pairs of options, and several more, at every pair of head dims.

    Lengths are about whole tiles, and a group has more than one query head.
    """
    for (d, dv), (index, fields) in itertools.product(KERNEL_DIMS, option_pairs("cuda")):
        yield Problem(
            **{"heads_q": 4, "head_dim_v": dv} | fields,
            head_dim=d, dtype=HALF_TYPES[index % 2], seed=index,
        ).well_conditioned()  # fmt: skip
    several = (
        {},
        {"causal": True},
        {"window": (70, 31), "softcap": 2.0, "alibi": "h", "scale": 0.2},
        {"causal": True, "sink": True, "alibi": "bh", "layout": "packed"},
        {"seqused_k": (129, 0, 500), "softcap": 2.0, "sink": True, "layout": "sbhd"},
        {
            "lengths_q": (128, 0, 257, 1),
            "lengths_k": (129, 64, 256, 0),
            "causal": True,
            "sink": True,
        },
    )
    lengths = ((127, 129), (128, 128), (129, 127), (256, 384), (384, 255), (64, 640), (640, 63))
    grid = itertools.product(KERNEL_DIMS, several, lengths)
    for index, ((d, dv), options, (sq, sk)) in enumerate(grid):
        fields = {"batch": 3, "seqlen_q": sq, "seqlen_k": sk, "heads_q": 6} | options
        yield Problem(
            **fields, head_dim=d, head_dim_v=dv, dtype=HALF_TYPES[index % 3 % 2], seed=index
        )


def few_key_heads() -> Iterator[Problem]:
    """So few KV tiles that fa3's backward cuts groups into parts (plan/cost.h)."""
    options = (
        {},
        {"causal": True},
        {"window": (300, 90)},
        {"causal": True, "softcap": 20.0, "sink": True},
        {"seqused_k": (500, 0), "layout": "expanded_heads"},
        {"lengths_q": (600, 1100, 0, 515), "lengths_k": (700, 1000, 3, 515), "causal": True},
        {"scale": 40.0},  # large statistics, whose rows are computed again from K
    )
    groups = ((6, 1), (7, 1), (16, 2))
    grid = itertools.product(KERNEL_DIMS, options)
    for index, ((d, dv), option) in enumerate(grid):
        heads_q, heads_k = groups[index % len(groups)]
        yield Problem(
            2, 1030, 900, heads_q, heads_k, d, HALF_TYPES[index % 2], head_dim_v=dv, seed=index,
            **option,
        ).well_conditioned()  # fmt: skip


def few_keys() -> Iterator[Problem]:
    """Many queries to so few keys that fa3's backward cuts the queries of a head into parts."""
    options = (
        {},
        {"softcap": 20.0, "sink": True},
        {"seqused_k": (50, 0), "layout": "expanded_heads"},
        {"scale": 40.0},  # large statistics, whose rows are computed again from K
    )
    several = ((4, 4, 2300, 77), (6, 2, 1100, 130), (3, 1, 4200, 257))
    for index, ((d, dv), option) in enumerate(itertools.product(KERNEL_DIMS, options)):
        heads_q, heads_k, queries, keys = several[index % len(several)]
        yield Problem(
            2, queries, keys, heads_q, heads_k, d, HALF_TYPES[index % 2], head_dim_v=dv,
            seed=index // 2, **option,
        ).well_conditioned()  # fmt: skip


# Batch, queries, keys, heads: what fa3's kernel for few queries takes. Keys in 8, 8, 4, 2 and 1
# splits, and in those of several clusters; 1, 2, 4, 6, 24 and 16 rows a tile; keys for 16 warps
# and for 8.
DECODING = (
    (1, 1, 9000, 8, 8),
    (1, 2, 900, 8, 8),
    (16, 2, 1000, 4, 2),
    (30, 1, 900, 4, 2),
    (70, 3, 200, 4, 2),
    (1, 12, 3000, 4, 2),
    (1, 4, 20000, 4, 1),
)


def decoding() -> Iterator[Problem]:
    """Few queries to many keys: splits that differ in length, and some without a visible key."""
    options = (
        {},
        {"causal": True},
        {"window": (150, 0)},
        {"window": (300, 7), "sink": True},
        {"sink": True, "causal": True, "layout": "bhsd"},
        {"softcap": 1.5, "causal": True},
        {"alibi": "bh", "window": (700, 100)},
        {"scale": 40.0},  # scores of thousands, which need no second pass here
        {"seqused": True, "layout": "odd_row"},
    )
    grid = itertools.product((*KERNEL_DIMS, (40, 72), (24, 24)), DECODING)
    for index, ((d, dv), (batch, *sizes)) in enumerate(grid):
        for option in options[index % 7 % 3 :: 3]:  # each at every pair of head dims
            option = dict(option)
            if option.pop("seqused", False):
                option["seqused_k"] = tuple(i * 977 % (sizes[1] + 1) for i in range(batch))
            yield Problem(
                batch, *sizes, d, HALF_TYPES[index % 2], head_dim_v=dv, seed=index, **option
            ).well_conditioned()  # fmt: skip
    # Packed: a query each, or two, or none.
    lengths_k = (700, 3, 0, 2500, 1, 900)
    for (d, dv), lengths_q in itertools.product(KERNEL_DIMS, ((1,) * 6, (2, 0, 1, 1, 0, 2))):
        for option in ({}, {"causal": True, "sink": True}, {"window": (600, 0)}):
            yield Problem(
                lengths_q=lengths_q, lengths_k=lengths_k, tail=0, heads_q=8, heads_k=2,
                head_dim=d, head_dim_v=dv, **option,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fa3"])
@pytest.mark.parametrize("problem", [*decoding()], ids=str)
def test_decoding_of_fa3(problem: Problem, variant: str) -> None:
    check(problem, variant, "cuda")


def unaligned_rows() -> Iterator[Problem]:
    """Rows that TMA cannot address: fa3 copies them, and its results back."""
    options = (
        {},
        {"causal": True, "layout": "odd_row"},
        {"window": (70, 31), "layout": "odd_offset"},
        {"causal": True, "layout": "packed", "sink": True},
        {"layout": "bhsd", "loss": "both"},
        {"layout": "expanded_heads", "causal": True},
        {"layout": "expanded_batch", "sink": True},
        {"seqused_k": (129, 0, 500), "layout": "odd_row"},
        {"softcap": 2.0, "alibi": "h", "scale": 0.2},
        {"lengths_q": (128, 0, 257, 1), "lengths_k": (129, 64, 256, 0), "causal": True},
        {"heads_k": 1, "seqlen_q": 1030, "seqlen_k": 900, "causal": True},  # in parts
        {"seqlen_q": 70, "seqlen_k": 3001},  # splits of the keys
        {"seqlen_q": 1, "seqlen_k": 900, "layout": "odd_row"},
    )
    dims = ((20, 20), (36, 36), (60, 60), (100, 100), (250, 250), (59, 37), (180, 100), (64, 64))
    for index, ((d, dv), option) in enumerate(itertools.product(dims, options)):
        fields = {"batch": 3, "seqlen_q": 257, "seqlen_k": 383, "heads_q": 6, "heads_k": 2} | option
        yield Problem(
            **fields, head_dim=d, head_dim_v=dv, dtype=HALF_TYPES[index % 2], seed=index // 2
        ).well_conditioned()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fa3"])
@pytest.mark.parametrize("problem", [*unaligned_rows()], ids=str)
def test_unaligned_rows_of_fa3(problem: Problem, variant: str) -> None:
    check(problem, variant, "cuda", deterministic=problem.seed % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fa3"])
@pytest.mark.parametrize("problem", [*gradients_of_fa3(), *few_key_heads(), *few_keys()], ids=str)
def test_gradients_of_fa3(problem: Problem, variant: str) -> None:
    assert backward_of(variant, problem) == variant
    check(problem, variant, "cuda", deterministic=problem.seed % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (192, 256))
def test_wide_gradients_of_fa3_are_as_precise(head_dim: int) -> None:
    """P goes from one warpgroup to another there. Were it rounded to fp16 on the way, errors would
    be a fifth above those of fa2, which rounds P only for dV."""
    problem = Problem(2, 512, 512, 4, 4, head_dim, torch.float16, loss="out")
    expected = standard_attention(problem, make_inputs(problem, "cuda"), torch.float64)
    fa2, fa3 = (run(problem, variant, "cuda") for variant in ("fa2", "fa3"))
    for name in ("dq", "dk"):
        errors = [(x[name].double() - expected[name]).norm().item() for x in (fa2, fa3)]
        assert errors[1] <= 1.02 * errors[0], f"{name}: {errors}"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", HEAD_DIMS["cuda"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_deterministic_backward_of_every_head_dim(
    variant: str, head_dim: int, causal: bool
) -> None:
    problem = Problem(2, 200, 270, 4, 2, head_dim, causal=causal)
    check(problem, variant, "cuda", deterministic=True)


@pytest.mark.parametrize("variant", VARIANTS)
@given(drawn=problems(longest=150))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_random_problems_on_cpu(drawn: Problem, variant: str) -> None:
    check(runnable(variant, drawn), variant, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@given(drawn=problems(longest=700), deterministic=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_random_problems_on_gpu(drawn: Problem, deterministic: bool, variant: str) -> None:
    check(runnable(variant, drawn), variant, "cuda", deterministic=deterministic)


def run_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, variant: str):
    """All five results of causal attention on the given tensors."""
    out, lse = flash_ext.attention(q, k, v, causal=True, variant=variant, return_lse=True)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def assert_batch_accurate(index: int, tensors: tuple, results: tuple) -> None:
    """One batch of the results of `run_whole` against standard attention of only that batch."""
    # Compact copies: cuBLAS refuses the strides that our kernels are tested with here.
    q, k, v, dout = (
        x[index : index + 1].detach().clone(memory_format=torch.contiguous_format) for x in tensors
    )
    sides = []
    for dtype in (torch.float64, q.dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out, lse = flash_ext.reference.attention(*leaves, causal=True)
        gradients = torch.autograd.grad(out, leaves, dout.to(dtype))
        names = ("out", "lse", "dq", "dk", "dv")
        sides.append(dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True)))
    actual = {name: x[index : index + 1] for name, x in zip(sides[0], results, strict=True)}
    assert_accurate(actual, Expected(*sides), q.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_past_2_31_elements(variant: str, claim_gpu_memory: Callable[[int], None]) -> None:
    """Offsets beyond int32, and more (batch, head) pairs than a grid's second dimension holds."""
    batch = (1 << 31) // (128 * 16 * 128) + 8
    shape = (batch, 128, 16, 128)
    claim_gpu_memory(12 * 2 * math.prod(shape))  # q, k, v, out, their gradients, two in float32
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    ]
    for x in tensors[:3]:
        x.requires_grad_()
    results = run_whole(*tensors, variant)
    for index in (0, batch - 1):
        assert_batch_accurate(index, tuple(tensors), results)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", (0, 1, 2))
def test_strides_past_2_31_elements(
    dim: int, variant: str, claim_gpu_memory: Callable[[int], None]
) -> None:
    """A stride that int32 does not hold, of the batch, the row or the head."""
    shape, strides = [8, 8, 8, 64], [64 * 512, 8 * 512, 512, 1]
    shape[dim], strides[dim] = 2, (1 << 31) + 4096
    size = 512 + sum((n - 1) * stride for n, stride in zip(shape[:3], strides[:3], strict=True))
    claim_gpu_memory(2 * size)
    buffer = torch.full((size,), float("nan"), device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(dim)
    tensors = []
    for index in range(4):  # side by side in one buffer: 64 elements in every 512
        x = buffer.as_strided(shape, strides, index * 64)
        x.copy_(torch.randn(shape, device="cuda", generator=generator))
        tensors.append(x.detach())
    for x in tensors[:3]:
        x.requires_grad_()
    results = run_whole(*tensors, variant)
    for index in range(shape[0]):
        assert_batch_accurate(index, tuple(tensors), results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_queries_in_deterministic_mode(variant: str, device: str) -> None:
    """Nothing orders the addition of dQ there, and no memory is read that nobody has written."""
    if reason := device_unsupported_reason(variant, device):
        pytest.skip(reason)
    q = torch.zeros(2, 0, 4, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (
        torch.randn(2, 300, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(2)
    )
    torch.full((1 << 22,), float("nan"), device=device)  # what the allocator then gives again
    out = flash_ext.attention(q, k, v, deterministic=True, variant=variant)
    gradients = torch.autograd.grad(out, (q, k, v), out)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert all(not x.any() for x in gradients)


@pytest.mark.parametrize("keys", (40, 500, 1000, 2500, 9000))
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_infinite_value_when_decoding(variant: str, keys: int, device: str) -> None:
    """It makes its column infinite, however the keys are split, and no other."""
    if reason := device_unsupported_reason(variant, device):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, rows, heads, 64, dtype=torch.float16, generator=generator).to(device)
        for rows, heads in ((1, 8), (keys, 2), (keys, 2))
    )
    v[0, keys - 1, :, 5] = float("inf")
    out = flash_ext.attention(q, k, v, variant=variant)
    infinite = torch.zeros_like(out, dtype=torch.bool)
    infinite[..., 5] = True
    assert torch.equal(out.isposinf(), infinite)
    assert out[~infinite].isfinite().all()
