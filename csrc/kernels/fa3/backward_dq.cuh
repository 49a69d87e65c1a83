// FlashAttention-3 backward for wide heads, second kernel where there is no dS workspace: dQ. For
// Hopper. backward_dkdv.cuh is the first kernel, and says why there are two.
//
// The grid has at most one CTA per SM. Each CTA fetches Q tiles until none is left and goes over
// the KV tiles that they see. Its warpgroups have roles:
//
//   producer       four threads: K; V; Q and dO with lse and delta; the Q tiles, fetched and
//                  described
//   two consumers  each owns 64 queries, with dQ in registers
//
// A consumer's iteration, in the order in which it starts the operations; primes belong to the next
// KV tile:
//
//     dQ  += dS K                  wgmma, asynchronous; dS from registers
//     S'   = Q K'^T                wgmma, asynchronous
//     dP'  = dO V'^T               wgmma, asynchronous, when dQ is complete
//     P'   = 2^(S' scale - lse)    when S' is complete, while dP' runs
//     dS'  = P' * (dP' - delta)    when dP' is complete, beside the other consumer's matmuls
//
// They use ping-pong: the arithmetic of one runs beside the matmuls of the other.
//
// Shared memory: each consumer's Q and dO, with lse and delta; pipelines of K and V tiles; the
// work-tile pipeline (QueryTile).
//
//   barrier             arrivals per phase                   who waits
//   full(Q, dO, K, V)   1: its producer; and TMA's bytes     consumers, before the matmul; full(dO)
//                                                            also counts lse and delta
//   empty(K, V)         8: each consumer warp, when the      its producer, before the next load
//                       matmul is complete
//   empty(Q)            4: each warp of the consumer, after  producer of Q and dO
//                       the last S of the tile
//   empty(dO)           128: each thread of the consumer,    producer of Q and dO
//                       after the last dS of the tile
//   full(work tiles)    1: producer of Q tiles               other producers, consumers
//   empty(work tiles)   3: other producers; 256: each        producer of Q tiles, before it
//                       consumer thread, after the tile      describes another
//   fetch               1: producer of K, before the last    producer of Q tiles, before it
//                       loads of a tile                      fetches the next
//   ping-pong (named)   128: the other consumer, when its    a consumer (its 128 threads count
//                       matmuls are started                  too), before it starts its own
#pragma once

#include "kernels/fa3/backward_dkdv.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions>
struct Fa3BackwardDQ : Fa3Cta<Fa3BackwardWideParams, QueryTile> {
    static constexpr auto kTuning = row_of(tuning::kFa3BackwardWide, {kHeadDim, kHeadDimV});
    static constexpr int kBlockQ = kConsumers * 64;
    static_assert(kBlockQ == tuning::kFa3DQBlockQ);
    static constexpr int kBlockKV = 64;
    static constexpr int kFetchAhead = 2;  // K tiles still to follow when a Q tile is fetched
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    // Q and dO: of one consumer.
    using QTile = SharedTile<Element, 64, kHeadDim>;
    using DOTile = SharedTile<Element, 64, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using QPipeline = Pipeline<kConsumers, QTile::kBytes>;  // a stage for each consumer
    using DOPipeline = Pipeline<kConsumers, DOTile::kBytes>;
    using KPipeline = Pipeline<kTuning.k_stages, KTile::kBytes>;
    using VPipeline = Pipeline<kTuning.v_stages, VTile::kBytes>;
    using KState = typename KPipeline::State;
    using VState = typename VPipeline::State;
    static_assert(kTuning.k_stages >= 2);  // of this iteration and the next
    using Scores = RegisterTile<16, kBlockKV>;
    using Operand = RegisterOperand<kBlockKV>;
    using DQ = RegisterTile<16, kHeadDim>;
    using Order = PingPong<kConsumers>;

    struct SharedStorage {
        typename QPipeline::Stages q;
        typename DOPipeline::Stages dout;
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;
        float lse[kConsumers][64];
        float minus_delta[kConsumers][64];
        typename QPipeline::Barriers q_barriers;
        typename DOPipeline::Barriers do_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        WorkTiles::Storage work_tiles;
    };

    static constexpr int kTileCount = 1;
    static cudaError_t encode(Params& params) { return params.encode<Fa3BackwardDQ>(); }

