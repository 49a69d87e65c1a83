// Arithmetic of layouts, masks and schedules, for kernels and for the host.
#pragma once

#include <bit>
#include <cstdint>

#include "ptx/device.h"

namespace flash_ext {

// Of the GPU code that is being compiled, compute capability 9.0 as 900; 0 on the host.
#ifdef __CUDA_ARCH__
inline constexpr int kCudaArch = __CUDA_ARCH__;
#else
inline constexpr int kCudaArch = 0;
#endif

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <class T>
FLASH_HOST_DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Divides numbers that are not negative by one that only the host knows, in three instructions: the
// product with 2^(31 + shift) / divisor, rounded up, is too large by less than 1 / divisor.
struct Divisor {
    uint32_t multiplier;
    int shift;

    constexpr Divisor() : Divisor(1) {}
    explicit constexpr Divisor(int divisor) {
        divisor += divisor == 0;  // 0, of an empty call, which divides nothing, becomes 1
        shift = std::bit_width(divisor - 1u);
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    }
    friend FLASH_HOST_DEVICE constexpr int operator/(int n, const Divisor& by) {
        return static_cast<int>((uint64_t{2u * n} * by.multiplier >> 32) >> by.shift);
    }
};

struct PowerOfTwo {
    int log2;

    friend FLASH_HOST_DEVICE constexpr int operator/(int n, PowerOfTwo by) { return n >> by.log2; }
};

template <class T>
FLASH_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <class T>
FLASH_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

}  // namespace flash_ext
