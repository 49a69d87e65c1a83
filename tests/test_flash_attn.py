"""The drop-in for flash-attn: signatures, results and gradients against plain math, refusals.

Would catch an argument that has moved or changed its default, a mask aligned top-left, a window
that is off by one, gradients that miss their place in a packed tensor, a cache written at the wrong
rows, and options that are silently ignored.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import flash_ext
from flash_ext import flash_attn as fa

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
NEEDED = inspect.Parameter.empty
OFFSETS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NEEDED)
SIGNATURES = {
    "flash_attn_func": dict.fromkeys("qkv", NEEDED) | OPTIONS,
    "flash_attn_kvpacked_func": {"q": NEEDED, "kv": NEEDED} | OPTIONS,
    "flash_attn_qkvpacked_func": {"qkv": NEEDED} | OPTIONS,
    "flash_attn_varlen_func": dict.fromkeys("qkv", NEEDED)
    | OFFSETS
    | OPTIONS
    | {"block_table": None},
    "flash_attn_varlen_kvpacked_func": {"q": NEEDED, "kv": NEEDED} | OFFSETS | OPTIONS,
    "flash_attn_varlen_qkvpacked_func": {"qkv": NEEDED, "cu_seqlens": NEEDED, "max_seqlen": NEEDED}
    | OPTIONS,
    "flash_attn_with_kvcache": {
        "q": NEEDED,
        "k_cache": NEEDED,
        "v_cache": NEEDED,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
    "pad_input": dict.fromkeys(("hidden_states", "indices", "batch", "seqlen"), NEEDED),
    "unpad_input": {"hidden_states": NEEDED, "attention_mask": NEEDED, "unused_mask": None},
    "index_first_axis": {"input": NEEDED, "indices": NEEDED},
}
CASES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (3, -1)},
    "causal window": {"window_size": (2, -1), "causal": True},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])},
    "deterministic": {"deterministic": True, "causal": True},
}
LENGTHS = ((5, 1, 7), (9, 4, 3))


def plain(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
          alibi_slopes=None, deterministic=False):  # fmt: skip
    """out and lse of one sequence, (S, H, D), from the definition in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(k.shape[0]) - (torch.arange(len(q))[:, None] + len(k) - len(q))
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * distance.abs()
    left, right = window_size
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible &= (distance >= -left) | (left < 0)
    visible &= (distance <= (0 if causal else right)) | (right < 0 and not causal)
    dead = ~visible.any(-1, keepdim=True)
    s = s.masked_fill(~visible & ~dead, -math.inf)
    p = s.softmax(-1).masked_fill(dead, 0)
    lse = s.logsumexp(-1).masked_fill(dead[:, 0], math.inf)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def sequences(lengths_q, lengths_k, heads_k=2, dim=8):
    torch.manual_seed(0)
    return [
        (torch.randn(m, 4, dim), torch.randn(n, heads_k, dim), torch.randn(n, heads_k, dim))
        for m, n in zip(lengths_q, lengths_k, strict=True)
    ]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def compare(run, join, parts, options, lse_dim, **names):
    """run(*inputs) against plain math: out, lse, the empty third value, and all gradients.

    join puts q, k and v of the sequences into the inputs of run.
    """
    parts = [tuple(x.requires_grad_() for x in triple) for triple in parts]
    expected = [plain(*triple, **options) for triple in parts]
    leaves = [x for triple in parts for x in triple]
    outs, lses = zip(*expected, strict=True)
    douts = [torch.randn_like(x) for x in outs]
    grads = torch.autograd.grad(outs, leaves, douts)

    inputs = [x.detach().requires_grad_() for x in join(parts)]
    out, lse, s_dmask = run(*inputs, **options, return_attn_probs=True)
    assert s_dmask.shape == (0,)
    stack = torch.stack if out.dim() == 4 else torch.cat
    torch.testing.assert_close(out, stack(outs), rtol=1e-4, atol=1e-5)
    expected_lse = torch.stack(lses) if lse_dim is None else torch.cat(lses, lse_dim)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    actual = torch.autograd.grad(out, inputs, stack(douts))
    triples = [tuple(grads[i : i + 3]) for i in range(0, len(grads), 3)]
    for x, y in zip(actual, join(triples), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert torch.equal(run(*inputs, **options), out)


def dense(triples):
    return [torch.stack(x) for x in zip(*triples, strict=True)]


def packed(triples):
    return [torch.cat(x) for x in zip(*triples, strict=True)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    found = inspect.signature(getattr(fa, name)).parameters
    assert [(n, p.default) for n, p in found.items()] == list(SIGNATURES[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found.values())


def test_every_name_has_its_signature():
    assert set(fa.__all__) == set(SIGNATURES)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4)])
def test_dense(options, lengths):
    m, n = lengths
    compare(fa.flash_attn_func, dense, sequences((m, m), (n, n)), options, None)

    def join(triples):
        q, k, v = dense(triples)
        return q, torch.stack((k, v), 2)

    compare(fa.flash_attn_kvpacked_func, join, sequences((m, m), (n, n)), options, None)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_qkvpacked(options):
    parts = sequences((6, 6), (6, 6), heads_k=4)
    compare(
        fa.flash_attn_qkvpacked_func, lambda x: [torch.stack(dense(x), 2)], parts, options, None
    )
    lengths = (5, 1, 7)
    run = fa.flash_attn_varlen_qkvpacked_func
    compare(
        lambda qkv, **o: run(qkv, offsets(lengths), max(lengths), **o),
        lambda x: [torch.stack(packed(x), 1)],
        sequences(lengths, lengths, heads_k=4),
        options,
        1,
    )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_varlen(options):
    bounds = (*map(offsets, LENGTHS), *map(max, LENGTHS))
    run = fa.flash_attn_varlen_func
    compare(
        lambda q, k, v, **o: run(q, k, v, *bounds, **o), packed, sequences(*LENGTHS), options, 1
    )

    def join(triples):
        q, k, v = packed(triples)
        return q, torch.stack((k, v), 1)

    run_packed = fa.flash_attn_varlen_kvpacked_func
    compare(
        lambda q, kv, **o: run_packed(q, kv, *bounds, **o), join, sequences(*LENGTHS), options, 1
    )


