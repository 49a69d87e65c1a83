"""The dropout mask: a pure function of (seed, offset, batch, head, row, column).

Every variant on every device drops the same elements. A word of 32 random bits serves rows {i, i +
8} and columns {j, j + 8} of a 16 × 16 tile, which one thread holds in the accumulators of two
tensor-core instructions. Their numbers are the upper 15 bits of the word rotated by 1, 9, 17 and 25
bits. So the chance of each is a multiple of 2⁻¹⁵, and two of a word correlate by less than 1/128.

A word is a hash of its place with a key of its seed, offset and head. The hash is of the kind that
C. Wellons' hash-prospector finds; its words pass the batteries SmallCrush and Crush of TestU01
(L'Ecuyer and Simard, ACM TOMS 33, 2007; docs/notes/039-dropout.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
_COLUMN_STEP = 0x9E3779B1
_ROW_STEP = _COLUMN_STEP * 0x9E3779B9 & _LOW32
_SEED_STEP, _OFFSET_STEP, _HEAD_STEP = (
    step - 2**64 for step in (0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
)


def _drop_threshold(dropout_p: float) -> int:
    """Entries whose number of 15 bits is below this are dropped: not all."""
    return min(round(dropout_p * 2**15), 2**15 - 1)


def keep_scale(dropout_p: float) -> float:
    """The factor of kept entries: one over the exact probability of being kept.

    Examples:
        >>> flash_ext.dropout.keep_scale(0.5)
        2.0
    """
    return 2**15 / (2**15 - _drop_threshold(dropout_p))


def _words(key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The words in these rows and columns of words, which broadcast. int64 holds 32 bits, and wraps
    around in a product, whose lowest bits are right all the same."""
    low, high = key & _LOW32, key >> 32 & _LOW32
    x = low + rows * _ROW_STEP + columns * _COLUMN_STEP & _LOW32
    x ^= x >> 16
    x = x * 0x7FEB352D + high & _LOW32
    x ^= x >> 15
    x = x * 0x846CA68B + low & _LOW32
    return x ^ x >> 16


def keep_tile(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    first_batch: int = 0,
) -> Tensor:
    """The part of `keep_mask` for the given half-open ranges of rows and columns.

    Examples:
        >>> rng_state = torch.tensor([1, 0])
        >>> whole = flash_ext.dropout.keep_mask(rng_state, 0.1, 2, 4, 64, 64)
        >>> tile = flash_ext.dropout.keep_tile(rng_state, 0.1, 2, 4, (16, 32), (8, 64))
        >>> torch.equal(tile, whole[:, :, 16:32, 8:64])
        True
    """
    device = rng_state.device
    (i0, i1), (j0, j1) = rows, columns
    # Whole 16 × 16 tiles first; the rest outside the ranges is cut off at the end.
    tile_i0, tile_j0 = i0 // 16, j0 // 16
    tiles_i, tiles_j = -(-i1 // 16) - tile_i0, -(-j1 // 16) - tile_j0

    head = torch.arange(batch * heads, device=device).view(-1, 1, 1) + first_batch * heads
    key = rng_state[0] * _SEED_STEP + rng_state[1] * _OFFSET_STEP + head * _HEAD_STEP
    row = torch.arange(tile_i0 * 8, (tile_i0 + tiles_i) * 8, device=device).unsqueeze(1)
    column = torch.arange(tile_j0 * 8, (tile_j0 + tiles_j) * 8, device=device)

    # Rotation r belongs to row half r / 2 and column half r % 2 of the 16.
    left = torch.arange(1, 32, 8, device=device)
    numbers = _words(key, row, column).unsqueeze(-1)
    numbers = (numbers << left & _LOW32) | numbers >> (32 - left)
    keep = (numbers >> 17 >= _drop_threshold(dropout_p)).view(
        batch, heads, tiles_i, 8, tiles_j, 8, 2, 2
    )
    # → (batch, heads, i / 16, i / 8 % 2, i % 8, j / 16, j / 8 % 2, j % 8)
    keep = keep.permute(0, 1, 2, 6, 3, 4, 7, 5)
    keep = keep.reshape(batch, heads, tiles_i * 16, tiles_j * 16)
    i, j = i0 - tile_i0 * 16, j0 - tile_j0 * 16
    return keep[:, :, i : i + i1 - i0, j : j + j1 - j0]


def keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_batch: int = 0,
) -> Tensor:
    """Which entries of P dropout keeps.

    Args:
        rng_state: int64, shape (2,): seed and offset.
        dropout_p: the probability of dropping, 0 <= dropout_p < 1; rounded to a multiple of 2⁻¹⁵.
        batch, heads: B and Hq, the number of query heads.
        seqlen_q, seqlen_k: Sq and Sk.
        first_batch: the index of the first batch element. Packed sequences count as batch elements.

    Returns:
        bool, shape (B, Hq, Sq, Sk), on rng_state's device; true where the entry is kept, and is
        then multiplied by `keep_scale(dropout_p)`.

    Examples:
        >>> rng_state = torch.tensor([1, 0])  # as in attention(..., rng_state=rng_state)
        >>> keep = flash_ext.dropout.keep_mask(rng_state, 0.1, 2, 4, 64, 64)
        >>> keep.shape, 0.85 < keep.float().mean() < 0.95
        (torch.Size([2, 4, 64, 64]), tensor(True))
    """
    rows, columns = (0, seqlen_q), (0, seqlen_k)
    return keep_tile(rng_state, dropout_p, batch, heads, rows, columns, first_batch)