    SharedStorage& storage = shared_storage<SharedStorage>();
    QPipeline q_pipeline{storage.q, storage.q_barriers};
    DOPipeline do_pipeline{storage.dout, storage.do_barriers};
    KPipeline k_pipeline{storage.k, storage.k_barriers};
    VPipeline v_pipeline{storage.v, storage.v_barriers};

    FLASH_DEVICE explicit Fa3BackwardDQ(const Params& p)
        : Fa3Cta(p, shared_storage<SharedStorage>().work_tiles) {}

    FLASH_DEVICE void init() const {
        constexpr int kReaders = kConsumers * 4;
        q_pipeline.init(4);
        do_pipeline.init(128);  // all threads, since all read lse and delta
        k_pipeline.init(kReaders);
        v_pipeline.init(kReaders);
        init_work_tiles(3);
    }

    // This kernel needs no result of the dKdV kernel, and that kernel has waited for lse and delta
    // before it let this one begin. So it begins while the last CTAs of the dKdV kernel run. It
    // waits at the end, since the next kernel in the stream needs the results of both.
    FLASH_DEVICE void end() const { ptx::wait_for_grid_before(); }

    FLASH_DEVICE void produce_tiles() const {
        fetch_work_tiles([&](QueryTile& tile, int linear) {
            describe<Fa3BackwardDQ>(tile, params, work_tile(linear, params.tile_order));
            tile.large_lse = params.large_lse.is_raised();
            tile.row_group = row_group(params, tile.sequence, tile.head);
        });
    }

    template <class Tile, bool kAllowsFetch, class Pipeline>
    FLASH_DEVICE void produce_keys(const Pipeline& pipeline, const CUtensorMap& map,
                                   const TensorView& view) const {
        typename Pipeline::State state;
        work_tiles.for_each([&](const QueryTile& tile) {
            const KeyRows keys = key_rows(params, tile.sequence);
            const int head = tile.head / this->group() / params.parts;
            const VisibleTiles kv = tile.kv_tiles;
            if (kAllowsFetch && kv.empty()) work_tiles.allow_fetch();
            for (int i = kv.begin; i < kv.end; ++i, state.advance()) {
                if (kAllowsFetch && i == max_of(kv.begin, kv.end - 1 - kFetchAhead))
                    work_tiles.allow_fetch();
                const int first_key = kv.tile(i) * kBlockKV;
                load_tile<Tile>(pipeline, state, map, keys.tensor_rows<Element>(view, head),
                                first_key);
            }
        });
    }

    FLASH_DEVICE void produce_q_do() const {
        uint32_t phase = 0;
        work_tiles.for_each([&](const QueryTile& tile) {
            if (tile.kv_tiles.empty()) return;
            const Sequence& s = tile.sequence;
            for (uint32_t i = 0; i < kConsumers; ++i)
                load_tile<QTile>(q_pipeline, {i, phase}, params.q_map,
                                 query_tensor_rows<Element>(params.q, s, tile.head),
                                 tile.first_query + i * 64);
            const TensorRows rows = query_tensor_rows<Element>(params.dout, s, tile.head);
#pragma unroll 1
            for (uint32_t i = 0; i < kConsumers; ++i) {
                const int first_query = tile.first_query + i * 64;
                const auto statistics = [&](float (&target)[64], const float* source) {
                    return RowStatisticsLoad<float, 64>{
                        target, source + int64_t{tile.row_group} * kWorkspaceRows + first_query,
                        source + params.padding_row, stored_rows<64>(s, first_query)};
                };
                load_tile<DOTile>(
                    do_pipeline, {i, phase}, params.do_map, rows, first_query,
                    [&] { return statistics(storage.lse[i], params.lse_log2); },
                    [&] { return statistics(storage.minus_delta[i], params.minus_delta); });
            }
            phase ^= 1;
        });
    }

    FLASH_DEVICE void produce() const {
        if (warp_id() == 0) produce_keys<KTile, true>(k_pipeline, params.k_map, params.k);
        if (warp_id() == 1) produce_keys<VTile, false>(v_pipeline, params.v_map, params.v);
        if (warp_id() == 2) produce_q_do();
        if (warp_id() == 3) produce_tiles();
    }

