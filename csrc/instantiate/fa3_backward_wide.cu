#include "kernels/fa3/backward_wide.cuh"

template cudaError_t flash_ext::fa3_backward_wide<192, 128>(flash_ext::BackwardParams,
                                                            cudaStream_t);

template cudaError_t flash_ext::fa3_backward_wide<192, 192>(flash_ext::BackwardParams,
                                                            cudaStream_t);

template cudaError_t flash_ext::fa3_backward_wide<256, 256>(flash_ext::BackwardParams,
                                                            cudaStream_t);
