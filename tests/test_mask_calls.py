"""Calls with a `flash_ext.Mask`, beside all that may surround them.

Would catch a mask that a compiler, a checkpoint or a CUDA graph keeps from an earlier call, a kept
mask that is stale after a write, a read of list entries that nothing may read, packed sequences
that see each other, and errors that name another argument.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_testing import (
    Problem,
    assert_accurate,
    assert_all_bitwise_equal,
    dense_mask,
    expected_results,
    make_inputs,
)
from test_masks import EVERY_VARIANT, refused, results
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import flash_ext
import flash_ext.reference
from flash_ext import Mask, masked

every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
MAKERS = {
    "dense": lambda d: Mask.dense(torch.ones(300, 300, dtype=torch.bool, device=d).tril(9)),
    "intervals": lambda d: Mask.sinks(5, (70, 3), 300, device=d),
    "blocks": lambda d: Mask.blocks(
        torch.tensor([[[[0, 2], [1, 0], [2, 2]]]], device=d),
        torch.tensor([[[2, 1, 0]]], device=d),
        *(300, 300),
    ),
}


def qkv(
    device: str, *, batch: int = 2, rows: int = 300, grad: bool = True, **more: Any
) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((batch, rows, 4, 64), (batch, rows, 2, 64), (batch, rows, 2, 64))
    like = {"device": device, "dtype": torch.bfloat16} | more
    return [torch.randn(x, **like).requires_grad_(grad) for x in shapes]


def grads(out: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(4)
    found = torch.autograd.grad(out, leaves, torch.randn_like(out))
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), found, strict=True))


@every_variant
@pytest.mark.parametrize("name", MAKERS)
def test_unused_entries_are_not_read(name: str, variant: str, device: str) -> None:
    """Entries after the last run and words of blocks that are not partial."""
    mask, tensors = MAKERS[name](device), qkv(device)
    options: dict[str, Any] = {"variant": variant, "deterministic": True}
    want = grads(flash_ext.attention(*tensors, mask=mask, **options), tensors)
    poison = 0x7FEDCBA9
    for rows in (mask.kv_tiles, mask.q_tiles):
        after = torch.arange(rows.shape[-1], device=device) >= 4 + rows[..., 2:3]
        rows.masked_fill_(after, poison)
    if mask.words.dim() == 6:
        kinds = flash_ext.cpu.tile_mask.kinds_of_runs(mask.kv_tiles, mask.words.shape[3])
        mask.words.masked_fill_((kinds != 2)[..., None, None], poison)
    got = grads(flash_ext.attention(*tensors, mask=mask, **options), tensors)
    assert_all_bitwise_equal(got, want)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 8.0},
    "ALiBi": {"alibi": "h"},
    "dropout": {"dropout_p": 0.2},
    "bias": {"bias": "1hqk"},
    "bias of keys": {"bias": "b11k", "bias_type": "float32"},
    "sink": {"sink": True},
    "causal": {"causal": True},
    "negative scale": {"scale": -0.1},
}
PAIRS = [
    {**a, **b}
    for a, b in itertools.combinations_with_replacement(OPTIONS.values(), 2)
    if a is b or not set(a) & set(b)
]


def masks_of_200_by_300(device: str) -> list[Mask]:
    """Of intervals, of bits for each head, and of blocks, with queries that see nothing."""
    torch.manual_seed(2)
    shown = torch.rand(1, 4, 200, 300, device=device) < 0.5
    shown[:, 1, :, 128:256] = False
    shown[:, 2:, :128, :128] = True
    shown[:, :, 150:160] = False
    index, count = torch.tensor([[[[2, 0], [1, 0]]]]), torch.tensor([[[2, 1]]])
    blocks = Mask.blocks(index.to(device), count.to(device), 200, 300)
    return [Mask.sinks(3, (90, 40), 200, 300, device=device), Mask.dense(shown), blocks]


@pytest.mark.share(1 / 2)
@every_variant
@pytest.mark.parametrize("part", range(4))
def test_beside_each_pair_of_options(part: int, variant: str, device: str) -> None:
    """By whichever kernels have them with a mask; head dims in turns."""
    masks = masks_of_200_by_300(device)
    for seed, more in list(enumerate(PAIRS))[part::4]:
        dim = (64, 128, 96, 32, 256, 192, 44)[seed % 7]
        problem = Problem(2, 200, 300, 4, 2, dim, seed=seed, **more)
        inputs, mask = make_inputs(problem, device), masks[seed % 3]
        options = {} if inputs.bias is None else {"bias": inputs.bias}
        if refused(problem, inputs, variant, mask=mask, **options):
            continue
        actual = results(problem, inputs, mask=mask, variant=variant, **options)
        both = mask.to_dense()
        if inputs.bias is not None:
            with torch.no_grad():
                inputs.bias = inputs.bias.masked_fill(~both, -torch.inf).requires_grad_()
        else:
            inputs.bias = both
        want = expected_results(problem, inputs)
        if "dbias" in actual:  # of the bias as it was given
            shape = actual["dbias"].shape
            for found in (want.ref, want.pt):
                found["dbias"] = found["dbias"].sum_to_size(shape)
            want.size.pop("dbias", None)
        actual.pop("dsink", None)
        try:
            assert_accurate(actual, want, problem.dtype)
        except AssertionError as error:
            raise AssertionError(f"{problem}, {mask}: {error}") from error


@every_variant
def test_a_bool_bias_beside_a_mask(variant: str, device: str) -> None:
    tensors, mask = qkv(device), MAKERS["intervals"](device)
    bias = torch.rand(2, 1, 1, 300, device=device) < 0.7
    got = grads(flash_ext.attention(*tensors, mask=mask, bias=bias, variant=variant), tensors)
    both = bias & mask.to_dense()
    want = grads(flash_ext.attention(*tensors, bias=both, variant="fa2"), tensors)
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("with_bias", (False, True))
def test_without_a_backward_for_masks(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that trains has a dense bias then, and another one its lists."""
    tensors, mask = qkv("cpu"), MAKERS["intervals"]("cpu")
    options = {"bias": torch.randn(1, 4, 300, 300)} if with_bias else {}
    want = grads(flash_ext.attention(*tensors, mask=mask, **options), tensors)
    check = masked.ops.check

    def without_backward(*call: Any, **given: Any) -> Any:
        variant, backward, *others = check(*call, **given)
        return variant, -1 if "mask_words" in given else backward, *others

    monkeypatch.setattr(masked.ops, "check", without_backward)
    monkeypatch.setattr(masked, "_answers", {})
    assert flash_ext.explain(*tensors, mask=mask, **options).mask == "a bool bias"
    for name, x in grads(flash_ext.attention(*tensors, mask=mask, **options), tensors).items():
        torch.testing.assert_close(x, want[name], atol=2e-2, rtol=2e-2)
    with torch.no_grad():
        assert flash_ext.explain(*tensors, mask=mask, **options).mask == "lists of blocks"


