#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <class Element>
void mma_m16n8k16(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}

}  // namespace flash_ext::ptx
