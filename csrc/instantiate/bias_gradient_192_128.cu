#include "../kernels/bias_gradient.cuh"

template cudaError_t flash_ext::bias_gradient<192, 128>(flash_ext::BackwardParams, cudaStream_t);
