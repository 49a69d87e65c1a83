// Launches the FA3 forward: tensor maps, the order of tiles, and on what the choice of tiles
// depends.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/forward_tiles.cuh"
#include "plan/launchers.h"
#include "schedule/packed_gqa.h"

namespace flash_ext {

template <class Kernel>
cudaError_t launch_fa3_forward(const ForwardParams& call, cudaStream_t stream) {
    using Config = typename Kernel::Config;
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
    return launch_fa3<Kernel>(params, total, stream);
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

}  // namespace flash_ext
