// The words are zeros when the library is loaded, and hold epochs of launches afterwards. So a
// launch needs neither memory of its own for its flag nor a pass that clears it.
#pragma once

#include <cuda_runtime_api.h>

#include "plan/flag_words.h"

namespace flash_ext {

inline constexpr int kFlagWords = 1024;

namespace {
__device__ unsigned long long flag_words[kFlagWords];
}

unsigned long long* flag_word(uint64_t epoch) {
    constexpr int kDevices = 64;
    static unsigned long long* known[kDevices];  // where they are on each device
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    unsigned long long* words =
        device < kDevices ? __atomic_load_n(&known[device], __ATOMIC_ACQUIRE) : nullptr;
    if (words == nullptr) {
        void* address = nullptr;
        if (cudaGetSymbolAddress(&address, flag_words) != cudaSuccess) return nullptr;
        words = static_cast<unsigned long long*>(address);
        if (device < kDevices) __atomic_store_n(&known[device], words, __ATOMIC_RELEASE);
    }
    return words + (epoch >> 24) % kFlagWords;
}

}  // namespace flash_ext
