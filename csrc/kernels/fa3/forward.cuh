// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2), for Hopper.
//
// The grid has at most one CTA per SM. Each CTA fetches Q tiles until none is left
// (epoch_counter.cuh). Its warpgroups have roles:
//
//   producer    three threads, one each for K, Q and V. All load by TMA; K's also fetches the tiles
//               (with a bias or pages: see below)
//   consumers   each owns 64 rows of the Q tile (split-Q) and sees all of K and V
//
// A consumer goes over the T KV tiles that a Q tile sees, from the last one to the first:
//
//     S  = Q K_T^T,  P = softmax(S)
//     for j = T - 1, ..., 1:            iterate(), in the order in which it starts operations
//         S' = Q K_j^T                  wgmma, asynchronous
//         O  = O rescaled to P          as the softmax of the iteration before requires
//         O += P V_{j+1}                wgmma, asynchronous
//         P' = softmax(S')              when S' is complete, while P V runs
//         P  = P'                       (optimistic_softmax.cuh)
//     O += P V_1,  store O / l and lse
//
// The iterations of all Q tiles of a CTA form one sequence: iterate() also leads from the last P of
// a Q tile to the first S' of the next one, so that the tensor cores are busy while a result is
// written. O / l is stored when O would be rescaled. Most iterations stay within a Q tile and need
// no mask. This unmasked main loop is compiled separately, without branches.
//
// Four consumers have no registers for a second P: each waits for its P V before the softmax, and
// the matmuls of the others run beside it (kOverlap). In most kernels iterations with a mask do the
// same, and are then written once and not for each P (kMaskedSteps).
//
// Consumers may start their matmuls alternately (ping-pong), so that the softmax of one runs beside
// the matmuls of the other; in the other kernels they drift apart without it.
//
// Shared memory: pipelines of Q, K and V tiles; the work-tile pipeline (QueryTile); with a bias a
// pipeline of its tiles (bias_tiles.cuh). A mask of tiles (mask_tiles.cuh) comes with Q and K;
// then all lanes of a warp count in the arrivals at empty(Q, K, V).
//
//   barrier             arrivals per phase                   who waits
//   full(Q, K, V)       1: its producer; and TMA's bytes     consumers, before the matmul
//   empty(K, V)         4 a consumer: each warp, when the    its producer, before the next load
//                       matmul is complete
//   empty(Q)            4 a consumer: each warp, when the    Q's producer, before the next load
//                       tile's last S is complete (one
//                       stage), or when the consumer goes
//                       on to the next tile (two)
//   full(work tiles)    1: K's producer                      Q's and V's producers, consumers
//   empty(work tiles)   2: Q's and V's producers, when all   K's producer, before it describes
//                       loads of the tile are issued; 128 a  another tile
//                       consumer: each thread, when its
//                       rows of O are stored
//   ping-pong (named)   128: consumer i, when its matmuls    consumer i + 1 (its 128 threads count
//                       are started, or when it is about     too), before it starts its own
//                       to store a result
//
// In a kernel with a bias a fourth producer loads it:
//
//   barrier             arrivals per phase                   who waits
//   full(bias)          1: its producer; and TMA's bytes     consumers, before they add it
//   empty(bias)         4 a consumer: each warp, when it     its producer, before the next load
//                       has been added
//   empty(work tiles)   3: Q's, V's and the bias' producers  K's producer, before it describes
//                       as above; 128 a consumer: each       another tile
//                       thread, as above
//
// In a kernel with pages K and V are loaded by all lanes of a warp each, and Q tiles are fetched by
// a fourth producer:
//
//   barrier             arrivals per phase                   who waits
//   full(work tiles)    1: the producer that fetches         Q's, K's and V's producers, consumers
//   empty(work tiles)   65: Q's producer and each lane of    the producer that fetches, before it
//                       K's and V's, when all loads of the   describes another tile
//                       tile are issued; 128 a consumer:
//                       each thread, when its rows of O are
//                       stored
//   fetch               1: K's producer, a few iterations    the producer that fetches, before it
//                       before its tile's last one           fetches the next tile
#pragma once

