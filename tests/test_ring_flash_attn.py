"""flash-attn's functions below autograd, and ring-flash-attn over them.

Would catch an argument that has moved or changed its default, gradients that go elsewhere than into
the tensors given, lse of another convention on the way in or out, a backward that normalizes by its
own keys instead of by the softmax_lse it is given, a mask of dropout that differs between forward
and backward, and options that are silently ignored.
"""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

import flash_ext
from flash_ext import flash_attn as fa
from flash_ext.flash_attn import flash_attn_interface as interface

SLOPES = torch.tensor([0.5, 0.1, 0.2, 0.3])
OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "causal window": {"window_size": (2, -1), "causal": True},
    "far": {"window_size": (30, 12)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi causal": {"alibi_slopes": SLOPES, "causal": True},
    "alibi right": {"alibi_slopes": SLOPES, "window_size": (-1, 0)},
    "alibi causal window": {"alibi_slopes": SLOPES, "causal": True, "window_size": (2, 5)},
    "alibi of each": {"alibi_slopes": torch.rand(3, 4), "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
}
LENGTHS = ((5, 1, 9), (9, 4, 3))
FORWARD = ["q", "k", "v"]
BACKWARD = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
OFFSETS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
WINDOW = ["window_size_left", "window_size_right"]
NUMBERS = ["dropout_p", "softmax_scale", "causal", *WINDOW, "softcap"]
SIGNATURES = {
    "_flash_attn_forward": ([*FORWARD, *NUMBERS, "alibi_slopes", "return_softmax"], None),
    "_flash_attn_backward": (
        [*BACKWARD, *NUMBERS, "alibi_slopes", "deterministic", "rng_state"],
        (None,),
    ),
    "_flash_attn_varlen_forward": (
        [*FORWARD, *OFFSETS, *NUMBERS, "alibi_slopes", "return_softmax"]
        + ["block_table", "leftpad_k", "seqused_k", "zero_tensors"],
        (-1, -1, 0.0, None, False, None, None, None, False),
    ),
    "_flash_attn_varlen_backward": (
        [*BACKWARD, *OFFSETS, *NUMBERS, "alibi_slopes", "deterministic", "rng_state"]
        + ["zero_tensors"],
        (None, False),
    ),
}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


BOUNDS = (*map(offsets, LENGTHS), *map(max, LENGTHS))


def low_level(window_size=(-1, -1), deterministic=False, **options):
    """The options by their names below autograd: for a forward and for a backward."""
    common = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "softcap": 0.0}
    common |= {"alibi_slopes": None} | options
    common["window_size_left"], common["window_size_right"] = window_size
    return common | {"return_softmax": False}, common | {"deterministic": deterministic}


