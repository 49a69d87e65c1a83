// Dropout's mask, a pure function of (seed, offset, batch, head, row, column): the same bits in
// every variant, in forward and backward, on GPU and CPU (flash_ext/dropout.py).
//
// Philox4x32-10 (Salmon et al., SC 2011) yields eight 16-bit numbers a call. One call serves the
// eight elements of a 16x16 block that one lane of mma.m16n8k16's accumulator layout holds: rows r
// and r + 8, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace flash_ext {

struct Philox4 {
    uint32_t v[4];

    // The idx-th of the eight 16-bit numbers.
    FLASH_HOST_DEVICE constexpr uint32_t half(int idx) const {
        return (v[idx / 2] >> (16 * (idx % 2))) & 0xffffu;
    }
};

FLASH_HOST_DEVICE constexpr Philox4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2,
                                                  uint32_t c3, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
        const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The mask of one (batch, head).
struct DropoutMask {
    uint32_t key0;
    uint32_t key1;
    uint32_t head;  // batch * Hq + head
    uint32_t offset;
    uint32_t keep_threshold;

    FLASH_HOST_DEVICE constexpr DropoutMask(int64_t seed, int64_t offset_, int64_t flat_head,
                                            uint32_t threshold)
        : key0(static_cast<uint32_t>(seed)),
          key1(static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset_ >> 32)),
          head(static_cast<uint32_t>(flat_head)),
          offset(static_cast<uint32_t>(offset_)),
          keep_threshold(threshold) {}

    // Random numbers of rows row, row ^ 8 and columns col, col ^ 1, col ^ 8, col ^ 9.
    FLASH_HOST_DEVICE constexpr Philox4 block(int row, int col) const {
        return philox4x32_10(col / 16 * 4 + col % 8 / 2, row / 16 * 8 + row % 8, head, offset, key0,
                             key1);
    }

    static FLASH_HOST_DEVICE constexpr int index(int row, int col) {
        return row / 8 % 2 * 4 + col / 8 % 2 * 2 + col % 2;
    }

    FLASH_HOST_DEVICE constexpr bool keep(int row, int col) const {
        return block(row, col).half(index(row, col)) < keep_threshold;
    }
};

}  // namespace flash_ext