@every_variant
@pytest.mark.parametrize("per_head", (False, True))
def test_packed_sequences(per_head: bool, variant: str, device: str) -> None:
    """Causal within each sequence, whose parts of the mask are all that counts."""
    lengths = (70, 0, 131, 40)
    problem = Problem(
        *(1, 0, 0, 4, 2, 64), lengths_q=lengths, lengths_k=(90, 5, 131, 30), tail=0, causal=True
    )
    inputs = make_inputs(problem, device)
    rows, keys = sum(lengths), 256
    torch.manual_seed(5)
    shown = torch.rand(1, 4 if per_head else 1, rows, keys, device=device) < 0.6
    out, lse = flash_ext.attention_varlen(
        *(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k),
        **{"mask": Mask.dense(shown), "causal": True, "variant": variant, "return_lse": True},
    )
    leaves = [inputs.q, inputs.k, inputs.v]
    found = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    actual = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), found, strict=True))
    within = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    q0 = k0 = 0
    for m, n in zip(lengths, (90, 5, 131, 30), strict=True):
        within[q0 : q0 + m, k0 : k0 + n] = dense_mask(m, n, True, (-1, -1), device)
        q0, k0 = q0 + m, k0 + n
    want = []
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = (x.detach().to(dtype)[None].requires_grad_() for x in leaves)
        out, lse = flash_ext.reference.attention(q, k, v, bias=shown & within)
        dlse = inputs.dlse.to(lse.dtype)[None]
        found = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout.to(dtype)[None], dlse))
        values = (out, lse, *found)
        want.append({n: x.detach()[0] for n, x in zip(actual, values, strict=True)})
    expected = type(expected_results(Problem(1, 2, 2), make_inputs(Problem(1, 2, 2), "cpu")))(*want)
    assert_accurate({n: x.detach() for n, x in actual.items()}, expected, torch.bfloat16)


