// The maximum of magnitudes, two elements of 16 bits at a time. It is exact: a maximum is one of
// the elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/math.cuh"

namespace flash_ext {

// NaNs are ignored, unless kNaN: then it is NaN where an element is. Infinite where one is.
template <class Element, bool kNaN = false>
struct PackedMax {
    using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
    uint32_t bits = 0;

    __device__ void include(uint32_t word) {
        const Pair size = __habs2(pair(word));
        const Pair largest = kNaN ? __hmax2_nan(pair(bits), size) : __hmax2(pair(bits), size);
        bits = *reinterpret_cast<const uint32_t*>(&largest);
    }
    // Of the low and of the high elements.
    __device__ float2 values() const { return ptx::unpack<Element>(bits); }
    __device__ float value() const {
        const float2 both = values();
        return kNaN ? ptx::max_nan(both.x, both.y) : fmaxf(both.x, both.y);
    }

 private:
    static __device__ Pair pair(uint32_t word) { return *reinterpret_cast<const Pair*>(&word); }
};

}  // namespace flash_ext
