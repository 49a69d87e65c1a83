// What csrc/plan/ takes of the CUDA runtime, for tests without one. plan.cpp beside it has the
// GPUs.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorMissingConfiguration = 52 };
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrL2CacheSize,
};
using cudaStream_t = void*;

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
