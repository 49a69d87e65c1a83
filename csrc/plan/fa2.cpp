#include "plan/steps.h"

namespace flash_ext {
namespace {

std::string fa2_unsupported_reason(const Call& call, Pass pass) {
    const auto forward = [](auto d, auto dv) { return fa2_forward_shared_bytes<d, dv>(); };
    const auto backward = [](auto d, auto dv) { return fa2_backward_shared_bytes<d, dv>(); };
    return pass == Pass::kForward
               ? mma_unsupported_reason<tuning::kFa2Forward>(call, pass, forward)
               : mma_unsupported_reason<tuning::kFa2Backward>(call, pass, backward);
}

void plan_fa2_forward(ForwardPlan& plan, const GpuModel& gpu) {
    // An SM has 1 KB more shared memory than a CTA may have, and reserves 1 KB for each CTA.
    constexpr int kReserved = 1024;
    ForwardParams& params = plan.params;
    // As with splits until their number is known.
    choose_kernel(plan, tuning::kFa2Forward, options_of(params) | OptionSet::kSplits);
    const HeadDims dims = plan.kernel.head_dims;
    const auto bytes = [](auto d, auto dv) { return fa2_forward_shared_bytes<d, dv>(); };
    const int bytes_of_cta = dispatch_head_dims<tuning::kFa2Forward>(dims, bytes, 0);
    const int fitting = (gpu.shared_bytes + kReserved) / (bytes_of_cta + kReserved);
    const int tuned = tuning::fa2_forward(dims, plan.kernel.options).ctas_per_sm;
    plan_splits(plan, /*may_pack_gqa=*/false, gpu.sms * std::min(tuned, fitting),
                tuning::kFa2SplitKeys);
    choose_kernel(plan, tuning::kFa2Forward,
                  options_of(params) | only_if(plan.kernel.has_splits, OptionSet::kSplits));
    params.schedule = forward_schedule(params, plan.mask, {params.heads_q, tuning::kForwardBlockQ},
                                       dims, tuned, gpu, params.num_splits);
}

cudaError_t run_fa2_forward(const ForwardPlan& plan, cudaStream_t stream) {
    const HeadDims dims = plan.kernel.head_dims;
    const cudaError_t status =
        dispatch_head_dims<tuning::kFa2Forward>(dims, [&](auto dim, auto dim_v) {
            return fa2_forward<dim, dim_v>(plan.params, plan.kernel, stream);
        });
    if (status != cudaSuccess || !plan.kernel.has_splits) return status;
    return combine_splits(plan.params, dims, stream, /*pdl=*/false);
}

void plan_fa2_backward(BackwardPlan& plan, const GpuModel& gpu) {
    plan_mma_backward(plan, tuning::kFa2Backward);
    const HeadDims dims = plan.kernel.head_dims;
    const tuning::Backward tile = tuning::fa2_backward(dims, plan.kernel.options);
    plan.params.schedule = backward_schedule(
        plan.params, plan.mask, tile.keys_per_warp * tile.warps_kv, dims, tile.ctas_per_sm, gpu);
}

cudaError_t run_fa2_backward(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kFa2Backward>(
        plan.kernel.head_dims, [&](auto dim, auto dim_v) {
            return fa2_backward<dim, dim_v>(plan.params, plan.kernel, stream);
        });
}

}  // namespace

constexpr VariantRow kFa2Row{fa2_unsupported_reason, std::nullopt,    plan_fa2_forward,
                             plan_fa2_backward,      run_fa2_forward, run_fa2_backward};

}  // namespace flash_ext
