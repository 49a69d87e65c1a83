// Dropout's mask, a pure function of (seed, offset, batch, head, row, column): the same bits in
// every variant, in forward and backward, on GPU and CPU (flash_ext/dropout.py).
//
// Philox4x32-7 (Salmon et al., SC 2011) yields four words a call, for the elements of two 16x16
// blocks side by side that one lane of mma.m16n8k16's accumulator layout holds: rows r and r + 8,
// columns 2 c, 2 c + 1 and those 8, 16 and 24 further. A word serves four elements, 8 rows and 8
// columns apart: these are also what a lane holds of the transposed block. Their numbers are the
// word rotated by 1, 9, 17 and 25 bits, of which the upper 15 count (docs/notes/039-dropout.md):
// without its first bit, half of a word is a number of fp16, and two are compared at once.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace flash_ext {

struct Philox4 {
    uint32_t v[4];
};

struct WideProduct {
    FLASH_HOST_DEVICE constexpr uint64_t operator()(uint32_t x, uint32_t y) const {
        return static_cast<uint64_t>(x) * y;
    }
};

template <class Multiply = WideProduct>
FLASH_HOST_DEVICE constexpr Philox4 philox4x32_7(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                 uint32_t key0, uint32_t key1,
                                                 Multiply multiply = {}) {
    for (int round = 0; round < 7; ++round) {
        const uint64_t p0 = multiply(c0, 0xD2511F53u);
        const uint64_t p1 = multiply(c2, 0xCD9E8D57u);
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

struct DropoutMask {
    uint32_t key0;
    uint32_t key1;
    uint32_t head;  // batch * Hq + head
    uint32_t offset;
    uint32_t drop_threshold;  // in both halves

    DropoutMask() = default;
    FLASH_HOST_DEVICE constexpr DropoutMask(int64_t seed, int64_t offset_, int64_t flat_head,
                                            uint32_t threshold)
        : key0(static_cast<uint32_t>(seed)),
          key1(static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset_ >> 32)),
          head(static_cast<uint32_t>(flat_head)),
          offset(static_cast<uint32_t>(offset_)),
          drop_threshold(threshold) {}

    // Philox's counters of rows row and row ^ 8, and of columns col, col ^ 1 and those 8, 16 and 24
    // further in their 32. Their words: word_of() says which is whose.
    static FLASH_HOST_DEVICE constexpr uint32_t row_counter(uint32_t row) {
        return row / 16 * 8 + row % 8;
    }
    static FLASH_HOST_DEVICE constexpr uint32_t col_counter(uint32_t col) {
        return col / 32 * 4 + col % 8 / 2;
    }
    template <class Multiply = WideProduct>
    FLASH_HOST_DEVICE constexpr Philox4 words_of(uint32_t row_counter, uint32_t col_counter,
                                                 Multiply multiply = {}) const {
        return philox4x32_7(col_counter, row_counter, head, offset, key0, key1, multiply);
    }
    template <class Multiply = WideProduct>
    FLASH_HOST_DEVICE constexpr Philox4 words(uint32_t row, uint32_t col,
                                              Multiply multiply = {}) const {
        return words_of(row_counter(row), col_counter(col), multiply);
    }
    static FLASH_HOST_DEVICE constexpr int word_of(int col) { return col / 16 % 2 * 2 + col % 2; }

    // Is the element kept that is in the second half of the 16 rows, or of the 16 columns, or not?
    FLASH_HOST_DEVICE constexpr bool keep(uint32_t word, int row_half, int col_half) const {
        const int bits = 8 * (2 * row_half + col_half) + 1;
        return (word << bits | word >> (32 - bits)) >= drop_threshold << 17;
    }
};

}  // namespace flash_ext
