"""V^T of 8 bits, as `fp8.quantize` writes it and attention accepts it in the place of v.

Would catch a key or a channel in another's place, a key that is not in use but counts (V^T has NaN
there), a kernel that takes V^T for v or waits for a pass that does not come, and a wrong shape that
is accepted. The kernels' numbers are in test_fp8.py: results with V^T are those with v, bit by bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from attention_testing import (
    FP8,
    QK_8_BITS,
    Inputs,
    Problem,
    assert_bitwise_equal,
    device_unsupported_reason,
    make_inputs,
)
from test_fp8 import DIMS, ERRORS, FEW_QUERIES, MANY_TILES, SHAPES, check, problem, run
from test_fp8_quantize import offsets, random_rows
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import fp8
from flash_ext.cpu import transposed_v

NAN_BYTE = 0x7F
ATTEND = torch.ops.flash_ext.fwd


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and (reason := device_unsupported_reason("fa3", "cuda")):
        pytest.skip(f"fa3 {reason}")


def with_v_transposed(p: Problem, inputs: Inputs) -> Inputs:
    """V^T in the place of v, with NaN in all that belongs to no key in use."""
    offsets_k = None if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.cpu()
    of_v = transposed_v.from_rows(inputs.v.cpu(), offsets_k)
    rows = transposed_v.key_rows(inputs.v.shape[-3], of_v.shape[-1], offsets_k)
    used = torch.nn.functional.pad(p.used_rows("k"), (0, 1))[:, rows]  # -1: the last, which is not
    unused = ~used[0] if p.packed else ~used[:, None, None]
    of_v.view(torch.uint8).masked_fill_(unused, NAN_BYTE)
    return dataclasses.replace(inputs, v=of_v.to(inputs.v.device))


def compare(p: Problem, device: str, variant: str = "auto") -> None:
    inputs = make_inputs(p, device)
    want = run(p, inputs, variant)
    found = run(p, with_v_transposed(p, inputs), variant, v_transposed=True)
    for a, e in zip(found, want, strict=True):
        assert_bitwise_equal(a, e)


# --- Attention ---


@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", SHAPES, ids=str)
def test_shapes(p: Problem, dtype: torch.dtype, device: str) -> None:
    compare(dataclasses.replace(p, dtype=dtype), device)


@pytest.mark.parametrize("masked", ({}, {"causal": True}, {"window": (70, 20)}), ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_head_dims(head_dim: int, head_dim_v: int, masked: dict, device: str) -> None:
    sizes = (2, 200, 300, 4, 2) if device == "cuda" else (1, 40, 50, 2, 1)
    compare(problem(*sizes, head_dim, head_dim_v=head_dim_v, **masked), device)


@pytest.mark.parametrize("head_dim", (64, 128, 256))  # on CUDA 64 would transpose v itself
def test_every_remainder_of_keys(head_dim: int, device: str) -> None:
    """The last group of 16, also that of a sequence in the middle of packed ones."""
    for keys in range(1, 34) if device == "cuda" else (1, 15, 16, 17):
        compare(problem(2, 40, 128 + keys, 4, 2, head_dim), device)
        lengths = {"lengths_q": (20, 3, 0, 70), "lengths_k": (keys, 0, 5, 100 + keys)}
        compare(problem(heads_q=4, heads_k=2, head_dim=head_dim, causal=True, **lengths), device)
        used = {"seqused_k": (keys, 0)}
        compare(problem(2, 40, 128 + keys, 4, 2, head_dim, **used), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QK_8_BITS, ids=str)
@pytest.mark.parametrize("p", (*FEW_QUERIES, *MANY_TILES), ids=str)
def test_few_queries_and_many_tiles(p: Problem, dtype: torch.dtype) -> None:
    compare(dataclasses.replace(p, dtype=dtype), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_it_repeats(head_dim: int) -> None:
    """Tiles whose last group is cleared follow one another in a CTA."""
    p = problem(lengths_q=(130,) * 300, lengths_k=(77,) * 300, heads_q=8, heads_k=2)
    p = dataclasses.replace(p, head_dim=head_dim)
    inputs = make_inputs(p, "cuda")
    of_v = with_v_transposed(p, inputs)
    want = run(p, inputs)
    for _ in range(100):
        for a, e in zip(run(p, of_v, v_transposed=True), want, strict=True):
            assert_bitwise_equal(a, e)


@pytest.mark.parametrize("sizes", ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)))
def test_sizes_of_zero(sizes: tuple[int, int, int], device: str) -> None:
    for head_dim in (64, 128):
        compare(problem(*sizes, 4, 2, head_dim), device)
    lengths = {"lengths_q": (4, 0), "lengths_k": (0, 0)}
    compare(problem(heads_q=4, heads_k=2, head_dim=128, tail=0, **lengths), device)


def test_strides(device: str) -> None:
    p = problem(2, 150, 260, 4, 2, 128, causal=True)
    inputs = make_inputs(p, device)
    want, of_v = run(p, inputs), with_v_transposed(p, inputs)
    apart = torch.cat((of_v.v.view(torch.uint8),) * 2, -1).view(FP8)[..., : of_v.v.shape[-1]]
    by_channel = of_v.v.transpose(1, 2).contiguous().transpose(1, 2)
    for v in (apart, by_channel):
        found = run(p, dataclasses.replace(of_v, v=v), v_transposed=True)
        for a, e in zip(found, want, strict=True):
            assert_bitwise_equal(a, e)
    if device == "cuda":
        bytes_beside = torch.nn.functional.pad(of_v.v.view(torch.uint8), (1, 0)).view(FP8)[..., 1:]
        with pytest.raises(ERRORS, match="needs rows of v that start and end on 16-byte"):
            run(p, dataclasses.replace(of_v, v=bytes_beside), v_transposed=True)


def test_other_head_dims_of_v(device: str) -> None:
    """Their channels are whole rows, but out's rows are not."""
    p = problem(1, 20, 30, 2, 1, 32, head_dim_v=24)
    if device == "cpu":
        compare(p, device)
        return
    of_v = with_v_transposed(p, make_inputs(p, device))
    with pytest.raises(ERRORS, match="needs a head dimension of v that is a multiple of 16"):
        run(p, of_v, v_transposed=True)


