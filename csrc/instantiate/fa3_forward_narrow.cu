#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

namespace flash_ext {

template cudaError_t fa3_forward<32, 32>(const ForwardParams&, const ForwardKernel&, cudaStream_t);
template cudaError_t fa3_decode<32, 32>(const ForwardParams&, const ForwardKernel&, cudaStream_t);
template cudaError_t fa3_forward<96, 96>(const ForwardParams&, const ForwardKernel&, cudaStream_t);
template cudaError_t fa3_decode<96, 96>(const ForwardParams&, const ForwardKernel&, cudaStream_t);

}  // namespace flash_ext
