#include "kernels/fa3/forward_fp8.cuh"

template cudaError_t flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 192, 128>(
    flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 192, 128>(
    flash_ext::ForwardParams, cudaStream_t);

template cudaError_t flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 256, 256>(
    flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 256, 256>(
    flash_ext::ForwardParams, cudaStream_t);
