// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2), for Hopper.
//
// The grid has at most one CTA per SM. Each CTA fetches Q tiles until none is left
// (dynamic_persistent_scheduler.cuh). Its warpgroups have roles:
//
//   producer    three threads, one each for K, Q and V. All load by TMA; K's also fetches the tiles
//   consumers   each owns 64 rows of the Q tile (split-Q) and sees all of K and V
//
// A consumer's iteration, in the order in which it starts the operations:
//
//     S' = Q K_{j-1}^T          wgmma, asynchronous
//     O  = O rescaled to P      as the softmax of the iteration before requires
//     O += P V_j                wgmma, asynchronous
//     P' = softmax(S')          when S' is complete, while P V_j runs (optimistic_softmax.cuh)
//
// The iterations of all Q tiles of a CTA form one sequence: after the last K_j of a tile comes the
// first of the next tile, so that the tensor cores are busy while a result is written. The result
// O / l is stored where O would be rescaled. Most iterations stay within a tile and need no mask.
// This unmasked main loop is compiled separately, without branches.
//
// Four consumers have no registers for a second P: they wait for P V before the softmax, and the
// matmuls of the others run beside it (kOverlap). So do most kernels' iterations with a mask, which
// are then written once and not for each P (kMaskedSteps).
//
// FP8 (section 3.3 of the paper; docs/walkthrough.md): K's producer loads V, too, and two warps of
// the first warpgroup transpose its tiles (tile/transpose.cuh). A consumer completes P V before it
// starts Q K^T: P V is computed from zero, in the registers of S, and added to O. So tiles have
// more keys, and the other consumers are what runs beside each step. Up to head dim 128 O is stored
// while the first scores of the next tile are computed.
//
// Consumers may start their matmuls alternately (ping-pong), so that the softmax of one runs beside
// the matmuls of the other; otherwise they drift apart without it.
//
// Where there are few tiles, a tile is a Q tile and a split of its keys. Each split stores its
// result in float32, and a kernel of its own combines them (combine.cuh): the last split would take
// much longer, alone on its SM (docs/notes/021-combination.md). Where there are few queries and
// heads share keys, the rows of a Q tile are the heads of a group (packed GQA, QueryTiles). Their
// results go the way of splits; with one split and one tile a CTA they are written at once. The
// kernels for both load Q in boxes of eight rows, of eight heads or of eight queries: with packed
// GQA, no more rows of a tile are adjacent in memory.
//
// Shared memory: pipelines of Q, K and V tiles (of FP8 V^T, and V as TMA loads it); the work-tile
// pipeline (QueryTile); a flag per consumer warp (recompute_rows.cuh).
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
//                       loads of the tile are issued; 4 a    another tile
//                       consumer: each warp, when its rows
//                       of O are stored
//   full(V^T), FP8      2: each warp that transposes         consumers, before P V
//   empty(V^T), FP8     4 a consumer: each warp, when P V    the warps that transpose
//                       is complete
//   empty(work tiles),  3: Q's producer, when all loads of   K's producer
//   FP8                 the tile are issued, and each warp
//                       that transposes; 4 a consumer
//   full(V), FP8        1: K's producer; and TMA's bytes     the warps that transpose
//   empty(V), FP8       2: each warp that transposes         K's producer, before the next load
//   ping-pong (named)   128: consumer i, when its matmuls    consumer i + 1 (its 128 threads count
//                       are started, or when it is about     too), before it starts its own
//                       to store a result
#pragma once

#include <cfloat>

#include "kernels/common/fp8_softmax.cuh"
#include "kernels/common/optimistic_softmax.cuh"
#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/fa3/forward_config.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

template <class Config_>
struct Fa3Forward : Fa3Cta<Config_> {
    using Config = Config_;
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using QPipeline = typename Config::QPipeline;
    using KPipeline = typename Config::KPipeline;
    using VPipeline = typename Config::VPipeline;
    static constexpr bool kFp8 = Config::kFp8;
    using RowMajorVPipeline = typename Config::RowMajorVPipeline;
    // Of int8 the tensor core computes integers.
    using Scores =
        RegisterTile<16, Config::kBlockKV, std::conditional_t<Config::kInt8, int, float>>;
    using Output = RegisterTile<16, Config::kHeadDimV>;
    using Softmax =
        std::conditional_t<kFp8, Fp8Softmax<Config::kBlockKV, (Config::kHeadDim <= 128)>,
                           OptimisticSoftmax<Element, Config::kBlockKV>>;
    using Probabilities = typename Softmax::Probabilities;
    using Order = PingPong<Config::kConsumers, Config::kPingPong>;
    using Cta = Fa3Cta<Config>;
    using Cta::elected, Cta::group, Cta::params, Cta::release, Cta::release_and_advance,
        Cta::storage, Cta::work_tiles;
    using typename Cta::WorkTileState;

