// The launchers of the kernels that quantize to FP8.
#pragma once

#include <cuda_runtime_api.h>

#include "problem/quantize.h"

namespace flash_ext {

// Rows of x that a CTA reduces column by column.
inline constexpr int kColumnRows = 512;

// x_8bit and descale. Block scales take one pass over memory, others a first one for the maxima.
cudaError_t quantize(QuantizeParams params, cudaStream_t stream);

// mean_out: the mean over the rows in use of each sequence, 0 where it has none.
cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream);

}  // namespace flash_ext