def test_what_is_derived_is_kept_until_a_write(device: str) -> None:
    mask = MAKERS["intervals"](device)
    folded = mask.folded(True, (-1, -1))
    assert mask.folded(True, (-1, -1)) is folded and mask.folded(False, (-1, -1)) is mask
    assert mask.to_dense() is mask.to_dense() and mask.folded(True, (5, -1)) is not folded
    mask.words.copy_(Mask.sinks(9, (70, 3), 300, device=device).words)
    assert mask.folded(True, (-1, -1)) is not folded
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device=device)
    within = mask.within((offsets, offsets), True, (-1, -1))
    assert mask.within((offsets, offsets), True, (-1, -1)) is within
    assert mask.within((offsets, offsets.clone()), True, (-1, -1)) is not within
    offsets[1] = 150
    again = mask.within((offsets, offsets), True, (-1, -1))
    assert again is not within and not torch.equal(again.to_dense(), within.to_dense())
    other = Mask.sinks(2, (7, 3), 300, device=device)
    mask.copy_(other)
    assert torch.equal(mask.to_dense(), other.to_dense())


def test_a_refused_copy_writes_nothing(device: str) -> None:
    """One interval a query and two: their tensors have the same shapes."""
    mask, other = (Mask.prefix(9, 300, device=device), Mask.sinks(2, (7, 3), 300, device=device))
    before = [x.clone() for x in mask.options().values()]
    assert [x.shape for x in before] == [x.shape for x in other.options().values()]
    with pytest.raises(ValueError, match="of the same kind"):
        mask.copy_(other)
    assert all(map(torch.equal, mask.options().values(), before))


def test_the_mask_of_a_bias_is_kept_until_a_write(device: str) -> None:
    bias = torch.rand(2, 1, 200, 300, device=device) < 0.5
    mask = Mask.of_bias(bias, 200, 300)
    assert Mask.of_bias(bias, 200, 300) is mask and torch.equal(mask.to_dense(), bias)
    causal = Mask.of_bias(bias, 200, 300, (-1, 0)).to_dense()
    assert torch.equal(causal, bias & dense_mask(200, 300, True, (-1, -1), device))
    bias[0] = True
    assert torch.equal(Mask.of_bias(bias, 200, 300).to_dense(), bias)
    mask, view = Mask.of_bias(bias, 200, 300), bias[:, None, 0]  # as bias
    assert Mask.of_bias(view, 200, 300) is mask and Mask.of_bias(bias[:1], 200, 300) is not mask
    for keys in range(1, 30):  # a bounded number of them is kept
        shown = Mask.of_bias(bias[..., :keys], 200, keys)
        assert torch.equal(shown.to_dense(), bias[..., :keys])
    assert len(Mask.of_bias.__globals__["_of_biases"][bias][1]) < 10
    count = len(Mask.of_bias.__globals__["_of_biases"])
    del bias, view
    assert len(Mask.of_bias.__globals__["_of_biases"]) == count - 1
    with torch.inference_mode():
        bias = torch.rand(1, 1, 5, 6, device=device) < 0.5
        assert torch.equal(Mask.of_bias(bias, 5, 6).to_dense(), bias)


def test_a_mask_made_in_inference_mode_serves_training(device: str) -> None:
    mask = MAKERS["intervals"](device)
    with torch.inference_mode():
        flash_ext.attention(*qkv(device, grad=False), mask=mask, causal=True)
    tensors = qkv(device)
    grads(flash_ext.attention(*tensors, mask=mask, causal=True), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ("bhqk", "b11k", "11qk"))
