#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template cudaError_t flash_ext::fa3_forward<32, 32>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<32, 32>(flash_ext::ForwardParams, cudaStream_t);

template cudaError_t flash_ext::fa3_forward<64, 64>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<64, 64>(flash_ext::ForwardParams, cudaStream_t);

template cudaError_t flash_ext::fa3_forward<96, 96>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<96, 96>(flash_ext::ForwardParams, cudaStream_t);
