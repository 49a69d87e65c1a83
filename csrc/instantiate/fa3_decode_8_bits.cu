#include "kernels/fa3/decode.cuh"

namespace flash_ext {

template cudaError_t fa3_decode_8_bits<64, 64>(const ForwardParams&, const ForwardKernel&,
                                               cudaStream_t);
template cudaError_t fa3_decode_8_bits<128, 128>(const ForwardParams&, const ForwardKernel&,
                                                 cudaStream_t);
template cudaError_t fa3_decode_8_bits<256, 256>(const ForwardParams&, const ForwardKernel&,
                                                 cudaStream_t);

}  // namespace flash_ext
