#include "plan/plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "plan/steps.h"

namespace flash_ext {
namespace {

const VariantRow& row_for(Variant variant) {
    constexpr const VariantRow* kRows[] = {&kFa1Row, &kFa2Row, &kFa3Row};
    static_assert(std::size(kRows) == kVariants);
    return *kRows[static_cast<int>(variant)];
}

// In place of rows that TMA cannot address the kernels have a copy in the workspace. Results they
// only store, at any aligned address.
template <class Plan>
void copy_if_needed(Plan& plan, RowCopies& copies, TensorView& view, Rows rows, int cols) {
    const AttentionParams& params = plan.params;
    const Operand given = operand_of(params, view, rows, cols);
    const bool loaded = &copies == &plan.inputs;
    if (has_8_bit_keys(params)) return;                                // FA3 refuses such rows
    if (params.pages.table != nullptr && rows == Rows::kKeys) return;  // these, too
    if (loaded ? given.is_reached_by_tma() : given.is_aligned()) return;
    const Operand copy = given.aligned_copy();
    copies.all[copies.count++] = {view,
                                  &view,
                                  static_cast<int>(copy.sizes[0]),
                                  static_cast<int>(copy.sizes[1]),
                                  static_cast<int>(copy.sizes[2]),
                                  cols};
    view = copy.view();
    plan.workspace.reserve(view.data, copy.bytes());
}

// Then all rows are aligned: columns that copies have beyond the given ones are zeros.
template <class Plan>
void copy_inputs(Plan& plan) {
    auto& params = plan.params;
    const HeadDims cols = head_dims(params);
    copy_if_needed(plan, plan.inputs, params.q, Rows::kQueries, cols.qk);
    copy_if_needed(plan, plan.inputs, params.k, Rows::kKeys, cols.qk);
    copy_if_needed(plan, plan.inputs, params.v, Rows::kKeys, cols.v);
    if constexpr (requires { params.dout; }) {
        copy_if_needed(plan, plan.inputs, params.out, Rows::kQueries, cols.v);
        copy_if_needed(plan, plan.inputs, params.dout, Rows::kQueries, cols.v);
    }
    params.head_dim = ceil_div(cols.qk, 8) * 8;
    params.head_dim_v = ceil_div(cols.v, 8) * 8;
    params.aligned = true;
}

// A variant that was asked for by name computes all gradients: FA3's kernel is not for FA1 and FA2
// then.
void choose_bias_gradient(BackwardPlan& plan) {
    const BackwardParams& params = plan.params;
    BackwardKernel& kernel = plan.kernel;
    if (params.dbias == nullptr || kernel.stored_dbias != StoredDBias::kNo) return;
    const Operand operands[] = {operand_of(params, params.q, Rows::kQueries, params.head_dim),
                                operand_of(params, params.k, Rows::kKeys, params.head_dim),
                                operand_of(params, params.v, Rows::kKeys, params.head_dim_v),
                                operand_of(params, params.dout, Rows::kQueries, params.head_dim_v)};
    if (plan.wanted == Variant::kFa3)
        kernel.bias_gradient = fa3_bias_gradient_kernel(params, operands, kernel.gpu);
    if (kernel.bias_gradient || params.bias.sizes[2] != params.seqlen_q ||
        tuning::find_row(tuning::kSharedBiasGradient, head_dims(params), mma_options_of(params)) ==
            nullptr)
        return;
    kernel.ctas_per_dbias = shared_bias_ctas(params, kernel.gpu);
    if (kernel.ctas_per_dbias == 1) return;
    int64_t elements = kernel.ctas_per_dbias;
    for (const int size : params.bias.sizes) elements *= size;
    plan.workspace.reserve(kernel.dbias_sums, elements);
}

cudaError_t copy_if_any(const RowCopies& copies, bool back, cudaStream_t stream) {
    return copies.count == 0 ? cudaSuccess : copy_rows(copies, back, stream);
}

// See copy_bias() in fa2.cpp.
template <class Plan>
cudaError_t copy_bias_if_needed(const Plan& plan, cudaStream_t stream) {
    if (plan.given_bias.data == nullptr) return cudaSuccess;
    const Bias& bias = plan.params.bias;
    TiledBias copy{.data = const_cast<void*>(bias.data), .element_bytes = 2, .is_copy = true};
    std::ranges::copy(bias.sizes, copy.sizes);
    std::ranges::copy_n(bias.strides, 3, copy.strides);
    copy.sizes[3] = ceil_div(bias.sizes[3], 8) * 8;
    return tile_bias(plan.given_bias, plan.params.element_type, copy, stream);
}

std::string copied_inputs(const Call& call) {
    std::string names;
    for (const Operand& x : call.operands)
        if (!x.is_reached_by_tma() && call.may_copy(x))
            names += text(names.empty() ? "" : ", ", x.name);
    return names;
}

// A single query, as in decoding: the heads that share a key head become the rows of one tile, by
// strides alone. Only where no option differs between these heads or rows.
void pack_gqa_view(ForwardParams& params) {
    const int group = group_or_one(params);
    const bool alike = params.alibi_slopes == nullptr && params.bias.data == nullptr &&
                       params.sink == nullptr && params.rng_state == nullptr &&
                       params.tile_mask.kv_tiles == nullptr && !params.q_descale.by_query_head;
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

void begin_plan(ForwardPlan& plan, const GpuModel& gpu) {
    pack_gqa_view(plan.params);
    plan.params.group = group_or_one(plan.params);
    plan.params.by_group = Divisor(plan.params.group);
    plan.mask = summary_of(plan.params);
    plan.kernel.gpu = gpu;
}

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
    const bool by_time = may_stand_in && pass == Pass::kForward && !call.params.batch_invariant;
    while (true) {
        const VariantRow& row = row_for(variant);
        std::string reason = row.unsupported_reason(call, pass);
        const std::string copied = row.copies_rows ? copied_inputs(call) : "";
        if (reason.empty() && by_time && !copied.empty() && !copies_pay(call))
            reason = text("would copy rows of ", copied, " for few queries");
        if (reason.empty() && by_time && row.copies_rows && !bias_pays(call))
            reason = "has no split keys with a bias, which few queries need";
        if (reason.empty()) return {variant, why, copied};
        why = text("variant '", name_of(variant), "' ", reason);
        if (!may_stand_in || !row.stand_in) return {std::nullopt, why};
        if (has_8_bit_keys(call.params))
            return {std::nullopt, why + ", and no other variant has 8-bit inputs"};
        variant = *row.stand_in;
    }
}

void make_plan(ForwardPlan& plan, const GpuModel& gpu) {
    ForwardParams& params = plan.params;
    const VariantRow& row = row_for(plan.variant);
    const HeadDims cols = head_dims(params);
    begin_plan(plan, gpu);
    if (row.copies_rows) copy_inputs(plan);
    row.plan_forward(plan);
    if (row.copies_rows) copy_if_needed(plan, plan.results, params.out, Rows::kQueries, cols.v);
}

void make_plan(BackwardPlan& plan, const GpuModel& gpu) {
    BackwardParams& params = plan.params;
    const VariantRow& row = row_for(plan.variant);
    const HeadDims cols = head_dims(params);
    plan.mask = summary_of(params);
    plan.kernel.gpu = gpu;
    if (params.deterministic && params.cu_seqlens_q != nullptr) {
        plan.cu_seqlens_q = params.cu_seqlens_q;
        plan.cu_seqlens_k = params.cu_seqlens_k;
        plan.workspace.reserve(params.cu_seqlens_q, params.batch + 1);
        plan.workspace.reserve(params.cu_seqlens_k, params.batch + 1);
    }
    if (row.copies_rows) copy_inputs(plan);
    row.plan_backward(plan);
    choose_bias_gradient(plan);
    if (!row.copies_rows) return;
    const bool parts = params.parts > 1;
    copy_if_needed(plan, plan.results, params.dq, Rows::kQueries, cols.qk);
    copy_if_needed(plan, plan.results, parts ? plan.dk : params.dk, Rows::kKeys, cols.qk);
    copy_if_needed(plan, plan.results, parts ? plan.dv : params.dv, Rows::kKeys, cols.v);
}

cudaError_t launch(const ForwardPlan& plan, cudaStream_t stream) {
    cudaError_t status = copy_if_any(plan.inputs, /*back=*/false, stream);
    if (status == cudaSuccess) status = copy_bias_if_needed(plan, stream);
    if (status == cudaSuccess)
        status = plan.kernel.ctas_per_bias > 0 ? run_short_forward(plan, stream)
                                               : row_for(plan.variant).forward(plan, stream);
    // Every GPU that runs FA3 has programmatic dependent launch.
    if (status == cudaSuccess && plan.kernel.has_splits)
        status = combine_splits(plan.params, plan.kernel.head_dims, stream,
                                /*pdl=*/plan.variant == Variant::kFa3);
    if (status == cudaSuccess && plan.few_queries) status = run_fa3_few_queries(plan, stream);
    return status == cudaSuccess ? copy_if_any(plan.results, /*back=*/true, stream) : status;
}

cudaError_t launch(const BackwardPlan& plan, cudaStream_t stream) {
    const BackwardParams& params = plan.params;
    cudaError_t status = copy_if_any(plan.inputs, /*back=*/false, stream);
    if (status == cudaSuccess) status = copy_bias_if_needed(plan, stream);
    if (status == cudaSuccess && plan.cu_seqlens_q != nullptr)
        status = sanitize_cu_seqlens(params, plan.cu_seqlens_q, plan.cu_seqlens_k, stream);
    if (status == cudaSuccess)
        status = plan.kernel.ctas_per_bias > 0 ? run_short_backward(plan, stream)
                                               : row_for(plan.variant).backward(plan, stream);
    if (status == cudaSuccess && params.dbias != nullptr &&
        plan.kernel.stored_dbias == StoredDBias::kNo)
        status = plan.kernel.bias_gradient ? run_fa3_bias_gradient(plan, stream)
                                           : bias_gradient(params, plan.kernel, stream);
    if (status == cudaSuccess && params.dsink != nullptr) status = sink_gradient(params, stream);
    return status == cudaSuccess ? copy_if_any(plan.results, /*back=*/true, stream) : status;
}

}  // namespace flash_ext
