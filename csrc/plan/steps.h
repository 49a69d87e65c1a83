// What a variant has in fa1.cpp, fa2.cpp or fa3.cpp, and steps of planning that variants share.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "plan/cost.h"
#include "plan/plan.h"
#include "plan/workspace_rows.cuh"
#include "schedule/launch_epoch.h"

namespace flash_ext {

struct VariantRow {
    // Why its kernels cannot run a pass of the call; empty where they can.
    std::string (*unsupported_reason)(const Call& call, Pass pass);
    // The variant that stands in where they cannot.
    std::optional<Variant> stand_in;
    // All decisions. The params are complete but for these.
    void (*plan_forward)(ForwardPlan& plan);
    void (*plan_backward)(BackwardPlan& plan);
    cudaError_t (*forward)(const ForwardPlan& plan, cudaStream_t stream);
    cudaError_t (*backward)(const BackwardPlan& plan, cudaStream_t stream);
    // Do they load rows by TMA? Rows that it cannot address are then copied before the pass, and
    // after it copied back.
    bool copies_rows = false;
};

// CTAs that an SM has the memory for: 1 KB more than a CTA may have, of which each reserves 1 KB.
constexpr int fitting_ctas(const GpuModel& gpu, int bytes_of_cta) {
    constexpr int kReserved = 1024;
    return (gpu.shared_bytes + kReserved) / (bytes_of_cta + kReserved);
}

extern const VariantRow kFa1Row, kFa2Row, kFa3Row;

// FA3's kernel for the gradient of the call's bias, if it has one that runs on this GPU.
// Operands: q, k, v, dout.
std::optional<BiasGradientKernel> fa3_bias_gradient_kernel(const BackwardParams& params,
                                                           std::span<const Operand> operands,
                                                           const GpuModel& gpu);
// Plan a call of short sequences, whichever variant has it; false if they are not, or for options
// of other kernels.
bool plan_short_forward(ForwardPlan& plan);
bool plan_short_backward(BackwardPlan& plan);
cudaError_t run_short_forward(const ForwardPlan& plan, cudaStream_t stream);
cudaError_t run_short_backward(const BackwardPlan& plan, cudaStream_t stream);
// FA3's kernel for few queries, in fa3_decode.cpp: does it run the call, or the sequences of few
// queries beside the plan's?
bool decodes(const Call& call);
bool plan_fa3_decode(Workspace& workspace, ForwardParams& params, ForwardKernel& kernel,
                     const MaskSummary& mask, bool may_pack_gqa, bool beside = false);
void plan_few_queries(ForwardPlan& plan, bool may_pack_gqa);
bool may_pack_gqa_of(const AttentionParams& params);
std::string pages_reason(const AttentionParams& params);
cudaError_t run_fa3_decode(const ForwardParams& params, const ForwardKernel& kernel,
                           cudaStream_t stream);
cudaError_t run_fa3_few_queries(const ForwardPlan& plan, cudaStream_t stream);
cudaError_t run_fa3_bias_gradient(const BackwardPlan& plan, cudaStream_t stream);

// What benchmarks/tune.py asks for in place of the plan's choice: the number in an environment
// variable, which may change between calls. Only if FLASH_EXT_TUNE was set at the first call.
inline std::optional<int> forced(const char* name) {
    static const bool kTunes = std::getenv("FLASH_EXT_TUNE") != nullptr;
    const char* value = kTunes ? std::getenv(name) : nullptr;
    return value == nullptr ? std::nullopt : std::optional(std::atoi(value));
}

// A tensor of the call, as far as its params describe it.
inline Operand operand_of(const AttentionParams& params, const TensorView& view, Rows rows,
                          int cols) {
    Operand x{.name = "",
              .data = view.data,
              .sizes = {tensor_batches(params), params.seqlen_q, params.heads_q, cols},
              .strides = {view.batch_stride, view.row_stride, view.head_stride, 1},
              .element_bytes = element_bytes(params.element_type)};
    if (rows == Rows::kQueries) return x;
    const Pages& pages = params.pages;
    x.sizes[0] = pages.table != nullptr ? pages.count : x.sizes[0];
    x.sizes[1] = pages.table != nullptr ? pages.size : params.seqlen_k;
    x.sizes[2] = params.heads_k;
    return x;
}

void begin_plan(ForwardPlan& plan, const GpuModel& gpu);

// Why no kernel of the tables runs the call with the options `needed`; empty if one does.
template <class... Tables>
std::string table_reason(const Call& call, OptionSet needed, const Tables&... tables) {
    constexpr std::pair<const char*, OptionSet> kOptions[] = {
        {"dropout", OptionSet::kDropout},  {"bias", OptionSet::kBias},
        {"softcap", OptionSet::kSoftcap},  {"ALiBi", OptionSet::kAlibi},
        {"page table", OptionSet::kPages}, {"mask", OptionSet::kMask}};
    for (const auto& [name, option] : kOptions)
        if (contains(needed, option) && !(tuning::find_row(tables, {}, option) || ...))
            return text("has no ", name, has_8_bit_keys(call.params) ? " with 8-bit inputs" : "");
    const HeadDims dims = head_dims(call.params);
    if ((tuning::find_row(tables, dims, needed) || ...)) return "";
    return text("has no kernel for head dimensions ", dims.qk, " and ", dims.v,
                needed == OptionSet::kNone ? "" : " with these options");
}

// Names the row of the table that runs the call, and the smallest of the row's sets with the
// options. False if there is none.
template <class Plan, class Row, int kRows>
bool choose_kernel(Plan& plan, const Row (&table)[kRows], OptionSet needed) {
    const Row* row = tuning::find_row(table, head_dims(plan.params), needed);
    if (row == nullptr) return false;
    plan.kernel.head_dims = row->head_dims;
    plan.kernel.options = row->options.set_for(needed);
    plan.params.changes_scores = changes_scores(plan.kernel.options);
    return true;
}

inline void reserve_splits(ForwardPlan& plan) {
    ForwardParams& params = plan.params;
    plan.kernel.has_splits = true;
    const int64_t rows = params.num_splits * statistics_rows(params);
    plan.workspace.reserve(params.o_partial, rows * plan.kernel.head_dims.v);
    plan.workspace.reserve(params.statistics_partial, rows);
}

// Statistics of the rows; dQ's sum, with dq_accum_cols columns; and its semaphores.
inline void reserve_rows(BackwardPlan& plan, int dq_accum_cols) {
    BackwardParams& params = plan.params;
    params.dq_accum_cols = dq_accum_cols;
    params.row_groups = row_groups(params);
    params.padding_row = padding_row(params);
    const int64_t rows = workspace_rows(params);
    plan.workspace.reserve(params.lse_log2, rows);
    plan.workspace.reserve(params.minus_delta, rows);
    plan.workspace.reserve(params.reference, rows);
    plan.workspace.reserve(params.dq_accum, params.padding_row * dq_accum_cols);
    plan.workspace.reserve(params.dq_semaphore, 1 + params.padding_row / kWorkspaceRows +
                                                    q_tile_count(params, kPreprocessRows));
    params.large_lse.epoch = launch_epoch();
    plan.workspace.reserve(params.large_lse.word, 1);
}

// FA1's or FA2's kernels, by their tuning tables and launchers.
template <auto& kForwardTable, auto& kBackwardTable, template <int, int> class Launchers>
struct MmaKernels {
    static int forward_shared_bytes(HeadDims dims) {
        return dispatch_head_dims<kForwardTable>(
            dims, [](auto d, auto dv) { return Launchers<d, dv>::forward_shared_bytes(); }, 0);
    }
    static int backward_shared_bytes(HeadDims dims) {
        return dispatch_head_dims<kBackwardTable>(
            dims, [](auto d, auto dv) { return Launchers<d, dv>::backward_shared_bytes(); }, 0);
    }

