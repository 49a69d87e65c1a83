// Epochs of launches, for words in global memory that need no initialization, and so no launch of
// their own before the kernel. A word that holds other data matches an epoch with probability
// 2^-40.
#pragma once

#include <cstdint>

namespace flash_ext {

// The upper 40 bits; the lower 24 are 0. The replays of a CUDA graph have the same epoch.
inline uint64_t launch_epoch() {
    static uint64_t launches = 0;
    const uint64_t number = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    // The factor is odd: different launches have different epochs.
    return number * 0x9e3779b97f4a7c15 << 24;
}

}  // namespace flash_ext
