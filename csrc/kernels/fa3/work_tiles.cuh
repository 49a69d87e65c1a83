// The tiles that a persistent CTA works on, one after another, and the pipeline in which one of its
// producers describes them to all others.
#pragma once

#include "plan/head_dims.h"
#include "problem/mask.cuh"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/copy.cuh"
#include "tile/pipeline.cuh"

namespace flash_ext {

// Rows of Q that a CTA works on next, and the KV tiles that they see.
struct QueryTile {
    Sequence sequence;
    int head;
    int first_query;  // below 0: there is no more work
    Interval kv_tiles;
    int split;       // of the keys, where they are split
    bool large_lse;  // in the backward: have any rows of the call a reference?

    __device__ __forceinline__ int& first_row() { return first_query; }
};

// Rows of K and V, and the Q tiles that see them.
struct KeyTile {
    Sequence sequence;
    int head;       // of K and V
    int first_key;  // below 0: there is no more work
    Interval q_tiles;
    bool large_lse;  // have any queries of the call a reference?

    __device__ __forceinline__ int& first_row() { return first_key; }
};

__device__ __forceinline__ BandMask mask_of(const AttentionParams& params,
                                            const Sequence& sequence) {
    return {sequence.seqlen_q, sequence.seqlen_k, params.window_left, params.window_right};
}

// A tile, the last of a sequence first: it is the longest under a causal mask. first_query comes
// out below 0 for a padding tile; `queries` is how many a tile has. Written piece by piece:
// producers have few registers.
template <class Config>
__device__ __forceinline__ void describe(QueryTile& query_tile, const AttentionParams& params,
                                         const WorkTile& work, int queries = Config::kBlockQ) {
    query_tile.head = work.head;
    const SequenceTile tile =
        tile_of<true, Rows::kQueries>(params, work.batch, work.tile_index, queries);
    const Sequence& s = tile.sequence;
    query_tile.sequence = s;
    const int first_query = (ceil_div(s.seqlen_q, queries) - 1 - tile.tile) * queries;
    query_tile.first_query = first_query;
    query_tile.kv_tiles = tiles_of(mask_of(params, s).keys_of({first_query, first_query + queries}),
                                   Config::kBlockKV);
}

// The same for keys; first_key stays as it is for a padding tile.
template <class Config>
__device__ __forceinline__ void describe(KeyTile& key_tile, const AttentionParams& params,
                                         const WorkTile& work) {
    key_tile.head = work.head;
    const SequenceTile tile =
        tile_of<true, Rows::kKeys>(params, work.batch, work.tile_index, Config::kBlockKV);
    const Sequence& s = tile.sequence;
    key_tile.sequence = s;
    const int first_key = tile.tile * Config::kBlockKV;
    if (first_key >= s.rows_k) return;
    key_tile.first_key = first_key;
    Interval queries = mask_of(params, s).queries_of({first_key, first_key + Config::kBlockKV});
    if (first_key >= s.seqlen_k) queries.end = 0;  // not in use
    key_tile.q_tiles = tiles_of(queries, Config::kBlockQ);
}

// The work-tile pipeline. One producer fetches tiles and describes them, all others of the CTA and
// its consumers read the descriptions. A CTA that fetches early takes work from others that will be
// free sooner, so the next tile is fetched when another producer says that this one is nearly done
// (`fetch`).
template <class Tile>
struct WorkTilePipeline {
    static constexpr int kStages = 4;
    static constexpr int kTileBytes = 64;
    static_assert(sizeof(Tile) <= kTileBytes);
    using Descriptions = Pipeline<kStages, kTileBytes>;
    using State = typename Descriptions::State;

    // A member of a kernel's SharedStorage.
    struct Storage {
        typename Descriptions::Stages stages;
        typename Descriptions::Barriers barriers;
        uint64_t fetch;
    };

    Storage& storage;
    Descriptions descriptions;

    __device__ __forceinline__ explicit WorkTilePipeline(Storage& s)
        : storage(s), descriptions(s.stages, s.barriers) {}

    __device__ __forceinline__ void init(int readers) const {
        descriptions.init(readers);
        ptx::mbarrier_init(fetch_barrier(), 1);
    }

    __device__ __forceinline__ Tile& operator[](const State& t) const {
        return *reinterpret_cast<Tile*>(storage.stages.bytes[t.stage]);
    }

    // Of a tile, for what has one stage for each: numbers of tiles and of their stages alternate
    // alike.
    static __device__ __forceinline__ uint32_t phase(const State& t) { return t.stage % 2; }

    // The producer. Describes tile `linear` first, then what fetch() gives, until that is `total`.
    // describe(tile, linear) leaves first_row() below 0 for a padding tile; committed(tile, t) may
    // begin to load, and says what was fetched next.
    template <class Fetch, class Describe, class Committed>
    __device__ __forceinline__ void produce(int linear, int total, Fetch fetch, Describe describe,
                                            Committed committed) const {
        for (State t;; t.advance()) {
            descriptions.producer_acquire(t);
            Tile& tile = (*this)[t];
            while (true) {
                tile.first_row() = -1;
                if (linear >= total) return descriptions.producer_commit(t);
                describe(tile, linear);
                if (tile.first_row() >= 0) break;
                linear = fetch();
            }
            descriptions.producer_commit(t);
            linear = committed(tile, t);
        }
    }

    // By the producer that loads, when the tile that it works on is nearly done ...
    __device__ __forceinline__ void allow_fetch() const { ptx::mbarrier_arrive(fetch_barrier()); }
    // ... for which the one that fetches waits.
    __device__ __forceinline__ void wait_to_fetch(const State& t) const {
        ptx::mbarrier_wait(fetch_barrier(), phase(t));
    }

    // The tiles in their order, for a producer that loads.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for (State t;; t.advance()) {
            descriptions.consumer_wait(t);
            Tile& tile = (*this)[t];
            if (tile.first_row() < 0) return;
            visit(tile);
            descriptions.consumer_release(t);
        }
    }

 private:
    __device__ __forceinline__ uint32_t fetch_barrier() const {
        return ptx::shared_address(&storage.fetch);
    }
};

// A warp's rows of dK or dV, the first of them `row` within the KV tile.
template <class Element>
__device__ __forceinline__ GlobalTile<Element> gradient_rows(const TensorView& view,
                                                             const KeyTile& tile, int row,
                                                             int cols) {
    const Sequence& s = tile.sequence;
    const int first = tile.first_key + row;
    return global_tile<Element>(view, s.batch, s.k_begin + first, tile.head, s.rows_k - first,
                                cols);
}

// A warp's 16 rows of a result that is nothing but zeros.
template <class Element>
__device__ __forceinline__ void store_zeros(const GlobalTile<Element>& g) {
    static_assert(kMaxHeadDim <= 32 * 8);  // 16 bytes a lane
    for (int row = 0; row < min_of(16, g.rows); ++row)
        if (lane_id() * 8 < g.cols)
            *reinterpret_cast<uint4*>(g.data + row * g.row_stride + lane_id() * 8) = {};
}

}  // namespace flash_ext
