// FlashAttention-3 backward for wide heads, second kernel where there is a dS workspace: dQ = dS K,
// with the dS that backward_dkdv.cuh has stored. For Hopper.
//
// The grid has at most one CTA per SM. Each CTA fetches Q tiles of 128 rows until none is left. Its
// warpgroups have roles:
//
//   producer       two threads: dS and K; the Q tiles, fetched and described
//   two consumers  each owns 64 queries, with dQ in registers
//
// Shared memory: a pipeline whose stages hold K of 64 keys and the dS of both consumers for them;
// the work-tile pipeline (QueryTile).
//
//   barrier             arrivals per phase                   who waits
//   full(stages)        1: its producer; and TMA's bytes     consumers, before the matmul
//   empty(stages)       8: each consumer warp, when its      producer of stages, before the next
//                       matmul, if it has one, is complete   load
//   full(work tiles)    1: producer of Q tiles               producer of stages, consumers
//   empty(work tiles)   1: producer of stages; 256: each     producer of Q tiles, before it
//                       consumer thread, after the tile      describes another
//   fetch               1: producer of stages, before the    producer of Q tiles, before it
//                       last loads of a tile                 fetches the next
#pragma once

#include "kernels/fa3/backward_dkdv.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kStages>
struct Fa3BackwardDQGemm : Fa3Cta<Fa3BackwardWideParams, QueryTile> {
    static constexpr int kBlockQ = kConsumers * 64;
    static_assert(kBlockQ == tuning::kFa3DQBlockQ);
    static constexpr int kBlockKV = 64;
    static constexpr int kFetchAhead = 3;  // stages left when the next Q tile is fetched
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using DSTile = flash_ext::DSTile<Element>;
    struct Stage {
        char k[KTile::kBytes];
        char ds[kConsumers][DSTile::kBytes];
    };
    using StagePipeline = Pipeline<kStages, sizeof(Stage)>;
    using State = typename StagePipeline::State;
    using DQ = RegisterTile<16, kHeadDim>;

    struct SharedStorage {
        typename StagePipeline::Stages stages;
        typename StagePipeline::Barriers barriers;
        WorkTiles::Storage work_tiles;
    };

    static constexpr int kTileCount = 1;
    static cudaError_t encode(Params& params) {
        return encode_tensor_map<KTile>(params.k_map, params.k, params.head_dim);
    }

    SharedStorage& storage = shared_storage<SharedStorage>();
    StagePipeline pipeline{storage.stages, storage.barriers};

    FLASH_DEVICE explicit Fa3BackwardDQGemm(const Params& p)
        : Fa3Cta(p, shared_storage<SharedStorage>().work_tiles) {}

    FLASH_DEVICE void init() const {
        pipeline.init(kConsumers * 4);
        init_work_tiles(1);  // of stages
    }

    FLASH_DEVICE void begin() const {
        ptx::wait_for_grid_before();  // dS is complete
        ptx::launch_dependents();
    }

    FLASH_DEVICE void produce_tiles() const {
        fetch_work_tiles([&](QueryTile& tile, int linear) {
            WorkTile work = work_tile(linear, params.tile_order);
            const int flat_head = params.ds_workspace.first_head * group() + work.head;
            work.head = flat_head % params.heads_q;
            work.batch = flat_head / params.heads_q;
            describe<Fa3BackwardDQGemm>(tile, params, work);
        });
    }

    FLASH_DEVICE void produce_stages() const {
        State c;
        work_tiles.for_each([&](const QueryTile& tile) {
            const Sequence& s = tile.sequence;
            const KeyRows keys = key_rows(params, s);
            const int head = tile.head / this->group() / params.parts;
            const VisibleTiles own[2] = {kv_tiles_of(tile, 0), kv_tiles_of(tile, 1)};
            const auto ds = [&](int of, int kv_tile) {
                return params.ds_workspace.template tile<Element>(
                    params, s.batch, tile.head, tile.first_query / 64 + of, kv_tile);
            };
            const VisibleTiles kv = tile.kv_tiles;
            if (kv.empty()) work_tiles.allow_fetch();
            for (int i = kv.begin; i < kv.end; ++i) {
                if (i == max_of(kv.begin, kv.end - kFetchAhead)) work_tiles.allow_fetch();
                pipeline.producer_acquire(c);
                int bytes = KTile::kBytes;
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (i >= own[j].begin && i < own[j].end) bytes += DSTile::kBytes;
                pipeline.producer_expect(c, bytes);
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (i >= own[j].begin && i < own[j].end)
                        ptx::bulk_load(ds_tile(c, j), ds(j, kv.tile(i)), DSTile::kBytes,
                                       pipeline.full(c));
                const int first_key = kv.tile(i) * kBlockKV;
                keys.tensor_rows<Element>(params.k, head)
                    .template load<KTile>(params.k_map, pipeline.stage(c), pipeline.full(c),
                                          first_key);
                c.advance();
            }
        });
    }

    FLASH_DEVICE void produce() const {
        if (warp_id() == 0) produce_stages();
        if (warp_id() == 1) produce_tiles();
    }

    // The KV tiles that a consumer's rows see, for which dS was stored.
    FLASH_DEVICE VisibleTiles kv_tiles_of(const QueryTile& tile, int consumer) const {
        const int first_query = tile.first_query + consumer * 64;
        if (first_query >= tile.sequence.seqlen_q) return {0, 0};
        return VisibleTiles::of_queries(mask_of(params, tile.sequence),
                                        {first_query, first_query + 64}, kBlockKV);
    }

    FLASH_DEVICE void consume() const {
        const int consumer = ptx::warp_uniform(threadIdx.x / 128) - 1;
        State c;
        DQ rdQ;
        const auto skip = [&](int stages) {
            for (; stages > 0; --stages, c.advance()) {
                pipeline.consumer_wait(c);
                release(pipeline, c);
            }
        };
        for (WorkTileState t;; end_work_tile(t)) {
            work_tiles.descriptions.consumer_wait(t);
            const QueryTile& tile = work_tiles[t];
            if (ptx::warp_uniform(tile.first_query) < 0) return;
            const VisibleTiles kv = warp_uniform(tile.kv_tiles);
            const VisibleTiles own = warp_uniform(kv_tiles_of(tile, consumer));
            if (own.empty()) {
                skip(kv.count());
                rdQ.clear();
            } else {
                skip(own.begin - kv.begin);
                State before;
                for (int i = own.begin; i < own.end; ++i, c.advance()) {
                    pipeline.consumer_wait(c);
                    const MNMajor<DSTile> ds_columns(ds_tile(c, consumer));
                    const MNMajor<KTile> k_columns(pipeline.stage(c));
                    gemm_async<Element, kBlockKV>(rdQ, ds_columns, k_columns, i > own.begin);
                    ptx::wgmma_wait<1>();
                    if (i > own.begin) release(pipeline, before);
                    before = c;
                }
                finish(rdQ);
                release(pipeline, before);
                skip(kv.end - own.end);
            }
            rdQ.scale(params.scale);
            store_rows(dq_rows<Element>(params, tile, (warp_id() - 4) * 16), rdQ);
        }
    }

 private:
    FLASH_DEVICE uint32_t ds_tile(const State& c, int consumer) const {
        return pipeline.stage(c) + offsetof(Stage, ds) + consumer * DSTile::kBytes;
    }
};

}  // namespace flash_ext
