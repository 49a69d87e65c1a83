// A run-time value becomes a compile-time constant: dispatch<64, 96, 128>(n, [](auto dim) { ... })
// calls the function with std::integral_constant<int, 64> and so on.
#pragma once

#include <type_traits>

namespace flash_ext {

// False when the value is none of the list.
template <auto... kValues, class T, class Function>
bool dispatch(T value, Function&& function) {
    return ((value == kValues ? (function(std::integral_constant<T, kValues>{}), true) : false) ||
            ...);
}

}  // namespace flash_ext