def test_few_keys_per_page_and_16_bits_are_refused(device: str) -> None:
    q, k = (torch.zeros(2, 4, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(2, 2, 32, 16, device=device, dtype=FP8)
    pages = {"page_table": torch.zeros(2, 1, dtype=torch.int32, device=device)}
    pages["seqused_k"] = torch.full((2,), 4, dtype=torch.int32, device=device)
    for of_q, of_k, more in ((q, k.to(FP8), {}), (q, k, {}), (q.to(FP8), k.to(FP8), pages)):
        of_v = v if of_k.dtype == FP8 else v.to(of_k.dtype)
        with pytest.raises(ERRORS, match="v_transposed must be False with page_table, and unless"):
            ATTEND(of_q, of_k, of_v, v_transposed=True, **more)


def test_a_wrong_shape_is_refused(device: str) -> None:
    q, k, v = (torch.zeros(2, 20, 2, 32, device=device).to(FP8) for _ in range(3))
    for wrong in (v, v.mT.contiguous(), v.new_zeros(2, 2, 32, 16), v.new_zeros(2, 2, 32, 48)):
        with pytest.raises(ERRORS, match=r"v must be of shape .* = \(2, 2, \d+, 32\), got"):
            flash_ext.attention(q, k, wrong, v_transposed=True)
    right = v.new_zeros(2, 2, 32, 32)
    with pytest.raises(ERRORS, match=r"v_descale must be .* \(2, 2, 32\), got \(2, 2, 20\)"):
        flash_ext.attention(
            q, k, right, v_transposed=True, v_descale=torch.ones(2, 2, 20, device=device)
        )
    assert flash_ext.explain(q, k, right, v_transposed=True).variant == "fa3"


# --- PyTorch ---


def small(device: str, **options: Any) -> tuple[Inputs, dict[str, Any]]:
    p = problem(2, 40, 50, 4, 2, 32, head_dim_v=48, q_descale="fine", **options)
    inputs = with_v_transposed(p, make_inputs(p, device))
    return inputs, inputs.options() | {"v_transposed": True}


def test_tracing_and_flops(device: str) -> None:
    inputs, options = small(device)
    tensors = (inputs.q, inputs.k, inputs.v)
    torch.library.opcheck(
        ATTEND.default,
        tensors,
        options,
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(compiled(*tensors, **options), flash_ext.attention(*tensors, **options))
    counter = FlopCounterMode(display=False)
    with counter:
        flash_ext.attention(*tensors, **options)
    assert counter.get_total_flops() == 2 * 2 * 4 * 40 * 50 * (32 + 48)


def test_vmap(device: str) -> None:
    inputs, options = small(device, k_descale="", v_descale="")
    options.pop("q_descale")
    tensors = [torch.stack((x, x.flip(0))) for x in (inputs.q, inputs.k, inputs.v)]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_ext.attention(q, k, v, **options)

    found = torch.vmap(call)(*tensors)
    for i in range(2):
        assert_bitwise_equal(found[i], call(*(x[i] for x in tensors)))


# --- Quantization ---

SCALES = ("tensor", "head", "channel")


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("lengths", (None, (0, 5, 128, 0, 257, 129, 0)), ids=str)
def test_quantization(scales: str, lengths: tuple[int, ...] | None, device: str) -> None:
    """What it makes of v is what it makes of v otherwise, in another place."""
    for dim in (16, 48, 64, 96, 128, 256) if device == "cuda" else (8, 16, 48):
        x = random_rows(*(2, 150) if lengths is None else (sum(lengths) + 40,), 3, dim)
        x[..., 7, 1, 3], x[..., 9, 2, 5], x[..., 1, 0, :] = torch.nan, torch.inf, -0.0
        given: dict[str, Any] = {}
        if lengths is not None:
            given["cu_seqlens"] = offsets(*lengths)
        used = torch.tensor([150, 77] if lengths is None else [n // 2 for n in lengths])
        for seqused in (None, used.int()):
            options = given | {"seqused": seqused, "scales": scales}
            want, want_descale = fp8.quantize(x, **options)
            want = transposed_v.from_rows(want, given.get("cu_seqlens"))
            there = {n: y.to(device) if torch.is_tensor(y) else y for n, y in options.items()}
            found, descale = fp8.quantize(x.to(device), transposed=True, **there)
            assert found.shape == want.shape and found.is_contiguous()
            assert torch.equal(descale.cpu(), want_descale)
            found, want = (y.cpu().view(torch.uint8) for y in (found, want))
            is_nan = (want & NAN_BYTE) == NAN_BYTE
            assert is_nan.any() and torch.equal((found & NAN_BYTE) == NAN_BYTE, is_nan)
            assert torch.equal(found.masked_fill(is_nan, 0), want.masked_fill(is_nan, 0))


@pytest.mark.parametrize("shape", ((0, 5, 2, 32), (2, 0, 2, 32), (1, 1, 1, 16), (3, 129, 1, 256)))
def test_quantization_of_little(shape: tuple[int, ...], device: str) -> None:
    x = random_rows(*shape)
    for scales in SCALES:
        want, want_descale = fp8.quantize(x, scales=scales)
        found, descale = fp8.quantize(x.to(device), scales=scales, transposed=True)
        assert torch.equal(descale.cpu(), want_descale)
        back = transposed_v.to_rows(found.cpu(), shape[1], None)
        assert torch.equal(back.view(torch.uint8), want.view(torch.uint8))


def test_the_order_of_keys() -> None:
    """Of 16 keys, byte 4t + 2b + c is key 8b + 2t + c; a sequence begins with a group."""
    first = [8 * b + 2 * t + c for t, b, c in itertools.product(range(4), range(2), range(2))]
    assert transposed_v.key_rows(20, 32, None).tolist() == [
        *first,
        *(16 + x if x < 4 else -1 for x in first),
    ]
    rows = transposed_v.key_rows(21, 80, offsets(1, 17))  # and three rows of no sequence
    assert rows[:16].tolist() == [0 if x == 0 else -1 for x in first]
    assert rows[16:32].tolist() == [1 + x for x in first]
    assert rows[32:].tolist() == [17, *[-1] * 47]


def test_quantization_refuses_what_v_has_not(device: str) -> None:
    x = random_rows(1, 4, 2, 32).to(device)
    signs, mean = fp8.random_signs(32, device=device), torch.zeros(1, 2, 32, device=device)
    for options in ({}, {"scales": "head", "signs": signs}, {"scales": "head", "mean": mean}):
        with pytest.raises(ERRORS, match="transposed must be False with scales='block', signs"):
            fp8.quantize(x, transposed=True, **options)


def test_quantization_is_traced(device: str) -> None:
    x = random_rows(2, 20, 2, 32).to(device)
    for y, options in ((x, {}), (x.flatten(0, 1), {"cu_seqlens": offsets(20, 17, device=device)})):
        torch.library.opcheck(
            torch.ops.flash_ext.fp8_quantize.default,
            (y, "channel"),
            {"transposed": True} | options,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_attention_quantizes_v_transposed(device: str) -> None:
    """`fp8.attention` in its three steps, with v as it comes."""
    q, k, v = (random_rows(2, 70, h, 64, seed=h).to(device) for h in (4, 2, 2))
    if device == "cpu":
        check(problem(1, 20, 30, 2, 1, 16), device)  # the reference of what follows is right
    want = fp8.attention(q, k, v, causal=True)
    signs = fp8._seeded_signs(64, 0, q)
    q8, q_descale = fp8.quantize(q, torch.int8, signs=signs)
    k8, k_descale = fp8.quantize(k, torch.int8, signs=signs, mean=fp8.token_mean(k))
    v8, v_descale = fp8.quantize(v, scales="channel")
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    assert_bitwise_equal(flash_ext.attention(q8, k8, v8, causal=True, **descales), want)
