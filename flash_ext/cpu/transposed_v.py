"""V^T of 8 bits, as FlashAttention-3's FP8 kernels read it: the keys of a channel side by side.

It is (B, Hk, Dv, keys), or (Hk, Dv, keys) of packed sequences. 16 keys are a group, in the order
in which the tensor cores' operand P has them: byte 4t + 2b + c is key 8b + 2t + c. The last group
of a sequence is filled up with zeros. Packed sequence b begins with the group
(cu_seqlens[b] + 15 (b + 1)) // 16, so that the place depends on what comes before it alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.quantize import KEY_GROUP, batch_of, transposed_shape


def key_rows(
    rows: int, keys: int, cu_seqlens: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor:
    """The row of v (of `rows` ones) for each of the `keys` columns of V^T; -1 for zeros."""
    edges = [0, rows] if cu_seqlens is None else cu_seqlens.tolist()
    order = torch.arange(KEY_GROUP, device=device).view(2, 4, 2).transpose(0, 1).flatten()
    found = torch.full((keys,), -1, device=device)
    for seq_idx, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        before = 0 if cu_seqlens is None else (KEY_GROUP - 1) * (seq_idx + 1)
        first = (begin + before) // KEY_GROUP * KEY_GROUP
        groups = torch.arange(begin, end, KEY_GROUP, device=device)
        of_groups = (groups[:, None] + order).flatten()
        found[first : first + len(of_groups)] = of_groups.where(of_groups < end, -1)
    return found


def from_rows(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """V^T of v (B, S, H, D), or packed (total, H, D)."""
    length, heads, dim = v.shape[-3:]
    packed = cu_seqlens is not None
    shape = transposed_shape(length, heads, dim, batch_of(v, cu_seqlens), packed)
    rows = key_rows(length, shape[-1], cu_seqlens, v.device)
    transposed = torch.zeros(shape, dtype=torch.uint8, device=v.device)
    of_rows = v.view(torch.uint8).movedim(-3, -1)
    transposed[..., rows >= 0] = of_rows[..., rows[rows >= 0]]
    return transposed.view(v.dtype)


def to_rows(transposed: Tensor, rows: int, cu_seqlens: Tensor | None) -> Tensor:
    """v (B, rows, H, D), or packed (rows, H, D), with zeros in rows of no sequence."""
    of_keys = key_rows(rows, transposed.shape[-1], cu_seqlens, transposed.device)
    *batch, heads, dim, _ = transposed.shape
    v = torch.zeros((*batch, heads, dim, rows), dtype=torch.uint8, device=transposed.device)
    v[..., of_keys[of_keys >= 0]] = transposed.view(torch.uint8)[..., of_keys >= 0]
    return v.movedim(-1, -3).contiguous().view(transposed.dtype)
