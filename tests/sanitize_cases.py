"""The calls that tests/sanitize.sh runs under compute-sanitizer: every kernel, tiny shapes.

Every head dim that has kernels, one that is padded, whole and ragged tiles, every option, aligned
and unaligned rows, deterministic and not; under memcheck also offsets of packed sequences that
point anywhere. Results are not looked at here; tests/test_attention.py does that. Inputs are made
on the host, so that under initcheck the only device memory without a value is what the kernels
should not read.

    python tests/sanitize_cases.py TOOL PART PARTS   # a part of them
    python tests/sanitize_cases.py --count
    ONLY=dropout_p python tests/sanitize_cases.py --count   # the calls with this option
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from attention_testing import (
    FP8,
    KERNEL_DIMS,
    VARIANTS,
    Inputs,
    Problem,
    device_unsupported_reason,
    make_inputs,
    nan_filled_outputs,
    options_of,
    runnable,
    unsupported_reason,
)
from grids import BIAS_PATTERNS

import flash_ext
from flash_ext import fp8

HEAD_DIMS = ((40, 40), *KERNEL_DIMS)
T = TypeVar("T")
BEGIN = time.monotonic()
LENGTHS = ((33, 70), (130, 65), (40, 530))  # the last: several KV tiles of every kernel


def variants() -> list[str]:
    """Those that run on this GPU."""
    return [v for v in VARIANTS if device_unsupported_reason(v, "cuda") is None]


def options(seqlen_q: int, seqlen_k: int, pattern: str) -> Iterator[dict]:
    """Every option, some together: each set goes through every kernel of a head dim."""
    packed = {
        "lengths_q": (seqlen_q // 2, 0, seqlen_q // 3, 5),
        "lengths_k": (seqlen_k // 3, 7, seqlen_k // 2, 0),
    }
    yield {"causal": True}
    yield {"causal": True, "layout": "odd_offset"}
    yield {"window": (20, 9), "dropout_p": 0.2, "bias": "11qk", "bias_type": "bool"}
    yield {"causal": True, "softcap": 2.0, "alibi": "h", "bias": pattern}
    yield {"sink": True, "seqused_k": (seqlen_k // 2,), "alibi": "h", "window": (40, 3)}
    yield {**packed, "causal": True}
    yield {**packed, "sink": True, "bias": pattern, "bias_type": "float32", "dropout_p": 0.2}
    yield {"head_dim_v": 24, "bias": "bhqk", "layout": "odd_row"}


def bias_gradients(base: Problem) -> Iterator[Problem]:
    """For the kernels of Hopper GPUs: small tiles and others, clusters, sums of rows and columns;
    stored and added by the backward."""
    yield dataclasses.replace(base, batch=9, seqlen_q=33, seqlen_k=49, bias="1hqk")
    yield dataclasses.replace(base, batch=3, bias="1hqk", bias_type="float32", causal=True)
    yield dataclasses.replace(base, seqlen_q=150, seqlen_k=290, bias="1111", window=(70, 30))
    yield dataclasses.replace(base, lengths_q=(70, 0, 9), lengths_k=(130, 8, 64), bias="bhqk")
    stored = dataclasses.replace(base, seqlen_q=150, seqlen_k=291, window=(40, 30))
    yield dataclasses.replace(stored, bias="bhqk")
    yield dataclasses.replace(stored, bias="bhqk", bias_type="float32")
    yield dataclasses.replace(stored, bias="1hqk", batch=2)


def short_sequences(base: Problem) -> Iterator[Problem]:
    """One tile a head: walks over several heads, a CTA for each, rows and columns summed."""
    base = dataclasses.replace(base, heads_k=2, seqlen_q=33, seqlen_k=49)
    yield dataclasses.replace(base, batch=3, causal=True)
    yield dataclasses.replace(base, batch=300, bias="1hqk")
    yield dataclasses.replace(base, batch=2, bias="bhqk", bias_type="float32", window=(9, 3))
    yield dataclasses.replace(base, batch=2, seqlen_q=64, bias="111k", bias_type="bool")
    yield dataclasses.replace(base, batch=3, seqlen_q=7, bias="11q1")


def cases() -> Iterator[tuple[Problem, str, bool]]:
    """(problem, variant, deterministic); lengths and bias patterns rotate."""
    rotation = zip(itertools.cycle(LENGTHS), itertools.cycle(BIAS_PATTERNS[1:]), strict=False)
    for head_dim, head_dim_v in HEAD_DIMS:
        base = Problem(1, 65, 65, 2, 1, head_dim, head_dim_v=head_dim_v)
        for index in range(len(list(options(0, 0, "")))):
            lengths, pattern = next(rotation)
            fields = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
            fields |= list(options(*lengths, pattern))[index]
            problem = dataclasses.replace(base, **fields)
            for variant in variants():
                yield runnable(variant, problem), variant, True
        parts = dataclasses.replace(base, seqlen_q=3, seqlen_k=1100)  # keys in two
        for variant in variants()[1:]:  # fa1 has no parts, and is always deterministic
            yield parts, variant, True
            yield dataclasses.replace(parts, softcap=2.0), variant, True
            if variant == "fa2":
                yield from ((x, "auto", True) for x in bias_gradients(base))
                if max(head_dim, head_dim_v) <= 64:
                    yield from ((x, variant, False) for x in short_sequences(base))
                tiles = dataclasses.replace(base, seqlen_q=150, seqlen_k=296, window=(40, 30))
                yield dataclasses.replace(tiles, bias="bhqk"), variant, False
                yield dataclasses.replace(tiles, bias="11qk", batch=5), variant, False
            yield base, variant, False
            yield dataclasses.replace(base, lengths_q=(40, 30), lengths_k=(65, 9)), variant, False
            if variant == "fa3":  # more forms of its kernels: its group was packed above
                yield dataclasses.replace(base, softcap=2.0, seqused_k=(40,)), variant, False
                yield dataclasses.replace(parts, heads_k=2), variant, True
                yield dataclasses.replace(parts, seqlen_q=20, sink=True, causal=True), variant, True
                yield dataclasses.replace(parts, seqlen_q=1, seqlen_k=4200), variant, True
                packed = dataclasses.replace(base, heads_q=8, seqlen_q=9, seqlen_k=2100)
                yield dataclasses.replace(packed, sink=True, causal=True), variant, True
                yield dataclasses.replace(packed, softcap=2.0), variant, True
                yield dataclasses.replace(base, heads_q=4, seqlen_q=300), variant, False  # in parts
                # Splits by length.
                lengths = dataclasses.replace(base, batch=3, seqlen_q=1, seqlen_k=16500)
                yield dataclasses.replace(lengths, seqused_k=(16500, 5, 2000)), variant, True
                if max(head_dim, head_dim_v) <= 128:
                    drops = dataclasses.replace(base, seqlen_q=400, dropout_p=0.2)  # several tiles
                    yield dataclasses.replace(drops, causal=True), variant, True
                    yield dataclasses.replace(parts, dropout_p=0.2), variant, False


def fp8_cases() -> Iterator[Problem]:
    """Forward only, with a descale for each block and channel; fa3."""
    for dtype, head_dim in itertools.product((FP8, torch.int8), (48, 64, 128, 256)):
        fine = {"kv_dtype": dtype, "k_descale": "fine", "v_descale": "fine"}
        base = Problem(1, 3, 1100, 8, 1, head_dim, **fine)
        yield base
        yield dataclasses.replace(base, seqlen_q=70, seqlen_k=165, causal=True, softcap=2.0)
        yield dataclasses.replace(base, lengths_q=(4, 0, 3), lengths_k=(65, 9, 0), sink=True)
    for head_dim, head_dim_v in HEAD_DIMS:
        fine = {"q_descale": "fine", "k_descale": "fine", "v_descale": "fine"}
        base = Problem(1, 65, 165, 2, 1, head_dim, head_dim_v=head_dim_v, dtype=FP8, **fine)
        if unsupported_reason("fa3", base, "cuda") is None:
            yield dataclasses.replace(base, causal=True)
            yield dataclasses.replace(base, lengths_q=(40, 0, 30), lengths_k=(65, 9, 0), sink=True)
            yield dataclasses.replace(base, scale=-0.2, seqused_k=(40,))
            yield dataclasses.replace(base, seqlen_q=3, seqlen_k=1100)
            yield dataclasses.replace(base, causal=True, scale=2.0**40)  # cooled


def quantize_all() -> None:
    """The kernels that make FP8 inputs."""
    offsets = torch.tensor([0, 5, 5, 140], dtype=torch.int32, device="cuda")
    for head_dim in (16, 64, 96, 256):
        x = to_device(torch.randn(150, 2, head_dim, dtype=torch.bfloat16))
        mean = fp8.token_mean(x, cu_seqlens=offsets)
        signs = fp8.random_signs(head_dim, device="cuda")
        for scales in ("tensor", "head", "block"):
            fp8.quantize(x, scales=scales, signs=signs, mean=mean, cu_seqlens=offsets)
        fp8.quantize(x[None], scales="channel")
        of_v = {"scales": "channel", "transposed": True}
        fp8.quantize(x, cu_seqlens=offsets, **of_v)
        for queries in (1, 150):  # one kernel would transpose v, another would have it transposed
            fp8.attention(x[None, :queries], x[None], x[None])
            fp8.attention_varlen(x, x, x, offsets, offsets)
        for scales in ("head", "block"):  # sums overflow: rows are read again
            fp8.quantize((x * 2.0**124)[None], scales=scales, signs=signs)
    torch.cuda.synchronize()


def combine() -> None:
    """Partial results, of rows in the middle of others."""
    for heads, dim, dtype in ((3, 64, torch.bfloat16), (2, 40, torch.float16), (2, 33, torch.half)):
        out, lse = torch.randn(2, 50, heads, dim), torch.randn(2, heads, 50)
        partial, lse_partial = torch.randn(2, 33, heads, dim, dtype=dtype), lse[..., :33].clone()
        lse_partial[:, 0] = -torch.inf
        out, lse, partial, lse_partial = map(to_device, (out, lse, partial, lse_partial))
        parts, firsts = [out[:, 9:42], partial, partial[:, 4:20]], [0, -5, 30]
        index = to_device(torch.randint(-40, 80, (50,), dtype=torch.int32))
        torch.ops.flash_ext.sum_rows(out.clone(), parts, firsts, index)
        torch.ops.flash_ext.copy_rows([out.clone(), out.clone()], out)
        statistics = [lse[..., 9:42], lse_partial, lse_partial[..., 4:20]]
        torch.ops.flash_ext.combine_parts(out.clone(), lse.clone(), parts, statistics, firsts)
    torch.cuda.synchronize()


def make_masks() -> None:
    """Masks of blocks, of rows that end anywhere."""
    for queries, keys in ((1, 1), (130, 256), (257, 401), (40, 5003)):
        dense = torch.rand(1, 2, queries, keys) < 0.5
        dense[..., : keys // 256 * 128] = True
        intervals = torch.randint(-9, keys + 9, (1, 2, queries, 4), dtype=torch.int32)
        kinds = torch.randint(3, (1, 2, -(-queries // 128), -(-keys // 128)), dtype=torch.uint8)
        for mask in (dense, dense[..., 1:], dense[..., ::2], dense.mT):
            torch.ops.flash_ext.mask_from_dense(to_device(mask))
        torch.ops.flash_ext.mask_from_intervals(to_device(intervals), keys)
        torch.ops.flash_ext.mask_from_blocks(to_device(kinds), to_device(intervals[:, :1]))
        torch.ops.flash_ext.mask_from_kinds(to_device(kinds))
        first_keys, inner = torch.tensor([9], dtype=torch.int32), torch.randint(queries + 1, (5,))
        ids = (torch.arange(queries)[None] >= inner.sort().values[:, None]).sum(0)[None]
        offsets = torch.tensor([0, *inner.sort().values.tolist()], dtype=torch.int32)
        for dtype in (torch.int32, torch.int64):
            of_ids = {"ids": to_device(ids.to(dtype)), "window_left": 50}
            sizes = queries, queries
            torch.ops.flash_ext.mask_from_documents(to_device(first_keys), *sizes, **of_ids)
        of_offsets = {f"cu_seqlens_{x}": to_device(offsets) for x in "qk"}
        for given in (of_offsets, {}):
            torch.ops.flash_ext.mask_from_documents(to_device(first_keys), queries, keys, **given)
    torch.cuda.synchronize()


def append() -> None:
    """New keys into caches: pages and dense, packed and not, rotated, with places outside."""
    for dim, half, dtype in ((64, 16, torch.bfloat16), (40, 10, torch.float16), (32, 0, FP8)):
        new, q = torch.randn(3, 5, 2, dim), to_device(torch.randn(3, 4, 6, dim).to(dtype))
        k, v = (to_device(new.to(dtype)) for _ in range(2))
        held = to_device(torch.tensor([0, 14, -3], dtype=torch.int32))
        table = to_device(torch.tensor([[4, -1, 0], [99, 1, 2], [3, 5, 5]], dtype=torch.int32))
        edges = to_device(torch.tensor([0, 4, 4, 14], dtype=torch.int32))
        angles = to_device(torch.randn(16, max(half, 1)))
        for packed, in_pages, interleaved in itertools.product((False, True), repeat=3):
            caches = [to_device(torch.zeros(6, 6, 2, dim).to(dtype)) for _ in range(2)]
            options = {"page_table": table} if in_pages else {}
            rows = [x.flatten(0, 1) if packed else x for x in (k, v)]
            if packed:
                options["cu_seqlens_k"] = edges
            if half > 0:
                options |= {"q": q, "rotary_cos": angles, "rotary_sin": angles}
                options["rotary_interleaved"] = interleaved
            torch.ops.flash_ext.append_kv(*caches, *rows, held, **options)
    torch.cuda.synchronize()


def wild_offsets() -> Iterator[tuple[Inputs, Problem, str, bool]]:
    """Offsets of q, of k and of both that do not start at 0, fall, or lie far outside."""
    far = 2**31 - 1
    problem = Problem(lengths_q=(70, 5, 60), lengths_k=(70, 5, 60), causal=True, sink=True)
    total = sum(problem.lengths_q) + problem.tail
    for wild in ((5, 40, 90, total), (0, 90, 40, total + 9), (0, -5, -far, far), (far, far, 0, -9)):
        for side, variant, deterministic in itertools.product(
            ("q", "k", "qk"), variants(), (True, False)
        ):
            inputs = make_inputs(problem, "cpu")
            for x in side:
                setattr(inputs, f"cu_seqlens_{x}", torch.tensor(wild, dtype=torch.int32))
            yield inputs, problem, variant, deterministic


def masked() -> Iterator[tuple[str, Problem, dict[str, torch.Tensor], bool]]:
    """Masks: bits, intervals, of all heads or of some, with and without splits."""
    kernels = [("fa1", 64), ("fa1", 128), ("fa2", 64), ("fa2", 192)]
    if variants()[-1] == "fa3":
        kernels += [("fa3", dim) for dim in (64, 128, 256)]
    problem = Problem(heads_q=4, heads_k=2, batch=2)
    sizes = ((33, 401), (150, 290), (20, 4200))
    for (variant, dim), (queries, keys), heads, bits in itertools.product(
        kernels, sizes, (1, 2, 4), (True, False)
    ):
        if bits:
            visible = torch.rand(2, heads, queries, keys) < 0.5
            visible[:, :, :, : keys // 256 * 128] = visible[:, :, :1, :1]
            tiles = torch.ops.flash_ext.mask_from_dense(visible)
        else:
            intervals = torch.randint(-9, keys + 9, (2, heads, queries, 4), dtype=torch.int32)
            tiles = torch.ops.flash_ext.mask_from_intervals(intervals, keys)
        names = ("mask_kv_tiles", "mask_q_tiles", "mask_words")
        call = dataclasses.replace(problem, head_dim=dim, seqlen_q=queries, seqlen_k=keys)
        yield variant, call, dict(zip(names, tiles, strict=True)), heads == 1


def invariant() -> Iterator[Problem]:
    """Batch-invariant calls of fa3: splits of several CTAs, and of one that merges them."""
    for head_dim in (64, 128, 256):
        base = Problem(2, 3, 9000, 8, 2, head_dim, causal=True)
        yield base
        yield dataclasses.replace(base, batch=17, heads_k=8, seqlen_q=70, seqlen_k=2100)
        yield dataclasses.replace(base, lengths_q=(9, 0, 130), lengths_k=(4200, 9, 2100))


def run(
    inputs: Inputs, problem: Problem, variant: str, deterministic: bool, **more: torch.Tensor | bool
) -> None:
    """Forward and backward, both through the ops: only our kernels and copies."""
    on_device = {
        field.name: to_device(getattr(inputs, field.name))
        for field in dataclasses.fields(inputs)
        if getattr(inputs, field.name) is not None
    }
    q, k, v, dout, dlse = (on_device.pop(name) for name in ("q", "k", "v", "dout", "dlse"))
    options = options_of(problem) | on_device
    options["window_left"], options["window_right"] = options.pop("window")
    options |= {"deterministic": deterministic, "variant": variant}
    options |= {k: to_device(x) if isinstance(x, torch.Tensor) else x for k, x in more.items()}
    # fa3's tile counter and the backward's flag are read before anything is written, on purpose.
    with nan_filled_outputs() if variant == "fa3" else contextlib.nullcontext():
        out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
    if problem.dtype != FP8 and problem.kv_dtype is None:
        with nan_filled_outputs():
            torch.ops.flash_ext.bwd(dout, dlse, q, k, v, out, lse, **options)
    torch.cuda.synchronize()


def to_device(x: torch.Tensor) -> torch.Tensor:
    """The same view of the same storage on the device, copied whole."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage()).cuda()
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def with_progress(name: str, items: Sequence[T]) -> Iterator[T]:
    """The items; a run that is cut off has said how far it came."""
    for number, item in enumerate(items):
        if number % 20 == 0:
            print(f"{time.monotonic() - BEGIN:.0f} s: {name}, {number} of {len(items)}", flush=True)
        yield item


