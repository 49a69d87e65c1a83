// delta = rowsum(dO * O) - dlse (FlashAttention-2, algorithm 2, line 4; the gradient of the
// logsumexp enters here, because d lse / d S = P), and lse in base 2.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "kernels/common/large_lse.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

// Eight elements of a row, from `col` on. Elements past the row's end are zeros.
template <class Element>
__device__ __forceinline__ uint4 load_chunk(const GlobalTile<const Element>& tile, int row, int col,
                                            bool aligned) {
    const Element* x = tile.data + row * tile.row_stride + col;
    if (aligned) return *reinterpret_cast<const uint4*>(x);
    const auto pair = [&](int i) {
        const auto at = [&](int j) { return col + j < tile.cols ? ptx::to_float(x[j]) : 0.f; };
        return ptx::pack<Element>(at(i), at(i + 1));
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
}

struct RowStatistics {
    float lse_log2;  // +inf for a row that sees no key, which makes its P zero
    float delta;     // without dropout's factor
};

// From rowsum(dO * O) of row `index` of lse.
__device__ __forceinline__ RowStatistics statistics_of(const BackwardParams& params, int64_t index,
                                                       float dot) {
    const float lse = params.lse[index];
    if (lse == -INFINITY) return {INFINITY, 0.f};
    const float dlse = params.dlse == nullptr ? 0.f : params.dlse[index];
    return {lse * kLog2e, (dot - dlse) * params.inverse_ds_factor};
}

// Fetches lse, delta and reference of a Q tile, which backward_preprocess_kernel has left in HBM.
template <class Config>
__device__ __forceinline__ void load_statistics(const BackwardTile<Config>& cta,
                                                const QTileWalk& walk) {
    constexpr int kChunks = Config::kBlockQ / 4;
    // With two stages no register is left for it over the loop.
    const int thread = Config::kStages == 2 ? ptx::not_hoisted(threadIdx.x) : threadIdx.x;
    if (thread >= 3 * kChunks) return;
    const BackwardParams& params = cta.params;
    const int64_t first =
        workspace_row(params, cta.sequence, walk.head, walk.q_tile() * Config::kBlockQ);
    const float* source = (thread < kChunks       ? params.lse_log2
                           : thread < 2 * kChunks ? params.delta
                                                  : params.reference) +
                          first;
    // In shared memory the three follow one another.
    ptx::cp_async_16(ptx::shared_address(cta.statistics(walk.stage).lse_log2) + thread * 16,
                     source + thread % kChunks * 4, true);
}

inline constexpr int kPreprocessThreads = 256;

// The lanes of a row, each with 16 bytes, and how many times the rows of a CTA pass a Q tile.
constexpr int preprocess_lanes(int head_dim_v) {
    return head_dim_v <= 32 ? 4 : head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32;
}
constexpr int preprocess_passes(int block_q, int lanes) {
    return block_q * lanes / kPreprocessThreads;
}

// The preprocess pass, a CTA per Q tile: row statistics; where dQ is summed in HBM also zeros in
// params.dq_semaphore and, with params.dq_accum_zeroed, in dq_accum. A row takes as many lanes as
// it has 16-byte chunks. Where lse is large, references (large_lse.cuh).
template <class Element, bool kGeneral, int kBlockQ, int kLanes>
__global__ void __launch_bounds__(kPreprocessThreads,
                                  kGeneral || preprocess_passes(kBlockQ, kLanes) > 5 ? 2 : 4)
    backward_preprocess_kernel(const __grid_constant__ BackwardParams params) {
    constexpr int kRowsPerPass = kPreprocessThreads / kLanes;
    constexpr int kPasses = preprocess_passes(kBlockQ, kLanes);
    ptx::launch_dependents();
    const auto [tile, head] = q_tile_index<true, kBlockQ>(params, blockIdx.x);
    const auto [sequence, q_tile] = tile;
    const int64_t first = int64_t{blockIdx.x} * kBlockQ;  // row of the workspace
    const int first_query = q_tile * kBlockQ;
    const int first_col = threadIdx.x % kLanes * 8;
    const int row = threadIdx.x / kLanes;
    const int rows = sequence.seqlen_q - first_query;
    const auto gO = global_tile<const Element>(
        params.out, sequence.batch, sequence.q_begin + first_query, head, rows, params.head_dim_v);
    const auto gdO = global_tile<const Element>(
        params.dout, sequence.batch, sequence.q_begin + first_query, head, rows, params.head_dim_v);
    const int64_t index = statistics_offset(params, sequence, head) + first_query;

    uint4 o[kPasses], d_o[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int r = row + i * kRowsPerPass;
        o[i] = d_o[i] = make_uint4(0, 0, 0, 0);
        if (r >= rows || first_col >= params.head_dim_v) continue;
        o[i] = load_chunk(gO, r, first_col, !kGeneral || params.aligned);
        d_o[i] = load_chunk(gdO, r, first_col, !kGeneral || params.aligned);
    }
    if (params.dq_accum_cols > 0) {
        if (threadIdx.x == 0) {
            if (blockIdx.x == 0) params.dq_semaphore[0] = 0;
            params.dq_semaphore[1 + blockIdx.x] = 0;
            params.dq_semaphore[1 + gridDim.x + blockIdx.x] = 0;  // tiles_done()
        }
        if (params.dq_accum_zeroed) {
            auto* accum = reinterpret_cast<float4*>(params.dq_accum + first * params.dq_accum_cols);
            const int chunks = kBlockQ / 4 * params.dq_accum_cols;
#pragma unroll 2
            for (int chunk = threadIdx.x; chunk < chunks; chunk += kPreprocessThreads)
                accum[chunk] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
    bool large = false;
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
        const int r = row + i * kRowsPerPass;
        if (first_col != 0) continue;
        const RowStatistics statistics =
            r < rows ? statistics_of(params, index + r, sum) : RowStatistics{INFINITY, 0.f};
        params.lse_log2[first + r] = statistics.lse_log2;
        params.delta[first + r] = statistics.delta;
        params.reference[first + r] = 0.f;
        large |= is_large_lse(statistics.lse_log2);
    }
    if (params.may_have_large_lse && __syncthreads_or(large)) [[unlikely]]
        split_large_lse<Element, kGeneral, kBlockQ>(params);
}

template <class Element, bool kGeneral, int kBlockQ, int kHeadDimV>
cudaError_t launch_preprocess(const BackwardParams& params, cudaStream_t stream) {
    constexpr int kLanes = preprocess_lanes(kHeadDimV);
    static_assert(kHeadDimV <= kLanes * 8);
    return launch_kernel<backward_preprocess_kernel<Element, kGeneral, kBlockQ, kLanes>>(
        workspace_rows(params, workspace_block(kBlockQ)) / kBlockQ, kPreprocessThreads, 0, params,
        stream);
}

// For FA1 and FA2, whose pass is the same. It is compiled once for both, by
// backward_preprocess.cuh; `general`: is their kernel the general one?
cudaError_t backward_preprocess(BackwardParams params, bool general, cudaStream_t stream);

}  // namespace flash_ext
