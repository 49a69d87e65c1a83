"""Caches of 8 bits: pages of float8_e4m3fn or int8 beside a q of 16, and rows that are quantized on
their way into them.

Would catch a byte of another page or beside it, one that belongs to no key in use (e4m3's NaN, 127
in int8), a descale of another sequence, head, block or channel, a number that is rounded the other
way, wraps around or becomes NaN where it should saturate, a descale of 0 that makes NaN, a rotated
key that is rounded twice, and an argument that is refused after something was written.

The rule is that of attention_testing.py, against standard attention of the numbers that the cache
stands for, in float64; what is written is compared bit by bit with a row-by-row composition.
"""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_testing import (
    FP8,
    QK_8_BITS,
    Problem,
    assert_accurate,
    assert_bitwise_equal,
    device_unsupported_reason,
    make_inputs,
    nan_filled_outputs,
)
from compiled import load_host_side
from test_8_bit_keys import expected, problem
from test_append_kv import (
    Call,
    assert_same,
    native,
    numbers,
    rotated,
    run_native,
    sequences,
    some,
    words_of,
)
from test_cache import assert_near
from test_cache import some as some_call
from test_pages import LENGTHS, in_pages

import flash_ext
from flash_ext import flash_attn as fa2
from flash_ext import flash_attn_interface as fa3
from flash_ext import ops
from flash_ext.ops.options import DESCALE_ROWS

__all__ = ["native"]  # a fixture

