// Words of global memory for Flags.
#pragma once

#include <cstdint>

namespace flash_ext {

// The word of the launch with this epoch, on the current device; null if there is none. 1,024
// consecutive launches have different words.
unsigned long long* flag_word(uint64_t epoch);

}  // namespace flash_ext
