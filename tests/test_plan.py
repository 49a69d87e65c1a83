"""csrc/plan/, compiled for the host: which kernels a call takes, and how its workspace is laid out.

Would catch, without a GPU: regions of a workspace that overlap, end beyond it or are not aligned;
too little or too much of it; a variant that runs what it cannot, or stands in without a word; heads
that take another's kernel; and a GPU that is asked for its attributes at every call.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
from attention_testing import KERNEL_DIMS, VARIANTS, Problem, unsupported_reason
from compiled import CSRC, FAKE_CUDA, NATIVE, PLAN, ROOT, host_code, shared_library
from test_attention import decoding, few_keys, few_queries, few_tiles
from test_bias import CLUSTERS
from test_parts import IN_PARTS

H200, A100, SMALL = range(3)  # the GPUs of plan.cpp; the last has 99 KB of shared memory


SOURCES = [NATIVE / "plan.cpp", *PLAN]
FLAGS = [f"-I{FAKE_CUDA}"]
SM90A = "-DFLASH_EXT_SM90A"


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return host_code("flash_ext_plan")


class OtherBuild:
    """Another build of the plan, which answers few questions (ask() in plan.cpp)."""

    def __init__(self, name: str, *flags: str) -> None:
        self.library = ctypes.CDLL(str(shared_library(name, SOURCES, [*FLAGS, *flags])))
        self.library.ask.restype = ctypes.c_char_p

    def ask(
        self, what: str, variant: str, *, d: int = 64, gpu: int = H200,
        rows: tuple[int, int] = (300, 300), bias: bool = False, fp8: bool = False, softcap: int = 0,
    ) -> str:  # fmt: skip
        fields = (ctypes.c_int * 7)(gpu, *rows, d, bias, fp8, softcap)
        answer: bytes = self.library.ask(what.encode(), variant.encode(), fields)
        return answer.decode()


def problem(native: ModuleType, **fields: object) -> object:
    p = native.Problem()
    for name, value in fields.items():
        setattr(p, name, value)
    return p


# --- Workspaces ---

SHAPES = (
    dict(batch=2, seqlen_q=300, seqlen_k=500, heads_q=4, heads_k=2),
    dict(batch=1, seqlen_q=4, seqlen_k=100_000, heads_q=8, heads_k=1),
    dict(batch=3, seqlen_q=1, seqlen_k=4096, heads_q=8, heads_k=2),
    dict(batch=8, seqlen_q=9000, seqlen_k=9000, heads_q=16, heads_k=16, window_right=0),
    dict(batch=0, seqlen_q=7, seqlen_k=7),
    dict(batch=2, seqlen_q=0, seqlen_k=7),
)


@pytest.mark.parametrize("head_dims", KERNEL_DIMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_regions_lie_side_by_side(
    variant: str, head_dims: tuple[int, int], native: ModuleType
) -> None:
    switches = ("varlen", "sink", "deterministic")
    for shape, values in itertools.product(SHAPES, itertools.product((False, True), repeat=3)):
        dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
        p = problem(native, **shape, **dims, **dict(zip(switches, values, strict=True)))
        for plan in (p.forward(variant), p.backward(variant)):
            regions = sorted(plan.regions.values())
            assert all(offset % native.alignment == 0 for offset, _ in regions)
            ends = [offset + size for offset, size in regions]
            begins = [offset for offset, _ in regions] + [plan.bytes]
            assert begins[0] == 0
            assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=True))
            slack = plan.bytes - sum(size for _, size in regions)
            assert 0 <= slack <= native.alignment * len(regions)


def sizes(plan: object) -> dict[str, int]:
    return {name: size for name, (_, size) in plan.regions.items()}


def test_what_a_forward_keeps(native: ModuleType) -> None:
    p = problem(native, batch=2, seqlen_q=100, seqlen_k=500, heads_q=3, heads_k=3, head_dim=40)
    rows = 2 * 3 * 128  # of fa1: four Q tiles of 32
    assert sizes(p.forward("fa1")) == {"out_accum": rows * 64 * 4, "row_statistics": rows * 2 * 4}
    assert p.forward("fa2").bytes == p.forward("fa3").bytes == 0
    p.batch = 200  # 600 tiles, more than an H200 works on at a time
    assert p.forward("fa2").bytes == 0
    assert sizes(p.forward("fa3")) == {"counters": 8}


def test_a_large_forward_in_8_bits_keeps_v_transposed(native: ModuleType) -> None:
    """Groups of 16 keys; of packed sequences each begins with a group of its own."""
    p = problem(native, batch=2, seqlen_q=300, seqlen_k=500, heads_q=6, heads_k=3, fp8=True)
    p.head_dim = p.head_dim_v = 112
    assert sizes(p.forward("fa3")) == {"v_transposed": 2 * 3 * 112 * 512}
    p.varlen = True
    groups = (500 + 15 * 4) // 16
    assert sizes(p.forward("fa3"))["v_transposed"] == 3 * 112 * 16 * groups
    p.v_transposed = True
    plan = p.forward("fa3")
    assert sizes(plan) == {} and "transpose_v" not in plan.launches, "it is there"
    p.v_transposed = p.varlen = False
    p.seqlen_q, p.seqlen_k = 1, 100_000
    plan = p.forward("fa3")
    assert plan.num_splits > 1 and "v_transposed" not in plan.regions
    assert "transpose_v" not in plan.launches


def test_what_splits_keep(native: ModuleType) -> None:
    """A result in float32 for each split and row, which a kernel combines; of packed heads without
    splits only where a CTA may have more than one tile."""
    p = problem(native, seqlen_q=70, seqlen_k=131072, heads_q=8, heads_k=8, head_dim=104)
    for variant, splits in (("fa2", 32), ("fa3", 16)):  # chosen by measurement
        plan = p.forward(variant)
        assert plan.num_splits == splits
        rows = splits * 8 * 70
        assert sizes(plan) == {"o_partial": rows * 128 * 4, "statistics_partial": rows * 8}
        assert plan.launches[1].startswith("combine_splits")
    # More tiles than an H200 works on at a time, of packed heads.
    p.batch, p.seqlen_q, p.heads_q = 40, 9, 32
    plan = p.forward("fa3")
    assert plan.pack_gqa_log2 > 0 and plan.num_splits == 1 and sizes(plan)["counters"] == 8
    assert plan.launches[1] == "combine_splits, pdl"
    p.batch, p.seqlen_k = 4, 256
    plan = p.forward("fa3")
    assert plan.pack_gqa_log2 > 0 and plan.num_splits == 1
    assert plan.bytes == 0 and len(plan.launches) == 1


def test_what_a_backward_keeps(native: ModuleType) -> None:
    p = problem(native, batch=2, seqlen_q=300, seqlen_k=500, heads_q=4, heads_k=2, head_dim_v=40)
    of_dq = 2 * 4 * 304  # in blocks of 8 queries
    rows = of_dq + 128  # and those of no query
    statistics = {
        "lse_log2": rows * 4,
        "minus_delta": rows * 4,
        "reference": rows * 4,
        "large_lse": 8,  # a flag of the call's own: others run beside it
        "dq_accum": of_dq * 64 * 4,
        "dq_semaphore": (1 + of_dq // 8 + 2 * 4 * 5) * 4,  # five Q tiles of 64 queries
    }
    for variant in VARIANTS:
        # What fa3 adds by a matmul has 16 bytes a row.
        rows_of = {"lse_rows": rows * 16, "delta_rows": rows * 16} if variant == "fa3" else {}
        for p.sink in (False, True):
            assert sizes(p.backward(variant)) == statistics | rows_of
    p.head_dim = 96
    assert sizes(p.backward("fa2"))["dq_accum"] == of_dq * 96 * 4
    assert sizes(p.backward("fa3"))["dq_accum"] == of_dq * 96 * 4
    p.varlen = p.deterministic = True
    assert sizes(p.backward("fa2")).items() >= {"offsets_q": 12, "offsets_k": 12}.items()


def test_long_sequences_have_tiles_of_their_own(native: ModuleType) -> None:
    """Of 80 queries, whose lse is not added by a matmul; nor is it with other options."""
    p = problem(native, seqlen_q=8192, seqlen_k=64, head_dim=128, head_dim_v=128)
    assert sizes(p.backward("fa3"))["lse_rows"] == (8192 + 128) * 16
    p.seqlen_q = 16384
    assert "lse_rows" not in sizes(p.backward("fa3"))
    p.seqlen_q, p.softcap = 8192, 30.0
    assert "lse_rows" not in sizes(p.backward("fa3"))


def test_short_packed_sequences_cost_few_rows(native: ModuleType) -> None:
    p = problem(native, batch=1000, seqlen_q=16000, seqlen_k=16000, heads_q=1, heads_k=1)
    p.varlen = True
    for variant in VARIANTS:
        rows = sizes(p.backward(variant))["minus_delta"] // 4 - 128
        assert 16000 + 7 * 1000 <= rows <= 16000 + 7 * 1002


def parts_of(p: object, found: dict[str, int]) -> int:
    """From the size of the parts' dK, which are in float32: they are rounded once, as a sum."""
    keys = (1 if p.varlen else p.batch) * p.seqlen_k * p.heads_k * p.head_dim * 4
    return found["dk_parts"] // keys if "dk_parts" in found else 1


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "queries", "keys", "window_right", "parts"),
    [
        (8, 8, 1024, 1024, 0, 1),
        (8, 1, 4096, 4096, 0, 8),  # 32 tiles for 132 SMs
        (71, 1, 8192, 8192, 0, 71),  # 64 tiles, and 71 is a prime
        (32, 8, 32768, 32768, 0, 1),  # 2,048 tiles
        (32, 8, 2048, 2048, -1, 1),  # 128 tiles, which take one wave
        (32, 8, 2304, 2304, -1, 4),  # 144 tiles, which would take two
        (8, 1, 300, 300, 0, 4),  # no part of fewer than 512 rows
        (8, 8, 1024, 1024, -1, 2),  # without a mask the queries of a head are cut
        (40, 40, 4096, 77, -1, 3),  # 40 tiles, and 120
        (40, 40, 4096, 77, 0, 1),
        (8, 2, 4096, 77, -1, 4 * 8),  # groups first
        (32, 8, 4096, 4096, 0, 1),  # 256 tiles: the short ones fill what the long ones leave
        (64, 8, 8192, 8192, 0, 2),  # eight heads of a group have too many rows for L2
        (64, 8, 512, 32768, 0, 1),  # all rows of few queries fit
    ],
)
def test_heads_with_few_tiles_are_cut(
    heads_q: int, heads_k: int, queries: int, keys: int, window_right: int, parts: int,
    native: ModuleType,
) -> None:  # fmt: skip
    lengths = {"seqlen_q": queries, "seqlen_k": keys}
    p = problem(native, heads_q=heads_q, heads_k=heads_k, window_right=window_right, **lengths)
    plan = p.backward("fa3")
    assert parts_of(p, sizes(plan)) == parts
    assert ("sum_parts" in plan.launches) == (parts > 1)
    assert "dk_parts" not in p.backward("fa2").regions


