// delta = rowsum(dO * O) - dlse (FlashAttention-2, algorithm 2, line 4; the gradient of the
// logsumexp enters here, because d lse / d S = P), and lse in base 2.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "kernels/common/large_lse.cuh"
#include "plan/head_dims.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"

namespace flash_ext {

// rowsum(dO * O) of one row by a whole warp; every lane gets the sum.
template <class Element>
__device__ __forceinline__ float row_dot(const Element* x, const Element* y, int cols,
                                         bool aligned) {
    static_assert(kMaxHeadDim <= 32 * 8);  // 16 bytes a lane
    float sum = 0.f;
    const int lane = lane_id();
    if (aligned) {
        if (lane * 8 < cols) {
            const uint4 xs = *reinterpret_cast<const uint4*>(x + lane * 8);
            const uint4 ys = *reinterpret_cast<const uint4*>(y + lane * 8);
            const auto* xe = reinterpret_cast<const Element*>(&xs);
            const auto* ye = reinterpret_cast<const Element*>(&ys);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += ptx::to_float(xe[i]) * ptx::to_float(ye[i]);
        }
    } else {
        for (int col = lane; col < cols; col += 32)
            sum += ptx::to_float(x[col]) * ptx::to_float(y[col]);
    }
    return warp_sum(sum);
}

struct RowStatistics {
    float lse_log2;  // +inf for a row that sees no key, which makes its P zero
    float delta;     // without dropout's factor
};

// From rowsum(dO * O) of row `index` of lse.
template <bool kGeneral>
__device__ __forceinline__ RowStatistics statistics_of(const BackwardParams& params, int64_t index,
                                                       float dot) {
    const float lse = params.lse[index];
    if (lse == -INFINITY) return {INFINITY, 0.f};
    const float dlse = params.dlse == nullptr ? 0.f : params.dlse[index];
    return {lse * kLog2e, kGeneral ? (dot - dlse) * params.inverse_ds_factor : dot - dlse};
}

// Of one query, by a whole warp. A row past the sequence has P = 0 as well.
template <class Element, bool kGeneral>
__device__ __forceinline__ RowStatistics row_statistics(const BackwardParams& params,
                                                        const Sequence& sequence, int head,
                                                        int query) {
    if (query >= sequence.seqlen_q) return {INFINITY, 0.f};
    const int64_t row = sequence.q_begin + query;
    const float dot = row_dot(row_pointer<const Element>(params.dout, sequence.batch, row, head),
                              row_pointer<const Element>(params.out, sequence.batch, row, head),
                              params.head_dim_v, !kGeneral || params.aligned);
    return statistics_of<kGeneral>(params, statistics_offset(params, sequence, head) + query, dot);
}

// Fetches lse, delta and reference of a Q tile, which backward_delta_kernel has left in HBM.
template <class Config>
__device__ __forceinline__ void load_statistics(const BackwardTile<Config>& cta,
                                                const QTileWalk& walk) {
    constexpr int kChunks = Config::kBlockQ / 4;
    // A matter of registers: with two stages there is none to spare over the loop.
    const int thread = Config::kStages == 2 ? ptx::not_hoisted(threadIdx.x) : threadIdx.x;
    if (thread >= 3 * kChunks) return;
    const BackwardParams& params = cta.params;
    const int64_t first =
        workspace_row(params, cta.sequence, walk.head, walk.q_tile * Config::kBlockQ);
    const float* source = (thread < kChunks       ? params.lse_log2
                           : thread < 2 * kChunks ? params.delta
                                                  : params.reference) +
                          first;
    // In shared memory one follows the other.
    ptx::cp_async_16(ptx::shared_address(cta.lse_log2(walk.step)) + thread * 16,
                     source + thread % kChunks * 4, true);
}

// The pass before the main kernels of FA1 and FA2: row statistics of one Q tile, and its dq_accum
// set to zero.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 896 / Config::kThreads)
    backward_delta_kernel(const __grid_constant__ BackwardParams params) {
    const auto [tile, head] =
        q_tile_index<Config::kMayBePacked, Config::kBlockQ>(params, blockIdx.x);
    const auto [sequence, q_tile] = tile;
    const int64_t first = int64_t{blockIdx.x} * Config::kBlockQ;  // row of the workspace

    auto* accum = reinterpret_cast<float4*>(params.dq_accum + first * Config::kHeadDim);
    for (int i = threadIdx.x; i < Config::kBlockQ * Config::kHeadDim / 4; i += Config::kThreads)
        accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);

    bool large = false;
#pragma unroll 4
    for (int row = warp_id(); row < Config::kBlockQ; row += Config::kWarps) {
        const RowStatistics statistics = row_statistics<typename Config::Element, Config::kGeneral>(
            params, sequence, head, q_tile * Config::kBlockQ + row);
        if (lane_id() == 0) {
            params.lse_log2[first + row] = statistics.lse_log2;
            params.delta[first + row] = statistics.delta;
            params.reference[first + row] = 0.f;
        }
        large |= is_large_lse(statistics.lse_log2);
    }
    if (__syncthreads_or(large)) [[unlikely]]
        split_large_lse<typename Config::Element, Config::kGeneral>(
            params, sequence, head, q_tile * Config::kBlockQ, Config::kBlockQ, first);
}

}  // namespace flash_ext
