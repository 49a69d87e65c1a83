// FlashAttention-3 backward (Shah et al. 2024, algorithm 3), for Hopper.
//
// The grid has at most one CTA per SM. Each CTA fetches KV tiles until none is left; its inner loop
// goes over the Q tiles that see the KV tile, for each query head of the group. Everything is
// computed transposed, rows are keys, as in backward_tile.cuh. Its warpgroups have roles:
//
//   producer       four threads: Q and lse; dO and delta; additions to dQ in HBM; KV tiles, which
//                  it fetches and describes, with their K and V
//   two consumers  each owns 64 keys: S^T, dP^T, and the gradients dK and dV in registers
//
// A consumer's iteration, in the order in which it starts the operations; primes belong to the next
// Q tile:
//
//     S'^T  = K Q'^T               wgmma, asynchronous
//     dV   += P^T dO               wgmma, asynchronous; P^T from registers
//     dK   += dS^T Q               wgmma, asynchronous; dS^T from registers (hold_ds) or shared
//                                  memory
//     dP'^T = V dO'^T - delta'     wgmma, asynchronous, when these are complete
//     P'    = 2^(S' scale - lse')  while dP' runs
//     dS'   = P' * dP'             when dP' is complete
//     dQ    = dS K                 wgmma, asynchronous
//
// With tuning's by_matmul, S and dP begin as -lse / scale and -delta, by a product of these with
// ones.
//
// A step without a matmul of the same consumer beside it runs beside the other consumer's matmuls,
// which ping-pong ensures, if it is on.
//
// dQ sums over the keys of both consumers. So dS^T goes through shared memory, and each consumer
// computes half of dQ: at head dims 96 and 128 64 of its columns (the second one 32 of 96), as
// dQ^T, in the registers of S; at 32 and 64 half of its rows (Fa3DQTile). dQ is summed over CTAs in
// float32 in HBM: each consumer writes its half to shared memory, in fragment order, and a producer
// adds it by TMA. A fence after a store waits until the store is done. With late_fences
// (tuning_backward.h) dS is stored after dQ has been started, and the fence of dQ comes after the
// next S, dV and dK. Stored that late, too, dQ would delay them (note 027).
//
// The preprocess pass computes lse and delta and zeroes dq_accum. The postprocess pass converts dQ,
// head by head, on the SMs that have no more tiles. For short sequences, and in deterministic mode,
// dq_accum is not zeroed: the first KV tile that a Q tile sees stores, and the others add. For
// short sequences the first KV tile of a head therefore comes well before its others (lead_of).
//
// Shared memory: K, V; pipelines of Q and dO tiles with lse and delta; two stages of dS^T; each
// consumer's half of dQ; the work-tile pipeline (KeyTile); with a bias a pipeline of its tiles, and
// dS by queries, as dbias has it (stored_dbias.cuh). A mask of tiles (mask_tiles.cuh) comes with Q.
//
//   barrier               arrivals per phase                   who waits
//   full(Q, dO, K, V)     1: its producer; and TMA's bytes     consumers, before the matmul
//   empty(Q, dO, K, V)    256: each consumer thread, when the  its producer, before the next load
//                         last matmul that reads it is
//                         complete
//   full(bias)            1: dO's producer; and TMA's bytes    consumers, before they add it
//   empty(bias)           8: each consumer warp, when it has   dO's producer, before the next load
//                         been added
//   full(work tiles)      1: producer of KV tiles              other producers, consumers
//   empty(work tiles)     3: other producers; 256: each        producer of KV tiles, before it
//                         consumer thread. When they have      describes another tile
//                         finished the tile
//   fetch                 1: producer of Q, before the last    producer of KV tiles, before it
//                         load of a tile                       fetches the next
//   dS (of each stage)    8: each consumer warp, when its dS   consumers, before they start dQ and
//                         is written, its dQ of the iteration  before they overwrite the other
//                         before complete, and read what TMA   stage
//                         stores of that as dbias
//   full(dQ)              4: each warp of the consumer, when   producer that adds it
//                         its fragments are written
//   empty(dQ)             1: that producer, when TMA has read  that consumer, before its next dQ
//                         it
//   dS stored (named)     the 128 threads of a consumer        the same threads, before a dK that
//                                                              takes dS from shared memory
//   ping-pong (named)     128: the other consumer, when its    a consumer (its 128 threads count
//                         dP is started                        too), before it starts S
#pragma once

