#include <algorithm>

#include "plan/steps.h"

namespace flash_ext {
namespace {

// Dense sequences of which all scores of a head are one tile, which the kernels keep on chip. A
// batch-invariant call has the bits of the kernels for any length.
bool is_short(const AttentionParams& params) {
    const auto fits = [](int length) { return length >= 1 && length <= tuning::kShortBlock; };
    const Bias& bias = params.bias;
    const auto has_bias = [&](int dim, int length) {
        return bias.sizes[dim] == 1 || bias.sizes[dim] == length;
    };
    return fits(params.seqlen_q) && fits(params.seqlen_k) && params.batch > 0 &&
           params.heads_q > 0 && params.heads_k > 0 && params.sink == nullptr &&
           !params.batch_invariant && !has_8_bit_keys(params) && has_bias(2, params.seqlen_q) &&
           has_bias(3, params.seqlen_k) && int64_t{params.batch} * params.heads_q < (1 << 24);
}

// The kernel, and its CTAs: as many as run at a time, if heads that share a bias are as many. More
// would be a second wave, of a few.
template <class Plan>
bool plan_short(Plan& plan, bool backward) {
    const AttentionParams& params = plan.params;
    const GpuModel& gpu = plan.kernel.gpu;
    if (!is_short(params) || !choose_kernel(plan, tuning::kShort, options_of(params))) return false;
    const HeadDims dims = plan.kernel.head_dims;
    const tuning::ShortRow row = row_of(tuning::kShort, dims);
    const int fitting = fitting_ctas(gpu, tuning::short_shared_bytes(dims, backward));
    const int tuned = (backward ? row.backward : row.forward).ctas_per_sm;
    const int64_t biases = int64_t{params.bias.sizes[0]} * params.bias.sizes[1];
    const int64_t heads = int64_t{params.batch} * params.heads_q / biases;
    const int64_t at_once = gpu.sms * std::min(tuned, fitting) / biases;
    const int64_t per_cta = ceil_div(heads, std::clamp<int64_t>(at_once, 1, heads));
    plan.kernel.ctas_per_bias = static_cast<int>(ceil_div(heads, per_cta));
    return true;
}

}  // namespace

bool plan_short_forward(ForwardPlan& plan) { return plan_short(plan, /*backward=*/false); }

bool plan_short_backward(BackwardPlan& plan) {
    const BackwardParams& params = plan.params;
    BackwardKernel& kernel = plan.kernel;
    if (params.heads_q != params.heads_k || !plan_short(plan, /*backward=*/true)) return false;
    if (params.dbias == nullptr) return true;
    kernel.stored_dbias = StoredDBias::kStored;
    if (kernel.ctas_per_bias > 1)
        plan.workspace.reserve(kernel.dbias_sums, int64_t{params.bias.sizes[0]} *
                                                      params.bias.sizes[1] * kernel.ctas_per_bias *
                                                      tuning::kShortBlock * tuning::kShortBlock);
    return true;
}

cudaError_t run_short_forward(const ForwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kShort>(plan.kernel.head_dims, [&](auto dim, auto dim_v) {
        return short_forward<dim, dim_v>(plan.params, plan.kernel, stream);
    });
}

cudaError_t run_short_backward(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kShort>(plan.kernel.head_dims, [&](auto dim, auto dim_v) {
        return short_backward<dim, dim_v>(plan.params, plan.kernel, stream);
    });
}

}  // namespace flash_ext
