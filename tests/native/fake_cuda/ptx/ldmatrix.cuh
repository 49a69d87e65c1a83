#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <bool kTranspose>
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    device::load_matrices(r, address, kTranspose);
}

}  // namespace flash_ext::ptx
