// FlashAttention-3 forward for 8-bit inputs (section 3.3 of the paper; docs/walkthrough.md): V is
// e4m3, Q and K are e4m3 or int8; scores of int8 accumulate in int32. Roles and loop are as in
// forward.cuh, with these differences:
//
// - 8-bit wgmma reads both operands K-major. So the call has V^T, or another kernel makes it before
//   (fp8/transpose_v.cuh), and a warp of the first warpgroup loads it. For few queries a pass over
//   V would take too long: K's producer also loads V, and two warps of the first warpgroup
//   transpose it (tile/transpose.cuh). These warps also copy V's descales.
// - The tensor core keeps only some 14 bits of a sum. So P V of one tile is computed from zero, in
//   the registers of S, and added to O in float32, which is rescaled by the same FMA. It is
//   complete before S' = Q K^T starts.
// - So a consumer's own steps do not overlap, and tiles have more keys. Consumers compute most
//   exponentials in turns: each beside the matmuls of the other one. Up to head dim 96, with
//   another softmax, they order their matmuls (ping-pong). O is stored beside the next Q tile's
//   first S.
// - Q, K and V have descales. The softmax multiplies scores by Q's and K's (fp8_softmax.cuh); O is
//   multiplied by V's before it is stored.
//
// Barriers as in forward.cuh, and
//
//   barrier             arrivals per phase                   who waits
//   turn (of each one)  128: each thread of the consumer     that consumer, before its
//                       before it, when it has computed most exponentials
//                       of its exponentials
//   full(V's descales)  32: each thread of the warp that is  consumers, before they store O
//                       V's producer
//   full(V)             1: its producer; and TMA's bytes,    consumers, before P V
//                       unless V is partial
//   full(partial V)     1: V's producer; and TMA's bytes     V's producer, before it clears the
//                                                            unused keys of the last group of 16
//   empty(work tiles)   33: Q's producer and each lane of    K's producer
//                       V's, when done; 128 a consumer
//
// In a kernel that transposes V
//
//   barrier             arrivals per phase                   who waits
//   full(V's descales)  64: each thread of the warps that    consumers, before they store O
//                       transpose
//   full(V^T)           2: each warp that transposes         consumers, before P V
//   empty(V^T)          4 a consumer: each warp, when P V    the warps that transpose
//                       is complete
//   full(row-major V)   1: K's producer; and TMA's bytes     the warps that transpose
//   empty(row-major V)  2: each warp that transposes         K's producer, before the next load
//   empty(work tiles)   65: Q's producer and each lane that  K's producer
//                       transposes, when done; 128 a consumer
#pragma once

#include <cfloat>

#include "kernels/common/fp8_optimistic_softmax.cuh"
#include "kernels/fa3/descales.cuh"
#include "kernels/fa3/forward_results.cuh"
#include "plan/transposed_v.cuh"
#include "tile/transpose.cuh"