#include "kernels/common/optimistic_softmax.cuh"
#include "kernels/fa3/forward_results.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3ForwardShape kTuning>
struct Fa3Forward : Fa3ForwardResults<Element, Element, kHeadDim, kHeadDimV, kOptions, kTuning> {
    using Tiles = typename Fa3Forward::Fa3ForwardResults;
    using Tiles::consumer, Tiles::end_work_tile, Tiles::find_tile, Tiles::full_tiles,
        Tiles::k_pipeline, Tiles::kBlockKV, Tiles::kConsumers, Tiles::params, Tiles::q_pipeline,
        Tiles::query_of, Tiles::release, Tiles::release_and_advance, Tiles::v_pipeline,
        Tiles::work_tiles;
    using typename Tiles::KTile, typename Tiles::Order, typename Tiles::Output,
        typename Tiles::QTile, typename Tiles::VTile, typename Tiles::QPipeline,
        typename Tiles::KPipeline, typename Tiles::VPipeline, typename Tiles::WorkTileState;
    // Does a consumer's softmax run beside its own P V? This takes two P. Four consumers have no
    // registers for that: the softmax of one runs beside the matmuls of the others.
    static constexpr bool kOverlap = kConsumers < 4;
    static constexpr bool kPages = contains(kOptions, OptionSet::kPages);
    static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : 40;
    static constexpr int kConsumerRegisters = Tiles::consumer_registers(kProducerRegisters);
    using Scores = RegisterTile<16, kBlockKV>;
    // Kernels with options that visit elements are not batch-invariant, and lack the register.
    using Softmax = OptimisticSoftmax<Element, kBlockKV, !visits_elements(kOptions)>;
    using Probabilities = typename Softmax::Probabilities;
    static constexpr bool kDropout = contains(kOptions, OptionSet::kDropout);
    struct NoDropout {};
    // What a consumer carries from one iteration to the next. The matrices are only referenced: as
    // members they would make the compiler treat the whole object as an array in most passes.
    struct State {
        Scores& rS;
        Output& rO;
        Softmax& softmax;
        RowRescaling& rescaling;  // of O, before P V is added
        Softmax& prev_softmax;    // of the previous Q tile, until O is stored

        typename QPipeline::State q{};
        typename KPipeline::State k{};
        typename VPipeline::State v{};
        uint32_t bias = 0;                    // position in its pipeline
        WorkTileState tile{}, output_tile{};  // of the scores, and of O

        // The index of the KV tile of the scores: from the last one down to the first.
        int kv_tile{}, first_kv_tile{};
        Interval full_tiles{};                  // indices of the tiles that need no mask
        bool k_ready = false, v_ready = false;  // has a test found the next stage full?
        int skipped_tiles = 0;  // number of the next KV tiles that only other consumers see

        bool far = false;  // with a softcap alone: see TanhSeries
        [[no_unique_address]] std::conditional_t<kDropout, DropoutMask, NoDropout> dropout;
        uint32_t dropout_row = 0;  // place of this lane's row in column 0

        // With ALiBi alone: its slope; the diagonal's key in this warp's first row, as if the tile
        // of the scores had its index for a number.
        float slope{};
        int diagonal{};

        bool first_iteration = true;  // P belongs to the first iteration of its Q tile
        bool output_pending = false;  // O belongs to the previous Q tile and is not stored yet
    };

    using Tiles::Tiles;

    FLASH_DEVICE void init() const {
        constexpr int kOthers = kPages ? 2 * 32 : Tiles::kBias ? 2 : 1;
        this->init_pipelines(1, 1 + kOthers);  // Q's producer, and V's and K's or the bias'
    }

    FLASH_DEVICE void produce() const {
        if (warp_id() == 0) this->produce_k([](const QueryTile&, int) {});
        if constexpr (Tiles::kBias)
            if (warp_id() == 1) this->produce_bias();
        if (!kPages && warp_id() == 2) this->produce_v();
        if (warp_id() == 3) this->produce_q();
    }
    FLASH_DEVICE void produce_by_warps() const {
        if constexpr (kPages) {
            if (warp_id() == 1)
                this->template produce_paged_keys<KTile, true>(k_pipeline, params.k_map, params.k);
            if (warp_id() == 2)
                this->template produce_paged_keys<VTile, false>(v_pipeline, params.v_map, params.v);
        }
    }

    // --- Ping-pong ---

    // With splits, if a CTA has all of a Q tile: otherwise tiles of few rows leave a consumer
    // without any, which skips what the other one computes.
    FLASH_DEVICE void wait_turn() const {
        if constexpr (kTuning.ping_pong) {
            Order::wait(consumer);
        } else if constexpr (Tiles::kMayHaveFixedSplits) {
            if (merges()) PingPong<kConsumers>::wait(consumer);
        }
    }
    FLASH_DEVICE void signal_next() const {
        if constexpr (kTuning.ping_pong) {
            Order::signal_next(consumer);
        } else if constexpr (Tiles::kMayHaveFixedSplits) {
            if (merges()) PingPong<kConsumers>::signal_next(consumer);
        }
    }