Tensor = torch.Tensor
ERRORS = (ValueError, RuntimeError)
append_kv = torch.ops.flash_ext.append_kv


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """The tests on a GPU run where it has fa3."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


# --- Attention to pages ---


def paged(p: Problem, device: str, size: int, **more: Any) -> tuple[dict[str, Any], Any]:
    """The call with K and V in pages, and the inputs. Descales of blocks of keys have one for each
    block that a sequence has room for, NaN after the last key."""
    inputs = make_inputs(p, device)
    call = in_pages(p, inputs, size, **more)
    of_k = call.get("k_descale")
    if of_k is not None and of_k.dim() == 3:
        blocks = -(-call["page_table"].shape[1] * size // DESCALE_ROWS)
        whole = torch.full((*of_k.shape[:2], blocks), math.nan, device=device)
        whole[..., : of_k.shape[2]] = of_k[..., :blocks]
        call["k_descale"] = whole
    return call, inputs


def check_pages(p: Problem, device: str, size: int, **more: Any) -> None:
    call, inputs = paged(p, device, size, **more)
    with nan_filled_outputs():
        out, lse = ops.forward(**call)
    assert_accurate({"out": out, "lse": lse}, expected(p, inputs), p.dtype)
    if p.packed:
        assert not out[None][~p.used_rows("q").to(device)].any(), "rows without a sequence"


def base(seqlen_q: int = 5, **fields: Any) -> Problem:
    sizes = {"batch": len(LENGTHS), "seqlen_k": max(LENGTHS), "heads_q": 4, "heads_k": 2,
             "head_dim": 64, "seqused_k": LENGTHS}  # fmt: skip
    return problem(**sizes | {"seqlen_q": seqlen_q} | fields)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("seqlen_q", (1, 5, 70))
@pytest.mark.parametrize("size", (1, 3, 8, 16, 48, 64, 256))
def test_page_sizes(size: int, seqlen_q: int, dtype: torch.dtype, device: str) -> None:
    check_pages(base(seqlen_q, kv_dtype=dtype, causal=seqlen_q > 1), device, size)


@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (256, 256), (32, 48), (192, 128)), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("q_dtype", (torch.bfloat16, torch.float16), ids=str)
def test_head_dims(
    q_dtype: torch.dtype, dtype: torch.dtype, dims: tuple[int, int], device: str
) -> None:
    fields = {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": q_dtype, "kv_dtype": dtype}
    for size, seqlen_q, heads in ((16, 1, (8, 2)), (5, 3, (4, 4)), (64, 40, (4, 1))):
        check_pages(base(seqlen_q, heads_q=heads[0], heads_k=heads[1], **fields), device, size)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "alibi": {"alibi": "bh"},
    "all": {"causal": True, "window": (90, 0), "softcap": 3.0, "sink": True, "alibi": "h"},
    **{f"descales: {kind}": {"k_descale": kind, "v_descale": kind}
       for kind in ("", "scalar", "one", "head")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype, device: str) -> None:
    for size, seqlen_q in ((32, 1), (5, 9)):
        check_pages(base(seqlen_q, kv_dtype=dtype, **OPTIONS[name]), device, size)


@pytest.mark.parametrize("size", (3, 16, 128))
def test_varlen_queries(size: int, device: str) -> None:
    """Chunks of prefill beside decoding rows, after prefixes of any length."""
    for dtype, lengths_q in zip(QK_8_BITS, ((5, 0, 1, 64, 90), (1, 1, 0, 1, 1)), strict=True):
        p = problem(lengths_q=lengths_q, lengths_k=(70, 300, 1, 0, 333), heads_q=4, heads_k=2,
                    causal=True, kv_dtype=dtype)  # fmt: skip
        check_pages(p, device, size)


@pytest.mark.parametrize("size", (16, 64, 256))
def test_long_sequences(size: int, device: str) -> None:
    """Splits of the keys, some of which are past the end; many rows and many keys."""
    lengths = (700, 7) if device == "cpu" else (20000, 2)
    for dtype, seqlen_q, heads, dim in (
        (FP8, 1, (32, 8), 128), (torch.int8, 4, (8, 1), 128), (FP8, 2, (16, 2), 256),
        (torch.int8, 1, (8, 8), 64),
    ):  # fmt: skip
        p = problem(2, seqlen_q, lengths[0], *heads, dim, causal=True, seqused_k=lengths,
                    kv_dtype=dtype)  # fmt: skip
        check_pages(p, device, size, more=7)


def test_pages_have_the_bits_of_rows(device: str) -> None:
    """On CUDA the same kernel with another loader: the sums are the same, in the same order.

    Of one split: with pages they may be others.
    """
    for dtype, size in ((FP8, 16), (torch.int8, 128)):
        p = problem(3, 1, 128, 8, 2, 128, kv_dtype=dtype, seqused_k=(128, 75, 1))
        call, inputs = paged(p, device, size, more=0)
        dense = call | {"k": inputs.k, "v": inputs.v, "page_table": None}
        for found, wanted in zip(ops.forward(**call), ops.forward(**dense), strict=True):
            assert_bitwise_equal(found, wanted)


def test_shared_pages(device: str) -> None:
    """Two sequences with a prefix in the same pages; descales of heads, as they share numbers."""
    size, shared = 16, 96
    p = problem(2, 1, 200, 4, 2, 64, seqused_k=(200, 150), k_descale="scalar", v_descale="scalar")
    inputs = make_inputs(p, device)
    with torch.no_grad():
        for x in (inputs.k, inputs.v):
            x[1, :shared] = x[0, :shared]
    call = in_pages(p, inputs, size)
    call["page_table"][1, : shared // size] = call["page_table"][0, : shared // size]
    out, lse = ops.forward(**call)
    assert_accurate({"out": out, "lse": lse}, expected(p, inputs), p.dtype)


def test_no_keys(device: str) -> None:
    for dtype in QK_8_BITS:
        q = torch.randn(2, 1, 4, 64, device=device).bfloat16()
        k = torch.full((4, 16, 2, 64), 127, dtype=torch.int8, device=device).view(dtype)
        table = torch.full((2, 3), -1, dtype=torch.int32, device=device)
        used = torch.zeros(2, dtype=torch.int32, device=device)
        for descale in (None, torch.full((2, 2), math.nan, device=device)):
            call = {"q": q, "k": k, "v": k, "page_table": table, "seqused_k": used}
            out, lse = ops.forward(**call, k_descale=descale)
            assert not out.any() and torch.all(lse == -torch.inf)


@pytest.mark.parametrize("factor", (0.0, 2.0**-100, 2.0**-20, 2.0**100))
def test_descales_of_any_size(factor: float, device: str) -> None:
    """Of V: results are finite, and 0 of a descale of 0. Of K the scores stay moderate by q."""
    p = problem(2, 1, 200, 4, 2, 64, k_descale="head", v_descale="head", seqused_k=(200, 70))
    call, inputs = paged(p, device, 16)
    out, lse = ops.forward(**call)
    more = ops.forward(**call | {"v_descale": call["v_descale"] * factor})
    assert torch.equal(more[1], lse)
    wanted = out.double() * factor
    torch.testing.assert_close(more[0].double(), wanted, rtol=2.0**-7, atol=1e-38)
    if 0 < factor < 1:
        large = {"q": call["q"] / factor, "k_descale": call["k_descale"] * factor}
        found = ops.forward(**call | large)
        torch.testing.assert_close(found[1], lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_wrong_numbers_on_the_device(dtype: torch.dtype) -> None:
    """Lengths past the table end with it, entries outside the pages become the nearest page."""
    call, _ = paged(base(1, kv_dtype=dtype, k_descale="head"), "cuda", 16, more=0)
    pages, table = call["k"].shape[0], call["page_table"]
    for x in (call["k"], call["v"]):
        x.copy_(x.float().nan_to_num(0.5).to(x.dtype))
    table[1, 0], table[4, 2] = 1 << 30, -7
    right = table.clamp(0, pages - 1)
    call["seqused_k"][1], call["seqused_k"][0] = 1 << 30, -5
    used = call["seqused_k"].clamp(0, table.shape[1] * 16)
    wanted = ops.forward(**call | {"page_table": right, "seqused_k": used})
    for found, x in zip(ops.forward(**call), wanted, strict=True):
        assert_bitwise_equal(found, x)


# --- What is refused ---


def test_what_pages_of_8_bits_do_not_have(device: str) -> None:
    call, _ = paged(base(1, k_descale="head", v_descale="head"), device, 16)
    eight = call | {"q": call["q"].to(FP8), "out_dtype": torch.bfloat16}
    with pytest.raises(ERRORS, match="variant 'fa3' has no page table with 8-bit inputs"):
        ops.forward(**eight)
    for variant in ("fa1", "fa2"):
        with pytest.raises(ERRORS, match=f"variant '{variant}' has no 8-bit inputs"):
            ops.forward(**call, variant=variant)
    with pytest.raises(ERRORS, match=r"k_descale must be one number, of shape \(batch, heads_k\)"):
        ops.forward(**call | {"k_descale": torch.ones(5, 2, 9, device=device)})


@pytest.mark.gpu
def test_rows_that_cp_async_cannot_load() -> None:
    call, _ = paged(base(1, head_dim=40, k_descale="head", v_descale="head"), "cuda", 16)
    odd = torch.zeros(*call["k"].shape[:3], 40, dtype=FP8, device="cuda")
    with pytest.raises(ERRORS, match="needs rows of k that start and end on 16-byte boundaries"):
        ops.forward(**call | {"k": odd, "v": odd})


# --- Rows that are quantized on their way ---


def quantized(seed: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A random call of append_kv with caches of 8 bits and rows of more. Some numbers are large,
    infinite or NaN, some descales tiny, huge or 0."""
    call, draw = some(seed, dtype), random.Random(seed + 7)
    torch.manual_seed(seed)
    for name in ("k_cache", "v_cache"):
        x = getattr(call, name)
        held = numbers(*x.shape, dtype=draw.choice(QK_8_BITS))
        if x.stride() != x.contiguous().stride():
            held = held.transpose(1, 2).contiguous().transpose(1, 2)
        setattr(call, name, held)
    for x in (call.k, call.v):
        if x.numel() > 8 and draw.random() < 0.3:
            at = torch.randint(0, x.numel(), (4,))
            x.view(-1)[at] = torch.tensor((math.inf, -math.inf, math.nan, 3e4), dtype=dtype)
    batch, heads = call.cache_seqlens.numel(), call.k.shape[-2]
    table = call.options.get("page_table")
    capacity = call.k_cache.shape[1] * (1 if table is None else table.shape[1])
    for name, last in (("k_descale", -(-capacity // DESCALE_ROWS)),
                       ("v_descale", call.v.shape[-1])):  # fmt: skip
        shape = draw.choice(((), (1,), (batch, heads), (batch, heads, last), None))
        if shape is None:
            continue
        descale = torch.rand(shape) * draw.choice((0.01, 1.0, 1e-30, 1e30))
        if descale.numel() > 1 and draw.random() < 0.3:
            descale.view(-1)[0] = draw.choice((0.0, 1e-42))
        call.options[name] = descale
    return call


LARGEST = {FP8: 448.0, torch.int8: 127.0}


def to_8_bits(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in float32, one by one: the nearest of the type, found by search."""
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    finite = table.isfinite() & (table.abs() <= LARGEST[dtype])
    codes = table.where(finite, math.inf).argsort()[: int(finite.sum())]
    found = torch.where(descale == 0, torch.zeros(()), x / descale)
    exact = found.double().clamp(-LARGEST[dtype], LARGEST[dtype])
    # Those around it, of which two may be 0.
    places = torch.searchsorted(table[codes], exact)[..., None] + torch.arange(-2, 2)
    near = codes[places.clamp(0, len(codes) - 1)]
    distance = (exact[..., None] - table[near]).abs()
    nearest = distance == distance.nan_to_num(math.inf).amin(-1, keepdim=True)
    negative = torch.signbit(found)[..., None] == (near >= 128)
    best = (nearest * (4 + 2 * (near % 2 == 0) + negative)).argmax(-1, keepdim=True)
    best = near.gather(-1, best).squeeze(-1)
    bits = torch.where(found.isnan(), 0 if dtype == torch.int8 else 127, best)
    return bits.to(torch.uint8).view(dtype)


def written(call: Call) -> tuple[Tensor, Tensor]:
    """The caches after the call, row by row."""
    options = call.options
    pages, size = call.k_cache.shape[:2]
    first = options.get("rotary_seqlens", call.cache_seqlens).tolist()
    table = options.get("page_table")
    caches = call.k_cache.clone(), call.v_cache.clone()
    for name, cache, new in zip("kv", caches, (call.k, call.v), strict=True):
        given = options.get(f"{name}_descale")
        for b, rows in enumerate(sequences(new, options.get("cu_seqlens_k"))):
            mine = [b] if table is None else table[b].tolist()
            for i, row in enumerate(rows.float()):
                at = int(call.cache_seqlens[b]) + i
                if not 0 <= at < size * len(mine) or not 0 <= mine[at // size] < pages:
                    continue
                if name == "k" and "q" in options:
                    row = rotated(row, first[b] + i, options)
                descale = torch.ones(()) if given is None else given
                if descale.dim() >= 2:
                    descale = descale[b]
                    if descale.dim() == 2 and name == "k":
                        descale = descale[:, at // DESCALE_ROWS]
                    descale = descale if descale.dim() == 2 else descale[:, None]
                cache[mine[at // size], at % size] = to_8_bits(row, descale, cache.dtype)
    return caches


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("seeds", range(4))
def test_random_appends(seeds: int, dtype: torch.dtype, device: str) -> None:
    for seed in range(25 * seeds, 25 * seeds + 25):
        call = quantized(seed, dtype)
        wanted = written(call)
        moved = call.to(device)
        result, _ = moved.run()
        for found, x in zip((moved.k_cache, moved.v_cache), wanted, strict=True):
            assert_same(found.cpu(), x)
        if "q" in call.options:
            assert_same(result.cpu(), call.run()[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_random_appends_of_more_bits(dtype: torch.dtype) -> None:
    for seed in range(40):
        call = quantized(seed, dtype)
        if dtype == torch.float64 and "q" in call.options:
            continue  # rotated in float64
        wanted = written(call)
        call.run()
        for found, x in zip((call.k_cache, call.v_cache), wanted, strict=True):
            assert_same(found, x)


def test_every_number_rounds_to_the_nearest(device: str) -> None:
    """All numbers of float16 by e4m3 and int8, and every number of 8 bits to itself."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x.view(1, 256, 1, 256)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype in QK_8_BITS:
        for descale in (1.0, 0.37, 2.0**-9, 100.0):
            caches = [torch.zeros(1, 256, 1, 256, dtype=dtype, device=device) for _ in "kv"]
            of = torch.tensor(descale)
            append_kv(*caches, x.to(device), x.to(device), lengths, k_descale=of.to(device),
                      v_descale=of.to(device))  # fmt: skip
            wanted = to_8_bits(x.float(), of, dtype)
            for cache in caches:
                assert_same(cache.cpu(), wanted)


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("seed", range(90))
def test_the_kernel(seed: int, native: ModuleType) -> None:
    """The CUDA kernel on the host, where it loads 16 bytes at a time and where it cannot."""
    call = quantized(2000 + seed)
    if "q" in call.options:
        call.options |= {f"rotary_{x}": call.options[f"rotary_{x}"].float() for x in ("cos", "sin")}
    wanted = written(call)
    whole = all(
        x.shape[-1] % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:-1])
        for x in call.tensors()[:4]
    )
    if "q" in call.options:
        dim = 2 * call.options["rotary_cos"].shape[1]
        whole &= dim % (8 if call.options["rotary_interleaved"] else 16) == 0
    caches = call.k_cache.clone(), call.v_cache.clone()
    for each in {False, whole}:
        call.k_cache.copy_(caches[0])
        call.v_cache.copy_(caches[1])
        run_native(native, call, each)
        for found, x in zip((call.k_cache, call.v_cache), wanted, strict=True):
            assert_same(found, x)


def small(device: str = "cpu", dtype: torch.dtype = FP8) -> Call:
    """A call that is accepted, with everything."""
    torch.manual_seed(0)
    new, cache = torch.randn(2, 3, 2, 16).half(), torch.zeros(5, 4, 2, 16).to(dtype)
    cos = torch.ones(20, 4)
    options = {
        "q": torch.randn(2, 3, 4, 16).half(), "page_table": torch.tensor([[0, 1], [2, 3]]).int(),
        "rotary_cos": cos, "rotary_sin": cos.clone(), "k_descale": torch.rand(2, 2) + 0.1,
        "v_descale": torch.rand(2, 2, 16) + 0.1,
    }  # fmt: skip
    lengths = torch.tensor([0, 3]).int()
    return Call(cache, cache.clone(), new, new.clone(), lengths, options).to(device)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another dtype of v": ("v must be float16", {"v": torch.zeros(2, 3, 2, 16).bfloat16()}),
    "v of 8 bits": ("v must be float16", {"v": torch.zeros(2, 3, 2, 16).to(FP8)}),
    "k in int32": ("k must be float8_e4m3fn", {"k": torch.zeros(2, 3, 2, 16).int()}),
    "k of 8 bits is not rotated": ("k_descale must be None unless", {
        "k": torch.zeros(2, 3, 2, 16).to(FP8), "v": torch.zeros(2, 3, 2, 16).to(FP8), "q": None,
        "rotary_cos": None, "rotary_sin": None}),
    "q's dtype": ("q must be float16", {"q": torch.zeros(2, 3, 4, 16).bfloat16()}),
    "k_descale's dtype": ("k_descale must be float32", {"k_descale": torch.ones(2, 2).half()}),
    "k_descale's shape": ("k_descale must be one number", {"k_descale": torch.ones(2)}),
    "k_descale's blocks": ("k_descale must be one number", {"k_descale": torch.ones(2, 2, 2)}),
    "v_descale's columns": ("v_descale must be one number", {"v_descale": torch.ones(2, 2, 15)}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "change"), REFUSED.values(), ids=REFUSED)
