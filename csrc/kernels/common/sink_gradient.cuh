// The gradient of the sinks, for all variants: dsink = -sum over rows of P_sink * delta, where
// P_sink = exp(sink - lse) is the probability of the sink. The sink has the value 0, so it enters
// only through the denominator of the softmax. lse and delta come from the preprocess pass; rows of
// the workspace that belong to no query have lse = +inf there, so they add 0.
//
// The rows of a head are divided into tuning::kSinkSplits, each summed by one CTA. A second
// kernel adds the partial sums in a fixed order, so results repeat bit by bit.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"

namespace flash_ext {

inline constexpr int kSinkThreads = 256;

__global__ void __launch_bounds__(kSinkThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams params) {
    const int head = blockIdx.x / tuning::kSinkSplits;
    const int split = blockIdx.x % tuning::kSinkSplits;
    const float sink_log2 = params.sink[head] * kLog2e;
    const float scale = exponent_scale(params);
    const int64_t rows_per_head = int64_t{params.row_groups} * kWorkspaceRows;
    const int64_t rows = tensor_batches(params) * rows_per_head;
    const int64_t rows_per_split = ceil_div<int64_t>(rows, tuning::kSinkSplits);
    const int64_t end = min_of<int64_t>((split + 1) * rows_per_split, rows);

    float sum = 0.f;
    for (int64_t row = split * rows_per_split + threadIdx.x; row < end; row += kSinkThreads) {
        const int64_t batch = row / rows_per_head;
        const int64_t index = (batch * (params.heads_q - 1) + head) * rows_per_head + row;
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
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kSinkThreads / 32; ++warp) sum += sums[warp];
    params.dsink_partial[blockIdx.x] = sum * params.ds_factor;
}

__global__ void sink_gradient_sum_kernel(const __grid_constant__ BackwardParams params) {
    const int head = blockIdx.x * blockDim.x + threadIdx.x;
    if (head >= params.heads_q) return;
    float sum = 0.f;
    for (int split = 0; split < tuning::kSinkSplits; ++split)
        sum += params.dsink_partial[head * tuning::kSinkSplits + split];
    params.dsink[head] = sum;
}

cudaError_t sink_gradient(BackwardParams params, cudaStream_t stream) {
    const cudaError_t status = launch_kernel<sink_gradient_kernel>(
        int64_t{params.heads_q} * tuning::kSinkSplits, kSinkThreads, 0, params, stream);
    if (status != cudaSuccess) return status;
    return launch_kernel<sink_gradient_sum_kernel>(ceil_div(params.heads_q, 128), 128, 0, params,
                                                   stream);
}

}  // namespace flash_ext
