#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template cudaError_t flash_ext::fa2_forward<32, 32>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<32, 32>();
template cudaError_t flash_ext::fa2_backward<32, 32>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<32, 32>();

template cudaError_t flash_ext::fa2_forward<64, 64>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<64, 64>();
template cudaError_t flash_ext::fa2_backward<64, 64>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<64, 64>();

template cudaError_t flash_ext::fa2_forward<96, 96>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<96, 96>();
template cudaError_t flash_ext::fa2_backward<96, 96>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<96, 96>();
