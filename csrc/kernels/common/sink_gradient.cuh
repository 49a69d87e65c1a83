// The gradient of the sinks, for all variants: dsink = -sum over rows of P_sink * delta, where
// P_sink = exp(sink - lse) is the probability of the sink. The sink has the value 0, so it enters
// only through the denominator of the softmax. lse and delta come from the preprocess pass; rows of
// the workspace that belong to no query have lse = +inf there, so they add 0.
//
// A CTA adds the rows of a head in a fixed order, so results repeat bit by bit.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"

namespace flash_ext {

inline constexpr int kSinkThreads = 1024;

__global__ void __launch_bounds__(kSinkThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams params) {
    const int head = blockIdx.x;
    const float sink_log2 = params.sink[head] * kLog2e;
    const float scale = exponent_scale(params);
    // Memory has no room for the gradients of 2^31 rows, so 32 bits do.
    const uint32_t rows_per_head = params.row_groups * kWorkspaceRows;
    const uint32_t rows = tensor_batches(params) * rows_per_head;

    float sum = 0.f;
#pragma unroll 4
    for (uint32_t row = threadIdx.x; row < rows; row += kSinkThreads) {
        const uint32_t batch = row / rows_per_head;
        const int64_t index = int64_t{batch * (params.heads_q - 1) + head} * rows_per_head + row;
        const float lse_log2 = params.lse_log2[index];
        const float reference = params.reference[index];
        float exponent = sink_log2 - lse_log2;
        if (reference != 0.f) [[unlikely]]  // lse is relative to it, see large_lse.cuh
            exponent = (sink_log2 * ptx::rcp(scale) - reference) * scale - lse_log2;
        sum += ptx::ex2(exponent) * params.minus_delta[index];
    }
    sum = warp_sum(sum);

    __shared__ float sums[kSinkThreads / 32];
    if (lane_id() == 0) sums[warp_id()] = sum;
    __syncthreads();  // the sums of all warps are complete
    if (warp_id() > 0) return;
    sum = warp_sum(sums[lane_id()]);
    if (lane_id() == 0) params.dsink[head] = sum * params.ds_factor;
}

cudaError_t sink_gradient(const BackwardParams& params, cudaStream_t stream) {
    return launch_kernel<sink_gradient_kernel>(params.heads_q, kSinkThreads, 0, params, stream);
}

}  // namespace flash_ext
