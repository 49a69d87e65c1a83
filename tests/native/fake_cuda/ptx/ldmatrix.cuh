#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <bool kTranspose>
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    device::load_matrices(r, address, kTranspose);
}
// A lane's two elements of the transposed matrix are in two others.
inline uint32_t movmatrix_transposed(uint32_t x) {
    const int lane = threadIdx.x % 32, row = lane / 4, col = lane % 4 * 2;
    const int half = row % 2 * 16;
    const uint32_t first = __shfl_sync(~0u, x, col * 4 + row / 2);
    const uint32_t second = __shfl_sync(~0u, x, (col + 1) * 4 + row / 2);
    return (first >> half & 0xffff) | (second >> half) << 16;
}

}  // namespace flash_ext::ptx
