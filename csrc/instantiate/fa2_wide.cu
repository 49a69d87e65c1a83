#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template cudaError_t flash_ext::fa2_forward<192, 128>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<192, 128>();
template cudaError_t flash_ext::fa2_backward<192, 128>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<192, 128>();

template cudaError_t flash_ext::fa2_forward<192, 192>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<192, 192>();
template cudaError_t flash_ext::fa2_backward<192, 192>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<192, 192>();

template cudaError_t flash_ext::fa2_forward<256, 256>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa2_forward_shared_bytes<256, 256>();
template cudaError_t flash_ext::fa2_backward<256, 256>(flash_ext::BackwardParams, cudaStream_t);
template int flash_ext::fa2_backward_shared_bytes<256, 256>();
