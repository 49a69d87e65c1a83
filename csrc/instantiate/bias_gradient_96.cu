#include "../kernels/bias_gradient.cuh"

template cudaError_t flash_ext::bias_gradient<96, 96>(flash_ext::BackwardParams, cudaStream_t);
