// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2), for Hopper.
//
// One CTA per SM takes one Q tile after another, whichever is next
// (dynamic_persistent_scheduler.cuh). Its warpgroups have roles:
//
//   producer    three threads, one for each of K, Q and V: K's fetches the Q tiles, all load by TMA
//   consumers   each owns 64 rows of the Q tile (split-Q) and sees all of K and V
//
// A consumer's step, in the order in which it starts things:
//
//     S' = Q K_{j-1}^T          wgmma, asynchronous
//     O  = O rescaled to P      as the softmax of the step before asked for
//     O += P V_j                wgmma, asynchronous
//     P' = softmax(S')          when S' is there, while P V_j runs (optimistic_softmax.cuh)
//
// The steps of all the CTA's Q tiles form one sequence: behind a tile's last K_j comes the first of
// the next tile, so that tensor cores have work while a result is written. A result O / l leaves
// where O would be rescaled. Most steps are unmasked: within a tile, without a mask; these are
// compiled apart, without branches.
//
// Four consumers have no registers for a second P: they wait for P V before the softmax, and the
// others' matmuls run beside it (kOverlap).
//
// Consumers may take turns at starting their matmuls (ping-pong), so that one's softmax runs beside
// the other's matmuls; else they drift apart by themselves.
//
// Where tiles are few, a tile is a Q tile and a split of its keys, with a result in float32 of its
// own; combine.cuh makes one of them. Where queries are few and heads share keys, the rows of a Q
// tile are the heads of a group (QueryTiles); kernels for that load Q by eights, of heads or of
// queries, since no more need lie side by side in memory.
//
// Shared memory: rings of Q, K and V tiles, and of Q tiles' descriptions (QueryTile).
//
//   barrier             arrives                       waits
//   full(Q, K, V)       TMA, by bytes                 consumers, before the matmul that reads it
//   empty(Q, K, V)      each consumer warp, when      its producer, before it loads the next
//                       the matmul is done
//   full(tiles)         K's producer                  the others, and the consumers
//   empty(tiles)        those                         K's producer
//   turn (named)        consumer i, when its matmuls  consumer i + 1
//                       are started
#pragma once

#include <utility>

#include "kernels/common/launch.cuh"
#include "kernels/common/optimistic_softmax.cuh"
#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/fa3/tiles.cuh"
#include "plan/tuning.h"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/uniform.cuh"
#include "schedule/dynamic_persistent_scheduler.cuh"
#include "schedule/packed_gqa.h"
#include "schedule/split_kv.cuh"
#include "schedule/tile_order.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures,
          tuning::Fa3Forward kTuning, bool kMayHaveSplits_>
struct Fa3ForwardConfig {
    using Element = Element_;
    static constexpr bool kMayHaveSplits = kMayHaveSplits_;  // of the keys; and GQA may be packed
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kTuning.consumers;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kConsumers * 64;
    static_assert(kBlockQ >= tuning::kForwardBlockQ);
    static_assert(!kMayHaveSplits || kBlockQ == tuning::kForwardBlockQ);
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr bool kTakeTurns = kTuning.take_turns;
    // Does a consumer's softmax run beside its own P V, for which P is kept twice? Four have no
    // registers for that, and one's softmax runs beside the others' matmuls.
    static constexpr bool kOverlap = kConsumers < 4;
    static constexpr int kFetchAhead = 2;
    // All that a CTA of this size can have, less a little for the producer.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using VTile = SharedTile<kBlockKV, kHeadDimV>;
    // Rows that a load takes. Of K and V the atoms' parts of a row should come close together, or
    // a decoding step, which waits for memory alone, is slower (docs/notes/009-fa3-forward.md).
    static constexpr int kQBoxRows = kMayHaveSplits ? 8 : kBlockQ;  // what lies side by side
    static constexpr int kKVBoxRows = KTile::kAtoms == 1 ? kBlockKV : kBlockKV % 32 == 0 ? 32 : 16;
    using QRing = TmaRing<kTuning.q_stages, QTile::kBytes>;
    using KRing = TmaRing<kTuning.k_stages, KTile::kBytes>;
    using VRing = TmaRing<kTuning.v_stages, VTile::kBytes>;