    // Has the KV tile keys of two blocks of descales?
    static constexpr bool kTwoKScales = kFp8 && kDescaleRows % Config::kBlockKV != 0;

    int consumer;  // index of this thread's warpgroup among the consumers
    QPipeline q_pipeline;
    KPipeline k_pipeline;
    VPipeline v_pipeline;

    __device__ __forceinline__ explicit Fa3Forward(const Fa3ForwardParams& p)
        : Cta(p),
          consumer(ptx::warp_uniform(threadIdx.x / 128) - 1),
          q_pipeline(storage.q, storage.q_barriers),
          k_pipeline(storage.k, storage.k_barriers),
          v_pipeline(storage.v, storage.v_barriers) {}

    __device__ __forceinline__ void init() const {
        constexpr int kReaders = Config::kConsumers * 4;
        ptx::prefetch_tensor_map(params.q_map);
        ptx::prefetch_tensor_map(params.k_map);
        ptx::prefetch_tensor_map(params.v_map);
        q_pipeline.init(kReaders);
        k_pipeline.init(kReaders);
        if constexpr (kFp8) {
            v_pipeline.init(kReaders, Config::kTransposers);
            row_major_v().init(Config::kTransposers);
            work_tiles.init(kReaders + 1 + Config::kTransposers);  // and Q's producer
        } else {
            v_pipeline.init(kReaders);
            work_tiles.init(kReaders + 2);  // and the producers of Q and V
        }
    }

    __device__ __forceinline__ RowMajorVPipeline row_major_v() const {
        return {storage.fp8.stages, storage.fp8.barriers};
    }

    // --- The rows of a Q tile: queries, or the heads of a group ---

    __device__ __forceinline__ int pack_gqa_log2() const {
        return Config::kMayHaveSplits ? params.pack_gqa_log2 : 0;
    }
    __device__ __forceinline__ int query_of(const QueryTile& tile, int row) const {
        return tile.first_query + (row >> pack_gqa_log2());
    }
    // The head within the group.
    __device__ __forceinline__ int head_of(int row) const {
        return row & ((1 << pack_gqa_log2()) - 1);
    }

    // --- Producers: forward_producers.cuh ---

    __device__ __forceinline__ void produce() const;
    __device__ __forceinline__ void produce_by_warps() const {
        if constexpr (kFp8)
            if (warp_id() > 0 && warp_id() <= Config::kTransposers) transpose_v();
    }
    __device__ __forceinline__ void produce_k() const;
    __device__ __forceinline__ void produce_q() const;
    __device__ __forceinline__ void produce_v() const;
    __device__ __forceinline__ void describe_next(QueryTile& tile, int linear) const;
    template <class Visit>
    __device__ __forceinline__ void for_each_q_load(const QueryTile& tile, Visit visit) const;

    // --- Consumers ---

    // Is the result of a tile stored while the first scores of the next one are computed? That
    // takes registers. Otherwise it is kept for an iteration.
    static constexpr bool kStoresBeside = kFp8 && Config::kHeadDim <= 128;

    // The first row of this thread's warp within the Q tile. Computed where it is needed: it would
    // take a register throughout the loop.
    __device__ __forceinline__ int warp_row() const {
        using Number = std::conditional_t<kFp8, unsigned, int>;  // ptxas, docs/notes/016-fp8.md
        return (Number(ptx::not_hoisted(threadIdx.x)) / 32 - 4) * 16;
    }

    // What a consumer carries from one iteration to the next. The matrices are only referenced: as
    // members they would make the compiler treat the whole object as an array in most passes.
    struct State {
        Scores& rS;
        Output& rO;
        Softmax& softmax;
        typename Softmax::Rescaling& rescaling;  // of O, before P V is added
        Softmax& done;                           // of the previous tile, until it is stored

        typename QPipeline::State q{};
        typename KPipeline::State k{};
        typename VPipeline::State v{};
        WorkTileState tile{}, tile_done{};  // of the scores and of the output

