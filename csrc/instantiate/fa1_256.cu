#include "kernels/fa1/backward.cuh"
#include "kernels/fa1/forward.cuh"

template cudaError_t flash_ext::fa1_forward<256, 256>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<256, 256>();
template cudaError_t flash_ext::fa1_backward<256, 256>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<256, 256>();