def test_dropout_is_flash_ext_s():
    q, k, v = dense(sequences((6, 6), (9, 9)))
    torch.manual_seed(3)
    out = fa.flash_attn_func(q, k, v, 0.4)
    torch.manual_seed(3)
    assert torch.equal(out, flash_ext.attention(q, k, v, dropout_p=0.4))
    assert not torch.equal(out, fa.flash_attn_func(q, k, v))


def test_copies_columns_that_are_not_contiguous():
    q, k, v = (x.mT.contiguous().mT for x in dense(sequences((6, 6), (9, 9))))
    expected = fa.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(fa.flash_attn_func(q, k, v), expected)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("lengths", "new"), [(4, 0), (4, 3), ([2, 7], 0), ([2, 7], 3), (None, 0)])
def test_kvcache(options, new, lengths):
    options = {name: x for name, x in options.items() if name != "deterministic"}
    torch.manual_seed(0)
    q, k_cache, v_cache = torch.randn(2, 3, 4, 8), *torch.randn(2, 3, 12, 2, 8)
    k, v = torch.randn(2, 2, new, 2, 8)
    held = [12, 12] if lengths is None else [lengths] * 2 if lengths == 4 else lengths
    k_want, v_want = k_cache.clone(), v_cache.clone()
    expected = []
    for b, n in enumerate(held):
        k_want[b, n : n + new], v_want[b, n : n + new] = k[b], v[b]
        expected.append(plain(q[b], k_want[b, : n + new], v_want[b, : n + new], **options))
    given = torch.tensor(lengths).int() if isinstance(lengths, list) else lengths
    pair = (k, v) if new else (None, None)
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, *pair, cache_seqlens=given, return_softmax_lse=True, **options
    )
    outs, lses = map(torch.stack, zip(*expected, strict=True))
    torch.testing.assert_close(out, outs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, lses, rtol=1e-4, atol=1e-5)
    assert torch.equal(k_cache, k_want) and torch.equal(v_cache, v_want)


@pytest.mark.parametrize(
    "name", ["rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table"]
)
def test_kvcache_refuses(name):
    q, cache, new = torch.randn(2, 3, 4, 8), torch.zeros(2, 12, 2, 8), torch.ones(2, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=name):
        fa.flash_attn_with_kvcache(
            q, cache, cache, new, new, cache_seqlens=0, **{name: torch.zeros(2)}
        )
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": 10}, "cache_seqlens must be 0 to 9"),
        ({"cache_seqlens": torch.tensor([0, 10]).int()}, "cache_seqlens must be 0 to 9"),
        ({"q": torch.zeros(2, 3, 4, 8).half()}, "q must be of k_cache's dtype"),
        ({"cache_seqlens": None}, "cache_seqlens must be given"),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens must be int32"),
        ({"v": None}, "k and v must be given together"),
        ({"v": torch.ones(2, 2, 2, 8)}, "v must be of shape"),
        ({"k": torch.ones(2, 3, 2, 8).double()}, "k must be of shape"),
    ],
)
def test_kvcache_errors_write_nothing(change, message):
    q, cache, new = torch.randn(2, 3, 4, 8), torch.zeros(2, 12, 2, 8), torch.ones(2, 3, 2, 8)
    with pytest.raises(ValueError, match=message):
        given = {"q": q, "k": new, "v": new, "cache_seqlens": 0} | change
        fa.flash_attn_with_kvcache(k_cache=cache, v_cache=cache, **given)
    assert not cache.any()


def test_varlen_refuses_a_block_table():
    (triple,) = sequences((5,), (5,))
    bounds = offsets((5,))
    with pytest.raises(NotImplementedError, match="block_table"):
        fa.flash_attn_varlen_func(*triple, bounds, bounds, 5, 5, block_table=torch.zeros(1, 1))


@pytest.mark.parametrize("shape", [(2, 5, 2, 4, 8), (5, 3, 4, 8)])
def test_packed_shapes_are_checked(shape):
    with pytest.raises(ValueError, match="qkv must be of shape"):
        fa.flash_attn_qkvpacked_func(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(dtype):
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=dtype)
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]], dtype=dtype)
    x = torch.arange(16.0).view(2, 4, 2).requires_grad_()
    packed, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 4, 5, 6] and cu_seqlens.tolist() == [0, 2, 5]
    assert longest == 3 and used.tolist() == [2, 3]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert torch.equal(packed, x[mask.bool()])
    back = fa.pad_input(packed, indices, 2, 4)
    assert torch.equal(back, x * mask[..., None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, mask[..., None].expand_as(x).float())

    packed, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6] and cu_seqlens.tolist() == [0, 3, 6]
    assert longest == 3 and used.tolist() == [2, 3]
    with pytest.raises(ValueError, match="attention_mask must be of shape"):
        fa.unpad_input(x, mask[:, :3])
    with pytest.raises(ValueError, match="input must have two dimensions"):
        fa.index_first_axis(torch.zeros(3), indices)
