// What FP8 adds to the FA3 forward: V is transposed, P V is summed in two levels, descales are
// applied, and the steps of an iteration come in turn.
#pragma once

#include "kernels/fa3/forward.cuh"
#include "tile/transpose.cuh"

namespace flash_ext {

static __device__ const float kNoDescale = 1.f;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(int bits) { return __int_as_float(bits); }

// Transposes V tiles, by all lanes of kTransposers warps.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::transpose_v() const {
    const RowMajorVPipeline source = row_major_v();
    typename RowMajorVPipeline::State from;
    typename VPipeline::State to;
    for (WorkTileState t;; t.advance()) {
        work_tiles.descriptions.consumer_wait(t);
        const QueryTile& tile = work_tiles[t];
        if (tile.first_query < 0) return;
        const int tiles = tile.kv_tiles.count();
        __syncwarp();
        release(work_tiles.descriptions, t);
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) {
            source.consumer_wait(from);
            v_pipeline.producer_acquire(to);
            transpose_fp8<VTile, typename Config::TransposedVTile, Config::kTransposers,
                          Config::kProducerRegisters <= 40>(source.stage(from),
                                                            v_pipeline.stage(to), warp_id() - 1);
            ptx::fence_proxy_async();  // wgmma will read what was stored
            __syncwarp();
            if (elected) v_pipeline.producer_commit(to);
            release_and_advance(source, from);
            to.advance();
        }
    }
}

// O = P V or O += P V, to the end. The tensor core keeps only some 14 bits of a sum. So it
// computes the P V of one tile from zero, and the sum over tiles is formed in float32. The
// scores are not needed any more: the registers of those of the first kPartialCols keys hold P V,
// as many columns at a time. kStartScores: the next scores of the other keys, whose registers are
// free, are computed beside the last additions.
template <class Config>
template <bool kStartScores>
__device__ __forceinline__ void Fa3Forward<Config>::add_output(State& state,
                                                               const Probabilities& rP,
                                                               bool accumulate) const {
    using Partial = RegisterTile<16, Config::kPartialCols, typename Scores::Number>;
    static_assert(sizeof(Partial) <= sizeof(Scores));
    Partial& rPartial = reinterpret_cast<Partial&>(state.rS);
    constexpr int kParts = Config::kHeadDimV / Config::kPartialCols;
    compile_time_for<kParts>([&](auto i) {
        constexpr int kFirst = i * Config::kPartialCols;
        constexpr bool kBeside = kStartScores && i == kParts - 1;
        const KMajor<typename Config::TransposedVTile, false> v_columns(v_pipeline.stage(state.v),
                                                                        kFirst);
        gemm_async<Element, Config::kBlockKV>(rPartial, rP, v_columns, false);
        if (kBeside) issue_other_scores(state);
        ptx::wgmma_wait<kBeside && kHasOtherScores>();
        warpgroup_fence(rPartial);
#pragma unroll
        for (int n = 0; n < Partial::kN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& sum = state.rO.v[0][kFirst / 8 + n][e];
                const float x = as_float(rPartial.v[0][n][e]);
                sum = accumulate ? sum + x : x;
            }
    });
}

// Those of a query head's rows, or of its KV head. A tile without keys needs none, and its
// sequence may have none.
template <class Config>
__device__ __forceinline__ const float* Fa3Forward<Config>::descales_of(const Descale& x,
                                                                        const QueryTile& tile,
                                                                        int head_q) const {
    if (x.data == nullptr || tile.sequence.seqlen_k == 0) return &kNoDescale;
    const int head = x.by_query_head ? head_q : this->head_k(head_q);
    return x.data + tile.sequence.index() * x.batch_stride + head * x.head_stride;
}

// The last block of descales, 0 where there are no blocks. Wrong offsets of sequences must not
// read beyond it.
template <class Config>
__device__ __forceinline__ int Fa3Forward<Config>::last_block(const float* descales,
                                                              const Descale& x) {
    return descales == &kNoDescale ? 0 : x.last_block;
}

// The factors of the scores of this lane's two rows, without those of the keys, and where those
// are.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::begin_scales(State& state,
                                                                 const QueryTile& tile) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = warp_row() + lane_row() + 8 * i;
        const int head = tile.head + min_of(head_of(row), group() - 1);
        const float* source = descales_of(params.q_descale, tile, head);
        const int block =
            min_of(query_of(tile, row) / kDescaleRows, last_block(source, params.q_descale));
        state.q_scale[i] = __ldg(source + block * params.q_descale.last_stride);
        if (!Config::kGeneral) state.q_scale[i] *= params.scale_log2;
    }
    constexpr float kLargest = Config::kInt8 ? 128.f : 448.f;  // element of Q and K
    state.scale_limit = Softmax::kLargeMax / (kLargest * kLargest * Config::kHeadDim);
    state.k_descales = descales_of(params.k_descale, tile, tile.head);
    state.last_k_block = last_block(state.k_descales, params.k_descale);
}

