#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

}  // namespace flash_ext::ptx
