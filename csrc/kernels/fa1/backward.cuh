// FlashAttention-1 backward (Dao et al. 2022, algorithm 4).
//
// Loop order: one CTA per (batch, KV head), sequential over KV tiles; inner loop over the Q tiles
// that see the KV tile, for each query head of the group. dQ is read from and written to HBM, in
// float32, at every iteration; delta = rowsum(dO * O), which the paper computes in the loop, comes
// from the preprocess pass (backward_preprocess.cuh). No other CTA touches the dQ of its heads, so
// there are no atomics and the result is deterministic. Iterations, warps and shared memory are
// those of backward_tile.cuh.
//
// Barriers, per Q tile: after the first, its Q, dO, lse and delta have landed for all threads and
// all warps have left the previous tile; after the second, dS is complete.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "plan/launchers.h"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions>
struct Fa1BackwardConfig
    : BackwardConfig<Element, kHeadDim, kHeadDimV, kOptions,
                     row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).plain> {
    using Base = BackwardConfig<Element, kHeadDim, kHeadDimV, kOptions,
                                row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).plain>;
    // The old dQ_i is fetched into shared memory. Where dQ is computed in slices (d 256)
    // there is no room for it, and it is not faster.
    static constexpr bool kFetchesDQ = Base::kDQSlices == 1;
    static constexpr int kDQFloats = 4;  // that a lane reads and writes at a time
    // It lies where other kernels keep their tile coordinates.
    static constexpr int kOldDQ = offsetof(typename Base::SharedStorage, tile_coord);
    static_assert(kOldDQ % 16 == 0);
    static constexpr int kSharedBytes = kOldDQ + (kFetchesDQ ? Base::kBlockQ * kHeadDim * 4 : 0);
};

// Q, dO, lse and delta of a Q tile.
template <class Config>
__device__ __forceinline__ void load_q_tile(const BackwardTile<Config>& cta,
                                            const QTileWalk& walk) {
    cta.load_q(walk);
    cta.load_do(walk);
    load_statistics<Config>(cta, walk);
}

// The place of this lane's floats of the old dQ_i in shared memory.
template <class Config>
__device__ __forceinline__ auto& old_dq(int block, int n) {
    using Accum = DQAccum<Config>;
    const int index = (block * Config::DQ::kN + n) / Accum::kStep;
    return reinterpret_cast<typename Accum::Floats*>(
        dynamic_shared() + Config::kOldDQ)[index * Config::kThreads + threadIdx.x];
}

// Fetches this lane's fragments of the old dQ_i, which no other lane uses, during the matmuls.
// Loads to registers would stall these, as in fa1/forward.cuh.
template <class Config>
__device__ __forceinline__ void load_dq(const BackwardTile<Config>& cta, const QTileWalk& walk) {
    using Accum = DQAccum<Config>;
    Accum(cta.params, cta.sequence, walk.head, walk.q_tile(), 0)
        .for_each([&](int block, int n, const typename Accum::Floats& floats) {
            ptx::cp_async_16(ptx::shared_address(&old_dq<Config>(block, n)), &floats, true);
        });
    ptx::cp_async_commit();
}