@pytest.mark.parametrize("causal", (False, True))
def test_a_large_bool_bias_is_a_mask(causal: bool, pattern: str) -> None:
    problem = Problem(2, 700, 600, 4, 2, 64, bias=pattern, bias_type="bool", causal=causal)
    inputs = make_inputs(problem, "cuda")
    for _ in range(2):  # converted, and kept
        actual = results(problem, inputs, bias=inputs.bias)
        assert_accurate(actual, expected_results(problem, inputs), problem.dtype)
    given: dict[str, Any] = {"bias": inputs.bias}
    found = masked.with_bool_bias(inputs.q, inputs.k, inputs.v, inputs.bias, given)
    assert "mask_words" in found and "bias" not in found


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("causal", (False, True))
def test_compiled(causal: bool, name: str, device: str) -> None:
    """Without a graph break, and without a new graph for other contents."""
    backend = "inductor" if device == "cuda" else "aot_eager"

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = flash_ext.attention(q, k, v, mask=mask, causal=causal)
        return out + flash_ext.attention(out, k, v, mask=mask, causal=causal)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tensors, mask = qkv(device), MAKERS[name](device)
    for step in range(2):
        if step:
            for rows in (mask.kv_tiles, mask.q_tiles):
                rows[..., :3] = 0
        want = grads(model(*tensors, mask), tensors)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got = grads(compiled(*tensors, mask), tensors)
        for x, y in zip(got.values(), want.values(), strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def test_a_mask_is_made_within_a_graph() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = Mask.documents(ids, causal=True)
        return flash_ext.attention(q, k, v, mask=mask & Mask.sinks(2, (50, 9), 300))

    tensors, ids = qkv("cpu"), torch.arange(300) // 70
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, ids), model(*tensors, ids))


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed(reentrant: bool, device: str) -> None:
    tensors, mask = qkv(device), MAKERS["blocks"](device)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return flash_ext.attention(q, k, v, mask=mask, causal=True, deterministic=True)

    want = grads(layer(*tensors, mask), tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = checkpoint(layer, *leaves, mask, use_reentrant=reentrant)
    torch.manual_seed(4)
    out.backward(torch.randn_like(out))
    got = {n: x.grad for n, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
    assert_all_bitwise_equal({"out": out.detach()} | got, want)


def test_as_a_pytree_and_on_another_device(device: str) -> None:
    from torch.utils import _pytree

    mask = MAKERS["blocks"](device)
    leaves, spec = _pytree.tree_flatten({"mask": mask})
    assert [x is y for x, y in zip(leaves, mask.options().values(), strict=True)] == [True] * 3
    again = _pytree.tree_unflatten(leaves, spec)["mask"]
    assert repr(again) == repr(mask) and again.listed
    assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense().cpu())
    assert mask.to("cpu").device.type == "cpu"


@pytest.mark.parametrize("causal", (False, True))
def test_exported_and_transformed(causal: bool, device: str) -> None:
    """torch.export, torch.vmap and torch.func.grad."""
    q, k, v = (torch.stack((x, x.flip(1))) for x in qkv(device, grad=False))
    mask = MAKERS["blocks"](device)

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
            return flash_ext.attention(q, k, v, mask=mask, causal=causal, deterministic=True)

    model = Model()
    exported = torch.export.export(model, (q[0], k[0], v[0], mask)).module()
    assert torch.equal(exported(q[0], k[0], v[0], mask), model(q[0], k[0], v[0], mask))
    want = torch.stack([model(*x, mask) for x in zip(q, k, v, strict=True)])
    found = torch.vmap(model, in_dims=(0, 0, 0, None))(q, k, v, mask)
    torch.testing.assert_close(found, want, atol=1e-2, rtol=1e-2)
    leaf = q[0].clone().requires_grad_()
    model(leaf, k[0], v[0], mask).float().sum().backward()
    found = torch.func.grad(lambda x: model(x, k[0], v[0], mask).float().sum())(q[0])
    assert torch.equal(found, leaf.grad)


@pytest.mark.parametrize("name", MAKERS)
def test_opcheck(name: str, device: str) -> None:
    q, k, v = qkv(device, batch=1)
    torch.library.opcheck(
        torch.ops.flash_ext.fwd.default, (q, k, v), MAKERS[name](device).options()
    )


@pytest.mark.gpu
@every_variant
@pytest.mark.parametrize("causal", (False, True))
def test_cuda_graphs_with_changing_lists(causal: bool, variant: str) -> None:
    """Forward and backward; the mask with causal is made in the graph."""
    tensors, others = (
        qkv("cuda"),
        [MAKERS["intervals"]("cuda"), Mask.sinks(200, (3, 0), 300, device="cuda")],
    )
    mask = Mask.sinks(5, (70, 3), 300, device="cuda")
    dout = torch.randn_like(tensors[0])

    def step() -> list[Tensor]:
        options: dict[str, Any] = {"causal": causal, "variant": variant, "deterministic": True}
        out = flash_ext.attention(*tensors, mask=mask, **options)
        return [out, *torch.autograd.grad(out, tensors, dout)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for other in others:
        mask.copy_(other)
        graph.replay()
        for x, y in zip(found, step(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    tensors = qkv("cuda")
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    flat = [x.flatten(0, 1)[:300] for x in tensors]
    shown = torch.ones(300, 300, dtype=torch.bool, device="cuda")
    parents = torch.tensor([-1, 0, 1], device="cuda")
    index = torch.zeros(1, 1, 3, 2, dtype=torch.int64, device="cuda")
    count = torch.ones(1, 1, 3, dtype=torch.int64, device="cuda")
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 300, 300, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        masks = [
            *(Mask.dense(shown), Mask.documents(cu_seqlens=offsets, seqlen=300, causal=True)),
            *(Mask.prefix(9, 300, device="cuda"), Mask.sinks(5, (9, 0), 300, device="cuda")),
            *(
                Mask.blocks(index, count, 300, 300),
                Mask.blocks(
                    index.repeat(1, 1, 2, 1)[:, :, :5],
                    count.repeat(1, 1, 2)[:, :, :5],
                    300,
                    300,
                    block=64,
                ),
            ),
            Mask.from_block_mask(block_mask),
        ]
        Mask.tree(parents, 5)
        for mask in masks:
            for other in (mask & masks[1], mask | masks[2], ~mask):
                out = flash_ext.attention(*tensors, mask=other, causal=True)
                torch.autograd.grad(out, tensors, torch.ones_like(out))
            flash_ext.attention_varlen(*flat, offsets, offsets, mask=mask, causal=True)
            mask.density(), mask.to_dense(), repr(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_of_documents_is_linear() -> None:
    """128k tokens, of which a dense mask would have 16 GiB."""
    ids = torch.arange(1 << 17, device="cuda") // 1000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = Mask.documents(ids, causal=True, window=(700, -1), prefix=20).folded(True, (800, -1))
    assert mask.per_query == 2 and torch.cuda.max_memory_allocated() - before < 64 << 20


# --- flex_attention ---


@pytest.mark.parametrize("grouped", (False, True))
def test_flex_attention(grouped: bool, device: str) -> None:
    """As torch's own, forward and gradients."""
    torch.manual_seed(6)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = 2 if grouped else 4
    q, k, v = (
        torch.randn(2, n, 300, 64, device=device, dtype=dtype, requires_grad=True)
        for n in (4, heads, heads)
    )
    document = torch.arange(300, device=device) // 77
    found = create_block_mask(
        lambda b, h, i, j: (i >= j + h) & (document[i] == document[j]),
        2,
        4,
        300,
        300,
        device=device,
    )
    options: dict[str, Any] = {"block_mask": found, "scale": 0.2, "enable_gqa": grouped}
    constants = (x.detach() for x in (q, k, v))
    want, lse = flex_attention(*constants, return_lse=True, **options)
    got, got_lse = flash_ext.flex_attention(q, k, v, return_lse=True, **options)
    assert got.shape == want.shape and got_lse.shape == lse.shape
    close = {"atol": 1e-4, "rtol": 1e-4} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(got_lse, lse.float(), **close)
    dense = Mask.from_block_mask(found).to_dense()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(q, k, v, dense), scale=0.2, enable_gqa=grouped
    )
    want = want.where(dense.any(-1, keepdim=True), 0)
    dout = torch.randn_like(want)
    pairs = (torch.autograd.grad(x, (q, k, v), dout) for x in (got, want))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, **close)
    kept = flash_ext.flex._masks[found]
    assert torch.equal(flash_ext.flex_attention(q, k, v, **options), got)
    assert flash_ext.flex._masks[found] is kept


def test_flex_attention_without_a_mask_and_with_ours() -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 16)
    torch.testing.assert_close(flash_ext.flex_attention(q, k, v), flex_attention(q, k, v))
    out = flash_ext.flex_attention(q, k, v, block_mask=Mask.prefix(0, 50))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want)
    with pytest.raises(ValueError, match="score_mod must be None.*softcap, alibi_slopes and bias"):
        flash_ext.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s)
    with pytest.raises(ValueError, match="enable_gqa must be True"):
        flash_ext.flex_attention(q, k[:, :1], v[:, :1])


