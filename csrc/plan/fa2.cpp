#include "plan/steps.h"

namespace flash_ext {
namespace {

std::string fa2_unsupported_reason(const Call& call, Pass pass) {
    if (call.has_8_bits()) return kNo8Bits;
    const auto bytes = [&](auto dim, auto dim_v) {
        return pass == Pass::kForward ? fa2_forward_shared_bytes<dim, dim_v>()
                                      : fa2_backward_shared_bytes<dim, dim_v>();
    };
    return shared_memory_reason(call, pass,
                                dispatch_head_dims(head_dims(call.sizes), bytes, kTooManyBytes));
}

void plan_fa2_forward(ForwardPlan& plan, const GpuModel& gpu) {
    // An SM has 1 KB more shared memory than a CTA may have, and reserves 1 KB for each CTA.
    constexpr int kReserved = 1024;
    ForwardParams& params = plan.params;
    const HeadDims dims = head_dims(params);
    const auto bytes = [](auto dim, auto dim_v) { return fa2_forward_shared_bytes<dim, dim_v>(); };
    const int needed = dispatch_head_dims(dims, bytes, kTooManyBytes);
    const int fitting = (gpu.shared_bytes + kReserved) / (needed + kReserved);
    const int tuned = tuning::fa2_forward(dims, features_of(params)).ctas_per_sm;
    plan_splits(plan, /*may_pack_gqa=*/false, gpu.sms * std::min(tuned, fitting),
                tuning::kFa2SplitKeys);
    plan.kernel.form = std::max({features_of(params), tuning::least_fa2_form(dims),
                                 plan.kernel.has_splits ? Features::kVarlen : Features::kPlain});
    params.schedule = forward_schedule(
        params, plan.mask, {params.heads_q, tuning::kForwardBlockQ}, dims,
        tuning::fa2_forward(dims, plan.kernel.form).ctas_per_sm, gpu, params.num_splits);
}

cudaError_t run_fa2_forward(const ForwardPlan& plan, cudaStream_t stream) {
    const cudaError_t status =
        dispatch_head_dims(head_dims(plan.params), [&](auto dim, auto dim_v) {
            return fa2_forward<dim, dim_v>(plan.params, plan.kernel, stream);
        });
    if (status != cudaSuccess || !plan.kernel.has_splits) return status;
    return combine_splits(plan.params, stream, /*pdl=*/false);
}

void plan_fa2_backward(BackwardPlan& plan, const GpuModel& gpu) {
    const HeadDims dims = head_dims(plan.params);
    plan_mma_backward(plan, dims, tuning::fa2_backward(dims, Features::kPlain).block_q,
                      tuning::least_fa2_form(dims));
    const tuning::Backward tile = tuning::fa2_backward(dims, plan.kernel.form);
    plan.params.schedule = backward_schedule(
        plan.params, plan.mask, tile.keys_per_warp * tile.warps_kv, dims, tile.ctas_per_sm, gpu);
}

cudaError_t run_fa2_backward(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims(head_dims(plan.params), [&](auto dim, auto dim_v) {
        return fa2_backward<dim, dim_v>(plan.params, plan.kernel, stream);
    });
}

}  // namespace

constexpr VariantRow kFa2Row{fa2_unsupported_reason, std::nullopt,    plan_fa2_forward,
                             plan_fa2_backward,      run_fa2_forward, run_fa2_backward};

}  // namespace flash_ext
