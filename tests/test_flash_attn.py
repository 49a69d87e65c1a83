"""The drop-in for flash-attn: signatures, results and gradients against plain math, refusals.

Would catch an argument that has moved or changed its default, a mask aligned top-left, a window
that is off by one, gradients that miss their place in a packed tensor, a cache written at the wrong
rows or by a call that is refused, lse of another convention, a cast by autocast that flash-attn
does not make, and options that are silently ignored.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import flash_ext
from flash_ext import flash_attn as fa
from flash_ext.flash_attn import bert_padding

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
SLOPES = torch.tensor([0.5, 0.1, 0.2, 0.3])
CASES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (3, -1)},
    "causal window": {"window_size": (2, -1), "causal": True},
    "softcap": {"softcap": 1.5},
    "far right": {"window_size": (-1, 4)},
    "far": {"window_size": (30, 12)},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi causal": {"alibi_slopes": SLOPES, "causal": True},
    "alibi right": {"alibi_slopes": SLOPES, "window_size": (-1, 0)},
    "alibi causal window": {"alibi_slopes": SLOPES, "causal": True, "window_size": (2, 5)},
    "alibi far causal": {"alibi_slopes": SLOPES, "causal": True, "window_size": (30, 5)},
    "deterministic": {"deterministic": True, "causal": True},
}
LENGTHS = ((5, 1, 7), (9, 4, 3))


def plain(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
          alibi_slopes=None, deterministic=False, longest=None):  # fmt: skip
    """out and lse of one sequence, (S, H, D), as flash-attn 2.8 defines them, in float32.

    longest: what it compares the window with.
    """
    longest = len(k) if longest is None else longest
    left, right = (-1 if side >= longest else side for side in window_size)
    right = 0 if causal else right
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(k.shape[0]) - (torch.arange(len(q))[:, None] + len(k) - len(q))
    if alibi_slopes is not None and left < 0 and right == 0:
        s = s + alibi_slopes[:, None, None] * torch.arange(k.shape[0])
    elif alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * distance.abs()
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible &= (distance >= -left) | (left < 0)
    visible &= (distance <= right) | (right < 0)
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
    longest = max(len(k) for _, k, _ in parts)
    expected = [plain(*triple, **options, longest=longest) for triple in parts]
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


def test_a_packed_window_is_compared_with_max_seqlen_k():
    (triple,) = sequences((9,), (4,))
    q, k, v = (x[None] for x in triple)
    bounds = (offsets((9,)), offsets((4,)))
    for longest, right in ((4, -1), (5, 4), (None, 4)):
        out = fa.flash_attn_varlen_func(*triple, *bounds, 9, longest, window_size=(-1, 4))
        assert torch.equal(out, flash_ext.attention(q, k, v, window=(-1, right))[0])


def test_lse_with_slopes_of_each_sequence():
    """flash-attn's: by slope · (i + Sk − Sq) more than that of the scores as documented."""
    options = {"causal": True, "return_attn_probs": True}
    slopes, parts = torch.rand(3, 4), sequences(*LENGTHS)
    bounds = tuple(map(offsets, LENGTHS))
    _, lse, _ = fa.flash_attn_varlen_func(
        *packed(parts), *bounds, *map(max, LENGTHS), alibi_slopes=slopes, **options
    )
    _, documented = flash_ext.attention_varlen(
        *packed(parts), *bounds, causal=True, alibi_slopes=slopes, return_lse=True
    )
    shift = [torch.arange(m) + n - m for m, n in zip(*LENGTHS, strict=True)]
    shift = [s[:, None] * x for s, x in zip(slopes, shift, strict=True)]
    torch.testing.assert_close(lse, documented.abs().where(documented.isinf(), documented)
                               + torch.cat(shift, 1))  # fmt: skip

    q, k, v = (x[:3] for x in torch.randn(3, 3, 6, 4, 8))
    _, lse, _ = fa.flash_attn_func(q, k, v, alibi_slopes=slopes, **options)
    one_by_one = [
        fa.flash_attn_func(*(x[b : b + 1] for x in (q, k, v)), alibi_slopes=s, **options)[1]
        for b, s in enumerate(slopes)
    ]
    torch.testing.assert_close(lse, torch.cat(one_by_one))
    _, last = fa.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=6, causal=True, alibi_slopes=slopes, return_softmax_lse=True
    )
    torch.testing.assert_close(last, lse)