    static constexpr int kQ = 0;
    static constexpr int kK = kQ + QRing::kSlots * QRing::kSlotBytes;
    static constexpr int kV = kK + KRing::kSlots * KRing::kSlotBytes;
    static constexpr int kTiles = kV + VRing::kSlots * VRing::kSlotBytes;
    using Tiles = TileQueue<QueryTile, kTiles>;
    static constexpr int kQBarriers = kTiles + Tiles::kBytes;
    static constexpr int kKBarriers = kQBarriers + QRing::kBarrierBytes;
    static constexpr int kVBarriers = kKBarriers + KRing::kBarrierBytes;
    static constexpr int kTileBarriers = kVBarriers + VRing::kBarrierBytes;
    static constexpr int kHasMarked =
        kTileBarriers + Tiles::kBarrierBytes;  // a number of each warp
    static constexpr int kSharedBytes = kHasMarked + kConsumers * 4 * 4;
    static_assert(kSharedBytes <= 227 * 1024);
    // What matrix_descriptor() and the swizzle expect of every tile.
    static_assert(QTile::kBytes % 1024 == 0 && KTile::kBytes % 1024 == 0 &&
                  VTile::kBytes % 1024 == 0);
};

struct Fa3ForwardParams : ForwardParams {
    DynamicPersistentScheduler scheduler;
    CUtensorMap q_map;
    CUtensorMap k_map;
    CUtensorMap v_map;
};

template <class Config>
struct Fa3Forward {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using Scores = RegisterTile<16, Config::kBlockKV>;
    using Probabilities = RegisterOperand<Config::kBlockKV>;
    using Output = RegisterTile<16, Config::kHeadDimV>;
    using Softmax = OptimisticSoftmax<Element, Config::kBlockKV>;

    const Fa3ForwardParams& params;
    int consumer;     // number of this thread's warpgroup
    bool leads_warp;  // is it its warp's first?
    typename Config::QRing q_ring;
    typename Config::KRing k_ring;
    typename Config::VRing v_ring;
    typename Config::Tiles tiles;

    __device__ __forceinline__ Fa3Forward(const Fa3ForwardParams& p, uint32_t shared)
        : params(p),
          consumer(ptx::warp_uniform(threadIdx.x / 128) - 1),
          leads_warp(lane_id() == 0),
          q_ring{shared + Config::kQ, shared + Config::kQBarriers},
          k_ring{shared + Config::kK, shared + Config::kKBarriers},
          v_ring{shared + Config::kV, shared + Config::kVBarriers},
          tiles(shared, Config::kTileBarriers) {}

    __device__ __forceinline__ void init() const {
        constexpr int kReaders = Config::kConsumers * 4;
        q_ring.init(kReaders);
        k_ring.init(kReaders);
        v_ring.init(kReaders);
        tiles.init(kReaders + 2);  // and the producers of Q and V
        ptx::mbarrier_fence_init();
    }

    // --- The rows of a Q tile: queries, or the heads of a group ---

    __device__ __forceinline__ int pack_gqa_log2() const {
        return Config::kMayHaveSplits ? params.pack_gqa_log2 : 0;
    }
    __device__ __forceinline__ int query_of(const QueryTile& tile, int row) const {
        return tile.first_query + (row >> pack_gqa_log2());
    }
    // Among the group's.
    __device__ __forceinline__ int head_of(int row) const {
        return row & ((1 << pack_gqa_log2()) - 1);
    }
    __device__ __forceinline__ int group() const { return params.heads_q / params.heads_k; }

    // --- Producer ---

    __device__ __forceinline__ QueryTile query_tile(int linear) const {
        QueryTile tile;
        WorkTile work = work_tile(linear, params.schedule);
        if constexpr (Config::kMayHaveSplits) {
            tile.split = work.tile_index % params.num_splits;
            work.tile_index /= params.num_splits;
            if (pack_gqa_log2() > 0) work.head *= group();  // the first of them
        }
        describe<Config>(tile, params, work, Config::kBlockQ >> pack_gqa_log2());
        if constexpr (Config::kMayHaveSplits)
            tile.kv_tiles = split_of(tile.kv_tiles, tile.split, params.num_splits);
        // A tile without keys takes one step all the same: all its scores are hidden, and K and V
        // of no rows are zeros.
        if (tile.kv_tiles.empty()) {
            tile.sequence.seqlen_k = 0;
            tile.kv_tiles = {0, 1};
        }
        return tile;
    }

