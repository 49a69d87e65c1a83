// The kernel that combines the results of splits (combine_row.cuh): a warp computes a row.
#pragma once

#include "kernels/common/combine_row.cuh"
#include "kernels/common/launch.cuh"
#include "plan/head_dims.h"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

inline constexpr int kCombineWarps = 4;

template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(32 * kCombineWarps, 7)
    combine_kernel(const __grid_constant__ ForwardParams params) {
    const int64_t row = int64_t{blockIdx.x} * kCombineWarps + warp_id();
    if (row >= statistics_rows(params)) return;
    ptx::wait_for_grid_before();
    combine_row<Element, kHeadDimV>(params, row);
}

cudaError_t combine_splits(ForwardParams params, cudaStream_t stream, bool pdl) {
    cudaError_t status = cudaSuccess;
    const HeadDims padded = pad_head_dims({params.head_dim, params.head_dim_v});
    dispatch_head_dims(padded, [&](auto, auto dim_v) {
        dispatch_element(params.out_type, [&](auto element) {
            status = launch_kernel<combine_kernel<decltype(element), dim_v.value>>(
                ceil_div<int64_t>(statistics_rows(params), kCombineWarps), 32 * kCombineWarps, 0,
                params, stream, {.pdl = pdl});
        });
    });
    return status;
}

}  // namespace flash_ext
