#include "kernels/fa3/bias_gradient.cuh"

namespace flash_ext {

template cudaError_t fa3_bias_gradient<32, 32>(const BackwardParams&, const BackwardKernel&,
                                               cudaStream_t);
template cudaError_t fa3_bias_gradient<64, 64>(const BackwardParams&, const BackwardKernel&,
                                               cudaStream_t);
template cudaError_t fa3_bias_gradient<128, 128>(const BackwardParams&, const BackwardKernel&,
                                                 cudaStream_t);

}  // namespace flash_ext
