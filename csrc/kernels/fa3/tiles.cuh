// What the FA3 kernels share around their inner loops: the tiles that a CTA works on, one after
// another; how its warpgroups pass them on; loads by TMA; the roles of warpgroups.
#pragma once

#include "plan/head_dims.h"
#include "problem/mask.cuh"
#include "problem/sequences.cuh"
#include "ptx/registers.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/copy.cuh"
#include "tile/tensor_map.cuh"
#include "tile/tma_ring.cuh"

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

// The ring in which one producer describes tiles to all others of its CTA, at byte kOffset of
// shared memory. Of its barriers the last says that the next tile may be fetched: a CTA that
// fetches early takes work from others that will be free sooner.
template <class Tile, int kOffset>
struct TileQueue {
    using Ring = TmaRing<4, 64>;
    using Cursor = typename Ring::Cursor;
    static constexpr int kBytes = Ring::kSlots * Ring::kSlotBytes;
    static constexpr int kBarrierBytes = Ring::kBarrierBytes + 8;
    static_assert(sizeof(Tile) <= Ring::kSlotBytes);

    Ring ring;

    __device__ __forceinline__ TileQueue(uint32_t shared, int barriers)
        : ring{shared + kOffset, shared + barriers} {}

    __device__ __forceinline__ void init(int readers) const {
        ring.init(readers);
        ptx::mbarrier_init(fetch_barrier(), 1);
    }

    __device__ __forceinline__ Tile& operator[](const Cursor& t) const {
        return *reinterpret_cast<Tile*>(dynamic_shared() + kOffset + t.slot * Ring::kSlotBytes);
    }

    // Of a tile, as a parity for what has one slot for each: numbers of tiles and of their slots
    // both alternate.
    static __device__ __forceinline__ uint32_t parity(const Cursor& t) { return t.slot % 2; }

    // The producer: tile `linear` first, then what fetch() gives, until that is `total`.
    // describe(tile, linear) leaves first_row() below 0 for a padding tile, published(tile, t) may
    // begin to load.
    template <class Fetch, class Describe, class Published>
    __device__ __forceinline__ void produce(int linear, int total, Fetch fetch, Describe describe,
                                            Published published) const {
        for (Cursor t;; t.advance()) {
            ring.acquire(t);
            Tile& tile = (*this)[t];
            while (true) {
                tile.first_row() = -1;
                if (linear >= total) return ring.publish(t);
                describe(tile, linear);
                if (tile.first_row() >= 0) break;
                linear = fetch();
            }
            ring.publish(t);
            published(tile, t);
            ptx::mbarrier_wait(fetch_barrier(), parity(t));
            linear = fetch();
        }
    }

    // By one of the other producers, when the tile that it works on is nearly done.
    __device__ __forceinline__ void let_fetch() const { ptx::mbarrier_arrive(fetch_barrier()); }

    // The tiles in their order, for a producer that loads.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for (Cursor t;; t.advance()) {
            ring.wait(t);
            Tile& tile = (*this)[t];
            if (tile.first_row() < 0) return;
            visit(tile);
            ring.release(t);
        }
    }

 private:
    __device__ __forceinline__ uint32_t fetch_barrier() const {
        return ring.barriers + Ring::kBarrierBytes;
    }
};

// Rows from first_row on to a ring's slot, when that is empty.
template <class Tile, int kBoxRows = Tile::kRows, class Ring>
__device__ __forceinline__ void load_tile(const Ring& ring, const typename Ring::Cursor& cursor,
                                          const CUtensorMap& map, const TensorRows& rows,
                                          int first_row) {
    ring.acquire(cursor);
    ptx::mbarrier_arrive_expect(ring.full(cursor), Tile::kBytes);
    rows.load<Tile, kBoxRows>(map, ring.tile(cursor), ring.full(cursor), first_row);
}

// And what goes with them: a number for each of the tile's rows, from global to shared memory.
template <class Tile, class Ring>
__device__ __forceinline__ void load_tile(const Ring& ring, const typename Ring::Cursor& cursor,
                                          const CUtensorMap& map, const TensorRows& rows,
                                          int first_row, uint32_t statistics, const float* source) {
    constexpr int kStatisticsBytes = Tile::kRows * 4;
    ring.acquire(cursor);
    ptx::mbarrier_arrive_expect(ring.full(cursor), Tile::kBytes + kStatisticsBytes);
    rows.load<Tile>(map, ring.tile(cursor), ring.full(cursor), first_row);
    ptx::bulk_load(statistics, source + first_row, kStatisticsBytes, ring.full(cursor));
}

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

// The first warpgroup produces, the others consume, who get its registers.
template <class Config, class Kernel>
__device__ __forceinline__ void run_roles(const Kernel& kernel) {
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        kernel.produce();
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        kernel.consume();
    }
}

}  // namespace flash_ext