    // The index of this thread's warpgroup among the consumers, and the first row of its warp
    // within the Q tile: computed where needed, since the loop has no registers for them.
    FLASH_DEVICE int consumer() const { return ptx::not_hoisted(threadIdx.x) / 128 - 1; }
    FLASH_DEVICE int warp_row() const { return (ptx::not_hoisted(threadIdx.x) / 32 - 4) * 16; }

    // Releases KV tiles that this consumer does not use.
    FLASH_DEVICE void skip(KState& k, VState& v, int tiles) const {
        for (; tiles > 0; --tiles) {
            Order::wait(consumer());
            Order::signal_next(consumer());
            k_pipeline.consumer_wait(k);  // otherwise this warp would arrive twice in one phase
            release_and_advance(k_pipeline, k);
            v_pipeline.consumer_wait(v);
            release_and_advance(v_pipeline, v);
        }
    }

    // The state of a consumer's loops. Matrices are only referenced, as in backward.cuh.
    struct State {
        Scores& rS;
        Scores& rdP;
        Operand& rdS;
        DQ& rdQ;

        WorkTileState tile{};
        uint32_t q_phase = 0;  // of Q and dO
        KState k{};            // of S
        VState v{};
        int i = 0;                // of the KV tile of S among the visible ones
        int last = 0;             // of the last one that this consumer's rows see
        bool accumulate = false;  // has dQ a sum already?
    };

    // This consumer's Q and dO.
    FLASH_DEVICE PipelineState<kConsumers> own_stage(const State& s) const {
        return {static_cast<uint32_t>(consumer()), s.q_phase};
    }

    // Goes on to the next Q tile that has KV tiles. Tiles without any get zeros as dQ.
    FLASH_DEVICE bool find_tile(State& s) const {
        for (;; end_work_tile(s.tile)) {
            work_tiles.descriptions.consumer_wait(s.tile);
            const QueryTile& tile = work_tiles[s.tile];
            if (ptx::warp_uniform(tile.first_query) < 0) return false;
            const VisibleTiles kv = warp_uniform(tile.kv_tiles);
            if (!kv.empty()) {
                const int first_query = tile.first_query + consumer() * 64;
                const VisibleTiles own = VisibleTiles::of_queries(
                    mask_of(params, tile.sequence), {first_query, first_query + 64}, kBlockKV);
                // At least one, even if it is hidden.
                s.i = ptx::warp_uniform(clamp(own.begin, kv.begin, kv.end - 1));
                s.last = ptx::warp_uniform(clamp(own.end - 1, s.i, kv.end - 1));
                return true;
            }
            store_zeros(dq_rows<Element>(params, tile, warp_row()));
        }
    }

    // Prevents the compiler from moving the arithmetic of P past the next wait, where no matmul
    // would run beside it: a branch on P, never taken, since P is not negative.
    static FLASH_DEVICE void compute_here(Scores& p) {
        uint32_t bits = 0;
        p.for_each([&](float x, int, int) { bits |= __float_as_uint(x); });
        if (__any_sync(0xffffffff, static_cast<int>(bits) < 0)) [[unlikely]]
            __nanosleep(1);
    }

    // Descriptors are made where they are used, as in backward_dkdv.cuh.

    // S = Q K^T
    FLASH_DEVICE void issue_s(State& s) const {
        const KMajor<QTile> q_rows(q_pipeline.stage(own_stage(s)));
        const KMajor<KTile> k_rows(k_pipeline.stage(s.k));
        gemm_async<Element, kHeadDim>(s.rS, q_rows, k_rows, false);
    }

    // dP = dO V^T
    FLASH_DEVICE void issue_dp(State& s) const {
        v_pipeline.consumer_wait(s.v);
        const KMajor<DOTile> do_rows(do_pipeline.stage(own_stage(s)));
        const KMajor<VTile> v_rows(v_pipeline.stage(s.v));
        gemm_async<Element, kHeadDimV>(s.rdP, do_rows, v_rows, false);
    }

    // dQ += dS K
    FLASH_DEVICE void issue_dq(State& s, uint32_t k_stage) const {
        const MNMajor<KTile> k_columns(k_pipeline.stage({k_stage, 0}));
        gemm_async<Element, kBlockKV>(s.rdQ, s.rdS, k_columns, s.accumulate);
    }

