#include "../kernels/bias_gradient.cuh"

template cudaError_t flash_ext::bias_gradient<192, 192>(flash_ext::BackwardParams, cudaStream_t);
