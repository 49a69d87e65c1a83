// What a variant has in fa1.cpp, fa2.cpp or fa3.cpp, and steps of planning that variants share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

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
    return pad_head_dims({static_cast<int>(sizes.head_dim), static_cast<int>(sizes.head_dim_v)});
}
inline HeadDims head_dims(const AttentionParams& params) {
    return pad_head_dims({params.head_dim, params.head_dim_v}, params.element_type);
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

// Shared memory of a kernel that does not exist: more than any GPU has.
inline constexpr int kTooManyBytes = 1 << 30;

inline constexpr const char* kNo8Bits = "has no 8-bit inputs";

// Packed GQA and splits for a GPU that works on `at_once` Q tiles at a time. `few_keys` as for
// num_splits(). Returns the number of tiles, without splits.
inline int64_t plan_splits(ForwardPlan& plan, bool may_pack_gqa, int at_once, int few_keys) {
    ForwardParams& params = plan.params;
    const QueryTiles q_tiles = query_tiles(params, tuning::kForwardBlockQ, may_pack_gqa);
    const int64_t tiles = tile_count(params, q_tiles);
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits =
        num_splits(params, tiles, params.heads_q / std::max(q_tiles.heads, 1), at_once, few_keys);
    // Packed GQA goes the same way, unless a CTA has one tile (store_group() in FA3's forward).
    plan.kernel.has_splits = params.num_splits > 1 || (params.pack_gqa_log2 > 0 && tiles > at_once);
    if (plan.kernel.has_splits) {
        const int64_t rows = params.num_splits * statistics_rows(params);
        plan.workspace.reserve(params.o_partial, rows * head_dims(params).v);
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

// FA1's and FA2's. The plain form of the kernels has whole Q tiles only.
inline void plan_mma_backward(BackwardPlan& plan, HeadDims kernel_dims, int block_q,
                              Features least) {
    BackwardParams& params = plan.params;
    const bool whole_tiles = params.seqlen_q % block_q == 0;
    plan.kernel.form =
        std::max({features_of(params), least, whole_tiles ? Features::kPlain : Features::kVarlen});
    params.may_have_large_lse = true;
    reserve_rows(plan, kernel_dims.qk);
}

}  // namespace flash_ext
