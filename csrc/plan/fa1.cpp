#include "plan/steps.h"

namespace flash_ext {
namespace {

template <class Function, class Result = cudaError_t>
Result dispatch_fa1_head_dims(HeadDims dims, Function&& function, Result none = kNoKernel) {
    const auto function_of = [&](auto dim, auto dim_v) {
        constexpr HeadDims kDims = tuning::fa1_head_dims({dim, dim_v});
        return function(std::integral_constant<int, kDims.qk>{},
                        std::integral_constant<int, kDims.v>{});
    };
    return dispatch_head_dims(dims, function_of, none);
}

std::string fa1_unsupported_reason(const Call& call, Pass pass) {
    if (call.has_8_bits()) return kNo8Bits;
    const auto bytes = [&](auto dim, auto dim_v) {
        return pass == Pass::kForward ? fa1_forward_shared_bytes<dim, dim_v>()
                                      : fa1_backward_shared_bytes<dim, dim_v>();
    };
    return shared_memory_reason(
        call, pass, dispatch_fa1_head_dims(head_dims(call.sizes), bytes, kTooManyBytes));
}

void plan_fa1_forward(ForwardPlan& plan, const GpuModel& /*gpu*/) {
    ForwardParams& params = plan.params;
    plan.kernel.form = features_of(params);
    const HeadDims dims = tuning::fa1_head_dims(head_dims(params));
    const int block_q = tuning::fa1_forward(dims).block_q;
    const int64_t rows = tile_count(params, {params.heads_q, block_q}) * block_q;
    plan.workspace.reserve(params.out_accum, rows * dims.v);
    plan.workspace.reserve(params.row_statistics, rows * 2);
}

cudaError_t run_fa1_forward(const ForwardPlan& plan, cudaStream_t stream) {
    return dispatch_fa1_head_dims(head_dims(plan.params), [&](auto dim, auto dim_v) {
        return fa1_forward<dim, dim_v>(plan.params, plan.kernel, stream);
    });
}

void plan_fa1_backward(BackwardPlan& plan, const GpuModel& /*gpu*/) {
    const HeadDims dims = tuning::fa1_head_dims(head_dims(plan.params));
    plan_mma_backward(plan, dims, tuning::fa1_backward(dims).block_q, Features::kPlain);
}

cudaError_t run_fa1_backward(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_fa1_head_dims(head_dims(plan.params), [&](auto dim, auto dim_v) {
        return fa1_backward<dim, dim_v>(plan.params, plan.kernel, stream);
    });
}

}  // namespace

constexpr VariantRow kFa1Row{fa1_unsupported_reason, std::nullopt,    plan_fa1_forward,
                             plan_fa1_backward,      run_fa1_forward, run_fa1_backward};

}  // namespace flash_ext
