// A hint to the compiler rather than an instruction.
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// Returns x. What depends on it is computed where it is used: otherwise the compiler moves it out
// of the loop and keeps the results in registers that the matmuls need. An unsigned x stays
// unsigned: signed quotients and remainders cost several instructions more.
template <class Integer>
FLASH_DEVICE Integer not_hoisted(Integer x) {
    static_assert(sizeof(x) == 4);
    asm volatile("" : "+r"(x));
    return x;
}

// This thread's lane, read again from its special register.
FLASH_DEVICE uint32_t lane_not_hoisted() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

}  // namespace flash_ext::ptx
