// Single-instruction arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/device.h"

namespace flash_ext::ptx {

// 2^x; ex2(-inf) is 0, subnormal results are flushed.
FLASH_DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same, x y + z and sum += x, in the order of the program.
FLASH_DEVICE float ex2_in_order(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FLASH_DEVICE float fma(float x, float y, float z) {
    float result;
    asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
    return result;
}
FLASH_DEVICE void add_to(float& sum, float x) {
    asm volatile("add.f32 %0, %0, %1;" : "+f"(sum) : "f"(x));
}

// log2(x); lg2(0) is -inf.
FLASH_DEVICE float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to within one unit in the last place.
FLASH_DEVICE float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh(x), with a relative error of 2^-11 at most.
FLASH_DEVICE float tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bits of ones in the halves of x whose magnitude, as a number of fp16, is not below the magnitude
// of the threshold, or is a NaN.
FLASH_DEVICE uint32_t halves_from(uint32_t x, uint32_t threshold) {
    uint32_t bits;
    asm("{ .reg .b32 magnitude;\n"
        "abs.f16x2 magnitude, %1;\n"
        "set.geu.u32.f16x2 %0, magnitude, %2; }"
        : "=r"(bits)
        : "r"(x), "r"(threshold));
    return bits;
}

// The same as two predicates, of the lower half and of the upper one.
FLASH_DEVICE void are_halves_from(uint32_t x, uint32_t threshold, bool& lower, bool& upper) {
    uint32_t p, q;
    asm("{ .reg .b32 magnitude;\n"
        ".reg .pred lower, upper;\n"
        "abs.f16x2 magnitude, %2;\n"
        "setp.geu.f16x2 lower|upper, magnitude, %3;\n"
        "selp.u32 %0, 1, 0, lower;\n"
        "selp.u32 %1, 1, 0, upper; }"
        : "=r"(p), "=r"(q)
        : "r"(x), "r"(threshold));
    lower = p != 0;
    upper = q != 0;
}

// Ones in bits [begin, begin + width), clipped to 32 bits.
FLASH_DEVICE uint32_t bit_range(uint32_t begin, uint32_t width) {
    uint32_t bits;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(width));
    return bits;
}

// Two floats rounded to nearest even and packed, `low` in the low half.
template <class Element>
FLASH_DEVICE uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<Element, __half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// The inverse of pack().
template <class Element>
FLASH_DEVICE float2 unpack(uint32_t packed) {
    if constexpr (std::is_same_v<Element, __half>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&packed));
    } else {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
    }
}

// Four floats rounded to e4m3 and packed, the first in the lowest byte. Numbers beyond 448 become
// 448; a NaN stays one.
FLASH_DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    uint32_t packed;
    asm("{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return packed;
}

// Four numbers of e4m3 as halves, exactly: the first two, then the others.
FLASH_DEVICE void unpack_e4m3(uint32_t packed, uint32_t& first, uint32_t& second) {
    asm("{ .reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(packed));
}

// x - y of two halves.
FLASH_DEVICE uint32_t sub_halves(uint32_t x, uint32_t y) {
    uint32_t difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
    return difference;
}

// Bytes of x and y, selected by the four lowest hexadecimal digits of `selector`.
FLASH_DEVICE uint32_t byte_permute(uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(selector));
    return result;
}

template <class Element>
FLASH_DEVICE Element from_float(float x) {
    if constexpr (std::is_same_v<Element, float>) {
        return x;
    } else if constexpr (std::is_same_v<Element, __half>) {
        return __float2half_rn(x);
    } else {
        return __float2bfloat16_rn(x);
    }
}

FLASH_DEVICE float to_float(float x) { return x; }
FLASH_DEVICE float to_float(__half x) { return __half2float(x); }
FLASH_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

}  // namespace flash_ext::ptx