#include "kernels/fa3/backward_producers.cuh"
#include "ptx/barrier.cuh"
#include "ptx/stmatrix.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3BackwardShape kTuning>
struct Fa3Backward : Fa3BackwardProducers<Element, kHeadDim, kHeadDimV, kOptions, kTuning> {
    using Base = typename Fa3Backward::Fa3BackwardProducers;
    using Base::kBlockQ, Base::kBlockKV, Base::kConsumers, Base::kDropout, Base::elected,
        Base::params, Base::storage, Base::work_tiles, Base::q_pipeline, Base::do_pipeline,
        Base::k_pipeline, Base::v_pipeline, Base::dq_pipeline, Base::ds_barrier;
    using typename Base::QTile, typename Base::DOTile, typename Base::KTile, typename Base::VTile,
        typename Base::DSTile, typename Base::DQTile, typename Base::QPipeline,
        typename Base::DOPipeline, typename Base::DQPipeline, typename Base::WorkTileState;
    using Scores = RegisterTile<16, kBlockQ>;
    using Operand = RegisterOperand<kBlockQ>;
    using GradientK = RegisterTile<16, kHeadDim>;
    using GradientV = RegisterTile<16, kHeadDimV>;
    using DQ = typename DQTile::Fragments;
    using Statistics = RowNumbers<kBlockQ>;
    using Order = PingPong<kConsumers, kTuning.ping_pong()>;

    // The index of this thread's warpgroup among the consumers, and the first row of its warp
    // within the KV tile.
    int consumer = ptx::warp_uniform(threadIdx.x / 128) - 1;
    int warp_key = (ptx::warp_uniform(threadIdx.x / 32) - 4) * 16;

    using Base::Base;

    FLASH_DEVICE uint32_t ds_tile(uint32_t stage) const {
        return ptx::shared_address(storage.ds[stage]);
    }
    FLASH_DEVICE void store_ds(const Operand& rdS, uint32_t stage) const {
        const uint32_t lane = threadIdx.x % 32;
        if constexpr (Base::kDSByQuery) {
            const uint32_t address = ds_tile(stage) + DSTile::offset(lane / 16 * 8 + lane % 8,
                                                                     warp_key / 8 + lane / 8 % 2);
#pragma unroll
            for (int k = 0; k < kBlockQ / 16; ++k)
                ptx::stmatrix_x4_trans(address + k * 16 * DSTile::kPitch, rdS.v[k]);
        } else {
            const uint32_t address =
                ds_tile(stage) + DSTile::offset(warp_key + lane % 16, lane / 16);
#pragma unroll
            for (int k = 0; k < kBlockQ / 16; ++k)
                ptx::stmatrix_x4(DSTile::block_address(address, k), rdS.v[k]);
        }
        ptx::fence_proxy_async();
    }

    // An operand in the first stage of a pipeline, moved to another stage.
    template <int kStageBytes, class Operand_>
    static FLASH_DEVICE Operand_ in_stage(Operand_ operand, uint32_t stage) {
        operand.descriptor += stage * (kStageBytes / 16);
        return operand;
    }

    // The state of a consumer's loops. Matrices are only referenced: as members they would make
    // the compiler treat the whole object as an array in most passes.
    struct State {
        Scores& rS;
        Scores& rdP;
        Operand& rP;
        Operand& rdS;
        GradientK& rdK;
        GradientV& rdV;
        DQ& rdQ;  // may be in the registers of S or dP

        WorkTileState tile{};
        PipelineState<1> kv{};                     // of K and V
        typename QPipeline::State q{}, q_done{};   // of S; of dK, one iteration later
        typename DOPipeline::State d{}, d_done{};  // of dP; of dV
        typename DQPipeline::State dq{};
        uint32_t bias = 0;              // position in its pipeline
        uint32_t ds = 0, ds_phase = 0;  // the stage of dS that dQ reads
        VisibleTiles q_tiles{};
        int last_first = 0;  // the KeyTile's: each read from shared memory is a wait
        Interval full{};     // indices
        QTilePosition at{};
        int iterations = 0;       // left
        bool accumulate = false;  // have dV and dK a sum already?
        DropoutMask dropout;      // of the sequence's head 0
    };

