#include "plan/steps.h"
#include "plan/tuning_backward.h"

namespace flash_ext {
namespace {

using Fa1Kernels = MmaKernels<tuning::kFa1Forward, tuning::kFa1Backward, Fa1>;

std::string fa1_unsupported_reason(const Call& call, Pass pass) {
    if (call.params.batch_invariant && pass == Pass::kForward) return "is not batch-invariant";
    return Fa1Kernels::unsupported_reason(call, pass);
}

void plan_fa1_forward(ForwardPlan& plan) {
    ForwardParams& params = plan.params;
    choose_kernel(plan, tuning::kFa1Forward, options_of(params));
    const HeadDims dims = plan.kernel.head_dims;
    const int block_q = row_of(tuning::kFa1Forward, dims).block_q;
    const int64_t rows = tile_count(params, {params.heads_q, block_q}) * block_q;
    plan.workspace.reserve(params.out_accum, rows * dims.v);
    plan.workspace.reserve(params.row_statistics, rows * 2);
}

}  // namespace

constexpr VariantRow kFa1Row{fa1_unsupported_reason,    std::nullopt,        plan_fa1_forward,
                             Fa1Kernels::plan_backward, Fa1Kernels::forward, Fa1Kernels::backward};

}  // namespace flash_ext
