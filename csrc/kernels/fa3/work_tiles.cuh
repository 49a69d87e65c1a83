// The tiles that a persistent CTA works on, one after another, and the work-tile pipeline, through
// which one of its producers describes them to the other producers and the consumers.
#pragma once

#include "plan/tuning.h"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/tile_mask.cuh"
#include "ptx/uniform.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/pipeline.cuh"

namespace flash_ext {

// A tile of Q and the KV tiles that its rows see.
struct QueryTile {
    Sequence sequence;
    int head;
    int first_query;  // negative: there is no more work
    VisibleTiles kv_tiles;
    int split;       // index of the split of the keys, in the forward
    bool large_lse;  // in the backward: does any row of the call have a reference?
    int row_group;   // in backward_dq.cuh: of query 0, see plan/workspace_rows.cuh
    union {
        int full_tiles;   // with a TileMask: how many of kv_tiles are full; they come first
        int first_split;  // of the fixed splits with keys
    };
    union {
        int turn;       // of TurnedTiles; only with ALiBi, in the forward
        int end_split;  // after the last of the fixed splits with keys
    };

    FLASH_DEVICE int& first_row() { return first_query; }
};

// A tile of K and V and the Q tiles that see its keys.
struct KeyTile {
    Sequence sequence;
    int head;       // of K and V
    int first_key;  // negative: there is no more work
    VisibleTiles q_tiles;
    bool large_lse;       // does any row of the call have a reference?
    int first_row_group;  // see plan/workspace_rows.cuh; only in backward.cuh
    int full_tiles;       // as in a QueryTile
    int last_first;       // in backward.cuh: 0, or the sum of the first and the last index, if
                          // Q tiles come from the last one to the first

    FLASH_DEVICE int& first_row() { return first_key; }
};

// The number of the Q tile with index i.
FLASH_DEVICE int q_tile(int last_first, int i) { return last_first == 0 ? i : last_first - i; }

// The tiles of a row of runs, of which a block has kPerBlock, in place of the band's.
template <int kPerBlock>
FLASH_DEVICE void take_runs(VisibleTiles& tiles, int& full_tiles, const BlockRuns& runs) {
    tiles = {0, runs.count() * kPerBlock};
    full_tiles = runs.full() * kPerBlock;
}

// A band's tiles, from the first to the last or from the last to the first: tile i is number i.
struct BandTiles {
    static FLASH_DEVICE int tile(int i) { return VisibleTiles::tile(i); }
};

// Tile i is number i + turn, modulo all `tiles`.
struct TurnedTiles {
    int turn;
    int tiles;

    FLASH_DEVICE int tile(int i) const { return i + turn - (i + turn >= tiles ? tiles : 0); }
};

// With ALiBi scores fall on both sides of the diagonal. From the last key on their maximum would
// rise with each tile, and most tiles would be retried (optimistic_softmax.cuh). So a Q tile that
// sees all keys goes from the diagonal down to the first tile, then from the last one down. The
// last one may need a mask, so kernels take it alone. 0: no turn.
FLASH_DEVICE int turn_to_diagonal(const AttentionParams& params, const QueryTile& tile, int block_q,
                                  int block_kv) {
    const Sequence& s = tile.sequence;
    const int last_query = tile.first_query + block_q - 1;
    const int tiles = tile.kv_tiles.end;
    if (tile.kv_tiles.begin > 0 || tiles * block_kv < s.seqlen_k ||
        !mask_of(params, s).is_full({tile.first_query, last_query + 1}, {0, s.seqlen_k}))
        return 0;
    const int diagonal = (last_query + s.seqlen_k - s.seqlen_q) / block_kv;
    return (clamp(diagonal, 0, tiles - 1) + 1) % tiles;
}

FLASH_DEVICE VisibleTiles warp_uniform(const VisibleTiles& tiles) {
    return {ptx::warp_uniform(tiles.begin), ptx::warp_uniform(tiles.end)};
}

// Describes a Q tile of `queries` queries. The last tile of a sequence comes first: under a causal
// mask it is the longest. For a padding tile first_query is negative. Members are written one by
// one, since producers have few registers.
template <class Kernel, class Number = int>
FLASH_DEVICE void describe(QueryTile& query_tile, const AttentionParams& params,
                           const WorkTile& work, int queries = Kernel::kBlockQ,
                           Number by_queries = Kernel::kBlockQ) {
    query_tile.head = work.head;
    constexpr bool kPages = requires { requires Kernel::kPages; };
    const SequenceTile tile =
        tile_of<true, Rows::kQueries, kPages>(params, work.batch, work.tile_index, by_queries);
    const Sequence& s = tile.sequence;
    query_tile.sequence = s;
    const int tiles = (s.seqlen_q + queries - 1) / by_queries;
    const int first_query = (tiles - 1 - tile.tile) * queries;
    query_tile.first_query = first_query;
    query_tile.kv_tiles = VisibleTiles::of_queries(
        mask_of(params, s), {first_query, first_query + queries}, Kernel::kBlockKV);
}

// Describes a KV tile. For a padding tile first_key is not written.
template <class Kernel>
FLASH_DEVICE void describe(KeyTile& key_tile, const AttentionParams& params, const WorkTile& work) {
    key_tile.head = work.head;
    const SequenceTile tile =
        tile_of<true, Rows::kKeys>(params, work.batch, work.tile_index, Kernel::kBlockKV);
    const Sequence& s = tile.sequence;
    key_tile.sequence = s;
    const int first_key = tile.tile * Kernel::kBlockKV;
    if (first_key >= s.rows_k) return;
    key_tile.first_key = first_key;
    key_tile.q_tiles = VisibleTiles::of_keys<true>(
        mask_of(params, s), {first_key, first_key + Kernel::kBlockKV}, Kernel::kBlockQ);
}

// The work-tile pipeline. One producer fetches tiles and describes them; the other producers and
// the consumers read the descriptions. A CTA that fetches early takes work from CTAs that will be
// idle sooner. So the next tile is fetched only when the loads of this one are nearly complete.
// Where another producer issues these loads, it signals that by the barrier `fetch`.
template <class Tile>
struct WorkTilePipeline {
    static constexpr int kStages = 4;
    static constexpr int kTileBytes = 64;
    static_assert(sizeof(Tile) <= kTileBytes);
    using Descriptions = Pipeline<kStages, kTileBytes>;
    using State = typename Descriptions::State;

