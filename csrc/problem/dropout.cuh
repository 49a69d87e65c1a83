// Dropout's mask, a pure function of (seed, offset, batch, head, row, column): the same bits in
// every variant, in forward and backward, on GPU and CPU (flash_ext/dropout.py).
//
// A word decides four elements, in rows r and r + 8 and columns c and c + 8 of a 16x16 block. In
// mma.m16n8k16's accumulator layout one lane holds all four, whether the block is transposed or
// not. Each element has a number: the upper 15 bits of the word rotated by 1, 9, 17 or 25 bits.
// Without its first bit, half of a word is a number of fp16, so two are compared at once.
//
// The word is a hash of its place: two multiplications between three shifts, with the constants of
// C. Wellons' search for low bias. Philox, the usual choice, needs products of 64 bits, which take
// six times as long as these beside matmuls (docs/notes/039-dropout.md).
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace flash_ext {

struct DropoutMask {
    // A row is 0x9E3779B9 columns further, 2^32 over the golden ratio, which keeps words of a head
    // that share a place far apart.
    static constexpr uint32_t kColStep = 0x9E3779B1u;
    static constexpr uint32_t kRowStep = kColStep * 0x9E3779B9u;
    static constexpr uint64_t kHeadStep = 0xD1B54A32D192ED03u;

    // Not one number of 64 bits, which would leave padding after the threshold: fa3's State has
    // this as a member with [[no_unique_address]], and nvcc 13.0 lost the value of a later member.
    uint32_t key_low;
    uint32_t key_high;
    uint32_t drop_threshold;  // in both halves

    DropoutMask() = default;
    FLASH_HOST_DEVICE constexpr DropoutMask(int64_t seed, int64_t offset, int64_t flat_head,
                                            uint32_t threshold)
        : DropoutMask(static_cast<uint64_t>(seed) * 0xBF58476D1CE4E5B9u +
                          static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15u +
                          static_cast<uint64_t>(flat_head) * kHeadStep,
                      threshold) {}

    // That of a head so many further.
    FLASH_HOST_DEVICE constexpr DropoutMask ahead(int heads) const {
        const uint64_t key = static_cast<uint64_t>(key_high) << 32 | key_low;
        return DropoutMask(key + static_cast<uint64_t>(heads) * kHeadStep, drop_threshold);
    }

    // The number, among words, of a row and of row ^ 8, or of a column and of column ^ 8.
    static FLASH_HOST_DEVICE constexpr uint32_t counter(uint32_t x) { return x / 16 * 8 + x % 8; }
    // The place of a word. The steps above lead from it to the next row's or column's.
    FLASH_HOST_DEVICE constexpr uint32_t place(uint32_t row_counter, uint32_t col_counter) const {
        return key_low + row_counter * kRowStep + col_counter * kColStep;
    }
    FLASH_HOST_DEVICE constexpr uint32_t word(uint32_t x) const {
        x ^= x >> 16;
        x = x * 0x7FEB352Du + key_high;
        x ^= x >> 15;
        x = x * 0x846CA68Bu + key_low;
        return x ^ x >> 16;
    }

    // Is the element kept that is in the second half of the 16 rows, or of the 16 columns, or not?
    FLASH_HOST_DEVICE constexpr bool keep(uint32_t word, int row_half, int col_half) const {
        const int bits = 8 * (2 * row_half + col_half) + 1;
        return (word << bits | word >> (32 - bits)) >= drop_threshold << 17;
    }

 private:
    FLASH_HOST_DEVICE constexpr DropoutMask(uint64_t key, uint32_t threshold)
        : key_low(static_cast<uint32_t>(key)),
          key_high(static_cast<uint32_t>(key >> 32)),
          drop_threshold(threshold) {}
};

}  // namespace flash_ext