    // Chooses the Q tiles and loads their K tiles, last to first. A tile is fetched a few steps
    // before it is needed: a CTA that fetches early takes work from others that will be free
    // sooner.
    __device__ __forceinline__ void produce_k() const {
        typename Config::Tiles::Cursor t;
        typename Config::KRing::Cursor k;
        const int total = cta_count(params.schedule);
        bool started = false;
        const auto fetch = [&] {
            if (!started) params.scheduler.start();
            started = true;
            return params.scheduler.fetch(total);
        };
        const auto publish = [&](int linear) {
            QueryTile tile{{}, 0, -1, {}};
            for (; linear < total && tile.first_query < 0; linear = fetch()) {
                tile = query_tile(linear);
                if (tile.first_query >= 0) break;  // not a padding tile
            }
            tiles.ring.acquire(t);
            tiles[t] = tile;
            ptx::mbarrier_arrive(tiles.ring.full(t));
            t.advance();
            return tile;
        };
        QueryTile tile = publish(blockIdx.x);
        while (tile.first_query >= 0) {
            const Sequence& s = tile.sequence;
            const TensorRows rows(params.k, s.batch, head_k(tile), s.k_begin, s.seqlen_k);
            const Interval kv = tile.kv_tiles;
            int next = 0;
            for (int i = kv.end - 1; i >= kv.begin; --i) {
                if (i == min_of(kv.end - 1, kv.begin + Config::kFetchAhead)) next = fetch();
                load_tile<KTile, Config::kKVBoxRows>(k_ring, k, params.k_map, rows,
                                                     i * Config::kBlockKV);
                k.advance();
            }
            tile = publish(next);
        }
    }

    // The Q tiles in their order, for a producer.
    __device__ __forceinline__ QueryTile next_tile(typename Config::Tiles::Cursor& t) const {
        tiles.ring.wait(t);
        const QueryTile tile = tiles[t];
        tiles.ring.release(t);
        t.advance();
        return tile;
    }

    __device__ __forceinline__ void produce_q() const {
        typename Config::Tiles::Cursor t;
        typename Config::QRing::Cursor q;
        for (QueryTile tile = next_tile(t); tile.first_query >= 0; tile = next_tile(t)) {
            if constexpr (Config::QRing::kSlots == 1)  // which the tile before still has
                for_each_q_load(tile, [&](const TensorRows& rows, int, int first) {
                    rows.prefetch<QTile>(params.q_map, first);
                });
            q_ring.acquire(q);
            ptx::mbarrier_arrive_expect(q_ring.full(q), QTile::kBytes);
            for_each_q_load(tile, [&](const TensorRows& rows, int row, int first) {
                rows.load_boxes<QTile>(params.q_map, q_ring.tile(q) + row * QTile::kPitch,
                                       q_ring.full(q), first);
            });
            q.advance();
        }
    }

    // visit(tensor rows, row of the tile, first of them that goes there)
    template <class Visit>
    __device__ __forceinline__ void for_each_q_load(const QueryTile& tile, Visit visit) const {
        const Sequence& s = tile.sequence;
        if (pack_gqa_log2() == 0) {
            const TensorRows queries(params.q, s.batch, tile.head, s.q_begin, s.seqlen_q);
#pragma unroll 1
            for (int row = 0; row < Config::kBlockQ; row += Config::kQBoxRows)
                visit(queries, row, tile.first_query + row);
            return;
        }
        // In the tensor as the launcher passes it, heads are rows and rows are heads.
#pragma unroll 1
        for (int row = 0; row < Config::kBlockQ; row += Config::kQBoxRows) {
            const int query = query_of(tile, row);
            const TensorRows heads(params.q, s.batch, s.q_begin + query, tile.head, group());
            visit(heads, row, query < s.seqlen_q ? head_of(row) : group());  // zeros from there on
        }
    }

    __device__ __forceinline__ void produce_v() const {
        typename Config::Tiles::Cursor t;
        typename Config::VRing::Cursor v;
        for (QueryTile tile = next_tile(t); tile.first_query >= 0; tile = next_tile(t)) {
            const Sequence& s = tile.sequence;
            const TensorRows rows(params.v, s.batch, head_k(tile), s.k_begin, s.seqlen_k);
            for (int i = tile.kv_tiles.end - 1; i >= tile.kv_tiles.begin; --i, v.advance())
                load_tile<VTile, Config::kKVBoxRows>(v_ring, v, params.v_map, rows,
                                                     i * Config::kBlockKV);
        }
    }

