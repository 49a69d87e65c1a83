#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline int warp_uniform(int x) { return x; }

}  // namespace flash_ext::ptx
