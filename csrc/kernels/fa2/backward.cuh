// FlashAttention-2 backward (Dao 2023, algorithm 2).
//
// Loop order: delta = rowsum(dO * O) in the preprocess pass; then one CTA per (KV tile, KV head,
// batch), inner loop over the Q tiles that see the KV tile, for each query head of the group. dK
// and dV stay in registers; dQ is summed over CTAs in float32 in HBM by vector reductions; the
// postprocess pass converts it. Iterations, warps and shared memory are those of backward_tile.cuh.
//
// Barriers, per Q tile: the comments in the loop say what each is for. After the first, its Q, lse
// and delta have landed for all threads and all warps have left the previous tile, so that dS and
// the next tile's stage may be overwritten. With two stages a whole tile is fetched
// ahead. With one, which makes room for larger tiles, each load is hidden by a matmul that does not
// need its tile: dO of this iteration by S^T = K Q^T, Q of the next by dQ = dS K.
//
// Deterministic mode: KV tiles add their dQ in ascending order. dq_semaphore[Q tile] counts those
// that have added; a CTA waits until it is next. CTAs fetch their work indices in order, so all
// CTAs that a CTA waits for are already running, and none waits forever.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

// The order in which KV tiles add their dQ to a Q tile, in deterministic mode.
template <class Tile>
struct DQSemaphore {
    // The wait comes after the matmul of dQ: before it, its branch would prevent the compiler from
    // overlapping that matmul with the previous one. If that would spill, it comes first.
    static constexpr bool kWaitFirst = Tile::kHeadDim == 64 || Tile::kHeadDim > 128;

    const BackwardParams& params;
    const Tile& cta;
    int kv_tile;
    int head;
    int q_tile;

    // The Q tile's counter of KV tiles that have added their dQ.
    FLASH_DEVICE int* counter() const {
        return params.dq_semaphore + 1 +
               workspace_row(params, cta.sequence, head, q_tile * Tile::kBlockQ) / kWorkspaceRows;
    }

    // What a mask of tiles has of the Q tile's block, and the block of this CTA's keys.
    FLASH_DEVICE BlockRuns runs() const {
        return runs_of_q_block(params, cta.sequence.batch, head,
                               q_tile * Tile::kBlockQ / kMaskBlock);
    }
    FLASH_DEVICE int kv_block() const { return kv_tile * Tile::kBlockKV / kMaskBlock; }
    FLASH_DEVICE bool listed() const {
        return Tile::kMayHaveMask && params.tile_mask.kv_tiles != nullptr;
    }

    // Does the KV tile have a place in the order? A list of Q tiles by intervals may name some that
    // do not list it, and see none of its keys: it adds zeros to these.
    FLASH_DEVICE bool counts() const {
        return !listed() || params.tile_mask.bits ||
               kind_of(runs(), kv_block()) != BlockKind::kHidden;
    }

    // How many KV tiles see the Q tile and come before this CTA's.
    FLASH_DEVICE int mine() const {
        constexpr int kPerBlock = max_of(kMaskBlock / Tile::kBlockKV, 1);
        if (listed()) return blocks_before(runs(), kv_block()) * kPerBlock + kv_tile % kPerBlock;
        const VisibleTiles seen = VisibleTiles::of_queries<false>(
            cta.mask, tile_interval(q_tile, Tile::kBlockQ), Tile::kBlockKV);
        return kv_tile - seen.begin;
    }

    FLASH_DEVICE void wait() const {
        if (threadIdx.x == 0 && counts()) ptx::wait_for_count(counter(), mine(), 64);
        __syncthreads();  // what the earlier CTAs have added is visible to all threads
    }

    FLASH_DEVICE void end() const {
        __syncthreads();  // all threads have issued their additions
        if (threadIdx.x == 0 && counts()) {
            __threadfence();
            ptx::red_add_release(counter(), 1);
        }
    }
};

