#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <bool kTranspose>
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    note(Event::kRead, address, 16);
    for (uint32_t& x : r) x = 0;
}

}  // namespace flash_ext::ptx
