#include "kernels/short/backward.cuh"
#include "kernels/short/forward.cuh"

namespace flash_ext {

template cudaError_t short_forward<32, 32>(const ForwardParams&, const ForwardKernel&,
                                           cudaStream_t);
template cudaError_t short_backward<32, 32>(const BackwardParams&, const BackwardKernel&,
                                            cudaStream_t);
template cudaError_t short_forward<64, 64>(const ForwardParams&, const ForwardKernel&,
                                           cudaStream_t);
template cudaError_t short_backward<64, 64>(const BackwardParams&, const BackwardKernel&,
                                            cudaStream_t);

}  // namespace flash_ext
