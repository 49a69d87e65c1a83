// FlashAttention-2 forward (Dao 2023, algorithm 1).
//
// Loop order: one CTA per (Q tile, head, batch); inner loop over KV tiles, last to first, so that
// the tiles at the diagonal, which need masking, come first.
//
// Warps: each owns kRowsPerWarp rows of the Q tile and sees all of K and V (split-Q): S, P and O of
// a row never leave the warp, and the warps exchange nothing.
//
//     for each KV tile j:
//         S = Q K_j^T                           tensor cores, S in registers
//         m_new = max(m, rowmax(S) scale)       quad shuffles
//         P = 2^(S scale - m_new)
//         l = 2^(m - m_new) l + rowsum(P)
//         O = 2^(m - m_new) O + P V_j           P from registers
//     O = O / l,  lse = (m + log2(l)) ln(2)     one rescale, at the end
//
// m need not be the maximum, only near it: it may be stale until P would exceed 2^8
// (OnlineSoftmax::kRescaleThreshold). This saves most rescalings of O and changes no result, since
// l and O share the same m.
//
// Where tiles are too few to fill the GPU, a CTA takes a split of its Q tile's keys
// (Flash-Decoding, Dao et al. 2023) and stores its O / l, row maxima and row sums in float32;
// combine.cuh combines the splits. The plain form has no splits: the varlen form stands in for it.
//
// A bias in 16 bits comes in tiles, as K and V do: a warp copies its rows of the next one when it
// has read those of the last one, and waits for them after the next Q K^T. Other biases are read
// from HBM.
//
// Shared memory: Q [kBlockQ][D], a tile of the bias [kBlockQ][kBlockKV], then a pipeline of stages,
// each a V tile and a K tile
// [kBlockKV][D], swizzled, its mbarriers, and the CTA's tile coordinates.
//
// Pipeline: a stage holds V of one iteration and K of the next, so an iteration waits once, before
// P V, for what it and the next Q K^T need. A stage is free when all warps have read its K. The
// copy to it, at the end of an iteration, waits only for that: so warps may drift apart by up to
// half an iteration, and the softmax of one runs beside the matmuls of another.
#pragma once

#include "kernels/common/bias_rows.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "problem/hide_by_words.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "schedule/split_kv.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa2ForwardShape kTuning>
struct Fa2Forward {
    static constexpr bool kMayBeVarlen = contains(kOptions, OptionSet::kVarlen);
    static constexpr bool kUnaligned = contains(kOptions, OptionSet::kUnaligned);
    static constexpr bool kMayHaveSplits = contains(kOptions, OptionSet::kSplits);
    static constexpr bool kMayHaveMask = contains(kOptions, OptionSet::kMask);  // of tiles
    static constexpr bool kBiasTiles = has_bias_tiles(kOptions);
    static constexpr int kRowsPerWarp = kTuning.rows_per_warp;
    static constexpr int kThreads = kTuning.warps * 32;
    static constexpr int kBlockQ = kTuning.warps * kRowsPerWarp;
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr int kQRegisterCols = kTuning.q_register_cols;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using OTile = SharedTile<Element, kBlockQ, kHeadDimV>;  // is stored through Q's memory
    using BiasTile = SharedTile<Element, kBlockQ, kBlockKV>;
    // The loop loads one stage ahead.
    using KVPipeline = CpAsyncPipeline<2, KTile::kBytes + VTile::kBytes, kThreads>;

    struct SharedStorage {
        char q_o[max_of(QTile::kBytes, OTile::kBytes)];
        [[no_unique_address]] BiasRowsStorage<kBiasTiles, BiasTile> bias;
        typename KVPipeline::Storage kv;
        TileCoord tile_coord;
    };
    static constexpr int kSharedBytes = sizeof(SharedStorage);
    // Whether the loop, too, reads the CTA's tile coordinates from shared memory. It costs a wait
    // per tile, up to 5 % where an SM has one CTA; but here registers that hold them would spill.
    static constexpr bool kTileCoordInLoop =
        kMayHaveSplits && !kUnaligned &&
        (kHeadDim == 128 || (kHeadDim == 64 && visits_elements(kOptions) && !kBiasTiles));

    static constexpr bool kForLessMemory =
        kTuning != tuning::fa2_forward_shape({kHeadDim, kHeadDimV}, kOptions);

    static_assert(kBlockKV % 16 == 0 && kRowsPerWarp % 16 == 0);
    static_assert(kBlockQ == tuning::kForwardBlockQ);
    static_assert(!kMayHaveMask || (kBlockQ == kMaskBlock && kMaskBlock % kBlockKV == 0));

