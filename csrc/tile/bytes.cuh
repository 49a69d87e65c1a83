// B operands of 8 bits for matmuls of halves: ldmatrix fetches bytes, which become halves, exactly,
// in registers. It moves 16 bits at a time, so a lane gets bytes in pairs, in an order that the
// other operand, or the result, must have too (lane = 4 g + c):
//
//   K, stored [n][k]:  a register is columns 4 c to 4 c + 3 of 16. As B the lane has k = 2 c,
//                      2 c + 1, 2 c + 8 and 2 c + 9, so that is the order of A's columns, too.
//   V, stored [k][n]:  a register, transposed, is columns 2 g and 2 g + 1 of keys 2 c and 2 c + 1.
//                      The even columns of 16 are one B of eight columns, and the odd ones the
//                      next: of the result a lane has columns 4 c to 4 c + 3.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/float8.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// Four bytes as halves: the first two, then the others.
template <class Byte>
FLASH_DEVICE void to_halves(uint32_t bytes, uint32_t& first, uint32_t& second) {
    if constexpr (std::is_same_v<Byte, Float8>) {
        ptx::unpack_e4m3(bytes, first, second);
    } else {
        // 0x6400 + x is the half 1024 + x for x from 0 to 255: an integer plus 128.
        const uint32_t from_0 = bytes ^ 0x80808080;
        first = ptx::sub_halves(ptx::byte_permute(from_0, 0x64646464, 0x4140), 0x64806480);
        second = ptx::sub_halves(ptx::byte_permute(from_0, 0x64646464, 0x4342), 0x64806480);
    }
}

// Where column `col` of A is, so that it meets K's.
FLASH_HOST_DEVICE constexpr int place_beside_bytes(int col) {
    const int of_lane = col % 4;
    return col / 16 * 16 + of_lane / 2 * 8 + col % 16 / 4 * 2 + of_lane % 2;
}

// B of a tile of bytes stored [n][k], as K in Q K^T.
template <class Tile>
struct BFromByteRows {
    using Byte = typename Tile::Element;
    static_assert(Tile::kCols % 32 == 0);

    BFromRows<Tile> source;
    mutable uint32_t bytes[Tile::kRows / 16][4];  // of two steps along k

    FLASH_DEVICE explicit BFromByteRows(uint32_t tile_address) : source(tile_address) {}

    FLASH_DEVICE void load_b(uint32_t (&b)[4], int n, int k) const {
        if (k % 2 == 0) source.load_b(bytes[n], n, k / 2);
        to_halves<Byte>(bytes[n][k % 2], b[0], b[1]);
        to_halves<Byte>(bytes[n][2 + k % 2], b[2], b[3]);
    }
};

// B of a tile of bytes stored [k][n], as V in P V.
template <class Tile>
struct BFromByteColumns {
    using Byte = typename Tile::Element;
    static_assert(Tile::kCols % 32 == 0);

    BFromColumns<Tile> source;
    mutable uint32_t bytes[4];  // of two blocks of 16 columns

    FLASH_DEVICE explicit BFromByteColumns(uint32_t tile_address) : source(tile_address) {}

    FLASH_DEVICE void load_b(uint32_t (&b)[4], int n, int k) const {
        if (n % 2 == 0) source.load_b(bytes, n / 2, k);
        const uint32_t low = bytes[n % 2 * 2], high = bytes[n % 2 * 2 + 1];  // keys
        to_halves<Byte>(ptx::byte_permute(low, high, 0x6420), b[0], b[1]);
        to_halves<Byte>(ptx::byte_permute(low, high, 0x7531), b[2], b[3]);
    }
};

// visit(four elements, their first column) for a lane's elements of row 16 m + lane_row() + 8 i of
// the result with such a B.
template <class Accumulator, class Visit>
FLASH_DEVICE void for_each_four_of_row(const Accumulator& acc, int m, int i, Visit visit) {
#pragma unroll
    for (int n = 0; n < Accumulator::kN; n += 2) {
        const auto &even = acc.v[m][n], &odd = acc.v[m][n + 1];
        visit(float4{even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]},
              8 * n + 2 * lane_col());
    }
}

}  // namespace flash_ext
