"""The drop-in for FlashAttention-3's module: signatures, results, refusals, and a model on it.

Would catch an argument that has moved or changed its default, a window by flash-attn 2's rule,
results in another order, descales that are dropped, an option that is ignored where it would change
the result, a cache that a refused call has written, and splits that are added up wrongly.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import pytest
import torch
from attention_testing import device_unsupported_reason

import flash_ext
from flash_ext import flash_attn as fa2
from flash_ext import flash_attn_interface as fa3

Tensor = torch.Tensor

NEEDED = inspect.Parameter.empty
QKV = dict.fromkeys("qkv", NEEDED)
DESCALES: dict[str, object] = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
SCALE_AND_MASK: dict[str, object] = {"softmax_scale": None, "causal": False}
WINDOW: dict[str, object] = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
SPEED: dict[str, object] = {"num_splits": 1, "pack_gqa": None}
LAST: dict[str, object] = {"deterministic": False, "sm_margin": 0, "return_attn_probs": False}
SIGNATURES: dict[str, dict[str, object]] = {
    "flash_attn_func": QKV | SCALE_AND_MASK | {"qv": None} | DESCALES | WINDOW | SPEED | LAST,
    "flash_attn_qkvpacked_func": {"qkv": NEEDED}
    | SCALE_AND_MASK
    | DESCALES
    | WINDOW
    | {"deterministic": False, "num_heads_q": None, "sm_margin": 0, "return_attn_probs": False},
    "flash_attn_varlen_func": QKV
    | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NEEDED)
    | {"seqused_q": None, "seqused_k": None}
    | SCALE_AND_MASK
    | {"qv": None}
    | DESCALES
    | WINDOW
    | SPEED
    | LAST,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), NEEDED)
    | dict.fromkeys(
        ("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")
    )
    | dict.fromkeys(("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"))
    | {"max_seqlen_q": None, "rotary_seqlens": None}
    | DESCALES
    | SCALE_AND_MASK
    | WINDOW
    | {"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None}
    | {"sm_margin": 0, "return_softmax_lse": False},
    "flash_attn_combine": {"out_partial": NEEDED, "lse_partial": NEEDED}
    | {"out": None, "out_dtype": None},
    "get_scheduler_metadata": dict.fromkeys(
        ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv"), NEEDED
    )
    | {"headdim": NEEDED, "cache_seqlens": NEEDED, "qkv_dtype": torch.bfloat16}
    | dict.fromkeys(("headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"))
    | {"max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1), "attention_chunk": 0}
    | {"has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 4)},
    "far": {"window_size": (4, 7)},
    "farthest": {"window_size": (100, 100)},
    "unlimited": {"window_size": (-7, -2)},
    "causal window": {"window_size": (2, 5), "causal": True},
    "softcap": {"softcap": 1.5},
    "no softcap": {"softcap": -1.0},
    "speed": {"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "deterministic": True},
}
LENGTHS = [(6, 6), (4, 9), (9, 4)]


def randn(*shape: int, device: str = "cpu") -> Tensor:
    """In a type that the device has kernels for."""
    return torch.randn(*shape, device=device, dtype=None if device == "cpu" else torch.bfloat16)


def qkv(seqlen_q: int, seqlen_k: int, heads_k: int = 2, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (seqlen_q, 4), (seqlen_k, heads_k), (seqlen_k, heads_k)
    return [randn(2, *shape, 16, device=device) for shape in shapes]


def expected(
    tensors: list[Tensor],
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **no_effect: object,
) -> tuple[Tensor, Tensor]:
    """Standard attention of (B, S, H, D), whose windows are as they say."""
    left, right = window_size
    return flash_ext.reference.attention(
        *(x.float() for x in tensors),
        scale=softmax_scale,
        causal=causal,
        window=(max(left, -1), max(right, -1)),
        softcap=max(softcap, 0.0),
    )


def assert_near(found: Tensor, wanted: Tensor) -> None:
    loose = 2e-2 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.float(), wanted.float(), rtol=loose, atol=loose)


# --- Results ---


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    found = inspect.signature(getattr(fa3, name)).parameters
    assert [(n, p.default) for n, p in found.items()] == list(SIGNATURES[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found.values())


def test_every_name_has_its_signature() -> None:
    assert set(fa3.__all__) == set(SIGNATURES)
    assert flash_ext.flash_attn_interface is fa3
    assert importlib.import_module("flash_ext.flash_attn.flash_attn_interface") is not fa3


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_dense(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in qkv(*lengths)]
    out, lse = fa3.flash_attn_func(*leaves, **options, return_attn_probs=True)
    want_out, want_lse = expected(leaves, **options)
    assert_near(out, want_out)
    assert_near(lse, want_lse)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, lengths[0])
    assert torch.equal(fa3.flash_attn_func(*leaves, **options), out)
    douts = [torch.randn_like(out), torch.randn_like(lse).where(lse.isfinite(), 0)]
    wanted = torch.autograd.grad([want_out, want_lse.where(lse.isfinite(), 0)], leaves, douts)
    for a, b in zip(torch.autograd.grad([out, lse], leaves, douts), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_window_is_not_flash_attn_2_s() -> None:
    """There a side of at least Sk is unlimited. Query 0 sees key 0 with 5 on the right, not 4."""
    tensors = qkv(9, 4)
    for right, sees in ((4, False), (5, True)):
        out = fa3.flash_attn_func(*tensors, window_size=(-1, right))
        assert out[:, 0].any() == sees
        assert fa2.flash_attn_func(*tensors, window_size=(-1, right))[:, 0].any()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_varlen(options: dict[str, Any]) -> None:
    lengths_q, lengths_k = (5, 1, 7), (9, 4, 3)
    parts = [[x[:1] for x in qkv(m, n)] for m, n in zip(lengths_q, lengths_k, strict=True)]
    packed = [torch.cat([x[0] for x in each]) for each in zip(*parts, strict=True)]
    bounds = [torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k)]
    out, lse = fa3.flash_attn_varlen_func(
        *packed, *bounds, max(lengths_q), max(lengths_k), **options, return_attn_probs=True
    )
    outs, lses = zip(*(expected(part, **options) for part in parts), strict=True)
    assert_near(out, torch.cat([x[0] for x in outs]))
    assert_near(lse, torch.cat([x[0] for x in lses], 1))


def test_varlen_with_used_keys() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv(6, 6))
    bounds, used = torch.tensor([0, 6, 12]).int(), torch.tensor([2, 6]).int()
    call = (q, k, v, bounds, bounds, 6, 6)
    out = fa3.flash_attn_varlen_func(*call, seqused_k=used, causal=True)
    wanted = flash_ext.attention_varlen(q, k, v, bounds, bounds, causal=True, seqused_k=used)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_qkvpacked(options: dict[str, Any]) -> None:
    options = {n: x for n, x in options.items() if n not in SPEED}
    q, k, v = qkv(6, 6, heads_k=4)
    wanted = fa3.flash_attn_func(q, k, v, **options)
    found = fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **options)
    assert torch.equal(found, wanted)
    q, k, v = qkv(6, 6, heads_k=2)
    out, lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    found = fa3.flash_attn_qkvpacked_func(
        torch.cat((q, k, v), 2), **options, num_heads_q=4, return_attn_probs=True
    )
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


@pytest.mark.parametrize("heads", [None, 0, 3, 8, 9])
def test_qkvpacked_needs_the_heads_of_q(heads: int | None) -> None:
    with pytest.raises(ValueError, match="num_heads_q must be given with qkv of 4 dimensions"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(2, 6, 8, 16), num_heads_q=heads)


@pytest.mark.parametrize("call", ("dense", "packed", "varlen", "cache"))
def test_fp8(call: str, device: str) -> None:
    if device == "cuda" and (why := device_unsupported_reason("fa3", device)):
        pytest.skip(f"fa3 {why}")
    heads_k = 4 if call == "packed" else 2
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(6, 6, heads_k, device))
    names = ("q_descale", "k_descale", "v_descale")
    descales = {name: torch.rand(2, heads_k, device=device) + 0.5 for name in names}
    wanted = flash_ext.attention(q, k, v, causal=True, **descales)
    assert wanted.dtype == torch.bfloat16
    options = {"causal": True} | descales
    if call == "dense":
        found = fa3.flash_attn_func(q, k, v, **options)
    elif call == "packed":
        found = fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **options)
    elif call == "varlen":
        bounds = torch.tensor([0, 6, 12], dtype=torch.int32, device=device)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = fa3.flash_attn_varlen_func(*flat, bounds, bounds, 6, 6, **options)
        found = found.unflatten(0, (2, 6))
    else:
        caches = [torch.zeros(2, 9, 2, 16, device=device).to(q.dtype) for _ in range(2)]
        found = fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, **options)
        for cache, new in zip(caches, (k, v), strict=True):
            assert torch.equal(cache[:, :6].float(), new.float()) and not cache[:, 6:].float().any()
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("lengths", "new"), [(4, 0), (4, 3), ([2, 7], 3), (None, 0)])
def test_kvcache(lengths: Any, new: int, options: dict[str, Any]) -> None:
    options = {name: x for name, x in options.items() if name != "deterministic"}
    q, k_cache, v_cache = qkv(3, 12)
    k, v = torch.randn(2, 2, new, 2, 16)
    held = [12, 12] if lengths is None else [lengths] * 2 if lengths == 4 else lengths
    k_want, v_want, wanted = k_cache.clone(), v_cache.clone(), []
    for b, n in enumerate(held):
        k_want[b, n : n + new], v_want[b, n : n + new] = k[b], v[b]
        rows = slice(b, b + 1), slice(n + new)
        wanted.append(expected([q[b : b + 1], k_want[rows], v_want[rows]], **options))
    given = torch.tensor(lengths).int() if isinstance(lengths, list) else lengths
    pair = (k, v) if new else (None, None)
    out, lse, *accumulated = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *pair, cache_seqlens=given, return_softmax_lse=True, **options
    )
    outs, lses = map(torch.cat, zip(*wanted, strict=True))
    assert_near(out, outs)
    assert_near(lse, lses)
    assert [x.shape for x in accumulated] == [(0,), (0,)]
    assert torch.equal(k_cache, k_want) and torch.equal(v_cache, v_want)


@pytest.mark.parametrize("splits", [1, 3, 7, 8, 9, 15, 40])
def test_combine(splits: int, device: str) -> None:
    torch.manual_seed(splits)
    out = torch.randn(splits, 2, 5, 4, 24, device=device)
    lse = 3 * torch.randn(splits, 2, 4, 5, device=device).mT
    lse[torch.rand_like(lse) < 0.3] = -math.inf
    lse[:, 0, 2] = -math.inf
    out[lse == -math.inf] = math.nan
    weights = torch.softmax(lse.double(), 0).nan_to_num()
    wanted = (weights[..., None] * out.double().nan_to_num()).sum(0).float()
    found, found_lse = fa3.flash_attn_combine(out, lse)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_lse, lse.logsumexp(0))
    given = torch.empty(2, 5, 4, 24, dtype=torch.bfloat16, device=device)
    for into, dtype in ((given, None), (None, torch.float16), (given, torch.bfloat16)):
        found, _ = fa3.flash_attn_combine(out, lse, into, dtype)
        assert into is None or found is into
        torch.testing.assert_close(found, wanted.to(dtype or into.dtype))


def test_combine_adds_up_attention_to_some_keys_each() -> None:
    q, k, v = qkv(5, 12)
    parts = [
        fa3.flash_attn_func(q, k[:, i : i + 4], v[:, i : i + 4], return_attn_probs=True)
        for i in range(0, 12, 4)
    ]
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    out, lse = fa3.flash_attn_combine(outs, lses.mT)
    want_out, want_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert_near(out, want_out)
    assert_near(lse, want_lse.mT)


# --- Refusals ---


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("func", "qv", torch.zeros(2, 3, 4, 16)),
        ("func", "attention_chunk", 4),
        ("qkvpacked_func", "attention_chunk", 4),
        ("varlen_func", "qv", torch.zeros(6, 4, 16)),
        ("varlen_func", "attention_chunk", 4),
        ("with_kvcache", "qv", torch.zeros(2, 3, 4, 16)),
        ("with_kvcache", "attention_chunk", 4),
    ],
)  # fmt: skip
def test_what_is_missing_is_refused_by_name(function: str, name: str, value: Any) -> None:
    q, cache, new = torch.randn(2, 3, 4, 16), torch.zeros(2, 12, 4, 16), torch.ones(2, 3, 4, 16)
    bounds = torch.tensor([0, 3, 6]).int()
    flat = q.flatten(0, 1)
    arguments = {
        "func": (q, new, new),
        "qkvpacked_func": (torch.stack((q, new, new), 2),),
        "varlen_func": (flat, flat, flat, bounds, bounds, 3, 3),
        "with_kvcache": (q, cache, cache, new, new),
    }[function]
    more = {"cache_seqlens": 0} if function == "with_kvcache" else {}
    with pytest.raises(NotImplementedError, match=f"flash_ext: {name} is not supported"):
        getattr(fa3, f"flash_attn_{function}")(*arguments, **more, **{name: value})
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_descale": torch.ones(2, 2)}, "q_descale must be None unless q has 8 bits"),
        ({"cache_seqlens": 10}, "cache_seqlens must be 0 to 9"),
        ({"cache_seqlens": None}, "cache_seqlens must be given"),
        ({"q": torch.zeros(3, 4, 16)}, "q must be of shape"),
        ({"page_table": torch.zeros(1, 1).int()}, "page_table must be int32 of shape"),
        ({"cu_seqlens_q": torch.zeros(3).int()}, "q must be of shape"),
        ({"cu_seqlens_k_new": torch.zeros(3).int()}, "k must be of shape"),
        ({"rotary_cos": torch.zeros(12, 4)}, "rotary_cos and rotary_sin must be given together"),
        ({"softmax_scale": math.inf}, "scale must be"),
        ({"window_size": 128}, "window_size must be a pair"),
    ],
)
def test_kvcache_errors_write_nothing(change: dict[str, Any], message: str) -> None:
    cache, new = torch.zeros(2, 12, 2, 16), torch.ones(2, 3, 2, 16)
    q = torch.randn(2, 3, 4, 16)
    given = {"q": q, "k": new, "v": new, "cache_seqlens": 0} | change
    with pytest.raises(ValueError, match=message):
        fa3.flash_attn_with_kvcache(k_cache=cache, v_cache=cache, **given)
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_partial": torch.zeros(2, 5, 4, 8)}, "out_partial must be of shape"),
        ({"out_partial": torch.zeros(0, 2, 5, 4, 8)}, "out_partial must be of shape"),
        ({"out_partial": torch.zeros(3, 2, 5, 4, 8, requires_grad=True)}, "out_partial must be a"),
        ({"lse_partial": torch.zeros(3, 2, 4, 5)}, "lse_partial must be float32 of shape"),
        ({"lse_partial": torch.zeros(3, 2, 5, 4).double()}, "lse_partial must be float32 of shape"),
        ({"lse_partial": None}, "lse_partial must be a tensor, got None"),
        ({"out": torch.zeros(2, 5, 4, 8), "out_dtype": torch.half}, "out must be float16 of shape"),
        ({"out": torch.zeros(2, 5, 4, 9)}, "out must be float32 of shape"),
        ({"out_dtype": "half"}, "out_dtype must be a torch.dtype"),
        ({"out_dtype": torch.int32}, "out must be float16 or bfloat16 or float32"),
    ],
)
def test_combine_refuses(change: dict[str, Any], message: str) -> None:
    good = {"out_partial": torch.zeros(3, 2, 5, 4, 8), "lse_partial": torch.zeros(3, 2, 5, 4)}
    with pytest.raises(ValueError, match=f"flash_ext: {message}"):
        fa3.flash_attn_combine(**good | change)
