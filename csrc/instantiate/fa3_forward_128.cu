#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template cudaError_t flash_ext::fa3_forward<128, 128>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<128, 128>(flash_ext::ForwardParams, cudaStream_t);
