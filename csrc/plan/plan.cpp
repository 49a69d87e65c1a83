#include "plan/plan.h"

#include <sstream>

#include "plan/launchers.h"
#include "plan/tuning.h"
#include "plan/variant_table.h"
#include "schedule/packed_gqa.h"

namespace flash_ext {
namespace {

// The first that can, of the variant and those that stand in for it.
Choice choose(const Call& call, Pass pass, Variant variant, bool may_stand_in) {
    std::string why;
    while (true) {
        const VariantRow& row = row_of(variant);
        const std::string reason = row.unsupported_reason(call, pass);
        if (reason.empty()) return {variant, why};
        why = std::string("variant '") + row.name + "' " + reason;
        if (!may_stand_in || !row.stand_in) return {std::nullopt, why};
        if (call.has_8_bits())
            return {std::nullopt, why + ", and no other variant has 8-bit inputs"};
        variant = *row.stand_in;
    }
}

}  // namespace

Choice choose_forward(const Call& call, std::optional<Variant> wanted) {
    return choose(call, Pass::kForward, wanted.value_or(kFastestVariant), !wanted);
}

Choice choose_backward(const Call& call, Variant forward) {
    return choose(call, Pass::kBackward, forward, true);
}

void make_plan(ForwardPlan& plan, const Device& device) {
    pack_gqa_view(plan.params);
    row_of(plan.variant).plan_forward(plan, device);
}

void make_plan(BackwardPlan& plan, const Device& device) {
    BackwardParams& params = plan.params;
    if (params.deterministic && params.cu_seqlens_q != nullptr) {
        plan.workspace.reserve(plan.offsets_q, params.batch + 1);
        plan.workspace.reserve(plan.offsets_k, params.batch + 1);
    }
    row_of(plan.variant).plan_backward(plan, device);
    if (params.dsink != nullptr)
        plan.workspace.reserve(params.dsink_partial, int64_t{params.heads_q} * tuning::kSinkSplits);
}

cudaError_t launch(const ForwardPlan& plan, cudaStream_t stream) {
    return row_of(plan.variant).forward(plan.params, stream);
}

cudaError_t launch(const BackwardPlan& plan, cudaStream_t stream) {
    BackwardParams params = plan.params;
    cudaError_t status = cudaSuccess;
    if (plan.offsets_q != nullptr) {
        status = sanitize_cu_seqlens(params, plan.offsets_q, plan.offsets_k, stream);
        params.cu_seqlens_q = plan.offsets_q;
        params.cu_seqlens_k = plan.offsets_k;
    }
    if (status == cudaSuccess) status = row_of(plan.variant).backward(params, stream);
    if (status == cudaSuccess && params.dbias != nullptr) status = bias_gradient(params, stream);
    if (status == cudaSuccess && params.dsink != nullptr) status = sink_gradient(params, stream);
    return status;
}

std::string text_of(Pass pass, Variant variant, const AttentionParams& params) {
    constexpr const char* kTypes[] = {"float16", "bfloat16", "float8_e4m3fn", "int8"};
    std::ostringstream text;
    text << "the " << (pass == Pass::kForward ? "forward" : "backward") << " pass of variant '"
         << name_of(variant) << "' at head dimensions " << params.head_dim << " and "
         << params.head_dim_v << " in " << kTypes[static_cast<int>(params.element_type)];
    return text.str();
}

}  // namespace flash_ext
