// The tiles of the gradient of a bias, and the tiles of scores that each of them is summed over:
// in the dimensions in which the bias is broadcast (size 1) all, in the others its own.
#pragma once

#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

// The number of tiles of dbias in a dimension.
FLASH_HOST_DEVICE constexpr int bias_tiles(int size, int block) {
    return size == 1 ? 1 : ceil_div(size, block);
}

// Positions begin to end - 1 of a dimension contribute to position `own` of dbias.
FLASH_HOST_DEVICE constexpr Interval contributing(int size, int own, int count) {
    return size == 1 ? Interval{0, count} : Interval{own, min_of(own + 1, count)};
}

struct DBiasTile {
    int batch;
    int head;
    int q_tile;
    int kv_tile;
};

FLASH_HOST_DEVICE constexpr int64_t dbias_tile_count(const Bias& bias, int block_q, int block_kv) {
    return int64_t{bias_tiles(bias.sizes[3], block_kv)} * bias_tiles(bias.sizes[2], block_q) *
           bias.sizes[1] * bias.sizes[0];
}

FLASH_HOST_DEVICE constexpr DBiasTile dbias_tile(const Bias& bias, int number, int block_q,
                                                 int block_kv) {
    const int kv_tiles = bias_tiles(bias.sizes[3], block_kv);
    const int tiles = kv_tiles * bias_tiles(bias.sizes[2], block_q);
    const int tile = number % tiles;
    const int matrix = number / tiles;
    return {matrix / bias.sizes[1], matrix % bias.sizes[1], tile / kv_tiles, tile % kv_tiles};
}

// The walk over the tiles of scores of a tile of dbias: sequence by sequence, head by head, and
// within a head by Q tiles. `ctas` CTAs share it, each a run of it. Heads count alike, and so do
// the tiles of a head, whether the mask hides them or not.
template <int kBlockQ, int kBlockKV>
struct DBiasWalk {
    const AttentionParams& params;
    DBiasTile own;
    int cta, ctas;

    // visit(sequence, query head, first query, first key), for the share of this CTA.
    template <class Visit>
    FLASH_HOST_DEVICE void for_each(Visit visit) const {
        const int (&sizes)[4] = params.bias.sizes;
        const Interval batches = contributing(sizes[0], own.batch, params.batch);
        const Interval heads = contributing(sizes[1], own.head, params.heads_q);
        const int heads_here = heads.end - heads.begin;
        // In units of a head's share for one CTA.
        const int count = (batches.end - batches.begin) * heads_here;
        const int begin = count * cta;
        const int end = begin + count;
        const int first_sequence = params.cu_seqlens_q == nullptr ? 0 : 1;
        for (int i = begin / ctas; i * ctas < end; ++i) {
            const Sequence sequence = sequence_of<true>(
                params, first_sequence + batches.begin + i / heads_here);
            const int first = max_of(begin - i * ctas, 0);
            const int last = min_of(end - i * ctas, ctas);
            visit_head(sequence, heads.begin + i % heads_here, first, last, visit);
        }
    }

 private:
    // The tiles from the share `first` to `last`, of `ctas`, of a head.
    template <class Visit>
    FLASH_HOST_DEVICE void visit_head(const Sequence& sequence, int head, int first, int last,
                                      Visit visit) const {
        const Interval q_tiles = contributing(params.bias.sizes[2], own.q_tile,
                                              ceil_div(sequence.seqlen_q, kBlockQ));
        const Interval kv_tiles = contributing(params.bias.sizes[3], own.kv_tile,
                                               ceil_div(sequence.seqlen_k, kBlockKV));
        if (q_tiles.empty() || kv_tiles.empty()) return;
        const int q_count = q_tiles.end - q_tiles.begin;
        const int kv_count = kv_tiles.end - kv_tiles.begin;
        int q_begin = 0, q_end = q_count;          // of the Q tiles here
        int kv_begin = 0, kv_end = kv_count;       // of the first one and of the last one
        if (first > 0 || last < ctas) {
            const int64_t tiles = int64_t{q_count} * kv_count;
            const int64_t from = tiles * first / ctas;
            const int64_t until = tiles * last / ctas;
            if (from >= until) return;
            q_begin = static_cast<int>(from / kv_count);
            q_end = static_cast<int>((until - 1) / kv_count) + 1;
            kv_begin = static_cast<int>(from - int64_t{q_begin} * kv_count);
            kv_end = static_cast<int>(until - int64_t{q_end - 1} * kv_count);
        }
        const BandMask mask = mask_of(params, sequence);
        for (int i = q_begin; i < q_end; ++i) {
            const int q_tile = q_tiles.begin + i;
            const VisibleTiles seen =
                VisibleTiles::of_queries(mask, tile_interval(q_tile, kBlockQ), kBlockKV)
                    .within({kv_tiles.begin + (i == q_begin ? kv_begin : 0),
                             kv_tiles.begin + (i == q_end - 1 ? kv_end : kv_count)});
            for (int j = seen.begin; j < seen.end; ++j)
                visit(sequence, head, q_tile * kBlockQ, seen.tile(j) * kBlockKV);
        }
    }
};

}  // namespace flash_ext
