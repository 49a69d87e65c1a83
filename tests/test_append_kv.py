"""`torch.ops.flash_ext.append_kv`: new keys and values into a cache, rotated by their positions.

The op is compared with a composition in torch, on the CPU and on CUDA bit by bit; and the CUDA
kernel, compiled for the host, with the CPU's op. Would catch a row that goes to another page or
beside the cache, a -1 that is followed, an angle of another position or column, a pair that is
rotated the other way, a column past the rotated ones that changes, rounding that differs between
CPU and CUDA, and an argument that is refused after something was written.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import load_host_side, small_kernels

Tensor = torch.Tensor
append_kv = torch.ops.flash_ext.append_kv
FP8 = torch.float8_e4m3fn


@dataclass
class Call:
    """Arguments of the op, and what it must write."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.k_cache, self.v_cache, self.k, self.v, self.cache_seqlens

    def to(self, device: str) -> Call:
        """On a device, each tensor with its strides."""
        moved = {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()
        }
        return Call(*(x.to(device) for x in self.tensors()), moved)

    def run(self) -> tuple[Tensor, Tensor]:
        return append_kv(*self.tensors(), **self.options)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape)
    return x.to(dtype) if dtype.itemsize > 1 else (16 * x).to(torch.int8).view(dtype)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def some(seed: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A random call: dense or pages, packed or not, rotated or not, places outside of the cache."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, pages = draw.randrange(1, 5), draw.choice((1, 2, 5)), draw.choice((1, 2, 7))
    size, dim = draw.choice((1, 3, 8, 16)), draw.choice((8, 16, 20, 33, 64, 128))
    dim_v, new = draw.choice((dim, 16, 24)), draw.choice((0, 1, 2, 5, 11))
    options: dict[str, Any] = {}
    if draw.random() < 0.7:
        columns = draw.randrange(1, 6)
        table = torch.randint(-1, pages, (batch, columns), dtype=torch.int32)
        used = torch.randperm(batch * columns)[:pages]  # each page once: no two rows of one place
        options["page_table"] = table.fill_(-1)
        table.view(-1)[used] = torch.randperm(pages)[: used.numel()].int()
    else:
        pages, columns = batch + draw.randrange(3), 1
    held = [draw.randrange(-2, columns * size + 2) for _ in range(batch)]
    new_shape: tuple[int, ...] = (batch, new)
    if draw.random() < 0.4:
        lengths = [draw.randrange(5) for _ in range(batch)]
        options["cu_seqlens_k"], new_shape = offsets(lengths), (sum(lengths) + draw.randrange(3),)
    call = Call(
        numbers(pages, size, heads, dim, dtype=dtype), numbers(pages, size, heads, dim_v,
        dtype=dtype), numbers(*new_shape, heads, dim, dtype=dtype),
        numbers(*new_shape, heads, dim_v, dtype=dtype), torch.tensor(held, dtype=torch.int32),
        options,
    )  # fmt: skip
    if draw.random() < 0.3:
        call.k_cache = call.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    if dtype.itemsize > 1 and draw.random() < 0.7:
        half = draw.choice([n for n in (1, 4, 8, 10, 16, 32, 64) if 2 * n <= dim])
        q_shape: tuple[int, ...] = (batch, draw.choice((1, 3, 6)))
        if draw.random() < 0.4:
            lengths = [draw.randrange(5) for _ in range(batch)]
            options["cu_seqlens_q"], q_shape = offsets(lengths), (sum(lengths) + draw.randrange(3),)
        angles = torch.randn(draw.choice((4, 40)), half, dtype=torch.float64)
        of_angles = draw.choice((dtype, torch.float32))
        options |= {
            "q": numbers(*q_shape, 2 * heads, dim, dtype=dtype),
            "rotary_cos": angles.cos().to(of_angles), "rotary_sin": angles.sin().to(of_angles),
            "rotary_interleaved": draw.random() < 0.5, "q_at_one_position": draw.random() < 0.5,
        }  # fmt: skip
        if draw.random() < 0.3:
            options["rotary_seqlens"] = torch.randint(-1, 40, (batch,), dtype=torch.int32)
    return call


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The rows of each sequence, views."""
    if cu_seqlens is None:
        return list(x)
    edges = cu_seqlens.tolist()
    return [x[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def rotated(row: Tensor, position: int, options: dict[str, Any]) -> Tensor:
    """One row (H, D), column by column."""
    cos, sin = (options[f"rotary_{x}"] for x in ("cos", "sin"))
    wide, result = row.float() if row.dtype.itemsize < 4 else row, row.clone()
    for i in range(half := cos.shape[1]):
        a, b = (2 * i, 2 * i + 1) if options["rotary_interleaved"] else (i, i + half)
        known = 0 <= position < cos.shape[0]
        c, s = (x[position, i].to(wide.dtype) if known else torch.nan for x in (cos, sin))
        result[:, a] = wide[:, a] * c - wide[:, b] * s
        result[:, b] = wide[:, a] * s + wide[:, b] * c
    return result


def expected(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The caches after the call, and its result, row by row."""
    options = call.options
    caches = [call.k_cache.clone(), call.v_cache.clone()]
    pages, size = call.k_cache.shape[:2]
    first = options.get("rotary_seqlens", call.cache_seqlens).tolist()
    table = options.get("page_table")
    for j, (cache, new) in enumerate(zip(caches, (call.k, call.v), strict=True)):
        for b, rows in enumerate(sequences(new, options.get("cu_seqlens_k"))):
            mine = [b] if table is None else table[b].tolist()
            for i, row in enumerate(rows):
                at = int(call.cache_seqlens[b]) + i
                if not 0 <= at < size * len(mine) or not 0 <= mine[at // size] < pages:
                    continue
                if j == 0 and "q" in options:
                    row = rotated(row, first[b] + i, options)
                cache[mine[at // size], at % size] = row
    if "q" not in options:
        return *caches, call.k.new_empty(0)
    result = options["q"].clone()
    for b, rows in enumerate(sequences(result, options.get("cu_seqlens_q"))):
        for i, row in enumerate(rows):
            row.copy_(rotated(row, first[b] + (0 if options["q_at_one_position"] else i), options))
    return *caches, result


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Bit by bit, but for the bits of a NaN."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if found.dtype.itemsize == 1:
        found, wanted = found.view(torch.int8), wanted.view(torch.int8)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


DTYPES = (torch.bfloat16, torch.float16, FP8, torch.int8)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32, torch.float64))
@pytest.mark.parametrize("seeds", range(4))
def test_random_calls(seeds: int, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype not in DTYPES:
        pytest.skip("for CPUs")
    for seed in range(25 * seeds, 25 * seeds + 25):
        call = some(seed, dtype)
        wanted = expected(call)
        moved = call.to(device)
        result, used = moved.run()
        assert result.is_contiguous()
        assert_same(used.cpu(), lengths_after(call))
        for x, y in zip((moved.k_cache, moved.v_cache, result), wanted, strict=True):
            assert_same(x.cpu(), y)


def test_nothing_new(device: str) -> None:
    cache, none = torch.ones(2, 4, 1, 8).half().to(device), torch.ones(2, 0, 1, 8).half().to(device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    result, used = append_kv(cache, cache.clone(), none, none, lengths)
    assert result.shape == (0,) and not used.any()
    assert (cache == 1).all()


def lengths_after(call: Call) -> Tensor:
    edges = call.options.get("cu_seqlens_k")
    return call.cache_seqlens + (call.k.shape[1] if edges is None else edges.diff())


def plain() -> Call:
    """A call that is accepted, with everything."""
    torch.manual_seed(0)
    new, cache = torch.randn(2, 3, 2, 16).half(), torch.zeros(5, 4, 2, 16).half()
    cos = torch.ones(20, 4)
    options = {
        "q": torch.randn(2, 3, 4, 16).half(), "page_table": torch.tensor([[0, 1], [2, 3]]).int(),
        "rotary_cos": cos, "rotary_sin": cos.clone(), "rotary_seqlens": torch.ones(2).int(),
    }  # fmt: skip
    return Call(cache, cache.clone(), new, new.clone(), torch.tensor([0, 3]).int(), options)


ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "k_cache of three dimensions": ("k_cache must be of shape",
                                    {"k_cache": torch.zeros(4, 2, 16).half()}),
    "k_cache in int32": ("k_cache must be float16", {"k_cache": torch.zeros(5, 4, 2, 16).int()}),
    "one page": ("v_cache must be of shape", {"v_cache": torch.zeros(1, 4, 2, 16).half()}),
    "v_cache of another dtype": ("v_cache must be float16", {"v_cache": torch.zeros(5, 4, 2, 16)}),
    "columns": ("k_cache must be contiguous in its last",
                {"k_cache": torch.zeros(5, 4, 16, 2).half().mT}),
    "no rows": ("k_cache must be of pages with", dict.fromkeys(
        ("k_cache", "v_cache"), torch.zeros(5, 0, 2, 16).half())),
    "heads": ("k must be of shape", {"k": torch.zeros(2, 3, 1, 16).half()}),
    "rows of v": ("v must be of shape", {"v": torch.zeros(2, 2, 2, 16).half()}),
    "k's dtype": ("k must be float16", {"k": torch.zeros(2, 3, 2, 16)}),
    "descales": ("k_descale must be None unless", {"k_descale": torch.ones(())}),
    "k packed": ("k must be of shape", {"k": torch.zeros(6, 2, 16).half()}),
    "v is strided": ("v must be contiguous in", {"v": torch.zeros(2, 3, 16, 2).half().mT}),
    "lengths in int64": ("cache_seqlens must be int32", {"cache_seqlens": torch.zeros(2).long()}),
    "lengths of a matrix": ("cache_seqlens must be of shape",
                            {"cache_seqlens": torch.zeros(2, 1).int()}),
    "offsets": ("cu_seqlens_k must be of shape",
                {"k": torch.zeros(6, 2, 16).half(), "v": torch.zeros(6, 2, 16).half(),
                 "cu_seqlens_k": torch.zeros(2).int()}),
    "a table of one": ("page_table must be of shape", {"page_table": torch.zeros(1, 2).int()}),
    "a table in int64": ("page_table must be int32", {"page_table": torch.zeros(2, 2).long()}),
    "no table": ("k_cache must be of a batch of at least 2", {
        "page_table": None, "k_cache": torch.zeros(1, 4, 2, 16).half(),
        "v_cache": torch.zeros(1, 4, 2, 16).half()}),
    "cos alone": ("rotary_sin must be given", {"rotary_sin": None}),
    "without q": ("rotary_cos must be None without q", {"q": None}),
    "cos of one": ("rotary_cos must be of shape", {"rotary_cos": torch.ones(20)}),
    "wide cos": ("rotary_cos must be of shape", {"rotary_cos": torch.ones(20, 9)}),
    "no angles": ("rotary_cos must be of shape", {"rotary_cos": torch.ones(20, 0)}),
    "no positions": ("rotary_cos must be of 1 position", {"rotary_cos": torch.ones(0, 4)}),
    "sin": ("rotary_sin must be of shape", {"rotary_sin": torch.ones(19, 4)}),
    "sin's dtype": ("rotary_sin must be float32", {"rotary_sin": torch.ones(20, 4).half()}),
    "cos in bfloat16": ("rotary_cos must be float16 or float32",
                        {"rotary_cos": torch.ones(20, 4).bfloat16()}),
    "cos is strided": ("rotary_cos must be contiguous", {"rotary_cos": torch.ones(4, 20).T}),
    "q's dtype": ("q must be float16", {"q": torch.zeros(2, 3, 4, 16)}),
    "q's columns": ("q must be of shape", {"q": torch.zeros(2, 3, 4, 8).half()}),
    "q packed": ("q must be of shape", {"q": torch.zeros(6, 4, 16).half()}),
    "offsets of q": ("cu_seqlens_q must be of shape",
                     {"q": torch.zeros(6, 4, 16).half(), "cu_seqlens_q": torch.zeros(9).int()}),
    "positions": ("rotary_seqlens must be of shape", {"rotary_seqlens": torch.ones(3).int()}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "change"), ERRORS.values(), ids=ERRORS)
def test_errors_write_nothing(message: str, change: dict[str, Any], device: str) -> None:
    good = plain()
    given = dict(zip(("k_cache", "v_cache", "k", "v", "cache_seqlens"), good.tensors(),
                     strict=True)) | good.options | change  # fmt: skip
    given = {n: x if x is None else x.to(device) for n, x in given.items()}
    with pytest.raises((ValueError, RuntimeError), match=f"flash_ext: {message}"):
        append_kv(**given)
    assert not given["k_cache"].any() and not given["v_cache"].any()


def words_of(op: str, call: Call) -> str:
    names = ("q", "page_table", "cu_seqlens_q", "cu_seqlens_k", "rotary_cos", "rotary_sin",
             "rotary_seqlens")  # fmt: skip
    names = (*names, "k_descale", "v_descale")
    tensors = {name: call.options.get(name) for name in names}
    flags = {name: call.options.get(name, False)
             for name in ("rotary_interleaved", "q_at_one_position")}  # fmt: skip
    return str(getattr(torch.ops.flash_ext, op)(*call.tensors(), **tensors, **flags))


def test_csrc_accepts_what_the_words_accept() -> None:
    """The conditions of csrc, where the CPU is its device, beside flash_ext/cpu/append_kv.py."""
    load_host_side()
    for seed in range(60):
        call = some(seed, DTYPES[seed % 4])
        assert words_of("refused_append_kv", call) == words_of("refusal_of_append_kv", call) == ""
    for message, change in ERRORS.values():
        call = plain()
        for name, x in change.items():
            if name in ("k_cache", "v_cache", "k", "v", "cache_seqlens"):
                setattr(call, name, x)
            else:
                call.options[name] = x
        why = words_of("refusal_of_append_kv", call)
        assert re.match(f"flash_ext: {message}", why), why
        assert words_of("refused_append_kv", call) == why


def test_a_cache_has_memory_for_each_element(device: str) -> None:
    call = plain().to(device)
    call.k_cache = call.k_cache[:1].expand(5, -1, -1, -1)
    with pytest.raises((ValueError, RuntimeError), match="k_cache must be of separate memory"):
        call.run()


def test_8_bits_are_not_rotated() -> None:
    call = plain()
    call.k_cache, call.v_cache, call.k, call.v = (x.to(FP8) for x in call.tensors()[:4])
    with pytest.raises(ValueError, match="k must be of 16 bits or more"):
        call.run()


def test_the_op_keeps_torch_s_rules(device: str) -> None:
    """Schema, fake kernel, functionalization, tracing."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    call = plain().to(device)
    for options in (call.options, {}):
        torch.library.opcheck(append_kv.default, call.tensors(), options, test_utils=tests)


def test_autograd_notices_the_write() -> None:
    call, x = plain(), torch.ones(5, 4, 2, 16).half().requires_grad_()
    product = x * call.k_cache
    call.run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# --- The CUDA kernel, on the host ---


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return small_kernels("flash_ext_append_kv")


def truncated(x: Tensor) -> Tensor:
    """float32 to bfloat16, as the host's kernel does."""
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def run_native(native: ModuleType, call: Call, whole: bool) -> tuple[Tensor, Tensor]:
    """The kernel with the call's tensors. Angles are float32."""
    options = call.options
    q, table = options.get("q"), options.get("page_table")
    result = call.k.new_empty(0) if q is None else torch.empty_like(q)

    def address(x: Tensor | None) -> int:
        return 0 if x is None else x.data_ptr()

    def view(x: Tensor) -> object:
        return native.View(x.data_ptr(), [0, *x.stride()][-4:-1])

    rows = []
    for from_, to, cu_seqlens in (
        (call.k, call.k_cache, "cu_seqlens_k"),
        (call.v, call.v_cache, "cu_seqlens_k"),
        *(() if q is None else ((q, result, "cu_seqlens_q"),)),
    ):
        flags = (to is not result, q is not None and to is not call.v_cache,
                 to is result and options["q_at_one_position"])  # fmt: skip
        sizes = list(from_.shape[-3:])
        rows.append(native.Rows(view(from_), view(to), sizes, address(options.get(cu_seqlens)),
                                *flags))  # fmt: skip
        if to.element_size() < from_.element_size():
            of_v = to is call.v_cache
            descale = options.get("v_descale" if of_v else "k_descale")
            steps = [0] * 3 if descale is None else [*descale.stride(), 0, 0, 0][:3]
            steps = steps if descale is not None and descale.dim() > 1 else [0] * 3
            last = descale.shape[2] - 1 if descale is not None and descale.dim() > 2 else 0
            rows[-1].quantize(to.dtype == torch.int8, address(descale), [*steps, last], of_v)
    pages, size = call.k_cache.shape[:2]
    held = call.cache_seqlens.tolist()
    cos = options.get("rotary_cos")
    used = native.append(
        8 * call.k.element_size(), whole, held, size * (1 if table is None else table.shape[1]),
        address(table), [0 if table is None else table.stride(0), pages, size], address(cos),
        address(options.get("rotary_sin")), [0, 0] if cos is None else list(cos.shape),
        options.get("rotary_interleaved", False),
        options.get("rotary_seqlens", call.cache_seqlens).tolist(), rows,
    )  # fmt: skip
    return result, torch.tensor(used, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(150))
def test_the_kernel(seed: int, native: ModuleType) -> None:
    dtype = (torch.bfloat16, torch.bfloat16, torch.int8)[seed % 3]
    call, options = some(1000 + seed, dtype), {}
    columns = 16 // dtype.itemsize
    whole = all(
        x.shape[-1] % columns == 0 and all(n % columns == 0 for n in x.stride()[:-1])
        for x in call.tensors()[:4]
    )
    if "q" in call.options:
        options = {f"rotary_{x}": call.options[f"rotary_{x}"].float() for x in ("cos", "sin")}
        call.options |= options
        rotary_dim = 2 * options["rotary_cos"].shape[1]
        whole &= rotary_dim % (8 if call.options["rotary_interleaved"] else 16) == 0
    # As the kernel rounds on the host: the CPU's op in float32, then truncated.
    wide = call.to("cpu")
    if dtype == torch.bfloat16:
        wide.k_cache, wide.v_cache, wide.k, wide.v = (x.float() for x in call.tensors()[:4])
        if "q" in call.options:
            wide.options["q"] = call.options["q"].float()
    wide_result, wide_used = wide.run()
    caches = call.k_cache.clone(), call.v_cache.clone()
    for each in {False, whole}:
        call.k_cache.copy_(caches[0])
        call.v_cache.copy_(caches[1])
        result, used = run_native(native, call, each)
        assert_same(used, wide_used)
        found = call.k_cache, call.v_cache, result
        for x, y in zip(found, (wide.k_cache, wide.v_cache, wide_result), strict=True):
            assert_same(x, y if dtype == torch.int8 else truncated(y))