    template <bool kFirst, class A, class B>
    static FLASH_DEVICE const auto& first_if(const A& a, const B& b) {
        if constexpr (kFirst) {
            return a;
        } else {
            return b;
        }
    }

    // Operands in shared memory. Operands of pipelines are in the first stage.
    struct Operands {
        const Fa3Backward& cta;
        int consumer = cta.consumer;
        // ptxas 13.5: with K and V by 32 bits, too, d 128 spills (note 027).
        KMajor<KTile> k_rows{cta.k_pipeline.stages, consumer * 64};
        KMajor<VTile> v_rows{cta.v_pipeline.stages, consumer * 64};
        KMajorBy32Bits<QTile> q_rows{cta.q_pipeline.stages};
        KMajorBy32Bits<DOTile> do_rows{cta.do_pipeline.stages};
        MNMajor<QTile> q_columns{cta.q_pipeline.stages};
        MNMajor<DOTile> do_columns{cta.do_pipeline.stages};
        Statistics lse_rows{ptx::shared_address(cta.storage.lse)};  // if by_matmul
        Statistics delta_rows{ptx::shared_address(cta.storage.minus_delta)};
        KMajorBy32Bits<DSTile> ds_rows{cta.ds_tile(0),
                                       DQTile::kHalvesQueries ? consumer * DQTile::kQueries : 0};
        MNMajor<DSTile> ds_columns{cta.ds_tile(0) + consumer * DSTile::kAtomBytes};
        MNMajor<KTile> k_columns{cta.k_pipeline.stages + (DQTile::kHalvesQueries ? 0 : consumer) *
                                                             (64 / KTile::kAtomCols) *
                                                             KTile::kAtomBytes};

        // dS with this consumer's keys as rows, and with the queries of its half of dQ.
        FLASH_DEVICE const auto& ds_of_keys() const {
            return first_if<Base::kDSByQuery>(ds_columns, ds_rows);
        }
        FLASH_DEVICE const auto& ds_of_queries() const {
            return first_if<Base::kDSByQuery>(ds_rows, ds_columns);
        }
    };

    // S^T = K Q^T
    FLASH_DEVICE void issue_s(State& s, const Operands& x) const {
        q_pipeline.consumer_wait(s.q);
        if constexpr (kTuning.by_matmul())
            gemm_async<__nv_bfloat16, 16>(
                s.rS, Ones{}, in_stage<Statistics::kBytes>(x.lse_rows, s.q.stage), false);
        gemm_async<Element, kHeadDim>(s.rS, x.k_rows, in_stage<QTile::kBytes>(x.q_rows, s.q.stage),
                                      kTuning.by_matmul());
    }

    // dP^T = V dO^T - delta. With dropout drop() subtracts delta, from dropped entries, too.
    FLASH_DEVICE void issue_dp(State& s, const Operands& x) const {
        do_pipeline.consumer_wait(s.d);
        if constexpr (kTuning.by_matmul()) {
            gemm_async<__nv_bfloat16, 16>(
                s.rdP, Ones{}, in_stage<Statistics::kBytes>(x.delta_rows, s.d.stage), false);
        } else if constexpr (!kDropout) {
            Scores& dp = s.rdP;
            for_each_with_query<Rows::kKeys, Scores>(
                storage.minus_delta[s.d.stage],
                [&](int m, int n, int i, float minus_delta) { dp.v[m][n][i] = minus_delta; });
        }
        gemm_async<Element, kHeadDimV>(s.rdP, x.v_rows,
                                       in_stage<DOTile::kBytes>(x.do_rows, s.d.stage), !kDropout);
    }

