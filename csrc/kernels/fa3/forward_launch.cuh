// The parameters of the FA3 forward kernels, for 16-bit and for 8-bit inputs, and their launch.
#pragma once

#include "kernels/fa3/cta.cuh"

namespace flash_ext {

struct Fa3ForwardParams : ForwardParams {
    DynamicPersistentScheduler scheduler;
    Divisor by_splits;  // or by split_ctas, if splits are fixed ones
    CUtensorMap q_map;
    CUtensorMap k_map;
    CUtensorMap v_map;
};

// With packed GQA TMA loads the heads of a query as rows.
FLASH_HOST_DEVICE TensorView with_heads_as_rows(const TensorView& q) {
    return {q.data, q.batch_stride, q.head_stride, q.row_stride};
}

template <class Kernel>
cudaError_t launch_fa3_forward(const ForwardParams& call, const ForwardKernel& kernel,
                               cudaStream_t stream) {
    typename Kernel::Params params{};
    static_cast<Fa3ForwardParams&>(params) = {
        call, make_dynamic_scheduler(call.counters),
        Divisor(call.split_ctas > 0 ? call.split_ctas : call.num_splits)};
    if (params.seqlen_k == 0) {  // a tensor map needs an address, although nothing is read
        params.k.data = params.q.data;
        params.v.data = params.q.data;
    }
    const TensorView q = params.pack_gqa_log2 > 0 ? with_heads_as_rows(params.q) : params.q;
    params.pages.box_rows = Kernel::key_box_rows(params);
    for (cudaError_t status : {encode_tensor_map<typename Kernel::QTile>(
                                   params.q_map, q, params.head_dim, Kernel::kQBoxRows),
                               encode_tensor_map<typename Kernel::KTile>(
                                   params.k_map, params.k, params.head_dim, params.pages.box_rows),
                               Kernel::encode_v_map(params)})
        if (status != cudaSuccess) return status;
    if constexpr (Kernel::kBias)
        if (const cudaError_t status = params.bias_map.template prepare<typename Kernel::BiasTile>(
                call, kernel.bias, stream);
            status != cudaSuccess)
            return status;
    const int works = work_tile_count(params.tile_order) / params.tile_order.tiles_at_once;
    return launch_kernel<fa3_kernel<Kernel>>(min_of(works, kernel.gpu.sms), Kernel::kThreads,
                                             sizeof(typename Kernel::SharedStorage), params, stream,
                                             {.pdl = kernel.row_major_v.has_value()});
}

}  // namespace flash_ext
