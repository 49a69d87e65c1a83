// stmatrix: a warp's 8x8 blocks of 16-bit elements from fragments to shared memory, the inverse of
// ldmatrix. PTX ISA, "Warp-level matrix store instruction: stmatrix". sm_90.
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// Four 8x8 blocks; the rows of block i are at the addresses of lanes 8 i .. 8 i + 7.
FLASH_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// The same, each block transposed.
FLASH_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&v)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
        : "memory");
}

}  // namespace flash_ext::ptx
