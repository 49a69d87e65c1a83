#include "plan/device.h"

#include <cuda_runtime_api.h>

#include <vector>

namespace flash_ext {

const GpuModel* find_device(int index) {
    // The driver is asked once, for all devices.
    static const std::vector<GpuModel> devices = [] {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
        std::vector<GpuModel> all;
        for (int i = 0; i < count; ++i) {
            const auto ask = [&](cudaDeviceAttr attribute) {
                int value = 0;
                cudaDeviceGetAttribute(&value, attribute, i);
                return value;
            };
            all.push_back(gpu_model(
                ask(cudaDevAttrComputeCapabilityMajor), ask(cudaDevAttrComputeCapabilityMinor),
                ask(cudaDevAttrMaxSharedMemoryPerBlockOptin), ask(cudaDevAttrMultiProcessorCount),
                ask(cudaDevAttrL2CacheSize)));
        }
        cudaGetLastError();  // clears an error, which the next launch would otherwise report
        return all;
    }();
    return index >= 0 && index < static_cast<int>(devices.size()) ? &devices[index] : nullptr;
}

}  // namespace flash_ext
