// Launches the FA3 forward.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/forward_tiles.cuh"
#include "plan/launchers.h"

namespace flash_ext {

template <class Kernel>
cudaError_t launch_fa3_forward(const ForwardParams& call, int sms, cudaStream_t stream) {
    using Config = typename Kernel::Config;
    Fa3ForwardParams params{call, make_dynamic_scheduler(call.counters)};
    if (params.seqlen_k == 0) {  // a tensor map needs an address, although nothing is read
        params.k.data = params.q.data;
        params.v.data = params.q.data;
    }
    const TensorView q = params.pack_gqa_log2 > 0 ? with_heads_as_rows(params.q) : params.q;
    for (cudaError_t status : {encode_tensor_map<typename Config::QTile, Config::kQBoxRows>(
                                   params.q_map, q, params.head_dim),
                               encode_tensor_map<typename Config::KTile, Config::kKVBoxRows>(
                                   params.k_map, params.k, params.head_dim),
                               encode_tensor_map<typename Config::VTile, Config::kKVBoxRows>(
                                   params.v_map, params.v, params.head_dim_v)})
        if (status != cudaSuccess) return status;
    return launch_fa3<Kernel>(params, cta_count(params.schedule) / params.schedule.tiles_at_once,
                              sms, stream);
}

}  // namespace flash_ext
