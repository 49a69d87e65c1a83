"""What every rank runs for tests/test_ring_flash_attn.py: ring-flash-attn over the drop-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

import flash_ext
from flash_ext import flash_attn
from flash_ext.flash_attn import flash_attn_interface

Tensor = torch.Tensor
BOUNDS = (0, 8, 24, 32)
"""Of packed sequences, whose lengths 2 ranks can halve twice."""


def rows_of(rank: int, ranks: int, bounds: tuple[int, ...], chunks: int) -> Tensor:
    """The rank's rows, where each sequence is cut into chunks · ranks pieces; 0: every ranks-th."""
    if chunks == 0:
        return torch.arange(rank, bounds[-1], ranks)
    found = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        pieces = torch.arange(start, end).chunk(chunks * ranks)
        found += [pieces[rank]] if chunks == 1 else [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return torch.cat(found)


def check(ranks: int, device: str) -> None:
    """Every function against the whole sequence in float32.

    In bfloat16, since its own sums are wrong for float32, whose buffers it takes for copies, and
    between ranks of unlike types for float64.
    """
    sys.modules["flash_attn"] = flash_attn
    sys.modules["flash_attn.flash_attn_interface"] = flash_attn_interface
    # For transformers before 5, which it cannot do without.
    sys.modules["ring_flash_attn.adapters"] = SimpleNamespace(
        substitute_hf_flash_attn=None, update_ring_flash_attn_params=None
    )
    import ring_flash_attn as rfa

    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(1, BOUNDS[-1], heads, 8, device=device) for heads in (4, 2, 2, 4)]
    whole = [x.bfloat16().float() for x in whole]
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    longest = int(cu_seqlens.diff().max()) // ranks

    def llama3(*tensors: Tensor, causal: bool) -> Tensor:
        *bounds, keys = rfa.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, ranks)
        options = {"heads_k_stride": 1, "local_k_slice": keys, "causal": causal}
        return rfa.llama3_flash_attn_varlen_func(*tensors, *bounds, **options)

    def packed(name: str, *tensors: Tensor, causal: bool) -> Tensor:
        return getattr(rfa, name)(*tensors, cu_seqlens // ranks, longest, causal=causal)

    all_rows = (0, BOUNDS[-1])
    for name, bounds, chunks, masks in (
        ("ring_flash_attn_func", all_rows, 1, (False, True)),
        ("zigzag_ring_flash_attn_func", all_rows, 2, (True,)),
        ("stripe_flash_attn_func", all_rows, 0, (True,)),
        ("llama3_flash_attn_varlen_func", all_rows, 1, (False, True)),
        ("ring_flash_attn_varlen_func", BOUNDS, 1, (False, True)),
        ("zigzag_ring_flash_attn_varlen_func", BOUNDS, 2, (True,)),
    ):
        rows = rows_of(rank, ranks, bounds, chunks)
        for causal in masks:
            parts = [x[:, rows] for x in whole]
            leaves = [x.requires_grad_() for x in whole[:3]]
            if "varlen" in name:
                parts, leaves = ([x[0] for x in y] for y in (parts, leaves))
                expected = flash_ext.attention_varlen(
                    *leaves, cu_seqlens, cu_seqlens, causal=causal
                )
            else:
                expected = flash_ext.attention(*leaves, causal=causal)
            dim = expected.dim() - 3
            dout = whole[3].view_as(expected)
            gradients = torch.autograd.grad(expected, leaves, dout)

            q, k, v, part_dout = (x.detach().bfloat16().requires_grad_() for x in parts)
            if name.startswith("llama3"):
                out = llama3(q, k, v, causal=causal)
            elif "varlen" in name:
                out = packed(name, q, k, v, causal=causal)
            else:
                out = getattr(rfa, name)(q, k, v, causal=causal)
            found = torch.autograd.grad(out, (q, k, v), part_dout)
            for what, x, y in zip(
                ("out", "dq", "dk", "dv"), (out, *found), (expected, *gradients), strict=True
            ):
                torch.testing.assert_close(
                    x.float(),
                    y.index_select(dim, rows),
                    rtol=2e-2,
                    atol=2e-2,
                    msg=lambda text, where=f"{name}, {causal=}, {what}": f"{where}: {text}",
                )
