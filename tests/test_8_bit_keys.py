"""k and v in 8 bits beside a q of 16: float8_e4m3fn or int8 with descales, forward only.

Would catch a lane that has other bytes of K or V than the matmul wants, a descale of another block,
head or channel, one that is ignored or that makes 0 times infinity, a factor of a row of q that is
lost, keys read beyond a length, and a call without kernels that runs all the same.

The rule is that of attention_testing.py, against standard attention of the numbers that k and v
stand for: in float64, and in q's dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_testing import (
    FP8,
    QK_8_BITS,
    Expected,
    Inputs,
    Problem,
    assert_accurate,
    assert_bitwise_equal,
    attend,
    device_unsupported_reason,
    make_inputs,
    nan_filled_outputs,
    standard_attention,
    unsupported_reason,
)
from test_attention import decoding
from test_fp8 import assert_descales_of_k_and_v_are_their_own

import flash_ext
import flash_ext.reference
from flash_ext import fp8
from flash_ext.ops.options import DESCALE_ROWS

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
ERRORS = (ValueError, RuntimeError)
KERNEL_DIMS = (64, 128, 256)


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """The tests on a GPU run where it has fa3."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def problem(*sizes: Any, **fields: Any) -> Problem:
    """With descales of blocks and of channels, unless they are given."""
    return Problem(
        *sizes,
        **{"kv_dtype": FP8, "k_descale": "fine", "v_descale": "fine", "loss": "out"} | fields,
    )


@torch.no_grad()
def run(p: Problem, inputs: Inputs, **options: Any) -> Results:
    with nan_filled_outputs():
        return attend(p, inputs, return_lse=True, **options)


# --- What 8-bit numbers stand for ---


