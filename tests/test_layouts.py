"""Where device code has the elements of tiles, beside models of the hardware (shared_memory.py).

Would catch, without a GPU: a tensor map with which TMA loads another row, or one past a sequence's
end; a tile that TMA, wgmma, ldmatrix or stmatrix swizzle in another way than SharedTile; a matrix
descriptor with a wrong stride; and a lane that has other elements than the matmul wants.
"""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from compiled import DEVICE_CODE, FAKE_CUDA, NATIVE, python_module
from dropout_bits import is_kept
from mask_model import place_of
from shared_memory import box_addresses, matmul_address

from flash_ext import fp8

TILES = [(2, 64, x) for x in (32, 64, 80, 96, 128, 192, 256)]
TILES += [(2, 80, 64), (2, 80, 128), *((1, 64, x) for x in (64, 128, 192, 256)), (1, 80, 128)]
"""(bytes of an element, rows, columns)"""
LANES = range(32)


@pytest.fixture(scope="session")
def layouts() -> ModuleType:
    flags = [*DEVICE_CODE, "-Wno-invalid-offsetof", "-Wno-unused-variable"]
    names = ("loads", "results", "layouts")
    sources = [*(NATIVE / f"{name}.cpp" for name in names), FAKE_CUDA / "device.cpp"]
    return python_module("flash_ext_layouts", sources, flags)


# --- tile/tensor_map.cuh ---


def signed(pair: int) -> tuple[int, int]:
    """Two coordinates in one number, the first one in the lower half."""
    low, high = ((pair >> shift & 0xFFFFFFFF) for shift in (0, 32))
    return tuple((x ^ 1 << 31) - (1 << 31) for x in (low, high))


def check_map(tensor_map, size: int) -> None:
    """What cuTensorMapEncodeTiled requires."""
    assert len(tensor_map.sizes) == len(tensor_map.box) == 4 and len(tensor_map.strides) == 3
    assert all(0 < x <= 1 << 32 for x in tensor_map.sizes)
    assert all(x % 16 == 0 and 0 < x < 1 << 40 for x in tensor_map.strides)
    assert all(0 < x <= 256 for x in tensor_map.box)
    assert tensor_map.box[0] * size == tensor_map.swizzle


