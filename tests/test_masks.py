"""`flash_ext.Mask`: every constructor against the dense mask that its words describe, and calls
with masks against standard attention with that dense mask.

Would catch an interval that is off by one, a block that is missing in one of the two lists, a mask
that is stale after a write, a call that loses the mask or its causal part, and a wait for the GPU.
"""

from __future__ import annotations

import dataclasses
import doctest
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_testing import (
    VARIANTS,
    Inputs,
    Problem,
    assert_accurate,
    assert_all_bitwise_equal,
    dense_mask,
    expected_results,
    make_inputs,
    nan_filled_outputs,
    options_of,
    unsupported_reason,
)
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flash_ext
import flash_ext.reference
from flash_ext import Mask
from flash_ext.cpu.tile_mask import by_query_heads, kinds_of_runs

Case = tuple[Mask, Tensor]
"""A mask, and the same as a bool tensor."""

EVERY_VARIANT = ("auto", *VARIANTS)


def positions(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The position of each query among the keys, as a column; and the keys."""
    return torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None], torch.arange(seqlen_k)


# --- Each constructor, by random arguments ---


def random_ints(low: int, high: int, *shape: int, make: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=make)


def dense(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    shown = torch.rand((b, h, m, n), generator=make) < 0.6
    for side in (2, 3):  # whole blocks, full or empty
        shape = [b, h, -(-m // 128), -(-n // 128)]
        kinds = random_ints(0, 3, *shape, make=make)
        kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :m, :n]
        shown = (shown & (kinds > 0)) if side == 2 else (shown | (kinds == 2))
    shown[:, :, :1] = False
    return Mask.dense(shown), shown


def intervals(make: torch.Generator, b: int, h: int, m: int, n: int, count: int = 2) -> Case:
    edges = [random_ints(-9, n + 9, b, h, m, count, make=make) for _ in range(2)]
    begin, end = edges if count == 1 else (torch.minimum(*edges), torch.maximum(*edges))
    begin[..., : m // 3, :], end[..., : m // 4, :] = 0, n  # so that some blocks are full
    key = torch.arange(n)
    shown = ((key >= begin.unsqueeze(-1)) & (key < end.unsqueeze(-1))).any(-2)
    if b == h == 1:
        begin, end = begin[0, 0], end[0, 0]
    return Mask.intervals(begin, end, n), shown


def documents(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    """By ids, or by cu_seqlens with some empty documents and tokens of none."""
    prefix = int(random_ints(0, 30, 1, make=make)) * int(random_ints(0, 2, 1, make=make))
    causal = bool(random_ints(0, 2, 1, make=make))
    left = int(random_ints(-1, 40, 1, make=make)) if prefix % 2 else -1
    rules = {"causal": causal, "window": (left, 7 if left > 0 else -1), "prefix": prefix}
    if b > 1:
        ids = (torch.rand((b, m), generator=make) < 0.02).cumsum(-1) % 3 - 1
        mask, padding = Mask.documents(ids, **rules), ids < 0
        new = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        number = new.cumsum(-1)
    else:
        cu_seqlens = random_ints(0, m + 1, 5, make=make).sort().values.int()
        cu_seqlens[0] = 0
        cu_seqlens[3] = cu_seqlens[2]
        if prefix:
            rules["prefix"] = random_ints(0, 30, 4, make=make)
        mask = Mask.documents(cu_seqlens=cu_seqlens, seqlen=m, **rules)
        number = torch.searchsorted(cu_seqlens, torch.arange(m), right=True)[None]
        padding = number > 4
    same = (number[:, :, None] == number[:, None]) & ~padding[:, None]
    within = dense_mask(m, m, causal, rules["window"])
    token = torch.arange(m)
    first = torch.where(same, token, m).amin(-1, keepdim=True)  # of the document of each query
    if isinstance(rules["prefix"], Tensor):
        prefix = rules["prefix"][(number[..., None] - 1).clamp(0, 3)]
    return mask, (same & (within | (token < first + prefix)))[:, None]


def prefix(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    size = random_ints(0, n + 9, b, make=make)
    query, key = positions(m, n)
    shown = (key <= query) | (key < size.view(-1, 1, 1, 1))
    return Mask.prefix(size if b > 1 else int(size), m, n), shown


def sinks(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    size, (left, right) = (
        random_ints(0, 20, b, make=make),
        random_ints(-1, 50, 2, make=make).tolist(),
    )
    query, key = positions(m, n)
    before = (key <= query + right) if right >= 0 else torch.ones(m, n, dtype=torch.bool)
    shown = dense_mask(m, n, False, (left, right)) | (before & (key < size.view(-1, 1, 1, 1)))
    return Mask.sinks(size if b > 1 else int(size), (left, right), m, n), shown


def blocks(make: torch.Generator, b: int, h: int, m: int, n: int, block: int = 128) -> Case:
    rows, columns = -(-m // block), -(-n // block)
    index = torch.rand((b, h, rows, columns), generator=make).argsort(-1)
    count = random_ints(0, columns + 1, b, h, rows, make=make)
    listed = torch.arange(columns) < count[..., None]
    shown = torch.zeros(b, h, rows, columns, dtype=torch.bool).scatter_(-1, index, listed)
    shown = shown.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :m, :n]
    index = index.masked_fill(~listed, 10**9)  # which nothing reads
    return Mask.blocks(index, count, m, n, block=block), shown


def tree(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    m = min(m, n, 40)
    parents = torch.stack([random_ints(-1, max(i, 1), b, make=make) for i in range(m)], -1)
    parents[:, 0] = -1
    cached = random_ints(0, n - m + 1, b, make=make)
    shown = torch.zeros(b, 1, m, n, dtype=torch.bool)
    for batch in range(b):
        cache = int(cached[batch])
        shown[batch, :, :, :cache] = True
        for node in range(m):
            found = node
            while found >= 0:
                shown[batch, 0, node, cache + found] = True
                found = int(parents[batch, found])
    return Mask.tree(parents, cached if b > 1 else int(cached), seqlen_k=n), shown


def block_mask(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    slope = random_ints(1, 5, h, make=make)
    size = ((128, 128), (64, 128), (256, 128))[int(random_ints(0, 3, 1, make=make))]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i * slope[h] >= j + 3 * b) & ((i + j) % 7 > 0) | (i > 200)

    found = create_block_mask(mask_mod, b, h, m, n, device="cpu", BLOCK_SIZE=size)
    grids = [torch.arange(x) for x in (b, h, m, n)]
    return Mask.from_block_mask(found), mask_mod(*torch.meshgrid(*grids, indexing="ij"))


def block_mask_without_mod(make: torch.Generator, b: int, h: int, m: int, n: int) -> Case:
    rows, columns = -(-m // 128), -(-n // 128)
    index = torch.rand((b, h, rows, columns), generator=make).argsort(-1).int()
    count = random_ints(0, columns + 1, b, h, rows, make=make).int()
    found = BlockMask.from_kv_blocks(count, index, seq_lengths=(m, n))
    return Mask.from_block_mask(found), Mask.blocks(index, count, m, n).to_dense()


CONSTRUCTORS: dict[str, Callable[..., Case]] = {
    "dense": dense,
    "interval": functools.partial(intervals, count=1),
    "intervals": intervals,
    "documents": documents,
    "prefix": prefix,
    "sinks": sinks,
    "blocks": blocks,
    "half blocks": functools.partial(blocks, block=64),
    "tree": tree,
    "block mask": block_mask,
    "block mask without mod": block_mask_without_mod,
}
SIZES = (
    *((1, 1, 1, 1), (1, 1, 128, 128), (2, 3, 130, 257), (1, 2, 300, 301), (3, 1, 257, 640)),
    *((2, 1, 40, 513), (1, 4, 513, 40)),
)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor(name: str, sizes: tuple[int, ...]) -> None:
    for seed in range(4):
        mask, shown = CONSTRUCTORS[name](torch.Generator().manual_seed(seed), *sizes)
        assert_is(mask, shown)


def assert_is(mask: Mask, shown: Tensor) -> None:
    """The mask shows this. Blocks that both of its lists name, and as full, are enough and right;
    only lists of intervals may name blocks that show nothing."""
    found = mask.to_dense()
    assert found.shape == mask.shape and found.dtype == torch.bool
    assert torch.equal(found, shown.expand_as(found)), mask
    rows, columns = (-(-x // 128) for x in mask.shape[2:])
    kinds = mask.kinds()
    whole = F.pad(found, (0, 0, 0, -found.shape[2] % 128), value=True)
    padded = (F.pad(x, (0, -x.shape[3] % 128, 0, -x.shape[2] % 128)) for x in (found, whole))
    some, full = (x.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)) for x in padded)
    some, full = some.any(5).any(3), full.all(5).all(3)
    for listed in (kinds, kinds_of_runs(mask.q_tiles, rows).mT):
        assert not (some & (listed == 0)).any() and not (~full & (listed == 1)).any()
        assert mask.per_query or torch.equal(some, listed > 0)
        assert mask.per_query or torch.equal(full & some, listed == 1)
    assert torch.isclose(mask.density(), (kinds > 0).float().mean()) or 0 in (rows, columns)
    text = mask.plot().splitlines()
    assert len(text) == rows and all(len(line) == columns for line in text)
    assert "".join(text).count("·") == int((kinds[0, 0] == 0).sum())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", [name for name in CONSTRUCTORS if "mask" not in name])
def test_where_the_arguments_are(
    name: str, sizes: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that make masks, on a GPU; those of BlockMasks are the dense ones."""

    def there(function: Callable[..., Mask]) -> Callable[..., Mask]:
        def call(*args: object, **options: object) -> Mask:
            if function.__name__ in ("prefix", "sinks"):
                options["device"] = device
            args = tuple(x.to(device) if isinstance(x, Tensor) else x for x in args)
            moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
            return function(*args, **moved)

        return staticmethod(call)

    for method in ("dense", "intervals", "documents", "prefix", "sinks", "blocks", "tree"):
        monkeypatch.setattr(Mask, method, there(getattr(Mask, method)))
    for seed in range(2):
        mask, shown = CONSTRUCTORS[name](torch.Generator().manual_seed(seed), *sizes)
        shown, band = shown.to(device), dense_mask(*mask.shape[2:], True, (9, -1), device)
        assert mask.device.type == device
        for found, want in (
            (mask, shown),
            (~mask, ~shown),
            (mask.folded(True, (9, -1)), shown & band),
        ):
            assert_is(found, want)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_combinations(sizes: tuple[int, ...]) -> None:
    number = SIZES.index(sizes)
    make = torch.Generator().manual_seed(number)
    cases = [f(make, *sizes) for n, f in CONSTRUCTORS.items() if n != "tree"]
    others = [*cases[number % 5 + 1 :], *cases[: number % 5 + 1]]
    for (a, shown_a), (b, shown_b) in zip(cases, others, strict=True):
        if a.shape[2:] == b.shape[2:]:
            assert_is(a & b, shown_a & shown_b)
            assert_is(a | b, shown_a | shown_b)
        assert_is(~a, ~shown_a)
        both = a.folded(True, (9, -1))
        assert_is(both, shown_a & dense_mask(*a.shape[2:], True, (9, -1)))


def test_linear_masks_stay_linear() -> None:
    make = torch.Generator().manual_seed(0)
    one, two, three = (
        CONSTRUCTORS[n](make, 1, 1, 300, 300)[0] for n in ("interval", "intervals", "blocks")
    )
    assert (one.per_query, two.per_query, three.per_query) == (1, 2, 1)
    for mask in (one & two, one & one, one | one, ~one, two.folded(True, (5, -1))):
        assert mask.per_query > 0 and not mask.listed
    for mask in (three & one, three & two, three.folded(True, (-1, -1)), three & three):
        assert mask.per_query > 0 and mask.listed and "blocks" in repr(mask)
    assert (two & two).per_query == 0


def test_sizes_without_tokens() -> None:
    for sizes in ((0, 5), (5, 0), (0, 0)):
        mask = Mask.dense(torch.ones(sizes, dtype=torch.bool))
        assert mask.to_dense().shape == (1, 1, *sizes) and mask.density() in (0, 1)
    assert Mask.tree(torch.zeros(0, dtype=torch.long), 3).to_dense().shape == (1, 1, 0, 3)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    assert not Mask.documents(cu_seqlens=cu_seqlens, seqlen=7).to_dense().any()


def test_the_examples_of_methods() -> None:
    for name, method in inspect.getmembers(Mask):
        for test in doctest.DocTestFinder().find(
            method, name, globs={"torch": torch, "flash_ext": flash_ext}
        ):
            assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, name


# --- Calls ---


def results(problem: Problem, inputs: Inputs, **options: object) -> dict[str, Tensor]:
    """out, lse and gradients by flash_ext."""
    given = (
        options_of(problem) | {n: x for n, x in inputs.options().items() if n != "bias"} | options
    )
    leaves = {n: x for n, x in inputs.leaves().items() if n != "dbias" or "bias" in options}
    with nan_filled_outputs():
        out, lse = flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **given)
        pairs = [(out, inputs.dout), (lse, inputs.dlse)]
        outputs, grads = zip(*((x, g) for x, g in pairs if g is not None), strict=True)
        found = torch.autograd.grad(outputs, tuple(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, found, strict=True))


