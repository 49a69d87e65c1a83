// A run-time value becomes a compile-time constant: dispatch<64, 96, 128>(n, [](auto dim) { ... })
// calls the function with std::integral_constant<int, 64> and so on.
#pragma once

#include <type_traits>

#include "plan/head_dims.h"
#include "tile/host_device.h"

namespace flash_ext {

// False if the value is not in the list.
template <auto... kValues, class T, class Function>
bool dispatch(T value, Function&& function) {
    return ((value == kValues ? (function(std::integral_constant<T, kValues>{}), true) : false) ||
            ...);
}

// function(std::integral_constant<int, i>) for i = 0 .. kCount - 1.
template <int kCount, int kFirst = 0, class Function>
FLASH_HOST_DEVICE void compile_time_for(Function&& function) {
    if constexpr (kFirst < kCount) {
        function(std::integral_constant<int, kFirst>{});
        compile_time_for<kCount, kFirst + 1>(function);
    }
}

// function(constants qk and v) of one of kHeadDims.
template <int kIndex = 0, class Function>
auto dispatch_head_dims(HeadDims dims, Function&& function) {
    constexpr HeadDims kDims = kHeadDims[kIndex];
    if constexpr (kIndex + 1 < kHeadDimPairs)
        if (dims != kDims) return dispatch_head_dims<kIndex + 1>(dims, function);
    return function(std::integral_constant<int, kDims.qk>{},
                    std::integral_constant<int, kDims.v>{});
}

}  // namespace flash_ext
