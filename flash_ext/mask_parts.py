"""What the constructors of a `Mask` say: as intervals of keys, as blocks, and as bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu import checks
from .cpu.tile_mask import FULL, PARTIAL, kinds_of_runs, pack_bits
from .ops.call import can_be_read
from .ops.checks import INTEGERS, refuse
from .ops.mask import blocks_of, mask_from_dense, mask_from_documents
from .ops.options import MASK_BLOCK

Edge = Tensor | int
"""Where intervals begin or end: integers (…, Sq), or one for all."""

Intervals = Sequence[tuple[Edge, Edge]]
"""The half-open intervals of keys that each query sees, one or two. What lies outside of the keys
is cut off later."""

_EVALUATED = 1 << 26
"""Pairs of a query and a key at which a mask_mod is evaluated at a time."""

_HALF = MASK_BLOCK // 2


# --- Numbers that are at hand ---


def check_offsets(cu_seqlens: Tensor, seqlen: int) -> None:
    """Refuse documents that do not follow one another within the tokens."""
    if can_be_read(cu_seqlens):
        checks.check_offsets("cu_seqlens", cu_seqlens, seqlen)


def check_tree(parents: Tensor, n: int | Tensor, seqlen_k: int) -> None:
    """Refuse tokens beyond the keys, and parents that make no tree."""
    rows = parents.shape[-1]
    if not isinstance(n, Tensor) and not 0 <= n <= seqlen_k - rows:
        refuse("n", f"0 to {seqlen_k - rows}, so that {seqlen_k} keys have {rows} tokens", n)
    if rows == 0 or not can_be_read(parents):
        return
    if not bool(((parents >= -1) & (parents < rows)).all()):
        refuse("parents", f"-1 to {rows - 1}", parents.tolist())
    # No token is token `rows`. Ancestors twice as far each time: all end there.
    ancestor = parents.long().masked_fill(parents < 0, rows).reshape(-1, rows)
    ancestor = F.pad(ancestor, (0, 1), value=rows)
    for _ in range(rows.bit_length()):
        ancestor = ancestor.gather(1, ancestor)
    if bool((ancestor < rows).any()):
        refuse("parents", "a tree", f"a cycle, in {parents.tolist()}")


# --- Intervals ---


def larger(a: Edge, b: Edge) -> Edge:
    """The maximum."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def smaller(a: Edge, b: Edge) -> Edge:
    """The minimum."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def as_tensor(intervals: Intervals, rows: int, device: torch.device) -> Tensor:
    """As the ops take them: int32 (Bm, Hm, Sq, 4)."""
    edges = [x for pair in intervals for x in pair] + [0, 0] * (2 - len(intervals))
    like: dict[str, Any] = {"dtype": torch.int32, "device": device}
    numbers = [x if isinstance(x, Tensor) else torch.full((), x, **like) for x in edges]
    narrow = [
        x if x.dtype == torch.int32 else x.clamp(-(2**31), 2**31 - 1).to(torch.int32)
        for x in numbers
    ]
    shape = torch.broadcast_shapes((1, 1, rows), *(x.shape for x in narrow))
    return torch.stack([x.expand(shape) for x in narrow], -1)


def shown_by(intervals: Intervals, seqlen_k: int, device: torch.device) -> Tensor:
    """As bool (…, Sk)."""
    key = torch.arange(seqlen_k, dtype=torch.int32, device=device)
    shown = [
        (key >= (a.unsqueeze(-1) if isinstance(a, Tensor) else a))
        & (key < (b.unsqueeze(-1) if isinstance(b, Tensor) else b))
        for a, b in intervals
    ]
    return shown[0] if len(shown) == 1 else shown[0] | shown[1]


def of_documents(
    sizes: tuple[int, int],
    window: tuple[int, int],
    first_keys: int | Tensor,
    device: torch.device | str | None,
    offsets: tuple[Tensor, Tensor] | None = None,
    *,
    ids: Tensor | None = None,
    first_in_window: bool = False,
    name: str = "n",
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """The tensors of the mask, and how many intervals a query has. first_keys: a number, or one of
    each document; without offsets and ids, of each matrix. name: the caller's argument."""
    if isinstance(first_keys, Tensor):
        if first_keys.dtype not in INTEGERS:
            refuse(name, "integers", first_keys.dtype)
        number = first_keys.reshape(-1).clamp(0, sizes[1]).to(torch.int32)
        number = number if device is None else number.to(device)
    else:
        if not hasattr(first_keys, "__index__"):
            refuse(name, "an int", first_keys)
        some = max(min(first_keys, sizes[1]), 0)
        number = torch.full((1,), some, dtype=torch.int32, device=device)
    cu_q, cu_k = (None, None) if offsets is None else (x.contiguous() for x in offsets)
    tiles: tuple[Tensor, Tensor, Tensor] = mask_from_documents(
        number,
        *sizes,
        ids=ids,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        window_left=window[0],
        window_right=window[1],
        first_keys_in_window=first_in_window,
    )
    sees_first = isinstance(first_keys, Tensor) or first_keys > 0
    return tiles, 2 if sees_first and window[0] >= 0 else 1


