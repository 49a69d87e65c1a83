#include "kernels/fa3/backward.cuh"

template cudaError_t flash_ext::fa3_backward<128, 128>(flash_ext::BackwardParams, cudaStream_t);
