#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline int not_hoisted(int x) { return x; }
inline uint32_t lane_not_hoisted() { return threadIdx.x % 32; }

}  // namespace flash_ext::ptx
