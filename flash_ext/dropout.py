"""The dropout mask: a pure function of (seed, offset, batch, head, row, column).

Every variant on every device drops the same elements. Random bits come from Philox4x32-7 (Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; no fewer rounds pass their tests). A
call gives four words for rows {i, i + 8} and columns {j, j + 1} and those 8, 16 and 24 further in a
16 × 32 tile. That is what one thread holds in the accumulators of four tensor-core instructions. A
word serves rows {i, i + 8} and columns {j, j + 8}: their numbers are the upper 15 bits of the word
rotated by 1, 9, 17 and 25 bits. So the chance of each is a multiple of 2⁻¹⁵, and two of a word
correlate by less than 1/128.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


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


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product. int64 wraps around, which keeps all its bits."""
    product = a * b
    return (product >> 32) & _LOW32, product & _LOW32


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-7 on 32-bit numbers held in int64 tensors, which broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


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
    # Whole 16 × 32 tiles first; the rest outside the ranges is cut off at the end.
    tile_i0, tile_j0 = i0 // 16, j0 // 32
    tiles_i, tiles_j = -(-i1 // 16) - tile_i0, -(-j1 // 32) - tile_j0

    seed, offset = rng_state[0], rng_state[1]
    key = (seed & _LOW32, ((seed >> 32) ^ (offset >> 32)) & _LOW32)
    c0 = torch.arange(tile_j0 * 4, (tile_j0 + tiles_j) * 4, device=device)
    c1 = torch.arange(tile_i0 * 8, (tile_i0 + tiles_i) * 8, device=device).unsqueeze(1)
    c2 = torch.arange(batch * heads, device=device).view(-1, 1, 1) + first_batch * heads
    words = torch.stack(torch.broadcast_tensors(*_philox((c0, c1, c2, offset & _LOW32), key)), -1)

    # Word n belongs to column half n / 2 of the 32 and column parity n % 2, and its rotation r to
    # row half r / 2 and column half r % 2 of the 16.
    left = torch.arange(1, 32, 8, device=device)
    numbers = words.unsqueeze(-1)
    numbers = (numbers << left & _LOW32) | numbers >> (32 - left)
    keep = (numbers >> 17 >= _drop_threshold(dropout_p)).view(
        batch, heads, tiles_i, 8, tiles_j, 4, 2, 2, 2, 2
    )
    # → (batch, heads, i / 16, i / 8 % 2, i % 8, j / 32, j / 16 % 2, j / 8 % 2, j % 8 / 2, j % 2)
    keep = keep.permute(0, 1, 2, 8, 3, 4, 6, 9, 5, 7)
    keep = keep.reshape(batch, heads, tiles_i * 16, tiles_j * 32)
    row, column = i0 - tile_i0 * 16, j0 - tile_j0 * 32
    return keep[:, :, row : row + i1 - i0, column : column + j1 - j0]


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