def tensors(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def strided(x):
    """Room for x's gradient, of other strides, full of NaN, in a larger tensor."""
    larger = torch.full((*x.shape[:-2], 3, x.shape[-2], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    return larger[..., 1, :, ::2], larger


def compare(name, inputs, options, bounds=()):
    """The functions below autograd against that above, which test_flash_attn.py compares."""
    q, k, v = inputs
    call = getattr(fa, f"flash_attn{name}_func")
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected, expected_lse, _ = call(*leaves, *bounds, **options, return_attn_probs=True)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, dout)

    forward, backward = low_level(**options)
    found = getattr(interface, f"_flash_attn{name}_forward")(q, k, v, *bounds, **forward)
    out, lse, s_dmask, rng_state = found
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert s_dmask.shape == rng_state.shape == (0,)

    rooms, larger = zip(*map(strided, inputs), strict=True)
    lse = lse.mT.contiguous().mT  # as ring-flash-attn has it
    run = getattr(interface, f"_flash_attn{name}_backward")
    run(dout, q, k, v, out, lse, *rooms, *bounds, **backward)
    for x, y, around in zip(rooms, gradients, larger, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert around.isfinite().sum() == x.numel()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(interface, name)
    assert inspect.isfunction(function)
    assert inspect.getfullargspec(function)[:4] == (SIGNATURES[name][0], None, None,
                                                    SIGNATURES[name][1])  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("m", "n"), [(6, 6), (4, 9), (9, 4)])
def test_dense(m, n, options):
    compare("", tensors((3, m, 4, 8), (3, n, 2, 8), (3, n, 2, 6)), options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_varlen(options):
    m, n = map(sum, LENGTHS)
    compare("_varlen", tensors((m, 4, 8), (n, 2, 8), (n, 2, 6)), options, BOUNDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_part_of_the_keys(dtype):
    """By the softmax over all keys: the parts' dk and dv, and dq in sum, are the whole's."""
    inputs = tensors((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8), (2, 6, 4, 8), dtype=dtype)
    q, k, v, dout = inputs
    forward, backward = low_level(softcap=2.0)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, **forward)
    assert lse.dtype == torch.float32
    dq, dk, dv = whole = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *whole, **backward)
    total, parts = torch.zeros_like(q), []
    for keys in (slice(0, 4), slice(4, 10)):
        part = k[:, keys], v[:, keys]
        x, y, z = rooms = [torch.empty_like(x) for x in (q, *part)]
        interface._flash_attn_backward(dout, q, *part, out, lse, *rooms, **backward)
        total += x
        parts.append((y, z))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(total, dq, **(tolerance or {"rtol": 0.05, "atol": 0.05}))
    for x, y in zip(zip(*parts, strict=True), (dk, dv), strict=True):
        torch.testing.assert_close(torch.cat(x, 1), y, **tolerance)


@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_seqused_k(slopes):
    """As if the sequences had only the keys that they use."""
    m, n = map(sum, LENGTHS)
    q, k, v = tensors((m, 4, 8), (n, 2, 8), (n, 2, 8))
    used = torch.tensor([7, 4, 1], dtype=torch.int32)
    forward, _ = low_level(causal=True, alibi_slopes=slopes)
    found = interface._flash_attn_varlen_forward(q, k, v, *BOUNDS, **forward, seqused_k=used)
    starts = BOUNDS[1][:-1].tolist()
    rows = torch.cat([torch.arange(i, i + x) for i, x in zip(starts, used.tolist(), strict=True)])
    bounds = (BOUNDS[0], offsets(used.tolist()), *BOUNDS[2:])
    expected = interface._flash_attn_varlen_forward(q, k[rows], v[rows], *bounds, **forward)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_dropout_takes_its_forward_s_rng_state():
    inputs = tensors((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8))
    forward, backward = low_level(dropout_p=0.3, causal=True)
    out, lse, _, rng_state = interface._flash_attn_forward(*inputs, **forward)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = flash_ext.attention(*leaves, causal=True, dropout_p=0.3, rng_state=rng_state)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    rooms = [torch.full_like(x, torch.nan) for x in inputs]
    for missing in (None, torch.empty(0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rng_state"):
            interface._flash_attn_backward(
                dout, *inputs, out, lse, *rooms, **backward, rng_state=missing
            )
    assert all(x.isnan().all() for x in rooms)
    interface._flash_attn_backward(dout, *inputs, out, lse, *rooms, **backward, rng_state=rng_state)
    for x, y in zip(rooms, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(x, y)


def test_no_gradient_is_recorded_and_nothing_is_cast():
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 4, 2, 8)] * 3, dtype=torch.float32))
    forward, backward = low_level()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, _, _ = interface._flash_attn_forward(q, k, v, **forward)
        rooms = [torch.empty_like(x) for x in (q, k, v)]
        interface._flash_attn_backward(out, q, k, v, out, lse, *rooms, **backward)
    assert out.dtype == torch.float32 and not (out.requires_grad or lse.requires_grad)
    assert not any(x.requires_grad for x in rooms)


@pytest.mark.parametrize("wanted", range(3))
def test_gradients_that_are_not_wanted(wanted):
    inputs = tensors(*[(1, 4, 2, 8)] * 3)
    forward, backward = low_level()
    out, lse, _, _ = interface._flash_attn_forward(*inputs, **forward)
    rooms = [torch.empty_like(x) for x in inputs]
    interface._flash_attn_backward(out, *inputs, out, lse, *rooms, **backward)
    alone = [torch.empty_like(x) if i == wanted else None for i, x in enumerate(inputs)]
    interface._flash_attn_backward(out, *inputs, out, lse, *alone, **backward)
    assert torch.equal(alone[wanted], rooms[wanted])


@pytest.mark.parametrize("bad", ["shape", "dtype", "none"])
@pytest.mark.parametrize("place", range(3))
def test_wrong_gradients_are_named(place, bad):
    inputs = tensors(*[(2, 4, 2, 8)] * 3)
    forward, backward = low_level()
    out, lse, _, _ = interface._flash_attn_forward(*inputs, **forward)
    rooms = [torch.full_like(x, torch.nan) for x in inputs]
    x = rooms[place]
    rooms[place] = {"shape": x[:1], "dtype": x.float(), "none": [1.0]}[bad]
    with pytest.raises(ValueError, match=f"flash_ext: {('dq', 'dk', 'dv')[place]} must be"):
        interface._flash_attn_backward(out, *inputs, out, lse, *rooms, **backward)
    assert all(x.isnan().all() for i, x in enumerate(rooms) if i != place)


@pytest.mark.parametrize("name", ["block_table", "leftpad_k"])
def test_refuses(name):
    forward, _ = low_level()
    with pytest.raises(NotImplementedError, match=name):
        interface._flash_attn_varlen_forward(
            *[None] * 3, *BOUNDS, **forward, **{name: torch.zeros(3, dtype=torch.int32)}
        )


@pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None or not torch.distributed.is_available(),
    reason="needs ring_flash_attn and torch.distributed",
)
def test_ring_flash_attn():
    """Every function of the package, on two processes, in the drop-in's place."""
    import ring_flash_attn_cases
    from distributed_cases import run_ranks

    run_ranks(2, "cpu", ring_flash_attn_cases.check)
