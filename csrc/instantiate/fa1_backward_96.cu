#include "kernels/fa1/backward.cuh"

template cudaError_t flash_ext::fa1_backward<96, 96>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<96, 96>();
