"""The dropout mask: its bits, and that every variant on every device drops exactly those elements.

Would catch a slip in the hash, an index mapped to the wrong element in forward or backward, a mask
that depends on the tiling, a hash whose results are related, and a scale that does not match the
rate.
"""

from __future__ import annotations

import random

import pytest
import torch
from attention_testing import (
    SQUARE_DIMS,
    VARIANTS,
    Problem,
    _assert_rows_accurate,
    assert_bitwise_equal,
    fa3_dropout_reason,
    reference_results,
    run,
)
from dropout_bits import is_kept

import flash_ext
from flash_ext.dropout import keep_mask, keep_scale

pytestmark = pytest.mark.options(dropout_p=0.5)

RATES = (0.1, 0.17, 0.5, 0.9)


@pytest.mark.parametrize(
    ("seed", "offset"), ((0, 0), (1, 2), (-1, -1), (-(2**63), 2**63 - 1), (0x123456789ABC, 1 << 40))
)
def test_keep_mask_element_by_element(seed: int, offset: int, device: str) -> None:
    batch, heads, seqlen_q, seqlen_k, p = 2, 3, 77, 150, 0.3
    state = torch.tensor([seed, offset], device=device)
    mask = keep_mask(state, p, batch, heads, seqlen_q, seqlen_k)
    assert mask.shape == (batch, heads, seqlen_q, seqlen_k) and mask.dtype == torch.bool
    mask = mask.cpu()
    draw = random.Random(seed)
    for _ in range(2000):
        b, h, i, j = (draw.randrange(n) for n in mask.shape)
        assert mask[b, h, i, j] == is_kept(seed, offset, p, b * heads + h, i, j), (b, h, i, j)


@pytest.mark.parametrize("p", RATES)
def test_rate_scale_and_independence(p: float) -> None:
    mask = keep_mask(torch.tensor([3, 4]), p, 4, 4, 256, 256).double()
    rate = 1 / keep_scale(p)
    assert abs(rate - (1 - p)) <= 2**-16  # half a unit of p
    deviation = (rate * (1 - rate)) ** 0.5
    count = mask.numel()
    assert abs(mask.mean().item() - rate) < 5 * deviation / count**0.5
    centred = (mask - rate) / deviation
    for dim, shift in ((0, 1), (1, 1), (2, 1), (2, 8), (2, 16), (3, 1), (3, 8), (3, 16)):
        correlation = (centred * centred.roll(shift, dim)).mean().item()
        assert abs(correlation) < 5 / count**0.5, (dim, shift)


def test_calls_are_independent() -> None:
    """Of neighboring seeds, and of the offsets of one call after another."""
    states = [(seed, offset) for seed in (0, 1, 2, 2**32) for offset in (0, 4, 8)]
    masks = [keep_mask(torch.tensor(x), 0.5, 2, 4, 256, 256).flatten() for x in states]
    signs = torch.stack(masks).double() * 2 - 1
    correlations = (signs @ signs.T / signs.shape[1]).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / signs.shape[1] ** 0.5


def test_extreme_rates() -> None:
    state = torch.tensor([1, 2])
    assert keep_scale(0.0) == 1.0 and keep_mask(state, 0.0, 1, 1, 64, 64).all()
    assert keep_scale(1 - 1e-9) == 32768  # at least one value in 32,768 is kept: no division by 0