def dequantized(inputs: Inputs, name: str) -> Tensor:
    """k or v (.., S, Hk, D) in float64."""
    x, descale = getattr(inputs, name).double(), getattr(inputs, f"{name}_descale")

    def of_sequence(rows: Tensor, b: int) -> Tensor:
        if descale is None or descale.dim() < 2:
            return rows if descale is None else rows * descale.double().reshape(())
        own = descale[b].double()
        if own.dim() == 1:
            return rows * own[:, None]
        if name == "v":
            return rows * own
        return rows * own[:, torch.arange(len(rows), device=x.device) // DESCALE_ROWS].mT[..., None]

    found = x.clone()
    if inputs.cu_seqlens_k is None:
        for b, rows in enumerate(x):
            found[b] = of_sequence(rows, b)
        return found
    for b, (start, stop) in enumerate(itertools.pairwise(inputs.cu_seqlens_k.tolist())):
        found[start:stop] = of_sequence(x[start:stop], b)
    return found


def as_numbers(inputs: Inputs) -> Inputs:
    """The same call without 8 bits; k and v in float64."""
    numbers = {name: dequantized(inputs, name) for name in "kv"}
    return dataclasses.replace(inputs, **numbers, k_descale=None, v_descale=None)


@torch.no_grad()
def expected(p: Problem, inputs: Inputs) -> Expected:
    plain = dataclasses.replace(p, kv_dtype=None, k_descale="", v_descale="")
    exact = as_numbers(inputs)
    rounded = dataclasses.replace(exact, k=exact.k.to(p.dtype), v=exact.v.to(p.dtype))
    ref = standard_attention(plain, exact.upcast(torch.float64), torch.float64, backward=False)
    pt = standard_attention(plain, rounded, p.dtype, backward=False)
    magnitudes = dataclasses.replace(exact, v=exact.v.abs()).upcast(torch.float64)
    size = standard_attention(plain, magnitudes, torch.float64, backward=False)
    return Expected(ref, pt, {"out": size["out"]})


def check(p: Problem, device: str, **options: Any) -> Results:
    inputs = make_inputs(p, device)
    out, lse = run(p, inputs, **options)
    assert_accurate({"out": out, "lse": lse}, expected(p, inputs), p.dtype)
    if p.packed:
        assert not out[None][~p.used_rows("q").to(device)].any(), "rows without a sequence"
    return out, lse


@pytest.mark.parametrize("kind", ("scalar", "one", "head", "fine"))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_the_reference_dequantizes(dtype: torch.dtype, packed: bool, kind: str) -> None:
    lengths: dict[str, Any] = {"lengths_q": (9, 0, 3), "lengths_k": (140, 5, 130)}
    fields = {"kv_dtype": dtype, "k_descale": kind, "v_descale": kind, "heads_q": 4, "heads_k": 2}
    sizes = lengths if packed else {"seqlen_q": 9, "seqlen_k": 150}
    p = problem(**sizes, head_dim=16, dtype=torch.float64, **fields)
    inputs = make_inputs(p, "cpu")
    plain = dataclasses.replace(p, kv_dtype=None, k_descale="", v_descale="")
    wanted = attend(plain, as_numbers(inputs), flash_ext.reference)
    torch.testing.assert_close(attend(p, inputs, flash_ext.reference), wanted)
    torch.testing.assert_close(run(p, inputs), wanted)


# --- Options ---

BASE = problem(2, 3, 300, 4, 2, 64)
OPTIONS: dict[str, tuple[Problem, dict[str, Any]]] = {
    # the problem with the option, and what takes it away
    "scale": (dataclasses.replace(BASE, scale=0.3), {"scale": None}),
    "negative scale": (dataclasses.replace(BASE, scale=-0.3), {"scale": 0.3}),
    "causal": (dataclasses.replace(BASE, seqlen_q=40, causal=True), {"causal": False}),
    "window": (dataclasses.replace(BASE, window=(40, 9)), {"window": (-1, -1)}),
    "softcap": (dataclasses.replace(BASE, softcap=1.0), {"softcap": 0.0}),
    "ALiBi": (dataclasses.replace(BASE, alibi="bh"), {"alibi_slopes": None}),
    "sink": (dataclasses.replace(BASE, sink=True), {"sink": None}),
    "seqused_k": (dataclasses.replace(BASE, seqused_k=(129, 40)), {"seqused_k": None}),
    **{
        f"{name}: {kind}": (dataclasses.replace(BASE, **{name: kind}), {name: None})
        for name in ("k_descale", "v_descale")
        for kind in ("scalar", "one", "head", "fine")
    },
}


@pytest.mark.parametrize("q_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts(
    option: str, dtype: torch.dtype, q_dtype: torch.dtype, device: str
) -> None:
    """It gives what standard attention gives with it, and not what that gives without it."""
    p, without = OPTIONS[option]
    p = dataclasses.replace(p, kv_dtype=dtype, dtype=q_dtype)
    inputs = make_inputs(p, device)
    out, lse = run(p, inputs)
    found = {"out": out, "lse": lse}
    assert_accurate(found, expected(p, inputs), p.dtype)
    fields = {field.name for field in dataclasses.fields(Inputs)}
    of_inputs = {name: x for name, x in without.items() if name in fields}
    others = {name: x for name, x in without.items() if name not in fields}
    other = dataclasses.replace(inputs, **of_inputs)
    with pytest.raises(AssertionError):
        assert_accurate(found, expected(dataclasses.replace(p, **others), other), p.dtype)


def test_without_descales_they_are_1(device: str) -> None:
    p = problem(2, 3, 150, 4, 2, 64, k_descale="", v_descale="")
    inputs = make_inputs(p, device)
    plain = run(p, inputs)
    one = torch.ones((), device=device)
    for k_descale, v_descale in (
        (one, one[None]),
        (one.expand(2, 2), one.expand(2, 2)),
        (one.expand(2, 2, 2), one.expand(2, 2, 64)),
    ):
        given = dataclasses.replace(inputs, k_descale=k_descale, v_descale=v_descale)
        for a, e in zip(run(p, given), plain, strict=True):
            assert_bitwise_equal(a, e)


def test_every_block_head_and_channel_has_its_own(device: str) -> None:
    """One descale at a time, a factor of 8: what changes is what it belongs to, exactly."""
    p = problem(2, 3, 300, 4, 2, 64, k_descale="", v_descale="")
    assert_descales_of_k_and_v_are_their_own(p, make_inputs(p, device), run)


def test_every_key_and_every_column_counts(device: str) -> None:
    """One number of K or V at a time, in each place of a block of 32 keys and of 32 columns."""
    for dtype, head_dim in itertools.product(QK_8_BITS, KERNEL_DIMS):
        q = torch.zeros(1, 1, 1, head_dim, dtype=torch.bfloat16, device=device)
        k, v = (torch.zeros(head_dim, 96, 1, head_dim, device=device) for _ in "kv")
        columns = torch.arange(head_dim, device=device)
        v[columns, columns % 96, 0, columns] = 96.0  # sequence c: one number, in column c
        q = q.expand(head_dim, 1, 1, head_dim).contiguous()
        out, _ = flash_ext.attention(q, k.to(dtype), v.to(dtype), return_lse=True)
        assert torch.equal(out[:, 0, 0].float(), torch.eye(head_dim, device=device))
        q[columns, 0, 0, columns] = 1.0
        k[columns, columns % 96, 0, columns] = 8.0
        _, lse = flash_ext.attention(q, k.to(dtype), v.to(dtype), scale=1.0, return_lse=True)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(95 + math.exp(8))))


