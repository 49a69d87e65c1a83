// Words of global memory for Flags.
#pragma once

#include <cstdint>

namespace flash_ext {

// The word of the launch with that name, on the current device; null if there is none. Of 1,024
// launches that follow one another, each has its own.
unsigned long long* flag_word(uint64_t epoch);

}  // namespace flash_ext