def test_version_is_flash_attn_s():
    assert tuple(map(int, fa.__version__.split("."))) >= (2, 8, 0)


@pytest.mark.parametrize("run", [fa.flash_attn_func, fa.flash_attn_with_kvcache])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_leaves_half_precision_alone(dtype, run):
    q, k, v = (x.to(dtype) for x in dense(sequences((6, 6), (9, 9))))
    expected = run(q, k, v, causal=True)
    for other in {torch.float16, torch.bfloat16} - {dtype}:
        with torch.autocast("cpu", other):
            out = run(q, k, v, causal=True)
            assert torch.is_autocast_enabled("cpu")
        assert out.dtype == dtype and torch.equal(out, expected)


def test_autocast_casts_other_inputs_but_no_cache():
    q, k, v = dense(sequences((6, 6), (9, 9)))
    expected = fa.flash_attn_with_kvcache(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fa.flash_attn_with_kvcache(q, k, v), expected)
        assert fa.flash_attn_func(q, k, v).dtype == torch.bfloat16
        assert fa.flash_attn_func(q, k.half(), v.half()).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [CASES["window"], CASES["far right"], CASES["alibi causal"]])
def test_compiled(options):
    def run(q, k, v):
        return fa.flash_attn_func(q, k, v, **options, return_attn_probs=True)

    inputs = [x.half() for x in dense(sequences((9, 9), (4, 4)))]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
        for x, y in zip(found, run(*inputs), strict=True):
            torch.testing.assert_close(x, y)


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
        rows = slice(n + new)
        expected.append(plain(q[b], k_want[b, rows], v_want[b, rows], **options, longest=12))
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
    ("change", "message"),
    [
        ({"cache_seqlens": 10}, "cache_seqlens must be 0 to 9"),
        ({"cache_seqlens": torch.tensor([0, 10]).int()}, "cache_seqlens must be 0 to 9"),
        ({"q": torch.zeros(2, 3, 4, 8).half()}, "k_cache must be of shape .* torch.float16"),
        ({"cache_seqlens": None}, "cache_seqlens must be given"),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens must be int32"),
        ({"v": None}, "k and v must be given together"),
        ({"v": torch.ones(2, 2, 2, 8)}, "v must be of shape"),
        ({"k": torch.ones(2, 3, 2, 8).double()}, "k must be of shape"),
        ({"k": torch.ones(3)}, "k must be of shape"),
        ({"cache_seqlens": [0, 0]}, "cache_seqlens must be a tensor"),
        ({"q": torch.zeros(3, 4, 8)}, "q must be of shape"),
        ({"q": None}, "q must be a tensor, got None"),
        ({"q": torch.zeros(2, 3, 3, 8)}, "q's number of heads"),
        ({"block_table": torch.zeros(1, 1).int()}, "block_table must be int32 of shape"),
        ({"cache_batch_idx": torch.zeros(2)}, "cache_batch_idx must be int32"),
        ({"cache_leftpad": torch.zeros(3).int()}, "cache_leftpad must be int32 of shape"),
        ({"rotary_cos": torch.zeros(12, 4)}, "rotary_cos and rotary_sin must be given together"),
        ({"softmax_scale": math.inf}, "scale must be"),
        ({"softcap": math.nan}, "softcap must be"),
        ({"window_size": 128}, "window_size must be a pair"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be of shape"),
        ({"alibi_slopes": [0.0] * 4}, "alibi_slopes must be a tensor"),
    ],
)
def test_kvcache_errors_write_nothing(change, message):
    q, cache, new = torch.randn(2, 3, 4, 8), torch.zeros(2, 12, 2, 8), torch.ones(2, 3, 2, 8)
    with pytest.raises(ValueError, match=message):
        given = {"q": q, "k": new, "v": new, "cache_seqlens": 0} | change
        fa.flash_attn_with_kvcache(k_cache=cache, v_cache=cache, **given)
    assert not cache.any()