def test_a_part_costs_what_it_stores(native: ModuleType) -> None:
    """So of as many tokens fewer parts are made where a tile has fewer rows of queries."""
    for tokens, parts in ((512, 2), (2048, 2), (4096, 4), (8192, 4)):
        shape = {"batch": 8192 // tokens, "seqlen_q": tokens, "seqlen_k": tokens}
        dims = {"heads_q": 64, "heads_k": 8, "head_dim": 128, "head_dim_v": 128}
        p = problem(native, window_right=0, **shape, **dims)
        assert parts_of(p, sizes(p.backward("fa3"))) == parts


def test_wide_groups_are_cut(native: ModuleType) -> None:
    """At head dim 128 a part has two query heads, as measured (note 018); with a window all."""
    shape = {"seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "head_dim_v": 128}
    for batch, heads_q, window_left, parts in (
        (2, 64, -1, 4), (2, 32, -1, 2), (4, 16, -1, 1), (4, 64, 511, 1)
    ):  # fmt: skip
        p = problem(native, batch=batch, heads_q=heads_q, heads_k=8, window_right=0, **shape)
        if window_left >= 0:
            p.window_left = window_left
        assert parts_of(p, sizes(p.backward("fa3"))) == parts
    long = shape | {"seqlen_q": 131072, "seqlen_k": 131072}
    for heads_q, heads_k, parts in ((64, 8, 2), (32, 8, 1), (16, 1, 4)):
        p = problem(native, heads_q=heads_q, heads_k=heads_k, window_right=0, **long)
        assert parts_of(p, sizes(p.backward("fa3"))) == parts
    # Deterministic: CTAs keep in step; some sixteen heads are best, of packed sequences in each.
    packed = shape | {"seqlen_q": 8192, "seqlen_k": 8192, "varlen": True}
    for sizes_of, batch, heads_q, heads_k, parts in (
        (shape, 2, 64, 8, 1), (shape, 1, 64, 8, 2), (shape, 1, 8, 1, 8), (packed, 2, 64, 8, 2)
    ):  # fmt: skip
        heads = {"batch": batch, "heads_q": heads_q, "heads_k": heads_k}
        p = problem(native, **heads, window_right=0, deterministic=True, **sizes_of)
        assert parts_of(p, sizes(p.backward("fa3"))) == parts


def like(native: ModuleType, x: Problem) -> object:
    """A problem of one of the tests on a GPU."""
    names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim")
    return problem(
        native,
        **{name: getattr(x, name) for name in names},
        head_dim_v=x.dim_v,
        window_right=x.window[1],
    )


@pytest.mark.parametrize("x", IN_PARTS, ids=str)
def test_gpu_problems_in_parts_are_cut(x: Problem, native: ModuleType) -> None:
    p = like(native, x)
    assert parts_of(p, sizes(p.backward("fa3"))) > 1


def test_gpu_problems_of_few_keys_cut_queries(native: ModuleType) -> None:
    for x in few_keys():
        p = like(native, x)
        more_than_groups = parts_of(p, sizes(p.backward("fa3"))) > x.heads_q // x.heads_k
        assert more_than_groups == (x.head_dim <= 128), x


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_ds_of_wide_heads(shape: dict[str, int], native: ModuleType) -> None:
    """Of one head or more, within 576 MB and the size of the call's own tensors; otherwise none."""
    p = problem(native, **shape, head_dim=256, head_dim_v=256)
    found = sizes(p.backward("fa3"))
    assert found["tile_count_semaphore"] == 16 and found["dq_accum"] == 0
    tiles_q, tiles_k = -(-p.seqlen_q // 64), -(-p.seqlen_k // 64)
    tiles = tiles_q * (tiles_q + 1) // 2 if p.window_right == 0 else tiles_q * tiles_k
    head = tiles * 64 * 64 * 2 * (p.heads_q // p.heads_k // parts_of(p, found))
    most = min(576 << 20, p.batch * p.heads_q * p.seqlen_q * (256 + 256) * 10)
    assert ("ds" in found) == (head <= most)
    if "ds" in found:
        assert found["ds"] % head == 0 and found["ds"] <= most
    p.varlen = True
    assert "ds" not in p.backward("fa3").regions


# --- Splits ---


@pytest.mark.parametrize(
    ("fields", "splits", "pack_gqa_log2"),
    [
        (dict(seqlen_q=17, seqlen_k=131072, heads_q=32, heads_k=8), 8, 3),
        (dict(seqlen_q=17, seqlen_k=131072, heads_q=8, heads_k=1), 63, 3),
        (dict(seqlen_q=4096, seqlen_k=4096, heads_q=8, heads_k=8), 1, 0),
    ],
)
def test_splits_of_128_rows(
    fields: dict[str, int], splits: int, pack_gqa_log2: int, native: ModuleType
) -> None:
    plan = problem(native, **fields, head_dim=128, head_dim_v=128).forward("fa3")
    combination = ["combine_splits, pdl"] if splits > 1 else []
    assert plan.launches == ["fa3_forward<128, 128>", *combination]
    assert (plan.num_splits, plan.pack_gqa_log2) == (splits, pack_gqa_log2)


@pytest.mark.parametrize(
    ("fields", "splits", "pack_gqa_log2"),
    [
        (dict(seqlen_k=1024, heads_q=32, heads_k=8), 8, 0),
        (dict(seqlen_k=131072, heads_q=32, heads_k=8), 8, 0),
        (dict(seqlen_k=128, heads_q=32, heads_k=8), 1, 0),
        (dict(seqlen_k=1024, heads_q=32, heads_k=32), 4, 0),
        (dict(seqlen_k=1024, heads_q=32, heads_k=8, batch=8), 2, 0),
        (dict(seqlen_k=8192, heads_q=32, heads_k=8, batch=17), 1, 0),  # 136 tiles
        (dict(seqlen_k=1024, heads_q=28, heads_k=4, sink=True), 8, 3),  # 7 of 8 rows
        (dict(seqlen_k=1024, heads_q=28, heads_k=4, alibi=True), 4, 0),
        (dict(seqlen_q=4, seqlen_k=4096, heads_q=64, heads_k=8, window_right=0), 8, 3),
        (dict(seqlen_q=6, seqlen_k=6 * 2048, heads_q=8, heads_k=2, varlen=True, batch=6), 8, 2),
    ],
)
def test_splits_of_a_decoding_step(
    fields: dict[str, int], splits: int, pack_gqa_log2: int, native: ModuleType
) -> None:
    plan = problem(native, **fields, head_dim=128, head_dim_v=128).forward("fa3")
    assert plan.launches == ["fa3_decode<128, 128>"] and plan.bytes == 0
    assert (plan.num_splits, plan.pack_gqa_log2) == (splits, pack_gqa_log2)


@pytest.mark.parametrize(
    ("fields", "clusters"),
    [
        (dict(seqlen_k=8192, heads_q=8, heads_k=1), 8),
        (dict(seqlen_k=131072, heads_q=8, heads_k=1), 8),
        (dict(seqlen_k=131072, heads_q=8, heads_k=1, window_left=16383, window_right=0), 8),
        (dict(seqlen_q=4, seqlen_k=32768, heads_q=8, heads_k=1), 11),  # 32 rows
        (dict(seqlen_k=131072, heads_q=8, heads_k=1, batch=4), 2),
        (dict(seqlen_q=2, seqlen_k=65536, heads_q=8, heads_k=1, varlen=True, batch=2), 2),
    ],
)
def test_clusters_of_a_decoding_step(
    fields: dict[str, int], clusters: int, native: ModuleType
) -> None:
    plan = problem(native, **fields, head_dim=128, head_dim_v=128).forward("fa3")
    assert plan.launches == ["fa3_decode<128, 128>"] and plan.num_splits == 8 * clusters
    tiles = fields.get("batch", 1)
    rows = 32 if fields.get("seqlen_q") == 4 else 16
    stored, counted = tiles * clusters, tiles
    if fields.get("varlen"):  # splits by length
        stored = counted = 30 + 1  # the clusters that 120 SMs run
    assert sizes(plan) == {
        "o_partial": 4 * (128 + 10) * rows * stored,
        "counters": 8 * 8 * counted,
    }


@pytest.mark.parametrize("pages", (0, 16))
@pytest.mark.parametrize(
    ("fields", "clusters"),
    [
        (dict(batch=32, seqlen_k=65536), 33),  # of 8 heads: 264 CTAs
        (dict(batch=8, seqlen_k=32768), 33),
        (dict(batch=48, seqlen_k=32768), 48),
        (dict(batch=32, seqlen_k=65536, window_left=1000, window_right=0), 0),  # few keys
        (dict(batch=1, seqlen_k=65536), 0),
        (dict(batch=32, seqlen_k=2047), 0),
        (dict(batch=120, seqlen_k=32768), 66),  # twice as many
    ],
)
def test_splits_by_length(
    fields: dict[str, int], clusters: int, pages: int, native: ModuleType
) -> None:
    """If lengths are on the device, differ, and are long enough."""
    dims = {"heads_q": 32, "heads_k": 8, "head_dim": 128, "head_dim_v": 128}
    plan = problem(native, **fields, **dims, page_size=pages, seqused=True).forward("fa3")
    assert plan.launches == ["fa3_decode<128, 128>"]
    assert (plan.clusters_by_length, plan.bytes > 0) == (clusters, clusters > 0)
    if not pages:
        assert problem(native, **fields, **dims).forward("fa3").clusters_by_length == 0


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        (dict(seqlen_q=2048 + 31), True),
        (dict(seqlen_q=2048 + 31, heads_q=32 * 8), False),  # more heads than a tile has rows
        (dict(seqlen_q=2048 + 31, page_size=0), False),
        (dict(seqlen_q=2048 + 31, batch_invariant=True), False),
        (dict(seqlen_q=32 * 2048 + 32), False),
        (dict(seqlen_q=2048, batch=1), False),
    ],
)
def test_decoding_steps_beside_prompts(
    fields: dict[str, int], beside: bool, native: ModuleType
) -> None:
    """They are another kernel's, after that for the prompts; each has its own memory."""
    usual = {"batch": 32, "seqlen_k": 65536, "heads_q": 32, "heads_k": 8, "page_size": 16}
    dims = {"head_dim": 128, "head_dim_v": 128, "varlen": True, "seqused": True}
    plan = problem(native, **usual | fields, **dims).forward("fa3")
    assert [x for x in plan.launches if "decode" in x] == ["fa3_decode<128, 128>"] * beside
    assert plan.launches[0] == "fa3_forward<128, 128>"
    assert ("o_partial beside" in plan.regions) == beside


@pytest.mark.parametrize("queries", [256, 512, 2048])
def test_prompts_beside_decoding_steps_have_the_tiles_of_one_alone(
    queries: int, native: ModuleType
) -> None:
    usual = {"seqlen_k": 65536, "heads_q": 32, "heads_k": 8, "page_size": 16, "seqused": True}
    dims = {"head_dim": 128, "head_dim_v": 128, "window_right": 0}
    alone = problem(native, seqlen_q=queries, **usual, **dims).forward("fa3")
    beside = problem(native, batch=32, seqlen_q=queries + 31, varlen=True, **usual, **dims)
    plan = beside.forward("fa3")
    assert (plan.tile, plan.num_splits, plan.pack_gqa_log2) == (
        alone.tile,
        alone.num_splits,
        alone.pack_gqa_log2,
    )


@pytest.mark.parametrize(
    "fields",
    [
        dict(seqlen_q=9, heads_q=8, heads_k=2),  # 36 rows
        dict(seqlen_q=17, batch=34),  # 68 tiles of more rows than 16
        dict(seqlen_q=40, batch=39, varlen=True),  # one sequence may have all other queries
        dict(fp8=True),
        dict(int8=True),
    ],
)
def test_what_is_no_decoding_step(fields: dict[str, int], native: ModuleType) -> None:
    fields = dict(seqlen_k=1024, heads_q=2, heads_k=2) | fields
    launches = problem(native, **fields, head_dim=128, head_dim_v=128).forward("fa3").launches
    names = ("fa3_forward", "fa3_forward_fp8", "fa3_forward_int8")
    assert launches[0] in [f"{name}<128, 128>" for name in names]


@pytest.mark.parametrize("kv_8_bits", (False, True))
@pytest.mark.parametrize("group", (1, 16, 17, 128))
def test_no_queries_are_planned(group: int, kv_8_bits: bool, native: ModuleType) -> None:
    """Tiles have at least one query, of however many heads: a division by 0 ends the process."""
    sizes = {"batch": 2, "seqlen_q": 0, "seqlen_k": 100, "heads_q": 2 * group, "heads_k": 2}
    assert problem(native, **sizes, kv_8_bits=kv_8_bits).forward("fa3").bytes == 0


@pytest.mark.parametrize(
    ("keys", "batch", "splits", "cluster"),
    [
        (1024, 1, 4, 4),
        (4096, 1, 8, 8),
        (16384, 1, 8, 8),
        (65536, 1, 8, 8),
        (65536, 2, 4, 4),
        (65536, 4, 2, 2),  # 128 CTAs in clusters of four would leave SMs idle, and share others
        (65536, 8, 2, 2),
        (65536, 16, 1, 1),
    ],
)
def test_splits_with_8_bit_keys(
    keys: int, batch: int, splits: int, cluster: int, native: ModuleType
) -> None:
    """As measured, with 32 / 8 heads of 128. Fewer keys are planned as half as many of 16 bits."""
    fields = dict(batch=batch, heads_q=32, heads_k=8, head_dim=128, head_dim_v=128)
    plan = problem(native, **fields, seqlen_k=keys, kv_8_bits=True).forward("fa3")
    assert plan.launches == ["fa3_decode_8_bits<128, 128>"]
    assert plan.num_splits == splits
    stored = 8 * batch * splits // cluster
    rows = 8 if keys <= 1024 * splits else 16  # of a CTA with 8 warps, or with 16
    several = {"o_partial": 4 * (128 + 10) * rows * stored, "counters": 8 * cluster * 8 * batch}
    assert sizes(plan) == (several if cluster < splits else {})
    if cluster == splits and keys < 16384:
        halved = problem(native, **fields, seqlen_k=keys // 2).forward("fa3")
        assert (plan.num_splits, plan.tile) == (halved.num_splits, halved.tile)


@pytest.mark.parametrize(
    ("fields", "pack_gqa_log2"),
    [
        (dict(seqlen_q=5000), 0),
        (dict(seqlen_q=5000, heads_q=6), 2),
        (dict(seqlen_q=5000, heads_q=64), 5),
        (dict(seqlen_q=5000, heads_q=66), 0),  # 33 heads do not fit a tile
        (dict(seqlen_q=5000, heads_q=6, alibi=True), 0),
        (dict(seqlen_q=5000, heads_q=6, varlen=True, batch=3), 2),
        (dict(seqlen_q=5000, heads_q=6, softcap=30.0), 2),
    ],
)
def test_8_bit_keys_have_one_kernel_for_any_queries(
    fields: dict[str, int], pack_gqa_log2: int, native: ModuleType
) -> None:
    fields = dict(seqlen_k=5000, heads_q=2, heads_k=2) | fields
    for dim, padded in ((16, 64), (64, 64), (80, 128), (128, 128), (192, 256), (256, 256)):
        plan = problem(native, **fields, head_dim=dim, head_dim_v=dim, kv_8_bits=True).forward(
            "fa3"
        )
        assert plan.launches == [f"fa3_decode_8_bits<{padded}, {padded}>"]
        if padded < 256:  # whose tiles have 16 rows
            assert plan.pack_gqa_log2 == pack_gqa_log2


def planned(native: ModuleType, x: Problem) -> object:
    """The plan of fa3's forward for a problem of the GPU tests."""
    names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "sink", "softcap")
    fields = {name: getattr(x, name) for name in names}
    if x.lengths_q is not None:
        fields |= {"varlen": True, "seqlen_q": sum(x.lengths_q) + x.tail}
        fields |= {"seqlen_k": sum(x.lengths_k) + x.tail}
    elif x.layout == "packed":
        fields |= {"varlen": True, "seqlen_q": x.batch * x.seqlen_q + x.tail}
    window = (-1, 0) if x.causal else x.window
    fields |= {"window_left": window[0], "window_right": window[1], "alibi": bool(x.alibi)}
    return problem(native, **fields, head_dim_v=x.head_dim_v or x.head_dim).forward("fa3")


def test_gpu_problems_reach_the_kernel_for_few_queries(native: ModuleType) -> None:
    """In every pair of head dims, with each number of splits; and not those meant for others."""
    reached = set()
    for x in decoding():
        plan = planned(native, x)
        # More than 16 rows need more registers than head dims 192 and 256 leave.
        if not plan.launches[0].startswith("fa3_decode"):
            assert x.head_dim in (192, 256) and x.seqlen_q == 12, x
        if plan.launches[0].startswith("fa3_decode"):
            reached.add((plan.launches[0], min(plan.num_splits, 9)))
    kernels = {"fa3_decode<{}, {}>".format(*dims) for dims in KERNEL_DIMS}
    assert reached == set(itertools.product(kernels, (1, 2, 4, 8, 9)))  # 9: several clusters
    packed, split = set(), set()
    for x in (*few_queries("cuda"), *few_tiles("cuda")):
        if unsupported_reason("fa3", x, "cuda") or x.layout == "expanded_heads":
            continue
        plan = planned(native, x)
        if not plan.launches[0].startswith("fa3_forward"):
            continue
        packed |= {plan.launches[0]} if plan.pack_gqa_log2 else set()
        split |= {plan.launches[0]} if plan.num_splits > 1 else set()
    assert packed == split == {"fa3_forward<{}, {}>".format(*dims) for dims in KERNEL_DIMS}


# --- Copies of rows that TMA cannot address ---

MANY = dict(batch=2, seqlen_q=300, seqlen_k=500, heads_q=4, heads_k=2)


@pytest.mark.parametrize(
    ("fields", "copied"),
    [
        (dict(), ""),
        (dict(odd_rows="k"), "k"),
        (dict(odd_rows="q v"), "q, v"),
        (dict(repeated_rows=True), "k"),
        (dict(head_dim=60), "q, k"),
        (dict(head_dim_v=60), "v"),
        (dict(head_dim=20, head_dim_v=36), "q, k, v"),
    ],
)
@pytest.mark.parametrize("varlen", (False, True))
def test_fa3_copies_rows_that_tma_cannot_address(
    varlen: bool, fields: dict[str, object], copied: str, native: ModuleType
) -> None:
    p = problem(native, **MANY, varlen=varlen, **fields)
    for variant in ("auto", "fa3"):
        assert p.choose_forward(variant) == ("fa3", "")
    assert p.choose_backward("fa3") == ("fa3", "") and p.copied() == copied
    plan, names = p.forward("fa3"), copied.split(", ") if copied else []
    batch = 1 if varlen else 2
    shapes = {
        "q": (batch, 300, 4, p.head_dim),
        "k": (batch, 500, 2, p.head_dim),
        "v": (batch, 500, 2, p.head_dim_v),
        "out": (batch, 300, 4, p.head_dim_v),
    }
    results = ["out"] if p.head_dim_v % 8 else []
    assert plan.copies == [list(shapes[name]) for name in (*names, *results)]
    for name in (*names, *results):
        *rows, dim = shapes[name]
        assert sizes(plan)[name] == 2 * math.prod(rows) * -(-dim // 8) * 8
    assert not set(shapes) - {*names, *results} & set(plan.regions)
    assert plan.launches[: bool(names)] == ["copy_rows"][: bool(names)]
    assert plan.launches.count("copy_rows, back") == len(results)
    assert p.forward("fa2").copies == p.forward("fa1").copies == []


def test_splits_are_combined_before_results_are_copied_back(native: ModuleType) -> None:
    p = problem(native, seqlen_q=200, seqlen_k=131072, heads_q=8, heads_k=8, head_dim_v=60)
    assert p.forward("fa3").launches == [
        "copy_rows", "fa3_forward<64, 64>", "combine_splits, pdl", "copy_rows, back",
    ]  # fmt: skip


@pytest.mark.parametrize("heads_k", (2, 1))
def test_expanded_heads_are_copied_once(heads_k: int, native: ModuleType) -> None:
    p = problem(native, **MANY | {"heads_k": heads_k}, odd_rows="k v", expanded_heads=True)
    assert p.forward("fa3").copies == [[2, 500, 1, 64]] * 2


def test_a_backward_copies_inputs_and_gradients(native: ModuleType) -> None:
    p = problem(native, **MANY, odd_rows="dout")
    plan = p.backward("fa3")
    assert plan.copies == [[2, 300, 4, 64]] and plan.launches[0] == "copy_rows"
    p.odd_rows, p.head_dim = "", 36
    plan = p.backward("fa3")
    q, k = [2, 300, 4, 36], [2, 500, 2, 36]
    assert plan.copies == [q, k, q, k]
    assert sizes(plan)["dq"] == sizes(plan)["q"] == 2 * 2 * 300 * 4 * 40
    p.head_dim_v = 20
    plan = p.backward("fa3")
    of_v, of_out = [2, 500, 2, 20], [2, 300, 4, 20]
    assert plan.copies == [q, k, of_v, of_out, of_out, q, k, of_v]
    assert plan.launches == ["copy_rows", "fa3_backward<64, 64>", "copy_rows, back"]


@pytest.mark.parametrize("deterministic", (False, True))
def test_parts_are_summed_into_the_copies_of_gradients(
    deterministic: bool, native: ModuleType
) -> None:
    lengths = dict(seqlen_q=16384, seqlen_k=16384, heads_q=32, heads_k=1, window_right=0)
    for d, dv in ((60, 60), (180, 100), (250, 250)):
        p = problem(native, **lengths, head_dim=d, head_dim_v=dv, deterministic=deterministic)
        p.varlen = deterministic
        plan = p.backward("fa3")
        assert plan.launches[-2:] == ["sum_parts", "copy_rows, back"]
        of_dk, of_dv = sizes(plan)["dk"], sizes(plan)["dv"]
        assert (of_dk, of_dv) == tuple(2 * 16384 * -(-x // 8) * 8 for x in (d, dv))
        assert sizes(plan)["dk_parts"] % (2 * of_dk) == sizes(plan)["dv_parts"] % (2 * of_dv) == 0


@pytest.mark.parametrize("name", ("kv_8_bits", "fp8"))
def test_rows_of_8_bits_are_never_copied(name: str, native: ModuleType) -> None:
    """K of 16 GiB, which would be out of reach if its elements had two bytes."""
    sizes = dict(batch=64, seqlen_q=1, seqlen_k=1 << 20, heads_k=2, heads_q=2)
    p = problem(native, **sizes, head_dim=128, head_dim_v=128, **{name: True})
    assert p.choose_forward("auto") == ("fa3", "") and p.copied() == ""
    assert p.forward("fa3").copies == []


def test_few_queries_do_not_copy_long_keys(native: ModuleType) -> None:
    """Unless that is named: a copy of a long cache may take as long as fa2."""
    decoding = dict(batch=4, seqlen_q=1, seqlen_k=4096, heads_q=8, heads_k=8)

    def choice(**fields: object) -> tuple[str, str]:
        p = problem(native, **decoding | {"odd_rows": "k v"} | fields)
        assert p.choose_forward("fa3") == ("fa3", "")
        variant, why = p.choose_forward("auto")
        assert (p.copied() != "") == (variant == "fa3")
        return variant, why

    fewer = ("fa2", "variant 'fa3' would copy rows of k, v for few queries")
    assert choice() == ("fa3", "")
    assert choice(window_left=1023, window_right=0) == fewer
    assert choice(seqused=True) == fewer
    assert choice(seqused=True, heads_k=4) == ("fa3", "")
    assert choice(odd_rows="q", window_left=1023) == ("fa3", "")
    assert choice(seqlen_q=4096, seqused=True) == ("fa3", "")
    assert choice(seqlen_q=4096, window_left=1023, window_right=0) == ("fa3", "")


# --- Variants ---


def test_the_fastest_variant_or_the_one_named(native: ModuleType) -> None:
    p = problem(native, seqlen_q=100, seqlen_k=100)
    for variant in VARIANTS:
        assert p.choose_forward(variant) == p.choose_backward(variant) == (variant, "")
    assert p.choose_forward("auto") == ("fa3", "")


@pytest.mark.parametrize("head_dims", KERNEL_DIMS)
def test_batch_invariant_calls_have_one_tile(
    head_dims: tuple[int, int], native: ModuleType
) -> None:
    """Whatever the lengths, the heads and the batch, with pages and without; their splits are of a
    fixed length, and of as many CTAs as fill the GPU."""
    dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
    for shape, varlen, page_size in itertools.product(SHAPES, (False, True), (0, 16)):
        p = problem(native, **shape, **dims, varlen=varlen, page_size=page_size)
        p.batch_invariant = True
        assert p.choose_forward("auto") == ("fa3", "")
        plan = p.forward("fa3")
        assert (plan.tile, plan.changes_scores) == (0, False)
        keys = shape["seqlen_k"] / plan.num_splits
        assert keys <= 2048 and (plan.split_ctas <= plan.num_splits)
        assert plan.split_ctas > 0 or plan.num_splits == 1
        assert plan.launches[0].startswith("fa3_forward<")
        assert ("combine_splits, pdl" in plan.launches) == (plan.split_ctas > 1)
        assert ("statistics_partial" in plan.regions) == (plan.split_ctas > 1)
        assert ("o_partial" in plan.regions) == (plan.num_splits > 1)
        plan = p.forward("fa2")
        assert (plan.num_splits, plan.changes_scores) == (1, True)  # the tile that pages have, too


@pytest.mark.parametrize(
    ("fields", "ctas"),
    [
        (dict(batch=1, seqlen_q=1, seqlen_k=65536), 32),
        (dict(batch=8, seqlen_q=1, seqlen_k=4096), 2),
        (dict(batch=32, seqlen_q=1, seqlen_k=65536, seqused=True), 5),
        (dict(batch=32, seqlen_q=1, seqlen_k=65536), 1),  # equal lengths
        (dict(batch=1, seqlen_q=8192, seqlen_k=8192), 1),
        (dict(batch=1, seqlen_q=128, seqlen_k=131072), 9),
        (dict(batch=2, seqlen_q=3, seqlen_k=2048), 1),  # packed GQA
        (dict(batch=4, seqlen_q=2048, seqlen_k=2048), 0),  # one split
    ],
)
def test_ctas_of_fixed_splits(fields: dict[str, int], ctas: int, native: ModuleType) -> None:
    usual = {"heads_q": 32, "heads_k": 8, "head_dim": 128, "head_dim_v": 128}
    plan = problem(native, **usual | fields, batch_invariant=True).forward("fa3")
    assert (plan.num_splits, plan.split_ctas) == (-(-fields["seqlen_k"] // 2048), ctas)


@pytest.mark.parametrize(
    ("fields", "variant"),
    (
        ({}, "fa3"),
        ({"sink": True}, "fa2"),
        ({"softcap": 3.0}, "fa2"),
        ({"alibi": True, "page_size": 16}, "fa2"),
        ({"page_size": 12}, "fa2"),
        ({"odd_rows": "k"}, "fa3"),  # copied, however few queries there are
    ),
)
def test_who_is_batch_invariant(
    fields: dict[str, object], variant: str, native: ModuleType
) -> None:
    for seqlen_q in (1, 20, 5000):
        sizes = {"batch": 3, "seqlen_q": seqlen_q, "seqlen_k": 5000}
        p = problem(native, **sizes, **fields, batch_invariant=True)
        assert p.choose_forward("auto")[0] == variant
        assert p.choose_forward("fa1") == (None, "variant 'fa1' is not batch-invariant")
        if p.page_size == 0:
            assert p.choose_backward(variant)[0] is not None


@pytest.mark.parametrize(
    ("fields", "forward", "backward", "fa1"),
    (
        ({}, "fa3", "fa3", True),
        ({"head_dim": 40, "head_dim_v": 40}, "fa3", "fa3", True),
        ({"head_dim": 128, "head_dim_v": 96, "odd_rows": "q"}, "fa3", "fa3", False),
        ({"head_dim": 256, "head_dim_v": 256}, "fa3", "fa2", True),
        ({"softcap": 3.0}, "fa2", "fa2", False),
        ({"alibi": True, "dropout": True, "bias": True}, "fa2", "fa2", False),
        ({"gpu": 1}, "fa2", "fa2", True),
        ({"batch_invariant": True}, None, None, False),
        ({"fp8": True}, None, None, False),
        ({"page_size": 16}, None, None, False),
    ),
)
def test_who_has_masks_of_blocks(
    fields: dict[str, object],
    forward: str | None,
    backward: str | None,
    fa1: bool,
    native: ModuleType,
) -> None:
    p = problem(native, seqlen_q=700, seqlen_k=900, mask=True, **fields)
    assert p.choose_forward("auto")[0] == forward
    if forward is not None:
        assert p.choose_backward(forward)[0] == backward
        assert any(x.startswith(forward) for x in p.forward(forward).launches)
        assert p.choose_forward("fa2") == ("fa2", "")
    assert p.choose_forward("fa1")[0] == ("fa1" if fa1 else None)
    if fa1:
        assert p.choose_backward("fa1") == ("fa1", "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            dict(dropout=True, head_dim=200),
            "has no kernel for head dimensions 200 and 64 with these options",
        ),
        (
            dict(dropout=True, softcap=9.0),
            "has no kernel for head dimensions 64 and 64 with these options",
        ),
        (
            dict(bias=True, softcap=9.0),
            "has no kernel for head dimensions 64 and 64 with these options",
        ),
        (
            dict(bias=True, head_dim=200),
            "has no kernel for head dimensions 200 and 64 with these options",
        ),
        (dict(bias=True, varlen=True), "has no bias with sequences of different lengths"),
        (dict(softcap=2049.0), "has no softcap above 2048"),
        (
            dict(odd_rows="k", batch=1 << 18, heads_k=8, seqlen_k=200),
            "needs less than 32 GiB for a copy of k in aligned memory",
        ),
        (dict(batch=1 << 24, seqlen_q=1, seqlen_k=1), "needs fewer than 2^24 tiles of 128 rows"),
        (dict(gpu=A100), "needs a Hopper GPU (compute capability 9.0), this one has 8.0"),
    ],
)
def test_fa2_stands_in_for_fa3(fields: dict[str, object], why: str, native: ModuleType) -> None:
    p = problem(native, **{"seqlen_q": 100, "seqlen_k": 100, **fields})
    assert p.choose_forward("auto") == ("fa2", f"variant 'fa3' {why}")
    assert p.choose_forward("fa3") == (None, f"variant 'fa3' {why}")
    variant, reason = p.choose_backward("fa3")
    assert variant == "fa2" and reason == f"variant 'fa3' {why}".replace("of 128", "of 64")
    assert p.choose_backward("fa2") == ("fa2", "")


@pytest.mark.parametrize("fp8", (False, True))
def test_a_build_without_fa3_says_first_what_no_build_changes(fp8: bool) -> None:
    without_fa3 = OtherBuild("plan_without_fa3")
    for gpu, why in (
        (H200, "was not built: add 90a to FLASH_EXT_CUDA_ARCHS"),
        (A100, "needs a Hopper GPU (compute capability 9.0), this one has 8.0"),
    ):
        answer = without_fa3.ask("choose_forward", "fa3", gpu=gpu, rows=(100, 100), fp8=fp8)
        assert answer == f"none: variant 'fa3' {why}"


@pytest.mark.parametrize(("batch", "fits"), [(999, True), (1000, False)])
def test_tiles_of_packed_sequences_are_counted_with_padding(
    batch: int, fits: bool, native: ModuleType
) -> None:
    """96 heads of so many sequences have 16,777,152 tiles, and with one more 16,777,248."""
    lengths = {"seqlen_q": 173_761 * 128, "seqlen_k": 128}
    dims = {"head_dim": 8, "head_dim_v": 8, "heads_q": 96, "heads_k": 1}
    p = problem(native, varlen=True, batch=batch, **lengths, **dims)
    variant, reason = p.choose_forward("fa3")
    assert (variant == "fa3") == fits
    assert fits or reason == "variant 'fa3' needs fewer than 2^24 tiles of 128 rows"


def test_fa2_computes_the_gradients_of_empty_tensors(native: ModuleType) -> None:
    p = problem(native, seqlen_q=100, seqlen_k=0)
    assert p.choose_forward("fa3") == ("fa3", "")
    assert p.choose_backward("fa3") == ("fa2", "variant 'fa3' has no backward for an empty k")


@pytest.mark.parametrize("head_dims", ((64, 64), (80, 112), (192, 128), (256, 16)))
@pytest.mark.parametrize("name", ("fp8", "int8", "kv_8_bits"))
def test_only_fa3_has_8_bits(name: str, head_dims: tuple[int, int], native: ModuleType) -> None:
    dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
    p = problem(native, seqlen_q=100, seqlen_k=100, **{name: True}, **dims)
    assert p.choose_forward("auto") == p.choose_forward("fa3") == ("fa3", "")
    for variant in ("fa1", "fa2"):
        assert p.choose_forward(variant) == (None, f"variant '{variant}' has no 8-bit inputs")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (dict(softcap=2.0), "has no softcap with 8-bit inputs"),
        (dict(softcap=2049.0), "has no softcap with 8-bit inputs"),
        (dict(alibi=True), "has no ALiBi with 8-bit inputs"),
        (dict(head_dim=72), "needs rows of q that start and end on 16-byte boundaries"),
        (dict(head_dim_v=72), "needs rows of v that start and end on 16-byte boundaries"),
        (dict(gpu=A100), "needs a Hopper GPU (compute capability 9.0), this one has 8.0"),
    ],
)
@pytest.mark.parametrize("name", ("fp8", "int8", "kv_8_bits"))
def test_no_variant_stands_in_for_8_bits(
    name: str, fields: dict[str, object], why: str, native: ModuleType
) -> None:
    if name == "kv_8_bits" and not {"gpu", "head_dim_v"} & fields.keys():
        return  # its kernel has softcap and ALiBi, and its q 16 bits
    p = problem(native, **{"seqlen_q": 100, "seqlen_k": 100, name: True, **fields})
    assert p.choose_forward("fa3") == (None, f"variant 'fa3' {why}")
    others = ", and no other variant has 8-bit inputs"
    assert p.choose_forward("auto") == (None, f"variant 'fa3' {why}{others}")


def test_fp8_has_no_backward(native: ModuleType) -> None:
    p = problem(native, seqlen_q=100, seqlen_k=100, fp8=True)
    variant, why = p.choose_backward("fa3")
    assert variant is None and "variant 'fa3' has no backward for 8-bit inputs" in why


def test_what_does_not_fit_a_gpu_is_refused(native: ModuleType) -> None:
    p = problem(native, gpu=SMALL, seqlen_q=100, seqlen_k=100)
    why = "needs {} bytes of shared memory per block {}at head dimensions 64 and 64"
    variant, reason = p.choose_forward("fa1")
    assert (variant, reason) == ("fa1", "")
    variant, reason = p.choose_backward("fa1")
    assert variant is None
    where = "in the backward pass "
    assert reason == f"variant 'fa1' {why.format(110000, where)}, this GPU has 101376"
    p.head_dim = p.head_dim_v = 256
    variant, reason = p.choose_forward("auto")
    assert variant is None and reason.startswith("variant 'fa2' needs 131072 bytes")


# --- Launches ---


@pytest.mark.parametrize("head_dims", KERNEL_DIMS)
def test_every_head_dim_takes_its_kernels(head_dims: tuple[int, int], native: ModuleType) -> None:
    for d, dv in (head_dims, (head_dims[0] - 8, head_dims[1] - 8)):
        p = problem(native, seqlen_q=100, seqlen_k=100, head_dim=d, head_dim_v=dv)
        name = "<{}, {}>".format(*head_dims)
        wider = next(n for n in (64, 128, 256) if n >= head_dims[0])
        of_variants = {"fa1": f"<{wider}, {wider}>", "fa2": name, "fa3": name}
        for variant in VARIANTS:
            assert p.forward(variant).launches == [f"{variant}_forward{of_variants[variant]}"]
        for variant in ("fa1", "fa2"):
            assert p.backward(variant).launches == [f"{variant}_backward{of_variants[variant]}"]
        kind = "_wide" if head_dims[0] > 128 else ""
        assert p.backward("fa3").launches == [f"fa3_backward{kind}{name}"]
    dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
    padded = {(32, 32): (64, 64), (192, 192): (256, 256)}
    for kind in ("fp8", "int8"):
        p = problem(native, seqlen_q=100, seqlen_k=100, **{kind: True}, **dims)
        of_8_bits = padded.get(head_dims, head_dims)
        # The tiles for few queries do it.
        before = ["transpose_v"] * (of_8_bits not in ((64, 64), (96, 96)))
        kernel = "fa3_forward_{}<{}, {}>".format(kind, *of_8_bits)
        assert p.forward("fa3").launches == [*before, kernel]


@pytest.mark.parametrize("head_dims", KERNEL_DIMS)
@pytest.mark.parametrize("option", ({"softcap": 30.0}, {"alibi": True}))
def test_rare_head_dims_are_padded_further_with_options(
    option: dict[str, object], head_dims: tuple[int, int], native: ModuleType
) -> None:
    """In fa3: its kernels that change scores have head dims 64, 128 and 256."""
    dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
    p = problem(native, seqlen_q=300, seqlen_k=300, **dims, **option)
    wider = next(n for n in (64, 128, 256) if n >= head_dims[0])
    assert p.forward("fa3").launches == [f"fa3_forward<{wider}, {wider}>"]
    kind = "_wide" if wider > 128 else ""
    assert p.backward("fa3").launches == [f"fa3_backward{kind}<{wider}, {wider}>"]
    p.seqlen_q = 1  # few queries have a kernel for each pair
    assert p.forward("fa3").launches == ["fa3_decode<{}, {}>".format(*head_dims)]


def test_gradients_of_options_follow(native: ModuleType) -> None:
    p = problem(native, seqlen_q=9, seqlen_k=9, bias=True, sink=True, varlen=True)
    assert p.backward("fa2").launches == [
        "fa2_backward<64, 64>", "bias_gradient", "sink_gradient",
    ]  # fmt: skip
    p.deterministic = True
    assert p.backward("fa2").launches[0] == "sanitize_cu_seqlens"


GRADIENTS = (
    (dict(batch=384, heads=4, seqlen=384, d=32, sizes=(1, 4, 384, 384)), "3<32, 32>"),
    (
        dict(batch=999, heads=12, group=2, seqlen=49, d=32, sizes=(1, 12, 49, 49)),
        "small, 8<32, 32>",
    ),
    (dict(batch=2, heads=2, seqlen=300, d=40, sizes=(2, 2, 300, 300)), "1<64, 64>"),
    (dict(batch=2, heads=2, seqlen=300, d=96, sizes=(1, 1, 300, 300)), "4<128, 128>"),
    (dict(batch=1, heads=2, seqlen=300, d=128, sizes=(1, 1, 1, 1)), "8<128, 128>"),
)
"""A call, and of fa3's kernel for the gradient of its bias the tile, the cluster, the head dims."""


COMMON_BIAS_GRADIENTS = ("bias_gradient", "shared_bias_gradient")


@pytest.mark.parametrize(("call", "expected"), GRADIENTS)
def test_bias_gradient_of_fa3(call: dict, expected: str, native: ModuleType) -> None:
    """Whichever variant runs the backward, but not for a variant that was asked for by name."""
    p = problem(native, batch=call["batch"], bias=True, bias_sizes=call["sizes"])
    p.heads_q, p.heads_k = call["heads"], call["heads"] // call.get("group", 1)
    p.seqlen_q = p.seqlen_k = call["seqlen"]
    p.head_dim = p.head_dim_v = call["d"]
    for variant in ("fa1", "fa2"):
        assert p.backward(variant).launches[-1].split(",")[0] in COMMON_BIAS_GRADIENTS
    p.wanted = "fa3"
    for variant in ("fa1", "fa2"):
        assert p.backward(variant).launches[-1] == f"fa3_bias_gradient, {expected}"


SWIN: dict[str, object] = {
    **{"batch": 1024, "heads_q": 12, "heads_k": 12, "seqlen_q": 49, "seqlen_k": 49},
    **{"head_dim": 32, "head_dim_v": 32},
}


@pytest.mark.parametrize("variant", ("fa2", "fa3"))
def test_short_sequences_have_kernels_of_their_own(variant: str, native: ModuleType) -> None:
    """With as many CTAs as run at a time, which take equally many heads; the sums of dbias of
    several CTAs are added by another kernel, in their order."""
    p = problem(native, **SWIN)
    heads = 1024 * 12
    for plan, at_once in ((p.forward(variant), 5 * 132), (p.backward(variant), 3 * 132)):
        each = -(-heads // at_once)
        assert plan.launches[0].split(", ", 1)[1] == f"{-(-heads // each)}<32, 32>"
        assert plan.bytes == 0
    p.gpu = A100  # has the memory of two CTAs
    assert p.backward("fa2").launches == [
        f"short_backward, {-(-heads // -(-heads // 216))}<32, 32>"
    ]
    p.gpu, p.bias = H200, True
    for sizes_of, groups in (((1, 12, 49, 49), 32), ((1, 1, 1, 49), 384), ((1024, 12, 49, 1), 1)):
        p.bias_sizes = sizes_of
        plan = p.backward(variant)
        assert plan.launches == [f"short_backward, {groups}<32, 32>"]
        units = sizes_of[0] * sizes_of[1]
        expected = {"dbias_sums": units * groups * 64 * 64 * 4} if groups > 1 else {}
        assert sizes(plan) == expected
    assert p.forward("fa1").launches[0].startswith("fa1_forward")
    assert p.backward("fa1").launches[0].startswith("fa1_backward")


@pytest.mark.parametrize(
    "fields",
    (
        *(dict(seqlen_q=65), dict(seqlen_k=65), dict(head_dim=72), dict(head_dim_v=72)),
        *(dict(seqused=True), dict(varlen=True), dict(sink=True)),
        *(dict(softcap=2.0), dict(alibi=True), dict(mask=True), dict(batch_invariant=True)),
        *(dict(seqlen_k=0), dict(batch=0), dict(heads_q=0)),
    ),
    ids=str,
)
def test_what_short_sequences_lack(fields: dict, native: ModuleType) -> None:
    p = problem(native, **SWIN)
    assert p.forward("fa2").launches[0].startswith("short_forward")
    for name, value in fields.items():
        setattr(p, name, value)
    for variant in ("fa2", "fa3"):
        launches = p.forward(variant).launches
        if "batch_invariant" not in fields:
            launches += p.backward(variant).launches
        assert not any(x.startswith("short") for x in launches)


def test_grouped_heads_of_short_sequences(native: ModuleType) -> None:
    p = problem(native, **SWIN | {"heads_k": 3})
    for variant in ("fa2", "fa3"):
        assert p.forward(variant).launches[0].startswith("short_forward")
        assert p.backward(variant).launches[0].startswith(f"{variant}_backward")
    p.seqlen_q = 2
    assert p.forward("fa3").launches[0].startswith("fa3_decode")
    p.heads_k = 12
    assert p.forward("fa3").launches[0].startswith("short_forward")
    p.batch = 3  # few heads
    assert p.forward("fa3").launches[0].startswith("fa3_decode")


@pytest.mark.parametrize(
    "fields",
    (
        dict(gpu=A100),
        dict(softcap=2.0),
        dict(alibi=True),
        dict(head_dim=136),
        dict(head_dim=33),
        dict(odd_rows="k"),
        dict(odd_rows="dout"),
        dict(repeated_rows=True),
        dict(seqlen_k=0),
        dict(batch=0),
    ),
)
def test_bias_gradient_of_fa3_lacks_options(fields: dict, native: ModuleType) -> None:
    p = problem(native, batch=2, seqlen_q=70, seqlen_k=70, bias=True, wanted="fa3")
    assert p.backward("fa2").launches[-1].startswith("fa3_bias_gradient")
    for name, value in fields.items():
        setattr(p, name, value)
    assert p.backward("fa2").launches[-1] == "bias_gradient"


STORED: dict[str, object] = {
    **{"batch": 2, "seqlen_q": 300, "seqlen_k": 304, "heads_q": 2, "heads_k": 2},
    "bias_sizes": (2, 2, 300, 304),
}
# As wide as all queries, and yet keys are hidden: the queries of a head stay together.
WIDE_WINDOW = {
    **{"batch": 1, "seqlen_q": 1024, "seqlen_k": 4096, "window_left": 1024},
    "bias_sizes": (1, 2, 1024, 4096),
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    (
        ({}, "stores"),
        ({"bias_float32": True}, "stores"),
        ({"heads_k": 1}, "stores"),
        ({"batch": 1, "bias_sizes": (1, 2, 300, 304)}, "stores"),
        ({"window_right": 0, "deterministic": True}, "stores"),
        (WIDE_WINDOW, "stores"),
        ({"bias_sizes": (1, 2, 300, 304)}, "adds"),
        ({"bias_sizes": (2, 1, 300, 304)}, "adds"),
        ({"bias_sizes": (1, 2, 300, 304), "bias_float32": True}, None),  # no registers
        ({"bias_sizes": (1, 1, 300, 304)}, None),  # four terms
        ({"bias_sizes": (2, 2, 1, 304)}, None),
        ({"bias_sizes": (2, 2, 300, 1)}, None),
        ({"seqlen_k": 301, "bias_sizes": (2, 2, 300, 301)}, "stores, copies"),
        ({"seqlen_k": 300, "bias_sizes": (2, 2, 300, 300), "bias_float32": True}, "stores"),
        ({"bias_sizes": (1, 2, 300, 304), "dbias_factor": 0.5}, "adds, copies"),
    ),
)
def test_fa3_backward_stores_dbias(fields: dict, expected: str | None, native: ModuleType) -> None:
    """Where an element of dbias is one of dS, or the sum of two, there is no kernel for it."""
    p = problem(native, bias=True, wanted="fa3", **STORED | fields)
    first, *others = p.backward("fa3").launches
    if expected is None:
        assert first == "fa3_backward<64, 64>"
        assert [x.split(",")[0] for x in others] == ["fa3_bias_gradient"]
    else:
        verb, *copies = expected.split(", ")
        assert first == f"fa3_backward, {verb} dbias<64, 64>"
        assert others == ["copy_dbias" for _ in copies]


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({}, True),
        ({"batch": 1, "bias_sizes": (1, 2, 300, 304)}, True),
        ({"bias_sizes": (1, 2, 300, 304)}, False),  # two terms
        ({"bias_sizes": (2, 2, 1, 304)}, False),
        ({"bias_float32": True}, False),
        ({"softcap": 9.0}, False),  # the general kernel
        ({"head_dim": 96, "head_dim_v": 96}, False),
        ({"seqlen_k": 300, "bias_sizes": (2, 2, 300, 300)}, False),  # rows of 600 bytes
        ({"dbias_factor": 0.5}, False),
    ],
    ids=str,
)
def test_fa2_backward_stores_dbias(fields: dict, stored: bool, native: ModuleType) -> None:
    launches = problem(native, bias=True, **STORED | fields).backward("fa2").launches
    assert launches[0].startswith("fa2_backward")
    assert (launches[-1].split(",")[0] in COMMON_BIAS_GRADIENTS) != stored


@pytest.mark.parametrize(
    ("fields", "copied"),
    [
        ({}, 0),  # as it is
        ({"bias_bool": True}, 2 * 2 * 300 * 304 * 2),
        ({"bias_bool": True, "bias_sizes": (1, 2, 1, 304)}, 2 * 304 * 2),
        ({"bias_bool": True, "seqlen_k": 301, "bias_sizes": (1, 2, 1, 301)}, 2 * 304 * 2),
        ({"bias_bool": True, "bias_sizes": (2, 2, 300, 1)}, 0),  # one column for all
        ({"bias_float32": True}, 0),
        ({"bias_bool": True, "softcap": 9.0}, 0),
        ({"bias_bool": True, "head_dim": 96, "head_dim_v": 96}, 0),
    ],
    ids=str,
)
def test_fa2_copies_a_bias(fields: dict, copied: int, native: ModuleType) -> None:
    """If its kernels have tiles of it then."""
    p = problem(native, bias=True, **STORED | fields)
    for plan in (p.forward("fa2"), p.backward("fa2")):
        assert (plan.launches[0] == "tile_bias") == bool(copied)
        assert sizes(plan).get("copy of bias", 0) == copied


@pytest.mark.parametrize(
    ("fields", "ctas"),
    [
        ({"bias_sizes": (1, 2, 300, 304)}, 2),
        ({"bias_sizes": (2, 1, 300, 304)}, 2),
        ({"bias_sizes": (1, 1, 300, 304)}, 4),
        ({"batch": 40, "bias_sizes": (1, 2, 300, 304)}, 7),
        ({"batch": 3, "seqlen_q": 4096, "seqlen_k": 4096, "bias_sizes": (1, 2, 4096, 4096)}, 1),
        ({"bias_sizes": (2, 2, 1, 304)}, 0),
        ({"bias_sizes": (1, 2, 300, 304), "bias_float32": True}, 0),
        ({"bias_sizes": (1, 2, 300, 304), "softcap": 9.0}, 0),
    ],
    ids=str,
)
def test_shared_bias_gradient(fields: dict, ctas: int, native: ModuleType) -> None:
    """Of FA1 and FA2: the CTAs of a tile, or 0 for the general kernel."""
    for variant in ("fa1", "fa2"):
        last = problem(native, bias=True, **STORED | fields).backward(variant).launches[-1]
        assert last == (f"shared_bias_gradient, {ctas}" if ctas else "bias_gradient")


def test_gpu_problems_have_every_cluster(native: ModuleType) -> None:
    """Of the gradient of a bias, in tests/test_bias.py."""
    p = problem(native, seqlen_q=128, seqlen_k=128, bias=True, wanted="fa3")
    p.dbias_factor = 0.5  # FA2's backward does not store it then
    for p.batch, heads, ctas in CLUSTERS:
        p.heads_q = p.heads_k = heads
        p.bias_sizes = (1, heads, 128, 128)
        assert p.backward("fa2").launches[-1] == f"fa3_bias_gradient, {ctas}<64, 64>"
    assert {ctas for *_, ctas in CLUSTERS} == set(range(1, 9))


# --- Tables ---


@pytest.fixture(scope="module")
def with_gaps() -> OtherBuild:
    """The plan with rows and sets of options missing in tuning.h and tuning_backward.h."""
    home = ROOT / "build" / "tests-native" / "with_gaps"
    (home / "plan").mkdir(parents=True, exist_ok=True)
    forward, backward = "tuning.h", "tuning_backward.h"
    sources = {name: (CSRC / "plan" / name).read_text() for name in (forward, backward)}
    for source, table, head_dims, options in (
        (forward, "kFa2Forward", "96, 96", None),
        (forward, "kFa2Forward", "256, 256", None),
        (backward, "kFa2Backward", "64, 64", "{2, {kDense, kVarlen}}"),
        (forward, "kFa3Forward", "256, 256", "{2, {kVarlen, kVarlenSplits}}"),
        (forward, "kFa3Decode", "128, 128", None),
    ):
        row = rf"    \{{\.head_dims = \{{{head_dims}\}},.*?\}}\}},\n"
        found = re.compile(row, re.DOTALL).search(
            sources[source], sources[source].index(f"{table}[] = ")
        )
        assert found is not None
        with_options = f"{{.head_dims = {{{head_dims}}}, .options = {options},"
        head = r"\{\.head_dims = \{.*?\},(\s*\.options = \w+,)?"
        replacement = options and re.sub(head, with_options, found[0], count=1)
        before, after = found.string[: found.start()], found.string[found.end() :]
        sources[source] = before + (replacement or "") + after
    for name, text in sources.items():
        (home / "plan" / name).write_text(text)
    return OtherBuild("plan_with_gaps", SM90A, f"-iquote{home}")


def test_a_kernel_lacks_what_its_table_lacks(with_gaps: OtherBuild) -> None:
    """A call takes the next row that holds it and has its options, or is refused with the reason.

    Nothing else has to know the row: no other table, and no list of head dims.
    """

    ask = with_gaps.ask
    assert ask("forward", "fa2", d=96) == "fa2_forward<128, 128>"
    assert ask("forward", "fa3", d=96) == "fa3_forward<96, 96>"
    assert ask("backward", "fa2", d=64, bias=True).startswith("fa2_backward<96, 96>; ")
    assert ask("backward", "fa2", d=64) == "fa2_backward<64, 64>"
    assert ask("backward", "fa2", d=256) == "fa2_backward<256, 256>"
    assert ask("forward", "fa3", d=128, rows=(1, 4096)) == "fa3_decode<192, 128>"

    why = "has no kernel for head dimensions 256 and 256"
    assert ask("choose_forward", "fa2", d=256) == f"none: variant 'fa2' {why}"
    assert ask("choose_forward", "auto", d=256) == "fa3: "
    assert ask("choose_backward", "fa2", d=256) == "fa2: "
    why += " with these options"
    assert ask("choose_forward", "fa3", d=256, softcap=2) == f"none: variant 'fa3' {why}"
    assert ask("choose_forward", "auto", d=256, softcap=2) == f"none: variant 'fa2' {why}"


# --- Devices ---


def test_a_gpu_is_asked_once(native: ModuleType) -> None:
    assert [native.multiprocessors(gpu) for gpu in (-1, 0, 1, 2, 3)] == [0, 132, 108, 142, 0]
    assert native.attributes_asked() == 3 * 5


# --- Launches ---


def test_a_dispatch_that_runs_nothing_is_an_error(native: ModuleType) -> None:
    no_kernel, failed = 52, 7  # kNoKernel, and another status
    assert native.dispatch(16, 0) == native.dispatch(32, 0) == 0
    assert native.dispatch(32, failed) == failed
    assert native.dispatch(48, 0) == no_kernel


@pytest.mark.parametrize("head_dim", (257, 1000))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_launch_without_a_kernel_is_an_error(
    variant: str, head_dim: int, native: ModuleType
) -> None:
    """Not the kernel of the last head dim in its place, nor success without any."""
    p = problem(native, seqlen_q=300, seqlen_k=300, heads_q=4, heads_k=4, head_dim_v=40)
    p.launched_head_dim = head_dim
    for run in (p.forward, p.backward):
        with pytest.raises(RuntimeError, match="no kernel"):
            run(variant)


@pytest.mark.parametrize(
    ("changed", "tile"),
    (
        ({}, 1),
        ({"softcap": 30.0}, 1),
        ({"alibi": True}, 1),
        ({"dropout": True}, 1),
        ({"softcap": 30.0, "head_dim": 128}, 0),
        ({"softcap": 30.0, "seqlen_q": 128}, 0),
        ({"heads_k": 1, "seqlen_q": 40}, 0),
    ),
)
def test_a_plan_names_the_tile_that_runs(
    changed: dict[str, float], tile: int, native: ModuleType
) -> None:
    """Kernels with splits have the smallest Q tile alone, at 128 also the ones for softcap."""
    sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 32, "heads_k": 32, "head_dim": 64}
    assert problem(native, **sizes | changed).forward("fa3").tile == tile


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("seqlen_q", (512, 2048))
def test_prompts_from_pages_have_the_plan_of_rows(
    seqlen_q: int, head_dim: int, native: ModuleType
) -> None:
    """Neither splits nor packed heads, whose kernels have no ping-pong, and the same tile; the one
    for long keys has no kernel with pages."""
    usual, long_keys = 1, 2  # Fa3ForwardTile
    p = problem(native, seqlen_q=seqlen_q, seqlen_k=32768, heads_q=32, heads_k=8)
    p.head_dim = p.head_dim_v = head_dim
    p.window_right, p.seqused = 0, True
    of_rows = p.forward("fa3")
    p.page_size = 64
    found = p.forward("fa3")
    assert (found.num_splits, found.pack_gqa_log2) == (1, 0)
    assert found.tile == (usual if of_rows.tile == long_keys else of_rows.tile)
    assert found.launches == of_rows.launches


@pytest.mark.parametrize("tuning", (True, False))
def test_splits_are_forced_for_tuning_alone(tuning: bool, native: ModuleType) -> None:
    """In a process of its own: a process decides at its first call whether it is tuned."""
    code = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("flash_ext_plan", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
for queries in (1, 300):  # in the kernel for few queries, and in the others
    p = native.Problem()
    p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k, p.head_dim = queries, 8192, 8, 8, 128
    for splits in ("5", "3"):
        os.environ["FLASH_EXT_FORCE_SPLITS"] = splits
        print(p.forward("fa3").num_splits)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, native.__file__],
        env=os.environ | ({"FLASH_EXT_TUNE": "1"} if tuning else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    few, same_few, many, same_many = map(int, done.stdout.split())
    if tuning:
        assert (few, same_few, many, same_many) == (5, 3, 5, 3)
    else:
        assert few == same_few and many == same_many
