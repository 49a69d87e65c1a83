#include "kernels/fa3/decode.cuh"

template cudaError_t flash_ext::fa3_decode<256, 256>(flash_ext::ForwardParams, cudaStream_t);
