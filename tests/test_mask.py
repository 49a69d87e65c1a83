"""The band mask's intervals against the dense mask, exhaustively on small sizes.

Would catch a tile skipped though a query sees into it, a tile left unmasked at the band's edge, and
an off-by-one where Sq and Sk differ.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_testing import dense_mask

from flash_ext.cpu.mask import band, blocks

LENGTHS = ((1, 1), (4, 7), (7, 4), (6, 6), (1, 9), (9, 1))
SIDES = (-1, 0, 1, 3, 20)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_intervals_cover_exactly(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    for window in itertools.product(SIDES, SIDES[-2:] if causal else SIDES):
        mask = dense_mask(seqlen_q, seqlen_k, causal, window)
        b = band(seqlen_q, seqlen_k, causal, *window)
        for q0, q1 in itertools.combinations(range(seqlen_q + 1), 2):
            keys = mask[q0:q1].any(0).nonzero()[:, 0].tolist()
            k0, k1 = b.key_range(q0, q1)
            if keys:
                assert (k0, k1) == (keys[0], keys[-1] + 1), (window, q0, q1)
            for k0, k1 in itertools.combinations(range(seqlen_k + 1), 2):
                tile = mask[q0:q1, k0:k1]
                assert torch.equal(b.visible(q0, q1, k0, k1, torch.device("cpu")), tile)
                scores = torch.where(tile, 1.0, math.nan)
                b.hide_(scores[None], q0, k0)
                hidden = torch.where(tile, 1.0, -math.inf)
                assert torch.equal(scores, hidden), (window, q0, q1, k0, k1)
        for k0, k1 in itertools.combinations(range(seqlen_k + 1), 2):
            queries = mask[:, k0:k1].any(1).nonzero()[:, 0].tolist()
            q0, q1 = b.query_range(k0, k1)
            if queries:
                assert (q0, q1) == (queries[0], queries[-1] + 1), (window, k0, k1)


def test_diagonals_count_from_the_bottom_right() -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        diagonals = band(seqlen_q, seqlen_k, False, -1, -1).diagonals(
            0, seqlen_q, 0, seqlen_k, torch.device("cpu")
        )
        assert diagonals[-1, -1] == 0
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
            assert diagonals[i, j] == j - (i + seqlen_k - seqlen_q)


def test_blocks_are_aligned_and_cut() -> None:
    assert list(blocks(0, 10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(blocks(3, 10, 4)) == [(3, 4), (4, 8), (8, 10)]
    assert list(blocks(5, 6, 4)) == [(5, 6)]
    assert list(blocks(4, 4, 4)) == []
