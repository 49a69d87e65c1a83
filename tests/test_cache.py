"""Attention to a cache: `attention_with_cache`, a shared prefix, and the drop-ins on it.

All is compared with a plain composition: rotate, write, gather, standard attention of each
sequence. Pages that no sequence uses, and rows beyond the lengths, hold NaN. Would catch a key that
is read from another page, a row that is written elsewhere or not at all, a position that is off by
the padding, queries that are rotated where keys are not, a length or table that is frozen into a
graph, a merge that forgets a part, and an error after something was written.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_testing import device_unsupported_reason

import flash_ext
from flash_ext import flash_attn as fa2
from flash_ext import flash_attn_interface as fa3

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """A call of `attention_with_cache`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]

    def to(self, device: str) -> Case:
        """On a device: CUDA has bfloat16, of which all numbers are."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)

        options = {name: move(x) for name, x in self.options.items()}
        return Case(move(self.q), move(self.k_cache), move(self.v_cache), options)

    def run(self) -> tuple[Tensor, Tensor]:
        return flash_ext.attention_with_cache(
            self.q, self.k_cache, self.v_cache, return_lse=True, **self.options
        )


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: list[int]) -> Tensor:
    return ints(*itertools.accumulate(lengths, initial=0))


def numbers(*shape: int) -> Tensor:
    """Of bfloat16, in float32."""
    return torch.randn(shape).bfloat16().float()


def some(seed: int) -> Case:
    """A random call of 1 to 4 sequences."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, group = draw.randrange(1, 5), draw.choice((1, 2)), draw.choice((1, 3))
    dim, dim_v = draw.choice(((16, 16), (32, 32), (32, 16), (24, 24)))
    size, columns = draw.choice((1, 2, 5, 8, 16)), draw.randrange(1, 6)
    new = draw.choice((0, 0, 1, 3, 7))
    paged, indexed, padded = draw.random() < 0.6, draw.random() < 0.3, draw.random() < 0.3
    if not paged:
        size, columns = size * columns, 1
    capacity, elements = size * columns, batch + (2 if indexed or draw.random() < 0.3 else 0)
    packed_new = new > 0 and draw.random() < 0.3
    news = [draw.randrange(min(new, capacity) + 1) for _ in range(batch)]
    new = min(new, capacity)
    news = news if packed_new else [new] * batch
    held = [draw.choice((0, capacity - n, draw.randrange(capacity - n + 1))) for n in news]
    options: dict[str, Any] = {"cache_seqlens": ints(*held), "causal": draw.random() < 0.5}
    if draw.random() < 0.2 and len(set(held)) == 1:
        options["cache_seqlens"] = held[0]
    if draw.random() < 0.2 and all(n == capacity for n in held) and new == 0:
        options["cache_seqlens"] = None
    if draw.random() < 0.3:
        options["window"] = (draw.randrange(-1, 6), draw.randrange(-1, 4))
    if draw.random() < 0.2:
        options["softcap"] = 2.0
    if draw.random() < 0.2:
        options["sink"] = numbers(heads * group)
    if draw.random() < 0.2:
        options["alibi_slopes"] = numbers(heads * group).abs()
    order = draw.sample(range(elements), batch) if indexed else list(range(batch))
    if indexed:
        options["cache_batch_idx"] = ints(*order)
    pages = elements
    if paged:
        pages = elements * columns + draw.randrange(3)
        table = torch.randperm(pages)[: elements * columns].int().view(elements, columns)
        table = table if indexed else table[:batch]
        options["page_table"] = table
    if padded:
        options["cache_leftpad"] = ints(*(draw.randrange(n + 1) for n in held))
    k_cache = torch.full((pages, size, heads, dim), math.nan)
    v_cache = torch.full((pages, size, heads, dim_v), math.nan)
    for b, n in enumerate(held):
        row = options["page_table"][order[b]].tolist() if paged else [order[b]]
        for i in range(n):
            k_cache[row[i // size], i % size] = numbers(heads, dim)
            v_cache[row[i // size], i % size] = numbers(heads, dim_v)
        used = -(-(n + news[b]) // size)
        if paged:
            options["page_table"][order[b], used:] = draw.choice((-1, 10**6))
        elif draw.random() < 0.5 and "cache_leftpad" in options:
            k_cache[order[b], : options["cache_leftpad"][b]] = math.nan
            v_cache[order[b], : options["cache_leftpad"][b]] = math.nan
    if paged and not indexed and size <= held[0] and batch > 1 and size <= held[-1]:
        options["page_table"][-1, 0] = options["page_table"][0, 0]  # a page that two share
    if not paged and draw.random() < 0.3:
        k_cache = k_cache.transpose(0, 1).contiguous().transpose(0, 1)
    q_shape: tuple[int, ...] = (batch, draw.choice((1, 1, 2, 5)))
    if draw.random() < 0.3:
        lengths = [draw.randrange(4) for _ in range(batch)]
        options["cu_seqlens_q"], q_shape = offsets(lengths), (sum(lengths),)
    if new > 0:
        new_shape: tuple[int, ...] = (batch, new)
        if packed_new:
            options["cu_seqlens_k_new"], new_shape = offsets(news), (sum(news),)
        options |= {"k": numbers(*new_shape, heads, dim), "v": numbers(*new_shape, heads, dim_v)}
        if draw.random() < 0.6:
            positions = capacity + 8
            angles = torch.randn(positions, draw.choice((1, 4, 8, dim // 2)))
            options |= {
                "rotary_cos": angles.cos().bfloat16().float(),
                "rotary_sin": angles.sin().bfloat16().float(),
                "rotary_interleaved": draw.random() < 0.5,
            }
            if draw.random() < 0.3:
                options["rotary_seqlens"] = torch.randint(0, 5, (batch,), dtype=torch.int32)
                if not isinstance(options["cache_seqlens"], Tensor):
                    options["cache_seqlens"] = ints(*held)
    return Case(numbers(*q_shape, heads * group, dim), k_cache, v_cache, options)


def rotated(x: Tensor, positions: Tensor, options: dict[str, Any]) -> Tensor:
    """Rows (n, H, D) by complex multiplication."""
    if options.get("rotary_cos") is None or len(x) == 0:
        return x
    cos, sin = (options[f"rotary_{name}"][positions].double() for name in ("cos", "sin"))
    half, x = cos.shape[1], x.double().clone()
    pairs = x[..., : 2 * half]
    pairs = pairs.unflatten(-1, (half, 2) if options["rotary_interleaved"] else (2, half))
    if not options["rotary_interleaved"]:
        pairs = pairs.mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    pairs = torch.view_as_real(turned)
    x[..., : 2 * half] = (pairs if options["rotary_interleaved"] else pairs.mT).flatten(-2)
    return x


def parts(x: Tensor | None, cu_seqlens: Tensor | None, batch: int) -> list[Tensor]:
    if x is None:
        return [torch.empty(0)] * batch
    if cu_seqlens is None:
        return list(x)
    return [x[a:b] for a, b in itertools.pairwise(cu_seqlens.tolist())]


OF_ATTENTION = ("causal", "window", "softcap", "sink", "alibi_slopes", "scale")


def expected(case: Case, device: str = "cpu") -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """out (Sq, Hq, Dv) and lse (Hq, Sq) of each sequence, and the caches afterwards. On CUDA
    rotated rows are rounded to bfloat16."""
    options = case.options

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        x = rotated(x, positions, options)
        return x.bfloat16().double() if device == "cuda" else x

    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    size = k_cache.shape[1]
    cu_q = options.get("cu_seqlens_q")
    batch = case.q.shape[0] if cu_q is None else cu_q.numel() - 1
    index = options.get("cache_batch_idx", torch.arange(batch)).tolist()
    table = options.get("page_table")
    rows = [[index[b]] if table is None else table[index[b]].tolist() for b in range(batch)]
    capacity = size * len(rows[0]) if rows else 0
    held = options.get("cache_seqlens")
    held = capacity if held is None else held
    held = held.tolist() if isinstance(held, Tensor) else [held] * batch
    cu_new = options.get("cu_seqlens_k_new")
    new_k, new_v = (parts(options.get(name), cu_new, batch) for name in "kv")
    first = options.get("rotary_seqlens", torch.tensor(held)).tolist()
    moves = options["causal"] or max(options.get("window", (-1, -1))) >= 0
    outs, lses = [], []
    for b, q in enumerate(parts(case.q, cu_q, batch)):
        places = [(rows[b][i // size], i % size) for i in range(held[b] + len(new_k[b]))]
        positions = first[b] + torch.arange(len(new_k[b]))
        for place, k, v in zip(places[held[b] :], turned(new_k[b], positions), new_v[b],
                               strict=True):  # fmt: skip
            k_cache[place], v_cache[place] = k, v
        begin = int(options["cache_leftpad"][b]) if "cache_leftpad" in options else 0
        where = torch.tensor(places[begin:], dtype=torch.long).view(-1, 2).unbind(1)
        positions = first[b] + (torch.arange(len(q)) if moves else torch.zeros(len(q))).long()
        mine = {name: x for name, x in options.items() if name in OF_ATTENTION}
        out, lse = flash_ext.reference.attention(
            turned(q, positions)[None].double(), k_cache[where][None].double(),
            v_cache[where][None].double(),
            **{n: x.double() if isinstance(x, Tensor) else x for n, x in mine.items()},
        )  # fmt: skip
        outs.append(out[0].float())
        lses.append(lse[0].float())
    return outs, lses, k_cache, v_cache


def assert_near(found: Tensor, wanted: Tensor) -> None:
    loose = 3e-2 if found.is_cuda else 2e-5
    found = found.float().cpu()
    torch.testing.assert_close(found, wanted.float(), rtol=loose, atol=loose, equal_nan=True)


def check(case: Case, device: str) -> None:
    outs, lses, k_cache, v_cache = expected(case, device)
    moved = case.to(device)
    out, lse = moved.run()
    if "cu_seqlens_q" in case.options:
        outs, lses = torch.cat(outs), torch.cat(lses, 1)
    else:
        outs, lses = torch.stack(outs), torch.stack(lses)
    assert_near(out, outs)
    assert_near(lse, lses)
    assert_near(moved.k_cache, k_cache)
    assert torch.equal(moved.v_cache.nan_to_num(7.0).float().cpu(), v_cache.nan_to_num(7.0))


@pytest.mark.parametrize("seeds", range(10))
def test_random_calls(seeds: int, device: str) -> None:
    for seed in range(30 * seeds, 30 * seeds + 30):
        try:
            check(some(seed), device)
        except Exception as error:
            raise AssertionError(f"seed {seed} has {sorted(some(seed).options)}") from error


def test_the_random_calls_are_of_all_kinds() -> None:
    names = [set(some(seed).options) for seed in range(300)]
    for one, other in itertools.combinations(
        ("page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new",
         "rotary_cos"), 2
    ):  # fmt: skip
        assert any({one, other} <= each for each in names), (one, other)
    held = [some(seed) for seed in range(300)]
    lengths = [x for x in held if isinstance(x.options["cache_seqlens"], Tensor)]
    assert any((x.options["cache_seqlens"] == 0).any() for x in lengths)


def pages(device: str = "cpu", rotary: bool = True) -> Case:
    """Two sequences of 3 and 9 keys in pages of 4, with two new keys each."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "cache_seqlens": ints(3, 9), "page_table": ints([4, 1, -1], [0, 2, 5]), "causal": True,
        "k": numbers(2, 2, 2, 16), "v": numbers(2, 2, 2, 16),
    }  # fmt: skip
    if rotary:
        options |= {"rotary_cos": numbers(12, 4), "rotary_sin": numbers(12, 4),
                    "rotary_interleaved": True}  # fmt: skip
    caches = numbers(6, 4, 2, 16), numbers(6, 4, 2, 16)
    return Case(numbers(2, 2, 4, 16), *caches, options).to(device)


# --- The drop-ins ---

RENAMED = {"page_table": "block_table", "scale": "softmax_scale", "window": "window_size"}


@pytest.mark.parametrize("seed", range(60))
def test_drop_ins(seed: int) -> None:
    """The same as attention_with_cache, in flash-attn 3 with all arguments, in 2 with its own."""
    case = some(1000 + seed)
    options = {name: x for name, x in case.options.items() if name not in ("sink", "window")}
    slopes = options.pop("alibi_slopes", None)
    wanted, wanted_lse = replace(case, k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone(),
                                 options=options).run()  # fmt: skip
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        case.q, *caches, **options, max_seqlen_q=5, scheduler_metadata=torch.zeros(1),
        num_splits=3, return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    if options.keys() & {"cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"}:
        return
    given = {RENAMED.get(name, name): x for name, x in options.items()}
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    if "block_table" in given and given.keys() & {"cache_batch_idx", "cache_leftpad"}:
        with pytest.raises(ValueError, match="must be None with block_table"):
            fa2.flash_attn_with_kvcache(case.q, *caches, **given)
        return
    assert torch.equal(fa2.flash_attn_with_kvcache(case.q, *caches, **given), wanted)
    if slopes is not None:
        caches = [case.k_cache.clone(), case.v_cache.clone()]
        own = replace(case, options=options | {"alibi_slopes": slopes}).run()[0]
        found = fa2.flash_attn_with_kvcache(case.q, *caches, **given, alibi_slopes=slopes)
        assert torch.equal(found, own)


def test_varlen_with_a_block_table(device: str) -> None:
    """As nano-vllm prefills after a cached prefix: lengths are cu_seqlens_k's differences."""
    case = pages(device, rotary=False)
    lengths_q, lengths_k = [2, 3], [5, 11]
    q = torch.cat((case.q[0], case.q[1], case.q[1, :1]))
    cu_q, cu_k = (offsets(x).to(device) for x in (lengths_q, lengths_k))
    table = case.options["page_table"]
    call = {"max_seqlen_q": 3, "max_seqlen_k": 11, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, case.k_cache, case.v_cache, **call, causal=True, block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    k, v = (
        torch.cat([x[table[b, :3].clamp(min=0).long()].flatten(0, 1)[:n]
                   for b, n in enumerate(lengths_k)])
        for x in (case.k_cache, case.v_cache)
    )  # fmt: skip
    want = fa2.flash_attn_varlen_func(q, k, v, **call, causal=True, return_attn_probs=True)
    assert_near(out, want[0].cpu())
    assert_near(lse, want[1].cpu())
    with pytest.raises(ValueError, match="dropout_p must be 0 with block_table"):
        fa2.flash_attn_varlen_func(q, case.k_cache, case.v_cache, **call, dropout_p=0.1,
                                   block_table=table)  # fmt: skip
    again = fa2.flash_attn_varlen_func(q.requires_grad_(), case.k_cache, case.v_cache, **call,
                                       block_table=table, causal=True)  # fmt: skip
    assert torch.equal(again, out)
    with pytest.raises(RuntimeError, match="no variant has a backward with a page table"):
        again.sum().backward()


def test_calls_of_engines(device: str) -> None:
    """Word by word: mini-sglang's (pages of one key, offsets of new keys that there are not), and
    one step of transformers' continuous batching and of nano-vllm."""
    case = pages(device, rotary=False)
    table, new = case.options["page_table"], [case.options[name][:, :1] for name in "kv"]
    held = case.options["cache_seqlens"]
    tokens = [x.reshape(-1, 1, *x.shape[2:]) for x in (case.k_cache, case.v_cache)]
    rows = torch.arange(4, dtype=torch.int32, device=device)
    of_tokens = (table.clamp(min=0)[..., None] * 4 + rows).flatten(1)
    edges = ints(0, 1, 3).to(device)
    q = torch.cat((case.q[0, :1], case.q[1]))
    found = fa3.flash_attn_with_kvcache(
        q=q, k_cache=tokens[0], v_cache=tokens[1], page_table=of_tokens[:, :11], cache_seqlens=held,
        cu_seqlens_q=edges, cu_seqlens_k_new=ints(0, 3, 12).to(device), max_seqlen_q=2,
        softmax_scale=0.3, sm_margin=0, window_size=(-1, -1), softcap=0.0, num_splits=0,
        pack_gqa=None, causal=True,
    )  # fmt: skip
    options = {"cache_seqlens": held, "page_table": table, "scale": 0.3, "causal": True}
    wide = Case(q, case.k_cache, case.v_cache, options | {"cu_seqlens_q": edges}).to("cpu")
    assert_near(found, torch.cat(expected(wide)[0]))

    step = Case(case.q[:, :1], case.k_cache, case.v_cache,
                options | dict(zip("kv", new, strict=True))).to("cpu")  # fmt: skip
    outs, _, k_cache, _ = expected(step)
    found = fa2.flash_attn_with_kvcache(
        case.q[:, :1], case.k_cache, case.v_cache, *new, causal=True, softmax_scale=0.3,
        block_table=table, cache_seqlens=held,
    )  # fmt: skip
    assert_near(found, torch.stack(outs))
    assert_near(case.k_cache, k_cache)
    again = fa2.flash_attn_with_kvcache(
        case.q[:, 0].unsqueeze(1), case.k_cache, case.v_cache, cache_seqlens=held + 1,
        block_table=table, softmax_scale=0.3, causal=True,
    )  # fmt: skip
    assert torch.equal(again, found)


@pytest.mark.parametrize("used_k", [None, [5, 0, 3]])
def test_varlen_with_used_queries(used_k: list[int] | None, device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    lengths_q, lengths_k, used_q = [4, 3, 5], [6, 2, 7], [2, 3, 0]
    q, k, v = (torch.randn(sum(n), h, 16).to(device, dtype)
               for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v)]
    more = {} if used_k is None else {"seqused_k": ints(*used_k).to(device)}
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, offsets(lengths_q).to(device), offsets(lengths_k).to(device), 5, 7,
        seqused_q=ints(*used_q).to(device), causal=True, return_attn_probs=True, **more,
    )  # fmt: skip
    bounds = zip(*map(itertools.pairwise, (offsets(lengths_q).tolist(),
                                           offsets(lengths_k).tolist())), strict=True)  # fmt: skip
    total = torch.zeros(())
    for b, ((i, j), (m, n)) in enumerate(bounds):
        last = i + used_q[b]
        n = n if used_k is None else m + used_k[b]
        want_out, want_lse = flash_ext.reference.attention(
            q[None, i:last].float(), k[None, m:n].float(), v[None, m:n].float(), causal=True
        )
        assert_near(out[i:last], want_out[0].cpu())
        assert_near(lse[:, i:last], want_lse[0].cpu())
        assert not out[last:j].any() and (lse[:, last:j] == -math.inf).all()
        total = total + (want_out.cpu() ** 2).sum()
    wanted = torch.autograd.grad(total, leaves)
    for a, b in zip(torch.autograd.grad((out.float() ** 2).sum(), leaves), wanted, strict=True):
        loose = 1e-1 if device == "cuda" else 1e-4
        torch.testing.assert_close(a, b, rtol=loose, atol=loose)


def test_caches_of_8_bits(device: str) -> None:
    """16-bit q beside a dense FP8 cache, with descales; rows of 8 bits are appended as they are."""
    if device == "cuda" and (why := device_unsupported_reason("fa3", device)):
        pytest.skip(f"fa3 {why}")
    wide = pages(rotary=False)
    del wide.options["page_table"]
    wide.options["cache_seqlens"] = ints(1, 2)
    new = {name: wide.options[name].to(FP8) for name in "kv"}
    caches = [x.to(FP8) for x in (wide.k_cache, wide.v_cache)]
    factors = {"k_descale": torch.tensor([[2.0, 0.5]] * 2), "v_descale": torch.tensor(0.25)}
    options = {n: x.to(device) if isinstance(x, Tensor) else x
               for n, x in (wide.options | new | factors).items()}  # fmt: skip
    moved = [x.to(device) for x in caches]
    q = wide.q.to(device, torch.bfloat16)
    out = flash_ext.attention_with_cache(q, *moved, **options)

    k_factor = factors["k_descale"][0][:, None]
    wide.k_cache, wide.v_cache = caches[0].float() * k_factor, caches[1].float() * 0.25
    wide.options |= {"k": new["k"].float() * k_factor, "v": new["v"].float() * 0.25}
    wanted = torch.stack(expected(wide)[0])
    torch.testing.assert_close(out.float().cpu(), wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(moved[1][1, 2].float().cpu(), new["v"][1, 0].float())

    before = moved[0].float()
    angles = torch.ones(12, 4, device=device)
    more = {"rotary_cos": angles, "rotary_sin": angles}
    with pytest.raises((ValueError, RuntimeError), match="k must be of 16 bits or more"):
        flash_ext.attention_with_cache(q, *moved, **options | more)
    assert torch.equal(moved[0].float(), before)


# --- torch.compile and CUDA graphs ---


def test_compiled(device: str) -> None:
    """Without a break, and again with other lengths and tables in the same graph."""

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> Any:
        return flash_ext.attention_with_cache(q, k_cache, v_cache, return_lse=True, **options)

    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(step, fullgraph=True, backend=counter)
    for lengths, table in (((3, 9), ((4, 1, -1), (0, 2, 5))), ((0, 6), ((5, -1, -1), (3, 2, -1)))):
        case = pages()
        case.options |= {"cache_seqlens": ints(*lengths), "page_table": ints(*map(list, table))}
        outs, lses, k_cache, v_cache = expected(case, device)
        case = case.to(device)
        out, lse = run(case.q, case.k_cache, case.v_cache, case.options)
        assert_near(out, torch.stack(outs))
        assert_near(lse, torch.stack(lses))
        assert_near(case.k_cache, k_cache)
        assert_near(case.v_cache, v_cache)
    assert counter.frame_count == 1


@pytest.mark.share(1 / 2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["dense", "index", "leftpad", "packed", "prefix"])
def test_compiled_in_other_forms(name: str) -> None:
    case = pages()
    options = {n: x for n, x in case.options.items() if n != "page_table"}
    options["cache_seqlens"] = ints(1, 2)
    function: Callable[..., Any] = flash_ext.attention_with_cache
    tensors: tuple[Tensor, ...] = (case.q, case.k_cache, case.v_cache)
    if name == "index":
        options["cache_batch_idx"] = ints(5, 2)
    elif name == "leftpad":
        options["cache_leftpad"] = ints(1, 0)
    elif name == "packed":
        options["cu_seqlens_q"] = ints(0, 1, 4)
        tensors = (case.q.flatten(0, 1), *tensors[1:])
    elif name == "prefix":
        function = flash_ext.attention_with_shared_prefix
        tensors = (case.q, numbers(7, 2, 16), numbers(7, 2, 16), *tensors[1:])

    def run(function: Callable[..., Any]) -> list[Tensor]:
        given = [x.clone() for x in tensors]
        return [function(*given, **options), *given]

    torch._dynamo.reset()
    found = run(torch.compile(function, fullgraph=True, backend="aot_eager"))
    for x, y in zip(found, run(function), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """Lengths, tables, and which sequences there are, change between replays."""
    case = pages("cuda")
    static = replace(case, options=dict(case.options))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        static.run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = static.run()
    for lengths, table in (
        ((3, 9), ((4, 1, -1), (0, 2, 5))),
        ((0, 6), ((5, -1, -1), (3, 2, -1))),
        ((10, 0), ((1, 0, 3), (-1, -1, -1))),  # a padded slot: its new keys have no place
    ):
        fresh = pages()
        fresh.options |= {"cache_seqlens": ints(*lengths), "page_table": ints(*map(list, table))}
        padded = table[1][0] < 0
        if padded:
            fresh.options["page_table"][1] = ints(5, 5, 5)
        outs, lses, k_cache, _ = expected(fresh, "cuda")
        static.k_cache.copy_(fresh.k_cache)
        static.v_cache.copy_(fresh.v_cache)
        static.options["cache_seqlens"].copy_(ints(*lengths))
        static.options["page_table"].copy_(ints(*map(list, table)))
        graph.replay()
        count = 1 if padded else 2
        assert_near(out[:count], torch.stack(outs)[:count])
        assert_near(lse[:count], torch.stack(lses)[:count])
        if padded:
            k_cache[5] = fresh.k_cache[5]
        assert_near(static.k_cache, k_cache)


# --- A shared prefix ---


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", ["dense", "pages", "packed"])
def test_shared_prefix(form: str, paged: bool, device: str) -> None:
    """As if each sequence had the prefix's keys before its own."""
    case = pages()
    sink, cut = numbers(4), 6 if paged else 7
    prefix = [numbers(7, 2, 16) for _ in range(2)]
    case.options |= {"sink": sink, "rotary_cos": numbers(20, 4), "scale": 0.4}
    case.options["rotary_sin"] = numbers(20, 4)
    if form == "packed":
        case.q = torch.cat((case.q[0], case.q[1, :1]))
        case.options["cu_seqlens_q"] = ints(0, 2, 3)
    elif form == "dense":
        case.options.pop("page_table")
        case.options["cache_seqlens"] = ints(1, 2)
    # The same keys in dense caches, each after the prefix.
    whole = Case(case.q, torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16), dict(case.options))
    held, table = case.options["cache_seqlens"], whole.options.pop("page_table", None)
    for mine, cache, shared in zip(
        (whole.k_cache, whole.v_cache), (case.k_cache, case.v_cache), prefix, strict=True
    ):
        for b, n in enumerate(held.tolist()):
            own = cache[b] if table is None else cache[table[b].clamp(min=0).long()].flatten(0, 1)
            mine[b, : cut + n] = torch.cat((shared[:cut], own[:n]))
    whole.options["cache_seqlens"] = held + cut
    outs, lses, *_ = expected(whole, device)
    of_prefix: dict[str, Any] = {}
    if paged:
        prefix = [torch.cat((x, torch.full((1, 2, 16), math.nan))).view(4, 2, 2, 16).flip(0)
                  for x in prefix]  # fmt: skip
        of_prefix = {"prefix_page_table": ints(3, 2, 1, 0), "prefix_seqlen": ints(cut)}
    moved = case.to(device)
    dtype = moved.q.dtype
    given = {n: x.to(device) for n, x in of_prefix.items()}
    out, lse = flash_ext.attention_with_shared_prefix(
        moved.q, *(x.to(device, dtype) for x in prefix), moved.k_cache, moved.v_cache, **given,
        **moved.options, return_lse=True,
    )  # fmt: skip
    join = (torch.cat(outs), torch.cat(lses, 1)) if form == "packed" else (
        torch.stack(outs), torch.stack(lses))  # fmt: skip
    assert_near(out, join[0])
    assert_near(lse, join[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_prefix": torch.zeros(7, 1, 16)}, "k_prefix must be of shape"),
        ({"v_prefix": torch.zeros(6, 2, 16)}, "v_prefix must be of shape"),
        ({"prefix_seqlen": 8}, "prefix_seqlen must be 0 to 7"),
        ({"prefix_seqlen": 5.5}, "prefix_seqlen must be an int"),
        ({"prefix_seqlen": ints(8)}, "prefix_seqlen must be 0 to 7"),
        ({"prefix_page_table": ints(1, 2)}, "k_prefix must be of shape"),
        ({"scale": math.inf}, "scale must be"),
        ({"q": torch.zeros(2, 2, 3, 16)}, "q's number of heads"),
    ],
)
def test_prefix_errors_write_nothing(change: dict[str, Any], message: str) -> None:
    case = pages()
    given = {"q": case.q, "k_prefix": torch.zeros(7, 2, 16), "v_prefix": torch.zeros(7, 2, 16)}
    before = case.k_cache.clone()
    arguments = given | case.options | change
    with pytest.raises(ValueError, match=message):
        flash_ext.attention_with_shared_prefix(
            k_cache=case.k_cache, v_cache=case.v_cache, **arguments
        )
    assert torch.equal(case.k_cache, before)


# --- Errors ---

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "q's heads": ("q's number of heads", {"q": torch.zeros(2, 2, 3, 16)}),
    "q's dims": ("q must be of shape", {"q": torch.zeros(4, 4, 16)}),
    "k_cache": ("k_cache must be of shape", {"k_cache": torch.zeros(6, 4, 2, 8)}),
    "v_cache": ("v_cache must be of shape", {"v_cache": torch.zeros(5, 4, 2, 16)}),
    "one of two": ("k and v must be given together", {"v": None}),
    "k's heads": ("k must be of shape", {"k": torch.zeros(2, 2, 1, 16)}),
    "v's rows": ("v must be of shape", {"v": torch.zeros(2, 3, 2, 16)}),
    "no lengths": ("cache_seqlens must be given", {"cache_seqlens": None}),
    "lengths": ("cache_seqlens must be 0 to 10, of a cache of 12", {"cache_seqlens": ints(3, 11)}),
    "an int": ("cache_seqlens must be 0 to 10", {"cache_seqlens": -1}),
    "lengths in int64": ("cache_seqlens must be int32", {"cache_seqlens": torch.zeros(2).long()}),
    "table in int64": ("page_table must be int32", {"page_table": torch.zeros(2, 3).long()}),
    "a row": ("page_table must be int32 of shape", {"page_table": torch.zeros(1, 3).int()}),
    "a page": (r"page_table\[1, 2\] must be one of k's pages",
               {"page_table": ints([4, 1, 3], [0, 2, -1])}),
    "index": ("cache_batch_idx must be 0 to 1", {"cache_batch_idx": ints(0, 2)}),
    "index's shape": ("cache_batch_idx must be int32 of shape", {"cache_batch_idx": ints(0)}),
    "padding": ("cache_leftpad must be at least 0", {"cache_leftpad": ints(0, -1)}),
    "offsets of q": ("cu_seqlens_q must be", {"cu_seqlens_q": ints()}),
    "offsets of k": (r"cu_seqlens_k_new\[2\] must be",
                     {"k": torch.zeros(4, 2, 16), "v": torch.zeros(4, 2, 16),
                      "cu_seqlens_k_new": ints(0, 3, 5)}),
    "cos alone": ("rotary_cos and rotary_sin must be given together", {"rotary_sin": None}),
    "sin's shape": ("rotary_sin must be of shape", {"rotary_sin": torch.zeros(12, 3)}),
    "wide angles": ("rotary_cos must be of shape",
                    dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(12, 9))),
    "rotation alone": ("rotary_cos must be None without k", {"k": None, "v": None}),
    "scale": ("scale must be", {"scale": math.nan}),
    "window": ("window must be a pair", {"window": 3}),
    "slopes": ("alibi_slopes must be of shape", {"alibi_slopes": torch.zeros(3)}),
    "descale": ("k_descale must be None", {"k_descale": torch.zeros(2, 2)}),
    "gradient of q": ("q must be a constant", {"q": torch.zeros(2, 2, 4, 16, requires_grad=True)}),
    "gradient of k": ("k must be a constant", {"k": torch.zeros(2, 2, 2, 16, requires_grad=True)}),
    "gradient of sink": ("sink must be a constant", {"sink": torch.zeros(4, requires_grad=True)}),
    "gradient of angles": ("rotary_cos must be a constant",
                           {"rotary_cos": torch.zeros(12, 4, requires_grad=True)}),
    "variant": ("variant 'fa1' has no page table", {"variant": "fa1"}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "change"), BAD.values(), ids=BAD)
def test_errors_write_nothing(message: str, change: dict[str, Any]) -> None:
    case = pages()
    tensors = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache}
    before = [x.clone() for x in (case.k_cache, case.v_cache)]
    with pytest.raises(ValueError, match=f"flash_ext: {message}"):
        flash_ext.attention_with_cache(**tensors | case.options | change)
    assert torch.equal(case.k_cache, before[0]) and torch.equal(case.v_cache, before[1])


@pytest.mark.parametrize("function", ["attention_with_cache", "attention_with_shared_prefix"])
@pytest.mark.parametrize(("name", "hint"), [("softmax_scale", "; here it is scale"),
                                            ("bias", ""), ("attn_mask", ""),
                                            ("cache_seqlen", "; did you mean 'cache_seqlens'?"),
                                            ])  # fmt: skip
def test_an_unknown_option_is_named(function: str, name: str, hint: str) -> None:
    tensors = [torch.zeros(1, 1, 1, 8)] * (3 if function == "attention_with_cache" else 5)
    match = re.escape(f"{function} got an unexpected keyword argument '{name}'{hint}") + "$"
    with pytest.raises(TypeError, match=match):
        getattr(flash_ext, function)(*tensors, **{name: 1.0})


def test_flash_attn_2_s_own_refusals() -> None:
    case = pages()
    given = {"k": case.options["k"], "v": case.options["v"], "cache_seqlens": ints(0, 0),
             "rotary_cos": torch.ones(11, 4), "rotary_sin": torch.ones(11, 4)}  # fmt: skip
    caches = [torch.zeros(2, 12, 2, 16) for _ in range(2)]
    with pytest.raises(ValueError, match="rotary_cos must be of at least the 12 positions"):
        fa2.flash_attn_with_kvcache(case.q, *caches, **given)
    with pytest.raises(ValueError, match="block_table must be int32 of shape"):
        fa2.flash_attn_with_kvcache(case.q, *caches, **given, block_table=ints(0, 1))
    assert not caches[0].any()