    // --- Q tiles ---

    // Releases KV tiles that this consumer does not use.
    template <class Pipeline>
    FLASH_DEVICE void skip(const Pipeline& pipeline, typename Pipeline::State& state, int tiles,
                           bool& ready) const {
        for (; tiles > 0; --tiles) {
            pipeline.consumer_wait(state);  // otherwise this warp would arrive twice in one phase
            release_and_advance(pipeline, state);
            ready = false;
        }
    }

    // K's tiles, and the bias', which come in turn.
    FLASH_DEVICE void skip_keys(State& x, int tiles) const {
        if constexpr (!Tiles::kBias) {
            skip(k_pipeline, x.k, tiles, x.k_ready);
        } else {
#pragma unroll 1
            for (; tiles > 0; --tiles) {
                skip(k_pipeline, x.k, 1, x.k_ready);
                skip_bias(this->bias_pipeline(), x.bias, params.bias_map.is_float32);
            }
        }
    }

    FLASH_DEVICE void begin_tile(State& x) const {
        const QueryTile& tile = work_tiles[x.tile];
        x.full_tiles = full_tiles(tile);
        if constexpr (kDropout) {
            x.dropout = uniform_dropout_mask(params, tile.sequence, tile.head);
            x.dropout_row = x.dropout.place(
                DropoutMask::counter(tile.first_query + this->warp_row()) + lane_row(), 0);
        }
        if constexpr (Tiles::kAlibi) {
            const Sequence& s = tile.sequence;
            x.slope = ScoreFunction<Element, Rows::kQueries, kOptions>{params, s, tile.head}
                          .alibi_slope();
            const int turned = tile.turn > 0 ? tile.kv_tiles.end - tile.turn : 0;
            x.diagonal = ptx::warp_uniform(tile.first_query + this->warp_row() + s.seqlen_k -
                                           s.seqlen_q + turned * kBlockKV);
        }
        // Ping-pong needs equal numbers of iterations, and lists of tiles are not of 64 queries.
        if constexpr (!kTuning.ping_pong && !Tiles::kMask) {
            const int last = merges()
                                 ? x.kv_tile
                                 : tile.kv_tiles.last_seen_by(mask_of(params, tile.sequence),
                                                              this->queries_of(tile), kBlockKV);
            x.skipped_tiles = max_of(x.kv_tile - max_of(last, x.first_kv_tile), 0);
            x.kv_tile -= x.skipped_tiles;
            skip_keys(x, x.skipped_tiles);
        }
        q_pipeline.consumer_wait(x.q);
    }

    // Skips the first Q tiles if this consumer has no rows of them. These are the last tiles of
    // sequences, the longest ones under a causal mask, or, in decoding, tiles with a few rows.
    FLASH_DEVICE void skip_empty_tiles(State& x) const {
        while (true) {
            work_tiles.descriptions.consumer_wait(x.tile);
            const QueryTile& tile = work_tiles[x.tile];
            const int rows_left = tile.sequence.seqlen_q - query_of(tile, consumer * 64);
            if (ptx::warp_uniform(tile.first_query) < 0 || ptx::warp_uniform(rows_left) > 0) return;
            q_pipeline.consumer_wait(x.q);
            release_and_advance(q_pipeline, x.q);
            for (int i = ptx::warp_uniform(tile.kv_tiles.count()); i > 0; --i) {
                skip_keys(x, 1);
                skip(v_pipeline, x.v, 1, x.v_ready);
            }
            end_work_tile(x.tile);
            x.output_tile = x.tile;
        }
    }

    // --- Steps of an iteration ---

    // How often the code has an iteration with a mask. Twice, one for each P, its softmax may run
    // beside its P V, as without a mask. Once, the code is smaller and compiles faster, and it is
    // faster up to d 64, with options, and with splits: what a short call executes it must first
    // fetch. Others of d 128 and 256 are up to 4 % faster with it twice.
    static constexpr int kMaskedSteps =
        kHeadDim % 128 == 0 && !visits_elements(kOptions) && !Tiles::kMayHaveSplits ? 2 : 1;