namespace flash_ext {

template <class QKElement, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3ForwardShape kTuning>
struct Fa3ForwardFp8
    : Fa3ForwardResults<Float8, QKElement, kHeadDim, kHeadDimV, kOptions, kTuning> {
    using Tiles = typename Fa3ForwardFp8::Fa3ForwardResults;
    using Tiles::consumer, Tiles::elected, Tiles::end_work_tile, Tiles::find_tile,
        Tiles::full_tiles, Tiles::group, Tiles::k_pipeline, Tiles::kBlockKV, Tiles::kConsumers,
        Tiles::params, Tiles::q_pipeline, Tiles::query_of, Tiles::release_and_advance,
        Tiles::v_pipeline, Tiles::warp_row, Tiles::work_tiles;
    using typename Tiles::KTile, typename Tiles::Order, typename Tiles::Output,
        typename Tiles::QTile, typename Tiles::QPipeline, typename Tiles::KPipeline,
        typename Tiles::VPipeline, typename Tiles::VTile, typename Tiles::WorkTileState;
    static constexpr bool kInt8 = std::is_same_v<QKElement, Int8>;
    static constexpr bool kMayTransposeV = kTuning.transposes_v;
    static constexpr int kProducerRegisters = kMayTransposeV ? 56 : kConsumers == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = Tiles::consumer_registers(kProducerRegisters);
    static constexpr int kTransposingWarps = 2;                // of the first warpgroup
    static constexpr int kPartialCols = kTuning.partial_cols;  // of O that one P V computes
    static_assert(kHeadDimV % kPartialCols == 0);

    using TransposedVTile = SharedTile<Float8, kHeadDimV, kBlockKV>;
    // What TMA loads; it is transposed from here to a stage of VPipeline.
    using RowMajorVPipeline = Pipeline<2, VTile::kBytes>;
    struct RowMajorV {
        typename RowMajorVPipeline::Barriers v_row_major_barriers;
        alignas(1024) typename RowMajorVPipeline::Stages v_row_major;
    };
    struct Nothing {};
    using Scores = RegisterTile<16, kBlockKV, std::conditional_t<kInt8, int, float>>;
    // Floats in the registers of scores, also of int8.
    using Floats = std::conditional_t<kInt8, FloatScoresAsBits, FloatScores>;
    using Softmax =
        std::conditional_t<kTuning.ping_pong, OptimisticFp8Softmax<kBlockKV>, Fp8Softmax<kBlockKV>>;
    using Probabilities = typename Softmax::Probabilities;

    struct SharedStorage : Tiles::SharedStorage,
                           std::conditional_t<kMayTransposeV, RowMajorV, Nothing> {
        uint64_t turns[kConsumers];  // of each consumer, to compute exponentials
        int zero;                    // is 0, which the compiler does not know
        uint64_t partial_full;       // of a tile of V^T whose last group of keys has unused ones
        // V's descales of each Q tile, in the stages of their descriptions.
        uint64_t v_descales_full[Tiles::WorkTiles::kStages];
        alignas(sizeof(float2)) float v_descales[Tiles::WorkTiles::kStages][kHeadDimV];
        // How far each consumer thread has cooled its two rows (fp8_softmax.cuh), in powers of two.
        uint8_t cooling[kConsumers * 128][2];
    };

    SharedStorage& storage = shared_storage<SharedStorage>();

    using Tiles::Tiles;
    // Has the KV tile keys of two blocks of descales?
    static constexpr bool kTwoKScales = kDescaleRows % kBlockKV != 0;
    // If so, and if this holds, the second block begins with key kDescaleRows of the tile.
    static constexpr bool kWholeKBlocks = kBlockKV % kDescaleRows == 0;

    FLASH_DEVICE void init() const {
        this->init_pipelines(warps_of_v(), 1 + 32 * warps_of_v());  // Q's producer and V's
        if constexpr (kMayTransposeV) row_major_v().init(kTransposingWarps);
        for (uint64_t& full : storage.v_descales_full)
            ptx::mbarrier_init(ptx::shared_address(&full), 32 * warps_of_v());
        if (!kTuning.ping_pong)
            for (int i = 0; i < kConsumers; ++i) ptx::mbarrier_init(turn_of(i), 128);
        if (!transposes_v()) ptx::mbarrier_init(ptx::shared_address(&storage.partial_full), 1);
        storage.zero = 0;
    }

    // --- Producers ---

    // Does the kernel transpose V? Not if the call has V^T.
    FLASH_DEVICE bool transposes_v() const { return kMayTransposeV && !params.v_transposed; }
    FLASH_DEVICE int warps_of_v() const { return transposes_v() ? kTransposingWarps : 1; }

    FLASH_DEVICE RowMajorVPipeline row_major_v() const {
        return {storage.v_row_major, storage.v_row_major_barriers};
    }

    FLASH_DEVICE void produce() const {
        typename RowMajorVPipeline::State v;
        if (warp_id() == 0)
            this->produce_k([&](const QueryTile& tile, int first_key) {
                if constexpr (kMayTransposeV)
                    if (transposes_v()) load_row_major_v(tile, first_key, v);
            });
        if (warp_id() == 3) this->produce_q();
    }
    FLASH_DEVICE void produce_by_warps() const {
        if (warp_id() > 0 && warp_id() <= warps_of_v()) produce_v();
    }

    FLASH_DEVICE void load_row_major_v(const QueryTile& tile, int first_key,
                                       typename RowMajorVPipeline::State& v) const {
        const KeyRows keys = key_rows(params, tile.sequence);
        const TensorRows rows = keys.tensor_rows<Float8>(params.v, key_head(params, tile.head));
        load_tile<VTile, Tiles::kKVBoxRows>(row_major_v(), v, params.v_map, rows, first_key);
        v.advance();
    }

    // V^T and V's descales, by all lanes of warps_of_v() warps.
    FLASH_DEVICE void produce_v() const {
        if (!transposes_v()) ptx::wait_for_grid_before();  // for V^T
        typename RowMajorVPipeline::State from;
        typename VPipeline::State to;
        uint32_t partial = 0;
        for (WorkTileState t;; end_work_tile(t)) {
            work_tiles.descriptions.consumer_wait(t);
            const QueryTile& tile = work_tiles[t];
            if (tile.first_query < 0) return;
            load_v_descales(tile, t);
            if constexpr (kMayTransposeV)
                if (transposes_v()) transpose_v(tile, from, to);
            if (!transposes_v()) load_transposed_v(tile, to, partial);
        }
    }

    // Per head or channel, for consumers: their threads have no registers to load many at once.
    FLASH_DEVICE void load_v_descales(const QueryTile& tile, const WorkTileState& t) const {
        const float* source = descales_of(params, params.v_descale, tile.sequence, tile.head);
        const int64_t stride = source == &kNoDescale ? 0 : params.v_descale.last_stride;
        for (int i = threadIdx.x - 32; i < params.head_dim_v; i += 32 * warps_of_v())
            ptx::st_shared(v_descales(t) + 4 * i, __float_as_uint(__ldg(source + i * stride)));
        ptx::mbarrier_arrive(v_descales_full(t));
    }

    FLASH_DEVICE uint32_t v_descales(const WorkTileState& t) const {
        return ptx::shared_address(storage.v_descales[t.stage]);
    }
    FLASH_DEVICE uint32_t v_descales_full(const WorkTileState& t) const {
        return ptx::shared_address(&storage.v_descales_full[t.stage]);
    }

    // `partial`: the parity of the next group of keys that are not all in use.
    FLASH_DEVICE void load_transposed_v(const QueryTile& tile, typename VPipeline::State& v,
                                        uint32_t& partial) const {
        const uint32_t partial_full = ptx::shared_address(&storage.partial_full);
        const Sequence& s = tile.sequence;
        const TensorColumns columns = tensor_columns(
            transposed_v_offset(params.v, s, key_head(params, tile.head)), s.seqlen_k);
        for (int i = tile.kv_tiles.end - 1; i >= tile.kv_tiles.begin; --i, v.advance()) {
            const int first_key = tile.kv_tiles.tile(i) * kBlockKV, keys = s.seqlen_k - first_key;
            const bool is_partial = keys < kBlockKV && keys % kKeyGroup != 0;
            const uint32_t full = is_partial ? partial_full : v_pipeline.full(v);
            if (elected) {
                v_pipeline.producer_acquire(v);
                ptx::mbarrier_arrive_expect(full, TransposedVTile::kBytes);
                columns.load<TransposedVTile>(params.v_map, v_pipeline.stage(v), full, first_key);
            }
            if (!is_partial) continue;
            ptx::mbarrier_wait(full, partial);
            partial ^= 1;
            clear_unused_keys<TransposedVTile>(v_pipeline.stage(v), keys);
            ptx::fence_proxy_async();  // wgmma will read what was stored
            __syncwarp();
            if (elected) v_pipeline.producer_commit(v);
        }
    }

    static cudaError_t encode_v_map(Fa3ForwardParams& params) {
        if (kMayTransposeV && !params.v_transposed) return Tiles::encode_v_map(params);
        return encode_transposed_map<TransposedVTile>(params.v_map, params.v.data,
                                                      params.head_dim_v,
                                                      max_of<int64_t>(params.v.row_stride, 16));
    }

    // From V tiles that K's producer has loaded.
    FLASH_DEVICE void transpose_v(const QueryTile& tile, typename RowMajorVPipeline::State& from,
                                  typename VPipeline::State& to) const {
        const RowMajorVPipeline row_major = row_major_v();
        const int tiles = tile.kv_tiles.count();
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) {
            row_major.consumer_wait(from);
            v_pipeline.producer_acquire(to);
            transpose_fp8<VTile, TransposedVTile, kTransposingWarps>(
                row_major.stage(from), v_pipeline.stage(to), warp_id() - 1);
            ptx::fence_proxy_async();  // wgmma will read what was stored
            __syncwarp();
            if (elected) v_pipeline.producer_commit(to);
            release_and_advance(row_major, from);
            to.advance();
        }
    }

