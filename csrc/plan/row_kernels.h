// The launchers of the kernels beside attention: they read tensors row by row.
#pragma once

#include <cuda_runtime_api.h>

#include "plan/device.h"
#include "problem/quantize.h"
#include "problem/sum_rows.h"

namespace flash_ext {

// x_8bit and descale. Block scales take one pass over memory, others a first one for the maxima.
cudaError_t quantize(QuantizeParams params, const GpuModel& gpu, cudaStream_t stream);

// Rows of x that a CTA reduces column by column.
inline constexpr int kColumnRows = 512;

// mean_out: the mean over the rows in use of each sequence, 0 where it has none.
cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream);

// Adds up rows, or attention over some keys each.
cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream);

}  // namespace flash_ext
