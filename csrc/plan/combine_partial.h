// The launcher of the kernel that adds attention over some keys to the results so far.
#pragma once

#include <cuda_runtime_api.h>

#include "problem/combine_partial.h"

namespace flash_ext {

cudaError_t combine_partial(const CombinePartialParams& params, cudaStream_t stream);

}  // namespace flash_ext
