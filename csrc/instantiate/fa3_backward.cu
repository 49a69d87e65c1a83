#include "kernels/fa3/backward.cuh"

namespace flash_ext {

template cudaError_t fa3_backward<32, 32>(const BackwardParams&, const BackwardKernel&,
                                          cudaStream_t);
template cudaError_t fa3_backward<64, 64>(const BackwardParams&, const BackwardKernel&,
                                          cudaStream_t);
template cudaError_t fa3_backward<96, 96>(const BackwardParams&, const BackwardKernel&,
                                          cudaStream_t);
template cudaError_t fa3_backward<128, 128>(const BackwardParams&, const BackwardKernel&,
                                            cudaStream_t);

}  // namespace flash_ext