def test_errors_write_nothing(message: str, change: dict[str, Any], device: str) -> None:
    good = small(device)
    names = ("k_cache", "v_cache", "k", "v", "cache_seqlens")
    change = {name: None if x is None else x.to(device) for name, x in change.items()}
    given = dict(zip(names, good.tensors(), strict=True)) | good.options | change
    with pytest.raises(ERRORS, match=f"flash_ext: {message}"):
        append_kv(**given)
    assert not good.k_cache.float().any() and not good.v_cache.float().any()


def test_csrc_accepts_what_the_words_accept() -> None:
    load_host_side()
    for seed in range(60):
        call = quantized(seed, (torch.bfloat16, torch.float16)[seed % 2])
        assert words_of("refused_append_kv", call) == words_of("refusal_of_append_kv", call) == ""
    for message, change in REFUSED.values():
        call = small()
        for name, x in change.items():
            if name in ("k", "v"):
                setattr(call, name, x)
            else:
                call.options[name] = x
        why = words_of("refusal_of_append_kv", call)
        assert why.startswith(f"flash_ext: {message}"), why
        assert words_of("refused_append_kv", call) == why


def test_the_op_keeps_torch_s_rules(device: str) -> None:
    for dtype in QK_8_BITS:  # opcheck compares tensors before and after, not of e4m3
        schema = ("test_schema",) if dtype == torch.int8 else ()
        tests = (*schema, "test_faketensor", "test_aot_dispatch_dynamic")
        call = small(device, dtype)
        torch.library.opcheck(append_kv.default, call.tensors(), call.options, test_utils=tests)
        p = base(1, k_descale="head", v_descale="head", kv_dtype=dtype)
        options, _ = paged(p, device, 16)
        tensors = [options.pop(name).detach() for name in "qkv"]
        given = {name: x for name, x in options.items() if x is not None}
        torch.library.opcheck(ops.schemas.fwd, tensors, given, test_utils=tests)


