#include "kernels/fa3/backward_wide.cuh"

template <>
cudaError_t flash_ext::fa3_backward<256, 256>(BackwardParams params, cudaStream_t stream) {
    return fa3_backward_wide<256, 256>(params, stream);
}
