#include "plan/steps.h"

namespace flash_ext {
namespace {

std::string fa1_unsupported_reason(const Call& call, Pass pass) {
    const auto forward = [](auto d, auto dv) { return fa1_forward_shared_bytes<d, dv>(); };
    const auto backward = [](auto d, auto dv) { return fa1_backward_shared_bytes<d, dv>(); };
    return pass == Pass::kForward
               ? mma_unsupported_reason<tuning::kFa1Forward>(call, pass, forward)
               : mma_unsupported_reason<tuning::kFa1Backward>(call, pass, backward);
}

void plan_fa1_forward(ForwardPlan& plan, const GpuModel& /*gpu*/) {
    ForwardParams& params = plan.params;
    choose_kernel(plan, tuning::kFa1Forward, options_of(params));
    const HeadDims dims = plan.kernel.head_dims;
    const int block_q = tuning::fa1_forward(dims).block_q;
    const int64_t rows = tile_count(params, {params.heads_q, block_q}) * block_q;
    plan.workspace.reserve(params.out_accum, rows * dims.v);
    plan.workspace.reserve(params.row_statistics, rows * 2);
}

cudaError_t run_fa1_forward(const ForwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kFa1Forward>(
        plan.kernel.head_dims, [&](auto dim, auto dim_v) {
            return fa1_forward<dim, dim_v>(plan.params, plan.kernel, stream);
        });
}

void plan_fa1_backward(BackwardPlan& plan, const GpuModel& /*gpu*/) {
    plan_mma_backward(plan, tuning::kFa1Backward);
}

cudaError_t run_fa1_backward(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kFa1Backward>(
        plan.kernel.head_dims, [&](auto dim, auto dim_v) {
            return fa1_backward<dim, dim_v>(plan.params, plan.kernel, stream);
        });
}

}  // namespace

constexpr VariantRow kFa1Row{fa1_unsupported_reason, std::nullopt,    plan_fa1_forward,
                             plan_fa1_backward,      run_fa1_forward, run_fa1_backward};

}  // namespace flash_ext
