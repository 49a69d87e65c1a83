"""The format of masks on the device, in plain loops: see flash_ext/cpu/tile_mask.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK, HIDDEN, FULL, PARTIAL = 128, 0, 1, 2
POISON = 0x7FEDCBA9
"""In entries that nothing reads."""

_PLACES = {8 * (b // 2) + 2 * w + b % 2: (w, b) for w in range(4) for b in range(32)}


def blocks_of(length: int) -> int:
    return -(-length // BLOCK)


def runs_of(kinds: Sequence[int], capacity: int, order: int = 0) -> list[int]:
    """The row of these blocks' kinds, with poison after its runs."""
    runs = []
    for kind in (FULL, PARTIAL):
        position = 0
        for found, blocks in itertools.groupby(kinds):
            count = len(list(blocks))
            if found == kind:
                runs.append(position | count << 16)
            position += count
    row = [list(kinds).count(FULL), list(kinds).count(PARTIAL), len(runs), order, *runs]
    return row + [POISON] * (4 + capacity - len(row))


def kinds_of(row: Sequence[int], blocks: int) -> list[int]:
    """The kind of each block. Fails if the row is not as the format says."""
    full, partial, runs, _, *entries = row
    assert 0 <= runs <= len(entries) and len(row) % 4 == 0 and len(row) >= 8
    listed: dict[int, list[int]] = {FULL: [], PARTIAL: []}
    for run in entries[:runs]:
        kind = FULL if len(listed[FULL]) < full else PARTIAL
        first, count = run & 0xFFFF, run >> 16 & 0xFFFF
        assert count >= 1 and first + count <= blocks
        listed[kind] += range(first, first + count)
    assert (len(listed[FULL]), len(listed[PARTIAL])) == (full, partial), "a run of two kinds"
    kinds = [HIDDEN] * blocks
    for kind, found in listed.items():
        assert found == sorted(set(found)), "blocks in ascending order, each once"
        for block in found:
            assert kinds[block] == HIDDEN
            kinds[block] = kind
    return kinds


def order_of(lengths: Sequence[int]) -> list[int]:
    """The rows of these numbers of blocks, the longest ones first. Numbers count as equal that lie
    between the same two of 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, …, 57,344."""
    edges = [quarter * 2**e / 4 for e in range(16) for quarter in range(4, 8)]

    def place(i: int) -> tuple[int, int]:
        return -sum(lengths[i] >= edge for edge in edges[:-1]), i

    return sorted(range(len(lengths)), key=place)


def _matrices(x: Tensor) -> list[list[list[int]]]:
    return (x[None] if x.dim() == 2 else x.flatten(0, -3)).tolist()  # type: ignore[no-any-return]


def kinds_of_rows(rows: Tensor, blocks: int) -> Tensor:
    """(…, R) → (…, blocks)."""
    for matrix in _matrices(rows):
        assert [row[3] for row in matrix] == order_of([row[0] + row[1] for row in matrix])
    kinds = [kinds_of(row, blocks) for row in rows.flatten(0, -2).tolist()]
    return torch.tensor(kinds, dtype=torch.uint8).view(*rows.shape[:-1], blocks)


def shown_by(words: Tensor, batch: int, head: int, query: int, key: int) -> bool:
    """What the words of a query say, in a partial block."""
    if words.dim() == 4:
        begin_0, end_0, begin_1, end_1 = words[batch, head, query].tolist()
        return begin_0 <= key < end_0 or begin_1 <= key < end_1
    row = words[batch, head, query // BLOCK, key // BLOCK, query % BLOCK].tolist()
    word, bit = place_of(key % BLOCK)
    return bool(row[word] >> bit & 1)


def place_of(key: int) -> tuple[int, int]:
    """The word and the bit of a key of a block."""
    return _PLACES[key]


def decode(kv_tiles: Tensor, words: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The mask, bool (Bm, Hm, Sq, Sk)."""
    batch, heads, blocks_q, _ = kv_tiles.shape
    kinds = kinds_of_rows(kv_tiles, blocks_of(seqlen_k)).tolist()
    mask = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for b, h, i, j in itertools.product(*map(range, (batch, heads, seqlen_q, seqlen_k))):
        kind = kinds[b][h][i // BLOCK][j // BLOCK]
        mask[b, h, i, j] = kind == FULL or (kind == PARTIAL and shown_by(words, b, h, i, j))
    return mask


def bits_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The kinds (Bm, Hm, nQ, nK) and words of a dense mask (Bm, Hm, Sq, Sk), poisoned."""
    seqlen_q, seqlen_k = mask.shape[2:]
    sizes = (*mask.shape[:2], blocks_of(seqlen_q), blocks_of(seqlen_k))
    kinds = torch.zeros(sizes, dtype=torch.uint8)
    words = torch.full((*sizes, BLOCK, 4), POISON, dtype=torch.int64)
    for place in itertools.product(*map(range, sizes)):
        b, h, i, j = place
        part = mask[b, h, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        if not part.any():
            continue
        kinds[place] = FULL if part.all() and part.shape[1] == BLOCK else PARTIAL
        if kinds[place] == PARTIAL:
            words[place] = 0
            for key in range(part.shape[1]):
                word, bit = place_of(key)
                words[place][: part.shape[0], word] |= part[:, key].long() << bit
    return kinds, words.to(torch.int32)


def rows_of(kinds: Tensor, capacity: int | None = None) -> Tensor:
    """(…, blocks) → rows of runs (…, R), int32."""
    blocks = kinds.shape[-1]
    capacity = -(-max(blocks, 4) // 4) * 4 if capacity is None else capacity
    rows = []
    for matrix in _matrices(kinds):
        order = order_of([sum(kind != HIDDEN for kind in row) for row in matrix])
        rows += [runs_of(row, capacity, i) for row, i in zip(matrix, order, strict=True)]
    shape = (*kinds.shape[:-1], 4 + capacity)
    return torch.tensor(rows, dtype=torch.int64).view(shape).to(torch.int32)


def mask_of(mask: Tensor) -> dict[str, Tensor]:
    """A dense mask as options of the ops."""
    kinds, words = bits_of(mask)
    return {
        "mask_kv_tiles": rows_of(kinds),
        "mask_q_tiles": rows_of(kinds.transpose(2, 3)),
        "mask_words": words,
    }
