#include "kernels/fa3/backward_wide.cuh"

namespace flash_ext {

template cudaError_t fa3_backward_wide<192, 128>(const BackwardParams&, const BackwardKernel&,
                                                 cudaStream_t);
template cudaError_t fa3_backward_wide<192, 192>(const BackwardParams&, const BackwardKernel&,
                                                 cudaStream_t);
template cudaError_t fa3_backward_wide<256, 256>(const BackwardParams&, const BackwardKernel&,
                                                 cudaStream_t);

}  // namespace flash_ext
