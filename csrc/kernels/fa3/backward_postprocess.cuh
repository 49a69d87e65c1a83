// The postprocess pass of the FA3 backward, where dQ is summed in HBM: from the sum in dq_accum to
// dQ. It has a CTA per Q tile. It begins on SMs that the backward kernel leaves idle or has left,
// and converts heads as they are complete; with varlen it waits for the end of the kernel.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

inline constexpr int kFa3PassThreads = 256;

// The counter of KV tiles of a head of K and V (or of the parts that share query heads) that have
// added all of their dQ. These counters follow the counters of Q tiles in params.dq_semaphore;
// there are no more of them than Q tiles.
__device__ __forceinline__ int* tiles_done(const BackwardParams& params, const Sequence& sequence,
                                           int head) {
    return params.dq_semaphore + 1 + params.padding_row / kWorkspaceRows +
           sequence.index() * params.heads_k + head;
}

// A consumer warp's fragments of dQ of a Q tile in dq_accum, see Config::dq_half. Those of queries
// that do not exist are zeros.
template <class Config>
__device__ __forceinline__ typename Config::DQ load_dq(const float* accum, int rows) {
    using DQ = typename Config::DQ;
    DQ rdQ;
    rdQ.clear();
    const int consumer = warp_id() / 4;
    accum += Config::dq_half(consumer, rows).first;
#pragma unroll
    for (int n = 0; n < DQ::kN; ++n) {
        float (&x)[4] = rdQ.v[0][n];
        if constexpr (Config::kTransposeDQ) {
            if (8 * n >= rows) continue;
            const int fragment = n * Config::dq_warps(consumer) + warp_id() % 4;
            const float4 y =
                __ldcs(reinterpret_cast<const float4*>(accum) + fragment * 32 + lane_id());
            x[0] = y.x;
            x[1] = y.y;
            x[2] = y.z;
            x[3] = y.w;
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (16 * warp_id() + 8 * i >= rows) continue;
                const int fragment = (warp_id() % 4 * 2 + i) * DQ::kN + n;
                const float2 y =
                    __ldcs(reinterpret_cast<const float2*>(accum) + fragment * 32 + lane_id());
                x[2 * i] = y.x;
                x[2 * i + 1] = y.y;
            }
        }
    }
    return rdQ;
}

// Warp i converts the fragments of dQ that consumer warp i of the backward kernel has written.
template <class Config>
__global__ void __launch_bounds__(kFa3PassThreads)
    fa3_postprocess_dq_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    using Element = typename Config::Element;
    using DQ = typename Config::DQ;
    const auto [tile, head] = q_tile_index<true>(params, blockIdx.x, Config::kBlockQ);
    const auto [sequence, q_tile] = tile;
    const int first_query = q_tile * Config::kBlockQ;
    auto gdQ = global_tile<Element>(params.dq, sequence.batch, sequence.q_begin + first_query, head,
                                    sequence.seqlen_q - first_query, params.head_dim);
    // The next kernel in the stream waits only for this pass, so one CTA waits for the end of the
    // backward kernel. With varlen all do: with invalid offsets a counter might never reach its
    // count.
    const bool varlen = params.cu_seqlens_q != nullptr;
    if (varlen || blockIdx.x == gridDim.x - 1) ptx::wait_for_grid_before();
    if (!varlen && threadIdx.x == 0) {
        const int* done = tiles_done(params, sequence, head / group_of(params));
        ptx::wait_for_count(done, ceil_div(sequence.rows_k, Config::kBlockKV) * params.query_parts,
                            256);
    }
    __syncthreads();
    if (first_query >= sequence.seqlen_q) return;
    const int64_t row = workspace_row(params, sequence, head, first_query);
    const bool stored = params.dq_accum_zeroed ||
                        params.dq_semaphore[1 + row / kWorkspaceRows] != 0;  // by a KV tile
    const bool has_rows = warp_id() < Config::kDQWarps;
    auto rdQ = load_dq<Config>(
        params.dq_accum + row * Config::kHeadDim,
        stored && has_rows ? stored_rows<Config::kBlockQ>(sequence, first_query) : 0);
    rdQ.scale(params.scale);
    if constexpr (Config::kTransposeDQ) {
        using QTile = typename Config::QTile;
        __shared__ __align__(16) char storage[QTile::kBytes];
        const uint32_t sdQ = ptx::shared_address(storage);
        const int lane = lane_id();
#pragma unroll
        for (int n = 0; n < DQ::kN; n += 2) {
            if (!has_rows) break;
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
    __trap();  // never launched on other GPUs
#endif
}

template <class Config>
cudaError_t launch_fa3_postprocess_dq(const BackwardParams& params, cudaStream_t stream) {
    return launch_kernel<fa3_postprocess_dq_kernel<Config>>(
        q_tile_count(params, Config::kBlockQ), kFa3PassThreads, 0, params, stream, {.pdl = true});
}

}  // namespace flash_ext