// Those of the keys of the KV tile, which may reach into a second block.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::load_k_scales(State& state) const {
    const auto load = [&](int block) {
        return __ldg(state.k_descales +
                     min_of(block, state.last_k_block) * params.k_descale.last_stride);
    };
    const int first_key = VisibleTiles::tile(state.kv_tile) * Config::kBlockKV;
    const int block = first_key / kDescaleRows;
    state.k_scale[0] = load(block);
    if constexpr (kTwoKScales) {
        state.k_scale[1] = load(block + 1);
        state.second_k_scale = (block + 1) * kDescaleRows - first_key;
    }
    if constexpr (!Config::kGeneral) {
        const float q_scale = fmaxf(state.q_scale[0], state.q_scale[1]);
        const float k_scale = fmaxf(state.k_scale[0], state.k_scale[kTwoKScales]);
        state.may_be_large = __any_sync(0xffffffff, q_scale * k_scale > state.scale_limit);
    }
}

// By how many powers of two row i of this thread is cooled.
template <class Config>
__device__ __forceinline__ uint8_t& Fa3Forward<Config>::cooling(int i) const {
    return storage.fp8.cooling[ptx::not_hoisted(threadIdx.x) - 128][i];
}

// Cools rows of large scores (fp8_softmax.cuh). Infinite ones are cooled more than once.
template <class Config>
template <class Form, class Scale>
__device__ __forceinline__ void Fa3Forward<Config>::cool(State& state, const Scale& scale) const {
    state.scale_limit = -INFINITY;  // in this tile
    bool changed;
    do {
        changed = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& row_max = state.softmax.row_max[0][i];
            const float max =
                fmaxf(row_max, Softmax::template max_of_tile<Form>(state.rS, scale, i));
            const int powers = Softmax::powers_to_cool(max, cooling(i));
            row_max *= power_of_two(-powers);
            state.q_scale[i] *= power_of_two(-powers);
            cooling(i) += powers;
            changed |= powers != 0;
        }
    } while (__any_sync(0xffffffff, changed));
}

// After the last P of a tile: m becomes what it would be without cooling.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::warm(State& state) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // With more powers m is infinite.
        state.softmax.row_max[0][i] *= power_of_two(min_of<int>(cooling(i), 127));
        cooling(i) = 0;
    }
}

// Applies v's to O, per head or per channel.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::descale_output(Output& rO,
                                                                   const QueryTile& tile) const {
    const float* source = descales_of(params.v_descale, tile, tile.head);
    const int64_t stride = source == &kNoDescale ? 0 : params.v_descale.last_stride;
    if (stride == 0) {
        rO.scale(__ldg(source));
        return;
    }
    source += lane_col() * stride;
    const int columns = params.head_dim_v - lane_col();
#pragma unroll
    for (int n = 0; n < Output::kN; ++n, source += 8 * stride)
        if (8 * n < columns) {
            const float x = __ldg(source), y = __ldg(source + stride);
            rO.v[0][n][0] *= x;
            rO.v[0][n][1] *= y;
            rO.v[0][n][2] *= x;
            rO.v[0][n][3] *= y;
        }
}

// The iteration: P V is complete before the Q K^T that takes its registers starts.
template <class Config>
template <bool kUnmasked>
__device__ __forceinline__ void Fa3Forward<Config>::compute_in_turn(State& state, Probabilities& rP,
                                                                    bool last) const {
    k_pipeline.consumer_wait(state.k, state.k_ready);
    if constexpr (kUnmasked || kStoresBeside) {
        state.rescaling.apply(state.rO);
    } else {
        settle_output<false>(state);
    }
    v_pipeline.consumer_wait(state.v, state.v_ready);
    Order::wait(consumer);
    add_output<true>(state, rP, kUnmasked || !state.begun);
    issue_first_scores(state);
    Order::signal_next(consumer);
    // What does not need the scores is done before they are there.
    release_and_advance(v_pipeline, state.v);
    load_k_scales(state);
    if (kStoresBeside && last) {
        store(state.rO, state.softmax, work_tiles[state.tile_done]);
        this->end_work_tile(state.tile_done);
    }
    auto next_k = state.k;
    next_k.advance();
    state.k_ready = k_pipeline.consumer_test(next_k);
    state.v_ready = v_pipeline.consumer_test(state.v);
    ptx::wgmma_wait<0>();
    if (!kStoresBeside && last) state.done = state.softmax;
    state.begun = state.kept = last;
    compute_p<kUnmasked>(state, rP, last);
}

}  // namespace flash_ext