        // The index of the KV tile of the scores: from the last one down to the first.
        int kv_tile{}, first_kv_tile{};
        VisibleTiles full{};
        bool k_ready = false, v_ready = false;  // tested early: kTestsEarly, and FP8
        int hidden = 0;  // number of the next KV tiles that only other consumers see

        // FP8: factors of the scores of two rows, and of the keys.
        float q_scale[2], k_scale[1 + kTwoKScales];
        int second_k_scale;  // the first column of k_scale[1]
        const float* k_descales;
        int last_k_block;
        float scale_limit;  // with a larger factor a maximum may be large (fp8_softmax.cuh)
        bool may_be_large;  // a maximum of a row of the warp

        bool begun = true;  // P belongs to the first iteration of a tile
        bool kept = false;  // O belongs to the previous tile and is not stored yet
    };

    // FP8: the factors of the scores. Hidden scores are -inf, which times 0 would be NaN.
    template <bool kMasked>
    struct ScoreScale {
        const State& state;

        __device__ __forceinline__ float operator()(int n, int i) const {
            float k_scale = state.k_scale[0];
            if constexpr (kTwoKScales)
                if (8 * n >= state.second_k_scale) k_scale = state.k_scale[1];
            const float product = state.q_scale[i] * k_scale;
            return kMasked && product == 0.f ? FLT_MIN : product;
        }
    };

    // Releases KV tiles that this consumer does not use.
    template <class Pipeline>
    __device__ __forceinline__ void skip(const Pipeline& pipeline, typename Pipeline::State& state,
                                         int tiles, bool& ready) const {
        for (; tiles > 0; --tiles) {
            pipeline.consumer_wait(state);  // otherwise this warp would arrive twice in one phase
            release_and_advance(pipeline, state);
            ready = false;
        }
    }

    // The operand in a stage: the one in the first stage, moved, where there are registers for its
    // descriptor. That is one instruction from a full barrier to the matmul, and not five.
    template <class Operand, class Pipeline, class... FirstRow>
    static __device__ __forceinline__ Operand operand(const Pipeline& pipeline,
                                                      const typename Pipeline::State& state,
                                                      FirstRow... first_row) {
        if constexpr (Config::kConsumers > 2) {
            Operand first(pipeline.stages, first_row...);
            first.move(state.stage * Pipeline::kStageBytes);
            return first;
        } else {
            return Operand(pipeline.stage(state), first_row...);
        }
    }

    // Starts S = Q K^T, of kKeys keys from kFirstKey of the tile on.
    template <int kFirstKey, int kKeys>
    __device__ __forceinline__ void issue_scores_of(State& state) const {
        // Q stays in place for many iterations.
        constexpr bool kPinned = Config::kHeadDim > 128;
        const KMajor<QTile, kPinned> q_rows(q_pipeline.stage(state.q), consumer * 64);
        const auto k_rows = operand<KMajor<KTile, false>>(k_pipeline, state.k, kFirstKey);
        using Part = RegisterTile<16, kKeys, typename Scores::Number>;
        gemm_async<typename Config::QKElement, Config::kHeadDim>(
            reinterpret_cast<Part&>(state.rS.v[0][kFirstKey / 8]), q_rows, k_rows, false);
    }
    // FP8: P V takes the registers of the first keys' scores (forward_fp8.cuh), so those of the
    // others are a wgmma of their own.
    static constexpr int kFirstKeys =
        kFp8 ? min_of(Config::kBlockKV, Config::kPartialCols) : Config::kBlockKV;
    static constexpr bool kHasOtherScores = kFirstKeys < Config::kBlockKV;
    __device__ __forceinline__ void issue_first_scores(State& state) const {
        issue_scores_of<0, kFirstKeys>(state);
    }
    __device__ __forceinline__ void issue_other_scores(State& state) const {
        if constexpr (kHasOtherScores)
            issue_scores_of<kFirstKeys, Config::kBlockKV - kFirstKeys>(state);
    }
    __device__ __forceinline__ void issue_scores(State& state) const {
        issue_other_scores(state);
        issue_first_scores(state);
    }

    // Starts O = P V or O += P V.
    __device__ __forceinline__ void issue_output(const State& state, const Probabilities& rP,
                                                 bool accumulate) const {
        const auto v_columns = operand<MNMajor<VTile, false>>(v_pipeline, state.v);
        gemm_async<Element, Config::kBlockKV>(state.rO, rP, v_columns, accumulate);
    }