    // dV += P^T dO, dK += dS^T Q
    FLASH_DEVICE void issue_dv_dk(State& s, const Operands& x) const {
        gemm_async<Element, kBlockQ>(
            s.rdV, s.rP, in_stage<DOTile::kBytes>(x.do_columns, s.d_done.stage), s.accumulate);
        const auto q_columns = in_stage<QTile::kBytes>(x.q_columns, s.q_done.stage);
        if constexpr (kTuning.hold_ds) {
            gemm_async<Element, kBlockQ>(s.rdK, s.rdS, q_columns, s.accumulate);
        } else {
            ptx::barrier_sync(kDSStoredBarrier + consumer, 128);  // its dS is complete
            gemm_async<Element, kBlockQ>(s.rdK, in_stage<DSTile::kBytes>(x.ds_of_keys(), s.ds),
                                         q_columns, s.accumulate);
        }
    }
    FLASH_DEVICE void finish_dv_dk(State& s) const {
        finish(s.rdV, s.rdK);
        q_pipeline.consumer_release(s.q_done);  // by all threads, if all read lse and delta
        s.q_done.advance();
        do_pipeline.consumer_release(s.d_done);
        s.d_done.advance();
    }

    // This consumer's half of dQ = dS K.
    FLASH_DEVICE void issue_dq(State& s, const Operands& x) const {
        if constexpr (kTuning.transpose_dq) {
            gemm_async<Element, kBlockKV>(s.rdQ, x.k_columns,
                                          in_stage<DSTile::kBytes>(x.ds_rows, s.ds), false);
        } else {
            gemm_async<Element, kBlockKV>(s.rdQ, in_stage<DSTile::kBytes>(x.ds_of_queries(), s.ds),
                                          x.k_columns, false);
        }
    }

    FLASH_DEVICE WarpScores<Element, Rows::kKeys, kOptions> warp_scores(const State& s,
                                                                        const KeyTile& tile,
                                                                        int col = 0) const {
        int first_query = q_tile(s.last_first, s.at.i) * kBlockQ;
        if constexpr (Base::kMask) first_query = storage.mask.first_queries[s.q.stage];
        return {params, tile.sequence, s.at.head, tile.first_key + warp_key, first_query + col};
    }

    FLASH_DEVICE static bool is_partial(const State& s) {
        return s.at.i < s.full.begin || s.at.i >= s.full.end;
    }
    // What a mask of tiles shows of a partial tile: found beside S, dV and dK. If large_lse is
    // raised, full tiles count as partial, too; they do not use it.
    FLASH_DEVICE VisibleElements<Scores> visible(const State& s, const KeyTile& tile) const {
        if constexpr (Base::kMask)
            if (is_partial(s)) [[unlikely]]
                return visible_elements<Scores>(storage.mask.words[s.q.stage],
                                                params.tile_mask.bits, tile.first_key + warp_key);
        return {};
    }

    // P^T = 2^(S^T scale - lse), or with a softcap alone tanh.
    FLASH_DEVICE void probabilities(State& s, const KeyTile& tile,
                                    const VisibleElements<Scores>& visible) const {
        if constexpr (Base::kBias)
            add_bias<Rows::kKeys, typename Base::BiasTile,
                     kHeadDim <= tuning::kFa3Float32BiasHeadDim>(
                s.rS, this->bias_pipeline(), s.bias, warp_key, params.scale_log2,
                params.bias_map.is_float32);
        bool masked = is_partial(s);
        if constexpr (Base::kMask) {
            if (masked) [[unlikely]] {
                if (s.at.i >= tile.full_tiles) hide_queries(s.rS, visible);
                masked = tile.large_lse;
            }
        }
        if constexpr (only_softcap(kOptions)) {
            warp_scores(s, tile).cap(s.rS, masked);
        } else {
            warp_scores(s, tile).probabilities(s.rS, storage.lse[s.q.stage], masked,
                                               tile.large_lse);
        }
    }

