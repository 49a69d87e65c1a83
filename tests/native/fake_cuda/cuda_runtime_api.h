// What csrc/ takes of the CUDA runtime's host side, for tests without one. Who includes it has the
// GPUs.
#pragma once

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMissingConfiguration = 52,
    cudaErrorNotSupported = 801
};
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
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
