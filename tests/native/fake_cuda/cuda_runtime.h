// What csrc's device code takes of CUDA C++, so that a plain C++ compiler compiles kernels and
// tests call them on the host: one thread at a time, threads of a warp too. Of a warp vote or a
// shuffle each thread gets its own value, or with launches.h all lanes' values. ptx/ beside this
// file has the instructions, each as the event that device.h notes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "device.h"

using std::max, std::min;

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
inline __attribute__((always_inline)) float2 make_float2(float x, float y) { return {x, y}; }
inline __attribute__((always_inline)) float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

template <class To, class From>
To bits_as(From from) {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
// Numbers of 16 bits: no test looks at them.
inline float __half2float(__half x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) {
    return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
inline __half __float2half_rn(float x) { return {static_cast<uint16_t>(x)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    return {static_cast<uint16_t>(__float_as_uint(x) >> 16)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __fmul_ru(float x, float y) { return x * y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rz(float x, float y, float z) { return x * y + z; }
inline float __fmaf_rn(float x, float y, float z) { return x * y + z; }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }

template <class T>
T __ldg(const T* p) {
    return *p;
}
// Where such loads have been.
namespace device {
inline uintptr_t lowest_load = UINTPTR_MAX, highest_load = 0;
}
template <class T>
T __ldcs(const T* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    device::lowest_load = min(device::lowest_load, address);
    device::highest_load = max(device::highest_load, address + sizeof(T));
    return *p;
}
// What all threads of the CTA have given to the same call; null where each gets its own value.
namespace device {
inline const int64_t* (*exchange)(int64_t x) = nullptr;

// combine(so far, a lane's value), over the lanes of the thread's warp.
template <class T, class Combine>
T over_warp(T x, T start, Combine combine) {
    if (exchange == nullptr) return combine(start, x, threadIdx.x % 32);
    const int64_t* values = exchange(x) + threadIdx.x / 32 * 32;
    for (int lane = 0; lane < 32; ++lane)
        start = combine(start, static_cast<T>(values[lane]), lane);
    return start;
}
}  // namespace device

// What lane `lane` has given to the same call; without it a lane gets its own number.
namespace device {
inline int64_t (*shuffle)(int64_t x, int lane) = nullptr;
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int mask, int = 32) {
    if constexpr (std::is_integral_v<T>) {
        if (device::shuffle != nullptr)
            return static_cast<T>(device::shuffle(x, threadIdx.x % 32 ^ mask));
        if (device::exchange != nullptr)
            return static_cast<T>(device::exchange(x)[threadIdx.x ^ mask]);
    }
    return x;
}
template <class T>
T __shfl_sync(uint32_t, T x, int lane, int = 32) {
    if constexpr (std::is_integral_v<T>) {
        if (device::shuffle != nullptr) return static_cast<T>(device::shuffle(x, lane));
        if (device::exchange != nullptr)
            return static_cast<T>(device::exchange(x)[threadIdx.x / 32 * 32 + lane]);
    }
    return x;
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int distance, int = 32) {
    if constexpr (std::is_integral_v<T>) {
        const int before = static_cast<int>(threadIdx.x % 32) < distance ? 0 : distance;
        if (device::exchange != nullptr)
            return static_cast<T>(device::exchange(x)[threadIdx.x - before]);
    }
    return x;
}
inline bool __any_sync(uint32_t, bool x) { return x; }
inline uint32_t __ballot_sync(uint32_t, bool x) {
    if (device::exchange == nullptr) return x ? 0xffffffff : 0;
    return device::over_warp<uint32_t>(
        x, 0, [](uint32_t found, uint32_t y, int lane) { return found | y << lane; });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t x) { return x; }
inline int __reduce_max_sync(uint32_t, int x) {
    return device::over_warp(x, INT32_MIN, [](int a, int b, int) { return max(a, b); });
}
inline int __reduce_min_sync(uint32_t, int x) {
    return device::over_warp(x, INT32_MAX, [](int a, int b, int) { return min(a, b); });
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> shift % 32);
}

template <class T>
T atomicAdd(T* p, T x) {
    const T before = *p;
    *p += x;
    return before;
}
template <class T>
T atomicExch(T* p, T x) {
    const T before = *p;
    *p = x;
    return before;
}
template <class T>
T atomicCAS(T* p, T expected, T x) {
    const T before = *p;
    if (before == expected) *p = x;
    return before;
}

[[noreturn]] inline void __trap() { std::abort(); }
inline void __nanosleep(unsigned) {}
inline void __threadfence() {}
void __syncwarp();
void __syncthreads();
inline int __syncthreads_or(int x) {
    if (device::exchange == nullptr) {
        __syncthreads();
        return x;
    }
    const int64_t* values = device::exchange(x);
    return std::any_of(values, values + blockDim.x, [](int64_t y) { return y != 0; });
}
inline int __syncthreads_and(int x) { return !__syncthreads_or(!x); }

// Launches: device.h keeps the kernel with its arguments.
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
        dim3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
    return cudaSuccess;
}

template <class... Expected, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...),
                               Arguments... arguments) {
    device::launch(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes,
                   [=] { kernel(arguments...); });
    return cudaSuccess;
}