if __name__ == "__main__":
    only = os.environ.get("ONLY", "")
    calls = [*cases(), *((problem, "fa3", False) for problem in fp8_cases())]
    calls = [x for x in calls if not only or getattr(x[0], only)]
    of_fa3 = list(invariant()) if variants()[-1] == "fa3" else []
    lists = (calls, [], []) if only else (calls, list(masked()), of_fa3)
    count = sum(map(len, lists))
    if "--count" in sys.argv:
        print(count)
    else:
        tool, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        # Neighbors share kernels, each of which a tool has to instrument.
        own = [x[len(x) * part // parts : len(x) * (part + 1) // parts] for x in lists]
        for problem, variant, deterministic in with_progress("calls", own[0]):
            run(make_inputs(problem, "cpu"), problem, variant, deterministic)
        for variant, problem, mask, deterministic in with_progress("masks", own[1]):
            run(make_inputs(problem, "cpu"), problem, variant, deterministic, **mask)
        for problem in with_progress("batch-invariant calls", own[2]):
            run(make_inputs(problem, "cpu"), problem, "fa3", False, batch_invariant=True)
        if part == 0 and not only:
            if variants()[-1] == "fa3":
                quantize_all()
            combine()
            append()
            make_masks()
        if tool == "memcheck" and part == parts - 1 and not only:
            for case in wild_offsets():
                run(*case)
        print(f"{tool}, part {part} of {parts}, {count} calls: flash_ext {flash_ext.__version__}")