def random_call(seed: int) -> tuple[Problem, Mask, Tensor]:
    """A problem, and a mask that it may have beside causal and window."""
    make = torch.Generator().manual_seed(seed)

    def pick(*choices: object) -> object:
        return choices[int(random_ints(0, len(choices), 1, make=make))]

    batch, heads_k, group = pick(1, 2), pick(1, 2), pick(1, 2, 3)
    heads = heads_k * group
    name = pick(*CONSTRUCTORS)
    seqlen_q, seqlen_k = (int(random_ints(1, 400, 1, make=make)) for _ in range(2))
    matrices = pick(1, batch, batch), pick(1, heads_k, heads)
    mask, shown = CONSTRUCTORS[name](make, *matrices, seqlen_q, seqlen_k)
    if pick(False, False, True):
        more, shown_more = intervals(make, *matrices, *mask.shape[2:], pick(1, 2))
        by = pick(Mask.__and__, Mask.__or__)
        mask = by(mask, more)
        shown = shown & shown_more if by is Mask.__and__ else shown | shown_more
    problem = Problem(
        batch,
        *mask.shape[2:],
        heads,
        heads_k,
        pick(64, 64, 128, 128, 256, 40, 32, 96, 192, 100),
        pick(torch.bfloat16, torch.float16),
        causal=pick(False, False, True),
        window=pick((-1, -1), (-1, -1), (30, -1), (100, 20)),
        softcap=pick(0.0, 0.0, 0.0, 5.0),
        alibi=pick("", "", "", "h"),
        dropout_p=pick(0.0, 0.0, 0.0, 0.2),
        sink=pick(False, False, True),
        bias="bhqk",
        bias_type="bool",
        seed=seed,
    )
    return problem, mask, shown


