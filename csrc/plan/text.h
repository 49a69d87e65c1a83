// Messages, without streams: a stream needs the locale of the C++ runtime that it was compiled for,
// and a process may have loaded another one first.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace flash_ext {

inline std::string part_of_text(std::string_view part) { return std::string(part); }
inline std::string part_of_text(std::integral auto number) { return std::to_string(number); }

template <class... Parts>
std::string text(const Parts&... parts) {
    return (std::string() + ... + part_of_text(parts));
}

}  // namespace flash_ext
