// Gradient of the sinks, for every variant: dsink = -sum over rows of P_sink * delta, where P_sink
// = exp(sink - lse) is the sink's share of the softmax. Its value is 0, so it enters only through
// the softmax's denominator.
//
// A head's rows are divided into tuning::kSinkParts parts, each summed by a CTA. A second pass adds
// the partial sums in order: the same bits every time.
#pragma once

#include "kernels/common/backward_delta.cuh"
#include "plan/tuning.h"
#include "problem/sequences.cuh"

namespace flash_ext {

inline constexpr int kSinkWarps = 8;

template <class Element>
__global__ void __launch_bounds__(32 * kSinkWarps)
    sink_gradient_kernel(const __grid_constant__ BackwardParams params) {
    const int head = blockIdx.x / tuning::kSinkParts;
    const int part = blockIdx.x % tuning::kSinkParts;
    const float sink_log2 = params.sink[head] * kLog2e;
    const float scale = exponent_scale(params);
    // Packed sequences follow one another, and rows that belong to none have lse = -inf: together
    // they are one long sequence.
    const int64_t rows = int64_t{tensor_batches(params)} * params.seqlen_q;
    const int64_t rows_per_part = ceil_div<int64_t>(rows, tuning::kSinkParts);
    const int64_t end = min_of<int64_t>((part + 1) * rows_per_part, rows);

    float sum = 0.f;
#pragma unroll 4
    for (int64_t row = part * rows_per_part + warp_id(); row < end; row += kSinkWarps) {
        const int batch = static_cast<int>(row / params.seqlen_q);
        const Sequence all{batch, 0, 0, 0, params.seqlen_q, 0, 0};
        const int query = static_cast<int>(row % params.seqlen_q);
        const RowStatistics statistics = row_statistics<Element>(params, all, head, query);
        float exponent = sink_log2 - statistics.lse_log2;
        if (params.relative_lse != nullptr && is_large_lse(statistics.lse_log2)) [[unlikely]] {
            const auto [reference, lse_log2] =
                params.relative_lse[statistics_offset(params, all, head) + query];
            exponent = (sink_log2 * ptx::rcp(scale) - reference) * scale - lse_log2;
        }
        sum -= ptx::ex2(exponent) * statistics.delta;
    }

    __shared__ float sums[kSinkWarps];
    if (lane_id() == 0) sums[warp_id()] = sum;
    __syncthreads();  // the sums of all warps are complete
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kSinkWarps; ++warp) sum += sums[warp];
    params.dsink_partial[blockIdx.x] = sum * params.ds_factor;
}

__global__ void sink_gradient_sum_kernel(const __grid_constant__ BackwardParams params) {
    const int head = blockIdx.x * blockDim.x + threadIdx.x;
    if (head >= params.heads_q) return;
    float sum = 0.f;
    for (int part = 0; part < tuning::kSinkParts; ++part)
        sum += params.dsink_partial[head * tuning::kSinkParts + part];
    params.dsink[head] = sum;
}

cudaError_t sink_gradient(BackwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kGeneral>(params, [&](auto element, auto) {
        status = launch_kernel<sink_gradient_kernel<decltype(element)>>(
            int64_t{params.heads_q} * tuning::kSinkParts, 32 * kSinkWarps, 0, params, stream);
    });
    if (status == cudaSuccess)
        status = launch_kernel<sink_gradient_sum_kernel>(ceil_div(params.heads_q, 128), 128, 0,
                                                         params, stream);
    return status;
}

}  // namespace flash_ext
