// The tiles of the gradient of a bias, and the tiles of scores that each of them is summed over:
// in the dimensions in which the bias is broadcast (size 1) all, in the others its own.
#pragma once

#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

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
//
// Producers have few registers, so what is the same for a head is in memory that they name.
struct DBiasHead {
    DBiasTile own;  // of dbias
    Sequence sequence;
    int head;              // of Q
    int q_begin, q_end;    // its Q tiles
    Interval kv_tiles;     // of all of them, but
    int kv_begin, kv_end;  // where the first one begins and the last one ends
};

template <int kBlockQ, int kBlockKV>
struct DBiasWalk {
    const AttentionParams& params;
    DBiasHead& now;
    int cta, ctas;

    // visit(first query, first key), for the share of this CTA of tile `own`.
    template <class Visit>
    FLASH_HOST_DEVICE void for_each(const DBiasTile& own, Visit visit) const {
        now.own = own;
        const int (&sizes)[4] = params.bias.sizes;
        const int heads = sizes[1] == 1 ? params.heads_q : 1;
        // In units of a head's share for one CTA.
        const int count = (sizes[0] == 1 ? params.batch : 1) * heads;
        const int end = count * (cta + 1);
        for (int i = count * cta / ctas; i * ctas < end; ++i) {
            describe(i, heads, max_of(count * cta - i * ctas, 0), min_of(end - i * ctas, ctas));
            visit_head(visit);
        }
    }

 private:
    // Head i, from the share `first` to `last` of `ctas`.
    FLASH_HOST_DEVICE void describe(int i, int heads, int first, int last) const {
        const int (&sizes)[4] = params.bias.sizes;
        const int batch = sizes[0] == 1 ? i / heads : now.own.batch;
        const Sequence sequence =
            sequence_of<true>(params, batch + (params.cu_seqlens_q == nullptr ? 0 : 1));
        now.sequence = sequence;
        now.head = sizes[1] == 1 ? i % heads : now.own.head;
        const Interval q_tiles =
            contributing(sizes[2], now.own.q_tile, ceil_div(sequence.seqlen_q, kBlockQ));
        const Interval kv_tiles =
            contributing(sizes[3], now.own.kv_tile, ceil_div(sequence.seqlen_k, kBlockKV));
        now.kv_tiles = kv_tiles;
        now.kv_begin = kv_tiles.begin;
        now.kv_end = kv_tiles.end;
        now.q_begin = q_tiles.begin;
        now.q_end = kv_tiles.empty() ? q_tiles.begin : q_tiles.end;
        if (first == 0 && last == ctas) return;
        const int columns = max_of(kv_tiles.end - kv_tiles.begin, 1);
        const int64_t tiles = int64_t{now.q_end - now.q_begin} * columns;
        const int64_t from = tiles * first / ctas;
        const int64_t until = tiles * last / ctas;
        now.q_end = now.q_begin;
        if (from >= until) return;
        now.q_end += static_cast<int>((until - 1) / columns) + 1;
        now.q_begin += static_cast<int>(from / columns);
        now.kv_begin += static_cast<int>(from % columns);
        now.kv_end = kv_tiles.begin + static_cast<int>((until - 1) % columns) + 1;
    }

    template <class Visit>
    FLASH_HOST_DEVICE void visit_head(Visit visit) const {
        for (int i = now.q_begin; i < now.q_end; ++i) {
            const VisibleTiles seen =
                VisibleTiles::of_queries(mask_of(params, now.sequence), tile_interval(i, kBlockQ),
                                         kBlockKV)
                    .within({i == now.q_begin ? now.kv_begin : now.kv_tiles.begin,
                             i == now.q_end - 1 ? now.kv_end : now.kv_tiles.end});
            for (int j = seen.begin; j < seen.end; ++j) visit(i * kBlockQ, seen.tile(j) * kBlockKV);
        }
    }
};

}  // namespace flash_ext
