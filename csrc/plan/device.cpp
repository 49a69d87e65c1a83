#include "plan/device.h"

#include <cuda_runtime_api.h>

#include <vector>

namespace flash_ext {
namespace {

// The driver is asked once, for all devices.
const std::vector<Device>& devices() {
    static const std::vector<Device> devices = [] {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
        std::vector<Device> all(count);
        for (int i = 0; i < count; ++i) {
            cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i);
            cudaDeviceGetAttribute(&all[i].minor, cudaDevAttrComputeCapabilityMinor, i);
            cudaDeviceGetAttribute(&all[i].shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   i);
            cudaDeviceGetAttribute(&all[i].multiprocessors, cudaDevAttrMultiProcessorCount, i);
        }
        cudaGetLastError();  // clears an error, which the next launch would otherwise report
        return all;
    }();
    return devices;
}

}  // namespace

const Device* find_device(int index) {
    const bool seen = index >= 0 && index < static_cast<int>(devices().size());
    return seen ? &devices()[index] : nullptr;
}

const Device& current_device() {
    static const Device kNone;
    int index = -1;
    cudaGetDevice(&index);
    const Device* device = find_device(index);
    return device != nullptr ? *device : kNone;
}

}  // namespace flash_ext
