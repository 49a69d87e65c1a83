#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void stmatrix_x4(uint32_t address, const uint32_t (&v)[4]) {
    device::store_matrices(address, v, false);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&v)[4]) {
    device::store_matrices(address, v, true);
}

}  // namespace flash_ext::ptx
