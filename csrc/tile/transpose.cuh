// Transposes a tile of FP8 in shared memory. 8-bit wgmma reads both operands K-major, so P V needs
// V^T, with the keys of a column side by side.
//
// Within 16 keys they are in the order in which a lane's scores lie in its registers: lane t of a
// row has the columns 2t, 2t + 1, 8 + 2t and 9 + 2t, which become bytes 4t to 4t + 3 of the A
// operand. So byte 4t + 2b + c of V^T is key 8b + 2t + c, and P needs no permutation.
//
// ldmatrix.trans moves pairs of bytes: a lane gets keys 2t, 2t + 1 of the columns 2g, 2g + 1. Two
// byte permutations separate the columns and join them with keys 8 + 2t and 9 + 2t, and stmatrix
// stores rows of V^T. Its eight rows are the even columns 2g for g < 4 and the odd ones for g >= 4,
// or the other way round: the swizzle would put the even ones alone into the same four banks.
#pragma once

#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// Which bits of word t of 16 keys, as V^T has them, belong to the first `keys`.
FLASH_HOST_DEVICE constexpr uint32_t bits_of_keys(int t, int keys) {
    const auto byte = [&](int key) { return key < keys ? 0xffu : 0u; };
    return byte(2 * t) | byte(2 * t + 1) << 8 | byte(8 + 2 * t) << 16 | byte(9 + 2 * t) << 24;
}

// By all lanes of warp `warp` of kWarps. Source is (keys, columns), Target (columns, keys).
template <class Source, class Target, int kWarps>
FLASH_DEVICE void transpose_fp8(uint32_t source, uint32_t target, int warp) {
    static_assert(Source::kRows == Target::kCols && Source::kCols == Target::kRows);
    static_assert(Source::kChunksPerRow % kWarps == 0);
    constexpr int kBlocks = Source::kRows / 32;  // of keys
    constexpr int kBlocksPerAtom = Target::kChunksPerRow / 2;
    const int lane = lane_id();
    const bool odd = lane >= 16;  // of this lane's columns, the odd one comes first
    const uint32_t first = odd ? 0x7531 : 0x6420, second = odd ? 0x6420 : 0x7531;
    // Where stmatrix stores the row whose address this lane gives.
    const int r = lane % 8, matrix = lane / 8;
    const int column = 2 * r + ((matrix % 2 == 0) != (r < 4));
    // Other chunks within an atom differ by an XOR, all else by a constant.
    const uint32_t from = source + Source::offset(lane, warp);
    const uint32_t to = target + Target::offset(16 * warp + column, matrix / 2);
#pragma unroll
    for (int chunk = 0; chunk < Source::kCols / 16; chunk += kWarps) {
        // Two blocks at a time: their latencies overlap, and this warp has few registers.
        constexpr int kAtOnce = kBlocks % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int first_block = 0; first_block < kBlocks; first_block += kAtOnce) {
            uint32_t keys[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                ptx::ldmatrix_x4<true>(keys[i],
                                       (from ^ (chunk % Source::kChunksPerRow * 16)) +
                                           chunk / Source::kChunksPerRow * Source::kAtomBytes +
                                           32 * (first_block + i) * Source::kPitch);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const uint32_t (&x)[4] = keys[i];
                const uint32_t rows[4] = {
                    ptx::byte_permute(x[0], x[1], first), ptx::byte_permute(x[0], x[1], second),
                    ptx::byte_permute(x[2], x[3], first), ptx::byte_permute(x[2], x[3], second)};
                const int block = first_block + i;
                ptx::stmatrix_x4((to ^ (block % kBlocksPerAtom * 32)) +
                                     block / kBlocksPerAtom * Target::kAtomBytes +
                                     16 * chunk * Target::kPitch,
                                 rows);
            }
        }
    }
}

// Of a tile of V^T, whose rows are channels, the keys from `keys` on that are in the group of the
// one before. P is 0 there, but NaN times 0 is not. By a warp.
template <class Tile>
FLASH_DEVICE void clear_unused_keys(uint32_t tile, int keys) {
#pragma unroll 2  // producers have few registers
    for (int channel = lane_id(); channel < Tile::kRows; channel += 32) {
        const uint32_t group = tile + Tile::offset(channel, keys / 16);
        uint32_t x[4];
        ptx::ld_shared_v4(x, group);
#pragma unroll
        for (int t = 0; t < 4; ++t) x[t] &= bits_of_keys(t, keys % 16);
        ptx::st_shared_v4(group, x);
    }
}

}  // namespace flash_ext
