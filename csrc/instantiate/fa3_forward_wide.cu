#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template cudaError_t flash_ext::fa3_forward<192, 128>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<192, 128>(flash_ext::ForwardParams, cudaStream_t);

template cudaError_t flash_ext::fa3_forward<192, 192>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<192, 192>(flash_ext::ForwardParams, cudaStream_t);

template cudaError_t flash_ext::fa3_forward<256, 256>(flash_ext::ForwardParams, cudaStream_t);
template cudaError_t flash_ext::fa3_decode<256, 256>(flash_ext::ForwardParams, cudaStream_t);
