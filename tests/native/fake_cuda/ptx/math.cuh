#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline float ex2(float x) { return std::exp2(x); }
inline float ex2_in_order(float x) { return std::exp2(x); }
inline float fma(float x, float y, float z) { return x * y + z; }
inline void add_to(float& sum, float x) { sum += x; }
inline float lg2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float rcp(float x) { return 1.f / x; }
// A NaN's bits are above all numbers', too.
inline uint32_t halves_from(uint32_t x, uint32_t threshold) {
    const auto ones = [&](int shift) -> uint32_t {
        return (x >> shift & 0x7fff) >= (threshold >> shift & 0x7fff) ? 0xffff : 0;
    };
    return ones(16) << 16 | ones(0);
}
inline void are_halves_from(uint32_t x, uint32_t threshold, bool& lower, bool& upper) {
    const uint32_t ones = halves_from(x, threshold);
    lower = ones & 1;
    upper = ones >> 31;
}
inline uint32_t bit_range(uint32_t begin, uint32_t width) {
    return static_cast<uint32_t>(((uint64_t{1} << (width < 32 ? width : 32)) - 1) << begin);
}
// To bfloat16 in any case, without rounding.
template <class Element>
uint32_t pack(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000);
}
template <class Element>
float2 unpack(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}
// Halves are their bytes.
inline void unpack_e4m3(uint32_t packed, uint32_t& first, uint32_t& second) {
    first = (packed & 0xff) | (packed & 0xff00) << 8;
    second = (packed >> 16 & 0xff) | (packed >> 16 & 0xff00) << 8;
}
// Of halves from 1024 to 2047, whose last bits are units, as integers of 16 bits.
inline uint32_t sub_halves(uint32_t x, uint32_t y) {
    return (((x & 0xffff) - (y & 0xffff)) & 0xffff) | ((x >> 16) - (y >> 16)) << 16;
}
// To the nearest, ties to even; beyond 448 to 448.
inline uint32_t to_e4m3(float x) {
    const uint32_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    x = std::min(std::fabs(x), 448.f);
    const int exponent = std::max(x > 0.f ? std::ilogb(x) : -6, -6);
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(x, 3 - exponent)));
    return sign | (8 * static_cast<uint32_t>(exponent + 6) + steps);
}
inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    return to_e4m3(x0) | to_e4m3(x1) << 8 | to_e4m3(x2) << 16 | to_e4m3(x3) << 24;
}
inline uint32_t byte_permute(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = uint64_t{y} << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline float max_nan(float x, float y) { return x > y ? x : y; }
template <class Element>
Element from_float(float) {
    return {};
}
inline float to_float(float x) { return x; }
inline float to_float(__half) { return 0.f; }
inline float to_float(__nv_bfloat16) { return 0.f; }

}  // namespace flash_ext::ptx