// Line 21: adds a slice of dQ_i to that in HBM.
template <class Config>
__device__ __forceinline__ void update_dq(const BackwardTile<Config>& cta, const QTileWalk& walk,
                                          const typename Config::DQ& rdQ, int slice) {
    using Accum = DQAccum<Config>;
    if constexpr (Config::kFetchesDQ) ptx::cp_async_wait<0>();  // the old dQ_i has landed
    Accum(cta.params, cta.sequence, walk.head, walk.q_tile(), slice)
        .for_each([&](int block, int n, typename Accum::Floats& floats) {
            auto sum = Config::kFetchesDQ ? old_dq<Config>(block, n) : floats;
#pragma unroll
            for (int i = 0; i < Accum::kFloats; ++i) sum.x[i] += Accum::element(rdQ, block, n, i);
            floats = sum;
        });
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fa1_backward_kernel(const __grid_constant__ BackwardParams params) {
    using Tile = BackwardTile<Config>;
    const int rows_k =
        sequence_of<Config::kMayBeVarlen>(params, blockIdx.x / params.heads_k).rows_k;

    for (int first_key = 0; first_key < rows_k; first_key += Config::kBlockKV) {
        // Recomputed for each KV tile: what the inner loop does not need takes no register over it.
        const int flat_head = ptx::not_hoisted(blockIdx.x);
        const int head_k = flat_head % params.heads_k;
        const Tile cta(params,
                       warp_uniform<Config::kMayBeVarlen>(
                           sequence_of<Config::kMayBeVarlen>(params, flat_head / params.heads_k)),
                       head_k);
        const int group = params.heads_q / params.heads_k;
        const VisibleTiles q_tiles = cta.q_tiles_seeing(first_key);
        typename Tile::GradientK rdK;
        typename Tile::GradientV rdV;
        rdK.clear();
        rdV.clear();
        QTileWalk walk(q_tiles, head_k * group, group);
        __syncthreads();  // dK and dV of the previous KV tile have left shared memory
        cta.load_kv(first_key);
        if (!walk.done()) load_q_tile<Config>(cta, walk);
        ptx::cp_async_commit();

        while (!walk.done()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this Q tile has landed; all warps have left the previous one
            const QTileWalk next = walk.next();
            if (!next.done()) load_q_tile<Config>(cta, next);
            ptx::cp_async_commit();

            typename Tile::Scores rP;
            typename Tile::Scores rdS;
            cta.compute_p(rP, walk, first_key);
            if constexpr (Config::kFetchesDQ) load_dq<Config>(cta, walk);
            cta.compute_ds(rdS, rP, walk, first_key);
            cta.share_p_ds(rP, rdS);
            if constexpr (!Tile::kInRegisters) __syncthreads();  // P^T and dS^T are complete
            cta.accumulate_dv(rdV, rP, walk.stage);
            cta.accumulate_dk(rdK, rdS, walk.stage);
            if constexpr (Tile::kInRegisters) __syncthreads();  // dS^T is complete
            compile_time_for<Config::kDQSlices>([&](auto slice) {
                typename Config::DQ rdQ;
                cta.template compute_dq<slice>(rdQ);
                update_dq<Config>(cta, walk, rdQ, slice);
            });
            walk = next;
        }
        ptx::cp_async_wait<0>();
        __syncthreads();  // all warps have left the K and V tiles
        // The tile coordinates are recomputed: otherwise they would stay in registers over the
        // loop.
        if constexpr (Config::kGeneral) {
            Tile(params, cta.sequence, ptx::not_hoisted(head_k)).store_dk_dv(rdK, rdV, first_key);
        } else {
            Tile(params, cta.sequence, ptx::not_hoisted(flat_head) % params.heads_k)
                .store_dk_dv(rdK, rdV, ptx::not_hoisted(first_key));
        }
    }
}

template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::backward_shared_bytes() {
    constexpr OptionSets kSets = row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).options;
    return largest_of<kSets>([](auto options) {
        return Fa1BackwardConfig<__half, kHeadDim, kHeadDimV, options.value>::kSharedBytes;
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::backward(const BackwardParams& params,
                                               const BackwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Config = Fa1BackwardConfig<decltype(element), kHeadDim, kHeadDimV, options.value>;
        cudaError_t status = backward_preprocess(params, kPreprocessRows, stream);
        if (status == cudaSuccess)
            status = launch_kernel<fa1_backward_kernel<Config>>(
                params.heads_k * sequence_count(params), Config::kThreads, Config::kSharedBytes,
                params, stream);
        if (status == cudaSuccess) status = postprocess_dq<DQTile<Config>>(params, stream);
        return status;
    });
}

}  // namespace flash_ext
