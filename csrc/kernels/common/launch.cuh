// What all launchers share: tensor maps, dynamic shared memory, the launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "plan/launchers.h"
#include "tile/tensor_map.cuh"

namespace flash_ext {

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

// --- Tensor maps ---

template <class Element>
inline constexpr CUtensorMapDataType kTensorMapType =
    sizeof(Element) == 1              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
    : std::is_same_v<Element, float>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    : std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Of a tile with these 4 dimensions of the tensor, of which a box has `box_rows` rows of an atom.
template <class Tile>
cudaError_t encode_tensor_map(CUtensorMap& map, void* data, const cuuint64_t (&sizes)[4],
                              const cuuint64_t (&strides)[3], int box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                             cudaEnableDefault, &found) != cudaSuccess ||
            found != cudaDriverEntryPointSuccess)
            function = nullptr;
        return reinterpret_cast<Encode>(function);
    }();
    constexpr CUtensorMapSwizzle kSwizzle = Tile::kPitch == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                            : Tile::kPitch == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                 : CU_TENSOR_MAP_SWIZZLE_32B;
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint32_t box[4] = {Tile::kAtomCols, static_cast<cuuint32_t>(box_rows), 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const auto try_to_encode = [&] {
        return encode(&map, kTensorMapType<typename Tile::Element>, 4, data, sizes, strides, box,
                      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
                      box_rows < Tile::kRows ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                             : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = try_to_encode();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        // This thread has not used the device yet (autograd has threads of its own). The driver
        // needs a context, which the runtime otherwise creates at the launch.
        int device = 0;
        cudaGetDevice(&device);
        cudaSetDevice(device);
        result = try_to_encode();
    }
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline constexpr cuuint64_t kNoBound = 0x7fffffff;

// A box is what one instruction loads: `box_rows` rows of an atom.
template <class Tile>
cudaError_t encode_tensor_map(CUtensorMap& map, const TensorView& view, int head_dim,
                              int box_rows = Tile::kRows) {
    const uint64_t row = row_stride_bytes<typename Tile::Element>(view);
    return encode_tensor_map<Tile>(map, view.data,
                                   {static_cast<uint64_t>(head_dim), kRowBound, kNoBound, kNoBound},
                                   {row, 16, (uint64_t{1} << 34) - row}, box_rows);
}

// Of a transposed tensor of 8 bits. A box has all rows of an atom.
template <class Tile>
cudaError_t encode_transposed_map(CUtensorMap& map, void* data, int rows, int64_t row_bytes) {
    return encode_tensor_map<Tile>(
        map, data, {kRowBound, static_cast<uint64_t>(rows), kNoBound, kNoBound},
        {static_cast<uint64_t>(row_bytes), 16, (uint64_t{1} << 38) - 16}, Tile::kRows);
}

// --- The launch ---

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
    int cluster = 1;            // its CTAs (sm_90), which divide the grid's
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
