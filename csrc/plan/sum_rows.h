// The launcher of the kernel that adds up rows, or attention over some keys each.
#pragma once

#include <cuda_runtime_api.h>

#include "problem/sum_rows.h"

namespace flash_ext {

cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream);

}  // namespace flash_ext
