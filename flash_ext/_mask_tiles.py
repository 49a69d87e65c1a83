"""The ops that make a mask's tensors, in torch. Temporary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.tile_mask import FULL, PARTIAL
from .ops.options import MASK_BLOCK


def _order(device: torch.device) -> Tensor:
    """Where the key of each bit is: word w, bit b is key 8 (b // 2) + 2 w + b % 2."""
    w, b = torch.arange(4, device=device)[:, None], torch.arange(32, device=device)
    return 8 * (b // 2) + 2 * w + b % 2


def pack_bits(shown: Tensor) -> Tensor:
    """(..., 128) bool -> (..., 4) int32."""
    bits = shown[..., _order(shown.device)].long() << torch.arange(32, device=shown.device)
    return bits.sum(-1).to(torch.int32)


def rows_of(kinds: Tensor) -> Tensor:
    """Rows of runs (..., R) of kinds (..., blocks)."""
    blocks = kinds.shape[-1]
    place = torch.where(kinds == FULL, 0, torch.where(kinds == PARTIAL, 1, 2))
    order = place.argsort(dim=-1, stable=True).to(torch.int32) | (1 << 16)
    full, partial = ((kinds == kind).sum(-1, dtype=torch.int32) for kind in (FULL, PARTIAL))
    header = torch.stack((full, partial, full + partial, torch.zeros_like(full)), -1)
    return F.pad(torch.cat((header, order), -1), (0, max(-blocks % 4, 4 - blocks)), value=-1)


Tiles = tuple[Tensor, Tensor, Tensor]


def from_kinds(kinds: Tensor) -> tuple[Tensor, Tensor]:
    return rows_of(kinds), rows_of(kinds.mT)


def mask_from_dense(dense: Tensor) -> Tiles:
    """Of (Bm, Hm, Sq, Sk) bool."""
    *_, seqlen_q, seqlen_k = dense.shape
    padded = F.pad(dense, (0, -seqlen_k % MASK_BLOCK, 0, -seqlen_q % MASK_BLOCK))
    blocks = padded.unflatten(3, (-1, MASK_BLOCK)).unflatten(2, (-1, MASK_BLOCK)).transpose(3, 4)
    rows = torch.arange(padded.shape[2], device=dense.device).view(-1, MASK_BLOCK) >= seqlen_q
    full = (blocks | rows[:, None, :, None]).flatten(-2).all(-1)
    some = blocks.flatten(-2).any(-1)
    kinds = torch.where(full & some, FULL, torch.where(some, PARTIAL, 0))
    return *from_kinds(kinds), pack_bits(blocks)


def mask_from_intervals(begin: Tensor, end: Tensor, seqlen_k: int) -> Tiles:
    """Of int32 (Bm, Hm, Sq, 1 or 2), any numbers."""
    begin, end = begin.clamp(0, seqlen_k), end.clamp(0, seqlen_k)
    empty = end <= begin
    begin, end = begin.masked_fill(empty, 0), end.masked_fill(empty, 0)
    if begin.shape[-1] == 2:  # in order, and one where they touch
        (b0, b1), (e0, e1) = begin.unbind(-1), end.unbind(-1)
        swap = (e1 > 0) & ((e0 == 0) | (b1 < b0))
        b0, b1 = torch.where(swap, b1, b0), torch.where(swap, b0, b1)
        e0, e1 = torch.where(swap, e1, e0), torch.where(swap, e0, e1)
        one = (e1 > 0) & (b1 <= e0)
        e0 = torch.where(one, torch.maximum(e0, e1), e0)
        begin = torch.stack((b0, b1.masked_fill(one, 0)), -1)
        end = torch.stack((e0, e1.masked_fill(one, 0)), -1)
    else:
        begin, end = F.pad(begin, (0, 1)), F.pad(end, (0, 1))
    seqlen_q, words = begin.shape[2], torch.stack((begin, end), -1).flatten(-2).to(torch.int32)
    words = F.pad(words, (0, 0, 0, -seqlen_q % MASK_BLOCK))
    edge = torch.arange(0, seqlen_k, MASK_BLOCK, device=begin.device)[:, None]
    words_ = words[:, :, :, None]
    low, high = torch.maximum(words_[..., ::2], edge), words_[..., 1::2].clamp(max=seqlen_k)
    shown = (torch.minimum(high, edge + MASK_BLOCK) - low).clamp(min=0).sum(-1)
    shown = shown.unflatten(2, (-1, MASK_BLOCK))  # (Bm, Hm, nQ, 128, nK)
    rows = torch.arange(words.shape[2], device=begin.device).view(-1, MASK_BLOCK) >= seqlen_q
    some, full = (shown > 0).any(3), ((shown == MASK_BLOCK) | rows[..., None]).all(3)
    kinds = torch.where(full & some, FULL, torch.where(some, PARTIAL, 0))
    return *from_kinds(kinds), words