    __device__ __forceinline__ void finish_output(const State& state) const {
        ptx::wgmma_wait<0>();
        warpgroup_fence(state.rO);
    }

    __device__ __forceinline__ auto exponent_scale() const {
        if constexpr (Config::kGeneral || kFp8) {
            return Unscaled{};
        } else {
            return params.scale_log2;
        }
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

    // The KV tiles of which this consumer's rows see every key.
    __device__ __forceinline__ VisibleTiles full_tiles(const QueryTile& tile) const {
        const BandMask mask = mask_of(params, tile.sequence);
        const int first_query = query_of(tile, consumer * 64);
        const int last_query = min_of(query_of(tile, consumer * 64 + 63), mask.seqlen_q - 1);
        return {ceil_div(mask.key_range(last_query).begin, Config::kBlockKV),
                mask.key_range(first_query).end / Config::kBlockKV};
    }

    // The last KV tile of which this consumer's rows see a key.
    __device__ __forceinline__ int last_tile(const QueryTile& tile) const {
        const Interval queries{query_of(tile, consumer * 64),
                               query_of(tile, consumer * 64 + 63) + 1};
        return (mask_of(params, tile.sequence).keys_of(queries).end - 1) / Config::kBlockKV;
    }

    template <class Tile, class Scale>
    static __device__ __forceinline__ void scale_scores(Tile& rS, Scale scale) {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) rS.v[0][n][i] *= scale(n, i / 2);
    }