    // --- The consumers' turns ---

    FLASH_DEVICE uint32_t turn_of(int consumer) const {
        return ptx::shared_address(&storage.turns[consumer]);
    }

    // Consumers compute most exponentials in turns, each beside the matmuls of another.
    struct ExponentialTurn {
        const Fa3ForwardFp8& cta;
        uint32_t parity;
        int zero;

        // Reads it only when the turn has come. (ptxas 13.0: a zero from the predicate of the wait
        // is at times another number.)
        FLASH_DEVICE void begin() {
            ptx::mbarrier_wait(cta.turn_of(cta.consumer), parity);
            zero = ptx::ld_shared(ptx::shared_address(&cta.storage.zero));
        }
        // Returns x. So ptxas cannot move what is computed from it before the turn.
        FLASH_DEVICE float pin(float x) const { return __int_as_float(__float_as_int(x) + zero); }
        // After P up to this one is computed: no P is 2^100.
        FLASH_DEVICE void end(float p) const {
            ptx::mbarrier_arrive_unless(p, 0x1p100f, cta.turn_of((cta.consumer + 1) % kConsumers));
        }
    };

    // --- Descales ---

    struct State {  // as in forward.cuh
        Scores& rS;
        Output& rO;
        Softmax& softmax;

        typename QPipeline::State q{};
        typename KPipeline::State k{};
        typename VPipeline::State v{};
        WorkTileState tile{};
        int kv_tile{}, first_kv_tile{};
        Interval full_tiles{};
        bool k_ready = false, v_ready = false;

