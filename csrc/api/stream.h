// Where kernels are launched.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

namespace flash_ext {

using torch::stable::Tensor;

// torch's current stream of x's device.
cudaStream_t current_stream(const Tensor& x);

// Throws what the launch reports.
void check_launch(cudaError_t status);

}  // namespace flash_ext
