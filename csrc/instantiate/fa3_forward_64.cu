#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

namespace flash_ext {

template cudaError_t fa3_forward<64, 64>(const ForwardParams&, const ForwardKernel&, cudaStream_t);
template cudaError_t fa3_decode<64, 64>(const ForwardParams&, const ForwardKernel&, cudaStream_t);

}  // namespace flash_ext