    // Some GPUs (compute capability 8.6, 8.9, 12.x) have less shared memory than the A100.
    static std::string unsupported_reason(const Call& call, Pass pass) {
        if (has_8_bit_keys(call.params)) return "has no 8-bit inputs";
        const bool forward = pass == Pass::kForward;
        const OptionSet options = options_of(call.params);
        const std::string reason = forward ? table_reason(call, options, kForwardTable)
                                           : table_reason(call, options, kBackwardTable);
        if (!reason.empty()) return reason;
        const HeadDims dims = head_dims(call.params);
        const int needed =
            forward
                ? forward_shared_bytes(tuning::find_row(kForwardTable, dims, options)->head_dims)
                : backward_shared_bytes(tuning::find_row(kBackwardTable, dims, options)->head_dims);
        if (needed <= call.gpu.shared_bytes) return "";
        return text("needs ", needed, " bytes of shared memory per block ",
                    forward ? "" : "in the backward pass ", "at head dimensions ", dims.qk, " and ",
                    dims.v, ", this GPU has ", call.gpu.shared_bytes);
    }

    // Only kernels for varlen have Q tiles that are not whole.
    static void plan_backward(BackwardPlan& plan) {
        BackwardParams& params = plan.params;
        OptionSet needed = mma_options_of(params);
        const auto* row = tuning::find_row(kBackwardTable, head_dims(params), needed);
        if (row != nullptr && params.seqlen_q % row->plain.block_q != 0)
            needed = needed | OptionSet::kVarlen;
        choose_kernel(plan, kBackwardTable, needed);
        params.may_have_large_lse = true;
        reserve_rows(plan, plan.kernel.head_dims.qk);
    }

    static cudaError_t forward(const ForwardPlan& plan, cudaStream_t stream) {
        return dispatch_head_dims<kForwardTable>(plan.kernel.head_dims, [&](auto d, auto dv) {
            return Launchers<d, dv>::forward(plan.params, plan.kernel, stream);
        });
    }
    static cudaError_t backward(const BackwardPlan& plan, cudaStream_t stream) {
        return dispatch_head_dims<kBackwardTable>(plan.kernel.head_dims, [&](auto d, auto dv) {
            return Launchers<d, dv>::backward(plan.params, plan.kernel, stream);
        });
    }
};

}  // namespace flash_ext
