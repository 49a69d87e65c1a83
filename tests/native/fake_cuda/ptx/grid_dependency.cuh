#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void launch_dependents() {}
inline void wait_for_grid_before() {}

}  // namespace flash_ext::ptx
