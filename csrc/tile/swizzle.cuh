// Where element (row, column) of a tile is in shared memory.
//
// A tile is stored as swizzle atoms of 128 bytes of columns (64 or 32 where the width is not a
// multiple of more). The hardware's atom has eight rows; here it has all rows of the tile,
// row-major. Within an atom the 16-byte chunks of a row are permuted by XOR with the row, so that
// the eight rows that an ldmatrix reads at one column, and the chunks of one row that a copy
// writes, are all in different banks. TMA and wgmma call these layouts the 128-byte (64-byte,
// 32-byte) swizzle.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace flash_ext {

template <class Element_, int kRows_, int kCols_>
struct SharedTile {
    using Element = Element_;
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kChunk = 16 / sizeof(Element);  // elements in 16 bytes
    static constexpr int kRowBytes = kCols * sizeof(Element);
    static constexpr int kPitch = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
    static constexpr int kAtomCols = kPitch / sizeof(Element);
    static constexpr int kAtoms = kCols / kAtomCols;
    static constexpr int kChunksPerRow = kPitch / 16;  // within an atom
    static constexpr int kAtomBytes = kRows * kPitch;
    static constexpr int kBytes = kAtoms * kAtomBytes;
    static constexpr int kBlocksPerAtom = kPitch / 32;  // an instruction's columns: 32 bytes

    static_assert(kCols % kAtomCols == 0 && kRows % 8 == 0);

    // The XOR that row applies to its chunk index: eight 128-byte rows, four pairs of 64-byte rows,
    // or two times four of 32 bytes, until the pattern repeats.
    static FLASH_HOST_DEVICE constexpr int swizzle(int row) {
        return kPitch == 128 ? row & 7 : kPitch == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
    }

    // Byte offset of the 16-byte chunk that holds columns from kChunk * chunk on of row.
    static FLASH_HOST_DEVICE constexpr int offset(int row, int chunk) {
        const int atom = chunk / kChunksPerRow;
        return atom * kAtomBytes + row * kPitch + (((chunk % kChunksPerRow) ^ swizzle(row)) << 4);
    }
    // From the address of a row's first 32 bytes, or half of them, to that of others. The swizzle
    // never carries, so an XOR leads from block to block within an atom.
    static FLASH_HOST_DEVICE constexpr uint32_t block_address(uint32_t first, int block) {
        return (first ^ (block % kBlocksPerAtom * 32)) + block / kBlocksPerAtom * kAtomBytes;
    }
};

}  // namespace flash_ext
