// What the FA3 forward kernels share, for 16-bit and for 8-bit inputs: tiles and pipelines, the
// rows of a Q tile, and the producers of Q, K and V. What follows a Q tile is forward_results.cuh.
//
// If there are few Q tiles, the keys of each are split. A split stores its result in float32, and a
// kernel of its own combines the splits (combine.cuh): the last split would take much longer, alone
// on its SM (docs/notes/021-combination.md). If there are few queries and heads share keys, the
// rows of a Q tile are the heads of a group (packed GQA, QueryTiles). Their results are stored as
// splits' results; with one split and one tile a CTA they are written to out at once. The kernels
// for both load Q in boxes of eight rows, of eight heads or of eight queries: with packed GQA, no
// more rows of a tile are adjacent in memory.
#pragma once

#include "kernels/common/optimistic_softmax.cuh"
#include "kernels/fa3/bias_tiles.cuh"
#include "kernels/fa3/fixed_splits.cuh"
#include "kernels/fa3/forward_launch.cuh"
#include "kernels/fa3/mask_tiles.cuh"
#include "problem/score.cuh"
#include "schedule/split_kv.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

// Element is V's, QKElement Q's and K's.
template <class Element, class QKElement, int kHeadDim_, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3ForwardShape kTuning>
struct Fa3ForwardTiles
    : Fa3Cta<MayHaveBias<Fa3ForwardParams, kOptions>, QueryTile, kTuning.consumers> {
    using Cta = typename Fa3ForwardTiles::Fa3Cta;
    using Cta::elected, Cta::end_work_tile, Cta::group, Cta::kConsumers, Cta::params,
        Cta::work_tiles;
    using typename Cta::Params, typename Cta::WorkTiles, typename Cta::WorkTileState;
    static_assert(sizeof(Element) == sizeof(QKElement));
    static constexpr bool kMayHaveSplits = contains(kOptions, OptionSet::kSplits);  // or packed GQA
    static constexpr bool kPages = contains(kOptions, OptionSet::kPages);
    static constexpr bool kMask = contains(kOptions, OptionSet::kMask);
    static constexpr bool kAlibi = only_alibi(kOptions);
    // May a call be batch-invariant?
    static constexpr bool kMayHaveFixedSplits =
        kMayHaveSplits && !kMask && !visits_elements(kOptions) && sizeof(Element) == 2;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockQ = kConsumers * 64;
    static_assert(kBlockQ >= tuning::kForwardBlockQ);
    static_assert(!kMayHaveSplits || kBlockQ == tuning::kForwardBlockQ);
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr int kSplitTiles = fixed_split_tiles(kBlockKV);  // of a fixed split
    static constexpr int kFetchAhead = 2;  // K tiles still to follow when a Q tile is fetched

    // What the launch gives a CTA of this size, divided again by setmaxnreg.
    static constexpr int consumer_registers(int producer_registers) {
        const int at_launch = 65536 / Cta::kThreads / 8 * 8;
        return (at_launch * (kConsumers + 1) - producer_registers) / kConsumers / 8 * 8;
    }

    // Rows of 96 bytes would arrive in boxes of 32: zeros fill them up to 128.
    static constexpr int kQKCols = sizeof(QKElement) == 1 ? ceil_div(kHeadDim, 64) * 64 : kHeadDim;
    using QTile = SharedTile<QKElement, kBlockQ, kQKCols>;
    using KTile = SharedTile<QKElement, kBlockKV, kQKCols>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    // matrix_descriptor() and the swizzle need aligned tiles.
    static_assert(QTile::kBytes % 1024 == 0 && KTile::kBytes % 1024 == 0 &&
                  VTile::kBytes % 1024 == 0);
    // Rows of a TMA box. A row of K or V should be requested as a whole, not one swizzle atom of
    // all rows first: decoding, which is bound by memory, is slower otherwise
    // (docs/notes/009-fa3-forward.md).
    static constexpr int kQBoxRows = kMayHaveSplits ? 8 : kBlockQ;  // adjacent rows
    static constexpr int kKVBoxRows = KTile::kAtoms == 1 ? kBlockKV : kBlockKV % 32 == 0 ? 32 : 16;
    using QPipeline = Pipeline<kTuning.q_stages, QTile::kBytes>;
    using KPipeline = Pipeline<kTuning.k_stages, KTile::kBytes>;
    using VPipeline = Pipeline<kTuning.v_stages, VTile::kBytes>;
    using Output = RegisterTile<16, kHeadDimV>;
    using Order = PingPong<kConsumers, kTuning.ping_pong>;
    static constexpr bool kBias = contains(kOptions, OptionSet::kBias);
    using BiasTile = flash_ext::BiasTile<Element, kBlockQ, kBlockKV>;
    using BiasStorage = flash_ext::BiasStorage<BiasTile, kTuning.bias_stages>;
    using BiasPipeline = typename BiasStorage::Pipeline;
    static_assert(kBias == (kTuning.bias_stages > 0));
    // Four consumers have no registers for it.
    static constexpr bool kFloat32Bias =
        kHeadDim <= tuning::kFa3Float32BiasHeadDim && kConsumers < 4;
    using MaskStorage = ForwardMaskStorage<kMask, kTuning.q_stages, kTuning.k_stages>;
    static_assert(!kMask || (kBlockQ == kMaskBlock && kMaskBlock % kBlockKV == 0));

    // A kernel may derive its own.
    struct SharedStorage {
        typename QPipeline::Stages q;
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;
        [[no_unique_address]] BiasStorage bias;
        [[no_unique_address]] MaskStorage mask;
        typename QPipeline::Barriers q_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        typename WorkTiles::Storage work_tiles;
    };

    // Index of this thread's warpgroup among the consumers.
    int consumer = ptx::warp_uniform(threadIdx.x / 128) - 1;
    SharedStorage& storage = shared_storage<SharedStorage>();
    QPipeline q_pipeline{storage.q, storage.q_barriers};
    KPipeline k_pipeline{storage.k, storage.k_barriers};
    VPipeline v_pipeline{storage.v, storage.v_barriers};

    FLASH_DEVICE explicit Fa3ForwardTiles(const Params& p)
        : Cta(p, shared_storage<SharedStorage>().work_tiles) {
        // ptxas 13.0: the result of a shuffle stays in a register. Otherwise four consumers read
        // their lane again at each release. ALiBi lacks the register.
        if constexpr (kConsumers == 4 && !kAlibi)
            this->elected = __shfl_sync(0xffffffff, lane_id(), lane_id()) == 0;
    }

    // producers_of_v: arrivals that fill a V stage; tile_readers: threads of producers that read
    // work tiles.
    FLASH_DEVICE void init_pipelines(int producers_of_v, int tile_readers) const {
        constexpr int kReaders = kConsumers * 4, kReleases = kReaders * kReleasesByWarp;
        ptx::prefetch_tensor_map(params.q_map);
        ptx::prefetch_tensor_map(params.k_map);
        ptx::prefetch_tensor_map(params.v_map);
        q_pipeline.init(kReleases);
        k_pipeline.init(kReleases);
        v_pipeline.init(kReleases, producers_of_v);
        Cta::init_work_tiles(tile_readers);
        if constexpr (kBias) {
            ptx::prefetch_tensor_map(params.bias_map.map);
            bias_pipeline().init(kReaders);
        }
    }

    FLASH_DEVICE bool has_float32_bias() const {
        if constexpr (kBias && kFloat32Bias) return params.bias_map.is_float32;
        return false;
    }
    FLASH_DEVICE BiasPipeline bias_pipeline() const { return storage.bias.pipeline(); }

    // --- The rows of a Q tile: queries, or the heads of a group ---

    FLASH_DEVICE int pack_gqa_log2() const { return kMayHaveSplits ? params.pack_gqa_log2 : 0; }
    // The queries of a tile.
    FLASH_DEVICE int queries() const { return kBlockQ >> pack_gqa_log2(); }
    FLASH_DEVICE PowerOfTwo by_queries() const {
        static_assert(std::has_single_bit(unsigned{kBlockQ}));
        return {std::countr_zero(unsigned{kBlockQ}) - pack_gqa_log2()};
    }
    FLASH_DEVICE int query_of(const QueryTile& tile, int row) const {
        return tile.first_query + (row >> pack_gqa_log2());
    }
    // The head within the group.
    FLASH_DEVICE int head_of(int row) const { return row & ((1 << pack_gqa_log2()) - 1); }
    // The first row of this thread's warp within the Q tile. Computed when it is needed: otherwise
    // it would occupy a register throughout the loop.
    FLASH_DEVICE int warp_row() const { return (ptx::not_hoisted(threadIdx.x) / 32 - 4) * 16; }

    // --- Producers ---

    // fixed_split: the one that comes next of the same Q tile, negative for a new Q tile.
    FLASH_DEVICE void describe_next(QueryTile& tile, int linear, int& fixed_split) const {
        WorkTile work = kMask && !kMayHaveSplits ? longest_first(params, linear)
                                                 : work_tile(linear, params.tile_order);
        if constexpr (kBias) adjacent_batches(work, params);
        if constexpr (kMayHaveSplits) {
            const int ctas = has_fixed_splits() ? params.split_ctas : params.num_splits;
            const int tile_index = work.tile_index / params.by_splits;
            tile.split = work.tile_index - tile_index * ctas;
            work.tile_index = tile_index;
            if (pack_gqa_log2() > 0) work.head *= group();  // the first head of the group
        }
        if constexpr (kMayHaveSplits) {
            describe<Fa3ForwardTiles>(tile, params, work, queries(), by_queries());
        } else {
            describe<Fa3ForwardTiles>(tile, params, work);
        }
        if (kPages && tile.sequence.seqlen_q <= params.few_queries) tile.first_query = -1;
        if constexpr (kMask)
            take_runs<kMaskBlock / kBlockKV>(tile.kv_tiles, tile.full_tiles, runs_of(tile));
        if (has_fixed_splits()) {
            fixed_split = take_fixed_split(tile, fixed_split, kSplitTiles, params.split_ctas);
            if (tile.first_query < 0) return;
        } else if constexpr (kMayHaveSplits) {
            tile.kv_tiles =
                split_of(tile.kv_tiles, tile.split, params.num_splits, params.by_splits);
        }
        // A tile without keys takes one iteration, too: all its scores are hidden, and TMA fills K
        // and V with zeros.
        if (tile.kv_tiles.empty()) {
            tile.sequence.seqlen_k = 0;
            tile.kv_tiles = {0, 1};
            if constexpr (kMask) tile.full_tiles = 0;
        }
        if constexpr (kAlibi) tile.turn = turn_to_diagonal(params, tile, kBlockQ, kBlockKV);
    }

    FLASH_DEVICE bool has_fixed_splits() const {
        return kMayHaveFixedSplits && params.split_ctas > 0;
    }
    FLASH_DEVICE BlockRuns runs_of(const QueryTile& tile) const {
        return runs_of_q_block(params, tile.sequence.batch, tile.head,
                               tile.first_query / kMaskBlock);
    }
    // The KV tiles of a Q tile, from the last one to the first.
    FLASH_DEVICE auto tiles_down(const QueryTile& tile) const {
        if constexpr (kMask) {
            constexpr int kPerBlock = kMaskBlock / kBlockKV;
            const BlockRuns runs = runs_of(tile);
            TilesDown<kPerBlock> tiles(runs);
            if constexpr (kMayHaveSplits) tiles.skip(runs.count() * kPerBlock - tile.kv_tiles.end);
            return tiles;
        } else if constexpr (kAlibi) {
            return TurnedTiles{tile.turn, tile.kv_tiles.end};
        } else {
            return BandTiles{};
        }
    }

    // A tile of K or V.
    template <class KeyTile, class Pipeline>
    FLASH_DEVICE void load_keys(const Pipeline& pipeline, const typename Pipeline::State& state,
                                const CUtensorMap& map, const TensorView& view, const KeyRows& keys,
                                int head, int first_key) const {
        load_tile<KeyTile, kKVBoxRows>(pipeline, state, map, keys.tensor_rows<Element>(view, head),
                                       first_key);
    }

    // A tile of K that is number i of those that the Q tile sees, with what the mask has of it.
    FLASH_DEVICE void load_masked_keys(const typename KPipeline::State& state,
                                       const QueryTile& tile, const KeyRows& keys, int head, int i,
                                       int first_key) const {
        const bool partial = i >= tile.full_tiles && tile.sequence.seqlen_k > 0;  // 0: no tile
        const int words = params.tile_mask.bits && partial ? queries() : 0;
        k_pipeline.producer_acquire(state);
        storage.mask.first_keys[state.stage] = first_key;
        k_pipeline.producer_expect(state, KTile::kBytes + words * int{sizeof(MaskWords)});
        keys.tensor_rows<Element>(params.k, head)
            .template load<KTile, kKVBoxRows>(params.k_map, k_pipeline.stage(state),
                                              k_pipeline.full(state), first_key);
        if (words > 0)
            load_words(storage.mask.bits[state.stage],
                       words_of(params, tile.sequence.batch, tile.head, tile.first_query,
                                first_key / kMaskBlock),
                       words, k_pipeline.full(state));
    }

    static FLASH_DEVICE int fetches_at(const VisibleTiles& kv) {
        return min_of(kv.end - 1, kv.begin + kFetchAhead);
    }

    // Fetches the Q tiles and, unless they are in pages, loads their K tiles, last to first. The
    // next Q tile is fetched a few iterations before it is needed. also_load(tile, first key) comes
    // after each K tile.
    template <class AlsoLoad>
    FLASH_DEVICE void produce_k(AlsoLoad also_load) const {
        typename KPipeline::State k;
        const int total = work_tile_count(params.tile_order);
        const int at_once = params.tile_order.tiles_at_once;
        int linear = static_cast<int>(blockIdx.x) * at_once;
        bool started = false;
        int fixed_split = -1;
        const auto fetch = [&] {
            if (kMayHaveFixedSplits && fixed_split >= 0) return linear;
            if (++linear % at_once != 0) return linear;
            if (!started) params.scheduler.start();
            started = true;
            linear = params.scheduler.fetch(total / at_once) * at_once;
            return linear;
        };
        work_tiles.produce(
            linear, total, fetch,
            [&](QueryTile& tile, int linear) { describe_next(tile, linear, fixed_split); },
            [&](const QueryTile& tile, const WorkTileState& t) {
                if constexpr (kPages) {
                    work_tiles.wait_to_fetch(t);
                    return fetch();
                }
                const KeyRows keys = key_rows(params, tile.sequence);
                const int head = key_head(params, tile.head);
                const VisibleTiles kv = tile.kv_tiles;
                auto tiles = tiles_down(tile);
                int next = 0;
                for (int i = kv.end - 1; i >= kv.begin; --i) {
                    if (i == fetches_at(kv)) next = fetch();
                    const int first_key = tiles.tile(i) * kBlockKV;
                    if constexpr (kMask) {
                        load_masked_keys(k, tile, keys, head, i, first_key);
                    } else {
                        load_keys<KTile>(k_pipeline, k, params.k_map, params.k, keys, head,
                                         first_key);
                    }
                    k.advance();
                    also_load(tile, first_key);
                }
                return next;
            });
    }

    FLASH_DEVICE void produce_v() const {
        typename VPipeline::State v;
        work_tiles.for_each([&](const QueryTile& tile) {
            const KeyRows keys = key_rows(params, tile.sequence);
            const int head = key_head(params, tile.head);
            auto tiles = tiles_down(tile);
            for (int i = tile.kv_tiles.end - 1; i >= tile.kv_tiles.begin; --i, v.advance()) {
                const int first_key = tiles.tile(i) * kBlockKV;
                load_keys<VTile>(v_pipeline, v, params.v_map, params.v, keys, head, first_key);
            }
        });
    }

    // Loads K or V in pages, by all lanes of a warp. Each lane has a box of a tile. It reads where
    // the box's page is a tile ahead, since that takes longer than all else here.
    template <class KeyTile, bool kAllowsFetch, class Pipeline>
    FLASH_DEVICE void produce_paged_keys(const Pipeline& pipeline, const CUtensorMap& map,
                                         const TensorView& view) const {
        static_assert(kBlockKV / 8 <= 32);
        const int row = lane_id() * params.pages.box_rows;  // of the tile
        typename Pipeline::State state;
        for (WorkTileState t;; end_work_tile(t)) {
            work_tiles.descriptions.consumer_wait(t);
            const QueryTile& tile = work_tiles[t];
            if (tile.first_query < 0) return;
            const int head = key_head(params, tile.head);
            const VisibleTiles kv = tile.kv_tiles;
            const auto key_of = [&](int i) { return kv.tile(i) * kBlockKV + row; };
            auto place = paged_key_rows(params, tile.sequence).at(key_of(kv.end - 1));
            for (int i = kv.end - 1; i >= kv.begin; --i, state.advance()) {
                if (kAllowsFetch && elected && i == fetches_at(kv)) work_tiles.allow_fetch();
                const PagedKeyRows keys = paged_key_rows(params, tile.sequence);
                const int page_row = place.row;
                const TensorRows rows = keys.tensor_rows<Element>(view, head, place, key_of(i));
                if (i > kv.begin) place = keys.at(key_of(i - 1));
                pipeline.producer_acquire(state);
                if (elected) pipeline.producer_expect(state, KeyTile::kBytes);
                __syncwarp();
                if (row < kBlockKV)
                    rows.load_boxes<KeyTile>(map, pipeline.stage(state) + row * KeyTile::kPitch,
                                             pipeline.full(state), page_row);
            }
        }
    }

    FLASH_DEVICE void produce_bias() const {
        typename BiasPipeline::State state;
        work_tiles.for_each([&](const QueryTile& tile) {
            auto tiles = tiles_down(tile);
            for (int i = tile.kv_tiles.end - 1; i >= tile.kv_tiles.begin; --i)
                params.bias_map.template load<BiasTile>(bias_pipeline(), state, tile.sequence,
                                                        tile.head, tile.first_query,
                                                        tiles.tile(i) * kBlockKV);
        });
    }

    FLASH_DEVICE void produce_q() const {
        typename QPipeline::State q;
        work_tiles.for_each([&](const QueryTile& tile) {
            if constexpr (QPipeline::kStages == 1)  // still in use by the previous tile
                for_each_q_load(tile, [&](const TensorRows& rows, int, int first) {
                    rows.prefetch<QTile>(params.q_map, first);
                });
            q_pipeline.producer_acquire(q);
            if constexpr (kMask) {
                load_intervals(q, tile);
            } else {
                q_pipeline.producer_expect(q, QTile::kBytes);
            }
            for_each_q_load(tile, [&](const TensorRows& rows, int row, int first) {
                rows.load_boxes<QTile>(params.q_map, q_pipeline.stage(q) + row * QTile::kPitch,
                                       q_pipeline.full(q), first);
            });
            q.advance();
        });
    }

    // Expects Q, too.
    FLASH_DEVICE void load_intervals(const typename QPipeline::State& q,
                                     const QueryTile& tile) const {
        const int words = params.tile_mask.bits ? 0 : queries();
        q_pipeline.producer_expect(q, QTile::kBytes + words * int{sizeof(MaskWords)});
        if (words > 0)
            load_words(storage.mask.intervals[q.stage],
                       words_of(params, tile.sequence.batch, tile.head, tile.first_query, 0), words,
                       q_pipeline.full(q));
    }

    // visit(tensor rows, row of the tile, the tensor row that is loaded to it), for each box.
    template <class Visit>
    FLASH_DEVICE void for_each_q_load(const QueryTile& tile, Visit visit) const {
        const Sequence& s = tile.sequence;
        TensorRows rows = query_tensor_rows<Element>(params.q, s, tile.head);
#pragma unroll 1
        for (int row = 0; row < kBlockQ; row += kQBoxRows) {
            const int query = query_of(tile, row);
            int first = query;
            if (pack_gqa_log2() > 0) {  // a row of the map is a head
                rows = tensor_rows<Element>(with_heads_as_rows(params.q), s.batch,
                                            s.q_begin + query, tile.head, group());
                first = query < s.seqlen_q ? head_of(row) : group();  // past the end: zeros
            }
            visit(rows, row, first);
        }
    }

    // Of the maps of K and V. Boxes divide tiles, and pages, too.
    static int key_box_rows(const ForwardParams& params) {
        int rows = kKVBoxRows;
        if constexpr (kPages)  // whose size is a multiple of 8
            while (kKVBoxRows % rows != 0 || params.pages.size % rows != 0) --rows;
        return rows;
    }
    static cudaError_t encode_v_map(Fa3ForwardParams& params) {
        return encode_tensor_map<VTile>(params.v_map, params.v, params.head_dim_v,
                                        key_box_rows(params));
    }

    // --- Consumers ---

    // With one stage, Q is released as soon as the tile's last scores are complete; with two, when
    // the next tile begins, so that the last iteration may belong to the unmasked main loop.
    static constexpr bool kReleaseEarly = QPipeline::kStages == 1;

    // Waits for the next Q tile's description. Returns false if there is no more work.
    template <class State>
    FLASH_DEVICE bool find_tile(State& x) const {
        work_tiles.descriptions.consumer_wait(x.tile);
        const QueryTile& tile = work_tiles[x.tile];
        x.kv_tile = ptx::warp_uniform(tile.kv_tiles.end) - 1;
        x.first_kv_tile = ptx::warp_uniform(tile.kv_tiles.begin);
        return ptx::warp_uniform(tile.first_query) >= 0;
    }

    // By all lanes of a warp that has finished reading a stage of Q, K or V. by_lanes: they may
    // have read a mask's words there. Then each arrives for itself, as the order of what TMA writes
    // and a thread reads requires.
    static constexpr int kReleasesByWarp = kMask ? 32 : 1;
    template <class Pipeline>
    FLASH_DEVICE void release(const Pipeline& pipeline, const typename Pipeline::State& state,
                              bool by_lanes = false) const {
        if constexpr (!kMask) {
            Cta::release(pipeline, state);
        } else if (by_lanes) {
            pipeline.consumer_release(state);
        } else if (elected) {
            pipeline.consumer_release(state, kReleasesByWarp);
        }
    }
    template <class Pipeline>
    FLASH_DEVICE void release_and_advance(const Pipeline& pipeline, typename Pipeline::State& state,
                                          bool by_lanes = false) const {
        release(pipeline, state, by_lanes);
        state.advance();
    }

    // Goes on to the next KV tile. Returns true after the last one: then it leaves the Q tile, and
    // find_tile() comes next.
    template <class State>
    FLASH_DEVICE bool advance(State& x) const {
        const bool last = x.kv_tile == x.first_kv_tile;
        --x.kv_tile;
        if (last) {
            if (!kReleaseEarly) release_and_advance(q_pipeline, x.q, /*by_lanes=*/true);
            x.tile.advance();
        }
        return last;
    }

    // This consumer's queries, and the indices of the KV tiles of which they see every key.
    FLASH_DEVICE Interval queries_of(const QueryTile& tile) const {
        return {query_of(tile, consumer * 64), query_of(tile, consumer * 64 + 63) + 1};
    }
    FLASH_DEVICE Interval full_tiles(const QueryTile& tile) const {
        if constexpr (kMask) return {0, ptx::warp_uniform(tile.full_tiles)};
        // If they turn, first those before the last tile. It may need a mask.
        if (kAlibi && tile.turn > 0) return {tile.kv_tiles.end - tile.turn, tile.kv_tiles.end};
        return tile.kv_tiles.full_for(mask_of(params, tile.sequence), queries_of(tile), kBlockKV);
    }

    // Applies a mask of tiles to scores whose K has not been released.
    template <class State>
    FLASH_DEVICE void apply_tile_mask(RegisterTile<16, kBlockKV>& rS, const State& x) const {
        if (x.kv_tile < x.full_tiles.end) return;
        const bool bits = params.tile_mask.bits;
        const MaskWords* words =
            bits ? storage.mask.bits[x.k.stage] : storage.mask.intervals[x.q.stage];
        hide_keys(
            rS,
            [&](int row) -> const MaskWords& {
                return words[(warp_row() + row) >> pack_gqa_log2()];
            },
            bits, work_tiles[x.tile].sequence.seqlen_k == 0, storage.mask.first_keys[x.k.stage]);
    }

    // Applies the options, and the mask unless kUnmasked excludes one.
    template <bool kUnmasked, class State>
    FLASH_DEVICE void finish_scores(RegisterTile<16, kBlockKV>& rS, State& x) const {
        const QueryTile& tile = work_tiles[x.tile];
        const int first_row = warp_row();
        const int first_key = kMask ? 0 : tiles_down(tile).tile(x.kv_tile) * kBlockKV;
        if constexpr (kBias) {
            add_bias<Rows::kQueries, BiasTile, kFloat32Bias>(rS, bias_pipeline(), x.bias, first_row,
                                                             params.scale_log2,
                                                             params.bias_map.is_float32);
        } else if constexpr (changes_scores(kOptions))
            // Packed GQA has no ALiBi, which uses first_query.
            ScoreFunction<Element, Rows::kQueries, kOptions>{params, tile.sequence, tile.head}
                .apply(rS, tile.first_query + first_row, first_key);
        if (!kMask && !kUnmasked &&
            (x.kv_tile < x.full_tiles.begin || x.kv_tile >= x.full_tiles.end)) {
            const BandMask mask = mask_of(params, tile.sequence);
            mask_scores(rS, first_key,
                        [&](int row) { return mask.key_range(query_of(tile, first_row + row)); });
        }
    }

    // With the sink, which is in the first split.
    template <class Softmax>
    FLASH_DEVICE Softmax begin_softmax(const QueryTile& tile) const {
        Softmax softmax;
        const bool first_split = !kMayHaveSplits || tile.split == 0;
        if (params.sink == nullptr || !first_split || !tile.sequence.is_owned(params))
            return softmax;
        for_each_row<16>([&](int, int i, int row) {
            int head = tile.head;
            if constexpr (kMayHaveSplits) head += min_of(head_of(warp_row() + row), group() - 1);
            softmax.begin_with(params.sink[head] * kLog2e, 0, i);
        });
        return softmax;
    }
};

}  // namespace flash_ext
