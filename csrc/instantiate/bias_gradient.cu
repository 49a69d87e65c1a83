#include "kernels/common/bias_gradient.cuh"

template cudaError_t flash_ext::bias_gradient<64, 64>(flash_ext::BackwardParams, cudaStream_t);
template cudaError_t flash_ext::bias_gradient<96, 96>(flash_ext::BackwardParams, cudaStream_t);
template cudaError_t flash_ext::bias_gradient<128, 128>(flash_ext::BackwardParams, cudaStream_t);
template cudaError_t flash_ext::bias_gradient<192, 128>(flash_ext::BackwardParams, cudaStream_t);
template cudaError_t flash_ext::bias_gradient<192, 192>(flash_ext::BackwardParams, cudaStream_t);
template cudaError_t flash_ext::bias_gradient<256, 256>(flash_ext::BackwardParams, cudaStream_t);
