#include "kernels/fa2/backward.cuh"

template cudaError_t flash_ext::fa2_backward<128, 128>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<128, 128>();
