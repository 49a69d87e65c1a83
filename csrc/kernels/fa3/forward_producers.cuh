// The producers of the FA3 forward: K's, which fetches the Q tiles, Q's and V's. All load by TMA.
#pragma once

#include "kernels/fa3/forward.cuh"
#include "schedule/split_kv.cuh"
#include "schedule/tile_order.cuh"
#include "tile/tma_load.cuh"

namespace flash_ext {

template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::describe_next(QueryTile& tile,
                                                                  int linear) const {
    WorkTile work = work_tile(linear, params.schedule);
    if constexpr (Config::kMayHaveSplits) {
        tile.split = work.tile_index % params.num_splits;
        work.tile_index /= params.num_splits;
        if (pack_gqa_log2() > 0) work.head *= group();  // the first head of the group
    }
    describe<Config>(tile, params, work, Config::kBlockQ >> pack_gqa_log2());
    if constexpr (Config::kMayHaveSplits)
        tile.kv_tiles = split_of(tile.kv_tiles, tile.split, params.num_splits);
    // A tile without keys takes one iteration, too: all its scores are hidden, and TMA fills K
    // and V with zeros.
    if (tile.kv_tiles.empty()) {
        tile.sequence.seqlen_k = 0;
        tile.kv_tiles = {0, 1};
    }
}

// Fetches the Q tiles and loads their K tiles, last to first. The next Q tile is fetched a few
// iterations before it is needed.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::produce_k() const {
    typename KPipeline::State k;
    typename RowMajorVPipeline::State v;
    const int total = cta_count(params.schedule);
    const int at_once = params.schedule.tiles_at_once;
    int linear = static_cast<int>(blockIdx.x) * at_once;
    bool started = false;
    const auto fetch = [&] {
        if (++linear % at_once != 0) return linear;
        if (!started) params.scheduler.start();
        started = true;
        linear = params.scheduler.fetch(total / at_once) * at_once;
        return linear;
    };
    work_tiles.produce(
        linear, total, fetch, [&](QueryTile& tile, int linear) { describe_next(tile, linear); },
        [&](const QueryTile& tile, const WorkTileState&) {
            const Sequence& s = tile.sequence;
            const TensorRows rows = this->key_rows(params.k, s, this->head_k(tile.head));
            const VisibleTiles kv = tile.kv_tiles;
            int next = 0;
            for (int i = kv.end - 1; i >= kv.begin; --i) {
                if (i == min_of(kv.end - 1, kv.begin + Config::kFetchAhead)) next = fetch();
                load_tile<KTile, Config::kKVBoxRows>(k_pipeline, k, params.k_map, rows,
                                                     kv.tile(i) * Config::kBlockKV);
                k.advance();
                if constexpr (kFp8) {
                    const TensorRows v_rows = this->key_rows(params.v, s, this->head_k(tile.head));
                    load_tile<VTile, Config::kKVBoxRows>(row_major_v(), v, params.v_map, v_rows,
                                                         kv.tile(i) * Config::kBlockKV);
                    v.advance();
                }
            }
            return next;
        });
}

template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::produce_q() const {
    typename QPipeline::State q;
    work_tiles.for_each([&](const QueryTile& tile) {
        if constexpr (QPipeline::kStages == 1)  // still in use by the previous tile
            for_each_q_load(tile, [&](const TensorRows& rows, int, int first) {
                rows.prefetch<QTile>(params.q_map, first);
            });
        q_pipeline.producer_acquire(q);
        q_pipeline.producer_expect(q, QTile::kBytes);
        for_each_q_load(tile, [&](const TensorRows& rows, int row, int first) {
            rows.load_boxes<QTile>(params.q_map, q_pipeline.stage(q) + row * QTile::kPitch,
                                   q_pipeline.full(q), first);
        });
        q.advance();
    });
}

// visit(tensor rows, row of the tile, the tensor row that is loaded to it), for each box.
template <class Config>
template <class Visit>
__device__ __forceinline__ void Fa3Forward<Config>::for_each_q_load(const QueryTile& tile,
                                                                    Visit visit) const {
    const Sequence& s = tile.sequence;
    if (pack_gqa_log2() == 0) {
        const TensorRows queries = this->query_rows(params.q, s, tile.head);
#pragma unroll 1
        for (int row = 0; row < Config::kBlockQ; row += Config::kQBoxRows)
            visit(queries, row, tile.first_query + row);
        return;
    }
    // A row of the map is a head.
    const TensorView heads_as_rows = with_heads_as_rows(params.q);
#pragma unroll 1
    for (int row = 0; row < Config::kBlockQ; row += Config::kQBoxRows) {
        const int query = query_of(tile, row);
        const TensorRows heads =
            tensor_rows<Element>(heads_as_rows, s.batch, s.q_begin + query, tile.head, group());
        visit(heads, row, query < s.seqlen_q ? head_of(row) : group());  // past the end: zeros
    }
}

template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::produce_v() const {
    typename VPipeline::State v;
    work_tiles.for_each([&](const QueryTile& tile) {
        const Sequence& s = tile.sequence;
        const TensorRows rows = this->key_rows(params.v, s, this->head_k(tile.head));
        for (int i = tile.kv_tiles.end - 1; i >= tile.kv_tiles.begin; --i, v.advance())
            load_tile<VTile, Config::kKVBoxRows>(v_pipeline, v, params.v_map, rows,
                                                 tile.kv_tiles.tile(i) * Config::kBlockKV);
    });
}

template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::produce() const {
    switch (warp_id()) {
        case 0:
            return produce_k();
        case 3:
            return produce_q();
        case 2:
            if constexpr (!kFp8) return produce_v();
    }
}

}  // namespace flash_ext