# --- Attention with a cache ---


def serving(device: str, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> dict[str, Any]:
    """Two sequences of 3 and 9 keys in pages of 4, of which every other byte is a NaN's, with two
    new keys each, rotated."""
    torch.manual_seed(1)
    caches = [torch.full((6, 4, heads[1], 16), 127, dtype=torch.int8) for _ in "kv"]
    table = torch.tensor([[4, 1, -1], [0, 2, 5]], dtype=torch.int32)
    for cache in caches:
        for pages, length in zip(table.tolist(), (3, 9), strict=True):
            for i in range(length):
                cache[pages[i // 4], i % 4] = 2 * torch.randint(-30, 30, cache.shape[2:])
    call = {
        "q": torch.randn(2, 2, heads[0], 16).bfloat16(),
        "k_cache": caches[0].view(dtype), "v_cache": caches[1].view(dtype),
        "k": torch.randn(2, 2, heads[1], 16).bfloat16(),
        "v": torch.randn(2, 2, heads[1], 16).bfloat16(),
        "cache_seqlens": torch.tensor([3, 9], dtype=torch.int32), "page_table": table,
        "k_descale": torch.rand(2, heads[1]) / 50 + 0.01,
        "v_descale": torch.rand(2, heads[1]) / 50 + 0.01,
        "rotary_cos": torch.randn(12, 4), "rotary_sin": torch.randn(12, 4),
    }  # fmt: skip
    return {"causal": True} | {name: x.to(device) for name, x in call.items()}


def composed(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rotate, quantize, write, gather, dequantize, standard attention in float64: out, lse. Writes
    into the caches of the call."""
    tensors = [call[name] for name in ("k_cache", "v_cache", "k", "v", "cache_seqlens")]
    options = {name: call[name] for name in ("page_table", "rotary_cos", "rotary_sin", "k_descale",
                                             "v_descale")}  # fmt: skip
    of_q = options | {"q": call["q"], "rotary_interleaved": False, "q_at_one_position": False}
    caches = written(Call(*tensors, of_q))
    for cache, x in zip(tensors[:2], caches, strict=True):
        cache.copy_(x)
    outs, lses = [], []
    for b, held in enumerate(call["cache_seqlens"].tolist()):
        i = torch.arange(held + 2)
        at = call["page_table"][b].long()[i // 4], i % 4
        k, v = (
            cache[at].double() * call[f"{name}_descale"][b].double()[:, None]
            for name, cache in zip("kv", caches, strict=True)
        )
        q = torch.stack([rotated(row, held + j, of_q) for j, row in enumerate(call["q"][b])])
        out, lse = flash_ext.reference.attention(q[None].double(), k[None], v[None], causal=True)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_attention_with_cache(dtype: torch.dtype, device: str) -> None:
    plain = serving("cpu", dtype)
    wanted = composed(plain)
    call = serving(device, dtype)
    out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    torch.testing.assert_close(out.double().cpu(), wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double().cpu(), wanted[1], rtol=1e-2, atol=1e-2)
    for name in ("k_cache", "v_cache"):
        assert_same(call[name].cpu(), plain[name])


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("seeds", range(4))
def test_random_calls(seeds: int, dtype: torch.dtype, device: str) -> None:
    """Of test_cache.py without rotation: the same as with the numbers that the cache then holds."""
    for seed in range(50 * seeds, 50 * seeds + 50):
        case = some_call(seed)
        if "rotary_cos" in case.options or (device == "cuda" and case.q.shape[-1] % 16):
            continue
        heads, dim_v = case.k_cache.shape[2], case.v_cache.shape[3]
        batch = case.options.get("cu_seqlens_q", case.q).shape[0] - ("cu_seqlens_q" in case.options)
        of_k, of_v = torch.rand(heads) / 16 + 0.02, torch.rand(heads, dim_v) / 16 + 0.02
        eight = case.to(device)
        for name, x in (("k_cache", case.k_cache), ("v_cache", case.v_cache)):
            x = (16 * x).nan_to_num(127) if dtype == torch.int8 else 16 * x
            setattr(eight, name, x.to(dtype).to(device))
        eight.options |= {"k_descale": of_k.to(device),
                          "v_descale": of_v.expand(batch, heads, dim_v).to(device)}  # fmt: skip
        try:
            out, lse = eight.run()
            wide = case.to(device)
            wide.k_cache = (eight.k_cache.cpu().float() * of_k[:, None]).to(wide.k_cache)
            wide.v_cache = (eight.v_cache.cpu().float() * of_v).to(wide.v_cache)
            new = wide.options.pop("k", None)
            wide.options.pop("v", None)
            news = wide.options.pop("cu_seqlens_k_new", None)
            if new is not None:
                held = wide.options["cache_seqlens"]
                wide.options["cache_seqlens"] = held + (
                    new.shape[1] if news is None else news.diff()
                )
            for found, wanted in zip((out, lse), wide.run(), strict=True):
                assert_near(found, wanted.float().cpu())
        except Exception as error:
            raise AssertionError(f"seed {seed} has {sorted(case.options)}") from error


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_drop_ins_and_descales_of_heads(dtype: torch.dtype, device: str) -> None:
    """FlashAttention-3's flash_attn_with_kvcache, and (Hk) for all sequences."""
    call = serving(device, dtype)
    call |= {name: call[name][:1].expand(2, 2) for name in ("k_descale", "v_descale")}

    def fresh() -> dict[str, Any]:
        return call | {name: call[name].clone() for name in ("k_cache", "v_cache")}

    wanted_call = fresh()
    wanted = flash_ext.attention_with_cache(**wanted_call, return_lse=True)
    given = fresh()
    found = fa3.flash_attn_with_kvcache(**given, rotary_interleaved=False, return_softmax_lse=True)
    by_head = fresh()
    by_head |= {name: call[name][0] for name in ("k_descale", "v_descale")}
    mine = flash_ext.attention_with_cache(**by_head, return_lse=True)
    for x, y, z in zip(wanted, found, mine, strict=False):
        assert_bitwise_equal(x, y)
        assert_bitwise_equal(x, z)
    for name in ("k_cache", "v_cache"):
        assert_same(given[name], wanted_call[name])
        assert_same(by_head[name], wanted_call[name])


def test_dense_caches(device: str) -> None:
    """With an index and padding; flash-attn 2's has no descales: they are 1."""
    for dtype in QK_8_BITS:
        torch.manual_seed(2)
        caches = [torch.randint(-30, 30, (3, 40, 2, 16), dtype=torch.int8).to(dtype).to(device)
                  for _ in "kv"]  # fmt: skip
        q, k, v = (torch.randn(2, 1, heads, 16, device=device).bfloat16() for heads in (4, 2, 2))
        q = q / 30
        call = {"k": k, "v": v, "cache_seqlens": torch.tensor([30, 7]).int().to(device)}
        index = torch.tensor([2, 0]).int().to(device)
        pad = torch.tensor([5, 0]).int().to(device)
        numbers_of = [x.float()[index.long()].bfloat16() for x in caches]
        for x, new in zip(numbers_of, (k, v), strict=True):
            rounded = to_8_bits(new.float().cpu(), torch.ones(()), dtype).float().bfloat16()
            for b, n in enumerate((30, 7)):
                x[b, n] = rounded[b, 0].to(device)
        wanted = flash_ext.attention_with_cache(
            q, *numbers_of, cache_seqlens=call["cache_seqlens"] + 1, cache_leftpad=pad
        )
        found = fa3.flash_attn_with_kvcache(
            q, *[x.clone() for x in caches], **call, cache_batch_idx=index, cache_leftpad=pad
        )
        torch.testing.assert_close(found.float(), wanted.float(), rtol=3e-2, atol=3e-2)
        whole = fa2.flash_attn_with_kvcache(q, *[x.clone() for x in caches], **call)
        again = flash_ext.attention_with_cache(q, *[x.clone() for x in caches], **call)
        assert_bitwise_equal(whole, again)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("k_descale must be one number", {"k_descale": torch.ones(3, 2)}),
        ("v_descale must be one number", {"v_descale": torch.ones(2, 2, 15)}),
        ("k must be of q's dtype|k must be", {"k": torch.zeros(2, 2, 2, 16)}),
        ("v must be", {"v": torch.zeros(2, 2, 2, 16).half()}),
        ("batch_invariant must be False with 8-bit inputs", {"batch_invariant": True}),
    ],
)
def test_a_refused_call_writes_nothing(message: str, change: dict[str, Any], device: str) -> None:
    call = serving(device, FP8)
    before = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    change = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in change.items()}
    with pytest.raises(ERRORS, match=f"flash_ext: ({message})"):
        flash_ext.attention_with_cache(**call | change)
    for name, x in before.items():
        assert_same(call[name], x)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_compiled(dtype: torch.dtype, device: str) -> None:
    call, wanted_call = serving(device, dtype), serving(device, dtype)
    wanted = flash_ext.attention_with_cache(**wanted_call)
    function = torch.compile(flash_ext.attention_with_cache, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(function(**call), wanted)
    for name in ("k_cache", "v_cache"):
        assert_same(call[name], wanted_call[name])


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths_tables_and_descales() -> None:
    call = serving("cuda", FP8)
    changes = {
        "cache_seqlens": torch.tensor([6, 1], dtype=torch.int32, device="cuda"),
        "page_table": torch.tensor([[0, 2, 5], [4, 1, 3]], dtype=torch.int32, device="cuda"),
        "k_descale": call["k_descale"] * 2,
        "v_descale": call["v_descale"] / 3,
    }
    caches = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_ext.attention_with_cache(**call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_ext.attention_with_cache(**call)
    for given in ({}, changes):
        for name, x in (caches | given).items():
            call[name].copy_(x)
        graph.replay()
        plain = call | {name: x.clone() for name, x in caches.items()}
        wanted = flash_ext.attention_with_cache(**plain)
        assert_bitwise_equal(out, wanted)
        for name in caches:
            assert_same(call[name], plain[name])


def test_new_rows_beside_an_int8_q(device: str) -> None:
    """As they are: k in int8 and v in float8, as the caches."""
    q = torch.randint(-30, 30, (2, 3, 4, 64), dtype=torch.int8).to(device)
    k = torch.randint(-30, 30, (2, 3, 2, 64), dtype=torch.int8).to(device)
    v = torch.randn(2, 3, 2, 64).to(device).to(FP8)
    k_cache = torch.randint(-30, 30, (2, 20, 2, 64), dtype=torch.int8).to(device)
    v_cache = torch.randn(2, 20, 2, 64).to(device).to(FP8)
    written = [torch.cat((x[:, :9], new), 1) for x, new in ((k_cache, k), (v_cache, v))]
    options = {"causal": True, "scale": 1e-3, "out_dtype": torch.bfloat16}
    out = flash_ext.attention_with_cache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=9, **options)
    for cache, want in zip((k_cache, v_cache), written, strict=True):
        assert torch.equal(cache[:, :12].view(torch.uint8), want.view(torch.uint8))
    want = flash_ext.attention(q, *written, **options)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
