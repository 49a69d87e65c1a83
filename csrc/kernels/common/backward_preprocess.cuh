// The preprocess pass of FA1's and FA2's backward, for all head dims; its kernel is in
// backward_delta.cuh.
#pragma once

#include "kernels/common/backward_delta.cuh"
#include "kernels/common/launch.cuh"
#include "plan/dispatch.h"
#include "plan/head_dims.h"

namespace flash_ext {

cudaError_t backward_preprocess(BackwardParams params, bool general, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    params.dq_accum_zeroed = true;
    const HeadDims padded = pad_head_dims({params.head_dim, params.head_dim_v});
    dispatch_head_dims(padded, [&](auto, auto dim_v) {
        dispatch_kernel<Features::kGeneral>(params, [&](auto element, auto) {
            dispatch<false, true>(general, [&](auto is_general) {
                status = launch_preprocess<decltype(element), is_general.value, 64, dim_v.value>(
                    params, stream);
            });
        });
    });
    return status;
}

}  // namespace flash_ext