    __device__ __forceinline__ int head_k(const QueryTile& tile) const {
        return tile.head / group();
    }

    __device__ __forceinline__ void produce() const {
        if (lane_id() != 0) return;
        switch (warp_id()) {
            case 0:
                return produce_k();
            case 1:
                return produce_q();
            case 2:
                return produce_v();
        }
    }

    // --- Consumers ---

    // The first row of this thread's warp within the Q tile, not kept in a register over the loop.
    __device__ __forceinline__ int warp_row() const {
        return (ptx::not_hoisted(threadIdx.x) / 32 - 4) * 16;
    }

    __device__ __forceinline__ void take_turn() const {
        if constexpr (Config::kTakeTurns) ptx::barrier_sync(1 + consumer, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (Config::kTakeTurns)
            ptx::barrier_arrive(1 + (consumer + 1) % Config::kConsumers, 256);
    }

    // By a warp that is done with a ring's tile.
    template <class Ring>
    __device__ __forceinline__ void release(const Ring& ring,
                                            const typename Ring::Cursor& c) const {
        if (leads_warp) ring.release(c);
    }
    template <class Ring>
    __device__ __forceinline__ void release_and_advance(const Ring& ring,
                                                        typename Ring::Cursor& cursor) const {
        release(ring, cursor);
        cursor.advance();
    }

    // Lets go of KV tiles that it has no use for.
    template <class Ring>
    __device__ __forceinline__ void skip(const Ring& ring, typename Ring::Cursor& cursor, int tiles,
                                         bool& ready) const {
        for (; tiles > 0; --tiles) {
            ring.wait(cursor);  // or its writer would count this reader twice
            release_and_advance(ring, cursor);
            ready = false;
        }
    }

    // S = Q K^T, started.
    __device__ __forceinline__ void start_scores(Scores& rS,
                                                 const typename Config::QRing::Cursor& q,
                                                 const typename Config::KRing::Cursor& k) const {
        // Q stays in place for many steps.
        constexpr bool kPinned = Config::kHeadDim > 128;
        const AlongRows<QTile, kPinned> q_rows(q_ring.tile(q), consumer * 64);
        const AlongRows<KTile, false> k_rows(k_ring.tile(k));
        start_gemm<Element, Config::kHeadDim>(rS, q_rows, k_rows, false);
    }

    // O (+)= P V, started.
    __device__ __forceinline__ void start_output(Output& rO, const Probabilities& rP,
                                                 const typename Config::VRing::Cursor& v,
                                                 bool accumulate) const {
        const AlongColumns<VTile, false> v_columns(v_ring.tile(v));
        start_gemm<Element, Config::kBlockKV>(rO, rP, v_columns, accumulate);
    }

    __device__ __forceinline__ float exponent_scale() const {
        return Config::kGeneral ? 1.f : params.scale_log2;
    }

    // Among all consumer warps of the grid.
    __device__ __forceinline__ int warp_number() const {
        return blockIdx.x * (Config::kConsumers * 4) + warp_row() / 16;
    }

    // Has this warp marked a row? It does them again at its end (recompute_rows.cuh).
    __device__ __forceinline__ int& has_marked() const {
        return reinterpret_cast<int*>(dynamic_shared() + Config::kHasMarked)[warp_row() / 16];
    }

    __device__ __forceinline__ Softmax begin_softmax(const QueryTile& tile) const {
        Softmax softmax;
        const bool first_split = !Config::kMayHaveSplits || tile.split == 0;
        if (params.sink == nullptr || !first_split || !tile.sequence.is_owned(params))
            return softmax;
        const float factor = kLog2e * ptx::rcp(exponent_scale());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = tile.head;
            if constexpr (Config::kMayHaveSplits)
                head += min_of(head_of(warp_row() + lane_row() + 8 * i), group() - 1);
            softmax.begin_with(params.sink[head] * factor, 0, i);
        }
        return softmax;
    }

