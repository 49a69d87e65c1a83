// The 8-bit numbers of tensor cores, in memory.
#pragma once

#include <cstdint>

namespace flash_ext {

// e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; the largest is 448.
struct Float8 {
    uint8_t bits;
};

struct Int8 {
    int8_t value;
};

}  // namespace flash_ext