    using KVTiles =
        std::conditional_t<kMayHaveMask, ListedTiles<kMaskBlock / kBlockKV>, VisibleTiles>;
    using Scores = RegisterTile<kRowsPerWarp, kBlockKV>;
    using Output = RegisterTile<kRowsPerWarp, kHeadDimV>;
    using Softmax = OnlineSoftmax<kRowsPerWarp>;
    using QOperand = ACached<AFromRows<QTile>, kRowsPerWarp, kQRegisterCols>;

    const ForwardParams& params;
    int head;
    Sequence sequence;
    BandMask mask;
    int first_query;  // of the CTA; below 0 where there is nothing to do
    int warp_row;     // the warp's first row within the Q tile
    uint32_t sQ;
    KVPipeline pipeline;
    KeyCursorOf<kOptions, KTile, kThreads, kUnaligned, Element> k_cursor;
    KeyCursorOf<kOptions, VTile, kThreads, kUnaligned, Element> v_cursor;
    BiasCursor<BiasTile, 32, kRowsPerWarp> bias_cursor;  // with tiles of the bias

    FLASH_DEVICE Fa2Forward(const ForwardParams& p, const TileCoord& tile_coord)
        : params(p),
          head(tile_coord.head),
          sequence(tile_coord.sequence),
          mask(mask_of(p, sequence)),
          first_query(tile_coord.first_row),
          warp_row(warp_id() * kRowsPerWarp),
          sQ(ptx::shared_address(dynamic_shared())),
          pipeline{sQ + static_cast<uint32_t>(offsetof(SharedStorage, kv))} {}

    static FLASH_DEVICE SharedStorage& storage() { return shared_storage<SharedStorage>(); }

    // Of CTA `linear`. The last tile of a sequence comes first: under a causal mask it is the
    // longest.
    static FLASH_DEVICE TileCoord tile_coord_of(const ForwardParams& params, int linear) {
        WorkTile work = work_tile(linear, params.tile_order);
        if (has_splits(params)) work.tile_index /= params.num_splits;
        const auto [sequence, tile] = warp_uniform<kMayBeVarlen>(
            tile_of<kMayBeVarlen, Rows::kQueries, contains(kOptions, OptionSet::kPages)>(
                params, work.batch, work.tile_index, kBlockQ));
        const int last = ceil_div(sequence.seqlen_q, kBlockQ) - 1;
        return {sequence, work.head, (last - tile) * kBlockQ};
    }

    // The same CTA, from its tile coordinates in shared memory.
    static FLASH_DEVICE Fa2Forward from_shared(const ForwardParams& params) {
        return Fa2Forward(params, storage().tile_coord);
    }

    static FLASH_DEVICE bool has_splits(const ForwardParams& params) {
        return kMayHaveSplits && params.num_splits > 1;
    }

    // The split of the keys that this CTA takes. Recomputed where it is needed: stored, it would
    // take a register over the loop.
    FLASH_DEVICE int split() const {
        if (!has_splits(params)) return 0;
        const int linear = ptx::not_hoisted(blockIdx.x);
        return work_tile(linear, params.tile_order).tile_index % params.num_splits;
    }

    // ptxas 13.0: with key_head(), a product, d 128 spills.
    FLASH_DEVICE int head_k() const { return head / params.group; }

    FLASH_DEVICE KVTiles kv_tiles() const {
        if constexpr (kMayHaveMask) {
            if (params.tile_mask.kv_tiles != nullptr)
                return KVTiles::of_runs(runs(), sequence.seqlen_k, kBlockKV,
                                        [&](const VisibleTiles& all) { return own_of(all); });
            return KVTiles::of_band(own_of(band_tiles()));
        } else {
            return own_of(band_tiles());
        }
    }
    FLASH_DEVICE VisibleTiles band_tiles() const {
        return VisibleTiles::of_queries(mask, {first_query, first_query + kBlockQ}, kBlockKV);
    }
    FLASH_DEVICE VisibleTiles own_of(const VisibleTiles& seen) const {
        return has_splits(params) ? split_of(seen, split(), params.num_splits) : seen;
    }
    // What the mask of tiles has of the Q tile.
    FLASH_DEVICE BlockRuns runs() const {
        return runs_of_q_block(params, sequence.batch, head, first_query / kMaskBlock);
    }

