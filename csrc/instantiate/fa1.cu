#include "kernels/fa1/backward.cuh"
#include "kernels/fa1/forward.cuh"

template cudaError_t flash_ext::fa1_forward<64, 64>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<64, 64>();
template cudaError_t flash_ext::fa1_backward<64, 64>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<64, 64>();

template cudaError_t flash_ext::fa1_forward<128, 128>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<128, 128>();
template cudaError_t flash_ext::fa1_backward<128, 128>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<128, 128>();

template cudaError_t flash_ext::fa1_forward<256, 256>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<256, 256>();
template cudaError_t flash_ext::fa1_backward<256, 256>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa1_backward_shared_bytes<256, 256>();
