// Arithmetic of layouts, masks and schedules, for kernels and for the host.
#pragma once

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

template <class T>
FLASH_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <class T>
FLASH_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

}  // namespace flash_ext