    // With dropout Z / (1 - p): dS^T = P^T * (Z^T * dP^T / (1 - p) - delta), and P^T becomes Z^T *
    // P^T, whose factor comes at the end. dS has a part of its factor when it is rounded
    // (ds_factor). dS of kept and of dropped entries are both rounded; one mask then selects, two
    // entries at a time.
    FLASH_DEVICE void drop(State& s, const KeyTile& tile) const {
        const float* minus_delta = storage.minus_delta[s.d.stage];
        const DropoutMask mask = s.dropout.ahead(s.at.head);
        const uint32_t place =
            mask.place(q_tile(s.last_first, s.at.i) * kBlockQ / 2 + lane_col(),
                       DropoutMask::counter(tile.first_key + warp_key) + lane_row());
        using Piece = RegisterTile<16, 8>;
        uint32_t words[2];
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            const auto& p = reinterpret_cast<const Piece&>(s.rS.v[0][n]);
            auto& ds = reinterpret_cast<Piece&>(s.rdP.v[0][n]);
            Piece dropped;
            if (n % 2 == 0)
                draw_words(words, mask, place + 4 * n * DropoutMask::kRowStep,
                           DropoutMask::kRowStep);
            const float2 of_queries = column_pair(minus_delta, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float minus = i % 2 == 0 ? of_queries.x : of_queries.y;
                float& x = ds.v[0][0][i];
                dropped.v[0][0][i] = p.v[0][0][i] * minus;
                x = p.v[0][0][i] * (x * params.ds_factor + minus);
            }
            s.rP.template round_columns<Element>(p, 8 * n);
            s.rdS.template round_columns<Element>(ds, 8 * n);
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // halves of the keys
                const uint32_t keep = keep_pair(mask, words[0], words[1], n % 2, i);
                uint32_t& x = s.rdS.v[n / 2][n % 2 * 2 + i];
                s.rP.v[n / 2][n % 2 * 2 + i] &= keep;
                x = (x & keep) | (dropped.template pack<Element>(0, 0, i) & ~keep);
            }
        }
    }

    // dS^T = P^T * (dP^T - delta), and both rounded to operands.
    FLASH_DEVICE void softmax_gradient(State& s, const KeyTile& tile) const {
        if constexpr (kDropout) return drop(s, tile);
        const auto& lse = storage.lse[s.q.stage];
        using Piece = RegisterTile<16, 8>;  // ptxas 13.0: wider ones serialize wgmma at d 64
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            auto& p = reinterpret_cast<Piece&>(s.rS.v[0][n]);
            auto& ds = reinterpret_cast<Piece&>(s.rdP.v[0][n]);
            if constexpr (only_softcap(kOptions)) {
                softcap_gradient<Rows::kKeys>(p, ds, lse + 8 * n, params.softcap_log2);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) ds.v[0][0][i] *= p.v[0][0][i];
                if constexpr (contains(kOptions, OptionSet::kSoftcap))
                    if (params.softcap != 0.f)
                        warp_scores(s, tile, 8 * n).softcap_gradient(ds, p, [&](int col) -> float {
                            return lse[8 * n + col];
                        });
            }
            s.rP.template round_columns<Element>(p, 8 * n);
            s.rdS.template round_columns<Element>(ds, 8 * n);
        }
    }

    // A float32 dbias has dS before it was rounded.
    FLASH_DEVICE void store_float32_dbias(const State& s, const KeyTile& tile) const {
        if constexpr (Base::kBias && kHeadDim <= tuning::kFa3Float32BiasHeadDim)
            if (params.dbias_map.from_registers)
                store_dbias_rows(params, s.rdP, tile.sequence, s.at.head,
                                 q_tile(s.last_first, s.at.i) * kBlockQ, tile.first_key + warp_key);
    }

    // This consumer's half of dQ, to shared memory.
    FLASH_DEVICE void store_dq(const State& s) const {
        dq_pipeline(consumer).producer_acquire(s.dq);
        DQTile::store(storage.dq[consumer].bytes[s.dq.stage], s.rdQ, consumer);
    }
    // Lets the producer add it. `stored`: has an iteration stored any?
    FLASH_DEVICE void commit_dq(State& s, bool stored = true) const {
        ptx::fence_proxy_async();
        __syncwarp();
        if (elected && stored) dq_pipeline(consumer).producer_commit(s.dq);
        if (stored) s.dq.advance();
    }

    // Both consumers wait until both have written dS and completed the dQ of the iteration before.
    // Then dS can be stored as dbias; `at`: where it is.
    FLASH_DEVICE void wait_ds(const State& s, const KeyTile& tile, const QTilePosition& at) const {
        ptx::mbarrier_wait(ds_barrier(s.ds), s.ds_phase);
        if constexpr (Base::kBias)
            if (params.dbias_map.by_tma && elected && warp_key % 64 == 0)
                store_dbias_tile(params, ds_tile(s.ds) + consumer * DSTile::kAtomBytes,
                                 tile.sequence, at.head, q_tile(s.last_first, at.i) * kBlockQ,
                                 tile.first_key + consumer * 64);
    }
    FLASH_DEVICE void commit_ds(const State& s) const {
        __syncwarp();
        if constexpr (Base::kBias) ptx::bulk_wait_read();  // of the other stage, as dbias
        if (!elected) return;
        ptx::mbarrier_arrive(ds_barrier(s.ds));
    }
    static FLASH_DEVICE void next_ds(State& s) {
        s.ds_phase ^= s.ds;
        s.ds ^= 1;
    }

    // S, P, dP and dS of the first Q tile.
    FLASH_DEVICE void first_iteration(State& s, const Operands& x, const KeyTile& tile) const {
        k_pipeline.consumer_wait(s.kv);
        Order::wait(consumer);
        issue_s(s, x);
        const auto seen = visible(s, tile);
        finish(s.rS);
        v_pipeline.consumer_wait(s.kv);
        issue_dp(s, x);
        Order::signal_next(consumer);
        probabilities(s, tile, seen);
        finish(s.rdP);
        softmax_gradient(s, tile);
        store_ds(s.rdS, s.ds);
        store_float32_dbias(s, tile);
        commit_ds(s);
        s.accumulate = false;
    }

    // S, P, dP and dS of the next Q tile; dV, dK and dQ of this one.
    FLASH_DEVICE void iterate(State& s, const Operands& x, const KeyTile& tile) const {
        s.q.advance();
        s.d.advance();
        s.at.advance(s.q_tiles);
        Order::wait(consumer);
        issue_s(s, x);
        issue_dv_dk(s, x);
        if (kTuning.late_fences()) commit_dq(s, s.accumulate);
        s.accumulate = true;
        const auto seen = visible(s, tile);
        finish_dv_dk(s);
        warpgroup_fence(s.rS);
        issue_dp(s, x);
        Order::signal_next(consumer);
        probabilities(s, tile, seen);
        const QTilePosition before = s.at.before(s.q_tiles);
        if (kTuning.early_exponentials()) wait_ds(s, tile, before);
        finish(s.rdP);
        if (!kTuning.early_exponentials()) wait_ds(s, tile, before);
        softmax_gradient(s, tile);
        if (!kTuning.late_fences()) store_ds(s.rdS, s.ds ^ 1);
        store_float32_dbias(s, tile);
        issue_dq(s, x);
        if (kTuning.late_fences()) store_ds(s.rdS, s.ds ^ 1);
        finish(s.rdQ);
        next_ds(s);
        commit_ds(s);
        store_dq(s);
        if (!kTuning.late_fences()) commit_dq(s);
    }

    // dV, dK and dQ of the last Q tile, and the results.
    FLASH_DEVICE void finish_tile(State& s, const Operands& x, const KeyTile& tile) const {
        v_pipeline.consumer_release(s.kv);
        issue_dv_dk(s, x);
        if (kTuning.late_fences()) commit_dq(s, s.accumulate);
        wait_ds(s, tile, s.at);
        issue_dq(s, x);
        finish_dv_dk(s);
        warpgroup_fence(s.rdQ);
        next_ds(s);
        k_pipeline.consumer_release(s.kv);
        s.q.advance();
        s.d.advance();
        store_dq(s);
        commit_dq(s);
        if constexpr (kDropout) s.rdV.scale(late_factor<kOptions>(params));
        s.rdK.scale(params.gradient_scale);
        store_gradient(params, gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v),
                       s.rdV);
        store_gradient(params, gradient_rows<Element>(params.dk, tile, warp_key, params.head_dim),
                       s.rdK);
    }

    FLASH_DEVICE void store_no_gradient(const State& s, const KeyTile& tile) const {
        k_pipeline.consumer_wait(s.kv);
        v_pipeline.consumer_wait(s.kv);
        k_pipeline.consumer_release(s.kv);
        v_pipeline.consumer_release(s.kv);
        store_zero_gradient<kHeadDim>(
            params, gradient_rows<Element>(params.dk, tile, warp_key, params.head_dim));
        store_zero_gradient<kHeadDimV>(
            params, gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v));
    }

    FLASH_DEVICE void consume() const {
        using enum tuning::Fa3DQRegisters;
        Scores rS, rdP;
        Operand rP, rdS;
        GradientK rdK;
        GradientV rdV;
        DQ own_rdQ;
        DQ& rdQ = kTuning.dq_registers == kOwn    ? own_rdQ
                  : kTuning.dq_registers == kOfDP ? reinterpret_cast<DQ&>(rdP)
                                                  : reinterpret_cast<DQ&>(rS);
        State s{rS, rdP, rP, rdS, rdK, rdV, rdQ};
        // Ping-pong: a consumer starts its iteration after the other has started dP.
        if (consumer == 1) Order::signal_next(consumer);  // consumer 0 starts
        const Operands x{*this};

        for (;; this->end_work_tile(s.tile)) {
            work_tiles.descriptions.consumer_wait(s.tile);
            const KeyTile& tile = work_tiles[s.tile];
            if (ptx::warp_uniform(tile.first_key) < 0) break;
            s.q_tiles = warp_uniform(tile.q_tiles);
            s.kv.phase = work_tiles.phase(s.tile);  // ptxas 13.0: later, wgmma is serialized
            if constexpr (Base::kBias)
                if (params.dbias_map.zeroes)
                    store_dbias_zeros<kBlockQ, kBlockKV>(params, tile, this->first_head(tile),
                                                         this->group());
            if (s.q_tiles.empty()) [[unlikely]] {
                store_no_gradient(s, tile);
                continue;
            }
            if constexpr (Base::kMask) {
                s.full = {0, ptx::warp_uniform(tile.large_lse ? 0 : tile.full_tiles)};
            } else {
                s.full = full_q_tiles(params, tile, tile.first_key + consumer * 64, kBlockQ);
                s.last_first = ptx::warp_uniform(tile.last_first);
                if (const int end = s.last_first + 1; end > 1)
                    s.full = {end - s.full.end, end - s.full.begin};
            }
            s.at = {s.q_tiles.begin, ptx::warp_uniform(this->first_head(tile))};
            s.iterations = s.q_tiles.count() * this->group();
            if constexpr (kDropout) s.dropout = uniform_dropout_mask(params, tile.sequence, 0);
            first_iteration(s, x, tile);
            while (--s.iterations > 0) iterate(s, x, tile);
            finish_tile(s, x, tile);
        }
        if constexpr (Base::kBias) ptx::bulk_wait<0>();  // of dbias: TMA reads shared memory
    }
};