        // Factors of the scores of two rows, and of the keys.
        float q_scale[2], k_scale[1 + kTwoKScales];
        int second_k_scale;  // the first column of k_scale[1], unless kWholeKBlocks
        float factor[2];     // of O, before P V is added
        uint32_t turn = 0;   // the parity of the next turn
        const float* k_descales;
        int last_k_block;
        float scale_limit;  // with a larger factor a maximum may be large (fp8_softmax.cuh)
        bool may_be_large;  // a maximum of a row of the warp
    };

    // The factors of the scores. Hidden scores are -inf, which times 0 would be NaN.
    template <bool kMasked>
    struct ScoreScale {
        const State& x;

        FLASH_DEVICE float operator()(int n, int i) const {
            float k_scale = x.k_scale[0];
            if constexpr (kTwoKScales)
                if (8 * n >= (kWholeKBlocks ? kDescaleRows : x.second_k_scale))
                    k_scale = x.k_scale[1];
            const float product = x.q_scale[i] * k_scale;
            return kMasked && product == 0.f ? FLT_MIN : product;
        }
    };

    // Is the scale negative? Hidden scores are -inf before they are multiplied. So all iterations
    // are those with a mask, which negate the scores first, and factors have its magnitude.
    FLASH_DEVICE bool is_negative() const { return params.scale_log2 < 0.f; }

    // The factors of this lane's two rows, without the keys' factors, and where K's descales are.
    FLASH_DEVICE void begin_scales(State& x, const QueryTile& tile) const {
        for_each_row<16>([&](int, int i, int lane_row) {
            const int row = warp_row() + lane_row;
            const int head = tile.head + min_of(this->head_of(row), group() - 1);
            const float* source = descales_of(params, params.q_descale, tile.sequence, head);
            const int block =
                min_of(query_of(tile, row) / kDescaleRows, last_block(source, params.q_descale));
            x.q_scale[i] = __ldg(source + block * params.q_descale.last_stride);
            x.q_scale[i] *= fabsf(params.scale_log2);
        });
        constexpr float kLargest = kInt8 ? 128.f : 448.f;  // element of Q and K
        x.scale_limit = Softmax::kLargeMax / (kLargest * kLargest * kHeadDim);
        x.k_descales = descales_of(params, params.k_descale, tile.sequence, tile.head);
        // Descales of keys that are not in use may be NaN.
        const int last_in_use = max_of(tile.sequence.seqlen_k - 1, 0) / kDescaleRows;
        x.last_k_block = min_of(last_block(x.k_descales, params.k_descale), last_in_use);
    }

