"""batch_invariant: the bits of a row depend on its query and keys alone.

A sequence is computed at once and dense, as in training; packed among others; and in random chunks
before pages, with other sequences beside it, in another order. Would catch splits of the keys,
tiles or a softmax that depend on the batch, on the number of queries, on where a chunk ends, on the
page size, or on the rows beside a row: some rows have scores that grow from key to key. Their
maximum moves, which must not move that of others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    Problem,
    assert_accurate,
    attend,
    expected_forward,
    make_inputs,
    nan_filled_outputs,
)
from grids import DEVICES
from torch import Tensor

import flash_ext

INVARIANT = {"causal": True, "batch_invariant": True}
PAGE_SIZES = (16, 8, 64, 1)


@dataclass
class Text:
    """A sequence of queries (n, Hq, D), keys (n, Hk, D) and values."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.q)

    def part(self, begin: int, end: int) -> Text:
        return Text(self.q[begin:end], self.k[begin:end], self.v[begin:end])


def make_text(
    n: int, generator: torch.Generator, device: str, heads: tuple[int, int], dim: int
) -> Text:
    """Of one text the first column of k grows with the position, and that of q, in every fifth
    query: their scores grow by up to 13 powers of two from tile to tile."""
    q, k, v = (torch.randn(n, h, dim, generator=generator) for h in (heads[0], heads[1], heads[1]))
    k[:, :, 0] = torch.arange(n)[:, None] / 16
    q[:, :, 0] = 0
    q[::5, :, 0] = 10 * torch.rand((n + 4) // 5, 1, generator=generator)
    return Text(*(x.to(device, torch.bfloat16) for x in (q, k, v)))


def as_training(texts: list[Text], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """out (n, Hq, D) and lse (Hq, n) of each, packed."""
    q, k, v = (torch.cat([getattr(t, name) for t in texts]) for name in "qkv")
    edges = torch.tensor([0, *map(len, texts)]).cumsum(0).to(q.device, torch.int32)
    out, lse = flash_ext.attention_varlen(q, k, v, edges, edges, return_lse=True, **options)
    lengths = [len(t) for t in texts]
    return list(zip(out.split(lengths), lse.split(lengths, 1), strict=True))


def alone(text: Text, **options: Any) -> tuple[Tensor, Tensor]:
    """The same of one, dense."""
    out, lse = flash_ext.attention(
        *(x[None] for x in (text.q, text.k, text.v)), return_lse=True, **options
    )
    return out[0], lse[0]


def as_generation(
    texts: list[Text], page_size: int, draw: random.Random, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """The same in chunks, from pages: each call has some of the texts, in any order, each with the
    next chunk of any length, often of one token."""
    device, longest = texts[0].q.device, max(map(len, texts))
    columns = -(-longest // page_size) + draw.randrange(3)
    pages = torch.tensor(draw.sample(range(len(texts) * columns), len(texts) * columns))
    table = pages.view(len(texts), columns).to(device, torch.int32)
    caches = [
        x.new_full((len(pages), page_size, *x.shape[1:]), float("nan"))
        for x in (texts[0].k, texts[0].v)
    ]
    done, found = [0] * len(texts), [([], []) for _ in texts]
    while unfinished := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        sizes = [
            min(draw.choice((1, 1, 2, 17, 64, 130, 300)), len(texts[i]) - done[i]) for i in chosen
        ]
        parts = [texts[i].part(done[i], done[i] + n) for i, n in zip(chosen, sizes, strict=True)]
        q, k, v = (torch.cat([getattr(part, name) for part in parts]) for name in "qkv")
        edges = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        held = torch.tensor([done[i] for i in chosen], dtype=torch.int32, device=device)
        new: dict[str, Any] = {"cu_seqlens_q": edges, "cu_seqlens_k_new": edges}
        if len(set(sizes)) == 1 and draw.random() < 0.5:  # dense queries
            q, k, v = (x.unflatten(0, (len(chosen), sizes[0])) for x in (q, k, v))
            new = {}
        out, lse = flash_ext.attention_with_cache(
            q, *caches, k=k, v=v, cache_seqlens=held, page_table=table[chosen], return_lse=True,
            **new, **options,
        )  # fmt: skip
        if not new:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        for i, n, *found_now in zip(
            chosen, sizes, out.split(sizes), lse.split(sizes, 1), strict=True
        ):
            for parts, x in zip(found[i], found_now, strict=True):
                parts.append(x)
            done[i] += n
    return [(torch.cat(outs), torch.cat(lses, 1)) for outs, lses in found]


def assert_same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], what: str) -> None:
    for name, x, y in zip(("out", "lse"), a, b, strict=True):
        assert not x.isnan().any()
        wrong = (x != y).nonzero()
        assert len(wrong) == 0, f"{what}: {name} differs in {len(wrong)}, first at {wrong[0]}"


def check(seed: int, device: str, longest: int, **options: Any) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dim = draw.choice((64, 128, 32, 96, 256) if device == "cuda" else (16,))
    heads = draw.choice(((4, 4), (8, 2), (8, 1), (6, 2)) if device == "cuda" else ((2, 1),))
    size = draw.choice(PAGE_SIZES[:3] if options.get("variant") == "fa3" else PAGE_SIZES)
    if device == "cuda" and size % 8 != 0:
        options = {"variant": "fa2"} | options  # fa3 has other bits
    options = INVARIANT | options
    texts = [
        make_text(draw.randint(1, longest), generator, device, heads, dim)
        for _ in range(draw.randint(1, 5))
    ]
    expected = [alone(text, **options) for text in texts]
    case = f"seed {seed}, d {dim}, heads {heads}, pages of {size}, {list(map(len, texts))}"
    q, k, v = (torch.stack([x.flip(0), x]) for x in (texts[0].q, texts[0].k, texts[0].v))
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    assert_same_bits((out[1], lse[1]), expected[0], f"{case}: dense, with another")
    order = draw.sample(range(len(texts)), len(texts))
    for i, found in zip(order, as_training([texts[i] for i in order], **options), strict=True):
        assert_same_bits(found, expected[i], f"{case}: packed, {i}")
    for i, found in enumerate(as_generation(texts, size, draw, **options)):
        assert_same_bits(found, expected[i], f"{case}: in chunks, {i}")


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "fa2": {"variant": "fa2"},
    "window": {"window": (70, 0)},
    "softcap": {"softcap": 20.0},
    "negative scale": {"scale": -0.2},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", OPTIONS)
def test_bits_of_training_and_generation(case: str, device: str) -> None:
    for seed in range(20 if device == "cuda" else 2):
        check(seed, device, 700 if device == "cuda" else 150, **OPTIONS[case])


@pytest.mark.parametrize("device", DEVICES)
def test_bits_with_a_sink_and_slopes(device: str) -> None:
    for seed in range(20 if device == "cuda" else 2):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        texts = [make_text(n, generator, device, (2, 1), 64) for n in (1, 90, 300)]
        more = torch.randn(2, 2, generator=generator).to(device)
        options = INVARIANT | {"sink": 8 * more[0], "alibi_slopes": more[1].abs()}
        expected = [alone(text, **options) for text in texts]
        for i, found in enumerate(as_training(texts, **options)):
            assert_same_bits(found, expected[i], f"packed, {i}")
        for i, found in enumerate(as_generation(texts, 16, draw, **options)):
            assert_same_bits(found, expected[i], f"in chunks, {i}")


@pytest.mark.gpu
def test_500_random_batches() -> None:
    for seed in range(100, 600):
        check(seed, "cuda", 3000 if seed % 10 == 0 else 600)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_beside_large_and_infinite_scores(device: str) -> None:
    """The rows of a tile do not change each other, whatever their scores are."""
    generator = torch.Generator().manual_seed(0)
    text = make_text(200, generator, device, (2, 1), 64)
    expected = alone(text, **INVARIANT)
    other = Text(text.q.clone(), text.k, text.v)
    other.q[::2] *= 1e4
    other.q[1::6] = float("inf")
    found = alone(other, **INVARIANT)
    rows = torch.arange(200, device=device)
    same = (rows % 2 == 1) & (rows % 6 != 1)
    assert_same_bits(
        (found[0][same], found[1][:, same]), (expected[0][same], expected[1][:, same]), "rows"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_num_splits_of_flash_attn(device: str) -> None:
    from flash_ext.flash_attn import flash_attn_with_kvcache

    generator = torch.Generator().manual_seed(1)
    text = make_text(300, generator, device, (4, 2), 64)
    expected, _ = alone(text, **INVARIANT)
    caches = [x[None].repeat(3, 2, 1, 1) for x in (text.k, text.v)]
    out = flash_attn_with_kvcache(
        text.q[None, -1:].repeat(3, 1, 1, 1), *caches, cache_seqlens=300, causal=True, num_splits=1
    )
    assert all(torch.equal(row[0], expected[-1]) for row in out)


@pytest.mark.parametrize("device", DEVICES)
def test_who_refuses(device: str) -> None:
    q = torch.zeros(1, 2, 2, 16, device=device, dtype=torch.float16)
    with pytest.raises((ValueError, RuntimeError), match=r"'fa1' is not batch-invariant"):
        flash_ext.attention(q, q, q, batch_invariant=True, variant="fa1")
    with pytest.raises((ValueError, RuntimeError), match=r"batch_invariant must be False with 8"):
        of_8_bits = q.to(torch.float8_e4m3fn)
        flash_ext.attention(q, of_8_bits, of_8_bits, batch_invariant=True)
    found = flash_ext.explain(q, q, q, batch_invariant=True)
    assert found.reasons["fa1"] == "variant 'fa1' is not batch-invariant"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_bits_of_long_keys(seed: int) -> None:
    """Several splits, by one CTA in training and by several in generation."""
    window = {"window": (2500, 0)} if seed % 4 == 3 else {}
    check(seed, "cuda", 9000, variant="fa3", **window)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", KERNEL_DIMS, ids=str)
@torch.no_grad()
def test_accuracy_of_long_keys(dims: tuple[int, int]) -> None:
    """In one CTA's memory and in that of several; lengths at the edges of splits, and without."""
    lengths = (0, 1, 2047, 2048, 2049, 4096, 6000)
    for batch, seqlen_q, options in (
        (7, 1, {}),
        (7, 200, {"causal": True}),
        (7, 600, {"causal": True}),
        (7, 9, {"causal": True, "window": (2100, 0)}),
    ):
        p = Problem(
            batch, seqlen_q, 6000, 4, 2, dims[0], head_dim_v=dims[1], seqused_k=lengths, loss="out",
            **options,
        )  # fmt: skip
        inputs = make_inputs(p, "cuda")
        with nan_filled_outputs():
            out, lse = attend(p, inputs, return_lse=True, variant="fa3", batch_invariant=True)
        assert_accurate({"out": out, "lse": lse}, expected_forward(p, inputs), p.dtype)


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_of_splits() -> None:
    """Other lengths in a replay, also fewer splits than before."""
    p = Problem(5, 1, 9000, 8, 2, 64, seqused_k=(9000,) * 5, loss="out")
    inputs = make_inputs(p, "cuda")
    used = inputs.seqused_k
    assert used is not None
    options: dict[str, Any] = {"variant": "fa3", "batch_invariant": True, "return_lse": True}
    attend(p, inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(p, inputs, **options)
    for lengths in ((1, 0, 2048, 9000, 3000), (9000,) * 5, (5000, 1, 1, 0, 7000)):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert_same_bits(found, attend(p, inputs, **options), str(lengths))