def uniform_attention(problem_shape, device, dtype, rng_state, p, variant, v, causal):
    """Attention with q = 0: every visible weight is the same, so zeros in P are dropped ones."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim = problem_shape
    problem = Problem(batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dtype=dtype, dropout_p=p)
    if fa3_dropout_reason(problem) and variant == "fa3":
        pytest.skip("fa2 stands in for fa3")
    q = torch.zeros(batch, seqlen_q, heads_q, dim, device=device, dtype=dtype)
    k = torch.randn(batch, seqlen_k, heads_k, dim, device=device).to(dtype)
    return flash_ext.attention(
        q, k, v, dropout_p=p, rng_state=rng_state, variant=variant, causal=causal
    )


def visible_part(mask: torch.Tensor, causal: bool) -> torch.Tensor:
    seqlen_q, seqlen_k = mask.shape[-2:]
    return mask & mask.new_ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q) if causal else mask


# batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim
SPLIT_KEYS = (2, 5, 1100, 4, 2)  # so few tiles of queries that fa2 splits the keys
SMALL = ((2, 37, 61, 4, 2, 64), (1, 130, 200, 2, 1, 40))
SQUARE = (1, 1024, 2, 32)  # batch, queries and keys, heads, head_dim
EXTRACTIONS = [
    *(pytest.param("cpu", shape) for shape in SMALL),
    *(
        pytest.param("cuda", shape, marks=pytest.mark.gpu)
        for d in (24, 40, 160, *SQUARE_DIMS)
        for shape in ((2, 257, 300, 4, 2, d), (1, 300, 129, 3, 3, d))
    ),
    *(pytest.param("cuda", (*SPLIT_KEYS, d), marks=pytest.mark.gpu) for d in (64, 256)),
]


def shape_id(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "shape"), EXTRACTIONS, ids=shape_id)
def test_forward_drops_exactly_the_mask(
    shape: tuple[int, ...], variant: str, causal: bool, device: str
) -> None:
    """Columns of V pick single keys, a head dimension's worth of keys at a time."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim = shape
    state = torch.tensor([-5, 1 << 35 | 9], device=device)
    p = 0.4
    expected = visible_part(keep_mask(state, p, batch, heads_q, seqlen_q, seqlen_k), causal)
    for first in range(0, seqlen_k, dim):
        v = torch.eye(seqlen_k, device=device, dtype=torch.float16)[:, first : first + dim]
        v = torch.nn.functional.pad(v, (0, dim - v.shape[1]))
        v = v[None, :, None].expand(batch, seqlen_k, heads_k, dim).contiguous()
        out = uniform_attention(shape, device, v.dtype, state, p, variant, v, causal)
        kept = (out.transpose(1, 2) != 0)[..., : seqlen_k - first]
        assert torch.equal(kept, expected[..., first : first + dim])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("device", "shape"), EXTRACTIONS, ids=shape_id)
def test_backward_drops_exactly_the_mask(
    shape: tuple[int, ...], variant: str, causal: bool, device: str
) -> None:
    """dV = Pᵀ dO, where columns of dO pick single queries."""
    batch, seqlen_q, seqlen_k, heads, _, dim = shape
    shape = (batch, seqlen_q, seqlen_k, heads, heads, dim)
    state = torch.tensor([77, -3], device=device)
    p = 0.4
    expected = visible_part(keep_mask(state, p, batch, heads, seqlen_q, seqlen_k), causal)
    v = torch.zeros(batch, seqlen_k, heads, dim, device=device, dtype=torch.float16)
    v.requires_grad_()
    for first in range(0, seqlen_q, dim):
        dout = torch.eye(seqlen_q, device=device, dtype=v.dtype)[:, first : first + dim]
        dout = torch.nn.functional.pad(dout, (0, dim - dout.shape[1]))
        dout = dout[None, :, None].expand(batch, seqlen_q, heads, dim).contiguous()
        out = uniform_attention(shape, device, v.dtype, state, p, variant, v, causal)
        (dv,) = torch.autograd.grad(out, v, dout)
        kept = (dv.permute(0, 2, 3, 1) != 0)[:, :, : seqlen_q - first]
        assert torch.equal(kept, expected[:, :, first : first + dim])


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_drop_like_a_batch(variant: str, device: str) -> None:
    """Sequence b drops what batch element b drops: rows and columns count from its own start."""
    batch, heads, seqlen_q, seqlen_k, p = 3, 4, 77, 61, 0.4
    state = torch.tensor([5, 6], device=device)
    expected = keep_mask(state, p, batch, heads, seqlen_q, seqlen_k)
    v = torch.eye(seqlen_k, 64, device=device, dtype=torch.float16)  # columns pick single keys
    v = v[None, :, None].expand(batch, -1, 2, -1).flatten(0, 1).contiguous()
    q = torch.zeros(batch * seqlen_q, heads, 64, device=device, dtype=v.dtype)
    offsets = torch.arange(batch + 1, device=device, dtype=torch.int32)
    out = flash_ext.attention_varlen(
        q,
        torch.randn_like(v),
        v,
        offsets * seqlen_q,
        offsets * seqlen_k,
        dropout_p=p,
        rng_state=state,
        variant=variant,
    )
    kept = out.view(batch, seqlen_q, heads, 64).transpose(1, 2)[..., :seqlen_k] != 0
    assert torch.equal(kept, expected)


