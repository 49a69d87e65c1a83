// FlashAttention-1 backward (Dao et al. 2022, algorithm 4).
//
// Loop order: one CTA per (batch, KV head), sequential over KV tiles; inner loop over the Q tiles
// that see the KV tile, for each query head of the group. At every iteration dQ_i in HBM grows by
// dS K, in float32; delta = rowsum(dO * O), which the paper computes in the loop, comes from the
// preprocess pass (backward_preprocess.cuh). No other CTA touches the dQ of its heads, and a lane
// always adds to the same elements, so the result is deterministic. Iterations, warps and shared
// memory are those of backward_tile.cuh.
//
// Barriers, per Q tile: after the first, its Q, dO, lse and delta have landed for all threads and
// all warps have left the previous tile; after the second, dS is complete.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions>
using Fa1BackwardTile = BackwardTile<Element, kHeadDim, kHeadDimV, kOptions,
                                     row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).plain>;

template <class Tile>
FLASH_DEVICE void load_q_tile(const Tile& cta, const typename Tile::Walk& walk, int first_key) {
    cta.load_q(walk);
    cta.load_do(walk);
    cta.load_statistics(walk);
    cta.load_words(walk, first_key);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    fa1_backward_kernel(const __grid_constant__ BackwardParams params) {
    const int rows_k = sequence_of<Tile::kMayBeVarlen>(params, blockIdx.x / params.heads_k).rows_k;

    for (int first_key = 0; first_key < rows_k; first_key += Tile::kBlockKV) {
        // Recomputed for each KV tile: what the inner loop does not need takes no register over it.
        const int flat_head = ptx::not_hoisted(blockIdx.x);
        const int head_k = flat_head % params.heads_k;
        const Tile cta(params,
                       warp_uniform<Tile::kMayBeVarlen>(
                           sequence_of<Tile::kMayBeVarlen>(params, flat_head / params.heads_k)),
                       head_k);
        typename Tile::GradientK rdK;
        typename Tile::GradientV rdV;
        rdK.clear();
        rdV.clear();
        typename Tile::Walk walk = cta.first_q_tile(first_key);
        __syncthreads();  // dK and dV of the previous KV tile have left shared memory
        cta.load_kv(first_key);
        if (!walk.done()) load_q_tile(cta, walk, first_key);
        ptx::cp_async_commit();

        while (!walk.done()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this Q tile has landed; all warps have left the previous one
            const typename Tile::Walk next = cta.next_q_tile(walk, first_key);
            if (!next.done()) load_q_tile(cta, next, first_key);
            ptx::cp_async_commit();

            typename Tile::Scores rP;
            typename Tile::Scores rdS;
            cta.compute_p(rP, walk, first_key);
            cta.compute_ds(rdS, rP, walk, first_key);
            cta.share_p_ds(rP, rdS);
            if constexpr (!Tile::kInRegisters) __syncthreads();  // P^T and dS^T are complete
            cta.accumulate_dv(rdV, rP, walk.stage);
#if __CUDA_ARCH__ < 900  // ptxas 13.0: with the barrier after dK, as below, d 64 spills
            if constexpr (Tile::kInRegisters) __syncthreads();
#endif
            cta.accumulate_dk(rdK, rdS, walk.stage);
#if __CUDA_ARCH__ >= 900
            if constexpr (Tile::kInRegisters) __syncthreads();  // dS^T is complete
#endif
            compile_time_for<Tile::kDQSlices>([&](auto slice) {
                typename Tile::DQ rdQ;
                cta.template compute_dq<slice>(rdQ);
                cta.add_dq(rdQ, walk, slice);  // line 21
            });
            walk = next;
        }
        ptx::cp_async_wait<0>();
        __syncthreads();  // all warps have left the K and V tiles
        // Recomputed, too: otherwise they would stay in registers over the loop.
        Tile(params, cta.sequence, ptx::not_hoisted(flat_head) % params.heads_k)
            .store_dk_dv(rdK, rdV, first_key);
    }
}

template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::backward_shared_bytes() {
    // With any options.
    return Fa1BackwardTile<__half, kHeadDim, kHeadDimV, tuning::kDense>::kSharedBytes;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::backward(const BackwardParams& params,
                                               const BackwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Tile = Fa1BackwardTile<decltype(element), kHeadDim, kHeadDimV, options.value>;
        return launch_backward<Tile, fa1_backward_kernel<Tile>>(
            params, params.heads_k * sequence_count(params), stream);
    });
}

}  // namespace flash_ext
