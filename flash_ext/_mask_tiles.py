"""The ops that make a mask's tensors, in torch. Temporary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MASK_BLOCK = 128
HEADER = 4
FULL, PARTIAL = 1, 2


def kinds_of_runs(rows: Tensor, blocks: int) -> Tensor:
    full, runs = rows[..., :1], rows[..., 2:3]
    used = torch.arange(rows.shape[-1] - HEADER, device=rows.device) < runs
    run = rows[..., HEADER:].masked_fill(~used, 0)
    count = (run >> 16) & 0xFFFF
    first = (run & 0xFFFF).clamp(max=blocks)
    of_run = torch.where(count.cumsum(-1) <= full, FULL, PARTIAL).to(torch.int32) * used
    steps = rows.new_zeros((*rows.shape[:-1], blocks + 1))
    steps.scatter_add_(-1, first.long(), of_run)
    steps.scatter_add_(-1, (first + count).clamp(max=blocks).long(), -of_run)
    return steps.cumsum(-1)[..., :blocks].to(torch.uint8)


def _order(device: torch.device) -> Tensor:
    """Where the key of each bit is: word w, bit b is key 8 (b // 2) + 2 w + b % 2."""
    w, b = torch.arange(4, device=device)[:, None], torch.arange(32, device=device)
    return 8 * (b // 2) + 2 * w + b % 2


def pack_bits(shown: Tensor) -> Tensor:
    """(..., 128) bool -> (..., 4) int32."""
    bits = shown[..., _order(shown.device)].long() << torch.arange(32, device=shown.device)
    return bits.sum(-1).to(torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """(..., 4) int32 -> (..., 128) bool."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    shown = torch.empty((*words.shape[:-1], MASK_BLOCK), dtype=torch.bool, device=words.device)
    shown[..., _order(words.device).flatten()] = bits.flatten(-2).bool()
    return shown


def dense_mask(kv_tiles: Tensor, words: Tensor, sizes: tuple[int, int]) -> Tensor:
    blocks_k = -(-sizes[1] // MASK_BLOCK)
    kinds = kinds_of_runs(kv_tiles, blocks_k)
    kinds = kinds.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)
    if words.dim() == 6:
        shown = unpack_bits(words).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    else:
        begin_0, end_0, begin_1, end_1 = words.unsqueeze(-1).unbind(-2)
        key = torch.arange(blocks_k * MASK_BLOCK, dtype=torch.int32, device=words.device)
        shown = ((key >= begin_0) & (key < end_0)) | ((key >= begin_1) & (key < end_1))
    shown = (shown & (kinds == PARTIAL)) | (kinds == FULL)
    return shown[:, :, : sizes[0], : sizes[1]]


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
