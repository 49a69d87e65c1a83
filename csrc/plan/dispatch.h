// A run-time value becomes a compile-time constant: dispatch<64, 96, 128>(n, [](auto dim) { ... })
// calls the function with std::integral_constant<int, 64> and so on, and returns its status.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "plan/tuning.h"
#include "tile/host_device.h"

namespace flash_ext {

// A dispatch found no instantiation, so nothing ran. CUDA itself no longer returns this code.
inline constexpr cudaError_t kNoKernel = cudaErrorMissingConfiguration;

template <auto... kValues, class T, class Function>
cudaError_t dispatch(T value, Function&& function) {
    cudaError_t status = kNoKernel;
    ((value == kValues && (status = function(std::integral_constant<T, kValues>{}), true)) || ...);
    return status;
}

// function(std::integral_constant<int, i>) for i = 0 .. kCount - 1.
template <int kCount, int kFirst = 0, class Function>
FLASH_HOST_DEVICE void compile_time_for(Function&& function) {
    if constexpr (kFirst < kCount) {
        function(std::integral_constant<int, kFirst>{});
        compile_time_for<kCount, kFirst + 1>(function);
    }
}

// function(constant set) of the sets of a row that equals `options`.
template <OptionSets kSets, int kIndex = 0, class Function>
cudaError_t dispatch_options(OptionSet options, Function&& function) {
    if constexpr (kIndex < kSets.count) {
        constexpr OptionSet kOptions = kSets.sets[kIndex];
        if (options != kOptions) return dispatch_options<kSets, kIndex + 1>(options, function);
        return function(std::integral_constant<OptionSet, kOptions>{});
    } else {
        return kNoKernel;
    }
}

// function(constants qk and v) of the row of a tuning table with these dims, or `none`.
template <auto& kTable, int kIndex = 0, class Function, class Result = cudaError_t>
Result dispatch_head_dims(HeadDims dims, Function&& function, Result none = kNoKernel) {
    if constexpr (kIndex < std::extent_v<std::remove_reference_t<decltype(kTable)>>) {
        constexpr HeadDims kDims = kTable[kIndex].head_dims;
        if (dims != kDims) return dispatch_head_dims<kTable, kIndex + 1>(dims, function, none);
        return function(std::integral_constant<int, kDims.qk>{},
                        std::integral_constant<int, kDims.v>{});
    } else {
        return none;
    }
}

}  // namespace flash_ext