    // Does an iteration test the barriers of the next one before its softmax, since a test takes
    // long? With four consumers and at d 128 and 256 that costs more than it saves.
    static constexpr bool kTestsEarly = kConsumers < 4 && kHeadDim % 128 != 0;

    // Does a consumer pass on its turn while it stores a result? Of the kernels with
    // ping-pong, d 128's gain by it.
    static constexpr bool kYieldsInStore = kHeadDim % 128 == 0;

    // Starts S = Q K^T.
    FLASH_DEVICE void issue_scores(State& x) const {
        // Q stays in place for many iterations.
        constexpr bool kPinned = kHeadDim > 128;
        const KMajor<QTile, kPinned> q_rows(q_pipeline.stage(x.q), consumer * 64);
        const auto k_rows = this->template operand<KMajor<KTile, false>>(k_pipeline, x.k);
        gemm_async<Element, kHeadDim>(x.rS, q_rows, k_rows, false);
    }

    // Starts O = P V or O += P V.
    FLASH_DEVICE void issue_output(const State& x, const Probabilities& rP, bool accumulate) const {
        const auto v_columns = this->template operand<MNMajor<VTile, false>>(v_pipeline, x.v);
        gemm_async<Element, kBlockKV>(x.rO, rP, v_columns, accumulate);
    }

    // P from the complete scores. new_tile: they are the first of a Q tile, whose softmax begins.
    template <bool kUnmasked>
    FLASH_DEVICE void compute_p(State& x, Probabilities& rP, bool new_tile) const {
        warpgroup_fence(x.rS);
        if constexpr (Tiles::kMask && !kUnmasked) this->apply_tile_mask(x.rS, x);
        release_and_advance(k_pipeline, x.k, /*by_lanes=*/!kUnmasked);
        if constexpr (kTestsEarly) {
            x.k_ready = k_pipeline.consumer_test(x.k);
            x.v_ready = v_pipeline.consumer_test(x.v);
        }
        if (Tiles::kReleaseEarly && !kUnmasked && x.kv_tile == x.first_kv_tile)
            release_and_advance(q_pipeline, x.q, /*by_lanes=*/true);
        if constexpr (kUnmasked && Tiles::kAlibi) {
            x.rescaling = linear_step(x, rP);
        } else if constexpr (kUnmasked && only_softcap(kOptions)) {
            x.rescaling = near_step(x, rP);
        } else if (kUnmasked && Tiles::kBias && !this->has_float32_bias()) {
            if constexpr (kUnmasked && Tiles::kBias) x.rescaling = biased_step(x, rP);
        } else {
            this->template finish_scores<kUnmasked>(x.rS, x);
            if constexpr (Tiles::kAlibi) turn(x);
            const bool fresh = !kUnmasked && new_tile;
            if (fresh) x.far = false;
            if (fresh) x.softmax = this->template begin_softmax<Softmax>(work_tiles[x.tile]);
            x.rescaling = x.softmax.step(x.rS, rP, exponent_scale<kOptions>(params), fresh);
        }
        if constexpr (kDropout) drop(x, rP);
    }

    // From the last KV tile on, to which the tiles turn: see turn_to_diagonal().
    FLASH_DEVICE void turn(State& x) const {
        const QueryTile& tile = work_tiles[x.tile];
        if (ptx::warp_uniform(tile.turn) == 0 || x.kv_tile + 1 != x.full_tiles.begin) return;
        x.full_tiles = {0, x.kv_tile};
        x.diagonal -= ptx::warp_uniform(tile.kv_tiles.end) * kBlockKV;
    }

    // The softmax with ALiBi: scores become complete only if the tile has the diagonal, or if the
    // softmax needs their maximum.
    FLASH_DEVICE RowRescaling linear_step(State& x, Probabilities& rP) const {
        const int first = x.diagonal - VisibleTiles::tile(x.kv_tile) * kBlockKV;  // distance
        const bool before = first >= kBlockKV - 1, after = first <= -15;
        const float slope = before ? x.slope : -x.slope;
        const auto distance = static_cast<float>(first + lane_row() - lane_col());
        const LinearScale scale{
            params.scale_log2, slope, {-slope * distance, -slope * (distance + 8)}};
        return x.softmax.step(x.rS, rP, scale, !before && !after,
                              [&] { this->template finish_scores<true>(x.rS, x); });
    }

