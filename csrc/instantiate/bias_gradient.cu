#define FLASH_EXT_SHARED_PTX  // all targets have the same code
#include "kernels/common/bias_gradient.cuh"
