"""Providers of the call paths that compare.py --host times in addition to the plain ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from providers import PEERS, Provider
from torch import Tensor
from torch.nn.attention import SDPBackend

import flash_ext
from flash_ext.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_ext.integrations import sdpa

SDPA = "sdpa"  # the row with which all others are compared
WINDOW = 64


@dataclass(frozen=True)
class Packed(Provider):
    """Takes (total, H, D); of one sequence, so that its views are of the same memory."""

    def view(self, x: Tensor) -> Tensor:
        """(1, S, H, D) to (S, H, D), and back."""
        return x.squeeze(0) if x.dim() == 4 else x.unsqueeze(0)


def bare_node(forward: Any, backward: Any) -> Any:
    """An autograd.Function with nothing in it but two calls: what a node in Python costs."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            out, lse = forward(*tensors)
            ctx.save_for_backward(*tensors, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            return backward(dout, None, *ctx.saved_tensors)[:3]

    return Bare.apply


def providers(device: torch.device, rows: int) -> list[Provider]:
    """Of tensors (1, rows, H, D). SDPA's own choice of a backend first."""
    q = torch.zeros(1, 4, rows, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    backend = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name.lower()
    label = f"SDPA ({backend.removesuffix('_attention')})"
    by_itself = replace(PEERS["flash"](), name=SDPA, label=label, around=Provider.around)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device)
    fwd, bwd = torch.ops.flash_ext.fwd.default, torch.ops.flash_ext.bwd.default
    options = {"causal": True, "window_left": WINDOW}
    node = bare_node(lambda *x: fwd(*x, **options), lambda *x: bwd(*x, **options))

    def window(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_ext.attention(q, k, v, causal=causal, window=(WINDOW, -1))

    def varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_ext.attention_varlen(q, k, v, offsets, offsets, causal=causal)

    def drop_in(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_attn_func(q, k, v, causal=causal)

    def drop_in_varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flash_attn_varlen_func(q, k, v, offsets, offsets, rows, rows, causal=causal)

    return [
        by_itself,
        replace(by_itself, name="activated", label="SDPA, activated", around=sdpa.activated),
        Provider("window", "attention, window", window),
        Packed("varlen", "attention_varlen", varlen),
        Provider("flash_attn_func", "flash_attn_func", drop_in),
        Packed("flash_attn_varlen_func", "flash_attn_varlen_func", drop_in_varlen),
        Provider("bare_node", "a bare autograd.Function", lambda q, k, v, causal: node(q, k, v)),
    ]