def test_flex_attention_s_other_arguments() -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 16)
    want, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    out, found = flash_ext.flex_attention(
        q, k, v, kernel_options={"BLOCK_M": 64}, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close((out, found.lse), (want, aux.lse))
    assert flash_ext.flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None
    for wrong in ({"return_aux": AuxRequest(max_scores=True)},
                  {"return_aux": AuxRequest(), "return_lse": True},
                  {"return_aux": True}):  # fmt: skip
        with pytest.raises(ValueError, match="return_aux must be an AuxRequest of lse alone"):
            flash_ext.flex_attention(q, k, v, **wrong)


def test_flex_attention_s_masks_are_of_query_heads() -> None:
    """torch asks mask_mod about these, however many heads a BlockMask was made for."""
    q, k, v = torch.randn(1, 4, 50, 16), *torch.randn(2, 1, 2, 50, 16)
    found = create_block_mask(lambda b, h, i, j: i - j < h + 3, None, 2, 50, 50, device="cpu")
    with pytest.raises(ValueError, match="block_mask must be of 1 or 4 heads"):
        flash_ext.flex_attention(q, k, v, block_mask=found, enable_gqa=True)
    mask = Mask.dense(torch.rand(2, 50, 50) < 0.5)  # of key heads
    flash_ext.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


# --- explain, and errors ---


def test_explain_says_how_kernels_get_the_mask(device: str) -> None:
    tensors, mask = qkv(device), MAKERS["intervals"](device)
    found = flash_ext.explain(*tensors, mask=mask, causal=True)
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    assert found.mask == "lists of blocks"
    assert found.variant == ("fa3" if hopper else "fa2") and found.mask in str(found)
    assert flash_ext.explain(*tensors).mask is None
    offsets = torch.tensor([0, 300], dtype=torch.int32, device=device)
    flat = [x[0] for x in tensors]
    assert flash_ext.explain(*flat, offsets, offsets, mask=mask).mask == found.mask
    if device == "cuda":
        assert flash_ext.explain(*tensors, mask=mask, softcap=5.0).variant == "fa2"
        assert flash_ext.explain(*tensors, mask=mask, variant="fa1").mask == found.mask
        exact = flash_ext.explain(*tensors, mask=mask, batch_invariant=True)
        assert exact.mask == "a bool bias" and found.reasons["fa1"] is None


def test_errors(device: str) -> None:
    q, k, v = qkv(device, grad=False)
    mask = MAKERS["intervals"](device)

    def refused(match: str, *tensors: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            flash_ext.attention(*(tensors or (q, k, v)), **options)
        with pytest.raises(ValueError, match=match):
            flash_ext.explain(*(tensors or (q, k, v)), **options)

    refused("mask must be a flash_ext.Mask .*got a value of type Tensor", mask=mask.to_dense())
    refused(r"mask must be of shape .*\(2, 4, 200, 300\)", q[:, :200], k, v, mask=mask)
    refused("mask must be of shape", q, k[:, :200], v[:, :200], mask=mask)
    refused("mask must be of shape", mask=Mask.dense(mask.to_dense().expand(3, 1, -1, -1)))
    refused("mask must be of shape", mask=Mask.dense(mask.to_dense().expand(1, 3, -1, -1)))
    if device == "cuda":
        refused("mask must be on q's device", mask=mask.to("cpu"))
    offsets = torch.tensor([0, 300], dtype=torch.int32, device=device)
    flat = [x[0] for x in (q, k, v)]
    for name, x in (("alibi_slopes", torch.ones(4, device=device)), ("dropout_p", 0.5)):
        with pytest.raises(ValueError, match=f"{name} must be left out with a mask"):
            flash_ext.attention_varlen(*flat, offsets, offsets, mask=mask, **{name: x})
    with pytest.raises(ValueError, match="cu_seqlens_k must be int32"):
        flash_ext.attention_varlen(*flat, offsets, offsets.long(), mask=mask)
    with pytest.raises(ValueError, match="has no mask"):
        flash_ext.fp8.attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match="mask must be None here"):
        flash_ext.functional.attention_options(q, mask=mask)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Mask.dense(torch.ones(3, 3)), "visible must be bool"),
        (lambda: Mask.dense(torch.ones(3, 3) > 0, seqlen_k=5), r"visible must be 1 or \(3, 5\)"),
        (lambda: Mask.intervals(torch.zeros(3), torch.ones(3), 5), "begin must be integers"),
        (lambda: Mask.intervals(torch.zeros(3).int(), torch.ones(4).int(), 5), "end must be like"),
        (lambda: Mask.intervals(*torch.zeros(2, 5, 3).int(), 5), "begin must be .*1 or 2"),
        (lambda: Mask.documents(), "ids or cu_seqlens must be given"),
        (lambda: Mask.documents(torch.zeros(5)), "ids must be integers"),
        (lambda: Mask.documents(cu_seqlens=torch.zeros(2).int()), "seqlen must be given"),
        (
            lambda: Mask.documents(
                cu_seqlens=torch.zeros(3).int(), seqlen=9, prefix=torch.ones(3).int()
            ),
            r"prefix must be an int or of shape \(2,\)",
        ),
        (
            lambda: Mask.documents(cu_seqlens=torch.tensor([0, 6, 3]).int(), seqlen=6),
            r"cu_seqlens\[2\] must be from 6",
        ),
        (lambda: Mask.documents(torch.zeros(5).int(), seqlen=4), "seqlen must be None with ids"),
        (lambda: Mask.documents(torch.zeros(5).int(), prefix=1.5), "prefix must be an int"),
        (lambda: Mask.prefix(torch.ones(4) > 0, 4), "n must be integers"),
        (lambda: Mask.sinks(3, 5, 9), "window must be a pair"),
        (lambda: Mask.blocks(*[torch.zeros(1, 1, 3, 3).int()] * 2, 300, 300), "count must be"),
        (lambda: Mask.blocks(*[torch.zeros(1, 1, 2, 3).int()] * 2, 300, 300), "index must be"),
        (lambda: Mask.blocks(*[torch.zeros(1).int()] * 2, 3, 3, block=32), "block must be 128 or"),
        (lambda: Mask.blocks(torch.ones(1, 1, 1, 2) > 0, torch.ones(1, 1, 1).int(), 9, 9), "index"),
        (lambda: Mask.tree(torch.zeros(3), 4), "parents must be integers"),
        (lambda: Mask.tree(torch.tensor([-1, 5])), "parents must be -1 to 1"),
        (lambda: Mask.tree(torch.tensor([[-1, 0, 1], [2, -1, 0]])), "parents must be a tree"),
        (lambda: Mask.tree(torch.tensor([-1, 0]), 5, seqlen_k=4), "n must be 0 to 2"),
        (lambda: Mask.tree(torch.zeros(3).int(), torch.ones(1).int()), "seqlen_k must be given"),
        (lambda: Mask.from_block_mask(3), "block_mask must be a BlockMask"),
        (lambda: Mask.prefix(1, 4) & Mask.prefix(1, 5), "the other mask must be like Mask"),
        (lambda: Mask.prefix(1, 4) | 3, "the other mask must be a Mask"),
        (lambda: Mask.prefix(1, 4).copy_(torch.ones(3)), "the other mask must be of the same"),
        (
            lambda: Mask.prefix(1, 4).copy_(Mask.prefix(1, 400)),
            "the other mask must be of the same",
        ),
    ],
)
def test_errors_of_constructors(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
