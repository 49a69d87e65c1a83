#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void stmatrix_x4(uint32_t address, const uint32_t (&)[4]) {
    note(Event::kWrite, address, 16);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&)[4]) {
    note(Event::kWrite, address, 16);
}

}  // namespace flash_ext::ptx