    // K's descales of the KV tile, which may reach into a second block.
    FLASH_DEVICE void load_k_scales(State& x) const {
        const auto load = [&](int block) {
            return __ldg(x.k_descales +
                         min_of(block, x.last_k_block) * params.k_descale.last_stride);
        };
        const int first_key = work_tiles[x.tile].kv_tiles.tile(x.kv_tile) * kBlockKV;
        const int block = first_key / kDescaleRows;
        x.k_scale[0] = load(block);
        if constexpr (kTwoKScales) {
            x.k_scale[1] = load(block + 1);
            if (!kWholeKBlocks) x.second_k_scale = (block + 1) * kDescaleRows - first_key;
        }
        const float q_scale = fmaxf(x.q_scale[0], x.q_scale[1]);
        const float k_scale = fmaxf(x.k_scale[0], x.k_scale[kTwoKScales]);
        x.may_be_large = __any_sync(0xffffffff, q_scale * k_scale > x.scale_limit);
    }

    // By how many powers of two row i of this thread is cooled.
    FLASH_DEVICE uint8_t& cooling(int i) const {
        return storage.cooling[ptx::not_hoisted(threadIdx.x) - 128][i];
    }

    // Cools rows of large scores (fp8_softmax.cuh). Infinite ones are cooled more than once.
    template <class Form, class Scale>
    FLASH_DEVICE void cool(State& x, const Scale& scale) const {
        x.scale_limit = -INFINITY;  // in this tile
        bool changed;
        do {
            changed = false;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& row_max = x.softmax.row_max[0][i];
                const float max =
                    fmaxf(row_max, Softmax::template max_of_tile<Form>(x.rS, scale, i));
                const int powers = Softmax::powers_to_cool(max, cooling(i));
                row_max *= power_of_two(-powers);
                x.q_scale[i] *= power_of_two(-powers);
                cooling(i) += powers;
                changed |= powers != 0;
            }
        } while (__any_sync(0xffffffff, changed));
    }

    // After the last P of a tile: m becomes what it would be without cooling.
    FLASH_DEVICE void warm(State& x) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // With more powers m is infinite.
            x.softmax.row_max[0][i] *= power_of_two(min_of<int>(cooling(i), 127));
            cooling(i) = 0;
        }
    }

    // Multiplies O by V's descales.
    FLASH_DEVICE void descale_output(Output& rO, const WorkTileState& t) const {
        ptx::mbarrier_wait(v_descales_full(t), t.phase);
        const uint32_t of_lane = v_descales(t) + 4 * lane_col();
#pragma unroll
        for (int n = 0; n < Output::kN; ++n) {
            float factors[2];
            ptx::ld_shared_v2(factors, of_lane + 32 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e) rO.v[0][n][e] *= factors[e % 2];
        }
    }

    // --- Steps of an iteration ---

    // P V occupies the registers of the first keys' scores; the others' are a wgmma of
    // their own.
    static constexpr int kFirstKeys = min_of(kBlockKV, kPartialCols);
    static constexpr int kOtherKeys = kBlockKV - kFirstKeys;
    // Do those start beside the additions of P V? All scores, P and O are in registers then.
    static constexpr bool kStartsEarly = kBlockKV <= 192;

    // Starts S = Q K^T, of kKeys keys from kFirstKey of the tile on, if there are any.
    template <int kFirstKey, int kKeys>
    FLASH_DEVICE void issue_scores(State& x) const {
        if constexpr (kKeys > 0) {
            // Q stays in place for many iterations.
            constexpr bool kPinned = kHeadDim > 128;
            const KMajor<QTile, kPinned> q_rows(q_pipeline.stage(x.q), consumer * 64);
            const auto k_rows =
                this->template operand<KMajor<KTile, false>>(k_pipeline, x.k, kFirstKey);
            gemm_async<QKElement, kHeadDim>(x.rS.template columns<kKeys>(kFirstKey), q_rows, k_rows,
                                            false);
        }
    }

    // O = P V or O += P V, to the end. The scores are not needed any more: the registers of the
    // first kPartialCols keys' scores hold P V, as many columns at a time. kStartScores: the next
    // scores of the other keys, whose registers are free, are computed beside the last additions.
    template <bool kStartScores>
    FLASH_DEVICE void add_output(State& x, const Probabilities& rP) const {
        auto& rPartial = x.rS.template columns<kPartialCols>(0);
        constexpr int kSteps = kHeadDimV / kPartialCols;
        compile_time_for<kSteps>([&](auto i) {
            constexpr int kFirst = i * kPartialCols;
            constexpr bool kBeside = kStartScores && kStartsEarly && i == kSteps - 1;
            const KMajor<TransposedVTile, false> v_columns(v_pipeline.stage(x.v), kFirst);
            gemm_async<Float8, kBlockKV>(rPartial, rP, v_columns, false);
            if (kBeside) issue_scores<kFirstKeys, kOtherKeys>(x);
            ptx::wgmma_wait<(kBeside && kOtherKeys > 0)>();
            warpgroup_fence(rPartial);
            auto& rSum = x.rO.template columns<kPartialCols>(kFirst);
#pragma unroll
            for (int n = 0; n < kPartialCols / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float y = Floats::value(rPartial.v[0][n][e]);
                    float& sum = rSum.v[0][n][e];
                    sum = __fmaf_rn(sum, x.factor[e / 2], y);
                }
        });
    }

    // P from the complete scores. new_tile: they are the first of a Q tile, whose softmax begins.
    template <bool kUnmasked>
    FLASH_DEVICE void compute_p(State& x, Probabilities& rP, bool new_tile) const {
        warpgroup_fence(x.rS);
        release_and_advance(k_pipeline, x.k);
        if (Tiles::kReleaseEarly && !kUnmasked && x.kv_tile == x.first_kv_tile)
            release_and_advance(q_pipeline, x.q);
        if constexpr (!kUnmasked) {
            RegisterTile<16, kBlockKV> scores;
            const float sign = is_negative() ? -1.f : 1.f;
            scores.map([&](float, auto score) { return sign * static_cast<float>(score); }, x.rS);
            this->template finish_scores<false>(scores, x);
            x.rS.map([](auto, float score) { return Floats::bits(score); }, scores);
        }
        const bool fresh = !kUnmasked && new_tile;
        if (fresh) x.softmax = this->template begin_softmax<Softmax>(work_tiles[x.tile]);
        using Form = std::conditional_t<kInt8 && kUnmasked, IntegerScores, Floats>;
        const ScoreScale<!kUnmasked> scale{x};
        if (x.may_be_large) [[unlikely]]
            cool<Form>(x, scale);
        ExponentialTurn turn{*this, x.turn};
        x.softmax.template step<Form, Floats>(x.rS, rP, x.factor, scale, turn, fresh);
        x.turn ^= 1;
    }

    // --- Results ---

    // The stage of the previous Q tile's description.
    static FLASH_DEVICE WorkTileState tile_before(const WorkTileState& t) {
        constexpr int kStages = Tiles::WorkTiles::kStages;
        const bool wraps = t.stage == 0;
        return {wraps ? kStages - 1 : t.stage - 1, t.phase ^ wraps};
    }

    // Stores O / l and lse, or the results of a split.
    template <bool kLast = false>
    FLASH_DEVICE void store(State& x) const {
        const WorkTileState t = tile_before(x.tile);
        this->normalize(x.rO, x.softmax);
        descale_output(x.rO, t);
        this->template store_tile<kLast>(x.rO, x.softmax, work_tiles[t]);
    }

    FLASH_DEVICE void store_previous(State& x) const {
        store(x);
        x.rO.clear();
        WorkTileState t = tile_before(x.tile);
        end_work_tile(t);
    }

    // --- The loop ---

    FLASH_DEVICE void begin_tile(State& x) const {
        const QueryTile& tile = work_tiles[x.tile];
        x.full_tiles = is_negative() ? Interval{0, 0} : full_tiles(tile);
        begin_scales(x, tile);
        q_pipeline.consumer_wait(x.q);
    }

    // One iteration: P V is complete before the Q K^T that takes its registers starts. new_tile and
    // kUnmasked as in forward.cuh.
    template <bool kUnmasked>
    FLASH_DEVICE void iterate(State& x, Probabilities& rP, bool new_tile = false) const {
        if constexpr (kUnmasked) --x.kv_tile;
        k_pipeline.consumer_wait(x.k, x.k_ready);
        v_pipeline.consumer_wait(x.v, x.v_ready);
        Order::wait(consumer);
        add_output<true>(x, rP);
        if (!kStartsEarly) issue_scores<kFirstKeys, kOtherKeys>(x);
        issue_scores<0, kFirstKeys>(x);
        Order::signal_next(consumer);
        // What does not need the scores is done before they are there.
        release_and_advance(v_pipeline, x.v);
        load_k_scales(x);
        if (new_tile) store_previous(x);
        auto next_k = x.k;
        next_k.advance();
        x.k_ready = k_pipeline.consumer_test(next_k);
        x.v_ready = v_pipeline.consumer_test(x.v);
        ptx::wgmma_wait<0>();
        compute_p<kUnmasked>(x, rP, new_tile);
    }

    FLASH_DEVICE void consume() const {
        Scores rS;
        Output rO;
        Softmax softmax;
        State x{rS, rO, softmax};
        Probabilities rP;

        rO.clear();
        cooling(0) = cooling(1) = 0;
        if (!find_tile(x)) return;
        begin_tile(x);
        if (consumer == kConsumers - 1) {  // consumer 0 starts
            Order::signal_next(consumer);
            if (!kTuning.ping_pong) ptx::mbarrier_arrive(turn_of(0));
        }
        k_pipeline.consumer_wait(x.k);
        Order::wait(consumer);
        issue_scores<kFirstKeys, kOtherKeys>(x);
        issue_scores<0, kFirstKeys>(x);
        Order::signal_next(consumer);
        load_k_scales(x);
        ptx::wgmma_wait<0>();
        compute_p<false>(x, rP, true);

        while (true) {  // ends where find_tile() says so, as in forward.cuh
            if (x.kv_tile == x.first_kv_tile) warm(x);
            const bool new_tile = this->advance(x);
            if (new_tile) {
                if (!find_tile(x)) break;
                begin_tile(x);
            }
            iterate<false>(x, rP, new_tile);
            if (new_tile || x.kv_tile > x.full_tiles.end) continue;
            const int unmasked_until =
                max_of(x.first_kv_tile + Tiles::kReleaseEarly, x.full_tiles.begin);
            while (x.kv_tile > unmasked_until) iterate<true>(x, rP);
        }
        v_pipeline.consumer_wait(x.v);
        Order::wait(consumer);
        add_output<false>(x, rP);
        Order::signal_next(consumer);
        store<true>(x);
    }
};

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward_fp8(const ForwardParams& params, const ForwardKernel& kernel,
                            cudaStream_t stream) {
    using enum tuning::Fa3ForwardTile;
    using enum ElementType;
    constexpr OptionSets kSets = row_of(tuning::kFa3ForwardFp8, {kHeadDim, kHeadDimV}).options;
    return dispatch_options<kSets>(kernel.options, [&](auto options) {
        return dispatch<kSmallQ, kUsual>(kernel.tile, [&](auto tile) {
            constexpr auto kRow = row_of(tuning::kFa3ForwardFp8, {kHeadDim, kHeadDimV});
            if constexpr (kRow.has_tile(options.value, tile)) {
                constexpr tuning::Fa3ForwardShape kTuning =
                    tuning::fa3_forward_fp8_shape({kHeadDim, kHeadDimV}, tile);
                return dispatch<kFloat8, kInt8>(params.element_type, [&](auto type) {
                    using QKElement = std::conditional_t<type == kInt8, Int8, Float8>;
                    using Kernel =
                        Fa3ForwardFp8<QKElement, kHeadDim, kHeadDimV, options.value, kTuning>;
                    return launch_fa3_forward<Kernel>(params, kernel, stream);
                });
            } else {
                return kNoKernel;
            }
        });
    });
}

}  // namespace flash_ext
