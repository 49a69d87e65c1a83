#include "kernels/fa3/forward_fp8.cuh"

namespace flash_ext {

template cudaError_t fa3_forward_fp8<64, 64>(const ForwardParams&, const ForwardKernel&,
                                             cudaStream_t);
template cudaError_t fa3_forward_fp8<96, 96>(const ForwardParams&, const ForwardKernel&,
                                             cudaStream_t);
template cudaError_t fa3_forward_fp8<128, 128>(const ForwardParams&, const ForwardKernel&,
                                               cudaStream_t);
template cudaError_t fa3_forward_fp8<192, 128>(const ForwardParams&, const ForwardKernel&,
                                               cudaStream_t);
template cudaError_t fa3_forward_fp8<256, 256>(const ForwardParams&, const ForwardKernel&,
                                               cudaStream_t);

}  // namespace flash_ext
