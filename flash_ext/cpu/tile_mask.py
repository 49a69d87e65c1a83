"""Masks as lists of blocks: what the three tensors of a `flash_ext.Mask` say.

A block is 128 queries by 128 keys. There are nQ = ⌈Sq / 128⌉ by nK = ⌈Sk / 128⌉ of them; Bm is B or
1, Hm is Hq, Hk or 1.

- kv_tiles (Bm, Hm, nQ, R), int32: for each block of queries a row of runs, [full, partial, runs,
  order, run, run, …]. A run is a first block of keys | count << 16. All queries of a full block see
  all its keys, which are below Sk. Runs of full blocks come first, `full` blocks in all, then runs
  of partial ones, each in ascending order. Entries after the last run hold anything. The order of
  row i is the index of the row with which kernels begin as number i: longer rows come first, and
  rows of about the same length in ascending order.
- q_tiles (Bm, Hm, nK, R), int32: the same pairs of blocks, a row for each block of keys.
- words, int32: four a query. Intervals: (Bm, Hm, nQ · 128, 4), two half-open intervals of keys,
  begin, end, begin, end, and zeros past Sq. Bits: (Bm, Hm, nQ, nK, 128, 4): bit b of word w is of
  key 8 ⌊b / 2⌋ + 2 w + b mod 2 of the block; words of blocks that are not partial hold anything.

Query i sees key j if the pair of their blocks is listed, as full, or as partial and the words of i
say so.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops.mask import HEADER
from ..ops.options import MASK_BLOCK, Options

FULL, PARTIAL = 1, 2
"""Kinds of blocks; 0 is hidden."""


def kinds_of_runs(rows: Tensor, blocks: int) -> Tensor:
    """The kind of each block, uint8 (…, blocks), from rows of runs (…, R)."""
    full, runs = rows[..., :1], rows[..., 2:3]
    used = torch.arange(rows.shape[-1] - HEADER, device=rows.device) < runs
    run = rows[..., HEADER:].masked_fill(~used, 0)
    count = (run >> 16) & 0xFFFF
    first = (run & 0xFFFF).clamp(max=blocks)
    of_run = torch.where(count.cumsum(-1) <= full, FULL, PARTIAL).to(torch.int32) * used
    # A run adds its kind at its first block, and takes it off after its last.
    steps = rows.new_zeros((*rows.shape[:-1], blocks + 1))
    steps.scatter_add_(-1, first.long(), of_run)
    steps.scatter_add_(-1, (first + count).clamp(max=blocks).long(), -of_run)
    return steps.cumsum(-1)[..., :blocks].to(torch.uint8)


def unpack_bits(words: Tensor) -> Tensor:
    """(…, 128, 4), int32 → (…, 128, 128), bool."""
    eight = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.contiguous().view(torch.uint8)
    bits: Tensor = (octets.unsqueeze(-1) >> eight) & 1
    pairs = bits.flatten(-2).view(*words.shape, 16, 2)
    return pairs.transpose(-3, -2).flatten(-3).bool()


def pack_bits(visible: Tensor) -> Tensor:
    """The inverse of `unpack_bits`."""
    weight = 2 ** torch.arange(8, dtype=torch.uint8, device=visible.device)
    rows = visible.shape[:-1]
    pairs = visible.reshape(*rows, 16, 4, 2).transpose(-3, -2)
    octets = (pairs.reshape(*rows, 16, 8) * weight).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)


def _shown_by_words(words: Tensor, keys: int) -> Tensor:
    """(Bm, Hm, nQ · 128, keys), whatever the kinds are; keys is a multiple of 128."""
    if words.dim() == 6:
        return unpack_bits(words).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    begin_0, end_0, begin_1, end_1 = words.unsqueeze(-1).unbind(-2)
    key = torch.arange(keys, dtype=torch.int32, device=words.device)
    return ((key >= begin_0) & (key < end_0)) | ((key >= begin_1) & (key < end_1))


def dense_mask(kv_tiles: Tensor, words: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The mask as bool (Bm, Hm, Sq, Sk), for sizes = (Sq, Sk)."""
    blocks_k = -(-sizes[1] // MASK_BLOCK)
    kinds = kinds_of_runs(kv_tiles, blocks_k)
    kinds = kinds.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)
    shown = _shown_by_words(words, blocks_k * MASK_BLOCK).logical_and_(kinds == PARTIAL)
    return shown.logical_or_(kinds == FULL)[:, :, : sizes[0], : sizes[1]]


def by_query_heads(visible: Tensor, heads: int) -> Tensor:
    """A dense mask (Bm, Hm, Sq, Sk) as one that broadcasts to all query heads."""
    if 1 in (heads, visible.shape[1]) or heads % visible.shape[1] != 0:
        return visible
    return visible.repeat_interleave(heads // visible.shape[1], 1)


def mask_as_bias(q: Tensor, k: Tensor, options: Options) -> Options:
    """The options with the mask in the bias, for q (B, Sq, Hq, D) and k (B, Sk, Hk, D)."""
    if options.mask_kv_tiles is None or options.mask_words is None:
        return options
    bias = dense_mask(options.mask_kv_tiles, options.mask_words, (q.shape[1], k.shape[1]))
    bias = by_query_heads(bias, q.shape[2])
    if options.bias is not None and options.bias.dtype == torch.bool:
        bias = options.bias & bias
    elif options.bias is not None:
        bias = options.bias.masked_fill(~bias, -torch.inf)
    return replace(options, bias=bias, mask_kv_tiles=None, mask_q_tiles=None, mask_words=None)
