#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

namespace flash_ext {

template cudaError_t fa3_forward<192, 128>(const ForwardParams&, const ForwardKernel&,
                                           cudaStream_t);
template cudaError_t fa3_decode<192, 128>(const ForwardParams&, const ForwardKernel&, cudaStream_t);
template cudaError_t fa3_forward<192, 192>(const ForwardParams&, const ForwardKernel&,
                                           cudaStream_t);
template cudaError_t fa3_decode<192, 192>(const ForwardParams&, const ForwardKernel&, cudaStream_t);

}  // namespace flash_ext