template <class Kernel>
cudaError_t launch_fa3_backward(const BackwardParams& call, const BackwardKernel& kernel,
                                cudaStream_t stream) {
    typename Kernel::Params params{};
    static_cast<Fa3BackwardParams&>(params) = {{with_parts_as_heads(call)}, kernel.lead};
    cudaError_t status = params.template encode<Kernel>();
    if constexpr (Kernel::kBias) {
        if (status == cudaSuccess)
            status = params.bias_map.template prepare<typename Kernel::BiasTile>(call, kernel.bias,
                                                                                 stream);
        if (status == cudaSuccess)
            status = params.dbias_map.template prepare<typename Kernel::DSTile>(
                kernel.dbias, kernel.stored_dbias, kernel.zeroes_dbias, stream);
    }
    if (status == cudaSuccess) status = backward_preprocess(params, Kernel::kBlockQ, stream);
    if (status == cudaSuccess)
        status = launch_kernel<fa3_kernel<Kernel>>(
            min_of(work_tile_count(params.tile_order), kernel.gpu.sms), Kernel::kThreads,
            sizeof(typename Kernel::SharedStorage), params, stream, {.pdl = true});
    if (status == cudaSuccess)
        status = postprocess_dq<typename Kernel::DQTile>(params, stream, {.pdl = true});
    return status;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward(const BackwardParams& params, const BackwardKernel& kernel,
                         cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa3Backward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        return dispatch<false, true>(kernel.many_queries, [&](auto many) {
            constexpr tuning::Fa3BackwardShape kTuning =
                tuning::fa3_backward_shape({kHeadDim, kHeadDimV}, options.value, many);
            using Kernel =
                Fa3Backward<decltype(element), kHeadDim, kHeadDimV, options.value, kTuning>;
            return launch_fa3_backward<Kernel>(params, kernel, stream);
        });
    });
}

}  // namespace flash_ext
