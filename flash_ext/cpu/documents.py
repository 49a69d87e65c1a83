"""What each query sees of its document: the intervals of `mask_from_documents`, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = 1 << 29
"""Further than any key."""


def _of_ids(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the document of each token of (B, S) begins and ends, and the token's position."""
    batch, rows = ids.shape
    token = torch.arange(rows, device=ids.device).expand(batch, -1)
    new = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    begin = torch.where(new, token, 0).cummax(1).values
    later = F.pad(torch.where(new, token, rows)[:, 1:], (0, 1), value=rows)
    end = later.flip(1).cummin(1).values.flip(1)
    return begin, end.masked_fill(ids < 0, 0), token


def _of_offsets(
    cu_q: Tensor, cu_k: Tensor, first_keys: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of each query (1, Sq) of packed sequences, and how many first keys it sees."""
    query = torch.arange(rows, device=cu_q.device)
    number = torch.searchsorted(cu_q, query, right=True) - 1
    within = (number >= 0) & (number < cu_q.shape[0] - 1)
    number = number.masked_fill(~within, 0)
    following = (number + 1).clamp(max=cu_q.shape[0] - 1)
    begin, end = cu_k[number].long(), cu_k[following].long().masked_fill(~within, 0)
    position = query + end - cu_q[following]
    if first_keys.shape[0] != 1:  # there may be no document
        first_keys = F.pad(first_keys, (0, 1))[number]
    return begin[None], end[None], position[None], first_keys[None]


def intervals_of(
    first_keys: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    *,
    ids: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window_left: int,
    window_right: int,
    first_keys_in_window: bool,
) -> Tensor:
    """int32 (Bm, 1, Sq, 4)."""
    first_keys = first_keys.long()[:, None]
    if ids is not None:
        begin, end, position = _of_ids(ids)
    elif cu_seqlens_q is not None and cu_seqlens_k is not None:
        given = cu_seqlens_q, cu_seqlens_k, first_keys[:, 0]
        begin, end, position, first_keys = _of_offsets(*given, seqlen_q)
    else:
        position = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=first_keys.device)[None]
        position = position.expand(first_keys.shape[0], -1)
        begin, end = torch.zeros_like(position), torch.full_like(position, seqlen_k)
    low = torch.maximum(position - (window_left if window_left >= 0 else _FAR), begin)
    high = torch.minimum(position + (window_right if window_right >= 0 else _FAR) + 1, end)
    first = begin + first_keys.clamp(0, seqlen_k)
    first = torch.minimum(first, high if first_keys_in_window else end)
    edges = (begin, first, torch.maximum(low, first), high)
    return torch.stack(edges, -1).clamp(-_FAR, _FAR).to(torch.int32)[:, None]
