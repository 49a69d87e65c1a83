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
struct Fa1Backward : BackwardTile<Element, kHeadDim, kHeadDimV, kOptions,
                                  row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).plain> {
    using Base = BackwardTile<Element, kHeadDim, kHeadDimV, kOptions,
                              row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).plain>;
    using Base::Base;
    // The old dQ_i is fetched into shared memory. Where dQ is computed in slices (d 256)
    // there is no room for it, and it is not faster.
    static constexpr bool kFetchesDQ = Base::kDQSlices == 1;
    static constexpr int kDQFloats = 4;  // that a lane reads and writes at a time
    using Accum = DQAccum<Fa1Backward>;
    // It lies where other kernels keep their tile coordinates.
    static constexpr int kOldDQ = offsetof(typename Base::SharedStorage, tile_coord);
    static_assert(kOldDQ % 16 == 0);
    static constexpr int kSharedBytes = kOldDQ + (kFetchesDQ ? Base::kBlockQ * kHeadDim * 4 : 0);

    // Q, dO, lse and delta of a Q tile.
    __device__ __forceinline__ void load_q_tile(const QTileWalk& walk) const {
        this->load_q(walk);
        this->load_do(walk);
        this->load_statistics(walk);
    }

    // The place of this lane's floats of the old dQ_i in shared memory.
    static __device__ __forceinline__ auto& old_dq(int block, int n) {
        const int index = (block * Base::DQ::kN + n) / Accum::kStep;
        return reinterpret_cast<typename Accum::Floats*>(
            dynamic_shared() + kOldDQ)[index * Base::kThreads + threadIdx.x];
    }

    // Fetches this lane's fragments of the old dQ_i, which no other lane uses, during the matmuls.
    // Loads to registers would stall these, as in fa1/forward.cuh.
    __device__ __forceinline__ void load_dq(const QTileWalk& walk) const {
        Accum(this->params, this->sequence, walk.head, walk.q_tile(), 0)
            .for_each([&](int block, int n, const typename Accum::Floats& floats) {
                ptx::cp_async_16(ptx::shared_address(&old_dq(block, n)), &floats, true);
            });
        ptx::cp_async_commit();
    }

    // Line 21: adds a slice of dQ_i to that in HBM.
    __device__ __forceinline__ void update_dq(const typename Base::DQ& rdQ, const QTileWalk& walk,
                                              int slice) const {
        if constexpr (kFetchesDQ) ptx::cp_async_wait<0>();  // the old dQ_i has landed
        Accum(this->params, this->sequence, walk.head, walk.q_tile(), slice)
            .for_each([&](int block, int n, typename Accum::Floats& floats) {
                auto sum = kFetchesDQ ? old_dq(block, n) : floats;
#pragma unroll
                for (int i = 0; i < Accum::kFloats; ++i)
                    sum.x[i] += Accum::element(rdQ, block, n, i);
                floats = sum;
            });
    }
};

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
        const int group = params.heads_q / params.heads_k;
        const VisibleTiles q_tiles = cta.q_tiles_seeing(first_key);
        typename Tile::GradientK rdK;
        typename Tile::GradientV rdV;
        rdK.clear();
        rdV.clear();
        QTileWalk walk(q_tiles, head_k * group, group);
        __syncthreads();  // dK and dV of the previous KV tile have left shared memory
        cta.load_kv(first_key);
        if (!walk.done()) cta.load_q_tile(walk);
        ptx::cp_async_commit();

        while (!walk.done()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this Q tile has landed; all warps have left the previous one
            const QTileWalk next = walk.next();
            if (!next.done()) cta.load_q_tile(next);
            ptx::cp_async_commit();

            typename Tile::Scores rP;
            typename Tile::Scores rdS;
            cta.compute_p(rP, walk, first_key);
            if constexpr (Tile::kFetchesDQ) cta.load_dq(walk);
            cta.compute_ds(rdS, rP, walk, first_key);
            cta.share_p_ds(rP, rdS);
            if constexpr (!Tile::kInRegisters) __syncthreads();  // P^T and dS^T are complete
            cta.accumulate_dv(rdV, rP, walk.stage);
            cta.accumulate_dk(rdK, rdS, walk.stage);
            if constexpr (Tile::kInRegisters) __syncthreads();  // dS^T is complete
            compile_time_for<Tile::kDQSlices>([&](auto slice) {
                typename Tile::DQ rdQ;
                cta.template compute_dq<slice>(rdQ);
                cta.update_dq(rdQ, walk, slice);
            });
            walk = next;
        }
        ptx::cp_async_wait<0>();
        __syncthreads();  // all warps have left the K and V tiles
        // The tile coordinates are recomputed: otherwise they would stay in registers over the
        // loop.
        if constexpr (changes_scores(Tile::kOptions)) {
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
        return Fa1Backward<__half, kHeadDim, kHeadDimV, options.value>::kSharedBytes;
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::backward(const BackwardParams& params,
                                               const BackwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa1Backward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Tile = Fa1Backward<decltype(element), kHeadDim, kHeadDimV, options.value>;
        cudaError_t status = backward_preprocess(params, kPreprocessRows, stream);
        if (status == cudaSuccess)
            status = launch_kernel<fa1_backward_kernel<Tile>>(
                params.heads_k * sequence_count(params), Tile::kThreads, Tile::kSharedBytes, params,
                stream);
        if (status == cudaSuccess) status = postprocess_dq<DQTile<Tile>>(params, stream);
        return status;
    });
}

}  // namespace flash_ext