# --- Shapes ---

DIMS = (
    (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256),
    (16, 48), (80, 80), (112, 112), (208, 240), (256, 16),
)  # fmt: skip
SHAPES = (
    problem(1, 1, 1, 8, 8, 64),
    problem(2, 1, 31, 4, 2, 64),
    problem(2, 129, 127, 4, 4, 64, causal=True),
    problem(1, 257, 385, 4, 1, 64, causal=True),
    problem(2, 100, 500, 6, 2, 128, window=(100, 30)),
    problem(2, 300, 40, 4, 2, 64, causal=True),  # rows without a key
    problem(3, 5, 300, 4, 2, 64, seqused_k=(0, 129, 300)),
    problem(lengths_q=(70, 0, 130, 5), lengths_k=(9, 5, 300, 0), heads_q=6, heads_k=2),
    problem(lengths_q=(1, 1, 1), lengths_k=(300, 257, 33), head_dim=256, causal=True),
    problem(1, 50, 260, 4, 2, 64, scale=-0.2, sink=True, causal=True),
    problem(1, 5, 700, 4, 2, 128, scale=0.0, window=(200, 50)),
    problem(1, 5, 260, 4, 2, 64, scale=1e-35, causal=True),
    problem(2, 70, 260, 80, 2, 64, softcap=5.0, sink=True),  # 40 heads do not fit a tile
)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", SHAPES, ids=str)
def test_shapes(p: Problem, dtype: torch.dtype, device: str) -> None:
    check(dataclasses.replace(p, kv_dtype=dtype), device)


@pytest.mark.parametrize("queries", (1, 7, 70))
@pytest.mark.parametrize("q_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_head_dims(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    q_dtype: torch.dtype,
    queries: int,
    device: str,
) -> None:
    sizes = (2, queries, 300, 8, 2) if device == "cuda" else (1, queries, 150, 2, 1)
    options = {"head_dim_v": head_dim_v, "kv_dtype": dtype, "dtype": q_dtype, "causal": queries > 1}
    check(problem(*sizes, head_dim, **options), device)


@pytest.mark.parametrize("layout", ("bhsd", "sbhd", "expanded_heads", "expanded_batch", "bshd"))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_strides_and_nan_bytes_beside_the_rows(
    head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> None:
    p = problem(2, 5, 260, 4, 2, head_dim, causal=True, layout=layout, kv_dtype=dtype)
    check(p, device)
    packed = {"lengths_q": (7, 0, 13), "lengths_k": (90, 5, 140)}
    if not layout.startswith("expanded"):
        check(dataclasses.replace(p, **packed), device)


@pytest.mark.parametrize("sizes", ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)))
def test_sizes_of_zero(sizes: tuple[int, int, int], device: str) -> None:
    batch, seqlen_q, seqlen_k = sizes
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        p = problem(*sizes, 4, 2, head_dim, causal=causal)
        out, lse = run(p, make_inputs(p, device))
        assert out.shape == (batch, seqlen_q, 4, head_dim) and out.dtype == torch.bfloat16
        assert lse.shape == (batch, 4, seqlen_q) and (lse == -torch.inf).all()
        assert not out.any()