    FLASH_DEVICE WarpScores<Element, Rows::kQueries, kOptions> warp_scores(const State& s) const {
        const QueryTile& tile = work_tiles[s.tile];
        return {params, tile.sequence, tile.head, tile.first_query + warp_row(),
                tile.kv_tiles.tile(s.i) * kBlockKV};
    }

    // P = 2^(S scale - lse), while dP runs. lse has arrived with dO.
    FLASH_DEVICE void probabilities(State& s) const {
        finish<1>(s.rS);
        if (s.i == s.last) release(q_pipeline, own_stage(s));
        const auto scores = warp_scores(s);
        const bool large_lse = work_tiles[s.tile].large_lse;
        const bool full = mask_of(params, scores.sequence)
                              .is_full({scores.first_row, scores.first_row + 16},
                                       {scores.first_col, scores.first_col + kBlockKV});
        if constexpr (only_softcap(kOptions)) {
            scores.cap(s.rS, !full);
        } else {
            scores.probabilities(s.rS, storage.lse[0] + warp_row(), large_lse || !full, large_lse);
        }
        compute_here(s.rS);
    }

    // dS = P * (dP - delta)
    FLASH_DEVICE void gradient_of_scores(State& s) const {
        finish(s.rdP);
        release_and_advance(v_pipeline, s.v);
        const float* minus_delta = storage.minus_delta[0] + warp_row();
        const float* lse = storage.lse[0] + warp_row();
        if constexpr (only_softcap(kOptions)) {
            subtract_delta<Rows::kQueries>(s.rdP, minus_delta);
            softcap_gradient<Rows::kQueries>(s.rS, s.rdP, lse, params.softcap_log2);
        } else {
            softmax_gradient<Rows::kQueries>(s.rdP, s.rS, minus_delta);
            if (contains(kOptions, OptionSet::kSoftcap) && params.softcap != 0.f)
                warp_scores(s).softcap_gradient(s.rdP, s.rS, [&](int row) { return lse[row]; });
        }
        s.rdS.template round<Element>(s.rdP);
        if (s.i == s.last) {
            do_pipeline.consumer_release(own_stage(s));
            s.q_phase ^= 1;
        }
    }

    FLASH_DEVICE void first_iteration(State& s) const {
        q_pipeline.consumer_wait(own_stage(s));
        k_pipeline.consumer_wait(s.k);
        Order::wait(consumer());
        issue_s(s);
        do_pipeline.consumer_wait(own_stage(s));
        issue_dp(s);
        Order::signal_next(consumer());
        probabilities(s);
        gradient_of_scores(s);
        s.accumulate = false;
    }

    // dQ of this KV tile, and S, P, dP and dS of the next one.
    FLASH_DEVICE void iterate(State& s) const {
        ++s.i;
        const uint32_t k_stage = s.k.stage;
        s.k.advance();
        k_pipeline.consumer_wait(s.k);
        Order::wait(consumer());
        issue_dq(s, k_stage);
        issue_s(s);
        finish<1>(s.rdQ);
        release(k_pipeline, {k_stage, 0});
        issue_dp(s);
        Order::signal_next(consumer());
        probabilities(s);
        gradient_of_scores(s);
        s.accumulate = true;
    }

    // dQ of the last KV tile, and the result.
    FLASH_DEVICE void finish_tile(State& s) const {
        issue_dq(s, s.k.stage);
        finish(s.rdQ);
        release_and_advance(k_pipeline, s.k);
        s.rdQ.scale(params.scale);
        store_rows(dq_rows<Element>(params, work_tiles[s.tile], warp_row()), s.rdQ);
    }

    FLASH_DEVICE void consume() const {
        Scores rS, rdP;
        Operand rdS;
        DQ rdQ;
        State s{rS, rdP, rdS, rdQ};
        if (consumer() == 1) Order::signal_next(consumer());  // consumer 0 starts
        while (find_tile(s)) {
            const VisibleTiles& kv_tiles = work_tiles[s.tile].kv_tiles;
            skip(s.k, s.v, s.i - ptx::warp_uniform(kv_tiles.begin));
            first_iteration(s);
            while (s.i < s.last) iterate(s);
            finish_tile(s);
            skip(s.k, s.v, ptx::warp_uniform(kv_tiles.end) - 1 - s.last);
            end_work_tile(s.tile);
        }
    }
};

}  // namespace flash_ext
