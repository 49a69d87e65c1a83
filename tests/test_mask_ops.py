"""Masks of lists of blocks: the ops that accept them, on the CPU, against dense masks.

Would catch a block or a bit that is read from the wrong place, a read of an entry that the format
leaves unused, a gradient that a mask loses, and tensors of a mask that autograd, vmap or a compiler
drops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mask_model import decode, mask_of, rows_of
from torch import Tensor

from flash_ext.cpu.tile_mask import dense_mask, kinds_of_runs

fwd, bwd = torch.ops.flash_ext.fwd, torch.ops.flash_ext.bwd
NAMES = ("mask_kv_tiles", "mask_q_tiles", "mask_words")


def random_mask(*sizes: int, seed: int = 0) -> Tensor:
    """With blocks of each kind, empty rows, and edges within blocks."""
    make = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = sizes
    blocks = (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128))
    kinds = torch.randint(3, blocks, generator=make)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    mask = (kinds == 1) | ((kinds == 2) & (torch.rand(sizes, generator=make) < 0.5))
    mask[:, :, 1:3] = False
    return mask


def operands(*, batch: int = 2, heads: int = 4, heads_k: int = 2, rows: int = 200) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((rows, heads), (300, heads_k), (300, heads_k))
    return [torch.randn(batch, *x, 16, dtype=torch.float64) for x in shapes]


def test_the_model_agrees_with_itself() -> None:
    mask = random_mask(1, 2, 150, 200)
    given = mask_of(mask)
    assert torch.equal(decode(given["mask_kv_tiles"], given["mask_words"], 150, 200), mask)


@pytest.mark.parametrize(
    "sizes", ((1, 1, 1, 1), (2, 1, 128, 256), (1, 3, 300, 700), (1, 1, 130, 0))
)
def test_dense_masks(sizes: tuple[int, ...]) -> None:
    mask = random_mask(*sizes)
    given = mask_of(mask)
    assert torch.equal(dense_mask(given["mask_kv_tiles"], given["mask_words"], sizes[2:]), mask)


def test_intervals_apply_in_partial_blocks_alone() -> None:
    words = torch.zeros(1, 1, 128, 4, dtype=torch.int32)
    words[..., :5, :] = torch.tensor([3, 140, 250, 384], dtype=torch.int32)
    kv_tiles = rows_of(torch.tensor([[[[0, 2, 1]]]]), 6)[..., :8].contiguous()
    want = decode(kv_tiles, words, 5, 390)
    assert want[..., 128:140].all() and want[..., 250:384].all() and not want[..., 140:250].any()
    assert torch.equal(dense_mask(kv_tiles, words, (5, 390)), want)


def test_runs_of_many_blocks() -> None:
    """The upper half of the count is in the sign of an int32."""
    row = torch.tensor([[40000, 0, 1, 0, 2 | (40000 - 2**16) << 16, 7, 7, 7]], dtype=torch.int32)
    kinds = kinds_of_runs(row, 40005)[0]
    assert kinds[2:40002].eq(1).all() and kinds.sum() == 40000


BIASES: dict[str, Any] = {
    "none": lambda: None,
    "float": lambda: torch.randn(1, 4, 200, 1, dtype=torch.float64, requires_grad=True),
    "bool": lambda: torch.rand(2, 1, 1, 300) < 0.7,
}


@pytest.mark.parametrize("variant", ("fa1", "fa2", "auto"))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("sizes", ((2, 4), (1, 1), (2, 1), (1, 4)))
def test_attention_and_gradients(sizes: tuple[int, int], bias: str, variant: str) -> None:
    """As with the mask as a bias, with the same bits (a bias's gradient is summed elsewhere)."""
    mask = random_mask(*sizes, 200, 300)
    added = BIASES[bias]()
    as_bias = mask if added is None else mask & added if bias == "bool" else None
    if as_bias is None:
        as_bias = added.masked_fill(~mask, -torch.inf)
    results = []
    for options in ({"bias": added, **mask_of(mask)}, {"bias": as_bias}):
        given = [x.requires_grad_() for x in operands()]
        out, lse = fwd(*given, **options, softcap=2.0, variant=variant)
        wanted = [*given, *([added] if bias == "float" else [])]
        loss = out.sin().sum() + lse[lse > -torch.inf].sum()
        results.append((out, lse, *torch.autograd.grad(loss, wanted)))
    for found, want in zip(*(x[:5] for x in results), strict=True):
        assert torch.equal(found, want)
    for found, want in zip(*(x[5:] for x in results), strict=True):
        torch.testing.assert_close(found, want)
    out, lse = results[0][:2]
    assert (lse[:, :, 1:3] == -torch.inf).all() and not out[:, 1:3].any()


def test_autograd_vmap_and_compilers_pass_the_mask() -> None:
    given = [x.requires_grad_() for x in operands(rows=130)]
    mask = mask_of(random_mask(1, 4, 130, 300))
    torch.library.opcheck(fwd.default, tuple(given), mask)
    out, lse = (x.detach() for x in fwd(*given, **mask))
    q, k, v = (x.detach() for x in given)
    torch.library.opcheck(bwd.default, (out, lse, q, k, v, out, lse), mask)


@pytest.mark.parametrize("mapped", (False, True))
def test_vmap(mapped: bool) -> None:
    q, k, v = (torch.stack((x, 2 * x), 1) for x in operands(rows=130))
    masks = [mask_of(random_mask(1, 4, 130, 300, seed=seed)) for seed in (0, int(mapped))]
    dims = {name: 3 for name in NAMES} if mapped else None
    every = {n: torch.stack([m[n] for m in masks], 3) if mapped else masks[0][n] for n in NAMES}
    found, _ = torch.vmap(lambda q, k, v, m: fwd(q, k, v, **m), (1, 1, 1, dims))(q, k, v, every)
    for i, mask in enumerate(masks):
        assert torch.equal(found[i], fwd(q[:, i], k[:, i], v[:, i], **mask)[0])


def test_results_are_written_into_tensors() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in operands(rows=130))
    mask = mask_of(random_mask(2, 1, 130, 300))
    out, lse = fwd(q, k, v, **mask)
    into = torch.empty_like(out)
    assert torch.equal(torch.ops.flash_ext.fwd_into(into, q, k, v, **mask), lse)
    assert torch.equal(into, out)


def test_8_bit_inputs_have_no_mask() -> None:
    x = torch.randn(1, 128, 1, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="variant 'fa3' has no mask with 8-bit inputs"):
        fwd(x, x, x, **mask_of(torch.ones(1, 1, 128, 128, dtype=torch.bool)))