# --- Blocks ---


def listed_blocks(index: Tensor, count: Tensor, blocks: int) -> Tensor:
    """Which blocks are among the first `count` of a list, bool (…, blocks)."""
    used = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    used = used & (index >= 0) & (index < blocks)
    shown = torch.zeros((*index.shape[:-1], blocks + 1), dtype=torch.bool, device=index.device)
    return shown.scatter_(-1, index.long().masked_fill(~used, blocks), True)[..., :blocks]


def half_blocks(shown: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The kinds of blocks and the bits of a mask of blocks of 64 by 64."""
    rows, columns = blocks_of(seqlen_q), blocks_of(seqlen_k)
    if shown.shape[2] % 2 == 1:  # a block that is not there does not make the other one partial
        shown = torch.cat((shown, shown[:, :, -1:]), 2)
    shown = F.pad(shown, (0, 2 * columns - shown.shape[3]))
    shown = shown.unflatten(3, (columns, 2)).unflatten(2, (rows, 2)).transpose(3, 4)
    some, full = shown.flatten(-2).any(-1), shown.flatten(-2).all(-1)
    if seqlen_k % MASK_BLOCK != 0:
        full[..., -1:] = False
    kinds = torch.where(full, FULL, torch.where(some, PARTIAL, 0)).to(torch.uint8)
    # The keys 0 to 63 of a block are the low halves of its words.
    halves = torch.where(shown[..., 0], 0xFFFF, 0) | torch.where(shown[..., 1], -0x10000, 0)
    words = halves.to(torch.int32).repeat_interleave(_HALF, -1)
    words = words.unsqueeze(-1).repeat_interleave(4, -1)
    if seqlen_k % MASK_BLOCK != 0:
        within = torch.arange(MASK_BLOCK, device=shown.device) < seqlen_k % MASK_BLOCK
        words[:, :, :, -1:] &= pack_bits(within)
    return kinds, words


def evaluated(
    mask_mod: Callable[..., Tensor],
    full: Tensor,
    shown: Tensor,
    block: tuple[int, int],
    sizes: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The kinds of blocks and the bits of blocks (B, H, …) of any size, which are full, or shown
    where mask_mod is true as well. A part of the queries at a time."""
    function: Callable[..., Any] = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    function = torch.vmap(function, in_dims=(0, None, None, None))
    (batch, heads), (seqlen_q, seqlen_k), device = shown.shape[:2], sizes, shown.device
    b, h, keys = (torch.arange(n, device=device) for n in (batch, heads, seqlen_k))
    step = max(_EVALUATED // max(batch * heads * seqlen_k * MASK_BLOCK, 1), 1) * MASK_BLOCK
    kinds, words = [], []
    for start in range(0, max(seqlen_q, 1), step):
        rows = torch.arange(start, min(start + step, seqlen_q), device=device)
        in_full, in_shown = (
            x[:, :, rows // block[0]][..., keys // block[1]] for x in (full, shown)
        )
        visible = in_full | (in_shown & function(b, h, rows, keys))
        kv_tiles, _, bits = mask_from_dense(visible)
        kinds.append(kinds_of_runs(kv_tiles, blocks_of(seqlen_k)))
        words.append(bits)
    return torch.cat(kinds, 2), torch.cat(words, 2)
