// Names of launches, for words in global memory that need no initialisation, and so no launch of
// their own before the kernel: other memory holds the same name by chance once in 2^40 launches.
#pragma once

#include <cstdint>

namespace flash_ext {

// The upper 40 bits; the lower 24 are 0. A CUDA graph's replays have the same name.
inline uint64_t launch_epoch() {
    static uint64_t launches = 0;
    const uint64_t number = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    // The factor is odd: different launches have different names.
    return number * 0x9e3779b97f4a7c15 << 24;
}

}  // namespace flash_ext
