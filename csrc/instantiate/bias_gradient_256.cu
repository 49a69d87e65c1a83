#include "../kernels/bias_gradient.cuh"

template cudaError_t flash_ext::bias_gradient<256, 256>(flash_ext::BackwardParams, cudaStream_t);
