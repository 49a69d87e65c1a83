"""The constexpr code of csrc, compiled for the host and tried exhaustively on small sizes.

Would catch, without a GPU: a tile range that misses a visible element or visits an empty tile, a
tile called full that is not, backward visiting other tiles than forward, a tile scheduled twice or
never, shared-memory chunks that overlap or conflict in banks, other dropout bits than Python's, and
lists in plan/ that differ from Python's.
"""

from __future__ import annotations

import itertools
import random
from types import ModuleType

import pytest
import torch
from attention_testing import (
    KERNEL_DIMS,
    UNALIGNED_LAYOUTS,
    VARIANTS,
    Problem,
    dense_mask,
    unsupported_reason,
)
from compiled import host_code
from dropout_bits import is_kept
from mask_model import rows_of
from test_attention import few_queries, few_tiles, long_sequences, many_tiles
from test_dropout import SPLIT_KEYS


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return host_code("flash_ext_native")


# --- problem/mask.cuh ---

LENGTHS = ((1, 1), (7, 7), (5, 12), (12, 5), (1, 10), (10, 1), (9, 8), (6, 0))
SIDES = (-1, 0, 1, 2, 5, 30)
TILES = ((2, 4), (4, 2), (3, 3), (16, 8))


def interval(hits: torch.Tensor) -> tuple[int, int] | None:
    """The interval of the true elements, None where there are none; they must be contiguous."""
    positions = hits.nonzero()[:, 0].tolist()
    if not positions:
        return None
    assert positions == list(range(positions[0], positions[-1] + 1))
    return positions[0], positions[-1] + 1


def same(actual: tuple[int, int], expected: tuple[int, int] | None) -> bool:
    """Equal intervals, where all empty ones are equal."""
    return actual[1] <= actual[0] if expected is None else tuple(actual) == expected


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_mask_intervals(seqlen_q: int, seqlen_k: int, native: ModuleType) -> None:
    for window in itertools.product(SIDES, SIDES):
        visible = dense_mask(seqlen_q, seqlen_k, False, window)
        mask = native.BandMask(seqlen_q, seqlen_k, *window)
        for i in range(seqlen_q):
            assert same(mask.key_range(i), interval(visible[i])), (window, i)
        for j in range(seqlen_k):
            assert same(mask.query_range(j), interval(visible[:, j])), (window, j)
        for j in range(seqlen_k, seqlen_k + 3):  # keys past the end: seen by no query
            assert same(mask.query_range(j), None), (window, j)