def check_loads(layouts: ModuleType, tile: tuple, in_boxes: bool, source: random.Random) -> None:
    """A tile of a random tensor: each of its bytes comes from the right address, or is a zero."""
    size, rows, cols = tile
    step = 16 // size
    head_dim = cols - step * source.randrange(min(2, cols // step))
    strides = [
        step * source.choice((0, 1, 8, 1 << 20, source.randrange(1 << 27))) for _ in range(3)
    ]
    strides[1] = max(strides[1], step)
    if source.random() < 0.2:
        strides[1] = 0  # of a single row: no load crosses to the next one
    batch, head = source.randrange(5), source.randrange(5)
    count = 1 if strides[1] == 0 else source.choice((1, 7, 64, 1000, 1 << 20))
    begin = 0 if strides[1] == 0 else source.choice((0, 1, source.randrange(1000)))
    first = (begin + count) * strides[1] + batch * strides[0] + head * strides[2]
    if size * (first + step) >= 1 << 35:
        return  # Operand::is_reached_by_tma() excludes it
    row = source.choice((0, rows, max(count - rows, 0) // rows * rows))
    base, shared = 16 * source.randrange(1 << 40), 1024 * source.randrange(200)
    tensor_map, loads = layouts.load_tile(
        size,
        rows,
        cols,
        in_boxes,
        base,
        strides,
        head_dim,
        (batch, head, begin, count),
        row,
        shared,
    )
    check_map(tensor_map, size)
    chunks = layouts.chunks(*tile)
    written = set()
    # Here and not in the loop: each attribute of the map is a new list.
    sizes, steps, box_rows, pitch = (
        tensor_map.sizes, tensor_map.strides, tensor_map.box[1], tensor_map.swizzle
    )  # fmt: skip
    begin_of_tile = batch * strides[0] + (begin + row) * strides[1] + head * strides[2]
    for address, count_of_bytes, _, xy, zw in loads:
        (x, y), (z, w) = signed(xy), signed(zw)
        assert count_of_bytes == box_rows * pitch
        in_head = 0 <= z < sizes[2] and 0 <= w < sizes[3]
        begin_of_head = tensor_map.address + z * steps[1] + w * steps[2]
        for box_row, byte, target in box_addresses(address, pitch, box_rows):
            column, line = x + byte // size, y + box_row
            i, chunk = (address - shared) % (rows * pitch) // pitch + box_row, column * size // 16
            assert target == shared + chunks[i][chunk]
            written.add((i, chunk))
            inside = in_head and 0 <= column < sizes[0] and 0 <= line < sizes[1]
            assert inside == (row + i < count and column < head_dim)
            if inside:
                found = begin_of_head + column * size + line * steps[0]
                element = begin_of_tile + i * strides[1]
                assert found % (1 << 64) == base + size * (element + column)
    assert len(written) == rows * cols * size // 16


@pytest.mark.parametrize("tile", TILES)
def test_tma_loads_the_rows_of_a_sequence(tile: tuple, layouts: ModuleType) -> None:
    source = random.Random(0)
    for number in range(60):
        check_loads(layouts, tile, number % 2 == 0, source)


def test_key_rows_for_copies(layouts: ModuleType) -> None:
    """Dense and packed: a tile begins at its first key, and has the keys that are left."""
    strides = (10_000, 200, 40)
    for begin, first in itertools.product((0, 3, 500), (0, 64, 960)):
        where, rows = layouts.key_tile(1 << 20, strides, (2, 1, begin, 1000), first)
        element = 2 * strides[0] + (begin + first) * strides[1] + strides[2]
        assert where == (1 << 20) + 2 * element
        assert rows == 1000 - first


# --- problem/pages.cuh ---


def random_pages(layouts: ModuleType, size: int, source: random.Random) -> tuple:
    """A table, clamped to the pages, the number of keys, and what the layouts make of the table
    with far-off pages, which come past the keys and, seldom, before their end."""
    count, head = source.randrange(1, 50), source.randrange(3)
    columns = source.randrange(1, 40)
    keys = source.randrange(columns * size + 1)
    table = [source.choice((*[source.randrange(count)] * 9, -1, 1 << 30)) for _ in range(columns)]
    table[-(-keys // size) :] = [source.choice((-1, 1 << 30))] * (columns - -(-keys // size))
    paged = layouts.Paged(table, count, size, head, keys)
    return [min(max(page, 0), count - 1) for page in table], keys, head, paged


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("tile", [x for x in TILES if x[1:] != (64, 80)])
def test_tma_loads_pages(tile: tuple, layouts: ModuleType) -> None:
    """Each row comes from its page, and rows past the last key are zeros."""
    size, rows, cols = tile
    source, chunks = random.Random(1), layouts.chunks(*tile)
    for page_size, key_tile in itertools.product((8, 16, 24, 32, 48, 80, 128, 1000), range(3)):
        table, keys, head, paged = random_pages(layouts, page_size, source)
        box_rows = math.gcd(page_size, rows if source.random() < 0.5 else 16)
        strides = [16 * source.randrange(1, 1 << 16) for _ in range(3)]
        first, shared = rows * key_tile, 1024 * source.randrange(200)
        base, head_dim = 16 * source.randrange(1 << 40), cols - 16 // size
        tensor_map, loads = layouts.load_pages(
            size, rows, cols, box_rows, base, strides, head_dim, paged, first, shared
        )
        check_map(tensor_map, size)
        written = set()
        for address, _, _, xy, zw in loads:
            (x, y), (z, w) = signed(xy), signed(zw)
            for box_row, byte, target in box_addresses(address, tensor_map.swizzle, box_rows):
                column = x + byte // size
                coordinates = (column, y + box_row, z, w)
                i = (address - shared) % (rows * tensor_map.swizzle) // tensor_map.swizzle
                i, chunk = i + box_row, column * size // 16
                assert target == shared + chunks[i][chunk]
                written.add((i, chunk))
                sizes = zip(coordinates, tensor_map.sizes, strict=True)
                inside = all(0 <= c < n for c, n in sizes)
                assert inside == (first + i < keys and column < head_dim)
                if not inside:
                    continue
                found = tensor_map.address + column * size
                steps = zip(coordinates[1:], tensor_map.strides, strict=True)
                found += sum(c * s for c, s in steps)
                index, row = divmod(first + i, page_size)
                element = table[index] * strides[0] + row * strides[1] + head * strides[2]
                assert found % (1 << 64) == base + size * (element + column)
        assert len(written) == rows * cols * size // 16


@pytest.mark.parametrize("cols", (32, 64, 96, 128, 192, 256))
@pytest.mark.parametrize("threads", (32, 128, 256))
def test_copies_load_pages(threads: int, cols: int, layouts: ModuleType) -> None:
    """Each chunk of a row comes from the row's page, and none past the last key is read."""
    source, rows = random.Random(threads + cols), 16 if threads == 32 else 64
    pitch = 128 if cols % 64 == 0 else 64
    for page_size in (1, 3, 8, 16, 17, 48, 64, 100, 256):
        table, keys, head, paged = random_pages(layouts, page_size, source)
        strides = [8 * source.randrange(1 << 33), *(8 * source.randrange(1 << 16) for _ in "rh")]
        base, head_dim = 1 << 50, cols - 8 * source.randrange(3)
        starts = [rows * source.randrange(-(-keys // rows) + 1) for _ in range(2)]
        found = layouts.copy_pages(threads, cols, base, strides, head_dim, paged, starts)
        for first, copies in zip(starts, found, strict=True):
            sources = {address: (place, valid) for address, place, valid in copies}
            assert len(sources) == len(copies) == rows * cols // 8
            for i, offsets in enumerate(layouts.chunks(2, 64, cols)[:rows]):
                for chunk, offset in enumerate(offsets):
                    atom, within = divmod(offset, 64 * pitch)
                    place, valid = sources[atom * rows * pitch + within]
                    assert valid == (first + i < keys and 8 * chunk < head_dim)
                    if valid:
                        index, row = divmod(first + i, page_size)
                        element = table[index] * strides[0] + row * strides[1] + head * strides[2]
                        assert place == base + 2 * (element + 8 * chunk)


# --- tile/wgmma.cuh ---


@pytest.mark.parametrize("tile", TILES)
def test_wgmma_reads_k_major_tiles(tile: tuple, layouts: ModuleType) -> None:
    """Rows of a tile, of which each step along K reads 32 bytes."""
    size, rows, cols = tile
    chunks = layouts.chunks(*tile)
    for address, first_row, moved in ((0, 0, 0), (1 << 17, 0, 5120), (200 << 10, 16, 0)):
        found = layouts.descriptors(size, rows, cols, False, address, first_row, moved)
        assert len(found) == cols * size // 32
        for k, row, half in itertools.product(range(len(found)), range(rows - first_row), (0, 1)):
            expected = address + moved + chunks[first_row + row][2 * k + half]
            assert matmul_address(found[k], False, row, 16 * half) == expected


@pytest.mark.parametrize("tile", [x for x in TILES if x[0] == 2])
def test_wgmma_reads_mn_major_tiles(tile: tuple, layouts: ModuleType) -> None:
    """Columns of a tile, of which each step along K reads 16 rows."""
    size, rows, cols = tile
    chunks = layouts.chunks(*tile)
    for address, moved in ((0, 0), (1 << 17, 5120), (150 << 10, 0)):
        found = layouts.descriptors(size, rows, cols, True, address, 0, moved)
        for k, row, col in itertools.product(range(rows // 16), range(16), range(cols)):
            expected = address + moved + chunks[16 * k + row][col // 8] + col % 8 * 2
            assert matmul_address(found[k], True, col, 2 * row) == expected


def test_wgmma_reads_the_numbers_of_rows_twice(layouts: ModuleType) -> None:
    for address in (0, 226 << 10):
        descriptor = layouts.row_numbers(address)
        for row, byte in itertools.product(range(64), range(0, 32, 16)):
            assert matmul_address(descriptor, False, row, byte) == address + 16 * row


# --- tile/fragment.cuh ---


def halves(registers: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [[(x & 0xFFFF, x >> 16) for x in lane] for lane in registers]


def blocks_of(operand: str, cols: int) -> Iterator[tuple[int, int, int]]:
    """(first block, block, block of 16 columns of the tile) that an operand may load."""
    if "every second" in operand:
        for first, block in itertools.product((0, 1), range(cols // 32)):
            yield first, block, first + 2 * block
        return
    for block in range(cols // 16):
        yield 0, block, block
    if cols % 64 == 0:  # from the middle of a swizzle atom on
        for block in (0, 1):
            yield 2, block, 2 + block


@pytest.mark.parametrize("cols", (32, 64, 96, 128, 192, 256))
@pytest.mark.parametrize(
    "operand",
    ("A from rows", "A from columns", "A from columns, every second")
    + ("B from rows", "B from columns", "B from columns, every second"),
)
def test_fragments_hold_what_mma_wants(operand: str, cols: int, layouts: ModuleType) -> None:
    """Of mma.m16n8k16: A has 16 rows, B twice 8 columns (PTX ISA, "Matrix fragments")."""
    along_rows = "from rows" in operand  # do columns of the tile run along K?
    for first_row, row_block in ((0, 0), (0, 3), (16, 0), (32, 1)):
        for first_block, block, col_block in blocks_of(operand, cols):
            mn, k = (row_block, block) if along_rows else (block, row_block)
            found = halves(layouts.fragments(operand, cols, first_row, first_block, mn, k))
            for lane, register, e in itertools.product(LANES, range(4), (0, 1)):
                second_mn, second_k = register % 2, register // 2
                if operand.startswith("B"):  # registers 0 and 1 are of the first 8 columns
                    second_mn, second_k = second_k, second_mn
                i = lane // 4 + 8 * second_mn
                j = lane % 4 * 2 + 8 * second_k + e
                row, col = (i, j) if along_rows else (j, i)
                row += first_row + 16 * row_block
                assert found[lane][register][e] == row * cols + 16 * col_block + col


def bfloat16(x: int) -> int:
    """Bits of a whole number, up to 256."""
    return int.from_bytes(struct.pack("<f", x), "little") >> 16


@pytest.mark.parametrize("k", range(4))
def test_accumulators_are_operands(k: int, layouts: ModuleType) -> None:
    found = halves(layouts.from_accumulator(k))
    for lane, register, e in itertools.product(LANES, range(4), (0, 1)):
        row, col = lane // 4 + 8 * (register % 2), lane % 4 * 2 + 8 * (register // 2) + e
        assert found[lane][register][e] == bfloat16(16 * row + col)


# --- tile/bytes.cuh, kernels/fa3/decode_scales.cuh ---

BYTE_WIDTHS = (64, 128, 256)


def product(a: list, b: list) -> list[list[float]]:
    """Of mma.m16n8k16: 16 rows times two B of 8 columns, from the registers of all lanes."""
    left = [[0.0] * 16 for _ in range(16)]
    right = [[0.0] * 16 for _ in range(16)]
    for lane, register, e in itertools.product(LANES, range(4), (0, 1)):
        g, k = lane // 4, lane % 4 * 2 + e
        left[g + 8 * (register % 2)][k + 8 * (register // 2)] = a[lane][register][e]
        right[k + 8 * (register % 2)][g + 8 * (register // 2)] = b[lane][register][e]
    return [[sum(x * y for x, y in zip(row, col, strict=True)) for col in zip(*right, strict=True)]
            for row in left]  # fmt: skip


def added(x: list[list[float]], y: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)]


def floats(registers: list) -> list:
    """bfloat16 in pairs, of all lanes."""
    return [[[struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in pair] for pair in lane]
            for lane in halves(registers)]  # fmt: skip


def integers(registers: list, is_signed: bool) -> list:
    """What the host has in place of halves."""
    low = 1 << 15 if is_signed else 1 << 16
    return [[[x - (1 << 16) if x >= low else x for x in pair] for pair in lane]
            for lane in halves(registers)]  # fmt: skip


def random_bytes(source: random.Random, cols: int, is_signed: bool) -> tuple[bytes, list]:
    """32 rows: as bytes, and the numbers."""
    rows = [[source.randrange(256) for _ in range(cols)] for _ in range(32)]
    numbers = [[x - 256 if is_signed and x > 127 else x for x in row] for row in rows]
    return bytes(itertools.chain(*rows)), numbers


@pytest.mark.parametrize("is_signed", (False, True))
@pytest.mark.parametrize(("cols", "head_dim"), ((64, 64), (64, 48), (128, 128), (256, 208)))
def test_scores_of_bytes(cols: int, head_dim: int, is_signed: bool, layouts: ModuleType) -> None:
    """K Q^T by fragments is the product: Q's columns have the order of K's bytes."""
    source = random.Random(cols + head_dim)
    k, numbers = random_bytes(source, cols, is_signed)
    q = [[source.randrange(-64, 64) for _ in range(head_dim)] for _ in range(32)]
    given = [bfloat16(x) for x in itertools.chain(*q)]
    a = layouts.byte_operands(is_signed, True, cols, list(k))
    b = layouts.halves_of_q(cols, given, head_dim, 3)
    for m in (0, 1):
        found = [[0.0] * 16 for _ in range(16)]
        for step in range(cols // 16):
            operands = integers(a[step][m], is_signed), floats(b[step])
            found = added(found, product(*operands))
        for key, row in itertools.product(range(16), range(16)):
            pairs = zip(q[16 + row], numbers[16 * m + key][:head_dim], strict=True)
            wanted = 8 * sum(x * y for x, y in pairs)
            assert found[key][row] == (wanted if row < 15 else 0), "the last row is no valid one"


@pytest.mark.parametrize("is_signed", (False, True))
@pytest.mark.parametrize("cols", BYTE_WIDTHS)
def test_output_of_bytes(cols: int, is_signed: bool, layouts: ModuleType) -> None:
    """V^T P^T by fragments is the product, in the rows in which results are stored."""
    source = random.Random(cols)
    v, numbers = random_bytes(source, cols, is_signed)
    a = layouts.byte_operands(is_signed, False, cols, list(v))
    b = [floats(layouts.transposed_p(step)) for step in (0, 1)]
    for part in range(cols // 64):
        lanes = [[[[0.0] * 4 for _ in (0, 1)] for _ in range(4)] for _ in LANES]
        for m in range(4):
            found = [[0.0] * 16 for _ in range(16)]
            for step in (0, 1):
                found = added(found, product(integers(a[step][4 * part + m], is_signed), b[step]))
            for lane, n, i in itertools.product(LANES, (0, 1), range(4)):
                row, col = lane // 4 + 8 * (i // 2), 8 * n + lane % 4 * 2 + i % 2
                lanes[lane][m][n][i] = found[row][col]
        stored = layouts.stored_columns(lanes)
        for row, col in itertools.product(range(16), range(64)):
            column = (x[64 * part + col] for x in numbers)
            p = range(7 * row, 7 * row + 32)
            assert stored[row][col] == sum(x * y for x, y in zip(p, column, strict=True))


@pytest.mark.parametrize("exponent", range(-149, 128))
def test_rows_of_q_as_halves(exponent: int, layouts: ModuleType) -> None:
    """The largest magnitude is near the largest half, and both factors are normal numbers."""
    for mantissa in (1.0, 1.5, 2 - 2.0**-7):
        largest = math.ldexp(mantissa, exponent)
        if struct.unpack("<f", struct.pack("<f", largest))[0] != largest:
            continue  # not a subnormal number
        power, factor, inverse = layouts.power_to_halves(largest)
        assert factor == 2.0**power and inverse == 2.0**-power
        assert min(factor, inverse) >= 2.0**-126
        assert largest * factor <= 65504
        assert largest * factor >= 2**15 or power == 126
    assert layouts.power_to_halves(0.0)[0] == 126
    assert layouts.power_to_halves(65504.0)[0] == 0
    assert layouts.power_to_halves(math.inf)[0] == -113


# --- problem/score.cuh ---


@pytest.mark.parametrize(("rows", "cols"), ((16, 128), (16, 80), (32, 64)))
def test_masks_hide_exactly_what_is_not_visible(rows: int, cols: int, layouts: ModuleType) -> None:
    ends = [*range(-2, cols + 3), -(1 << 29), 1 << 29]
    intervals = list(itertools.product(ends, ends))
    random.Random(0).shuffle(intervals)
    for first in range(0, len(intervals) - rows, rows):
        visible = [(100 + a, 100 + b) for a, b in intervals[first : first + rows]]
        expected = [[a <= 100 + j < b for j in range(cols)] for a, b in visible]
        assert layouts.masked(rows, cols, visible, 100) == expected


@pytest.mark.parametrize("by_keys", (False, True))
@pytest.mark.parametrize("bits", (False, True))
@pytest.mark.parametrize(("rows", "cols"), ((16, 64), (16, 128), (32, 64)))
def test_words_hide_elements(
    rows: int, cols: int, bits: bool, by_keys: bool, layouts: ModuleType
) -> None:
    """Rows are queries and columns keys, or (by_keys) the other way round."""
    source = random.Random(rows + cols)
    queries, keys = (cols, rows) if by_keys else (rows, cols)
    for block, offset in itertools.product((0, 7), range(0, 128, keys)):
        first = 128 * block + offset
        words = [[source.getrandbits(32) for _ in range(4)] for _ in range(queries)]
        shown = [[False] * keys for _ in range(queries)]
        for query, j in itertools.product(range(queries), range(keys)):
            if bits:
                word, bit = place_of(offset + j)
                shown[query][j] = bool(words[query][word] >> bit & 1)
        if not bits:
            ends = range(first - 3, first + keys + 4)
            words = [sorted(source.choices(ends, k=4)) for _ in range(queries)]
            words[0] = [0, 0, 0, 0]
            words = [[max(x, 0) for x in row] for row in words]
            shown = [
                [a <= first + j < b or c <= first + j < d for j in range(keys)]
                for a, b, c, d in words
            ]
        want = [list(x) for x in zip(*shown, strict=True)] if by_keys else shown
        assert layouts.hidden_by_words(rows, cols, words, bits, first, by_keys) == want


@pytest.mark.parametrize("by_keys", (False, True))
@pytest.mark.parametrize("pairs", (False, True))
@pytest.mark.parametrize(("rows", "cols"), ((16, 16), (16, 32), (32, 64)))
def test_dropout_keeps_elements(
    rows: int, cols: int, pairs: bool, by_keys: bool, layouts: ModuleType
) -> None:
    """Rows are queries and columns keys, or (by_keys) the other way round."""
    source = random.Random(rows + cols)
    for p in (0.1, 0.5, 0.9):
        numbers = (source.getrandbits(60), source.getrandbits(40), source.randrange(9))
        i, j = (16 * source.randrange(50) for _ in range(2))
        threshold = round(p * 2**15) * 0x10001
        found = layouts.kept(rows, cols, pairs, by_keys, numbers, threshold, i, j)
        if by_keys:
            found = list(zip(*found, strict=True))
        for row, col in itertools.product(range(len(found)), range(len(found[0]))):
            place = i + row, j + col
            assert found[row][col] == is_kept(*numbers[:2], p, numbers[2], *place), place


def test_dropout_keeps_pairs(layouts: ModuleType) -> None:
    for p, numbers in ((0.1, (7, 8, 9)), (0.9, (2**60 + 1, 2**40 + 3, 0))):
        found = layouts.kept_pairs(numbers, round(p * 2**15) * 0x10001, 256, 192)
        for row, col in itertools.product(range(16), range(64)):
            place = 256 + row, 192 + col
            assert found[row][col] == is_kept(*numbers[:2], p, numbers[2], *place), place


# --- Stores ---


@pytest.mark.parametrize(("keys", "cols"), ((64, 64), (192, 256)))
def test_v_is_transposed(keys: int, cols: int, layouts: ModuleType) -> None:
    """Of 16 keys, key 8 b + 2 t + c is byte 4 t + 2 b + c (tile/transpose.cuh)."""
    v = list(random.Random(0).randbytes(keys * cols))
    expected = [v[key * cols + col] for col in range(cols) for key in map(key_at, range(keys))]
    assert layouts.transposed(keys, cols, v) == expected


def test_unused_keys_of_a_group_are_cleared(layouts: ModuleType) -> None:
    for keys in range(17):
        bits = struct.pack("<4I", *(layouts.bits_of_keys(t, keys) for t in range(4)))
        assert bits == bytes(255 * (key_at(byte) < keys) for byte in range(16))


def key_at(byte: int) -> int:
    """The key of a byte of a row of V^T."""
    return 16 * (byte // 16) + 8 * (byte // 2 % 2) + byte // 4 % 4 * 2 + byte % 2


@pytest.mark.parametrize("cols", (16, 48, 64, 96, 256))
def test_all_of_v_is_transposed(cols: int, layouts: ModuleType) -> None:
    """By a kernel of its own; what is of no key in use is zeros."""
    source, heads = random.Random(cols), 3
    lengths = [0, 1, 16, 17, 300, 5, 129]
    used = [min(n, source.choice((n, n // 2))) for n in lengths]
    cu_seqlens = list(itertools.accumulate(lengths, initial=2))
    v = list(source.randbytes((cu_seqlens[-1] + 4) * heads * cols))
    batch, zeros = len(used), [1.0] * len(used) * heads * cols
    found, (*offsets, pitch) = layouts.transposed_v(v, batch, heads, cols, cu_seqlens, used, zeros)
    seen = set()
    for b, head in itertools.product(range(len(lengths)), range(heads)):
        for col, byte in itertools.product(range(cols), range(-(-used[b] // 16) * 16)):
            at = offsets[b * heads + head] + col * pitch + byte
            key = key_at(byte)
            row = (cu_seqlens[b] + key) * heads + head
            assert found[at] == (v[row * cols + col] if key < used[b] else 0)
            assert at not in seen
            seen.add(at)
    assert not any(x for at, x in enumerate(found) if at not in seen)


@pytest.mark.parametrize("lengths", ((), (0, 1, 16, 127, 0, 300, 5, 128, 112), (0, 0), (1,) * 40))
@pytest.mark.parametrize("cols", (16, 48, 64, 128))
def test_quantization_transposes_v(cols: int, lengths: tuple, layouts: ModuleType) -> None:
    """As the CPU kernel does, in every byte: packed sequences with rows of none, or a batch."""
    generator, heads = torch.Generator().manual_seed(cols), 2
    shape = (sum(lengths) + 7, heads, cols) if lengths else (3, 150, heads, cols)
    v = torch.randn(shape, generator=generator).mul(4).exp().bfloat16()
    v.view(-1)[::37] = -0.0
    v.view(-1)[5::311] = math.inf
    v.view(-1)[7::401] = math.nan
    edges = [*itertools.accumulate(lengths, initial=0)] if lengths else []
    used = [n - n // 3 for n in lengths] or [150, 0, 77]
    seqused = torch.tensor(used, dtype=torch.int32)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32) if lengths else None
    options = {"cu_seqlens": cu_seqlens, "seqused": seqused}
    want, descale = fp8.quantize(v, scales="channel", transposed=True, **options)
    amax = (descale * 448).bfloat16().div(512).float().flatten().tolist()
    bits = v.view(torch.uint8).flatten().tolist()
    found, _ = layouts.quantized_v(bits, len(used), heads, cols, edges, used, amax)
    assert found == want.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("tile", [x for x in TILES if x[0] == 1])
def test_tma_loads_the_columns_of_a_sequence(tile: tuple, layouts: ModuleType) -> None:
    """Of V^T: what is past the keys, rounded up to 16, and past the channels, is zero."""
    _, rows, cols = tile
    source, chunks = random.Random(0), layouts.chunks(*tile)
    for _ in range(60):
        pitch, keys = 16 * source.randrange(1, 1 << 20), source.choice((1, 16, 100, 5000))
        offset, base = 16 * source.randrange(1 << 30), 16 * source.randrange(1 << 40)
        key, shared = source.choice((0, cols, keys // cols * cols)), 1024 * source.randrange(200)
        tensor_map, loads = layouts.load_columns(rows, cols, base, pitch, offset, keys, key, shared)
        check_map(tensor_map, 1)
        sizes, strides, box_rows, swizzle = (
            tensor_map.sizes, tensor_map.strides, tensor_map.box[1], tensor_map.swizzle
        )  # fmt: skip
        written = set()
        for address, count_of_bytes, _, xy, zw in loads:
            (x, y), (z, w) = signed(xy), signed(zw)
            assert count_of_bytes == box_rows * swizzle == rows * swizzle
            first_col = (address - shared) // (rows * swizzle) * swizzle
            for row, byte, target in box_addresses(address, swizzle, box_rows):
                assert target == shared + chunks[row][(first_col + byte) // 16]
                written.add((row, first_col + byte))
                coordinates = (x + byte, y + row, z, w)
                inside = all(0 <= c < n for c, n in zip(coordinates, sizes, strict=True))
                column = key + first_col + byte
                assert inside == (column < -(-keys // 16) * 16 and row < rows - 16)
                found = tensor_map.address + coordinates[0]
                found += sum(c * s for c, s in zip(coordinates[1:], strides, strict=True))
                if inside:
                    assert found % (1 << 64) == base + offset + row * pitch + column
        assert len(written) == rows * cols // 16


@pytest.mark.parametrize("keys", (0, 1, 128, 129, 256, 257, 300, 512))
def test_descales_of_keys_not_in_use_are_not_read(keys: int, layouts: ModuleType) -> None:
    """A KV tile of FP8 has keys of two blocks, the last tile of a sequence perhaps of one."""
    blocks = max(-(-keys // 128), keys == 0)
    descales = [float(block + 1) if block < blocks else math.nan for block in range(6)]
    for kv_tile in range(max(-(-keys // 256), 1)):
        first, second = layouts.key_descales(descales, keys, kv_tile)
        expected = (2 * kv_tile + 1, min(2 * kv_tile + 2, blocks)) if keys else (1, 1)
        assert (first, second) == expected


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_numbers_without_descales_are_never_cooled(head_dim: int, layouts: ModuleType) -> None:
    """With the default scale. Each iteration would look for large maxima, a fifth slower."""
    assert not layouts.may_be_large(head_dim, head_dim**-0.5)
    assert layouts.may_be_large(head_dim, 4 * head_dim**-0.5), "a larger scale is not overlooked"


@pytest.mark.parametrize(
    ("head_dim", "dropout"), ((64, False), (64, True), (96, False), (128, False))
)
def test_ds_is_stored_where_the_matmuls_read_it(
    head_dim: int, dropout: bool, layouts: ModuleType
) -> None:
    """By both consumers of fa3/backward.cuh, whose fragments number the elements."""
    found = layouts.stored_ds(head_dim, dropout)
    queries = len(found[0])
    assert found == [[queries * key + query for query in range(queries)] for key in range(128)]
