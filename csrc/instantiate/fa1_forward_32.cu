#include "kernels/fa1/forward.cuh"

template cudaError_t flash_ext::fa1_forward<32, 32>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<32, 32>();
