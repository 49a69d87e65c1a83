// Launches the FA3 forward: tensor maps, the order of tiles, and which config a call takes.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/forward_fp8.cuh"
#include "kernels/fa3/forward_output.cuh"
#include "kernels/fa3/forward_producers.cuh"
#include "plan/launchers.h"
#include "plan/tuning.h"
#include "schedule/packed_gqa.h"

namespace flash_ext {

template <class Config>
cudaError_t launch_fa3_forward(const ForwardParams& call, cudaStream_t stream) {
    Fa3ForwardParams params{call};
    if (params.seqlen_k == 0) {  // a tensor map needs an address, although nothing is read
        params.k.data = params.q.data;
        params.v.data = params.q.data;
    }
    params.scheduler = make_dynamic_scheduler(call.counters);
    const QueryTiles tiles{params.pack_gqa_log2 > 0 ? params.heads_k : params.heads_q,
                           Config::kBlockQ >> params.pack_gqa_log2};
    params.schedule = forward_schedule(params, tiles, Config::kHeadDim + Config::kHeadDimV, 1,
                                       params.num_splits == 1 ? multiprocessors() : 0);
    params.schedule.tiles *= params.num_splits;
    const TensorView q = params.pack_gqa_log2 > 0 ? with_heads_as_rows(params.q) : params.q;
    for (cudaError_t status : {encode_tensor_map<typename Config::QTile, Config::kQBoxRows>(
                                   params.q_map, q, params.head_dim),
                               encode_tensor_map<typename Config::KTile, Config::kKVBoxRows>(
                                   params.k_map, params.k, params.head_dim),
                               encode_tensor_map<typename Config::VTile, Config::kKVBoxRows>(
                                   params.v_map, params.v, params.head_dim_v)})
        if (status != cudaSuccess) return status;
    const int total = cta_count(params.schedule) / params.schedule.tiles_at_once;
    if (total > multiprocessors() && params.scheduler.fetched.word == nullptr)
        return cudaErrorInvalidValue;
    return launch_fa3<Fa3Forward<Config>>(params, total, stream);
}

// Does the call need a kernel with Q tiles whose rows are not adjacent, or with splits?
inline bool has_splits_or_groups(const ForwardParams& params) {
    return params.num_splits > 1 || params.pack_gqa_log2 > 0;
}

// What tiles depend on.
inline tuning::Fa3ForwardCall fa3_call(const ForwardParams& params) {
    return {.heads = int64_t{params.heads_q} * params.batch,
            .queries = mean_queries(params),
            .keys = mean_keys(params),
            .window = params.window_left + params.window_right + 1,
            .alike = !is_varlen(params) && !is_masked(params),
            .few_tiles = params.few_tiles,
            .multiprocessors = multiprocessors()};
}

template <ElementType kQKType, int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward_fp8(ForwardParams params, cudaStream_t stream) {
    using QKElement = std::conditional_t<kQKType == ElementType::kInt8, Int8, Float8>;
    constexpr HeadDims kDims{kHeadDim, kHeadDimV};
    [[maybe_unused]] constexpr bool kHasFewQueries =
        tuning::fa3_forward_fp8(kDims, true).consumers !=
        tuning::fa3_forward_fp8(kDims, false).consumers;
    const bool has_splits = has_splits_or_groups(params);
    return dispatch_features<Features::kVarlen, Features::kGeneral>(
        params, Features::kPlain, [&](auto features) {
            const auto launch = [&](auto may_have_splits, auto usual) {
                using Config = Fa3ForwardConfig<Float8, kHeadDim, kHeadDimV, features.value,
                                                tuning::fa3_forward_fp8(kDims, !usual),
                                                may_have_splits, QKElement>;
                return launch_fa3_forward<Config>(params, stream);
            };
            constexpr std::true_type kYes;
            constexpr std::false_type kNo;
            if constexpr (features == Features::kGeneral) {
                return launch(kYes, kNo);
            } else {
                if (has_splits) return launch(kYes, kNo);
                if constexpr (kHasFewQueries)
                    if (tuning::few_queries_fp8(kDims, fa3_call(params))) return launch(kNo, kNo);
                return launch(kNo, kYes);
            }
        });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward(ForwardParams params, cudaStream_t stream) {
    return dispatch_kernel<Features::kVarlen, Features::kGeneral>(params, [&](auto element,
                                                                              auto features) {
        using enum tuning::Fa3ForwardTile;
        constexpr HeadDims kDims{kHeadDim, kHeadDimV};
        const auto needed = has_splits_or_groups(params)
                                ? kSplits
                                : tuning::fa3_forward_tile(kDims, fa3_call(params));
        return dispatch<kSplits, kFewQueries, kUsual, kLongKeys>(needed, [&](auto tile) {
            constexpr bool kMayHaveSplits = tile == kSplits || features == Features::kGeneral;
            using Config =
                Fa3ForwardConfig<decltype(element), kHeadDim, kHeadDimV, features.value,
                                 tuning::fa3_forward(kDims, features.value, tile), kMayHaveSplits>;
            return launch_fa3_forward<Config>(params, stream);
        });
    });
}

}  // namespace flash_ext
