// The FA3 backward for heads that are too wide for fa3_backward.cuh: row statistics, then dK and
// dV, then dQ, each a kernel. Nothing is summed in memory, so there is no other mode for
// deterministic results.
//
// Where there is memory for the dS of one head or more, the kernel for dK and dV leaves it there,
// and dQ = dS K takes one matmul; for as many heads at a time as fit. Else dQ's kernel computes dS
// again, and begins while the other ends. So each draws tiles from a counter of its own, of the two
// that tile_counter points to here.
#pragma once

#include "fa3_backward_keys.cuh"
#include "fa3_backward_product.cuh"
#include "fa3_backward_queries.cuh"

namespace flash_ext {

// lse in base 2 and delta = rowsum(dO * O) - dlse of 64 rows of the workspace.
template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(kFa3PassThreads)
    fa3_statistics_kernel(const __grid_constant__ BackwardParams params) {
    constexpr int kRows = 64;
    constexpr int kLanes = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;  // of a row
    constexpr int kRowsPerPass = kFa3PassThreads / kLanes;
    constexpr int kPasses = kRows / kRowsPerPass;
    ptx::launch_dependents();
    const auto [tile, head] = q_tile_index<true, kRows>(params, blockIdx.x);
    const auto [sequence, q_tile] = tile;
    const int first_query = q_tile * kRows;
    const int chunk = threadIdx.x % kLanes;
    const int row = threadIdx.x / kLanes;
    const int rows = sequence.seqlen_q - first_query;
    const auto rows_of = [&](const TensorView& view) {
        return global_tile<const Element>(view, sequence.batch, sequence.q_begin + first_query,
                                          head, rows, params.head_dim_v);
    };
    const auto gO = rows_of(params.out);
    const auto gdO = rows_of(params.dout);
    uint4 o[kPasses], d_o[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int r = row + i * kRowsPerPass;
        o[i] = d_o[i] = make_uint4(0, 0, 0, 0);
        if (r < rows && chunk * 8 < params.head_dim_v) {
            o[i] = *reinterpret_cast<const uint4*>(gO.data + r * gO.row_stride + chunk * 8);
            d_o[i] = *reinterpret_cast<const uint4*>(gdO.data + r * gdO.row_stride + chunk * 8);
        }
    }
    const int64_t index = statistics_offset(params, sequence, head) + first_query;
    const int64_t first = int64_t{blockIdx.x} * kRows;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const auto* x = reinterpret_cast<const Element*>(&o[i]);
        const auto* y = reinterpret_cast<const Element*>(&d_o[i]);
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += ptx::to_float(x[j]) * ptx::to_float(y[j]);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, offset);
        if (chunk != 0) continue;
        const int r = row + i * kRowsPerPass;
        RowStatistics statistics{INFINITY, 0.f};
        if (r < rows) {
            const float lse = params.lse[index + r];
            const float dlse = params.dlse == nullptr ? 0.f : params.dlse[index + r];
            if (lse != -INFINITY) statistics = {lse * kLog2e, sum - dlse};
        }
        params.lse_log2[first + r] = statistics.lse_log2;
        params.delta[first + r] = statistics.delta;
    }
}

// Heads (of K and V, of all batches) whose dS fits into params.ds at a time, evenly.
inline int heads_with_kept_ds(const BackwardParams& params) {
    if (params.cu_seqlens_q != nullptr || params.ds == nullptr) return 0;
    const int64_t bytes = kept_ds_bytes(params);
    const int heads = params.heads_k * params.batch;
    const auto fitting = static_cast<int>(min_of<int64_t>(params.ds_bytes / bytes, heads));
    return fitting == 0 ? 0 : ceil_div(heads, ceil_div(heads, fitting));
}

template <class Element, int kHeadDim, int kHeadDimV, Features kFeatures>
cudaError_t launch_fa3_backward_wide(const BackwardParams& params, cudaStream_t stream) {
    constexpr tuning::Fa3BackwardWide kTuning = tuning::fa3_backward_wide({kHeadDim, kHeadDimV});
    using Keys =
        Fa3BackwardKeysConfig<Element, kHeadDim, kHeadDimV, kFeatures, kTuning.pool_pairs, false>;
    using KeepingKeys =
        Fa3BackwardKeysConfig<Element, kHeadDim, kHeadDimV, kFeatures, kTuning.pool_pairs, true>;
    using Product = Fa3BackwardProductConfig<Element, kHeadDim, kTuning.product_stages>;
    using Queries = Fa3BackwardQueriesConfig<Element, kHeadDim, kHeadDimV, kFeatures,
                                             kTuning.k_stages, kTuning.v_stages>;
    cudaError_t status = launch_kernel<fa3_statistics_kernel<Element, kHeadDimV>>(
        workspace_rows(params) / 64, kFa3PassThreads, 0, params, stream);
    const int heads = params.heads_k * params.batch;
    const int heads_at_a_time = heads_with_kept_ds(params);
    if (heads_at_a_time > 0) {
        for (int head = 0; head < heads && status == cudaSuccess; head += heads_at_a_time) {
            const KeptDS kept{static_cast<char*>(params.ds), head,
                              min_of(heads_at_a_time, heads - head), KeptTiles(params)};
            status = launch_fa3_backward_keys<KeepingKeys>(params, kept, stream);
            if (status == cudaSuccess)
                status = launch_fa3_backward_product<Product>(params, kept, stream);
        }
        return status;
    }
    if (status == cudaSuccess) status = launch_fa3_backward_keys<Keys>(params, KeptDS{}, stream);
    if (status == cudaSuccess) status = launch_fa3_backward_queries<Queries>(params, stream);
    return status;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward_wide(BackwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kPacked, Features::kGeneral>(params, [&](auto element,
                                                                       auto features) {
        status = launch_fa3_backward_wide<decltype(element), kHeadDim, kHeadDimV, features.value>(
            params, stream);
    });
    return status;
}

}  // namespace flash_ext
