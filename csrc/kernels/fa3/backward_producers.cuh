// The tiles, pipelines and shared memory of the FA3 backward, and its producers: of Q and lse, of
// dO and delta, of KV tiles with their K and V, and the one that adds to dQ in HBM.
#pragma once

#include "kernels/fa3/backward_dq_tile.cuh"
#include "kernels/fa3/cta.cuh"
#include "kernels/fa3/mask_tiles.cuh"
#include "kernels/fa3/stored_dbias.cuh"
#include "plan/tuning_backward.h"
#include "ptx/tma.cuh"
#include "schedule/split_kv.cuh"
#include "tile/tma_load.cuh"

namespace flash_ext {

struct Fa3BackwardParams : Fa3BackwardMaps {
    // The number of heads (of all batches) by which a head's first KV tile comes before its other
    // tiles. 0: all tiles of a head are in order.
    int lead;
};
struct Fa3BiasBackwardParams : WithBias<Fa3BackwardParams> {
    DBiasMap dbias_map;
};

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3BackwardShape kTuning>
struct Fa3BackwardProducers : Fa3Cta<std::conditional_t<contains(kOptions, OptionSet::kBias),
                                                        Fa3BiasBackwardParams, Fa3BackwardParams>,
                                     KeyTile> {
    using Cta = typename Fa3BackwardProducers::Fa3Cta;
    using Cta::group, Cta::kConsumers, Cta::params, Cta::work_tiles;
    using typename Cta::Params, typename Cta::WorkTiles, typename Cta::WorkTileState;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = tuning::kFa3BackwardBlockKV;
    static_assert(kBlockKV == 64 * kConsumers);
    static_assert(!(kTuning.by_matmul() && visits_elements(kOptions)));
    static constexpr bool kBias = contains(kOptions, OptionSet::kBias);
    static constexpr bool kMask = contains(kOptions, OptionSet::kMask);
    static constexpr bool kDropout = contains(kOptions, OptionSet::kDropout);
    static_assert(!kMask || kMaskBlock % kBlockQ == 0);
    static constexpr int kProducerRegisters = kMask ? 40 : 24;
    static constexpr int kConsumerRegisters = kMask ? 232 : 240;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using DOTile = SharedTile<Element, kBlockQ, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using QPipeline = Pipeline<kTuning.q_stages, QTile::kBytes>;
    using DOPipeline = Pipeline<kTuning.do_stages, DOTile::kBytes>;
    using KPipeline = Pipeline<1, KTile::kBytes>;
    using VPipeline = Pipeline<1, VTile::kBytes>;
    using Statistic = std::conditional_t<kTuning.by_matmul(), StatisticsRow, float>;

    // dQ^T takes dS^T as B. Rows are then queries: the keys of a consumer fill atoms of 128 bytes.
    // And TMA may store dS as dbias.
    static constexpr bool kDSByQuery = kTuning.transpose_dq || kBias;
    using DSTile = std::conditional_t<kDSByQuery, SharedTile<Element, kBlockQ, kBlockKV>,
                                      SharedTile<Element, kBlockKV, kBlockQ>>;
    using DQTile = Fa3DQTile<Element, kHeadDim, kBlockQ, kTuning.transpose_dq>;
    using DQPipeline = Pipeline<1, 64 * 4 * DQTile::Fragments::kCols>;  // one per consumer

    using BiasTile = flash_ext::BiasTile<Element, kBlockQ, kBlockKV>;
    using BiasStorage = flash_ext::BiasStorage<BiasTile, kTuning.bias_stages>;
    using BiasPipeline = typename BiasStorage::Pipeline;
    static_assert(kBias == (kTuning.bias_stages > 0));

    struct SharedStorage {
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;  // after K: see Fa3DQTile
        typename QPipeline::Stages q;
        typename DOPipeline::Stages dout;
        char ds[2][DSTile::kBytes];
        [[no_unique_address]] BiasStorage bias;
        [[no_unique_address]] BackwardMaskStorage<kMask, kTuning.q_stages, kBlockQ> mask;
        // Not last: compute-sanitizer takes a RowNumbers operand for twice as long as it is.
        Statistic lse[QPipeline::kStages][kBlockQ];
        Statistic minus_delta[DOPipeline::kStages][kBlockQ];
        typename DQPipeline::Stages dq[kConsumers];
        typename QPipeline::Barriers q_barriers;
        typename DOPipeline::Barriers do_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        typename DQPipeline::Barriers dq_barriers[kConsumers];
        uint64_t ds_barriers[2];
        typename WorkTiles::Storage work_tiles;
    };

    SharedStorage& storage = shared_storage<SharedStorage>();
    QPipeline q_pipeline{storage.q, storage.q_barriers};
    DOPipeline do_pipeline{storage.dout, storage.do_barriers};
    KPipeline k_pipeline{storage.k, storage.k_barriers};
    VPipeline v_pipeline{storage.v, storage.v_barriers};

    FLASH_DEVICE explicit Fa3BackwardProducers(const Params& p)
        : Cta(p, shared_storage<SharedStorage>().work_tiles) {}

    FLASH_DEVICE void init() const {
        constexpr int kReaders = kConsumers * 128;
        constexpr int kWarps = kConsumers * 4;
        q_pipeline.init(kReaders);
        do_pipeline.init(kReaders);
        k_pipeline.init(kReaders);
        v_pipeline.init(kReaders);
        this->init_work_tiles(3);
        if constexpr (kBias) bias_pipeline().init(kWarps);
        for (int i = 0; i < kConsumers; ++i) dq_pipeline(i).init(1, 4);
        ptx::mbarrier_init(ds_barrier(0), kWarps);
        ptx::mbarrier_init(ds_barrier(1), kWarps);
    }

    FLASH_DEVICE BiasPipeline bias_pipeline() const { return storage.bias.pipeline(); }
    FLASH_DEVICE DQPipeline dq_pipeline(int i) const {
        return {storage.dq[i], storage.dq_barriers[i]};
    }
    FLASH_DEVICE uint32_t ds_barrier(uint32_t stage) const {
        return ptx::shared_address(&storage.ds_barriers[stage]);
    }

    FLASH_DEVICE void describe_next(KeyTile& tile, int linear) const {
        WorkTile work;
        if constexpr (kMask) {
            work = longest_first(params, linear);
        } else if (params.lead == 0) {
            work = work_tile(linear, params.tile_order);
        } else {
            const int tile_index = linear % params.tile_order.tiles;
            const int head = linear / params.tile_order.tiles - (tile_index == 0 ? 0 : params.lead);
            if (head < 0 || head >= params.tile_order.heads * params.tile_order.batch) return;
            work = work_tile_of(tile_index, head, params.tile_order);
        }
        if constexpr (kBias) adjacent_batches(work, params);  // they share dbias, too
        describe<Fa3BackwardProducers>(tile, params, work);
        if constexpr (kMask)
            if (tile.first_key >= 0)  // no padding tile
                take_runs<kMaskBlock / kBlockQ>(tile.q_tiles, tile.full_tiles,
                                                runs_of(tile, first_head(tile)));
        if (params.query_parts > 1)
            tile.q_tiles =
                split_of(tile.q_tiles, work.head % params.query_parts, params.query_parts);
        // From the last query on all tiles of a head begin at the same Q tile, under a causal mask
        // too, so that they add in turn without waiting long.
        tile.last_first =
            params.deterministic && !kMask ? tile.q_tiles.begin + tile.q_tiles.end - 1 : 0;
        tile.large_lse = params.large_lse.is_raised();
        tile.first_row_group = first_row_group(tile.sequence.q_begin, tile.sequence.seq_idx);
    }

    FLASH_DEVICE int first_head(const KeyTile& tile) const {
        return tile.head / params.query_parts * group();
    }

    // The same for all query heads of a KV tile.
    FLASH_DEVICE BlockRuns runs_of(const KeyTile& tile, int head) const {
        return runs_of_kv_block(params, tile.sequence.batch, head, tile.first_key / kMaskBlock);
    }

    // visit(query head, the Q tile's first group of rows in the workspace, first row, is it the
    // last?, the tile's index) for all iterations of a KV tile. The description stays in shared
    // memory, since producers have few registers.
    template <class Visit>
    FLASH_DEVICE void for_each_q_tile(const KeyTile& tile, Visit visit) const {
        if (tile.q_tiles.empty()) return;
        for (int left = group() - 1; left >= 0; --left) {
            const int head = first_head(tile) + group() - 1 - left;
            const int group = (tile.sequence.batch * params.heads_q + head) * params.row_groups +
                              tile.first_row_group;
            if constexpr (kMask) {
                TilesUp<kMaskBlock / kBlockQ> tiles(runs_of(tile, head));
                for (int i = 0; i < tile.q_tiles.end; ++i) {
                    const int row = tiles.tile(i) * kBlockQ;
                    visit(head, group + row / kWorkspaceRows, row,
                          left == 0 && i == tile.q_tiles.end - 1, i);
                }
                continue;
            }
            // ptxas 13.0: with a row from tile(i), wgmma is serialized at d 64 (note 014).
            int row = q_tile(tile.last_first, tile.q_tiles.begin) * kBlockQ;
            for (int i = tile.q_tiles.begin; i < tile.q_tiles.end; ++i) {
                visit(head, group + row / kWorkspaceRows, row,
                      left == 0 && i == tile.q_tiles.end - 1, i);
                row += tile.last_first == 0 ? kBlockQ : -kBlockQ;
            }
        }
    }

    // Fetches the KV tiles and loads K and V. Tiles are fetched in ascending order of the work
    // index, so those that add_dq() waits for are already running.
    FLASH_DEVICE void produce_tiles() const {
        ptx::launch_dependents();  // the postprocess pass, in SMs that this kernel has left
        const auto fetch = [&] { return atomicAdd(params.dq_semaphore, 1); };
        const int total =
            work_tile_count(params.tile_order) + params.lead * params.tile_order.tiles;
        work_tiles.produce(
            fetch(), total, fetch, [&](KeyTile& tile, int linear) { describe_next(tile, linear); },
            [&](const KeyTile& tile, const WorkTileState& t) {
                const PipelineState<1> kv{0, work_tiles.phase(t)};
                const auto rows = [&](const TensorView& view) {
                    return key_rows(params, tile.sequence)
                        .template tensor_rows<Element>(view, tile.head / params.parts);
                };
                load_tile<VTile>(v_pipeline, kv, params.v_map, rows(params.v), tile.first_key);
                load_tile<KTile>(k_pipeline, kv, params.k_map, rows(params.k), tile.first_key);
                work_tiles.wait_to_fetch(t);
                return fetch();
            });
    }

    // A Q tile with its lse and what the mask has of it.
    template <class Statistics>
    FLASH_DEVICE void load_masked_queries(const typename QPipeline::State& state,
                                          const KeyTile& tile, int head, int first_row, int i,
                                          const Statistics& statistics) const {
        const Sequence& s = tile.sequence;
        const bool has_words = i >= tile.full_tiles;
        q_pipeline.producer_acquire(state);
        storage.mask.first_queries[state.stage] = first_row;
        q_pipeline.producer_expect(state, QTile::kBytes + Statistics::kBytes +
                                              (has_words ? int{sizeof storage.mask.words[0]} : 0));
        query_tensor_rows<Element>(params.q, s, head)
            .template load<QTile>(params.q_map, q_pipeline.stage(state), q_pipeline.full(state),
                                  first_row);
        statistics.load(q_pipeline.full(state));
        if (has_words)
            load_words(storage.mask.words[state.stage],
                       words_of(params, s.batch, head, ptx::not_hoisted(first_row),
                                tile.first_key / kMaskBlock),
                       kBlockQ, q_pipeline.full(state));
    }

    // Q tiles with lse, or dO tiles with delta: `rows` of the stages, from `source` in the
    // workspace. With dO comes the bias.
    template <class Tile, bool kAllowsFetch, class Pipeline>
    FLASH_DEVICE void produce_queries(const Pipeline& pipeline, const CUtensorMap& map,
                                      const TensorView& view,
                                      Statistic (&rows)[Pipeline::kStages][kBlockQ],
                                      const Statistic* source) const {
        typename Pipeline::State state;
        typename BiasPipeline::State bias;
        work_tiles.for_each([&](const KeyTile& tile) {
            if (kAllowsFetch && tile.q_tiles.empty()) work_tiles.allow_fetch();
            for_each_q_tile(tile, [&](int head, int row_group, int first_row, bool last, int i) {
                if (kAllowsFetch && last) work_tiles.allow_fetch();
                const Sequence& s = tile.sequence;
                const auto statistics = [&] {
                    return RowStatisticsLoad<Statistic, kBlockQ>{
                        rows[state.stage], source + int64_t{row_group} * kWorkspaceRows,
                        source + params.padding_row, stored_rows<kBlockQ>(s, first_row)};
                };
                if constexpr (kMask && kAllowsFetch) {
                    load_masked_queries(state, tile, head, first_row, i, statistics());
                } else {
                    load_tile<Tile>(pipeline, state, map, query_tensor_rows<Element>(view, s, head),
                                    first_row, statistics);
                }
                state.advance();
                if constexpr (kBias && !kAllowsFetch)
                    params.bias_map.template load<BiasTile>(bias_pipeline(), bias, s, head,
                                                            first_row, tile.first_key);
            });
        });
    }

    static FLASH_DEVICE const Statistic* statistics(const float* numbers,
                                                    const StatisticsRow* rows) {
        if constexpr (kTuning.by_matmul()) {
            return rows;
        } else {
            return numbers;
        }
    }

    // Adds dQ of the consumers to dq_accum; in deterministic mode KV tiles add in ascending order.
    // If dq_accum is not zeroed, the first KV tile of a Q tile stores. params.dq_semaphore counts
    // the KV tiles that have stored or added, if others wait for them; these were all fetched
    // earlier, and none of them waits for this one. So this one may keep counts while it waits.
    // tiles_done() counts KV tiles for the postprocess pass.
    //
    // An addition is visible after one to three microseconds, a fence and the wait for a count take
    // most of one each, and an iteration takes two. So a Q tile is counted before the additions to
    // the next but one, by the fence that their turn needs, and TMA reads a half meanwhile: its
    // memory is released when the next half begins.
    FLASH_DEVICE void add_dq() const {
        typename DQPipeline::State c;
        work_tiles.for_each([&](const KeyTile& tile) {
            // The Q tile before and the one before that, by their first groups of rows, or -1.
            int uncounted[2] = {-1, -1};
            int unreleased = -1;  // the consumer whose half TMA reads
            const auto release = [&] {
                if (unreleased < 0) return;
                ptx::bulk_wait_read();
                dq_pipeline(unreleased).consumer_release({});
                unreleased = -1;
            };
            // counted: a Q tile that has been added and is to be counted, or -1.
            const auto advance = [&](int counted) {
                uncounted[1] = uncounted[0];
                uncounted[0] = counted;
                c.advance();
            };
            const auto add_nothing = [&] {
                if (uncounted[1] >= 0) count_added<kConsumers>(dq_semaphore(uncounted[1]));
                for (int i = 0; i < kConsumers; ++i) {
                    release();
                    dq_pipeline(i).consumer_wait(c);
                    ptx::bulk_commit();  // of none, so that all Q tiles have as many groups
                    unreleased = i;
                }
                advance(-1);
            };
            for_each_q_tile(tile, [&](int head, int row_group, int first_row, bool, int) {
                const int before = tiles_before(tile, head, first_row);
                if (kMask && before < 0) return add_nothing();
                const bool first_stores = !params.dq_accum_zeroed;
                const bool stores = before == 0 && first_stores;
                // Before the count is read, which takes long: the consumer needs its memory.
                if (first_stores && !params.deterministic) release();
                wait_for_turn(row_group, params.deterministic ? before : first_stores && before > 0,
                              uncounted[1]);
                const int rows = stored_rows<kBlockQ>(tile.sequence, first_row);
#pragma unroll 1
                for (int i = 0; i < kConsumers; ++i) {
                    release();
                    add_half(i, c, rows, row_group, stores);
                    unreleased = i;
                }
                advance(stores || params.deterministic ? row_group : -1);
            });
            release();
            for (int i = 1; i >= 0; --i)
                if (uncounted[i] >= 0) count_added<0>(dq_semaphore(uncounted[i]));
            count_added<0>(tiles_done(params, tile.sequence, tile.head / params.query_parts));
        });
        // ptxas 13.0: not needed, but the consumers are scheduled better (note 010).
        ptx::bulk_wait<0>();
    }

    // Waits until `awaited` KV tiles have added to a Q tile, and counts the one before the last one
    // that this thread has added to, unless it is -1.
    FLASH_DEVICE void wait_for_turn(int row_group, int awaited, int counted) const {
        int found = 0;
        if (counted >= 0) {
            // One fence for both: it takes as long as the load.
            if (awaited > 0) found = ptx::load_relaxed(dq_semaphore(row_group));
            ptx::bulk_wait<kConsumers>();
            ptx::fence_proxy_async_global();
            ptx::fence_acq_rel();
            ptx::red_add_relaxed(dq_semaphore(counted), 1);
        }
        if (awaited <= 0) return;
        if (found < awaited) ptx::wait_for_count(dq_semaphore(row_group), awaited, 32);
        ptx::fence_proxy_async_global();
    }

    FLASH_DEVICE int* dq_semaphore(int row_group) const {
        return params.dq_semaphore + 1 + ptx::not_hoisted(row_group);
    }

    // The KV tiles that a Q tile sees before this one. With a mask of tiles only if they add in
    // order; negative if none of the Q tile's queries exists or sees the KV tile: dQ is 0, and the
    // lists of KV tiles may have more than lists of Q tiles.
    FLASH_DEVICE int tiles_before(const KeyTile& tile, int head, int first_row) const {
        if constexpr (kMask) {
            if (!params.deterministic) return 0;
            if (first_row >= tile.sequence.seqlen_q) return -1;
            const BlockRuns runs =
                runs_of_q_block(params, tile.sequence.batch, head, first_row / kMaskBlock);
            const int block = tile.first_key / kMaskBlock;
            return kind_of(runs, block) == BlockKind::kHidden ? -1 : blocks_before(runs, block);
        }
        const VisibleTiles seen = VisibleTiles::of_queries<false>(
            mask_of(params, tile.sequence), {first_row, first_row + kBlockQ}, kBlockKV);
        return tile.first_key / kBlockKV - seen.begin;
    }

    // Adds a consumer's half of a Q tile of `rows` rows, or stores it.
    FLASH_DEVICE void add_half(int consumer, const typename DQPipeline::State& c, int rows,
                               int row_group, bool stores) const {
        const DQPipeline pipeline = dq_pipeline(consumer);
        const auto half = DQTile::half(consumer, rows);
        float* target =
            params.dq_accum + int64_t{row_group} * (kWorkspaceRows * kHeadDim) + half.first;
        pipeline.consumer_wait(c);
        if (half.size == 0) {  // none of its queries exists
        } else if (stores) {
            ptx::bulk_store(target, pipeline.stage(c), half.size * 4);
        } else {
            ptx::bulk_add(target, pipeline.stage(c), half.size * 4);
        }
        ptx::bulk_commit();
    }

    // Counts once all that this thread has added to dQ is visible, but for the last groups.
    template <int kLastGroups>
    FLASH_DEVICE void count_added(int* count) const {
        ptx::bulk_wait<kLastGroups>();
        ptx::fence_proxy_async_global();
        ptx::red_add_release(count, 1);
    }

    FLASH_DEVICE void produce() const {
        ptx::wait_for_grid_before();  // the preprocess pass
        switch (warp_id()) {
            case 0:
                return produce_queries<QTile, true>(q_pipeline, params.q_map, params.q, storage.lse,
                                                    statistics(params.lse_log2, params.lse_rows));
            case 1:
                return produce_queries<DOTile, false>(
                    do_pipeline, params.do_map, params.dout, storage.minus_delta,
                    statistics(params.minus_delta, params.delta_rows));
            case 2:
                return add_dq();
            case 3:
                return produce_tiles();
        }
    }
};

}  // namespace flash_ext