    // The softmax with a softcap: by a series of tanh, until a score is too large for it.
    FLASH_DEVICE RowRescaling near_step(State& x, Probabilities& rP) const {
        const float (&c)[4] = params.tanh_series;
        uint32_t bits = 0;
        const TanhSeries series{
            c[0], {c[1], c[2], c[3]}, params.softcap_log2, __float_as_uint(params.tanh_limit), bits,
            x.far};
        return x.softmax.step(x.rS, rP, series, x.far,
                              [&] { this->template finish_scores<true>(x.rS, x); });
    }

    // The softmax with a bias of 16 bits, which scores have only if the softmax needs their
    // maximum.
    FLASH_DEVICE RowRescaling biased_step(State& x, Probabilities& rP) const {
        RowRescaling rescaling;
        use_bias(this->bias_pipeline(), x.bias, [&](uint32_t tile) {
            const BiasFragment<Rows::kQueries, typename Tiles::BiasTile> bias{tile,
                                                                              this->warp_row()};
            const BiasScale scale{params.scale_log2, bias};
            rescaling = x.softmax.step_incomplete(
                x.rS, rP, scale, [&] { add_bias_16(x.rS, bias, params.scale_log2); });
        });
        return rescaling;
    }

    // Dropout. The row sums have all of P already.
    FLASH_DEVICE void drop(const State& x, Probabilities& rP) const {
        const uint32_t first = VisibleTiles::tile(x.kv_tile) * kBlockKV / 2 + lane_col();
        drop_pairs<kBlockKV>(rP, x.dropout, x.dropout_row + first * DropoutMask::kColStep);
    }

    // Before P V: rescales O, or stores it as the result of the previous Q tile. kInTurn: it is
    // this consumer's turn.
    template <bool kInTurn>
    FLASH_DEVICE void rescale_or_store(State& x) const {
        if (!x.first_iteration) {
            x.rescaling.apply(x.rO);
        } else if (x.output_pending) {
            if constexpr (kInTurn && kYieldsInStore) signal_next();
            store(x.rO, x.prev_softmax, work_tiles[x.output_tile]);
            end_work_tile(x.output_tile);
            if constexpr (kInTurn && kYieldsInStore) wait_turn();
        }
    }

    // --- Results ---

    // Stores O / l and lse, or the results of a split.
    template <bool kLast = false>
    FLASH_DEVICE void store(Output& rO, Softmax& softmax, const QueryTile& tile) const {
        this->normalize(rO, softmax);
        this->template store_tile<kLast>(rO, softmax, tile);
    }

    // Does this CTA have all fixed splits of its Q tiles?
    FLASH_DEVICE bool merges() const {
        return Tiles::kMayHaveFixedSplits && params.split_ctas == 1;
    }
    FLASH_DEVICE void merge_and_store(Output& rO, Softmax& softmax, const QueryTile& tile) const {
        softmax.finish();
        if (this->merge_fixed_splits(rO, softmax, tile)) return;
        this->template store_tile<true, true>(rO, softmax, tile);
    }
    // Before the next scores, in whose registers it has what it merges.
    FLASH_DEVICE void merge_if_pending(State& x) const {
        if constexpr (Tiles::kMayHaveFixedSplits) {
            if (!merges() || !x.output_pending) return;
            merge_and_store(x.rO, x.prev_softmax, work_tiles[x.output_tile]);
            end_work_tile(x.output_tile);
            x.output_pending = false;
        }
    }

    // --- The loop ---

    // One iteration, as in the header. new_tile: P is of a Q tile's last keys, and the scores are
    // the first of the next one. With kUnmasked it stays within a Q tile, its scores need no mask,
    // and P is not of the Q tile's first iteration.
    template <bool kUnmasked>
    FLASH_DEVICE void iterate(State& x, const Probabilities& rP, Probabilities& next_rP,
                              bool new_tile = false) const {
        if constexpr (kUnmasked) {
            --x.kv_tile;
        } else {
            merge_if_pending(x);
        }
        k_pipeline.consumer_wait(x.k, x.k_ready);
        wait_turn();
        issue_scores(x);
        if constexpr (kUnmasked) {
            x.rescaling.apply(x.rO);
        } else {
            rescale_or_store<true>(x);
        }
        v_pipeline.consumer_wait(x.v, x.v_ready);
        issue_output(x, rP, kUnmasked || !x.first_iteration);
        signal_next();
        const auto v_read = x.v;
        x.v.advance();
        const auto finish = [&] {
            ptx::wgmma_wait<0>();
            warpgroup_fence(x.rO);
            release(v_pipeline, v_read);
        };

        constexpr bool kBeside = kOverlap && (kUnmasked || kMaskedSteps == 2);
        if constexpr (kBeside) {
            ptx::wgmma_wait<1>();
        } else {
            finish();
        }
        if (new_tile) x.prev_softmax = x.softmax;
        x.first_iteration = x.output_pending = new_tile;
        compute_p<kUnmasked>(x, next_rP, new_tile);
        if constexpr (kBeside) finish();
        if (new_tile) skip(v_pipeline, x.v, x.skipped_tiles, x.v_ready);
    }