    // The KV tiles that this consumer's rows see all of.
    __device__ __forceinline__ Interval full_tiles(const QueryTile& tile) const {
        const BandMask mask = mask_of(params, tile.sequence);
        const int first_query = query_of(tile, consumer * 64);
        const int last_query = min_of(query_of(tile, consumer * 64 + 63), mask.seqlen_q - 1);
        return {ceil_div(mask.key_range(last_query).begin, Config::kBlockKV),
                mask.key_range(first_query).end / Config::kBlockKV};
    }

    // The last KV tile that this consumer's rows see anything of.
    __device__ __forceinline__ int last_tile(const QueryTile& tile) const {
        const Interval queries{query_of(tile, consumer * 64),
                               query_of(tile, consumer * 64 + 63) + 1};
        return (mask_of(params, tile.sequence).keys_of(queries).end - 1) / Config::kBlockKV;
    }

    // Options and, where kFull does not say that there is none, the mask.
    template <bool kFull>
    __device__ __forceinline__ void finish_scores(Scores& rS, const QueryTile& tile, int kv_tile,
                                                  const Interval& full) const {
        const int first_row = warp_row();
        const int first_key = kv_tile * Config::kBlockKV;
        if constexpr (Config::kGeneral)  // ALiBi, which wants the first query, is never packed
            ScoreFunction<Element, Rows::kQueries, false>{params, tile.sequence, tile.head}.apply(
                rS, tile.first_query + first_row, first_key);
        if (!kFull && (kv_tile < full.begin || kv_tile >= full.end)) {
            const BandMask mask = mask_of(params, tile.sequence);
            mask_scores(rS, first_key,
                        [&](int row) { return mask.key_range(query_of(tile, first_row + row)); });
        }
    }

    // Are results those of a split of the keys, or of tiles with packed GQA? The general form has
    // both.
    __device__ __forceinline__ bool has_splits() const {
        return Config::kMayHaveSplits && (!Config::kGeneral || params.o_partial != nullptr);
    }

    static __device__ __forceinline__ bool is_to_be_marked(float max, float lse) {
        return !Config::kGeneral && needs_recomputing(max, lse);
    }