def some_inputs(device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 2, 50, 2, 32, generator=generator)
    return tuple(numbers.to(device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_lse_is_that_of_the_undropped_weights(variant: str, device: str) -> None:
    inputs = some_inputs(device)
    _, plain = flash_ext.attention(*inputs, variant=variant, return_lse=True)
    _, dropped = flash_ext.attention(*inputs, dropout_p=0.5, variant=variant, return_lse=True)
    # Not bitwise: a kernel with dropout may sum a row in another order.
    assert (dropped - plain).abs().max() < 1e-6 * (1 + plain.abs().max())


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("variant", ("auto", "fa1", "fa2"))
@pytest.mark.parametrize("p", (0.9, 0.99, 0.9999))
def test_p_has_its_factor_when_it_is_rounded(p: float, variant: str, device: str) -> None:
    """Most P here are below float16's smallest normal number, and above it with 1 / (1 - p).

    The rule for rows, with errors of rounding alone: in `pt` P is rounded without its factor.
    """
    problem = Problem(
        lengths_q=(1, 2), lengths_k=(3394, 3916), heads_q=3, heads_k=3, head_dim=104,
        dtype=torch.float16, dropout_p=p, alibi="h", bias="1hqk", bias_type="bool", loss="out",
    )  # fmt: skip
    expected = reference_results(problem, device)
    actual = run(problem, variant, device)
    for name in ("out", "dv"):
        ref, size = expected.ref[name], expected.size[name]
        rounded = ref.to(problem.dtype).double()
        _assert_rows_accurate(name, actual[name].double(), ref, rounded, size, problem.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_almost_everything_dropped(variant: str, device: str) -> None:
    inputs = [x.requires_grad_() for x in some_inputs(device)]
    if variant == "fa3" and fa3_dropout_reason(Problem(dtype=inputs[0].dtype, dropout_p=0.99999)):
        pytest.skip("fa2 stands in for fa3")
    out = flash_ext.attention(*inputs, dropout_p=0.99999, variant=variant)
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_factor(variant: str, dtype: torch.dtype, device: str) -> None:
    """32,768: out and dv are counts of kept entries, times 32."""
    state, p, (batch, seqlen, heads, dim) = torch.tensor([8, 9], device=device), 1 - 1e-9, SQUARE
    kept = keep_mask(state, p, batch, heads, seqlen, seqlen)
    assert kept.any() and keep_scale(p) == 32768
    v = torch.ones(SQUARE, device=device, dtype=dtype, requires_grad=True)
    shape = (batch, seqlen, seqlen, heads, heads, dim)
    out = uniform_attention(shape, device, dtype, state, p, variant, v, causal=False)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    for x, rows in ((out, kept.sum(3)), (dv, kept.sum(2))):
        assert torch.equal(x, (32 * rows.mT[..., None]).to(dtype).expand_as(x))


def test_state_is_drawn_from_torchs_generator(device: str) -> None:
    inputs = some_inputs(device)
    torch.manual_seed(1)
    first, second = (flash_ext.attention(*inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert_bitwise_equal(flash_ext.attention(*inputs, dropout_p=0.5), first)


def test_seed_and_offset_both_matter(device: str) -> None:
    inputs = some_inputs(device)
    states = [(0, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 2 << 32)]
    outs = [
        flash_ext.attention(*inputs, dropout_p=0.5, rng_state=torch.tensor(s, device=device))
        for s in states
    ]
    for index, out in enumerate(outs):
        assert not any(torch.equal(out, other) for other in outs[index + 1 :])


def test_no_dropout_ignores_the_state(device: str) -> None:
    inputs = some_inputs(device)
    state = torch.tensor([1, 2], device=device)
    plain = flash_ext.attention(*inputs)
    assert_bitwise_equal(flash_ext.attention(*inputs, rng_state=state), plain)
