// What a variant has in fa1.cpp, fa2.cpp or fa3.cpp, and steps of planning that variants share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "plan/cost.h"
#include "plan/dispatch.h"
#include "plan/plan.h"
#include "plan/text.h"
#include "plan/workspace_rows.cuh"
#include "schedule/launch_epoch.h"

namespace flash_ext {

// All that is specific to a variant on the host.
struct VariantRow {
    // Why its kernels cannot run a pass of the call; empty where they can.
    std::string (*unsupported_reason)(const Call& call, Pass pass);
    // The variant that stands in where they cannot.
    std::optional<Variant> stand_in;
    // All decisions. The params are complete but for these.
    void (*plan_forward)(ForwardPlan& plan, const GpuModel& gpu);
    void (*plan_backward)(BackwardPlan& plan, const GpuModel& gpu);
    cudaError_t (*forward)(const ForwardPlan& plan, cudaStream_t stream);
    cudaError_t (*backward)(const BackwardPlan& plan, cudaStream_t stream);
};

extern const VariantRow kFa1Row, kFa2Row, kFa3Row;

inline HeadDims head_dims(const Sizes& sizes) {
    return {static_cast<int>(sizes.head_dim), static_cast<int>(sizes.head_dim_v)};
}
inline HeadDims head_dims(const AttentionParams& params) {
    return {params.head_dim, params.head_dim_v};
}

// Why no kernel of the tables runs the call; empty if one does.
template <class... Tables>
std::string table_reason(const Call& call, const Tables&... tables) {
    constexpr std::pair<const char*, OptionSet> kOptions[] = {{"dropout", OptionSet::kDropout},
                                                              {"bias", OptionSet::kBias},
                                                              {"softcap", OptionSet::kSoftcap},
                                                              {"ALiBi", OptionSet::kAlibi}};
    const OptionSet needed = call.options();
    for (const auto& [name, option] : kOptions)
        if (contains(needed, option) && !(tuning::find_row(tables, {}, option) || ...))
            return text("has no ", name, call.has_8_bits() ? " with 8-bit inputs" : "");
    const HeadDims dims = head_dims(call.sizes);
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
    plan.kernel.options = row->options.sets[row->options.index_for(needed)];
    plan.params.changes_scores = changes_scores(plan.kernel.options);
    return true;
}

// Why a kernel that needs so much cannot run; empty where it can. Some GPUs (compute capability
// 8.6, 8.9, 12.x) have less shared memory than the A100.
inline std::string shared_memory_reason(const Call& call, Pass pass, int needed) {
    if (needed <= call.device.shared_bytes) return "";
    return text("needs ", needed, " bytes of shared memory per block ",
                pass == Pass::kBackward ? "in the backward pass " : "", "at head dimensions ",
                call.sizes.head_dim, " and ", call.sizes.head_dim_v, ", this GPU has ",
                call.device.shared_bytes);
}

// FA1's and FA2's, whose kernels need bytes(constants qk and v) of shared memory.
template <auto& kTable, class Bytes>
std::string mma_unsupported_reason(const Call& call, Pass pass, Bytes bytes) {
    if (call.has_8_bits()) return "has no 8-bit inputs";
    const std::string reason = table_reason(call, kTable);
    if (!reason.empty()) return reason;
    const auto* row = tuning::find_row(kTable, head_dims(call.sizes), call.options());
    return shared_memory_reason(call, pass, dispatch_head_dims<kTable>(row->head_dims, bytes, 0));
}

// Packed GQA and splits for a GPU that works on `at_once` Q tiles at a time. `few_keys` as for
// num_splits(). Returns the number of tiles, without splits.
inline int64_t plan_splits(ForwardPlan& plan, bool may_pack_gqa, int at_once, int few_keys) {
    ForwardParams& params = plan.params;
    const QueryTiles q_tiles = query_tiles(params, plan.mask, tuning::kForwardBlockQ, may_pack_gqa);
    const int64_t tiles = tile_count(params, q_tiles);
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits = num_splits(params, plan.mask, tiles,
                                   params.heads_q / std::max(q_tiles.heads, 1), at_once, few_keys);
    // Packed GQA goes the same way, unless a CTA has one tile (store_group() in FA3's forward).
    plan.kernel.has_splits = params.num_splits > 1 || (params.pack_gqa_log2 > 0 && tiles > at_once);
    if (plan.kernel.has_splits) {
        const int64_t rows = params.num_splits * statistics_rows(params);
        plan.workspace.reserve(params.o_partial, rows * plan.kernel.head_dims.v);
        plan.workspace.reserve(params.statistics_partial, rows);
    }
    return tiles;
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

// FA1's and FA2's. Only kernels for varlen have Q tiles that are not whole.
template <class Row, int kRows>
void plan_mma_backward(BackwardPlan& plan, const Row (&table)[kRows]) {
    BackwardParams& params = plan.params;
    OptionSet needed = options_of(params);
    const Row* row = tuning::find_row(table, head_dims(params), needed);
    if (row != nullptr && params.seqlen_q % row->plain.block_q != 0)
        needed = needed | OptionSet::kVarlen;
    choose_kernel(plan, table, needed);
    params.may_have_large_lse = true;
    reserve_rows(plan, plan.kernel.head_dims.qk);
}

}  // namespace flash_ext