    FLASH_DEVICE void consume() const {
        Scores rS;
        Output rO;
        Softmax softmax, prev_softmax;
        RowRescaling rescaling;
        State x{rS, rO, softmax, rescaling, prev_softmax};
        constexpr int kNext = kOverlap;  // P V reads one P while the other is written
        Probabilities rP[1 + kNext];

        if constexpr (!kTuning.ping_pong)
            if (!merges()) skip_empty_tiles(x);
        if (!find_tile(x)) return;
        begin_tile(x);
        if (consumer == kConsumers - 1) signal_next();  // consumer 0 starts
        k_pipeline.consumer_wait(x.k);
        wait_turn();
        issue_scores(x);
        signal_next();
        ptx::wgmma_wait<0>();
        compute_p<false>(x, rP[0], true);
        skip(v_pipeline, x.v, x.skipped_tiles, x.v_ready);

        // Each pass: an iteration that may have a mask or begin the next Q tile, or one for each P,
        // then the unmasked main loop. nvcc 13.4: the loop ends at find_tile() itself. By a result
        // of a function that does more, values would leave the uniform registers
        // (docs/notes/024-nvcc-versions.md).
        bool odd = false;  // which P the last P V reads
        while (true) {
            bool new_tile = this->advance(x);
            if (new_tile) {
                if (!find_tile(x)) break;
                begin_tile(x);
            }
            iterate<false>(x, rP[0], rP[kMaskedSteps == 1 ? 0 : kNext], new_tile);
            if constexpr (kMaskedSteps == 2) {
                new_tile = this->advance(x);
                if (new_tile) {
                    if (!find_tile(x)) {
                        odd = true;
                        break;
                    }
                    begin_tile(x);
                }
                iterate<false>(x, rP[kNext], rP[0], new_tile);
            }
            const int unmasked_until =
                max_of(x.first_kv_tile + Tiles::kReleaseEarly, x.full_tiles.begin);
            const bool may_be_masked = new_tile | (x.kv_tile > x.full_tiles.end);
            while (!may_be_masked & (x.kv_tile >= unmasked_until + 2)) {  // one branch
                iterate<true>(x, rP[0], rP[kNext]);
                iterate<true>(x, rP[kNext], rP[0]);
            }
        }
        merge_if_pending(x);
        rescale_or_store<false>(x);
        v_pipeline.consumer_wait(x.v);
        wait_turn();
        if (odd) {
            issue_output(x, rP[kNext], !x.first_iteration);
        } else {
            issue_output(x, rP[0], !x.first_iteration);
        }
        signal_next();
        ptx::wgmma_wait<0>();
        warpgroup_fence(x.rO);
        if constexpr (Tiles::kMayHaveFixedSplits)
            if (merges()) return merge_and_store(rO, softmax, work_tiles[x.output_tile]);
        store<true>(rO, softmax, work_tiles[x.output_tile]);
    }
};

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward(const ForwardParams& params, const ForwardKernel& kernel,
                        cudaStream_t stream) {
    using enum tuning::Fa3ForwardTile;
    constexpr OptionSets kSets = row_of(tuning::kFa3Forward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        return dispatch<kSmallQ, kUsual, kLongKeys>(kernel.tile, [&](auto tile) {
            if constexpr (tuning::Fa3ForwardRow::has_tile(options.value, tile)) {
                constexpr tuning::Fa3ForwardShape kTuning =
                    tuning::fa3_forward_shape({kHeadDim, kHeadDimV}, options.value, tile);
                using Kernel =
                    Fa3Forward<decltype(element), kHeadDim, kHeadDimV, options.value, kTuning>;
                return launch_fa3_forward<Kernel>(params, kernel, stream);
            } else {
                return kNoKernel;
            }
        });
    });
}

}  // namespace flash_ext
