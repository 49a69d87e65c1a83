// What all launchers share: dispatch by element type and options, dynamic shared memory, the
// launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "plan/device.h"
#include "plan/dispatch.h"
#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

// Calls function(element tag), of 16 bits.
template <class Function>
cudaError_t dispatch_element(ElementType type, Function function) {
    if (type == ElementType::kFloat16) return function(__half{});
    return type == ElementType::kBFloat16 ? function(__nv_bfloat16{}) : kNoKernel;
}

// Calls launch(element tag, constant set of options) for the set that the plan has chosen.
template <OptionSets kSets, class Kernel, class Launch>
cudaError_t dispatch_kernel(const AttentionParams& params, const Kernel& kernel, Launch launch) {
    return dispatch_options<kSets>(kernel.options, [&](auto options) {
        return dispatch_element(params.element_type,
                                [&](auto element) { return launch(element, options); });
    });
}

// The largest of value(constant set of options) over these sets.
template <OptionSets kSets, class Value>
constexpr int largest_of(Value value) {
    int largest = 0;
    compile_time_for<kSets.count>([&](auto i) {
        using Options = std::integral_constant<OptionSet, kSets.sets[i]>;
        largest = max_of(largest, value(Options{}));
    });
    return largest;
}

// Does a config need more shared memory than the A100 has? Only Hopper GPUs run it.
template <class Config>
inline constexpr bool kNeedsHopper = Config::kSharedBytes > 163 * 1024;

// Can this kernel run on the GPU for which it is compiled? sm_90 always has the shared memory of
// the larger config. Kernels test this, so that a build does not compile code that never runs.
template <class Config>
__device__ constexpr bool may_run() {
    return kCudaArch == 900 ? !Config::kForLessMemory : !kNeedsHopper<Config>;
}

#ifdef FLASH_EXT_SM90
inline constexpr bool kHasHopperCode = true;
#else
inline constexpr bool kHasHopperCode = false;  // a Hopper GPU runs code of a smaller target
#endif

// Calls launch(std::type_identity) with the larger of two configs of a kernel that fits the GPU.
template <class Large, class Small, class Launch>
cudaError_t launch_fitting(const GpuModel& gpu, Launch launch) {
    const bool fits = Large::kSharedBytes <= gpu.shared_bytes &&
                      ((kHasHopperCode && gpu.major == 9) || !kNeedsHopper<Large>);
    return fits ? launch(std::type_identity<Large>{}) : launch(std::type_identity<Small>{});
}

// Lets a kernel have more than 48 KB of shared memory, once per device.
template <auto kKernel>
cudaError_t allow_shared_bytes(int bytes) {
    static uint64_t devices_done = 0;  // no <atomic>: files compile faster
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (status == cudaSuccess && (__atomic_load_n(&devices_done, __ATOMIC_ACQUIRE) & bit) == 0) {
        status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (status == cudaSuccess) __atomic_fetch_or(&devices_done, bit, __ATOMIC_RELEASE);
    }
    if (status != cudaSuccess) cudaGetLastError();  // clears it: the next launch would report it
    return status;
}

struct LaunchOptions {
    // Programmatic dependent launch: the kernel may begin before the previous one has ended
    // (ptx/grid_dependency.cuh). It must then be compiled for sm_90 or later, since other code does
    // not wait.
    bool pdl = false;
    int cluster = 1;            // its CTAs (sm_90), which divide those of the grid
    int most_shared_bytes = 0;  // of any launch of the kernel, where they differ
};

// An empty grid is skipped, which is no error: an empty tensor has no tiles. More than 48 KB of
// shared memory must be requested.
template <auto kKernel, class Params>
cudaError_t launch_kernel(int64_t ctas, int threads, int shared_bytes, const Params& params,
                          cudaStream_t stream, const LaunchOptions& options = {}) {
    if (ctas == 0) return cudaSuccess;
    cudaError_t status = cudaSuccess;
    const int most_shared_bytes = max_of(shared_bytes, options.most_shared_bytes);
    if (most_shared_bytes > 48 * 1024) status = allow_shared_bytes<kKernel>(most_shared_bytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(ctas);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (options.pdl) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (options.cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(options.cluster), 1, 1};
    }
    status = cudaLaunchKernelEx(&config, kKernel, params);
    if (status != cudaSuccess) cudaGetLastError();  // clears it: the next launch would report it
    return status;
}

}  // namespace flash_ext