@pytest.mark.parametrize(("block_q", "block_kv"), TILES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_tile_ranges(
    seqlen_q: int, seqlen_k: int, block_q: int, block_kv: int, native: ModuleType
) -> None:
    """Exactly the tiles with a visible element, and the full ones, the same from both sides."""
    q_tiles, kv_tiles = -(-seqlen_q // block_q), -(-seqlen_k // block_kv)
    for window in itertools.product(SIDES, SIDES):
        visible = dense_mask(seqlen_q, seqlen_k, False, window)
        mask = native.BandMask(seqlen_q, seqlen_k, *window)
        expected, from_q, from_kv = set(), set(), set()
        for i in range(q_tiles):
            queries = native.tile_interval(i, block_q)
            seen = native.kv_tiles(mask, queries, block_kv)
            from_q |= {(i, j) for j in seen}
            full_kv = native.full_kv_tiles(mask, queries, block_kv)
            if seen:
                assert native.last_kv_tile(mask, queries, block_kv) == seen[-1], (window, i)
            for j in range(kv_tiles):
                keys = native.tile_interval(j, block_kv)
                tile = visible[slice(*queries), slice(*keys)]
                if tile.any():
                    expected.add((i, j))
                full = bool(tile.all()) and keys[1] <= seqlen_k
                assert mask.is_full(queries, keys) == full, (window, i, j)
                assert (full_kv[0] <= j < full_kv[1]) == full, (window, i, j)
                full_q = native.full_q_tiles(mask, keys, block_q)
                assert (full_q[0] <= i < full_q[1]) == full, (window, i, j)
        for j in range(kv_tiles):
            keys = native.tile_interval(j, block_kv)
            from_kv |= {(i, j) for i in native.q_tiles(mask, keys, block_q)}
        assert from_q == expected, window
        assert from_kv == expected, window


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_mask_summary(seqlen_q: int, seqlen_k: int, native: ModuleType) -> None:
    """What plans know of a mask holds for every query."""
    for window in itertools.product(SIDES, SIDES):
        visible = dense_mask(seqlen_q, seqlen_k, False, window)
        keys, hides_earlier, hides_later, sees_all, is_triangle = native.mask_summary(
            native.BandMask(seqlen_q, seqlen_k, *window)
        )
        assert int(visible.sum(1).max()) <= keys <= seqlen_k, window
        assert sees_all == bool(visible.all()) or seqlen_k == 0, window
        if seqlen_q == seqlen_k:  # otherwise a guess
            assert hides_earlier or bool(visible[:, 0].all()), window
            assert hides_later or bool(visible[:, -1].all()), window
        if is_triangle:
            assert not visible.triu(1).any(), window
    assert native.mask_summary(native.BandMask(8, 8, -1, 0)) == (8, False, True, False, True)
    assert native.mask_summary(native.BandMask(8, 8, 2, -1)) == (8, True, False, False, False)
    assert native.mask_summary(native.BandMask(8, 8, 2, 1)) == (4, True, True, False, False)
    assert native.mask_summary(native.BandMask(1, 8, 7, 0))[3], "the last query sees all keys"


def test_largest_lengths_do_not_overflow(native: ModuleType) -> None:
    """Unlimited windows on sequences of 2^28."""
    long = 1 << 28
    for seqlen_q, seqlen_k in ((long, long), (1, long), (long, 1)):
        mask = native.BandMask(seqlen_q, seqlen_k, -1, -1)
        for i in (0, seqlen_q - 1):
            assert mask.key_range(i) == (0, seqlen_k)
        for j in (0, seqlen_k - 1):
            assert mask.query_range(j) == (0, seqlen_q)
        assert mask.is_full((0, seqlen_q), (0, seqlen_k))


# --- problem/tile_mask.cuh ---


@pytest.mark.parametrize("block", (32, 64, 128))
def test_listed_tiles(block: int, native: ModuleType) -> None:
    """The tiles of random rows of runs: once each, the partial ones first, without those that begin
    past the sequence."""
    for seed in range(200):
        make = torch.Generator().manual_seed(seed)
        blocks, heads, splits = (int(torch.randint(1, n, (1,), generator=make)) for n in (9, 4, 4))
        kinds = torch.randint(0, 3, (heads, blocks), generator=make)
        length = 128 * blocks - int(torch.randint(0, 128, (1,), generator=make))
        if length % 128:
            kinds[:, -1][kinds[:, -1] == 1] = 2  # a block that the keys do not fill is partial
        per, tiles = 128 // block, -(-length // block)
        listed = [  # full ones first
            [(t, kind == 2) for kind in (1, 2) for t in range(tiles) if row[t // per] == kind]
            for row in kinds.tolist()
        ]
        rows = rows_of(kinds)
        row, shown = rows[0].tolist(), kinds[0].nonzero().flatten().tolist()
        assert [native.block_kind(row, i) for i in range(blocks)] == kinds[0].tolist()
        assert native.blocks_hull(row) == ((shown[0], shown[-1] + 1) if shown else (0, 0))
        shares = native.listed_kv_tiles(rows[0].tolist(), length, block, splits)
        assert len(shares) == splits
        found = [(t, bool(partial)) for share in reversed(shares) for t, partial in share]
        assert found == listed[0][::-1]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        of_q = native.listed_q_tiles(rows.flatten().tolist(), heads, length, block)
        want = [(h, *x) for h, row in enumerate(listed) for x in row]
        assert [(h, t, bool(partial)) for h, t, partial in of_q] == want


# --- schedule/ ---


@pytest.mark.parametrize("tiles", (1, 2, 7))
@pytest.mark.parametrize(("heads", "batch"), ((1, 1), (3, 1), (1, 5), (4, 3)))
def test_every_tile_is_scheduled_once(
    tiles: int, heads: int, batch: int, native: ModuleType
) -> None:
    for l2_group_heads in range(1, heads * batch + 1):
        tile_order = native.TileOrder(tiles, heads, batch, l2_group_heads)
        order = [native.work_tile(linear, tile_order) for linear in range(tiles * heads * batch)]
        assert sorted(order) == sorted(
            itertools.product(range(tiles), range(heads), range(batch))
        ), l2_group_heads
        flat_heads = [b * heads + h for _, h, b in order]
        groups = [head // l2_group_heads for head in flat_heads]
        assert groups == sorted(groups), "one group after the other"
        for group in set(groups):
            found = [t[0] for t, g in zip(order, groups, strict=True) if g == group]
            assert found == sorted(found), "longest first within a group"


@pytest.mark.parametrize("tiles", (1, 2, 7, 200))
@pytest.mark.parametrize(("heads", "batch"), ((1, 1), (3, 1), (4, 3), (150, 1)))
def test_longest_rows_of_a_mask_come_first(
    tiles: int, heads: int, batch: int, native: ModuleType
) -> None:
    for l2_group_heads in {1, 2, heads * batch}:
        tile_order = native.TileOrder(tiles, heads, batch, l2_group_heads)
        first = native.longest_first(tile_order)
        assert 1 <= first <= tiles
        number = tiles * heads * batch
        order = [native.work_tile(linear, tile_order, first) for linear in range(number)]
        assert sorted(order) == sorted(itertools.product(range(tiles), range(heads), range(batch)))
        of_all = [x for x in order if x[0] < first]
        assert order[: len(of_all)] == of_all
        assert [x[0] for x in of_all] == sorted(x[0] for x in of_all)
        usual = [native.work_tile(linear, tile_order) for linear in range(number)]
        assert order[len(of_all) :] == [x for x in usual if x[0] >= first]


def test_order_of_tiles_chosen_on_the_host(native: ModuleType) -> None:
    """The numbers of CTAs and bytes are chosen by measurement; the relations are derived."""
    sizes = (0, 1 << 10, 1 << 22, 1 << 40)
    for tiles, heads, batch, size, ctas in itertools.product(
        (8, 9), (1, 16), (1, 40), sizes, (1, 2)
    ):
        few = tiles == 8  # then memory is the limit, and groups are small
        longest_first = native.make_tile_order(tiles, heads, batch, True, size, ctas).l2_group_heads
        assert 1 <= longest_first <= heads * batch
        fills_the_gpu = (longest_first - 1) * tiles < (128 if few else 256) * ctas
        assert longest_first * size <= (8 if few else 32) << 20 or fills_the_gpu
        equal = -(-heads * batch // longest_first)
        assert -(-heads * batch // equal) == longest_first, "groups of equal size"
        assert longest_first * tiles >= (64 if few else 128) * ctas or equal == 1
        assert native.make_tile_order(tiles, heads, batch, False, size, ctas).l2_group_heads == 1


def test_whole_heads_fill_the_gpu_once(native: ModuleType) -> None:
    """A CTA takes all tiles of a head only if nearly all CTAs do, and K and V stay in L2.

    From 116 of 132 CTAs on and up to 24 MB, by measurement.
    """
    for tiles, heads, batch, size in itertools.product(
        range(10), (0, 8, 58, 66, 132, 133), (1, 2, 3), (0, 1 << 17, 1 << 18, 1 << 40)
    ):
        before = native.TileOrder(tiles, heads, batch, 7)
        after = native.with_whole_heads(before, size)
        ctas = heads * batch
        if after.tiles_at_once == 1:
            assert after.l2_group_heads == before.l2_group_heads
            tall = tiles < 2 or tiles > 3
            assert tall or ctas < 116 or ctas > 132 or ctas * size > 24 << 20
            continue
        assert after.tiles_at_once == tiles and ctas * size <= 24 << 20
        rounds = -(-tiles * ctas // 132)
        assert ctas <= 132 and tiles == rounds, "no more rounds of tiles than otherwise"
        order = [native.work_tile(linear, after) for linear in range(tiles * ctas)]
        for head in range(ctas):
            taken = order[head * tiles : (head + 1) * tiles]
            assert taken == [(i, head % heads, head // heads) for i in range(tiles)]


def test_whole_heads_only_under_a_mask(native: ModuleType) -> None:
    """Of 132 heads of two tiles; sequences of several lengths are left to the dynamic order."""
    for window_right, varlen, expected in ((0, False, 2), (255, False, 2), (256, False, 1),
                                           (1 << 29, False, 1), (0, True, 1)):  # fmt: skip
        assert native.tiles_at_once(256, 132, window_right, varlen) == expected


PACKINGS = (  # lengths of the queries and of the keys of each sequence, and rows after the last
    (((5, 10), (7, 20)), 0, 0),
    (((0, 3), (64, 0), (0, 0), (1, 65)), 3, 70),
    (((63, 64), (64, 63), (65, 129), (128, 1)), 1, 0),
    (((0, 0), (0, 0)), 0, 5),
    ((), 130, 1),
    (tuple((n % 7, n * 5 % 11) for n in range(150)), 9, 100),
)


def packed_batch(native: ModuleType, packing: tuple, heads: int = 3, first: int = 0) -> object:
    """`first`: rows of q before the first sequence; k has one more."""
    lengths, tail_q, tail_k = packing
    cu_q, cu_k = (
        list(itertools.accumulate((pair[i] for pair in lengths), initial=first and first + i))
        for i in (0, 1)
    )
    return native.Batch(len(lengths), heads, cu_q[-1] + tail_q, cu_k[-1] + tail_k, cu_q, cu_k, None)


def test_sequences_of_a_dense_batch(native: ModuleType) -> None:
    dense = native.Batch(3, 4, 10, 20, None, None, None)
    expected = [(b, b, 0, 0, 10, 20, 20) for b in range(3)]
    assert dense.sequences(True) == dense.sequences(False) == expected
    assert dense.statistics(1) == [(b * 4 + 1) * 10 for b in range(3)]
    used = native.Batch(3, 4, 10, 20, None, None, [7, 25, -1]).sequences(True)
    assert [(facts[5], facts[6]) for facts in used] == [(7, 20), (20, 20), (0, 20)]


def test_sequences_of_a_packed_batch(native: ModuleType) -> None:
    """The first and the last are rows of no sequence: they have queries and rows, but no keys."""
    packed = native.Batch(2, 4, 15, 32, [1, 6, 12], [2, 10, 30], [4, 99])
    assert packed.sequences(True) == [
        (0, 0, 0, 0, 1, 0, 2),
        (1, 0, 1, 2, 5, 4, 8),
        (2, 0, 6, 10, 6, 20, 20),
        (3, 0, 12, 30, 3, 0, 2),
    ]
    assert packed.owners()[1:3] == [(0, True), (1, True)]
    assert [owned for _, owned in packed.owners()] == [False, True, True, False]
    assert packed.statistics(1) == [15, 15 + 1, 15 + 6, 15 + 12]


def test_offsets_without_meaning_stay_inside(native: ModuleType) -> None:
    for cu in ([9, 3, 5, -2], [-5, 100, 2, 200], [2**31 - 1, -(2**31), 4, 4]):
        batch = native.Batch(3, 2, 15, 15, cu, cu, None)
        for _, _, q_begin, k_begin, seqlen_q, seqlen_k, rows_k in batch.sequences(True):
            assert 0 <= q_begin <= q_begin + seqlen_q <= 15
            assert 0 <= k_begin <= k_begin + rows_k <= 15 and 0 <= seqlen_k <= rows_k
        assert all(0 <= number <= 4 for number, _ in batch.tiles(False, 4))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("first", (0, 1, 127, 200))
@pytest.mark.parametrize("block", (16, 64, 80, 128))
def test_every_tile_has_one_number(
    packing: tuple, first: int, block: int, native: ModuleType
) -> None:
    """Each tile of each sequence once; the padding tiles lie past their sequence's end."""
    batch = packed_batch(native, packing, first=first)
    for keys in (False, True):
        rows = [facts[6 if keys else 4] for facts in batch.sequences(True)]
        tiles = batch.tiles(keys, block)
        wanted = [(i, t) for i, n in enumerate(rows) for t in range(-(-n // block))]
        assert [(i, t) for i, t in tiles if t * block < rows[i]] == wanted
        assert len(tiles) <= len(wanted) + len(rows)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("first", (0, 130))
def test_workspaces_of_sequences_do_not_overlap(
    packing: tuple, first: int, native: ModuleType
) -> None:
    group, heads = native.workspace_rows, 3
    batch = packed_batch(native, packing, heads, first)
    lengths = [facts[4] for facts in batch.sequences(True)]
    begins = []
    for head in range(heads):
        rows, count = batch.workspace(head)
        ends = [row + -(-n // group) * group for row, n in zip(rows, lengths, strict=True)]
        begins += zip(rows, ends, strict=True)
    assert all(row % group == 0 for row, _ in begins)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(begins))
    assert begins[-1][1] <= count
    # Short sequences cost little: 7 rows each, and each end of the tensor.
    assert count <= heads * (sum(lengths) + (group - 1) * (len(lengths) + 1))
    # Every tile of 32 rows has a CTA.
    tiles = [(h, i, t) for i, t, h in batch.q_tile_indices() if t * 32 < lengths[i]]
    assert tiles == [
        (h, i, t) for h in range(heads) for i, n in enumerate(lengths) for t in range(-(-n // 32))
    ]


# --- schedule/row_tiles.cuh ---


@pytest.mark.parametrize("lengths", [(0,), (9,), (4, 0, 3, 8, 0), (0, 0), (1,) * 9, ()])
@pytest.mark.parametrize("unused", (0, 1, 5))
@pytest.mark.parametrize("block", (1, 4))
def test_row_tiles(lengths: tuple[int, ...], unused: int, block: int, native: ModuleType) -> None:
    """Every row is in one tile, of its own sequence; every sequence has a tile 0."""
    starts = [0, *itertools.accumulate(lengths)]
    total, batch = starts[-1] + unused, len(lengths)
    for seqused in (None, [length // 2 for length in lengths]):
        tiles = native.row_tiles(batch, total, starts, seqused, block)
        rows: dict[int, int] = {}
        for sequence, tile, begin, count, used in tiles:
            rows |= {begin + i: sequence for i in range(count)}
            if sequence < 0:
                assert used == 0
                continue
            assert begin == starts[sequence] + tile * block or count == 0
            all_used = lengths[sequence] if seqused is None else seqused[sequence]
            assert used == min(max(all_used - tile * block, 0), block)
        assert sum(count for *_, count, _ in tiles) == total
        owners = [b for b, length in enumerate(lengths) for _ in range(length)]
        assert [rows[i] for i in range(total)] == owners + [-1] * unused
        assert {x[0] for x in tiles if x[1] == 0} >= set(range(batch))


def test_row_tiles_of_a_dense_batch(native: ModuleType) -> None:
    for rows in (0, 1, 4, 9):
        tiles = native.row_tiles(3, rows, None, [0, rows, rows // 2], 4)
        per_element = max(-(-rows // 4), 1)
        assert [x[0] for x in tiles] == [b for b in range(3) for _ in range(per_element)]
        for b, used in enumerate((0, rows, rows // 2)):
            part = tiles[b * per_element : (b + 1) * per_element]
            assert sum(x[3] for x in part) == rows and sum(x[4] for x in part) == used
            assert [x[1] for x in part] == list(range(per_element))


def test_row_tiles_stay_in_the_tensor(native: ModuleType) -> None:
    """Whatever cu_seqlens contains."""
    source = random.Random(0)
    for _ in range(300):
        batch, total = source.randrange(1, 5), source.randrange(12)
        wild = [source.randrange(-9, 20) for _ in range(batch + 1)]
        for _, _, begin, count, used in native.row_tiles(batch, total, wild, None, 4):
            assert 0 <= used <= count <= 4
            assert count == 0 or 0 <= begin <= begin + count <= total


@pytest.mark.parametrize("batch", (0, 1, 3))
@pytest.mark.parametrize("rows", (0, 4, 17))
def test_row_tiles_of_heads(batch: int, rows: int, native: ModuleType) -> None:
    """In the order of memory."""
    for heads in (1, 5):
        tiles = max(-(-rows // 4), 1)
        order = list(itertools.product(range(max(batch, 1)), range(tiles), range(heads)))
        assert [tuple(x) for x in native.row_tiles_of_heads(batch, rows, heads, 4)] == order


# --- schedule/dbias_tiles.cuh ---

WALKS = (
    (3, 4, 10, 20, None, None, None),
    (2, 3, 10, 20, None, None, (20, 5)),
    (3, 2, 24, 60, (0, 9, 9, 22), (0, 30, 37, 58), None),
)
"""Batches: sequences, heads, rows of q and k, and the lengths of varlen ones."""


@pytest.mark.parametrize("ctas", (1, 2, 3, 7, 8))
@pytest.mark.parametrize("walk", WALKS)
def test_tiles_of_a_bias_gradient(walk: tuple, ctas: int, native: ModuleType) -> None:
    """Each visible tile of scores counts once in its tile of dbias, and shares of it are alike."""
    batch = native.Batch(*walk)
    count, heads = walk[:2]
    sequences = batch.sequences(True)[slice(1, -1) if walk[4] else slice(None)]
    block_q, block_kv = 4, 8
    for whole, window in itertools.product(
        itertools.product((True, False), repeat=4), ((-1, -1), (-1, 0), (3, 2))
    ):
        lengths = (count, heads, max(s[4] for s in sequences), max(s[5] for s in sequences))
        sizes = [n if w else 1 for n, w in zip(lengths, whole, strict=True)]
        seen = []
        for number in range(batch.dbias_tiles(sizes)):
            shares = []
            for cta in range(ctas):
                tiles, own = batch.dbias_share(sizes, window, number, cta, ctas)
                shares.append(len(tiles))
                for sequence, head, query, key in tiles:
                    index = sequence - bool(walk[4])
                    of_bias = (index, head, query // block_q, key // block_kv)
                    assert own == [x if w else 0 for x, w in zip(of_bias, whole, strict=True)]
                    seen.append((index, head, query, key))
            if window == (-1, -1) and walk[4] is None and walk[6] is None:
                assert max(shares) - min(shares) <= 1
        expected = []
        for index, (*_, seqlen_q, seqlen_k, _) in enumerate(sequences):
            visible = dense_mask(seqlen_q, seqlen_k, False, window)
            for query, key in itertools.product(
                range(0, seqlen_q, block_q), range(0, seqlen_k, block_kv)
            ):
                rows = visible[query : query + block_q]
                keys = native.BandMask(seqlen_q, seqlen_k, *window).keys_of(
                    (query, query + block_q)
                )
                if keys[0] < key + block_kv and key < keys[1]:
                    expected += [(index, head, query, key) for head in range(heads)]
                else:
                    assert not rows[:, key : key + block_kv].any()
        assert sorted(seen) == sorted(expected), (sizes, window)


# --- tile/host_device.h ---


def test_quotients_by_a_product(native: ModuleType) -> None:
    largest, draw = 2**31 - 1, random.Random(0)
    divisors = [*range(1, 300), 1000, 1 << 20, (1 << 30) + 1, largest - 1, largest]
    for divisor in divisors + [draw.randint(1, largest) for _ in range(300)]:
        multiples = [divisor * draw.randint(0, largest // divisor) for _ in range(8)]
        last = largest // divisor * divisor
        for n in {0, divisor, last, last - 1, largest} | {
            x + y for x in multiples for y in (-1, 0)
        }:
            if 0 <= n <= largest:
                assert native.quotient(n, divisor) == n // divisor, (n, divisor)


# --- tile/swizzle.cuh ---

CHUNK, BANKS = 16, 128  # bytes: what one lane moves at once, and what all banks hold


@pytest.mark.parametrize("rows", (16, 64))
@pytest.mark.parametrize("cols", (32, 64, 96, 128, 192, 256))
def test_swizzle_is_a_bijection(rows: int, cols: int, native: ModuleType) -> None:
    _, size, offsets = native.layout(rows, cols)
    assert size == rows * cols * 2
    assert sorted(itertools.chain.from_iterable(offsets)) == list(range(0, size, CHUNK))


@pytest.mark.parametrize("cols", (32, 64, 80, 96, 128, 192, 256))
def test_no_bank_conflicts(cols: int, native: ModuleType) -> None:
    """The eight 16-byte accesses of one phase fall into different banks."""
    atom_cols, _, offsets = native.layout(64, cols)
    chunks = cols // 8

    def conflict_free(accesses: list[int]) -> bool:
        return len({offset % BANKS for offset in accesses}) == len(accesses) == 8

    for first_row in range(0, 64, 8):  # ldmatrix: eight rows at one column
        for chunk in range(chunks):
            assert conflict_free([offsets[first_row + r][chunk] for r in range(8)])
    atom_chunks = atom_cols // 8
    rows_per_phase = 8 // atom_chunks
    for first_row in range(0, 64, rows_per_phase):  # copies: adjacent chunks of an atom
        for first in range(0, chunks, atom_chunks):
            cells = itertools.product(range(rows_per_phase), range(atom_chunks))
            assert conflict_free([offsets[first_row + r][first + c] for r, c in cells])


@pytest.mark.parametrize("cols, atom_cols", ((64, 64), (32, 32), (96, 32), (80, 16)))
def test_swizzles_are_those_of_the_hardware(cols: int, atom_cols: int, native: ModuleType) -> None:
    """Of 128, 64, 32 bytes: bits 4 to 6 (5, 4) of the address are XORed with bits 7 to 9 (8, 7)."""
    atom, _, offsets = native.layout(64, cols)
    assert atom == atom_cols
    chunks = atom_cols // 8
    for row, chunk in itertools.product(range(64), range(chunks)):
        linear = row * atom_cols * 2 + chunk * CHUNK
        assert offsets[row][chunk] == linear ^ ((linear >> 7 & chunks - 1) << 4)


# --- problem/dropout.cuh ---


def test_dropout_bits_are_pythons(native: ModuleType) -> None:
    draw = random.Random(1)
    for _ in range(3000):
        seed, offset = (draw.randrange(-(2**63), 2**63) for _ in range(2))
        p = draw.choice((0.1, 0.5, 0.99))
        head, row, col = draw.randrange(10**6), draw.randrange(70_000), draw.randrange(70_000)
        threshold = round(p * 2**15) * 0x10001
        expected = is_kept(seed, offset, p, head, row, col)
        assert native.is_kept(seed, offset, head, threshold, row, col) == expected


# --- The variants of plan/call.h, the head dims of plan/tuning.h ---


def test_variants_are_pythons(native: ModuleType) -> None:
    assert tuple(native.variants) == VARIANTS


def test_head_dims_are_those_of_the_tests(native: ModuleType) -> None:
    assert tuple(native.head_dims) == KERNEL_DIMS


def test_every_pair_of_head_dims_has_a_kernel(native: ModuleType) -> None:
    """The first pair that holds it: none that is smaller in both does."""
    pairs = native.head_dims
    assert pairs == sorted(pairs) and pairs[-1] == (256, 256) and native.max_head_dim == 256
    for head_dim, head_dim_v in itertools.product(range(1, 257, 5), repeat=2):
        holding = [(d, dv) for d, dv in pairs if d >= head_dim and dv >= head_dim_v]
        assert native.padded_head_dims(head_dim, head_dim_v) == holding[0]
    assert native.padded_head_dims(257, 1) is native.padded_head_dims(1, 257) is None


SMS = 132  # of an H200


def query_tiles(p: Problem) -> int:
    """fa2's tiles of queries, and fa3's smallest; packed ones may be a few more."""
    return p.batch * p.heads_q * -(-p.seqlen_q // 128)


def is_general(p: Problem) -> bool:
    """Does it take the kernels of fa2 and fa3 that have options of the scores?"""
    options = p.softcap or p.alibi or p.bias or p.dropout_p
    dims = (p.head_dim, p.head_dim_v or p.head_dim)
    return bool(options) or p.layout in UNALIGNED_LAYOUTS or any(d % 8 for d in dims)


def padded_dims(native: ModuleType, p: Problem) -> tuple[int, int]:
    return native.padded_head_dims(p.head_dim, p.head_dim_v or p.head_dim)


def splits_of(native: ModuleType, variant: str, p: Problem) -> int:
    """How many splits the keys of a dense problem have, as plan_splits() has it."""
    at_once = SMS
    if variant == "fa2":
        at_once *= native.fa2_ctas_per_sm(*padded_dims(native, p), is_general(p))
    window = (-1, 0) if p.causal else p.window
    return native.num_splits(query_tiles(p), p.seqlen_q, p.seqlen_k, *window, at_once)


def fa3_tile(native: ModuleType, p: Problem) -> tuple[int, int]:
    """Rows and keys of fa3's forward tiles, without options and splits."""
    dims = (p.head_dim, p.head_dim_v or p.head_dim)
    window = (-1, 0) if p.causal else p.window
    varlen = p.layout == "packed" or p.seqused_k is not None
    return native.fa3_tile(
        dims, p.batch * p.heads_q, p.seqlen_q, p.seqlen_k, window, varlen or p.lengths_q is not None
    )


def test_gpu_problems_reach_the_tiles_for_long_sequences(native: ModuleType) -> None:
    for d, tile in ((32, (256, 80)), (64, (192, 96))):
        reaching = [
            p for p in long_sequences("cuda")
            if p.head_dim == d and fa3_tile(native, p) == tile and query_tiles(p) > SMS
        ]  # fmt: skip
        assert {p.layout for p in reaching} >= {"bshd", "packed"}
        assert {p.causal for p in reaching} == {False, True}
    many = [p for p in long_sequences("cuda") if p.seqlen_q >= native.many_queries]
    assert {(p.layout, p.loss) for p in many if p.head_dim == 128} >= {
        ("bshd", "both"), ("packed", "both"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "tiles, queries, keys, window, splits",
    [
        (8, 4, 131072, (-1, -1), 16),  # one wave of 132
        (8, 4, 8192, (-1, -1), 16),
        (8, 4, 4096, (-1, -1), 8),  # of no fewer than 512 keys
        (8, 4, 511, (-1, -1), 1),
        (8, 4, 131072, (4095, 0), 8),  # nothing is cut that no query sees
        (64, 128, 2048, (-1, -1), 2),  # of no fewer than 1,024 where queries are many
        (64, 128, 2047, (-1, -1), 1),
        (128, 1, 131072, (-1, -1), 1),  # the tiles fill the GPU
        (132, 1, 131072, (-1, -1), 1),
        (100, 1, 131072, (-1, -1), 1),  # no number of splits within two waves fills it better
        (100, 1, 131072, (-1, 0), 1),
        (128, 8192, 8192, (-1, 0), 2),  # a causal head's last tile takes twice the mean
        (128, 2048, 2048, (-1, 0), 1),  # two splits an SM: of no fewer than 2,048
        (64, 2048, 2048, (-1, 0), 2),
        (160, 8192, 8192, (-1, 0), 2),
        (200, 8192, 8192, (-1, 0), 1),
        (264, 8192, 8192, (-1, 0), 1),
        (128, 8192, 8192, (2047, 0), 1),  # in a window all take the same
        (0, 0, 8192, (-1, -1), 1),
        (8, 4, 0, (-1, 0), 1),
    ],
)
def test_keys_are_split_to_fill_the_gpu(
    native: ModuleType, tiles: int, queries: int, keys: int, window: tuple[int, int], splits: int
) -> None:
    assert native.num_splits(tiles, queries, keys, *window, SMS) == splits


@pytest.mark.parametrize(
    "tiles, queries, keys, window, splits",
    [
        (8, 4, 131072, (-1, -1), 32),  # one wave of 264
        (8, 4, 8192, (-1, -1), 16),  # of no fewer than 512 keys
        (132, 1, 131072, (-1, -1), 2),  # a tile for each SM leaves room for as many
        (264, 1, 131072, (-1, -1), 1),
        (64, 128, 2048, (-1, -1), 2),
        (200, 128, 2048, (-1, -1), 1),
        (264, 8192, 8192, (-1, 0), 2),
        (400, 8192, 8192, (-1, 0), 1),
    ],
)
def test_splits_where_an_sm_has_two_ctas(
    native: ModuleType, tiles: int, queries: int, keys: int, window: tuple[int, int], splits: int
) -> None:
    """fa2's case up to head dim 128."""
    assert native.fa2_ctas_per_sm(128, 128, False) == native.fa2_ctas_per_sm(64, 64, True) == 2
    assert native.num_splits(tiles, queries, keys, *window, 2 * SMS) == splits


def test_splits_make_up_the_whole(native: ModuleType) -> None:
    """Side by side, of lengths that differ by one at most; some are empty where keys are few."""
    for begin, length, splits in itertools.product((0, 3), range(12), range(1, 8)):
        found = [native.split_of((begin, begin + length), split, splits) for split in range(splits)]
        assert [tile for tiles in found for tile in tiles] == list(range(begin, begin + length))
        lengths = [len(tiles) for tiles in found]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("variant", ["fa2", "fa3"])
def test_gpu_problems_are_split(native: ModuleType, variant: str) -> None:
    """With every option that the variant's kernels for splits take."""
    reached = set()
    for p in few_tiles("cuda"):
        if p.lengths_q is not None or unsupported_reason(variant, p, "cuda"):
            continue
        if variant == "fa3" and p.seqlen_q * p.heads_q // p.heads_k <= 64:
            continue  # of the kernel for few queries, see test_plan.py
        assert splits_of(native, variant, p) > 1, p
        default = Problem()
        reached |= {
            (name, padded_dims(native, p))
            for name in vars(p)
            if getattr(p, name) != getattr(default, name)
        }
    options = {"causal", "window", "seqused_k", "sink", "softcap", "alibi"}
    if variant == "fa2":
        options |= {"bias", "dropout_p"}
    assert reached >= set(itertools.product(options, KERNEL_DIMS))


@pytest.mark.parametrize(
    "heads_q, heads_k, queries, pack_gqa_log2, tiles",
    [
        (8, 1, 1, 3, 1),
        (8, 1, 16, 3, 1),  # a tile's 128 rows
        (8, 1, 17, 3, 2),
        (8, 1, 64, 3, 4),
        (8, 1, 65, 0, 8),  # more than half of those of 128 queries
        (8, 1, 4096, 0, 8 * 32),
        (32, 8, 4, 3, 8),  # four of eight rows of a query are in use
        (32, 8, 32, 3, 16),
        (32, 8, 33, 0, 32),
        (9, 1, 8, 4, 1),
        (71, 1, 2, 7, 2),
        (128, 1, 1, 7, 1),
        (129, 1, 1, 0, 129),
        (4, 4, 1, 0, 4),
    ],
)
def test_gqa_is_packed_where_that_halves_the_tiles(
    native: ModuleType, heads_q: int, heads_k: int, queries: int, pack_gqa_log2: int, tiles: int
) -> None:
    for batch in (1, 3):
        found = native.query_tiles(batch, heads_q, heads_k, queries, 4096, False, -1)
        assert found == (pack_gqa_log2, batch * tiles)


@pytest.mark.parametrize(
    "batch, heads_k, queries, keys, varlen, window, pack_gqa_log2",
    [
        (1, 8, 32, 128, False, -1, 3),  # two tiles of four less: 128 KB of K and V a key head
        (1, 8, 32, 127, False, -1, 0),  # less than 128 rows of results, written and read
        (1, 8, 32, 4096, False, 127, 3),
        (1, 8, 32, 4096, False, 126, 0),
        (1, 4, 1, 4, False, -1, 3),
        (64, 8, 64, 64 * 4096, True, -1, 3),  # decoding
        (64, 4, 64 * 50, 64 * 50, True, -1, 0),  # short sequences
        (1, 8, 4096, 4096, True, -1, 0),
    ],
)
def test_packed_gqa_saves_more_than_it_costs(
    native: ModuleType,
    batch: int,
    heads_k: int,
    queries: int,
    keys: int,
    varlen: bool,
    window: int,
    pack_gqa_log2: int,
) -> None:
    assert native.query_tiles(batch, 32, heads_k, queries, keys, varlen, window)[0] == pack_gqa_log2


def test_gpu_problems_have_packed_gqa(native: ModuleType) -> None:
    """In every head dim, and with every option that does not differ between heads."""
    reached = set()
    for p in few_queries("cuda"):
        if p.lengths_q is None and p.heads_q // p.heads_k <= 128:
            sizes = (p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k)
            assert native.query_tiles(*sizes, False, sum(p.window) if p.window[0] > 0 else -1)[0], p
            default = Problem()
            reached |= {name for name in vars(p) if getattr(p, name) != getattr(default, name)}
            reached.add(padded_dims(native, p))
    assert reached >= {"causal", "window", "sink", "softcap", "seqused_k", "layout", *KERNEL_DIMS}


def test_extraction_of_dropouts_mask_splits_the_keys(native: ModuleType) -> None:
    """The problem that shows each element's bit, of tests/test_dropout.py."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = SPLIT_KEYS
    p = Problem(batch, seqlen_q, seqlen_k, heads_q, heads_k, dropout_p=0.4)
    assert splits_of(native, "fa2", p) > 1


def test_gpu_problems_reach_the_large_tiles(native: ModuleType) -> None:
    """Rows of 128 suffice for none of them."""
    reached = set()
    for p in many_tiles("cuda"):
        assert query_tiles(p) > SMS
        assert splits_of(native, "fa3", p) == 1
        rows, _ = fa3_tile(native, p)
        assert rows > 128, p
        reached |= {(padded_dims(native, p)[0], p.layout), (p.head_dim, rows)}
    assert reached >= {(96, "packed"), (96, "odd_row"), (24, 256), (64, 256), (80, 192)}


@pytest.mark.parametrize(
    "head_dim, heads, queries, keys, window, tile",
    [
        # by the rows alone
        (64, 512, 128, 1000, (-1, 0), (128, 128)),
        (64, 512, 129, 1000, (-1, 0), (192, 96)),
        (64, 512, 250, 1000, (-1, 0), (256, 64)),
        (64, 512, 640, 1000, (-1, 0), (128, 128)),  # 768 in tiles of 256
        (64, 512, 8191, 1000, (-1, 0), (256, 64)),
        # as measured
        (64, 64, 16384, 16384, (127, 0), (128, 128)),  # narrow windows
        (64, 64, 16384, 16384, (1023, 0), (256, 64)),
        (96, 32, 16384, 16384, (127, 0), (128, 128)),
        (96, 32, 16384, 16384, (1023, 0), (192, 64)),
        (64, 160, 1500, 1500, (-1, -1), (192, 96)),  # 10 waves of 192 rows, 8 of 256
        (64, 384, 512, 512, (-1, -1), (256, 64)),
        (64, 40, 4096, 4096, (-1, -1), (256, 64)),
        (64, 32, 16384, 16384, (-1, -1), (192, 96)),
        (64, 32, 8192, 8192, (-1, 0), (256, 64)),
        (80, 256, 1025, 1025, (-1, -1), (192, 64)),
        (96, 384, 512, 512, (-1, -1), (128, 128)),  # 576 in tiles of 192
        (32, 1024, 256, 256, (-1, -1), (256, 64)),
        (32, 1536, 384, 384, (-1, -1), (128, 128)),
        (32, 32, 16384, 16384, (-1, 0), (256, 80)),
        (32, 192, 1024, 1024, (-1, 0), (256, 64)),
        (64, 2, 8000, 8000, (-1, -1), (128, 128)),  # one wave of the smallest
        (128, 160, 1500, 1500, (-1, -1), (128, 128)),
        # on an H100, where the costs before lost 1 to 4 %
        (64, 256, 1408, 1408, (-1, -1), (256, 64)),
        (64, 96, 1408, 1408, (-1, -1), (128, 128)),
        (32, 256, 1024, 1024, (-1, -1), (256, 64)),
        (32, 256, 960, 960, (-1, -1), (256, 80)),
        (96, 256, 1408, 1408, (-1, -1), (192, 64)),
    ],
)
def test_fa3_takes_the_tiles_that_measured_best(
    head_dim: int,
    heads: int,
    queries: int,
    keys: int,
    window: tuple[int, int],
    tile: tuple[int, int],
    native: ModuleType,
) -> None:
    """On an H200 where nothing else is said, docs/notes/009-fa3-forward.md."""
    found = native.fa3_tile((head_dim, head_dim), heads, queries, keys, window, False)
    assert found == tile


# --- Caches ---


@pytest.mark.parametrize("block_kv", (64, 96, 128))
@pytest.mark.parametrize("ctas", (1, 2, 5))
def test_fixed_splits(ctas: int, block_kv: int, native: ModuleType) -> None:
    """All CTAs together have each split that has keys once, each CTA from the last one down."""
    tiles = 2048 // block_kv
    for begin, end in ((0, 0), (0, 1), (0, tiles), (3, tiles + 1), (tiles, 5 * tiles), (90, 401)):
        found = [native.fixed_splits(begin, end, block_kv, i, ctas) for i in range(ctas)]
        assert all(x == sorted(x, reverse=True) for x in found)
        assert all(i % ctas == cta for cta, x in enumerate(found) for i in x)
        wanted = {i // tiles for i in range(begin, end)} or {0}
        assert sorted(i for x in found for i in x) == sorted(wanted)
