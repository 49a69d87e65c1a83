// The passes before and behind the FA3 backward: row statistics and, where dQ is summed in memory,
// zeros before it; the sum to dQ behind it. Each is a CTA per Q tile. The pass behind begins on SMs
// that the kernel leaves idle or has left, and converts heads as they are done; of packed sequences
// all when the kernel has ended.
#pragma once

#include "kernels/common/backward_delta.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/stmatrix.cuh"

namespace flash_ext {

inline constexpr int kFa3PassThreads = 256;

// Where the KV tiles of a head of K and V are counted that have added all of their dQ: in
// params.turn behind the counts of Q tiles, which are at least as many.
template <int kBlockQ>
__device__ __forceinline__ int* tiles_done(const BackwardParams& params, const Sequence& sequence,
                                           int head) {
    static_assert(kBlockQ >= 2 * tuning::kMinBackwardBlockQ);  // so there is room for both
    const int64_t q_tiles = workspace_rows(params, workspace_block(kBlockQ)) / kBlockQ;
    return params.turn + 1 + q_tiles + sequence.index() * params.heads_k + head;
}

// delta = rowsum(dO * O) - dlse and lse in base 2, as row_statistics(), but a row takes only as
// many lanes as it has 16-byte chunks. Zeros in params.turn and, if that is wanted, in dq_accum, of
// kSumCols columns; none where that is 0.
template <class Element, int kBlockQ, int kHeadDimV, int kSumCols>
__global__ void __launch_bounds__(kFa3PassThreads)
    fa3_prepare_kernel(const __grid_constant__ BackwardParams params) {
    constexpr int kLanes = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;
    static_assert(kHeadDimV <= kLanes * 8);  // 16 bytes a lane
    constexpr int kRowsPerPass = kFa3PassThreads / kLanes;
    constexpr int kPasses = kBlockQ / kRowsPerPass;
    ptx::launch_dependents();
    const auto [tile, head] = q_tile_index<true, kBlockQ>(params, blockIdx.x);
    const auto [sequence, q_tile] = tile;
    const int64_t first = int64_t{blockIdx.x} * kBlockQ;  // row of the workspace
    const int first_query = q_tile * kBlockQ;
    const int chunk = threadIdx.x % kLanes;
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
        const bool valid = r < rows && chunk * 8 < params.head_dim_v;
        o[i] = d_o[i] = make_uint4(0, 0, 0, 0);
        if (valid) {
            o[i] = *reinterpret_cast<const uint4*>(gO.data + r * gO.row_stride + chunk * 8);
            d_o[i] = *reinterpret_cast<const uint4*>(gdO.data + r * gdO.row_stride + chunk * 8);
        }
    }
    if (kSumCols > 0) {
        if (threadIdx.x == 0) {
            if (blockIdx.x == 0) params.turn[0] = 0;
            params.turn[1 + blockIdx.x] = 0;
            params.turn[1 + gridDim.x + blockIdx.x] = 0;  // tiles_done()
        }
        if (params.dq_zeros) {
            auto* accum = reinterpret_cast<float4*>(params.dq_accum + first * kSumCols);
#pragma unroll
            for (int i = 0; i < kBlockQ * kSumCols / 4 / kFa3PassThreads; ++i)
                accum[threadIdx.x + i * kFa3PassThreads] = make_float4(0.f, 0.f, 0.f, 0.f);
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
        if (chunk != 0) continue;
        const RowStatistics statistics =
            r < rows ? statistics_of<false>(params, index + r, sum) : RowStatistics{INFINITY, 0.f};
        params.lse_log2[first + r] = statistics.lse_log2;
        params.delta[first + r] = statistics.delta;
        large |= is_large_lse(statistics.lse_log2);
    }
    if (params.relative_lse != nullptr && __syncthreads_or(large)) [[unlikely]] {
        if (features_of(params) == Features::kGeneral) {
            split_large_lse<Element, true>(params, sequence, head, first_query, kBlockQ, first);
        } else {
            split_large_lse<Element, false>(params, sequence, head, first_query, kBlockQ, first);
        }
    }
}

// Its warps are those of the kernel's consumers, with the same parts of dQ.
template <class Config>
__global__ void __launch_bounds__(kFa3PassThreads)
    fa3_convert_dq_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    using Element = typename Config::Element;
    using DQ = typename Config::DQ;
    const auto [tile, head] = q_tile_index<true, Config::kBlockQ>(params, blockIdx.x);
    const auto [sequence, q_tile] = tile;
    const float* accum = params.dq_accum +
                         int64_t{blockIdx.x} * Config::kBlockQ * Config::kHeadDim +
                         warp_id() * (DQ::kN * 128) + lane_id() * 4;
    const int first_query = q_tile * Config::kBlockQ;
    auto gdQ = global_tile<Element>(params.dq, sequence.batch, sequence.q_begin + first_query, head,
                                    sequence.seqlen_q - first_query, params.head_dim);
    // What follows in the stream waits for this pass alone, so one CTA waits for the kernel's end.
    // Where sequences are packed all do: with wrong offsets a count might never be reached.
    const bool packed = params.cu_seqlens_q != nullptr;
    if (packed || blockIdx.x == gridDim.x - 1) ptx::wait_for_grid_before();
    if (!packed && threadIdx.x == 0) {
        const int* done =
            tiles_done<Config::kBlockQ>(params, sequence, head / (params.heads_q / params.heads_k));
        ptx::wait_for_count(done, ceil_div(sequence.rows_k, Config::kBlockKV), 256);
    }
    __syncthreads();
    if (first_query >= sequence.seqlen_q) return;
    const bool stored = params.dq_zeros || params.turn[1 + blockIdx.x] != 0;  // by any KV tile
    DQ rdQ;
#pragma unroll
    for (int n = 0; n < DQ::kN; ++n) {
        if (!stored) continue;
        const float4 x = __ldcs(reinterpret_cast<const float4*>(accum + n * 128));
        rdQ.v[0][n][0] = x.x;
        rdQ.v[0][n][1] = x.y;
        rdQ.v[0][n][2] = x.z;
        rdQ.v[0][n][3] = x.w;
    }
    if (!stored) rdQ.clear();
    rdQ.scale(params.scale);
    if constexpr (Config::kTransposeDQ) {
        using QTile = typename Config::QTile;
        __shared__ __align__(16) char storage[QTile::kBytes];
        const uint32_t sdQ = ptx::shared_address(storage);
        const int lane = lane_id();
#pragma unroll
        for (int n = 0; n < DQ::kN; n += 2) {
            uint32_t blocks[4];  // of 8 columns and 8 queries
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&x)[4] = rdQ.v[0][n + i / 2];
                blocks[i] = ptx::pack<Element>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
            }
            ptx::stmatrix_x4_trans(
                sdQ + QTile::offset(8 * n + lane / 16 * 8 + lane % 8, 2 * warp_id() + lane / 8 % 2),
                blocks);
        }
        __syncthreads();
        store_tile<QTile, kFa3PassThreads, Config::kBlockQ, false>(gdQ, sdQ, 0, true);
    } else {
        gdQ.data += warp_id() * 16 * gdQ.row_stride;
        gdQ.rows -= warp_id() * 16;
        store_rows(gdQ, rdQ);
    }
#else
    __trap();  // not to be run elsewhere
#endif
}

template <class Element, int kBlockQ, int kHeadDimV, int kSumCols>
cudaError_t launch_fa3_prepare(const BackwardParams& params, cudaStream_t stream) {
    return launch_kernel<fa3_prepare_kernel<Element, kBlockQ, kHeadDimV, kSumCols>>(
        workspace_rows(params, workspace_block(kBlockQ)) / kBlockQ, kFa3PassThreads, 0, params,
        stream);
}

template <class Config>
cudaError_t launch_fa3_convert_dq(const BackwardParams& params, cudaStream_t stream) {
    return launch_kernel<fa3_convert_dq_kernel<Config>>(
        workspace_rows(params, Config::kWorkspaceBlock) / Config::kBlockQ, kFa3PassThreads, 0,
        params, stream, true);
}

}  // namespace flash_ext