@pytest.mark.filterwarnings("ignore")
def test_kvcache_with_lengths_in_a_tensor_is_traced():
    q, k, v = (torch.randn(2, n, 2, 16, dtype=torch.bfloat16) for n in (1, 8, 8))
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    run = torch.compile(fa.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    expected = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    torch.testing.assert_close(run(q, k, v, cache_seqlens=lengths), expected)


def test_kvcache_names_a_bad_cache():
    q, k, v = torch.zeros(2, 3, 4, 8), *torch.zeros(2, 2, 12, 2, 8)
    for name, change in (
        ("k_cache", {"k_cache": k[:1]}),
        ("k_cache", {"k_cache": k[..., :4]}),
        ("v_cache", {"v_cache": v[:, :5]}),
        ("v_cache", {"v_cache": v.mT.contiguous().mT}),
        ("v_cache", {"v_cache": v.double()}),
        ("k_cache", {"k_cache": k[0]}),
    ):
        with pytest.raises(ValueError, match=f"flash_ext: {name} must be"):
            fa.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v} | change)


@pytest.mark.parametrize("bad", [None, [1.0], torch.zeros(2).numpy()])
def test_what_is_no_tensor_is_named(bad):
    (x,) = dense([(torch.zeros(5, 4, 8),)] * 2)
    with pytest.raises(ValueError, match="flash_ext: k must be a tensor, got"):
        fa.flash_attn_func(x, bad, x)
    with pytest.raises(ValueError, match="flash_ext: qkv must be a tensor, got"):
        fa.flash_attn_qkvpacked_func(bad)


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
    narrow = fa.pad_input(packed, indices.int(), 2, 4)
    assert torch.equal(narrow, fa.pad_input(packed, indices, 2, 4))
    assert torch.autograd.grad(narrow.sum(), x)[0].sum() == 12
    with pytest.raises(ValueError, match="attention_mask must be of shape"):
        fa.unpad_input(x, mask[:, :3])
    with pytest.raises(ValueError, match="input must be of two dimensions"):
        fa.index_first_axis(torch.zeros(3), indices)


def test_an_empty_batch_is_unpadded():
    packed, indices, cu_seqlens, longest, used = fa.unpad_input(
        torch.zeros(0, 4, 2), torch.zeros(0, 4)
    )
    assert packed.shape == (0, 2) and longest == 0 and cu_seqlens.tolist() == [0]
    assert indices.numel() == used.numel() == 0


def test_concatenated_sequences():
    """flash-attn's own example: three rows of six, of two, two and one sequence."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(36.0).view(3, 6, 2).requires_grad_()
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, lengths
    )
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)] and longest == 6
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    with pytest.raises(ValueError, match="attention_mask_in_length must be of shape"):
        bert_padding.unpad_input_for_concatenated_sequences(x, lengths[:2])


def test_rows_are_put_and_kept():
    x, rows = torch.randn(5, 3, requires_grad=True), torch.tensor([4, 1])
    taken, kept = bert_padding.index_first_axis_residual(x, rows)
    assert torch.equal(taken, x[rows]) and torch.equal(kept, x)
    (gradient,) = torch.autograd.grad(2 * taken.sum() + kept.sum(), x)
    assert gradient[:, 0].tolist() == [1, 3, 1, 1, 3]
    put = bert_padding.index_put_first_axis(taken, rows.int(), 5)
    assert torch.equal(put[rows], taken) and put.count_nonzero() == 6
    assert torch.equal(bert_padding.IndexFirstAxis.apply(x, rows), taken)
    assert torch.equal(bert_padding.IndexPutFirstAxis.apply(taken, rows, 5), put)
    assert torch.equal(bert_padding.IndexFirstAxisResidual.apply(x, rows)[0], taken)
