#include "api/stream.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "api/check.h"

// Weak: a CPU-only libtorch lacks it, and there this library must load too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_ext {

cudaStream_t current_stream(const Tensor& x) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream == nullptr ||
        aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream) != 0)
        fail("this torch has no CUDA stream to launch on");
    return static_cast<cudaStream_t>(stream);
}

void check_launch(cudaError_t status) {
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

}  // namespace flash_ext