def test_other_head_dims(device: str) -> None:
    """fa3 needs rows on 16-byte boundaries; the CPU does not."""
    p = problem(2, 1, 130, 4, 2, 40)
    if device == "cpu":
        check(p, device)
        return
    with pytest.raises(ERRORS, match=r"variant 'fa3' needs rows of k .*16-byte boundaries"):
        run(p, make_inputs(p, device))


MANY_KEYS = (
    problem(1, 1, 9000, 8, 1, 128),
    problem(1, 1, 16384, 32, 8, 128),
    problem(1, 1, 16417, 32, 8, 64, sink=True),
    problem(1, 4, 20000, 8, 1, 128, causal=True),
    problem(1, 4, 20000, 8, 8, 64, alibi="bh"),
    problem(2, 16, 5000, 32, 8, 128, causal=True, softcap=20.0),
    problem(2, 3, 6000, 10, 2, 64, window=(3000, 0)),
    problem(2, 1, 6000, 16, 2, 192, seqused_k=(5000, 77)),
    problem(1, 8, 6000, 8, 1, 64, scale=-0.2),
    problem(lengths_q=(1, 4, 0), lengths_k=(9000, 300, 40), heads_q=8, heads_k=1, causal=True),
    problem(lengths_q=(1, 1, 1), lengths_k=(9000, 7, 4000), heads_q=28, heads_k=4, head_dim=128),
    problem(1, 2, 20000, 4, 1, 192, head_dim_v=128),
    problem(2, 2, 9000, 8, 2, 256, causal=True),
    problem(16, 1, 8200, 32, 8, 128, k_descale="head", v_descale="head"),
    problem(64, 1, 1030, 32, 32, 128, k_descale="scalar", v_descale="scalar"),
    problem(1, 1500, 1700, 8, 2, 128, causal=True),
    problem(2, 700, 900, 4, 4, 64, window=(300, 0)),
    problem(lengths_q=(500, 0, 900, 1), lengths_k=(500, 9, 1200, 1300), heads_q=8, heads_k=2),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("q_dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", MANY_KEYS, ids=str)
def test_many_keys(p: Problem, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    check(dataclasses.replace(p, kv_dtype=dtype, dtype=q_dtype), "cuda")


def few_queries() -> Iterator[Problem]:
    """Those of 16 bits, with both types and all kinds of descales in turn."""
    kinds = itertools.cycle(itertools.product(("fine", "head", "scalar", ""), repeat=2))
    dtypes = itertools.cycle(QK_8_BITS)
    for p, (of_k, of_v), dtype in zip(decoding(), kinds, dtypes, strict=False):
        p = dataclasses.replace(
            p, kv_dtype=dtype, k_descale=of_k, v_descale=of_v, loss="out", bias_gradient=False
        )
        if unsupported_reason("fa3", p, "cuda") is None:
            yield p


@pytest.mark.gpu
@pytest.mark.parametrize("p", [*few_queries()], ids=str)
def test_few_queries(p: Problem) -> None:
    check(p, "cuda")


# --- Magnitudes ---


def numbers(
    of_q: float, of_k: float, of_v: float, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """q (bfloat16), k and v in 8 bits with descales by heads: numbers of these sizes."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, n, h, 64, generator=generator) for n, h in ((3, 4), (300, 2), (300, 2))
    )
    k8, v8 = ((20 * x).clamp(-127, 127).to(dtype) for x in (k, v))
    descales = (torch.full((1, 2), x / 20, dtype=torch.float64).float() for x in (of_k, of_v))
    q = (q.double().clamp(-3, 3) * of_q).bfloat16()
    return tuple(x.to(device) for x in (q, k8, v8, *descales))


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("exponent", (-132, -126, -110, -66, -20, 0, 20, 66, 110, 125))
def test_one_as_large_as_the_other_is_small(exponent: int, dtype: torch.dtype, device: str) -> None:
    """Scores are as with numbers around 1."""
    of_k = 2.0 ** -min(exponent, 120)
    of_q = 2.0**exponent
    q, k, v, k_descale, v_descale = numbers(of_q, min(of_k, 2.0**124), 1.0, dtype, device)
    options = {"k_descale": k_descale, "v_descale": v_descale}
    with nan_filled_outputs():
        out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    want, want_lse = flash_ext.reference.attention(q.double(), k, v, **options)
    assert ((out.double() - want).norm() / want.norm()) < 4e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("of_v", (0.0, 1e-35, 1e-30, 1e30, 1e36))
def test_v_of_any_size(of_v: float, dtype: torch.dtype, device: str) -> None:
    q, k, v, k_descale, v_descale = numbers(1.0, 1.0, of_v, dtype, device)
    options = {"k_descale": k_descale, "v_descale": v_descale}
    with nan_filled_outputs():
        out = flash_ext.attention(q, k, v, **options)
    want, _ = flash_ext.reference.attention(q.double(), k, v, **options)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=4e-3 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ("one", "head", "fine"))
@pytest.mark.parametrize("which", ("k", "v", "kv"))
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_a_descale_of_0(dtype: torch.dtype, which: str, kind: str, device: str) -> None:
    """It makes scores 0, and so out the mean of the keys that a query sees; of v, out 0."""
    q, k, v, *_ = numbers(1.0, 1.0, 1.0, dtype, device)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "one": {"k": (), "v": ()},
        "head": {"k": (1, 2), "v": (1, 2)},
        "fine": {"k": (1, 2, 3), "v": (1, 2, 64)},
    }
    for value, scale in itertools.product((0.0, 1e-45, 1e-38), (None, -0.3)):
        descales = {
            f"{name}_descale": torch.full(
                shapes[kind][name], value if name in which else 0.05, device=device
            )
            for name in "kv"
        }
        options = descales | {"causal": True, "scale": scale}
        with nan_filled_outputs():
            out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
        want, want_lse = flash_ext.reference.attention(q.double(), k, v, **options)
        assert out.isfinite().all() and lse.isfinite().all()
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=2e-2)
        if "v" in which:
            assert out.abs().max() <= 448 * value


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize(
    ("of_q", "of_k"), ((2.0**12, 2.0**12), (2.0**40, 2.0**40), (2.0**100, 1.0))
)
def test_large_scores(of_q: float, of_k: float, dtype: torch.dtype, device: str) -> None:
    """One key has all of the weight: the one that standard attention finds."""
    q, k, v, k_descale, v_descale = numbers(of_q, of_k, 1.0, dtype, device)
    options = {"k_descale": k_descale, "v_descale": v_descale}
    with nan_filled_outputs():
        out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    want, want_lse = flash_ext.reference.attention(q.double(), k, v, **options)
    assert out.isfinite().all() and lse.isfinite().all()
    assert ((lse.double() - want_lse).abs() <= 1e-5 * want_lse.abs()).all()
    same = (out.double() - want).abs().amax(-1) < 0.01 * want.abs().amax(-1)
    assert same.float().mean() > 0.9  # two keys may be as large


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_rows_of_q_have_their_own_magnitude(dtype: torch.dtype, device: str) -> None:
    """Rows of one tile, from zeros to numbers near the largest; and outliers in a row."""
    q, k, v, k_descale, v_descale = numbers(1.0, 1.0, 1.0, dtype, device)
    exponents = torch.tensor([0.0, -30.0, 3.0, -126.0])
    q = (q.double().cpu() * exponents.exp2()[:, None]).bfloat16()
    q[0, 1] = 0
    q[0, 2, :, 5] *= 2.0**-40
    q = q.to(device)
    options = {"k_descale": k_descale, "v_descale": v_descale}
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    want, want_lse = flash_ext.reference.attention(q.double(), k, v, **options)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("keys", (2048, pytest.param(131072, marks=pytest.mark.gpu)))
def test_many_small_probabilities_count(keys: int, dtype: torch.dtype, request: Any) -> None:
    """A key has most of the weight, all others together a part that halves could lose."""
    device = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    q[..., 0] = 1.0
    k, v = (torch.zeros(1, keys, 1, 64, device=device) for _ in "kv")
    k[0, 77, 0, 0] = 18.0
    v += 96.0
    v[0, 77] = 0.0
    out, lse = flash_ext.attention(q, k.to(dtype), v.to(dtype), scale=1.0, return_lse=True)
    rest = keys - 1
    wanted = 96.0 * rest / (rest + math.exp(18))
    assert abs(float(out[0, 0, 0, 3]) - wanted) < 0.01 * wanted
    assert abs(float(lse) - math.log(rest + math.exp(18))) < 1e-4


# --- With what quantize makes ---


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("heads", (False, True))
def test_tensors_of_quantize(heads: bool, dtype: torch.dtype, device: str) -> None:
    """k by blocks or heads, v by channels; rotated if q is, too."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, n, h, 64, generator=generator).bfloat16().to(device)
        for n, h in ((1, 4), (300, 2), (300, 2))
    )
    if dtype == torch.int8:
        if heads:
            return
        v_descale = v.abs().amax(1).float() / 127
        v8 = (v / v_descale[:, None]).round().to(torch.int8)
    else:
        v8, v_descale = fp8.quantize(v, scales="head" if heads else "channel")
    k8, k_descale = fp8.quantize(k, dtype, **({"scales": "head"} if heads else {}))
    out = flash_ext.attention(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
    want, _ = flash_ext.reference.attention(q.double(), k.double(), v.double())
    assert (out.double() - want).norm() / want.norm() < (0.02 if dtype == torch.int8 else 0.06)


# --- The op ---


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_refusals(dtype: torch.dtype, device: str) -> None:
    p = problem(2, 3, 40, 4, 2, 64, kv_dtype=dtype)
    inputs = make_inputs(p, device)
    wanting = dataclasses.replace(inputs, q=inputs.q.detach().requires_grad_())
    with pytest.raises(RuntimeError, match="no variant has a backward for 8-bit inputs"):
        attend(p, wanting)
    with pytest.raises(RuntimeError, match="no variant has a backward for 8-bit inputs"):
        flash_ext.attention(wanting.q, inputs.k, inputs.v)
    with torch.no_grad():
        attend(p, wanting)
    for variant in ("fa1", "fa2"):
        with pytest.raises(ERRORS, match=f"variant '{variant}' has no 8-bit inputs"):
            attend(p, inputs, variant=variant)
    for options in ({"dropout_p": 0.5}, {"bias": torch.zeros(1, 1, 1, 1, device=device)}):
        with pytest.raises(ERRORS, match="with 8-bit inputs"):
            attend(p, inputs, **options)
    with pytest.raises(ERRORS, match="q_descale must be None unless q has 8 bits"):
        attend(p, inputs, q_descale=torch.ones((), device=device))
    with pytest.raises(ERRORS, match="v must be of k's dtype"):
        flash_ext.attention(inputs.q, inputs.k, inputs.v.to(torch.float16))


def test_explain(device: str) -> None:
    inputs = make_inputs(problem(2, 3, 40, 4, 2, 64), device)
    found = flash_ext.explain(inputs.q, inputs.k, inputs.v, softcap=2.0)
    assert (found.variant, found.backward) == ("fa3", None)
    assert found.reasons["fa2"] == "variant 'fa2' has no 8-bit inputs"
    assert found.why_backward is not None
    assert "no variant has a backward for 8-bit inputs" in found.why_backward.replace(
        "variant 'fa3' has no backward", "no variant has a backward"
    )


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
def test_into_a_tensor_and_compiled(dtype: torch.dtype, device: str) -> None:
    p = problem(2, 3, 140, 4, 2, 64, kv_dtype=dtype)
    inputs = make_inputs(p, device)
    options = inputs.options()
    wanted = torch.ops.flash_ext.fwd(inputs.q.detach(), inputs.k, inputs.v, **options)
    out = torch.empty_like(wanted[0])
    lse = torch.ops.flash_ext.fwd_into(out, inputs.q.detach(), inputs.k, inputs.v, **options)
    assert_bitwise_equal(out, wanted[0])
    assert_bitwise_equal(lse, wanted[1])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Results:
        return flash_ext.attention(q, k, v, return_lse=True, **options)

    for a, e in zip(compiled(inputs.q.detach(), inputs.k, inputs.v), wanted, strict=True):
        assert_bitwise_equal(a, e)


def test_under_autocast(device: str) -> None:
    p = problem(2, 3, 140, 4, 2, 64)
    inputs = make_inputs(p, device)
    wanted = run(p, inputs)
    in_float32 = dataclasses.replace(inputs, q=inputs.q.float())
    with torch.autocast(device, dtype=torch.bfloat16):
        for a, e in zip(run(p, in_float32), wanted, strict=True):
            assert_bitwise_equal(a, e)