def refused(problem: Problem, inputs: Inputs, variant: str, **options: object) -> bool:
    """Whether a named variant does not have this call, which then raises. What a kernel that has
    no mask, or none beside these options, gets is a bias."""
    given = (
        options_of(problem) | {n: x for n, x in inputs.options().items() if n != "bias"} | options
    )
    if variant == "auto":
        return False
    p = problem
    options_beside = p.softcap, p.alibi, p.dropout_p, p.scale is not None, "bias" in options
    if not any(options_beside):
        problem = dataclasses.replace(problem, bias="")  # fa3 has the mask
    elif not problem.bias:
        problem = dataclasses.replace(problem, bias="11qk", bias_type="bool")
    reason = unsupported_reason(variant, problem, inputs.q.device.type)
    found = flash_ext.explain(inputs.q, inputs.k, inputs.v, **given).reasons[variant]
    assert (reason is None) == (found is None), found
    if reason is not None:
        with pytest.raises((ValueError, RuntimeError), match=reason):
            results(problem, inputs, variant=variant, **options)
    return reason is not None


def check_call(problem: Problem, mask: Mask, shown: Tensor, variant: str, device: str) -> bool:
    """Whether the variant has the call; its results are then right."""
    inputs = make_inputs(problem, device)
    sizes = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    inputs.bias = by_query_heads(shown.to(device), problem.heads_q).expand(sizes)
    mask = mask.to(device)
    if refused(problem, inputs, variant, mask=mask):
        return False
    actual = results(problem, inputs, mask=mask, variant=variant)
    judged = {n: x for n, x in actual.items() if n != "dsink"}
    assert_accurate(judged, expected_results(problem, inputs), problem.dtype)
    dead = ~(inputs.bias & dense_mask(*sizes[2:], problem.causal, problem.window, device)).any(-1)
    assert not actual["dq"].transpose(1, 2)[dead].any()
    return True


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("variant", EVERY_VARIANT)
@pytest.mark.parametrize("part", range(10))
def test_random_masks(part: int, variant: str, device: str) -> None:
    """Each variant has masks of its own: 2,000 in all, on a CPU fewer. fa3 leaves options beside
    them to others."""
    calls = 3 if device == "cpu" else 50
    first = 1000 * EVERY_VARIANT.index(variant)
    ran = 0
    for seed in range(first + part * calls, first + (part + 1) * calls):
        problem, mask, shown = random_call(seed)
        try:
            ran += check_call(problem, mask, shown, variant, device)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {problem}, {mask}: {error}") from error
    assert ran >= calls // 4


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (32, 64, 96, 128, 192, 256))
def test_long_lists(dim: int) -> None:
    """In fa2: splits of few queries' keys, and gradients in a fixed order."""
    for queries, keys in ((40, 5000), (1500, 1300)):
        problem = Problem(1, queries, keys, 4, 2, dim, softcap=20.0, seed=dim)
        inputs = make_inputs(problem, "cuda")
        blocks = (1, 4, -(-queries // 128), -(-keys // 128))
        kinds = torch.rand(blocks, device="cuda").repeat_interleave(128, 2)
        kinds = kinds.repeat_interleave(128, 3)[:, :, :queries, :keys]
        shown = (torch.rand_like(kinds) < 0.5) & (kinds < 0.6) | (kinds < 0.3)
        inputs.bias, mask = shown, Mask.dense(shown)
        options: dict[str, Any] = {"mask": mask, "variant": "fa2", "deterministic": True}
        actual = results(problem, inputs, **options)
        assert_accurate(actual, expected_results(problem, inputs), problem.dtype)
        for _ in range(5):
            assert_all_bitwise_equal(results(problem, inputs, **options), actual)


@pytest.mark.parametrize("variant", EVERY_VARIANT)
@pytest.mark.parametrize("queries", (1, 4, 17, 130))
def test_masks_of_key_heads(queries: int, variant: str, device: str) -> None:
    """Which query heads share: few queries are packed by heads."""
    torch.manual_seed(queries)
    batch, keys, heads, heads_k = 2, 1500, 8, 2
    problem = Problem(batch, queries, keys, heads, heads_k, 128)
    inputs = make_inputs(problem, device)
    index = torch.rand(batch, heads_k, -(-queries // 128), 12, device=device).argsort(-1)
    by_blocks = Mask.blocks(index, torch.full_like(index[..., 0], 5), queries, keys)
    begin = torch.randint(keys, (batch, heads_k, queries), device=device)
    by_intervals = Mask.intervals(begin, begin + 400, keys)
    by_bits = Mask.dense(torch.rand(batch, heads_k, queries, keys, device=device) < 0.3)
    for mask in (by_blocks, by_intervals, by_bits):
        inputs.bias = mask.to_dense().repeat_interleave(heads // heads_k, 1)
        actual = results(problem, inputs, mask=mask, variant=variant)
        assert_accurate(actual, expected_results(problem, inputs), problem.dtype)
    shown = by_bits.to_dense().repeat_interleave(heads // heads_k, 1)
    bias = torch.rand_like(shown, dtype=torch.float32) < 0.8
    inputs.bias = shown & bias
    actual = results(problem, inputs, mask=by_bits, bias=bias, variant=variant)
    assert_accurate(actual, expected_results(problem, inputs), problem.dtype)