    struct Storage {
        typename Descriptions::Stages stages;
        typename Descriptions::Barriers barriers;
        uint64_t fetch;
    };

    Storage& storage;
    Descriptions descriptions;

    FLASH_DEVICE explicit WorkTilePipeline(Storage& s)
        : storage(s), descriptions(s.stages, s.barriers) {}

    FLASH_DEVICE void init(int readers) const {
        descriptions.init(readers);
        ptx::mbarrier_init(fetch_barrier(), 1);
    }

    FLASH_DEVICE Tile& operator[](const State& t) const {
        return *reinterpret_cast<Tile*>(storage.stages.bytes[t.stage]);
    }

    // The phase of a pipeline with one stage that is filled once per tile. It is the parity of the
    // number of the tile, and of its stage, since kStages is even.
    static FLASH_DEVICE uint32_t phase(const State& t) { return t.stage % 2; }

    // By the producer that describes tiles: `linear` first, then those that are fetched, until one
    // is >= `total`. describe(tile, linear) leaves first_row() negative for a padding tile, which
    // is passed over. committed(tile, t) may issue loads and returns the next tile that it fetched.
    template <class Fetch, class Describe, class Committed>
    FLASH_DEVICE void produce(int linear, int total, Fetch fetch, Describe describe,
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

    // By the producer that loads, when the loads of its tile are nearly complete ...
    FLASH_DEVICE void allow_fetch() const { ptx::mbarrier_arrive(fetch_barrier()); }
    // ... and by the producer that fetches, which waits for this.
    FLASH_DEVICE void wait_to_fetch(const State& t) const {
        ptx::mbarrier_wait(fetch_barrier(), phase(t));
    }

    // By a producer that loads: visits the tiles in order.
    template <class Visit>
    FLASH_DEVICE void for_each(Visit visit) const {
        for (State t;; t.advance()) {
            descriptions.consumer_wait(t);
            Tile& tile = (*this)[t];
            if (tile.first_row() < 0) return;
            visit(tile);
            descriptions.consumer_release(t);
        }
    }

 private:
    FLASH_DEVICE uint32_t fetch_barrier() const { return ptx::shared_address(&storage.fetch); }
};

// Where the queries of a sequence are, for TMA.
template <class Element>
FLASH_DEVICE TensorRows query_tensor_rows(const TensorView& view, const Sequence& s, int head) {
    return tensor_rows<Element>(view, s.batch, head, s.q_begin, s.seqlen_q);
}

// A warp's rows of dK or dV, from row `row` of the KV tile on.
template <class Element>
FLASH_DEVICE GlobalTile<Element> gradient_rows(const TensorView& view, const KeyTile& tile, int row,
                                               int cols) {
    const Sequence& s = tile.sequence;
    const int first = tile.first_key + row;
    return global_tile<Element>(view, s.batch, s.k_begin + first, tile.head, s.rows_k - first,
                                cols);
}

// Writes zeros to a warp's 16 rows of a result of at most kMostCols columns.
template <int kMostCols = tuning::kMaxHeadDim, class Element>
FLASH_DEVICE void store_zeros(const GlobalTile<Element>& g) {
    constexpr int kCols = 32 * 8;  // at a time, 16 bytes a lane
    static_assert(kMostCols <= 2 * kCols);
    const auto store = [&](int row, int col) {
        if (col < g.cols) *reinterpret_cast<uint4*>(g.data + row * g.row_stride + col) = {};
    };
    for (int row = 0; row < min_of(16, g.rows); ++row) {
        store(row, lane_id() * 8);
        if constexpr (kMostCols > kCols) store(row, lane_id() * 8 + kCols);
    }
}

// Stores dK or dV to rows of gradient_rows(). The gradient of parts is in float32, a number in the
// place of two elements.
template <class Element, class Gradient>
FLASH_DEVICE void store_gradient(const BackwardParams& params, const GlobalTile<Element>& g,
                                 const Gradient& x) {
    if (params.parts > 1) {
        store_rows(
            GlobalTile<float>{reinterpret_cast<float*>(g.data), g.row_stride / 2, g.rows, g.cols},
            x);
    } else {
        store_rows(g, x);
    }
}
template <int kMostCols, class Element>
FLASH_DEVICE void store_zero_gradient(const BackwardParams& params, GlobalTile<Element> g) {
    if (params.parts > 1) g.cols *= 2;
    store_zeros<2 * kMostCols>(g);
}

}  // namespace flash_ext
