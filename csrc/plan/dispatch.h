// A run-time value becomes a compile-time constant: dispatch<64, 96, 128>(n, [](auto dim) { ... })
// calls the function with std::integral_constant<int, 64> and so on.
#pragma once

#include <type_traits>

#include "tile/host_device.h"

namespace flash_ext {

// False when the value is none of the list.
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

}  // namespace flash_ext