    // The number of tile i, which comes kAhead iterations after this one.
    template <int kAhead = 0>
    static FLASH_DEVICE int tile(const KVTiles& kv_tiles, int i) {
        if constexpr (kMayHaveMask) {
            return kv_tiles.ahead[kAhead];
        } else {
            return kv_tiles.tile(i);
        }
    }
    // To the next iteration.
    FLASH_DEVICE void step(KVTiles& kv_tiles) const {
        if constexpr (kMayHaveMask) {
            if (params.tile_mask.kv_tiles != nullptr) {
                kv_tiles.step(runs());
            } else {
                kv_tiles.step();
            }
        }
    }

    FLASH_DEVICE void load_q() const {
        const auto gQ =
            query_rows<const Element>(params.q, sequence, head, first_query, params.head_dim);
        load_tile<QTile, kThreads, kUnaligned>(sQ, gQ, params.aligned);
    }

    // From here on, each load_k or load_v loads the tile of the index before the last one. With a
    // mask of tiles each asks where its tile is.
    FLASH_DEVICE void start_kv(int kv_tile) {
        const auto keys = key_rows<kOptions>(params, sequence);
        const int first_key = kv_tile * kBlockKV;
        k_cursor.start(keys, params.k, head_k(), first_key);
        v_cursor.start(keys, params.v, head_k(), first_key);
    }
    // Into a stage of the pipeline; kAllRows as for TileCursor::load.
    template <bool kAllRows, int kAhead>
    FLASH_DEVICE void load_k(const KVTiles& kv_tiles, int i, uint32_t stage) {
        load<kAllRows, kAhead>(k_cursor, sK(stage), params.k, params.head_dim, kv_tiles, i);
    }
    template <bool kAllRows, int kAhead>
    FLASH_DEVICE void load_v(const KVTiles& kv_tiles, int i, uint32_t stage) {
        load<kAllRows, kAhead>(v_cursor, sV(stage), params.v, params.head_dim_v, kv_tiles, i);
    }
    template <bool kAllRows, int kAhead, class Cursor>
    FLASH_DEVICE void load(Cursor& cursor, uint32_t shared, const TensorView& view, int cols,
                           const KVTiles& kv_tiles, int i) const {
        const auto keys = key_rows<kOptions>(params, sequence);
        const int first_key = tile<kAhead>(kv_tiles, i) * kBlockKV;
        const int next_key = first_key - kBlockKV;
        if constexpr (kMayHaveMask)
            if (params.tile_mask.kv_tiles != nullptr) cursor.start(keys, view, head_k(), first_key);
        cursor.template load<kAllRows>(shared, keys, view, head_k(), cols, params.aligned,
                                       first_key, next_key);
    }
    FLASH_DEVICE void commit(uint32_t stage) const {
        pipeline.producer_commit(stage, !kUnaligned || params.aligned);
    }

    // The warp's rows of the bias: a tile, after which comes the one before it.
    FLASH_DEVICE void start_bias(int kv_tile) {
        bias_cursor.start(params, sequence.batch, head, first_query + warp_row, kv_tile * kBlockKV);
    }
    template <bool kAllKeys>
    FLASH_DEVICE void load_bias(int first_row, int kv_tile) {
        bias_cursor.template load<kAllKeys>(sBias() + warp_row * BiasTile::kPitch,
                                            params.bias.strides[2], params.seqlen_q - first_row,
                                            params.seqlen_k - kv_tile * kBlockKV, -kBlockKV);
    }

    // S = Q K^T, masked.
    FLASH_DEVICE void score(Scores& rS, const QOperand& q, const KVTiles& kv_tiles, int i,
                            uint32_t stage) {
        rS.clear();
        gemm<Element, kHeadDim>(rS, q, BFromRows<KTile>(sK(stage)));
        pipeline.consumer_release(stage);

        const Fa2Forward cta = in_loop();
        const Interval queries{cta.first_query, cta.first_query + kBlockQ};
        const Interval keys = tile_interval(tile(kv_tiles, i), kBlockKV);
        const int first_row = cta.first_query + warp_row;
        if constexpr (kBiasTiles) {
            ptx::cp_async_wait<1>();  // K and V came later
            __syncwarp();             // all lanes' copies have landed
            score_function().apply(rS, AFromRows<BiasTile>(sBias(), warp_row));
            __syncwarp();  // all lanes have read them
            if (i > kv_tiles.begin) load_bias<true>(first_row, tile(kv_tiles, i - 1));
            ptx::cp_async_commit();
        } else if constexpr (changes_scores(kOptions)) {
            cta.score_function().apply(rS, first_row, keys.begin);
        }
        if (!cta.mask.is_full(queries, keys))
            mask_scores(rS, keys.begin,
                        [&](int row) { return cta.mask.key_range(first_row + row); });
        if constexpr (kMayHaveMask) {
            if (kv_tiles.is_partial(i)) hide(rS, keys.begin);
        }
    }

