#include "kernels/fa1/backward.cuh"

template cudaError_t flash_ext::fa1_backward<32, 32>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<32, 32>();
