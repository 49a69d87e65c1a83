// Checks of sequence lengths, which are on the device, where the host cannot see them.
#pragma once

#include <cuda_runtime_api.h>

#include "api/attention.h"
#include "plan/call.h"

namespace flash_ext {

// With FLASH_EXT_DEBUG=1 they are fetched, which waits for the device, and checked.
void debug_seqlens(const Sizes& sizes, const Options& options, cudaStream_t stream);

}  // namespace flash_ext
