// Where kernels are launched.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

namespace flash_ext {

using torch::stable::Tensor;

// torch's current stream of x's device.
cudaStream_t current_stream(const Tensor& x);

// Throws what the launch reports. `call` is what there may be no kernel for.
void check_launch(cudaError_t status, const std::string& call);

}  // namespace flash_ext
