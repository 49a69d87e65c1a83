// The FA3 backward for heads that are too wide for backward.cuh: the preprocess pass, then a kernel
// for dK and dV (dKdV), then one for dQ. Nothing is summed in HBM, so results are deterministic in
// any case.
//
// Where the workspace holds the dS of at least one head, the dKdV kernel stores it there, for as
// many heads at a time as fit, and the dQ GEMM takes one matmul, dQ = dS K. Otherwise the dQ kernel
// computes dS again. It begins before the dKdV kernel has ended, so the two count their tiles in
// separate words, the two of tile_count_semaphore.
#pragma once

#include "kernels/fa3/backward_dkdv.cuh"
#include "kernels/fa3/backward_dq.cuh"
#include "kernels/fa3/backward_dq_gemm.cuh"
#include "plan/launchers.h"
#include "plan/tuning.h"

namespace flash_ext {

template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions>
cudaError_t launch_fa3_backward_wide(const BackwardParams& params, const BackwardKernel& kernel,
                                     cudaStream_t stream) {
    constexpr auto kTuning = row_of(tuning::kFa3BackwardWide, {kHeadDim, kHeadDimV});
    using DKDV = Fa3BackwardDKDV<Element, kHeadDim, kHeadDimV, kOptions, kTuning.pool_pairs>;
    using DQGemm = Fa3BackwardDQGemm<Element, kHeadDim, kTuning.dq_gemm_stages>;
    using DQ = Fa3BackwardDQ<Element, kHeadDim, kHeadDimV, kOptions>;
    cudaError_t status = backward_preprocess(params, DKDV::kBlockQ, stream);
    if (kernel.ds_heads == 0) {
        if (status == cudaSuccess)
            status = launch_fa3_backward_pass<DKDV>(params, {}, kernel.wide.keys, kernel.gpu.sms,
                                                    stream);
        if (status == cudaSuccess)
            status = launch_fa3_backward_pass<DQ>(params, {}, kernel.wide.queries, kernel.gpu.sms,
                                                  stream);
        return status;
    }
    const int heads = params.heads_k * params.batch;
    for (int head = 0; head < heads; head += kernel.ds_heads) {
        const bool whole = head + kernel.ds_heads <= heads;
        const WideSchedules& schedules = whole ? kernel.wide : kernel.last_wide;
        const DSWorkspace ds{static_cast<char*>(kernel.ds), head,
                             whole ? kernel.ds_heads : heads - head, kernel.ds_tiles};
        if (status == cudaSuccess)
            status =
                launch_fa3_backward_pass<DKDV>(params, ds, schedules.keys, kernel.gpu.sms, stream);
        if (status == cudaSuccess)
            status = launch_fa3_backward_pass<DQGemm>(params, ds, schedules.queries, kernel.gpu.sms,
                                                      stream);
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
