// The launchers, one per kernel, instantiated per head dim in csrc/instantiate. Each fills in the
// schedule, picks element type and features, and launches on the stream without waiting.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace flash_ext {

template <int kHeadDim>
cudaError_t fa1_forward(ForwardParams params, cudaStream_t stream);
template <int kHeadDim>
cudaError_t fa2_forward(ForwardParams params, cudaStream_t stream);
template <int kHeadDim>
cudaError_t fa1_backward(BackwardParams params, cudaStream_t stream);
template <int kHeadDim>
cudaError_t fa2_backward(BackwardParams params, cudaStream_t stream);

}  // namespace flash_ext