    // Hides what the mask of tiles does not show of a partial block.
    FLASH_DEVICE void hide(Scores& rS, int first_key) const {
        const uint32_t* words =
            words_of(params, sequence.batch, head, first_query, first_key / kMaskBlock);
        const auto words_of_row = [&](int row) -> const MaskWords& {
            return reinterpret_cast<const MaskWords*>(words)[warp_row + row];
        };
        hide_keys(rS, words_of_row, params.tile_mask.bits, /*none=*/false, first_key);
    }

    // S becomes P.
    FLASH_DEVICE void exponentiate(Scores& rS, Output& rO, Softmax& softmax) const {
        softmax.update(rS, rO, exponent_scale<kOptions>(params));
    }

    // O += P V, with dropout of P. If P were dropped before the wait for V, or the sequence and the
    // tile's first row stayed in registers, d 128 would spill under ptxas 13.0 or 13.5.
    FLASH_DEVICE void accumulate(Output& rO, Scores& rP, int kv_tile, uint32_t stage) const {
        const auto& coord = storage().tile_coord;
        drop<kOptions>(rP, params, coord.sequence, head, coord.first_row + warp_row,
                       kv_tile * kBlockKV);
        gemm<Element, kBlockKV>(rO, AFromRegisters<Element, Scores>{rP},
                                BFromColumns<VTile>(sV(stage)));
    }

    // O / l to HBM, through the warp's own rows of the Q tile, and the logsumexp; or the results of
    // a split of the keys, straight from registers.
    FLASH_DEVICE void store(Output& rO, const Softmax& softmax) const {
        const int first_row = first_query + warp_row;
        const int64_t statistics = statistics_offset(params, sequence, head);
        const bool is_split = has_splits(params);
        const int64_t first = statistics + (is_split ? split() * statistics_rows(params) : 0);
        // One pointer for both, which saves registers.
        float* target = is_split ? &params.statistics_partial[first].max : params.lse + first;
        for_each_row<kRowsPerWarp>([&](int m, int i, int row_of_warp) {
            const float factor = softmax.inverse_sum(m, i) * late_factor<kOptions>(params);
            rO.map_row(m, i, [&](float x) { return x * factor; });
            const float lse = softmax.lse(m, i);
            const int row = first_row + row_of_warp;
            if (lane_col() != 0 || row >= sequence.seqlen_q) return;
            if (is_split) {
                target[2 * row] = softmax.row_max[m][i];
                target[2 * row + 1] = softmax.row_sum[m][i];
            } else {
                target[row] = lse;
            }
        });
        if (is_split) {
            store_rows(params.o_partial, rO, [&](int row) {
                const int query = first_row + row;
                return query < sequence.seqlen_q ? first + query : -1;
            });
            return;
        }
        __syncwarp();  // the warp has read its rows of Q
        store_to_shared<Element, OTile>(sQ, rO, warp_row, 0);
        __syncwarp();  // O's rows are complete
        const auto gO =
            query_rows<Element>(params.out, sequence, head, first_row, params.head_dim_v);
        store_tile<OTile, 32, kRowsPerWarp, kUnaligned>(gO, sQ, warp_row, params.aligned);
    }

 private:
    FLASH_DEVICE ScoreFunction<Element, Rows::kQueries, kOptions> score_function() const {
        return {params, sequence, head};
    }

    // This CTA, with values that depend on its tile coordinates recomputed: otherwise these would
    // stay in registers over the loop.
    FLASH_DEVICE Fa2Forward in_loop() const {
        if constexpr (kTileCoordInLoop) return from_shared(params);
        Fa2Forward cta = *this;
        cta.mask.seqlen_k = ptx::not_hoisted(mask.seqlen_k);
        return cta;
    }