    // O / l and the logsumexp to HBM, as results or as a split's.
    __device__ __forceinline__ void store(Output& rO, Softmax& softmax,
                                          const QueryTile& tile) const {
        softmax.finish();
        const Sequence& s = tile.sequence;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float factor = softmax.inverse_sum(0, i);
#pragma unroll
            for (int n = 0; n < Output::kN; ++n) {
                rO.v[0][n][2 * i] *= factor;
                rO.v[0][n][2 * i + 1] *= factor;
            }
        }
        // A logarithm takes a hundred cycles: of the four lanes, two take a row each.
        const int i = lane_id() % 2;
        const int row = lane_row() + 8 * i;
        const bool has_row = lane_id() % 4 < 2;
        const int64_t statistics = statistics_offset(params, s, tile.head);
        if (has_splits()) {
            const int64_t split = tile.split * statistics_rows(params) + statistics;
            const int first_row = warp_row();
            const auto index_of = [&](int row) -> int64_t {
                const int query = query_of(tile, first_row + row);
                const int head = head_of(first_row + row);
                if (query >= s.seqlen_q || head >= group()) return -1;
                return split + int64_t{head} * params.seqlen_q + query;
            };
            const int64_t index = index_of(row);
            float max = softmax.max(0, i);
            if (is_to_be_marked(max, softmax.lse(0, i, exponent_scale()))) max = mark_of(0);
            if (has_row && index >= 0) params.statistics_partial[index] = {max, softmax.sum(0, i)};
            store_rows(params.o_partial, rO, index_of);
        } else {
            const int first_row = tile.first_query + warp_row();
            const auto gO =
                global_tile<Element>(params.out, s.batch, s.q_begin + first_row, tile.head,
                                     s.seqlen_q - first_row, params.head_dim_v);
            float lse = softmax.lse(0, i, exponent_scale());
            if (is_to_be_marked(softmax.max(0, i), lse)) [[unlikely]] {
                lse = mark_of(warp_number());
                has_marked() = true;
            }
            if (has_row && row < gO.rows) params.lse[statistics + first_row + row] = lse;
            store_rows(gO, rO);
        }
    }

    __device__ __forceinline__ void consume() const {
        typename Config::QRing::Cursor q;
        typename Config::KRing::Cursor k;
        typename Config::VRing::Cursor v;
        typename Config::Tiles::Cursor tile, tile_done;  // of the scores, of the output
        Scores rS;
        Output rO;
        constexpr int kNext = Config::kOverlap;  // P V reads the one P while the other is written
        Probabilities rP[1 + kNext];
        Softmax softmax;

        // With one slot, Q is let go as soon as its last scores are there, else when the next tile
        // begins: then the last step may be an unmasked one.
        constexpr bool kReleaseEarly = Config::QRing::kSlots == 1;

        // Where in the tile the scores are, which go down from the last.
        int kv_tile, first_kv_tile;
        Interval full;
        bool k_ready = false, v_ready = false;  // asked early: the answer takes a while
        int hidden = 0;  // of the KV tiles that come next, those that only other consumers see
        const auto begin_tile = [&] {
            tiles.ring.wait(tile);
            const QueryTile& work = tiles[tile];
            kv_tile = ptx::warp_uniform(work.kv_tiles.end) - 1;
            first_kv_tile = ptx::warp_uniform(work.kv_tiles.begin);
            if (ptx::warp_uniform(work.first_query) < 0) return false;
            full = full_tiles(work);
            if constexpr (!Config::kTakeTurns) {  // turns want equal numbers of steps
                hidden = max_of(kv_tile - max_of(last_tile(work), first_kv_tile), 0);
                kv_tile -= hidden;
                skip(k_ring, k, hidden, k_ready);
            }
            q_ring.wait(q);
            return true;
        };
        // P of the scores that are there; `first` are those of a tile, whose softmax begins here.
        const auto probabilities = [&](Probabilities& rP, bool first, auto unmasked) {
            finished(rS);
            release_and_advance(k_ring, k);
            k_ready = k_ring.ready(k);
            v_ready = v_ring.ready(v);
            if (kReleaseEarly && !unmasked && kv_tile == first_kv_tile)
                release_and_advance(q_ring, q);
            finish_scores<unmasked>(rS, tiles[tile], kv_tile, full);
            if (!unmasked && first) softmax = begin_softmax(tiles[tile]);
            return softmax.step(rS, rP, exponent_scale(), !unmasked && first);
        };

        has_marked() = false;
        if (!begin_tile()) return;
        if (consumer == Config::kConsumers - 1) pass_turn();  // the first one's
        k_ring.wait(k);
        take_turn();
        start_scores(rS, q, k);
        pass_turn();
        ptx::wgmma_wait<0>();
        auto rescaling = probabilities(rP[0], true, std::false_type{});
        skip(v_ring, v, hidden, v_ready);

        bool began = true;  // P is of a tile's first step
        bool kept = false;  // O is of the tile before, and still to be stored
        Softmax done;       // that tile's
        const auto settle = [&] {
            if (!began) {
                rescaling.apply(rO);
            } else if (kept) {
                store(rO, done, tiles[tile_done]);
                __syncwarp();
                release_and_advance(tiles.ring, tile_done);
            }
        };
        // One step, as above; false where there are no scores left. An unmasked one stays within a
        // tile, its scores need no mask, and its P is not of the tile's first step.
        const auto step = [&](const Probabilities& rP, Probabilities& next_rP, auto unmasked) {
            const bool last = !unmasked && kv_tile == first_kv_tile;
            --kv_tile;
            if (last) {
                if (!kReleaseEarly) release_and_advance(q_ring, q);
                tile.advance();
                if (!begin_tile()) return false;
            }
            k_ring.wait(k, k_ready);
            take_turn();
            start_scores(rS, q, k);
            if constexpr (unmasked) {
                rescaling.apply(rO);
            } else {
                settle();
            }
            v_ring.wait(v, v_ready);
            start_output(rO, rP, v, unmasked || !began);
            pass_turn();
            const auto v_read = v;
            v.advance();
            const auto finish_output = [&] {
                ptx::wgmma_wait<0>();
                finished(rO);
                release(v_ring, v_read);
            };

            if constexpr (Config::kOverlap) {
                ptx::wgmma_wait<1>();
            } else {
                finish_output();
            }
            if (last) done = softmax;
            began = kept = last;
            rescaling = probabilities(next_rP, last, unmasked);
            if constexpr (Config::kOverlap) finish_output();
            if (last) skip(v_ring, v, hidden, v_ready);
            return true;
        };
        bool odd = false;  // which P is left at the end
        while (true) {
            if (!step(rP[0], rP[kNext], std::false_type{})) break;
            if (!step(rP[kNext], rP[0], std::false_type{})) {
                odd = true;
                break;
            }
            const int steady_until = max_of(first_kv_tile + kReleaseEarly, full.begin);
            while (!began && kv_tile - 2 >= steady_until && kv_tile - 1 < full.end) {
                step(rP[0], rP[kNext], std::true_type{});
                step(rP[kNext], rP[0], std::true_type{});
            }
        }
        settle();
        v_ring.wait(v);
        take_turn();
        if (odd) {
            start_output(rO, rP[kNext], v, !began);
        } else {
            start_output(rO, rP[0], v, !began);
        }
        pass_turn();
        ptx::wgmma_wait<0>();
        finished(rO);
        store(rO, softmax, tiles[tile_done]);
        if constexpr (!Config::kGeneral && !Config::kMayHaveSplits) {
            __syncwarp();
            if (has_marked()) [[unlikely]]
                recompute_all_marked<Element>(params, warp_number());
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa3_forward_kernel(const __grid_constant__ Fa3ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Fa3Forward<Config> kernel(params, ptx::shared_address(dynamic_shared()));
    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(params.q_map);
        ptx::prefetch_tensor_map(params.k_map);
        ptx::prefetch_tensor_map(params.v_map);
        kernel.init();
    }
    __syncthreads();  // the barriers are there
    run_roles<Config>(kernel);
#else
    __trap();  // not to be run elsewhere
#endif
}

template <class Config>
cudaError_t launch_fa3_forward(const ForwardParams& call, cudaStream_t stream) {
    Fa3ForwardParams params{call};
    if (params.seqlen_k == 0) {  // a map wants some memory, though nothing of it will be read
        params.k.data = params.q.data;
        params.v.data = params.q.data;
    }
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore);
    const QueryTiles tiles{params.pack_gqa_log2 > 0 ? params.heads_k : params.heads_q,
                           Config::kBlockQ >> params.pack_gqa_log2};
    params.schedule = forward_schedule(params, tiles, Config::kHeadDim + Config::kHeadDimV, 1);
    params.schedule.tiles *= params.num_splits;
    if (params.pack_gqa_log2 > 0) std::swap(params.q.row_stride, params.q.head_stride);
    for (cudaError_t status : {encode_tensor_map<typename Config::QTile, Config::kQBoxRows>(
                                   params.q_map, params.q, params.element_type, params.head_dim),
                               encode_tensor_map<typename Config::KTile, Config::kKVBoxRows>(
                                   params.k_map, params.k, params.element_type, params.head_dim),
                               encode_tensor_map<typename Config::VTile, Config::kKVBoxRows>(
                                   params.v_map, params.v, params.element_type, params.head_dim_v)})
        if (status != cudaSuccess) return status;
    const int total = cta_count(params.schedule);
    const int ctas = min_of(total, multiprocessors());
    if (total > ctas && call.tile_count_semaphore == nullptr) return cudaErrorInvalidValue;
    return launch_kernel<fa3_forward_kernel<Config>>(ctas, Config::kThreads, Config::kSharedBytes,
                                                     params, stream);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward(ForwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    const int sequences = params.cu_seqlens_k == nullptr ? 1 : max_of(params.batch, 1);
    const tuning::Fa3Lengths lengths =
        params.o_partial != nullptr
            ? tuning::Fa3Lengths::kSplits
            : tuning::fa3_lengths(params.seqlen_q / sequences, params.seqlen_k / sequences,
                                  params.few_tiles);
    dispatch_kernel<Features::kVarlen, Features::kGeneral>(params, [&](auto element,
                                                                       auto features) {
        using enum tuning::Fa3Lengths;
        dispatch<kSplits, kFewQueries, kUsual, kLongKeys>(lengths, [&](auto lengths) {
            constexpr bool kMayHaveSplits = lengths == kSplits || features == Features::kGeneral;
            using Config = Fa3ForwardConfig<decltype(element), kHeadDim, kHeadDimV, features.value,
                                            tuning::fa3_forward({kHeadDim, kHeadDimV},
                                                                features.value, lengths),
                                            kMayHaveSplits>;
            status = launch_fa3_forward<Config>(params, stream);
        });
    });
    return status;
}

}  // namespace flash_ext