// This CTA's. In deterministic mode CTAs take them in the order in which they start, so that those
// that a CTA waits for are running.
FLASH_DEVICE int work_index(const BackwardParams& params, int& shared) {
    int index = blockIdx.x;
    if (params.deterministic) {
        if (threadIdx.x == 0) shared = atomicAdd(params.dq_semaphore, 1);
        __syncthreads();  // the work index has been fetched
        index = ptx::warp_uniform(shared);
    }
    return index;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    fa2_backward_kernel(const __grid_constant__ BackwardParams params) {
    if (!may_run<Tile>()) return __trap();
    constexpr bool kWaitFirst = DQSemaphore<Tile>::kWaitFirst;
    auto& storage = shared_storage<typename Tile::SharedStorage>();
    // Ascending KV tiles: longest first.
    const WorkTile work = work_tile(work_index(params, storage.work_index), params.tile_order);
    const auto [sequence, kv_tile] = warp_uniform<true>(tile_of<Tile::kMayBeVarlen, Rows::kKeys>(
        params, work.batch, work.tile_index, Tile::kBlockKV));
    const Tile cta(params, sequence, work.head);
    const int first_key = kv_tile * Tile::kBlockKV;
    if (Tile::kMayBeVarlen && first_key >= sequence.rows_k) return;  // a padding tile

    typename Tile::GradientK rdK;
    typename Tile::GradientV rdV;
    rdK.clear();
    rdV.clear();
    TileCoord& stored = storage.tile_coord;  // registers are short over the loop
    if (threadIdx.x == 0) {
        stored = {sequence, work.head, first_key};
        if constexpr (drops_pairs(Tile::kOptions))
            storage.dropout = dropout_mask(params, sequence, 0);
    }
    typename Tile::Walk walk = cta.first_q_tile(first_key);
    cta.load_kv(first_key);
    if (!walk.done()) {
        cta.load_q(walk);
        cta.load_statistics(walk);
        cta.load_words(walk, first_key);
        cta.load_bias(walk, first_key);
        if constexpr (Tile::kStages == 2) cta.load_do(walk);
    }
    ptx::cp_async_commit();

    while (!walk.done()) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this Q tile has landed; all warps have left the previous one
        const typename Tile::Walk next = cta.next_q_tile(walk, first_key);
        if constexpr (Tile::kStages == 1) {
            cta.load_do(walk);
        } else if (!next.done()) {
            cta.load_q(next);
            cta.load_statistics(next);
            cta.load_words(next, first_key);
            cta.load_bias(next, first_key);
            cta.load_do(next);
        }
        ptx::cp_async_commit();

        typename Tile::Scores rP;
        typename Tile::Scores rdS;
        cta.compute_p(rP, walk, first_key);
        if constexpr (Tile::kStages == 1) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // dO has landed
        }
        cta.compute_ds(rdS, rP, walk, first_key);
        cta.share_p_ds(rP, rdS);
        if constexpr (!Tile::kInRegisters) __syncthreads();  // P^T and dS^T are complete
        cta.accumulate_dk(rdK, rdS, walk.stage);
        cta.accumulate_dv(rdV, rP, walk.stage);

        if constexpr (Tile::kInRegisters || Tile::kStages == 1)
            __syncthreads();  // dS^T is complete; all warps have left Q
        if constexpr (Tile::kStages == 1) {
            if (!next.done()) {
                cta.load_q(next);
                cta.load_statistics(next);
                cta.load_words(next, first_key);
                cta.load_bias(next, first_key);
            }
            ptx::cp_async_commit();
        }
        // With a bias no register is left for it beside first_key.
        const int tile = Tile::kBiasTiles ? ptx::not_hoisted(first_key) / Tile::kBlockKV : kv_tile;
        const DQSemaphore<Tile> dq_semaphore{params, cta, tile, walk.head, walk.q_tile()};
        if (kWaitFirst && params.deterministic) dq_semaphore.wait();
        compile_time_for<Tile::kDQSlices>([&](auto slice) {
            typename Tile::DQ rdQ;
            cta.template compute_dq<slice>(rdQ);
            if (!kWaitFirst && params.deterministic) dq_semaphore.wait();
            cta.add_dq(rdQ, walk, slice);
        });
        if constexpr (Tile::kBiasTiles)
            if (params.stores_dbias) cta.store_dbias(walk, first_key);
        if (params.deterministic) dq_semaphore.end();
        walk = next;
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // all warps have left the K and V tiles; the tile coordinates are stored
    Tile(params, stored.sequence, stored.head).store_dk_dv(rdK, rdV, stored.first_row);
    if constexpr (Tile::kBiasTiles)
        if (params.stores_dbias)
            Tile(params, stored.sequence, stored.head).zero_hidden_dbias(stored.first_row);
}

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions, bool kLessMemory>
using Fa2BackwardTile =
    BackwardTile<Element, kHeadDim, kHeadDimV, kOptions,
                 tuning::fa2_backward_shape({kHeadDim, kHeadDimV}, kOptions, kLessMemory)>;

template <int kHeadDim, int kHeadDimV>
int Fa2<kHeadDim, kHeadDimV>::backward_shared_bytes() {
    constexpr OptionSets kSets = row_of(tuning::kFa2Backward, {kHeadDim, kHeadDimV}).options;
    return largest_of<kSets>([](auto options) {
        return Fa2BackwardTile<__half, kHeadDim, kHeadDimV, options.value, true>::kSharedBytes;
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa2<kHeadDim, kHeadDimV>::backward(const BackwardParams& params,
                                               const BackwardKernel& kernel, cudaStream_t stream) {
    constexpr tuning::Fa2BackwardRow kRow = row_of(tuning::kFa2Backward, {kHeadDim, kHeadDimV});
    static_assert(kRow.plain.block_q % kRow.small_plain.block_q == 0);  // see MmaKernels
    return dispatch_kernel<kRow.options>(params, kernel, [&](auto element, auto options) {
        using Large = Fa2BackwardTile<decltype(element), kHeadDim, kHeadDimV, options.value, false>;
        using Small = Fa2BackwardTile<decltype(element), kHeadDim, kHeadDimV, options.value, true>;
        static_assert(Large::kBlockKV == Small::kBlockKV &&
                      Large::kCtasPerSm == Small::kCtasPerSm);  // the plan has one tile order
        return launch_fitting<Large, Small>(kernel.gpu, [&](auto chosen) {
            using Tile = typename decltype(chosen)::type;
            return launch_backward<Tile, fa2_backward_kernel<Tile>>(
                params, work_tile_count(params.tile_order), stream);
        });
    });
}

}  // namespace flash_ext
