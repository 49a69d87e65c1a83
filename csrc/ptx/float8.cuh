// An e4m3 number in memory: sign, 4 bits of exponent (bias 7), 3 of mantissa; the largest is 448.
#pragma once

#include <cstdint>

namespace flash_ext {

struct Float8 {
    uint8_t bits;
};

}  // namespace flash_ext
