#include "plan/plan.h"

#include <cuda_runtime_api.h>

#include <vector>

#include "plan/steps.h"

namespace flash_ext {
namespace {

const VariantRow& row_for(Variant variant) {
    constexpr const VariantRow* kRows[] = {&kFa1Row, &kFa2Row, &kFa3Row};
    static_assert(std::size(kRows) == kVariants);
    return *kRows[static_cast<int>(variant)];
}

// A single query, as in decoding: the heads that share a key head become the rows of one tile, by
// strides alone. Only where no option differs between these heads or rows.
void pack_gqa_view(ForwardParams& params) {
    const int group = group_or_one(params);
    const bool alike = params.alibi_slopes == nullptr && params.bias.data == nullptr &&
                       params.sink == nullptr && params.rng_state == nullptr &&
                       !params.q_descale.by_query_head;
    if (params.seqlen_q != 1 || params.cu_seqlens_q != nullptr || group < 2 || !alike ||
        !summary_of(params).sees_all || params.q.head_stride == 0)
        return;
    for (TensorView* view : {&params.q, &params.out}) {
        view->row_stride = view->head_stride;
        view->head_stride *= group;
    }
    params.seqlen_q = group;  // and lse (B, Hq, 1) is lse (B, Hk, group)
    params.heads_q = params.heads_k;
    lift_mask(params);
}

}  // namespace

const GpuModel* find_device(int index) {
    // The driver is asked once, for all devices.
    static const std::vector<GpuModel> devices = [] {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
        std::vector<GpuModel> all;
        for (int i = 0; i < count; ++i) {
            const auto ask = [&](cudaDeviceAttr attribute) {
                int value = 0;
                cudaDeviceGetAttribute(&value, attribute, i);
                return value;
            };
            all.push_back(gpu_model(
                ask(cudaDevAttrComputeCapabilityMajor), ask(cudaDevAttrComputeCapabilityMinor),
                ask(cudaDevAttrMaxSharedMemoryPerBlockOptin), ask(cudaDevAttrMultiProcessorCount),
                ask(cudaDevAttrL2CacheSize)));
        }
        cudaGetLastError();  // clears an error, which the next launch would otherwise report
        return all;
    }();
    return index >= 0 && index < static_cast<int>(devices.size()) ? &devices[index] : nullptr;
}

Choice choose(const Call& call, Pass pass, Variant variant, bool may_stand_in) {
    std::string why;
    while (true) {
        const VariantRow& row = row_for(variant);
        const std::string reason = row.unsupported_reason(call, pass);
        if (reason.empty()) return {variant, why};
        why = text("variant '", name_of(variant), "' ", reason);
        if (!may_stand_in || !row.stand_in) return {std::nullopt, why};
        if (has_8_bit_keys(call.params))
            return {std::nullopt, why + ", and no other variant has 8-bit inputs"};
        variant = *row.stand_in;
    }
}

void make_plan(ForwardPlan& plan, const GpuModel& gpu) {
    pack_gqa_view(plan.params);
    plan.mask = summary_of(plan.params);
    plan.kernel.gpu = gpu;
    row_for(plan.variant).plan_forward(plan);
}

void make_plan(BackwardPlan& plan, const GpuModel& gpu) {
    BackwardParams& params = plan.params;
    plan.mask = summary_of(params);
    plan.kernel.gpu = gpu;
    if (params.deterministic && params.cu_seqlens_q != nullptr) {
        plan.cu_seqlens_q = params.cu_seqlens_q;
        plan.cu_seqlens_k = params.cu_seqlens_k;
        plan.workspace.reserve(params.cu_seqlens_q, params.batch + 1);
        plan.workspace.reserve(params.cu_seqlens_k, params.batch + 1);
    }
    row_for(plan.variant).plan_backward(plan);
}

cudaError_t launch(const ForwardPlan& plan, cudaStream_t stream) {
    const cudaError_t status = row_for(plan.variant).forward(plan, stream);
    if (status != cudaSuccess || !plan.kernel.has_splits) return status;
    // Every GPU that runs FA3 has programmatic dependent launch.
    return combine_splits(plan.params, plan.kernel.head_dims, stream,
                          /*pdl=*/plan.variant == Variant::kFa3);
}

cudaError_t launch(const BackwardPlan& plan, cudaStream_t stream) {
    const BackwardParams& params = plan.params;
    cudaError_t status = cudaSuccess;
    if (plan.cu_seqlens_q != nullptr)
        status = sanitize_cu_seqlens(params, plan.cu_seqlens_q, plan.cu_seqlens_k, stream);
    if (status == cudaSuccess) status = row_for(plan.variant).backward(plan, stream);
    if (status == cudaSuccess && params.dbias != nullptr) status = bias_gradient(params, stream);
    if (status == cudaSuccess && params.dsink != nullptr) status = sink_gradient(params, stream);
    return status;
}

}  // namespace flash_ext