    FLASH_DEVICE uint32_t sBias() const {
        return sQ + static_cast<uint32_t>(offsetof(SharedStorage, bias));
    }
    FLASH_DEVICE uint32_t sV(uint32_t stage) const { return pipeline.stage(stage); }
    FLASH_DEVICE uint32_t sK(uint32_t stage) const { return pipeline.stage(stage) + VTile::kBytes; }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    fa2_forward_kernel(const __grid_constant__ ForwardParams params) {
    if (!may_run<Kernel>()) return __trap();
    const TileCoord tile_coord = Kernel::tile_coord_of(params, blockIdx.x);
    Kernel cta(params, tile_coord);
    if (Kernel::kMayBeVarlen && cta.first_query < 0) return;  // a padding tile

    typename Kernel::KVTiles kv_tiles = cta.kv_tiles();
    const int last = kv_tiles.end - 1;

    if (threadIdx.x == 0) {
        cta.pipeline.init();
        cta.storage().tile_coord = tile_coord;
    }
    __syncthreads();  // the pipeline's barriers and the tile coordinates are written
    cta.load_q();
    if (!kv_tiles.empty()) {
        cta.start_kv(Kernel::tile(kv_tiles, last));
        cta.template load_k<false, 0>(kv_tiles, last, 0);  // it may end past the sequence
        cta.commit(0);
        cta.template load_v<false, 0>(kv_tiles, last, 1);
        if (last > kv_tiles.begin) cta.template load_k<true, 1>(kv_tiles, last - 1, 1);
        cta.commit(1);
        if constexpr (Kernel::kBiasTiles) {
            cta.start_bias(Kernel::tile(kv_tiles, last));
            cta.template load_bias<false>(cta.first_query + cta.warp_row,
                                          Kernel::tile(kv_tiles, last));
            ptx::cp_async_commit();
            ptx::cp_async_commit();  // as in the loop
        }
        cta.pipeline.consumer_wait(0);
    } else {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
    }
    // Q has landed.

    typename Kernel::Output rO;
    rO.clear();
    typename Kernel::Softmax softmax;
    if (params.sink != nullptr && cta.split() == 0 && cta.sequence.is_owned(params))
        softmax.begin_with(params.sink[cta.head] * kLog2e);
    typename Kernel::QOperand q(AFromRows<typename Kernel::QTile>(cta.sQ, cta.warp_row));
    q.fetch();

    uint32_t stage = 0;  // has K of the iteration; the next one has V
    for (int i = last; i >= kv_tiles.begin; --i, ++stage) {
        typename Kernel::Scores rS;
        cta.score(rS, q, kv_tiles, i, stage);
        cta.exponentiate(rS, rO, softmax);
        cta.pipeline.consumer_wait(stage + 1);
        cta.accumulate(rO, rS, Kernel::tile(kv_tiles, i), stage + 1);
        if (i > kv_tiles.begin) {
            cta.pipeline.producer_acquire(stage + 2);
            cta.template load_v<true, 1>(kv_tiles, i - 1, stage + 2);
            if (i - 1 > kv_tiles.begin) cta.template load_k<true, 2>(kv_tiles, i - 2, stage + 2);
            cta.commit(stage + 2);
            if constexpr (Kernel::kBiasTiles) ptx::cp_async_commit();
        }
        cta.step(kv_tiles);
    }

    softmax.finish();
    Kernel::from_shared(params).store(rO, softmax);
}

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions, bool kLessMemory>
using Fa2ForwardOf =
    Fa2Forward<Element, kHeadDim, kHeadDimV, kOptions,
               tuning::fa2_forward_shape({kHeadDim, kHeadDimV}, kOptions, kLessMemory)>;

template <int kHeadDim, int kHeadDimV>
int Fa2<kHeadDim, kHeadDimV>::forward_shared_bytes() {
    constexpr OptionSets kSets = row_of(tuning::kFa2Forward, {kHeadDim, kHeadDimV}).options;
    return largest_of<kSets>([](auto options) {
        return Fa2ForwardOf<__half, kHeadDim, kHeadDimV, options.value, true>::kSharedBytes;
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa2<kHeadDim, kHeadDimV>::forward(const ForwardParams& params,
                                              const ForwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa2Forward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Element = decltype(element);
        using Large = Fa2ForwardOf<Element, kHeadDim, kHeadDimV, options.value, false>;
        using Small = Fa2ForwardOf<Element, kHeadDim, kHeadDimV, options.value, true>;
        static_assert(Large::kCtasPerSm == Small::kCtasPerSm);  // the plan has one tile order
        return launch_fitting<Large, Small>(kernel.gpu, [&](auto chosen) {
            using Kernel = typename decltype(chosen)::type;
            return launch_kernel<fa2_forward_kernel<Kernel>>(work_tile_count(params.tile_order),
                                                             Kernel::kThreads, Kernel::kSharedBytes,
                                                             params, stream);
        });
    });
}

}  // namespace flash_ext
