#include "kernels/fa3/backward.cuh"

template cudaError_t flash_ext::fa3_backward<96, 96>(flash_ext::BackwardParams, cudaStream_t);
