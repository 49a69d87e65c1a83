// Tells the compiler that a value is the same in all lanes.
#pragma once

#include "ptx/device.h"

namespace flash_ext::ptx {

// A warp reduction leaves its result in a uniform register. So a value that was loaded from memory
// but is equal in all lanes takes no vector register after this.
FLASH_DEVICE int warp_uniform(int x) { return __reduce_max_sync(0xffffffff, x); }

}  // namespace flash_ext::ptx
