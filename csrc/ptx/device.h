// How functions of kernels are declared, and those that the host tests in tests/native also
// compile.
#pragma once

#define FLASH_DEVICE __device__ __forceinline__

#ifdef __CUDACC__
#define FLASH_HOST_DEVICE __host__ FLASH_DEVICE
#else
#define FLASH_HOST_DEVICE inline
#endif
