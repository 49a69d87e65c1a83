// The FA3 backward for heads that are too wide for backward.cuh: the preprocess pass, then a kernel
// for dK and dV (dKdV), whose header says why there are several, then one for dQ: the dQ GEMM, for
// as many heads at a time as the workspace holds dS of, or the dQ kernel if it holds none. The dQ
// kernel begins before the dKdV kernel has ended, so the two count their tiles in separate words of
// tile_count_semaphore.
#pragma once

#include "kernels/fa3/backward_dq.cuh"
#include "kernels/fa3/backward_dq_gemm.cuh"
#include "plan/launchers.h"
#include "plan/tuning_backward.h"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions>
cudaError_t launch_fa3_backward_wide(const BackwardParams& params, const BackwardKernel& kernel,
                                     cudaStream_t stream) {
    constexpr auto kTuning = row_of(tuning::kFa3BackwardWide, {kHeadDim, kHeadDimV});
    using DKDV = Fa3BackwardDKDV<Element, kHeadDim, kHeadDimV, kOptions, kTuning.pool_pairs,
                                 changes_scores(kOptions)>;
    using DKDVStoringDS =
        Fa3BackwardDKDV<Element, kHeadDim, kHeadDimV, kOptions, kTuning.pool_pairs, true>;
    using DQGemm = Fa3BackwardDQGemm<Element, kHeadDim, kTuning.dq_gemm_stages>;
    using DQ = Fa3BackwardDQ<Element, kHeadDim, kHeadDimV, kOptions>;
    const bool stores_ds = kernel.ds_heads > 0;
    const int heads = params.heads_k * params.batch;
    const int heads_at_once = stores_ds ? kernel.ds_heads : heads;
    cudaError_t status = backward_preprocess(params, DKDV::kBlockQ, stream);
    for (int head = 0; status == cudaSuccess && head < heads; head += heads_at_once) {
        const bool whole = head + heads_at_once <= heads;
        const WideTileOrders& schedules = whole ? kernel.wide : kernel.last_wide;
        DSWorkspace ds;
        if (stores_ds)
            ds = {static_cast<char*>(kernel.ds), head, min_of(heads_at_once, heads - head),
                  kernel.ds_tiles};
        const auto launch_dkdv =
            stores_ds ? launch_fa3_backward_pass<DKDVStoringDS> : launch_fa3_backward_pass<DKDV>;
        status = launch_dkdv(params, ds, schedules.keys, kernel.gpu.sms, stream);
        if (status != cudaSuccess) return status;
        const auto launch_dq =
            stores_ds ? launch_fa3_backward_pass<DQGemm> : launch_fa3_backward_pass<DQ>;
        status = launch_dq(params, ds, schedules.queries, kernel.gpu.sms, stream);
    }
    return status;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward_wide(const BackwardParams& params, const BackwardKernel& kernel,
                              cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa3BackwardWide, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        return launch_fa3_backward_wide<decltype(element), kHeadDim, kHeadDimV, options.value>(
            with_parts_as_heads(params), kernel, stream);
    });
}

}  // namespace flash_ext
