// Gradient of the bias, for every variant: dbias = dS of the scores after softcap, summed over the
// dimensions in which the bias is broadcast (size 1).
//
// One CTA per tile of dbias. It recomputes S and dP of every tile of scores that the tile of dbias
// was added to, in a fixed order, and sums their dS in registers: no atomics, nothing of size Sq x
// Sk in memory except dbias itself, and the same bits every time. lse and delta come from the
// workspace of the variant's backward. Iterations, warps and shared memory are those of
// backward_tile.cuh.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "kernels/common/shared_bias_gradient.cuh"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "schedule/dbias_tiles.cuh"

namespace flash_ext {

template <class Element, int kHeadDim>
using BiasGradientTile =
    BackwardTile<Element, kHeadDim, kHeadDim, tuning::kAllAndMask,
                 tuning::fa2_backward_shape({kHeadDim, kHeadDim}, tuning::kAllAndMask)>;

template <class Tile>
struct BiasGradient {
    using Scores = typename Tile::Scores;

    const BackwardParams& params;

    // sum += dS of all tiles of scores of one sequence and head.
    FLASH_DEVICE void add_head(Scores& sum, const Sequence& sequence, int head_q, int q_tile_own,
                               int kv_tile_own) const {
        const Tile cta(params, sequence, head_q / (params.heads_q / params.heads_k));
        const Interval q_tiles = contributing(params.bias.sizes[2], q_tile_own,
                                              ceil_div(sequence.seqlen_q, Tile::kBlockQ));
        const Interval own_kv_tiles = contributing(params.bias.sizes[3], kv_tile_own,
                                                   ceil_div(sequence.seqlen_k, Tile::kBlockKV));
        for (int q_tile = q_tiles.begin; q_tile < q_tiles.end; ++q_tile) {
            const VisibleTiles seen = VisibleTiles::of_queries(
                cta.mask, tile_interval(q_tile, Tile::kBlockQ), Tile::kBlockKV);
            const VisibleTiles kv_tiles = seen.within(own_kv_tiles);
            for (int i = kv_tiles.begin; i < kv_tiles.end; ++i) {
                const int first_key = kv_tiles.tile(i) * Tile::kBlockKV;
                const BlockKind kind = kind_of_tile(sequence, head_q, q_tile, first_key);
                if (kind == BlockKind::kHidden) continue;
                const typename Tile::Walk walk{head_q, q_tile, kind == BlockKind::kPartial};
                cta.load_kv(first_key);
                cta.load_q(walk);
                cta.load_do(walk);
                cta.load_statistics(walk);
                cta.load_words(walk, first_key);
                ptx::cp_async_commit();
                ptx::cp_async_wait<0>();
                __syncthreads();  // the tiles and the statistics have landed
                Scores rP, rdS;
                cta.compute_p(rP, walk, first_key);
                cta.template compute_ds<false>(rdS, rP, walk, first_key);
                sum.map([](float x, float ds) { return x + ds; }, rdS);
                __syncthreads();  // all warps have left the tiles
            }
        }
    }

    // What a mask of tiles says of a tile of scores.
    FLASH_DEVICE BlockKind kind_of_tile(const Sequence& sequence, int head, int q_tile,
                                        int first_key) const {
        if (params.tile_mask.kv_tiles == nullptr) return BlockKind::kFull;
        return kind_of(
            runs_of_q_block(params, sequence.batch, head, q_tile * Tile::kBlockQ / kMaskBlock),
            first_key / kMaskBlock);
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BackwardParams params) {
    const int (&sizes)[4] = params.bias.sizes;
    const auto [batch_own, head_own, q_tile, kv_tile] =
        dbias_tile(params.bias, blockIdx.x, Tile::kBlockQ, Tile::kBlockKV);

    const BiasGradient<Tile> gradient{params};
    typename BiasGradient<Tile>::Scores sum;
    sum.clear();
    const Interval batches = contributing(sizes[0], batch_own, params.batch);
    const Interval heads = contributing(sizes[1], head_own, params.heads_q);
    const int first = params.cu_seqlens_q == nullptr ? 0 : 1;  // number of the batch's sequence 0
    for (int batch = batches.begin; batch < batches.end; ++batch) {
        const Sequence sequence = warp_uniform<true>(sequence_of<true>(params, first + batch));
        for (int head = heads.begin; head < heads.end; ++head)
            gradient.add_head(sum, sequence, head, q_tile, kv_tile);
    }
    store_dbias_sums<Tile>(params, sum, {batch_own, head_own, q_tile, kv_tile});
}

cudaError_t bias_gradient(const BackwardParams& params, const BackwardKernel& kernel,
                          cudaStream_t stream) {
    if (kernel.ctas_per_dbias > 0) return shared_bias_gradient(params, kernel, stream);
    const auto* row = tuning::find_row(tuning::kBiasGradient, {params.head_dim, params.head_dim_v});
    if (row == nullptr) return kNoKernel;
    return dispatch_head_dims<tuning::kBiasGradient>(row->head_dims, [&](auto dim, auto) {
        return dispatch_element(params.element_type, [&](auto element) {
            using Tile = BiasGradientTile<decltype(element), dim.value>;
            const int64_t ctas = dbias_tile_count(params.bias, Tile::kBlockQ, Tile::kBlockKV);
            return launch_kernel<bias_gradient_kernel<Tile>>(ctas, Tile::kThreads,
                                                             Tile::kSharedBytes, params, stream);
        });
    });
}

}  // namespace flash_ext
