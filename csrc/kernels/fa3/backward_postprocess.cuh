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
// there are no more of them than of those.
template <int kBlockQ>
__device__ __forceinline__ int* tiles_done(const BackwardParams& params, const Sequence& sequence,
                                           int head) {
    static_assert(kBlockQ >= 2 * tuning::kMinBackwardBlockQ);  // so both fit into dq_semaphore
    const int64_t q_tiles = workspace_rows(params, workspace_block(kBlockQ)) / kBlockQ;
    return params.dq_semaphore + 1 + q_tiles + sequence.index() * params.heads_k + head;
}

// Warp i converts the fragments of dQ that consumer warp i of the backward kernel has written.
template <class Config>
__global__ void __launch_bounds__(kFa3PassThreads)
    fa3_postprocess_dq_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    using Element = typename Config::Element;
    using DQ = typename Config::DQ;
    const auto [tile, head] =
        q_tile_index<true>(params, blockIdx.x, workspace_block(Config::kBlockQ), Config::kBlockQ);
    const auto [sequence, q_tile] = tile;
    const float* accum = params.dq_accum +
                         int64_t{blockIdx.x} * Config::kBlockQ * Config::kHeadDim +
                         warp_id() * (DQ::kN * 128) + lane_id() * 4;
    const int first_query = q_tile * Config::kBlockQ;
    auto gdQ = global_tile<Element>(params.dq, sequence.batch, sequence.q_begin + first_query, head,
                                    sequence.seqlen_q - first_query, params.head_dim);
    // The next kernel in the stream waits only for this pass, so one CTA waits for the end of the
    // backward kernel. With varlen all do: with invalid offsets a counter might never reach its
    // count.
    const bool varlen = params.cu_seqlens_q != nullptr;
    if (varlen || blockIdx.x == gridDim.x - 1) ptx::wait_for_grid_before();
    if (!varlen && threadIdx.x == 0) {
        const int* done = tiles_done<Config::kBlockQ>(params, sequence, head / group_of(params));
        ptx::wait_for_count(done, ceil_div(sequence.rows_k, Config::kBlockKV) * params.query_parts,
                            256);
    }
    __syncthreads();
    if (first_query >= sequence.seqlen_q) return;
    const bool stored =
        params.dq_accum_zeroed || params.dq_semaphore[1 + blockIdx.x] != 0;  // by a KV tile
    DQ rdQ;
    const bool has_rows = warp_id() < Config::kDQWarps;
#pragma unroll
    for (int n = 0; n < DQ::kN; ++n) {
        if (!stored || !has_rows) continue;
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
        workspace_rows(params, Config::kWorkspaceBlock) / Config::kBlockQ, kFa3PassThreads, 0,
        params, stream, {.pdl = true});
}

}  // namespace flash_ext
