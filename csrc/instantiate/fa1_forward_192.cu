#include "kernels/fa1/forward.cuh"

template cudaError_t flash_ext::fa1_forward<192, 192>(flash_ext::ForwardParams, cudaStream_t);
template int flash_ext::fa1_forward_shared_bytes<192, 192>();
