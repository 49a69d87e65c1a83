// From accepted arguments to plans and launches, and the errors of both.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "api/accept.h"
#include "plan/call.h"

// Weak: a CPU-only libtorch lacks it, and there this library must load too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_ext {

// Of one value, (B, Hk), or (B, H, blocks or channels), where H is Hq for q's blocks.
inline Descale descale_of(const std::optional<Tensor>& tensor, bool of_queries) {
    Descale descale;
    if (!tensor || tensor->numel() == 0) return descale;
    descale.data = static_cast<const float*>(tensor->data_ptr());
    if (tensor->dim() < 2) return descale;
    descale.batch_stride = tensor->stride(0);
    descale.head_stride = tensor->stride(1);
    if (tensor->dim() < 3) return descale;
    descale.last_stride = tensor->stride(2);
    descale.last_block = static_cast<int>(tensor->size(2)) - 1;
    descale.by_query_head = of_queries;
    return descale;
}

inline ElementType element_type(ScalarType dtype) {
    if (dtype == ScalarType::Float8_e4m3fn) return ElementType::kFloat8;
    if (dtype == ScalarType::Char) return ElementType::kInt8;
    return dtype == ScalarType::Half ? ElementType::kFloat16 : ElementType::kBFloat16;
}

// The address of a tensor. One without elements has none, but null stands for no tensor.
template <class T>
const T* address_of(const Tensor& tensor) {
    alignas(16) static constexpr char kNoElements[16] = {};
    return reinterpret_cast<const T*>(tensor.numel() > 0 ? tensor.data_ptr() : kNoElements);
}

// A tensor as plans see it.
inline Operand operand(const char* name, const Tensor& tensor) {
    Operand x{.name = name,
              .data = tensor.data_ptr(),
              .sizes = {1, 1, 1, 1},
              .strides = {0, 0, 0, 0},
              .element_bytes = static_cast<int>(tensor.element_size())};
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const size_t first = 4 - sizes.size();  // varlen sequences have no dimension of batches
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
        x.sizes[first + dim] = sizes[dim];
        x.strides[first + dim] = sizes[dim] == 1 ? 0 : strides[dim];
    }
    return x;
}

// v, whose rows are channels if it is V^T.
inline Operand operand_of_v(const Tensor& v, bool transposed) {
    Operand x = operand("v", v);
    if (!transposed) return x;
    std::swap(x.sizes[1], x.sizes[2]);
    std::swap(x.strides[1], x.strides[2]);
    if (v.numel() == 0) std::ranges::fill(x.strides, 16);  // torch's are 1, but there are no rows
    return x;
}

template <class T>
const T* data_of(const std::optional<Tensor>& tensor) {
    return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

inline const GpuModel& device_of(const Tensor& q) {
    const GpuModel* device = find_device(q.get_device_index());
    if (device == nullptr) fail("the CUDA runtime does not see device ", q.get_device_index());
    return *device;
}

inline void check_architecture(const Tensor& q) {
    const GpuModel& device = device_of(q);
    if (device.major < 8)
        fail("the GPU must be of compute capability 8.0 or newer, got ", device.major, ".",
             device.minor);
}

// launch(stream), on torch's current stream of x's device. Throws its error.
template <class Launch>
void launch_on_stream_of(const Tensor& x, Launch launch) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream == nullptr ||
        aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream) != 0)
        fail("this torch has no CUDA stream to launch on");
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaError_t status = launch(static_cast<cudaStream_t>(stream));
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
        fail("the CUDA kernels were compiled for " FLASH_EXT_TARGETS
             ", which this GPU does not run: compile them on its machine, or set "
             "FLASH_EXT_CUDA_ARCHS to its target ('90a' for Hopper, '80+PTX' for others)");
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

}  // namespace flash_ext
