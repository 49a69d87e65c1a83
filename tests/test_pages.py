"""K and V in pages, by the op's option page_table: every kernel against standard attention.

Would catch a row taken from the wrong page or from the wrong row of one, an entry of the table that
is followed though no key in use needs it (they are -1, or point at pages full of NaN), rows that
a page has past the last key (NaN, too), a table indexed by the wrong sequence or with the wrong
row stride, lengths past the table, and calls without kernels that run all the same.

The rule is that of attention_testing.py. A problem has its keys in rows; `in_pages` deals them out
to pages, and what is expected are the results with the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    Inputs,
    Problem,
    assert_accurate,
    assert_all_bitwise_equal,
    assert_bitwise_equal,
    attend,
    device_unsupported_reason,
    expected_forward,
    make_inputs,
    nan_filled_outputs,
    options_of,
    statistics_dtype,
)

import flash_ext
import flash_ext.reference
from flash_ext import ops

Tensor = torch.Tensor
Call = dict[str, Any]
ERRORS = (ValueError, RuntimeError)
SIZES = (1, 3, 8, 16, 48, 64, 128, 256)
LENGTHS = (0, 300, 1, 129, 256)
POISON = 1 << 30
BY_CP_ASYNC = "loads pages for many queries"
"""What fa3 says where its kernel for many queries cannot load the pages."""


def lengths_k(p: Problem) -> list[int]:
    return [keys for _, keys in p.sequences()]


def _paged(rows: list[Tensor], table: list[list[int]], pages: int, size: int) -> Tensor:
    """The rows of each sequence in the pages of its row of the table, NaN everywhere else."""
    heads, dim = rows[0].shape[-2:]
    step = 16 // rows[0].element_size()
    shape = (pages, size + 1, heads + 1, (dim + step - 1) // step * step + step)
    poison = 127 if rows[0].dtype == torch.int8 else float("nan")
    found = torch.full(shape, poison, device=rows[0].device, dtype=rows[0].dtype)
    found = found[:, :size, :heads, :dim]
    for own, numbers in zip(rows, table, strict=True):
        for number, part in zip(numbers, own.split(size), strict=False):  # one empty part of none
            found[number, : len(part)] = part
    return found


def in_pages(p: Problem, inputs: Inputs, size: int, more: int = 1, tight: bool = False) -> Call:
    """The arguments of the op with K and V in pages of this size, in random order.

    The table has `more` columns than the longest sequence needs; entries without a use are -1, or
    point at a page of NaN. tight: pages have no gaps between their rows.
    """
    lengths = lengths_k(p)
    if p.packed:
        starts = inputs.cu_seqlens_k.tolist()[:-1]
        rows = [[x[b : b + n] for b, n in zip(starts, lengths, strict=True)]
                for x in (inputs.k, inputs.v)]  # fmt: skip
    else:
        rows = [[x[b, :n] for b, n in enumerate(lengths)] for x in (inputs.k, inputs.v)]
    counts = [-(-n // size) for n in lengths]
    pages = sum(counts) + 3
    generator = torch.Generator().manual_seed(p.seed + size)
    numbers = torch.randperm(pages, generator=generator).tolist()
    table = [[numbers.pop() for _ in range(n)] for n in counts]
    columns = max(counts, default=0) + more
    unused = itertools.cycle((-1, numbers[0], POISON, -POISON))
    whole = [[*own, *(next(unused) for _ in range(columns - len(own)))] for own in table]
    stored = torch.full((p.batch, columns + 2), POISON, dtype=torch.int32)
    stored[:, 1:-1] = torch.tensor(whole, dtype=torch.int32).view(p.batch, columns)
    device = inputs.q.device
    k, v = (_paged([x.detach() for x in own], table, pages, size) for own in rows)
    if tight:
        k, v = k.contiguous(), v.contiguous()
    call = {
        "q": inputs.q.detach(),
        "k": k,
        "v": v,
        "page_table": stored.to(device)[:, 1:-1],
        "seqused_k": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    if p.packed:
        call["cu_seqlens_q"] = inputs.cu_seqlens_q
    options = options_of(p)
    options["window_left"], options["window_right"] = options.pop("window")
    given = {name: x.detach() for name, x in inputs.options().items() if name != "seqused_k"}
    return call | options | given


@torch.no_grad()
def run(call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    with nan_filled_outputs():
        return ops.forward(**call | more)


def reason_against(call: Call, variant: str) -> str | None:
    """What explain has against a variant."""
    call = dict(call)
    window = call.pop("window_left", -1), call.pop("window_right", -1)
    return flash_ext.explain(**call, window=window).reasons[variant]


def check(p: Problem, device: str, variant: str, size: int, **more: Any) -> None:
    """Run a problem in pages, and hold out and lse against standard attention of the rows."""
    inputs = make_inputs(p, device)
    call = in_pages(p, inputs, size, **more)
    if variant == "fa3" and (reason := reason_against(call, "fa3")):
        few = p.seqlen_q * p.heads_q // p.heads_k <= 16 and not p.packed
        options = p.softcap or p.alibi or (p.scale is not None and p.scale <= 0)
        unaligned = p.head_dim % 8 or (p.dim_v % 8)
        assert (size % 8 and not few) or options or unaligned, reason
        return
    out, lse = run(call, variant=variant)
    assert_accurate({"out": out, "lse": lse}, expected_forward(p, inputs), p.dtype)
    if p.packed:
        assert not out[None][~p.used_rows("q").to(device)].any(), "rows without a sequence"


VARIANTS = {"cpu": ("fa2",), "cuda": ("fa2", "fa3")}


def on_each() -> Any:
    """Parametrize by device and variant."""
    cases = [
        pytest.param(device, variant, marks=pytest.mark.gpu if device == "cuda" else ())
        for device, variants in VARIANTS.items()
        for variant in variants
    ]
    return pytest.mark.parametrize("device, variant", cases)


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """The tests of fa3 run on a GPU that has it."""
    arguments = getattr(getattr(request.node, "callspec", None), "params", {})
    on_gpu = request.node.get_closest_marker("gpu") is not None
    on_gpu = on_gpu and arguments.get("variant") == "fa3"
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def base(seqlen_q: int = 5, **fields: Any) -> Problem:
    defaults = {"batch": len(LENGTHS), "seqlen_k": max(LENGTHS), "heads_q": 4, "heads_k": 2,
                "head_dim": 64, "seqused_k": LENGTHS, "loss": "out"}  # fmt: skip
    return Problem(**defaults | {"seqlen_q": seqlen_q} | fields)


# --- Sizes and shapes ---


@on_each()
@pytest.mark.parametrize("seqlen_q", (1, 5, 64, 300))
@pytest.mark.parametrize("size", SIZES)
def test_page_sizes(size: int, seqlen_q: int, device: str, variant: str) -> None:
    check(base(seqlen_q, causal=seqlen_q > 1), device, variant, size)


@on_each()
@pytest.mark.parametrize("seqlen_q", (1, 150))
@pytest.mark.parametrize("dims", KERNEL_DIMS, ids=str)
@pytest.mark.parametrize("size", (3, 16, 256))
def test_head_dims(
    size: int, dims: tuple[int, int], seqlen_q: int, device: str, variant: str
) -> None:
    d, dv = dims
    check(base(seqlen_q, head_dim=d, head_dim_v=dv, dtype=torch.float16), device, variant, size)


@on_each()
@pytest.mark.parametrize("d", (40, 72, 80, 168))
def test_padded_head_dims(d: int, device: str, variant: str) -> None:
    for seqlen_q in (1, 70):
        check(base(seqlen_q, head_dim=d), device, variant, 24)


@on_each()
@pytest.mark.parametrize("heads", ((1, 1), (3, 3), (8, 1), (12, 2), (24, 1)), ids=str)
@pytest.mark.parametrize("size", (1, 8, 64))
def test_heads(size: int, heads: tuple[int, int], device: str, variant: str) -> None:
    for seqlen_q in (1, 6):
        p = base(seqlen_q, heads_q=heads[0], heads_k=heads[1], causal=True)
        check(p, device, variant, size)


@on_each()
@pytest.mark.parametrize("size", (1, 7, 16, 40, 128))
@pytest.mark.parametrize("lengths_q", ((5, 0, 1, 64, 300), (1, 1, 0, 1, 1)), ids=str)
def test_varlen_queries(size: int, lengths_q: tuple[int, ...], device: str, variant: str) -> None:
    """Chunks of prefill and decoding rows beside each other, after prefixes of any length."""
    for causal in (False, True):
        p = Problem(lengths_q=lengths_q, lengths_k=(70, 300, 1, 0, 333), heads_q=4, heads_k=2,
                    causal=causal, loss="out")  # fmt: skip
        check(p, device, variant, size)


OPTIONS: dict[str, Call] = {
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
    "causal window": {"window": (70, -1), "causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.2},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "alibi": {"alibi": "bh"},
    "all": {"causal": True, "window": (90, 0), "softcap": 3.0, "sink": True, "alibi": "h"},
}


@on_each()
@pytest.mark.parametrize("seqlen_q", (1, 5, 64, 300))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, seqlen_q: int, device: str, variant: str) -> None:
    for size in (5, 32):
        check(base(seqlen_q, **OPTIONS[name]), device, variant, size)


@pytest.mark.share(1 / 2)
@on_each()
@pytest.mark.parametrize("size", (1, 16, 24, 64, 256))
@pytest.mark.parametrize("seqlen_q", (1, 4))
def test_decoding_of_long_sequences(size: int, seqlen_q: int, device: str, variant: str) -> None:
    """Splits of the keys, some of which are past the end."""
    lengths = (1200, 7) if device == "cpu" else (9000, 2)
    for heads in ((8, 1), (32, 8)):
        p = Problem(
            2, seqlen_q, lengths[0], *heads, 128, causal=True, seqused_k=lengths, loss="out"
        )
        check(p, device, variant, size, more=7)


@on_each()
@pytest.mark.parametrize("size", (16, 200))
def test_prefill_after_a_prefix(size: int, device: str, variant: str) -> None:
    """Many tiles of queries, and splits of few."""
    keys = 700 if device == "cpu" else 3000
    for batch, seqlen_q, d in ((1, 130, 128), (3, 520, 128), (1, 140, 256), (2, 300, 96)):
        used = (keys, 513, 600)[:batch]
        p = Problem(batch, seqlen_q, keys, 4, 2, d, causal=True, seqused_k=used, loss="out")
        check(p, device, variant, size)


@on_each()
def test_many_sequences(device: str, variant: str) -> None:
    """Of which each has its own row of the table."""
    lengths = tuple(i * 37 % 200 for i in range(80))
    for size, seqlen_q in ((1, 1), (16, 1), (8, 9)):
        check(base(seqlen_q, batch=80, seqused_k=lengths, seqlen_k=200), device, variant, size)


@on_each()
@pytest.mark.parametrize("size", (1, 16, 48))
@pytest.mark.parametrize("seqlen_q", (1, 200))
def test_pages_without_gaps(size: int, seqlen_q: int, device: str, variant: str) -> None:
    check(base(seqlen_q), device, variant, size, tight=True)


@on_each()
def test_shared_pages(device: str, variant: str) -> None:
    """Two sequences with a prefix in the same pages, and one in the same pages altogether."""
    size, shared = 16, 96
    for seqlen_q in (1, 70):
        p = Problem(3, seqlen_q, 200, 4, 2, 64, seqused_k=(200, 150, 200), loss="out")
        inputs = make_inputs(p, device)
        with torch.no_grad():
            for x in (inputs.k, inputs.v):
                x[1, :shared] = x[0, :shared]
                x[2, :200] = x[0, :200]
        call = in_pages(p, inputs, size)
        table = call["page_table"]
        table[1, : shared // size] = table[0, : shared // size]
        table[2] = table[0]
        out, lse = run(call, variant=variant)
        assert_accurate({"out": out, "lse": lse}, expected_forward(p, inputs), p.dtype)


@on_each()
@pytest.mark.parametrize("layout", ("odd_row", "odd_offset"))
def test_queries_from_any_address(layout: str, device: str, variant: str) -> None:
    for seqlen_q in (1, 64):
        check(base(seqlen_q, layout=layout), device, variant, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("d", (20, 33, 64))
def test_pages_at_any_address(d: int) -> None:
    """fa3 refuses them, by name, and "auto" takes fa2."""
    for size, seqlen_q in ((3, 1), (16, 70)):
        p = base(seqlen_q, head_dim=d, causal=True)
        inputs = make_inputs(p, "cuda")
        call = in_pages(p, inputs, size)
        for name in "kv":
            x = call[name]
            odd = torch.full((x.numel() * 2 + 1,), float("nan"), dtype=x.dtype, device="cuda")
            strides = (size * 2 * (d + 1), 2 * (d + 1), d + 1, 1)
            odd = odd[1:].as_strided(x.shape, strides) if d > 1 else odd
            call[name] = odd.copy_(x)
        if reason := device_unsupported_reason("fa3", "cuda"):
            assert reason
        else:
            assert "16-byte boundaries" in str(reason_against(call, "fa3"))
        out, lse = run(call)
        assert_accurate({"out": out, "lse": lse}, expected_forward(p, inputs), p.dtype)


# --- Nothing to see ---


@on_each()
@pytest.mark.parametrize("seqlen_q", (1, 70))
def test_no_keys(seqlen_q: int, device: str, variant: str) -> None:
    for size, more, pages in ((8, 0, 0), (16, 0, 4), (16, 2, 4)):
        q = torch.randn(2, seqlen_q, 4, 64, device=device, dtype=torch.bfloat16)
        k = torch.full((pages, size, 2, 64), float("nan"), device=device, dtype=q.dtype)
        table = torch.full((2, more), -1, dtype=torch.int32, device=device)
        used = torch.zeros(2, dtype=torch.int32, device=device)
        out, lse = run({"q": q, "k": k, "v": k, "page_table": table, "seqused_k": used},
                       variant=variant)  # fmt: skip
        assert not out.any() and torch.all(lse == -torch.inf)


@on_each()
def test_no_sequence(device: str, variant: str) -> None:
    q = torch.randn(0, 3, 4, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(5, 8, 2, 64, device=device, dtype=q.dtype)
    table = torch.zeros(0, 4, dtype=torch.int32, device=device)
    used = torch.zeros(0, dtype=torch.int32, device=device)
    call = {"q": q, "k": k, "v": k, "page_table": table, "seqused_k": used}
    assert run(call, variant=variant)[0].shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS["cuda"])
@pytest.mark.parametrize("size", (1, 16))
@pytest.mark.parametrize("seqlen_q", (1, 150))
def test_wrong_numbers_on_the_device(size: int, seqlen_q: int, variant: str) -> None:
    """Lengths past the table end with it, entries outside the pages become the nearest page."""
    p = base(seqlen_q)
    call = in_pages(p, make_inputs(p, "cuda"), size, more=0)
    if variant == "fa3" and reason_against(call, "fa3"):
        return
    pages, table = call["k"].shape[0], call["page_table"]
    for x in (call["k"], call["v"]):
        x.nan_to_num_(0.5)
    table[1, 0], table[4, 2] = POISON, -7
    right = table.clamp(0, pages - 1)
    call["seqused_k"][1] = POISON
    call["seqused_k"][0] = -5
    used = call["seqused_k"].clamp(0, table.shape[1] * size)
    found = run(call, variant=variant)
    assert_all_bitwise_equal(
        dict(zip(("out", "lse"), found, strict=True)),
        dict(zip(("out", "lse"), run(call | {"page_table": right, "seqused_k": used},
                                     variant=variant), strict=True)))  # fmt: skip


# --- The reference, and the CPU kernels ---


@pytest.mark.parametrize("size", (1, 7, 64))
@pytest.mark.parametrize("packed", (False, True))
def test_the_reference_has_pages(packed: bool, size: int) -> None:
    lengths = {"lengths_q": (5, 0, 9), "lengths_k": (70, 3, 0)}
    p = Problem(**lengths, dtype=torch.float64) if packed else base(5, dtype=torch.float64)
    p = dataclasses.replace(p, head_dim=16, causal=True, sink=True)
    inputs = make_inputs(p, "cpu")
    call = in_pages(p, inputs, size)
    call["k"], call["v"] = (x.nan_to_num(1e9) for x in (call["k"], call["v"]))
    window = call.pop("window_left"), call.pop("window_right")
    q, k, v = (call.pop(name) for name in "qkv")
    if packed:
        offsets = call.pop("cu_seqlens_q")
        found = flash_ext.reference.attention_varlen(q, k, v, offsets, None, window=window, **call)
    else:
        found = flash_ext.reference.attention(q, k, v, window=window, **call)
    torch.testing.assert_close(found, attend(p, inputs, flash_ext.reference))


def test_no_gap_is_read_on_the_cpu() -> None:
    """The same bits as with rows."""
    p = base(5, dtype=torch.float32, causal=True)
    inputs = make_inputs(p, "cpu")
    found = run(in_pages(p, inputs, 16))
    rows = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "seqused_k": inputs.seqused_k}
    wanted = run({n: x.detach() for n, x in rows.items()}, causal=True)
    for x, y in zip(found, wanted, strict=True):
        assert_bitwise_equal(x, y)


# --- Which kernels run ---


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ("fa3",))
@pytest.mark.parametrize("seqlen_q, size, runs", (
    (1, 1, True), (1, 48, True), (4, 3, True), (300, 8, True), (300, 48, True), (300, 256, True),
    (300, 1, False), (300, 20, False),
))  # fmt: skip
def test_what_fa3_runs(seqlen_q: int, size: int, runs: bool, variant: str) -> None:
    p = base(seqlen_q, causal=True)
    call = in_pages(p, make_inputs(p, "cuda"), size)
    reason = reason_against(call, variant)
    assert runs == (reason is None), reason
    if not runs:
        assert BY_CP_ASYNC in reason
        with pytest.raises(ERRORS, match=BY_CP_ASYNC):
            run(call, variant=variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ("fa3",))
def test_decoding_has_the_bits_of_rows(variant: str) -> None:
    """The same kernel in all but where rows are, if the table has as many keys as the rows."""
    p = Problem(3, 1, 640, 8, 2, 128, seqused_k=(640, 77, 300), loss="out")
    inputs = make_inputs(p, "cuda")
    rows = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "seqused_k": inputs.seqused_k}
    wanted = run({n: x.detach() for n, x in rows.items()}, variant=variant)
    for size in (1, 5, 16, 64, 128, 640):
        for x, y in zip(run(in_pages(p, inputs, size, more=0), variant=variant), wanted,
                        strict=True):  # fmt: skip
            assert_bitwise_equal(x, y)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_explain(device: str) -> None:
    p = base()
    call = in_pages(p, make_inputs(p, device), 16)
    window = call.pop("window_left"), call.pop("window_right")
    found = flash_ext.explain(**call, window=window)
    assert found.variant in ("fa2", "fa3") and found.backward is None
    assert found.reasons["fa1"] == "variant 'fa1' has no page table"


# --- PyTorch ---


def small_call(device: str, **fields: Any) -> tuple[Problem, Call]:
    p = base(**{"head_dim": 32} | fields)
    call = in_pages(p, make_inputs(p, device), 16)
    call["k"], call["v"] = (x.nan_to_num(0.0) for x in (call["k"], call["v"]))  # for comparisons
    return p, call


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("packed", (False, True))
def test_opcheck(packed: bool, device: str) -> None:
    lengths = {"lengths_q": (5, 0, 9), "lengths_k": (70, 3, 0)}
    p = Problem(**lengths, head_dim=32, loss="out") if packed else base(head_dim=32)
    call = in_pages(p, make_inputs(p, device), 16)
    call["k"], call["v"] = (x.nan_to_num(0.0) for x in (call["k"], call["v"]))
    tensors = [call.pop(name) for name in "qkv"]
    torch.library.opcheck(ops.fwd, tensors, call)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_compile(device: str) -> None:
    _, call = small_call(device)
    compiled = torch.compile(lambda **x: ops.forward(**x), backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(**call), ops.forward(**call), strict=True):
        assert_bitwise_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS["cuda"])
@pytest.mark.parametrize("seqlen_q", (1, 150))
def test_graph_replay_with_other_tables(seqlen_q: int, variant: str) -> None:
    """Tables and lengths are read on the device."""
    p = base(seqlen_q, causal=True)
    inputs = make_inputs(p, "cuda")
    call = in_pages(p, inputs, 16)
    for x in (call["k"], call["v"]):
        x.copy_(torch.randn_like(x))
    call["page_table"].copy_(call["page_table"].clamp(0, len(call["k"]) - 1))
    ops.forward(**call, variant=variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        results = ops.forward(**call, variant=variant)
    most = call["page_table"].shape[1] * 16
    for seed in range(4):
        torch.manual_seed(seed)
        call["page_table"].random_(0, len(call["k"]))
        call["seqused_k"].random_(0, most + 1)
        graph.replay()
        replayed = [x.clone() for x in results]
        for x, y in zip(replayed, ops.forward(**call, variant=variant), strict=True):
            assert_bitwise_equal(x, y)


# --- Errors ---


def error_cases() -> dict[str, tuple[str, Any]]:
    """A part of the message, and what changes the call so that it is refused."""

    def table(change: Any) -> Any:
        return lambda call: {"page_table": change(call["page_table"])}

    return {
        "int64": ("page_table must be int32", table(lambda x: x.long())),
        "one dimension": ("page_table must be of shape", table(lambda x: x[0])),
        "another batch": ("page_table must be of shape", table(lambda x: x[1:])),
        "rows that are not contiguous": (
            "page_table must be contiguous",
            table(lambda x: x.repeat(1, 2)[:, ::2]),
        ),
        "no lengths": ("seqused_k must be given", lambda call: {"seqused_k": None}),
        "k of three dimensions": ("k must be of shape", lambda call: {"k": call["k"][0]}),
        "v of other pages": ("v must be of shape", lambda call: {"v": call["v"][1:]}),
        "v of another page size": ("v must be of shape", lambda call: {"v": call["v"][:, 1:]}),
        "pages without rows": (
            "k must be of at least one page",
            lambda call: {name: call[name][:, :0] for name in "kv"},
        ),
        "no pages": (
            "k must be of at least one page",
            lambda call: {name: call[name][:0] for name in "kv"},
        ),
        "cu_seqlens_k": (
            "cu_seqlens_k must be None with page_table",
            lambda call: {"cu_seqlens_k": call["seqused_k"]},
        ),
        "bias": (
            "bias must be None with page_table",
            lambda call: {"bias": torch.zeros(1, 1, 1, 1, device=call["q"].device)},
        ),
        "dropout": (
            "dropout_p must be 0 with page_table",
            lambda call: {
                "dropout_p": 0.1,
                "rng_state": torch.zeros(2, dtype=torch.int64, device=call["q"].device),
            },
        ),  # fmt: skip
        "fa1": ("variant 'fa1' has no page table", lambda call: {"variant": "fa1"}),
    }


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("name", error_cases())
def test_errors(name: str, device: str) -> None:
    message, change = error_cases()[name]
    call = small_call(device)[1]
    call |= change(call)
    with pytest.raises(ERRORS) as error:
        run(call)
    assert message in str(error.value)


def test_a_table_elsewhere() -> None:
    call = small_call("cpu")[1]
    call["page_table"] = call["page_table"].to("meta")
    with pytest.raises(ERRORS, match="page_table must be on q's device|meta"):
        run(call)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_wrong_numbers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU always, on a GPU with FLASH_EXT_DEBUG=1. Entries without a use may be anything."""
    monkeypatch.setenv("FLASH_EXT_DEBUG", "1")
    call = small_call(device)[1]
    run(call)
    pages, columns = len(call["k"]), call["page_table"].shape[1]
    for b, i, wrong in ((1, 3, -1), (1, 0, pages), (1, 18, POISON), (4, 15, POISON)):
        table = call["page_table"].clone()
        table[b, i] = wrong
        with pytest.raises(ERRORS) as error:
            run(call | {"page_table": table})
        wanted = f"page_table[{b}, {i}] must be one of k's pages, 0 to {pages - 1}, got {wrong}"
        assert wanted in str(error.value)
    used = call["seqused_k"].clone()
    used[2] = columns * 16 + 1
    with pytest.raises(ERRORS) as error:
        run(call | {"seqused_k": used})
    assert f"seqused_k[2] must be from 0 to the sequence's {columns * 16} keys" in str(error.value)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_no_gradients(device: str) -> None:
    call = small_call(device)[1]
    for name in "qkv":
        wants = call | {name: call[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match="no variant has a backward with a page table"):
            ops.forward(**wants)
        with pytest.raises(RuntimeError, match="no variant has a backward with a page table"):
            ops.forward(**wants, need_lse=False)
    out, lse = run(call)
    tensors = (torch.ones_like(out), None, *(call.pop(name) for name in "qkv"), out, lse)
    with pytest.raises(ERRORS, match="page_table must be None in a backward pass"):
        ops.bwd(*tensors, **call)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_8_bit_inputs(device: str) -> None:
    if device == "cuda" and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")
    call = small_call(device)[1]
    call["k"], call["v"] = (call[name].to(torch.float8_e4m3fn) for name in "kv")
    run(call)
    call["q"] = call["q"].to(torch.float8_e4m3fn)
    with pytest.raises(ERRORS, match="has no page table with 8-bit inputs"):
        run(call)


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    p, call = small_call("cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ops.forward(**call)
    assert counter.get_total_flops() == 2 * 2 * 32 * p.heads_q * p.seqlen_q * sum(LENGTHS)


def test_statistics_are_float32() -> None:
    _, call = small_call("cpu")
    assert run(call)[1].dtype == statistics_dtype(call["q"].dtype)
