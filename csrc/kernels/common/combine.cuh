// The kernel that combines the results of splits (combine_rows.cuh): a warp computes a row.
#pragma once

#include "kernels/common/combine_rows.cuh"
#include "kernels/common/launch.cuh"
#include "plan/head_dims.h"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

inline constexpr int kCombineWarps = 4;

template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(32 * kCombineWarps, 6)
    combine_kernel(const __grid_constant__ ForwardParams params) {
    const int64_t row = int64_t{blockIdx.x} * kCombineWarps + warp_id();
    if (row >= statistics_rows(params)) return;
    // The row of the tensors, across packed sequences.
    const int64_t flat_head = row / params.seqlen_q;
    const int batch = static_cast<int>(flat_head / params.heads_q);
    const int head = static_cast<int>(flat_head % params.heads_q);
    const int query = static_cast<int>(row % params.seqlen_q);
    ptx::wait_for_grid_before();
    const int64_t rows[] = {row};
    Element* const targets[] = {row_pointer<Element>(params.out, batch, query, head)};
    if (combine_rows<Element, kHeadDimV, true>(params, rows, targets)) [[unlikely]] {
        const Sequence sequence = sequence_at(params, batch, query);
        recompute_rows<Element>(params, sequence, head, query - sequence.q_begin, 1);
    }
}

cudaError_t combine_splits(ForwardParams params, cudaStream_t stream, bool pdl) {
    cudaError_t status = cudaSuccess;
    const HeadDims padded =
        pad_head_dims({params.head_dim, params.head_dim_v}, params.element_type);
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
