// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to the warp's registers.
// movmatrix: transposes one in registers. PTX ISA, "Warp-level matrix load instruction: ldmatrix",
// "Warp-level matrix transpose instruction: movmatrix".
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

template <bool kTranspose>
FLASH_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    if constexpr (kTranspose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

FLASH_DEVICE uint32_t movmatrix_transposed(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

}  // namespace flash_ext::ptx