    template <class Target, class Source, class Function>
    static __device__ __forceinline__ void convert(Target& target, const Source& source,
                                                   Function function) {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) target.v[0][n][i] = function(source.v[0][n][i]);
    }

    // Applies the options, and the mask unless kFull excludes one.
    template <bool kFull>
    __device__ __forceinline__ void finish_scores(RegisterTile<16, Config::kBlockKV>& rS,
                                                  const QueryTile& tile, int i,
                                                  const VisibleTiles& full) const {
        const int first_row = warp_row();
        const int first_key = tile.kv_tiles.tile(i) * Config::kBlockKV;
        if constexpr (Config::kGeneral)  // packed GQA has no ALiBi, which uses first_query
            ScoreFunction<Element, Rows::kQueries, false>{params, tile.sequence, tile.head}.apply(
                rS, tile.first_query + first_row, first_key);
        if (!kFull && (i < full.begin || i >= full.end)) {
            const BandMask mask = mask_of(params, tile.sequence);
            mask_scores(rS, first_key,
                        [&](int row) { return mask.key_range(query_of(tile, first_row + row)); });
        }
    }

    // --- Results: forward_output.cuh ---

    // Are results stored as those of splits? The general form decides at run time.
    __device__ __forceinline__ bool has_splits() const {
        return Config::kMayHaveSplits && (!Config::kGeneral || params.o_partial != nullptr);
    }
    // The index of this warp among all consumer warps of the grid.
    __device__ __forceinline__ int warp_number() const {
        return blockIdx.x * (Config::kConsumers * 4) + warp_row() / 16;
    }

    // Has this warp marked a row? It recomputes such rows at the end (recompute_rows.cuh).
    __device__ __forceinline__ int& has_marked() const {
        return storage.has_marked[warp_row() / 16];
    }

    static __device__ __forceinline__ bool is_to_be_marked(float max, float lse) {
        return !Config::kGeneral && !kFp8 && needs_recomputing(max, lse);
    }
    __device__ __forceinline__ void store(Output& rO, Softmax& softmax,
                                          const QueryTile& tile) const;
    __device__ __forceinline__ void store_group(Output& rO, Softmax& softmax,
                                                const QueryTile& tile) const;
    __device__ __forceinline__ void normalize(Output& rO, Softmax& softmax,
                                              const QueryTile& tile) const;
    __device__ __forceinline__ uint16_t* out_row(const QueryTile& tile, int row) const;
    __device__ __forceinline__ uint32_t pack_out(float x, float y) const;
    __device__ __forceinline__ bool is_valid(const QueryTile& tile, int row) const;
    __device__ __forceinline__ int64_t statistics_index(const QueryTile& tile, int row) const;

    // --- FP8: forward_fp8.cuh ---

    __device__ __forceinline__ void transpose_v() const;
    __device__ __forceinline__ void begin_scales(State& state, const QueryTile& tile) const;
    __device__ __forceinline__ void load_k_scales(State& state) const;
    __device__ __forceinline__ uint8_t& cooling(int i) const;
    template <class Form, class Scale>
    __device__ __forceinline__ void cool(State& state, const Scale& scale) const;
    __device__ __forceinline__ void warm(State& state) const;
    template <bool kStartScores>
    __device__ __forceinline__ void add_output(State& state, const Probabilities& rP,
                                               bool accumulate) const;
    __device__ __forceinline__ void descale_output(Output& rO, const QueryTile& tile) const;
    __device__ __forceinline__ const float* descales_of(const Descale& x, const QueryTile& tile,
                                                        int head_q) const;
    static __device__ __forceinline__ int last_block(const float* descales, const Descale& x);
    template <bool kUnmasked>
    __device__ __forceinline__ void compute_in_turn(State& state, Probabilities& rP,
                                                    bool last) const;

    // --- The loop ---

    // How often the code has an iteration with a mask. Twice, one for each P, its softmax may run
    // beside its P V, as without a mask. Once, the code is smaller and compiles faster, and it is
    // faster up to d 64 and with options. d 128 and 256 are up to 4 % faster with it twice.
    static constexpr int kMaskedSteps =
        Config::kHeadDim % 128 == 0 && !Config::kGeneral && !kFp8 ? 2 : 1;

    // With one stage, Q is released as soon as the tile's last scores are complete; with two, when
    // the next tile begins, so that the last iteration may belong to the unmasked main loop.
    static constexpr bool kReleaseEarly = QPipeline::kStages == 1;

    // Does an iteration test the barriers of the next one before its softmax, since a test takes
    // long? With four consumers and at d 128 and 256 that costs more than it saves.
    static constexpr bool kTestsEarly =
        Config::kConsumers < 4 && Config::kHeadDim % 128 != 0 && !kFp8;

    // Does a consumer pass on its turn while it stores a result? Of kernels with ping-pong those of
    // d 128 gain by it.
    static constexpr bool kPassesTurn = Config::kHeadDim % 128 == 0;

    // Waits for the next Q tile's description. Returns false if there is no more work.
    __device__ __forceinline__ bool find_tile(State& state) const {
        work_tiles.descriptions.consumer_wait(state.tile);
        const QueryTile& tile = work_tiles[state.tile];
        state.kv_tile = ptx::warp_uniform(tile.kv_tiles.end) - 1;
        state.first_kv_tile = ptx::warp_uniform(tile.kv_tiles.begin);
        return ptx::warp_uniform(tile.first_query) >= 0;
    }
    __device__ __forceinline__ void begin_tile(State& state) const {
        const QueryTile& tile = work_tiles[state.tile];
        state.full = full_tiles(tile);
        if constexpr (!Config::kPingPong) {  // which needs equal numbers of iterations
            state.hidden = max_of(state.kv_tile - max_of(last_tile(tile), state.first_kv_tile), 0);
            state.kv_tile -= state.hidden;
            skip(k_pipeline, state.k, state.hidden, state.k_ready);
        }
        if constexpr (kFp8) begin_scales(state, tile);
        q_pipeline.consumer_wait(state.q);
    }

    // Passes over the first tiles if this consumer has no rows of them. These are the last tiles of
    // sequences, the longest ones under a causal mask; or those of decoding, with a few rows.
    __device__ __forceinline__ void pass_over(State& state) const {
        while (true) {
            work_tiles.descriptions.consumer_wait(state.tile);
            const QueryTile& tile = work_tiles[state.tile];
            const int rows_left = tile.sequence.seqlen_q - query_of(tile, consumer * 64);
            if (ptx::warp_uniform(tile.first_query) < 0 || ptx::warp_uniform(rows_left) > 0) return;
            q_pipeline.consumer_wait(state.q);
            release_and_advance(q_pipeline, state.q);
            for (int i = ptx::warp_uniform(tile.kv_tiles.count()); i > 0; --i) {
                skip(k_pipeline, state.k, 1, state.k_ready);
                skip(v_pipeline, state.v, 1, state.v_ready);
            }
            this->end_work_tile(state.tile);
            state.tile_done = state.tile;
        }
    }

    // P from the complete scores. `first`: they are the first of a tile, whose softmax begins.
    template <bool kUnmasked>
    __device__ __forceinline__ void compute_p(State& state, Probabilities& rP, bool first) const {
        warpgroup_fence(state.rS);
        release_and_advance(k_pipeline, state.k);
        if constexpr (kTestsEarly) {
            state.k_ready = k_pipeline.consumer_test(state.k);
            state.v_ready = v_pipeline.consumer_test(state.v);
        }
        if (kReleaseEarly && !kUnmasked && state.kv_tile == state.first_kv_tile)
            release_and_advance(q_pipeline, state.q);
        const ScoreScale<!kUnmasked && !Config::kGeneral> scale{state};
        constexpr bool kFinishes = Config::kGeneral || !kUnmasked;
        if constexpr (!Config::kInt8) {
            if constexpr (kFp8 && Config::kGeneral) scale_scores(state.rS, scale);
            finish_scores<kUnmasked>(state.rS, work_tiles[state.tile], state.kv_tile, state.full);
        } else if constexpr (kFinishes) {
            RegisterTile<16, Config::kBlockKV> scores;
            convert(scores, state.rS, [](int x) { return static_cast<float>(x); });
            if constexpr (Config::kGeneral) scale_scores(scores, scale);
            finish_scores<kUnmasked>(scores, work_tiles[state.tile], state.kv_tile, state.full);
            convert(state.rS, scores, [](float x) { return __float_as_int(x); });
        }
        if (!kUnmasked && first) state.softmax = begin_softmax(work_tiles[state.tile]);
        const bool fresh = !kUnmasked && first;
        using Form =
            std::conditional_t<!Config::kInt8, FloatScores,
                               std::conditional_t<kFinishes, FloatScoresAsBits, IntegerScores>>;
        if constexpr (kFp8 && Config::kGeneral) {
            state.rescaling = state.softmax.template step<Form>(
                state.rS, rP, [](int, int) { return 1.f; }, fresh);
        } else if constexpr (kFp8) {
            if (state.may_be_large) [[unlikely]]
                cool<Form>(state, scale);
            state.rescaling = state.softmax.template step<Form>(state.rS, rP, scale, fresh);
        } else {
            state.rescaling = state.softmax.step(state.rS, rP, exponent_scale(), fresh);
        }
    }

    // Before P V: rescales O, or stores it as the result of the previous tile. kInTurn: it is this
    // consumer's turn.
    template <bool kInTurn>
    __device__ __forceinline__ void settle_output(State& state) const {
        if (!state.begun) {
            state.rescaling.apply(state.rO);
        } else if (state.kept) {
            if constexpr (kInTurn && kPassesTurn) Order::signal_next(consumer);
            store(state.rO, state.done, work_tiles[state.tile_done]);
            this->end_work_tile(state.tile_done);
            if constexpr (kInTurn && kPassesTurn) Order::wait(consumer);
        }
    }

    // Goes on to the next KV tile. Returns true after the last one: then it leaves the Q tile, and
    // find_tile() comes next.
    __device__ __forceinline__ bool advance(State& state) const {
        const bool last = state.kv_tile == state.first_kv_tile;
        --state.kv_tile;
        if (last) {
            if constexpr (kFp8 && !Config::kGeneral) warm(state);
            if (!kReleaseEarly) release_and_advance(q_pipeline, state.q);
            if (kStoresBeside) state.tile_done = state.tile;
            state.tile.advance();
        }
        return last;
    }

    // One iteration, as in the header. `last`: P is that of a Q tile's last keys, and the scores
    // are the first of the next one. With kUnmasked it stays within a Q tile, its scores need no
    // mask, and P is not that of the Q tile's first iteration.
    template <bool kUnmasked>
    __device__ __forceinline__ void step(State& state, const Probabilities& rP,
                                         Probabilities& next_rP, bool last = false) const {
        if constexpr (kUnmasked) --state.kv_tile;
        if constexpr (kFp8) {
            compute_in_turn<kUnmasked>(state, next_rP, last);
        } else {
            compute_side_by_side<kUnmasked>(state, rP, next_rP, last);
        }
        if (last) skip(v_pipeline, state.v, state.hidden, state.v_ready);
    }

    template <bool kUnmasked>
    __device__ __forceinline__ void compute_side_by_side(State& state, const Probabilities& rP,
                                                         Probabilities& next_rP, bool last) const {
        k_pipeline.consumer_wait(state.k, state.k_ready);
        Order::wait(consumer);
        issue_scores(state);
        if constexpr (kUnmasked) {
            state.rescaling.apply(state.rO);
        } else {
            settle_output<true>(state);
        }
        v_pipeline.consumer_wait(state.v, state.v_ready);
        issue_output(state, rP, kUnmasked || !state.begun);
        Order::signal_next(consumer);
        const auto v_read = state.v;
        state.v.advance();
        const auto finish = [&] {
            finish_output(state);
            release(v_pipeline, v_read);
        };

        constexpr bool kBeside = Config::kOverlap && (kUnmasked || kMaskedSteps == 2);
        if constexpr (kBeside) {
            ptx::wgmma_wait<1>();
        } else {
            finish();
        }
        if (last) state.done = state.softmax;
        state.begun = state.kept = last;
        compute_p<kUnmasked>(state, next_rP, last);
        if constexpr (kBeside) finish();
    }

    __device__ __forceinline__ void consume() const {
        Scores rS;
        Output rO;
        Softmax softmax, done;
        typename Softmax::Rescaling rescaling;
        State state{rS, rO, softmax, rescaling, done};
        constexpr int kNext = Config::kOverlap;  // P V reads one P while the other is written
        Probabilities rP[1 + kNext];

        has_marked() = false;
        if constexpr (kFp8 && !Config::kGeneral) cooling(0) = cooling(1) = 0;
        if constexpr (!Config::kPingPong && !kFp8) pass_over(state);
        if (!find_tile(state)) return;
        begin_tile(state);
        if (consumer == Config::kConsumers - 1) Order::signal_next(consumer);  // consumer 0 starts
        k_pipeline.consumer_wait(state.k);
        Order::wait(consumer);
        issue_scores(state);
        Order::signal_next(consumer);
        if constexpr (kFp8) load_k_scales(state);
        ptx::wgmma_wait<0>();
        compute_p<false>(state, rP[0], true);
        skip(v_pipeline, state.v, state.hidden, state.v_ready);

        // May the next two iterations, of FP8 the next one, belong to the unmasked main loop?
        const auto two_unmasked = [&](int unmasked_until) {
            return !state.begun && state.kv_tile - (kFp8 ? 1 : 2) >= unmasked_until &&
                   state.kv_tile - 1 < state.full.end;
        };
        const auto main_loop = [&] {
            const int unmasked_until =
                max_of(state.first_kv_tile + kReleaseEarly, state.full.begin);
            while (two_unmasked(unmasked_until)) {
                step<true>(state, rP[0], rP[kNext]);
                if constexpr (!kFp8) step<true>(state, rP[kNext], rP[0]);
            }
        };
        // The loop ends where find_tile() says so, not by a result of a function that does more:
        // from 13.4 on nvcc would keep such a result in a register and join the ways that end and
        // that go on, and what a consumer carries would take vector registers
        // (docs/notes/024-nvcc-versions.md).
        bool odd = false;  // which P the last P V reads
        while (true) {
            bool last = advance(state);
            if (last) {
                if (!find_tile(state)) break;
                begin_tile(state);
            }
            step<false>(state, rP[0], rP[kMaskedSteps == 1 ? 0 : kNext], last);
            if constexpr (kMaskedSteps == 2) {
                last = advance(state);
                if (last) {
                    if (!find_tile(state)) {
                        odd = true;
                        break;
                    }
                    begin_tile(state);
                }
                step<false>(state, rP[kNext], rP[0], last);
            }
            main_loop();
        }
        if constexpr (kStoresBeside) {
            state.rescaling.apply(state.rO);
        } else {
            settle_output<false>(state);
        }
        v_pipeline.consumer_wait(state.v);
        Order::wait(consumer);
        if constexpr (kFp8) {
            add_output<false>(state, rP[0], !state.begun);
        } else if (odd) {
            issue_output(state, rP[kNext], !state.begun);
        } else {
            issue_output(state, rP[0], !state.begun);
        }
        Order::signal_next(consumer);
        if constexpr (!kFp8) finish_output(state);
        const QueryTile& tile = work_tiles[state.tile_done];
        if (pack_gqa_log2() > 0 && params.o_partial == nullptr) {
            store_group(state.rO, state.softmax, tile);
        } else {
            store(state.rO, state.softmax, tile);
        }
        if constexpr (!Config::kGeneral && !Config::kMayHaveSplits && !kFp8) {
            __syncwarp();
            if (has_marked()) [[unlikely]]
                recompute_all_marked<Element>(params, warp_number());
        }
    }
};

}  // namespace flash_ext
