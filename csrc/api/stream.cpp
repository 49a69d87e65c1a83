// Where kernels are launched.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "api/check.h"
#include "plan/dispatch.h"

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

void check_launch(cudaError_t status, const std::string& call) {
    if (status == kNoKernel) fail("there is no kernel for ", call);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
        fail("the CUDA kernels were compiled for " FLASH_EXT_TARGETS
             ", which this GPU does not run: compile them on its machine, or set "
             "FLASH_EXT_CUDA_ARCHS to its target ('90a' for Hopper, '80+PTX' for others)");
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

}  // namespace flash_ext
