// A operands of 8 bits for matmuls of halves: ldmatrix fetches bytes, which become halves, exactly,
// in registers. It moves 16 bits at a time, so a lane gets bytes in pairs, in an order that the
// other operand, or the result, must have too (lane = 4 g + c):
//
//   K, stored [m][k]:  a register is columns 4 c to 4 c + 3 of row g. As A the lane has k = 2 c,
//                      2 c + 1, 2 c + 8 and 2 c + 9, so that is the order of B's k, too.
//   V, stored [k][m]:  a register, transposed, is columns 2 g and 2 g + 1 of keys 2 c and 2 c + 1.
//                      The even columns of 16 are rows 0 to 7 of A, the odd ones rows 8 to 15.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/float8.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// Four bytes as halves: those that the four hexadecimal digits of `order` name, in this order.
template <class Byte, uint32_t kOrder>
FLASH_DEVICE void to_halves(uint32_t bytes, uint32_t& first, uint32_t& second) {
    if constexpr (std::is_same_v<Byte, Float8>) {
        ptx::unpack_e4m3(kOrder == 0x3210 ? bytes : ptx::byte_permute(bytes, 0, kOrder), first,
                         second);
    } else {
        // 0x6400 + x is the half 1024 + x for x from 0 to 255: an integer plus 128.
        const uint32_t from_0 = bytes ^ 0x80808080;
        constexpr uint32_t kLow = (kOrder & 15) | (kOrder & 0xf0) << 4 | 0x4040;
        constexpr uint32_t kHigh = (kOrder >> 8 & 15) | (kOrder >> 8 & 0xf0) << 4 | 0x4040;
        first = ptx::sub_halves(ptx::byte_permute(from_0, 0x64646464, kLow), 0x64806480);
        second = ptx::sub_halves(ptx::byte_permute(from_0, 0x64646464, kHigh), 0x64806480);
    }
}

// Where column `col` of the other operand is, so that it meets K's.
FLASH_HOST_DEVICE constexpr int place_beside_bytes(int col) {
    const int of_lane = col % 4;
    return col / 16 * 16 + of_lane / 2 * 8 + col % 16 / 4 * 2 + of_lane % 2;
}

// B of halves, stored so that a lane's registers for 16 columns n and 16 k are side by side: no
// address but the first is computed.
template <int kN, int kK>
struct BInOrder {
    static constexpr int kRows = kN;
    static constexpr int kCols = kK;
    static constexpr int kBytes = ceil_div(kN, 16) * 16 * kK * 2;

    // Of column n and two k, from an even one on.
    static FLASH_HOST_DEVICE constexpr int offset(int n, int k) {
        const int lane = n % 8 * 4 + k % 8 / 2;
        return (((n / 16 * (kK / 16) + k / 16) * 32 + lane) * 4 + n % 16 / 8 * 2 + k % 16 / 8) * 4;
    }

    uint32_t lane_address;

    FLASH_DEVICE explicit BInOrder(uint32_t address) : lane_address(address + 16 * lane_id()) {}

    FLASH_DEVICE uint32_t address(int two_n, int k) const {
        return lane_address + (two_n * (kK / 16) + k) * 512;
    }
    FLASH_DEVICE void load_b(uint32_t (&b)[4], int two_n, int k) const {
        ptx::ld_shared_v4(b, address(two_n, k));
    }
};

// A of a tile of bytes stored [m][k], as K in K Q^T. Bytes are loaded for two steps along k.
template <class Tile>
struct AFromByteRows {
    using Byte = typename Tile::Element;
    static_assert(Tile::kCols % 32 == 0);

    AFromRows<Tile> source;

    FLASH_DEVICE explicit AFromByteRows(uint32_t tile_address) : source(tile_address) {}

    FLASH_DEVICE void load_bytes(uint32_t (&bytes)[4], int m, int two_k) const {
        source.load_a(bytes, m, two_k);
    }
    FLASH_DEVICE static void to_a(uint32_t (&a)[4], const uint32_t (&bytes)[4], int step) {
#pragma unroll
        for (int i = 0; i < 2; ++i)  // rows from 8 i on
            to_halves<Byte, 0x3210>(bytes[2 * step + i], a[i], a[2 + i]);
    }
};

// A of a tile of bytes stored [k][m], as V in V^T P^T. Bytes are loaded for two blocks of 16 rows.
template <class Tile>
struct AFromByteColumns {
    using Byte = typename Tile::Element;
    static_assert(Tile::kCols % 32 == 0);

    BFromColumns<Tile> source;

    FLASH_DEVICE explicit AFromByteColumns(uint32_t tile_address) : source(tile_address) {}

    FLASH_DEVICE void load_bytes(uint32_t (&bytes)[4], int two_m, int k) const {
        source.load_b(bytes, two_m, k);
    }
    FLASH_DEVICE static void to_a(uint32_t (&a)[4], const uint32_t (&bytes)[4], int block) {
#pragma unroll
        for (int i = 0; i < 2; ++i)  // keys from 8 i on
            to_halves<Byte, 0x3120>(bytes[2 * block + i], a[2 * i], a[2 * i + 1]);
    }
};

}  // namespace flash_ext
