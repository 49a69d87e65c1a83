// The FA3 backward for heads that are too wide for fa3/backward.cuh: row statistics, then dK and
// dV, then dQ, each a kernel. Nothing is summed in memory, so there is no other mode for
// deterministic results.
//
// Where there is memory for the dS of one head or more, the kernel for dK and dV leaves it there,
// and dQ = dS K takes one matmul; for as many heads at a time as fit. Else dQ's kernel computes dS
// again, and begins while the other ends. So each fetches tiles from a counter of its own, of the
// two that tile_count_semaphore points to here.
#pragma once

#include "kernels/fa3/backward_keys.cuh"
#include "kernels/fa3/backward_product.cuh"
#include "kernels/fa3/backward_queries.cuh"
#include "plan/ds_workspace.cuh"
#include "plan/tuning.h"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, Features kFeatures>
cudaError_t launch_fa3_backward_wide(const BackwardParams& params, cudaStream_t stream) {
    constexpr tuning::Fa3BackwardWide kTuning = tuning::fa3_backward_wide({kHeadDim, kHeadDimV});
    using Keys =
        Fa3BackwardKeysConfig<Element, kHeadDim, kHeadDimV, kFeatures, kTuning.pool_pairs, false>;
    using StoringKeys =
        Fa3BackwardKeysConfig<Element, kHeadDim, kHeadDimV, kFeatures, kTuning.pool_pairs, true>;
    using Product = Fa3BackwardProductConfig<Element, kHeadDim, kTuning.product_stages>;
    using Queries = Fa3BackwardQueriesConfig<Element, kHeadDim, kHeadDimV, kFeatures,
                                             kTuning.k_stages, kTuning.v_stages>;
    cudaError_t status =
        launch_preprocess<Element, Keys::kGeneral, Keys::kBlockQ, kHeadDimV, 0>(params, stream);
    const int heads = params.heads_k * params.batch;
    const auto heads_at_a_time = static_cast<int>(params.ds_bytes / ds_group_bytes(params));
    if (heads_at_a_time > 0) {
        for (int head = 0; head < heads && status == cudaSuccess; head += heads_at_a_time) {
            const DSWorkspace ds_workspace{static_cast<char*>(params.ds), head,
                                           min_of(heads_at_a_time, heads - head),
                                           DSWorkspaceTiles(params)};
            status = launch_fa3_backward_keys<StoringKeys>(params, ds_workspace, stream);
            if (status == cudaSuccess)
                status = launch_fa3_backward_product<Product>(params, ds_workspace, stream);
        }
        return status;
    }
    if (status == cudaSuccess)
        status = launch_fa3_backward_keys<Keys>(params, DSWorkspace{}, stream);
    if (status == cudaSuccess) status = launch_fa3_backward_queries<Queries>(params, stream);
    return status;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward_wide(BackwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kVarlen, Features::kGeneral>(params, [&](auto element,
                                                                       auto features) {
        status = launch_fa3_backward_wide<decltype(element), kHeadDim, kHeadDimV, features.value>(
            params, stream);
    });
    return status;
}

}  // namespace flash_ext
