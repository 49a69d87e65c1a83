#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

#include "plan/dispatch.h"
#include "plan/ds_workspace.cuh"
#include "plan/head_dims.h"
#include "plan/launchers.h"
#include "plan/parts.h"
#include "plan/tuning.h"
#include "plan/variant_table.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "schedule/launch_epoch.h"
#include "schedule/packed_gqa.h"
#include "schedule/split_kv.cuh"

namespace flash_ext {
namespace {

HeadDims head_dims(const Sizes& sizes) {
    return pad_head_dims({static_cast<int>(sizes.head_dim), static_cast<int>(sizes.head_dim_v)});
}

HeadDims head_dims(const AttentionParams& params) {
    return pad_head_dims({params.head_dim, params.head_dim_v}, params.element_type);
}

// --- Workspaces ---

// Does each split of the keys of a Q tile store its own results, which a kernel combines?
bool has_splits(const ForwardParams& params) {
    return params.decode_tile == DecodeTile::kNone && params.o_partial != nullptr;
}

// Packed GQA and splits for a GPU that works on `at_once` Q tiles at a time. Returns the number of
// tiles. `few_keys` as for num_splits().
int64_t plan_splits(ForwardPlan& plan, bool may_pack_gqa, int at_once, int few_keys) {
    ForwardParams& params = plan.params;
    const QueryTiles q_tiles = query_tiles(params, tuning::kForwardBlockQ, may_pack_gqa);
    const int64_t tiles = tile_count(params, q_tiles);
    params.few_tiles = tiles <= at_once;
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits =
        num_splits(params, tiles, params.heads_q / std::max(q_tiles.heads, 1), at_once, few_keys);
    // Packed GQA goes the same way, unless a CTA has one tile (store_group() in FA3's forward).
    if (params.num_splits > 1 || (params.pack_gqa_log2 > 0 && tiles > at_once)) {
        const int64_t rows = params.num_splits * statistics_rows(params);
        plan.workspace.reserve(params.o_partial, rows * head_dims(params).v);
        plan.workspace.reserve(params.statistics_partial, rows);
    }
    return tiles * params.num_splits;
}

// Statistics of the rows; dQ's sum, with dq_accum_cols columns; and its semaphores.
void reserve_rows(BackwardPlan& plan, int dq_accum_cols) {
    BackwardParams& params = plan.params;
    params.dq_accum_cols = dq_accum_cols;
    params.row_groups = row_groups(params);
    params.padding_row = padding_row(params);
    const int64_t rows = workspace_rows(params);
    plan.workspace.reserve(params.lse_log2, rows);
    plan.workspace.reserve(params.delta, rows);
    plan.workspace.reserve(params.reference, rows);
    plan.workspace.reserve(params.dq_accum, params.padding_row * dq_accum_cols);
    plan.workspace.reserve(params.dq_semaphore, 1 + params.padding_row / kWorkspaceRows +
                                                    q_tile_count(params, kPreprocessRows));
    params.large_lse.epoch = launch_epoch();
    plan.workspace.reserve(params.large_lse.word, 1);
}

// FA1's and FA2's.
void plan_mma_backward(BackwardPlan& plan, HeadDims kernel_dims) {
    plan.params.may_have_large_lse = true;
    reserve_rows(plan, kernel_dims.qk);
}

// Some GPUs (compute capability 8.6, 8.9, 12.x) have less shared memory than the A100.
std::string shared_memory_reason(const Call& call, Pass pass, int needed) {
    if (needed <= call.device.shared_bytes) return "";
    std::ostringstream text;
    text << "needs " << needed << " bytes of shared memory per block "
         << (pass == Pass::kBackward ? "in the backward pass " : "") << "at head dimensions "
         << call.sizes.head_dim << " and " << call.sizes.head_dim_v << ", this GPU has "
         << call.device.shared_bytes;
    return text.str();
}

// Shared memory of a kernel that does not exist: more than any GPU has.
constexpr int kTooManyBytes = 1 << 30;

constexpr const char* kNo8Bits = "has no 8-bit inputs";

// --- FA1 ---

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

void plan_fa1_forward(ForwardPlan& plan, const Device& /*device*/) {
    ForwardParams& params = plan.params;
    const HeadDims dims = tuning::fa1_head_dims(head_dims(params));
    const int block_q = tuning::fa1_forward(dims).block_q;
    const int64_t rows = tile_count(params, {params.heads_q, block_q}) * block_q;
    plan.workspace.reserve(params.out_accum, rows * dims.v);
    plan.workspace.reserve(params.row_statistics, rows * 2);
}

cudaError_t run_fa1_forward(const ForwardParams& params, cudaStream_t stream) {
    return dispatch_fa1_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        return fa1_forward<dim, dim_v>(params, stream);
    });
}

void plan_fa1_backward(BackwardPlan& plan, const Device& /*device*/) {
    plan_mma_backward(plan, tuning::fa1_head_dims(head_dims(plan.params)));
}

cudaError_t run_fa1_backward(const BackwardParams& params, cudaStream_t stream) {
    return dispatch_fa1_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        return fa1_backward<dim, dim_v>(params, stream);
    });
}

// --- FA2 ---

std::string fa2_unsupported_reason(const Call& call, Pass pass) {
    if (call.has_8_bits()) return kNo8Bits;
    const auto bytes = [&](auto dim, auto dim_v) {
        return pass == Pass::kForward ? fa2_forward_shared_bytes<dim, dim_v>()
                                      : fa2_backward_shared_bytes<dim, dim_v>();
    };
    return shared_memory_reason(call, pass,
                                dispatch_head_dims(head_dims(call.sizes), bytes, kTooManyBytes));
}

void plan_fa2_forward(ForwardPlan& plan, const Device& device) {
    // An SM has 1 KB more shared memory than a CTA may have, and reserves 1 KB for each CTA.
    constexpr int kReserved = 1024;
    const HeadDims dims = head_dims(plan.params);
    const auto bytes = [](auto dim, auto dim_v) { return fa2_forward_shared_bytes<dim, dim_v>(); };
    const int needed = dispatch_head_dims(dims, bytes, kTooManyBytes);
    const int fitting = (device.shared_bytes + kReserved) / (needed + kReserved);
    const int tuned = tuning::fa2_forward(dims, features_of(plan.params)).ctas_per_sm;
    plan_splits(plan, /*may_pack_gqa=*/false, device.multiprocessors * std::min(tuned, fitting),
                tuning::kFa2SplitKeys);
}

cudaError_t run_fa2_forward(const ForwardParams& params, cudaStream_t stream) {
    const cudaError_t status = dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        return fa2_forward<dim, dim_v>(params, stream);
    });
    if (status != cudaSuccess || !has_splits(params)) return status;
    return combine_splits(params, stream, /*pdl=*/false);
}

void plan_fa2_backward(BackwardPlan& plan, const Device& /*device*/) {
    plan_mma_backward(plan, head_dims(plan.params));
}

cudaError_t run_fa2_backward(const BackwardParams& params, cudaStream_t stream) {
    return dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        return fa2_backward<dim, dim_v>(params, stream);
    });
}

// --- FA3 ---

// With which lse is never large, see kernels/common/large_lse.cuh.
constexpr double kMaxFa3Softcap = 2048;

std::string fa3_unsupported_reason(const Call& call, Pass pass) {
    if (call.device.major != 9)
        return "needs a Hopper GPU (compute capability 9.0), this one has " +
               std::to_string(call.device.major) + "." + std::to_string(call.device.minor);
#ifndef FLASH_EXT_SM90A
    return "was not built: add 90a to FLASH_EXT_CUDA_ARCHS";
#endif
    const Sizes& sizes = call.sizes;
    const bool backward = pass == Pass::kBackward;
    if (call.has_8_bits() && backward) return "has no backward for 8-bit inputs";
    if (call.has_dropout) return "has no dropout";
    if (call.has_bias) return "has no bias";
    if (call.has_8_bits() && call.softcap != 0) return "has no softcap with 8-bit inputs";
    if (call.has_8_bits() && call.has_alibi) return "has no ALiBi with 8-bit inputs";
    if (call.softcap > kMaxFa3Softcap) return "has no softcap above 2048";
    for (const Operand& x : call.operands) {
        // A tensor map needs memory.
        if (backward && x.is_empty()) return std::string("has no backward for an empty ") + x.name;
        if (!x.is_aligned())
            return std::string("needs rows of ") + x.name +
                   " that start and end on 16-byte boundaries";
        if (!x.is_reached_by_tma())
            return std::string("needs rows of ") + x.name +
                   " that are not one row repeated, within 32 GiB of memory";
    }
    // The limit of dynamic_persistent_scheduler.cuh, with the smallest tiles.
    const int rows = backward ? tuning::kMinFa3BackwardBlock : tuning::kForwardBlockQ;
    const auto tiles = [&](int64_t heads, int64_t length) {
        return heads * sizes.tensor_batches() *
               (length / rows + 1 + (sizes.varlen ? sizes.batch + 1 : 0));
    };
    const int64_t keys = backward ? tiles(sizes.heads_k, sizes.seqlen_k) : 0;
    if (std::max(keys, tiles(sizes.heads_q, sizes.seqlen_q)) >= int64_t{1} << 24)
        return "needs fewer than 2^24 tiles of " + std::to_string(rows) + " rows";
    return "";
}

// By the kernel for few queries, if they are. The splits of a tile are a cluster, or several.
bool plan_fa3_decode(ForwardPlan& plan, bool may_pack_gqa, const Device& device) {
    ForwardParams& params = plan.params;
    if (element_bytes(params.element_type) == 1) return false;
    const auto shape = [&](DecodeTile tile) { return tuning::fa3_decode(head_dims(params), tile); };
    const auto query_tiles = [&](DecodeTile tile) {
        return few_query_tiles(params, shape(tile).rows, may_pack_gqa);
    };
    DecodeTile tile = DecodeTile::kFewRows;
    if (query_tiles(tile).heads == 0) tile = DecodeTile::kManyRows;
    const QueryTiles q_tiles = query_tiles(tile);
    if (q_tiles.heads == 0) return false;
    const int64_t tiles = tile_count(params, q_tiles);
    // Many tiles with many rows: not only memory is the limit.
    if (tile == DecodeTile::kManyRows && 2 * tiles > device.multiprocessors) return false;

    const int keys = keys_seen(params);
    const int64_t bytes = int64_t{params.batch} * keys * params.heads_k *
                          (params.head_dim + params.head_dim_v) *
                          element_bytes(params.element_type);
    const Decoding call{.tiles = tiles,
                        .keys = keys,
                        .in_l2 = bytes <= kL2Share,
                        .alone = tuning::decoding_time_alone(tile),
                        .multiprocessors = device.multiprocessors,
                        .ctas_per_sm = shape(tile).ctas_per_sm};
    int best = 1;
    const auto consider = [&](int splits) {
        if (decoding_time(call, splits) < decoding_time(call, best)) best = splits;
    };
    for (int splits = 2; splits < kMostClusterSplits; splits *= 2) consider(splits);
    for (int clusters = 1; clusters <= kMostClusters; ++clusters)
        consider(clusters * kMostClusterSplits);
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits = best;
    if (decode_clusters(best) > 1) {
        const int64_t rows = tiles * decode_clusters(best) * shape(tile).rows;
        plan.workspace.reserve(params.o_partial, rows * decode_row_floats(head_dims(params).v));
        plan.workspace.reserve(params.counters, tiles * kMostClusterSplits);
    }
    const bool one_cta_per_sm = tiles * best <= most_ctas_in_clusters(best, device.multiprocessors);
    if (tile == DecodeTile::kFewRows && one_cta_per_sm && keys > tuning::kFewDecodeKeys * best)
        tile = DecodeTile::kManyKeys;
    params.decode_tile = tile;
    return true;
}

void plan_fa3_forward(ForwardPlan& plan, const Device& device) {
    ForwardParams& params = plan.params;
    // ALiBi differs between heads, and TMA needs a positive stride between them.
    const bool may_pack_gqa = params.alibi_slopes == nullptr && params.q.head_stride > 0;
    if (plan_fa3_decode(plan, may_pack_gqa, device)) return;
    const int64_t tiles =
        plan_splits(plan, may_pack_gqa, device.multiprocessors, tuning::kFa3SplitKeys);
    if (tiles > device.multiprocessors) plan.workspace.reserve(params.counters, 1);
}

cudaError_t run_fa3_forward(const ForwardParams& params, cudaStream_t stream) {
    const cudaError_t status = dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        const auto run_8_bits = [&](auto type) {
            if constexpr (has_kernels({dim, dim_v}, type)) {
                return fa3_forward_fp8<type, dim, dim_v>(params, stream);
            } else {
                return kNoKernel;
            }
        };
        if (element_bytes(params.element_type) == 1)
            return dispatch<ElementType::kFloat8, ElementType::kInt8>(params.element_type,
                                                                      run_8_bits);
        if (params.decode_tile != DecodeTile::kNone) return fa3_decode<dim, dim_v>(params, stream);
        return fa3_forward<dim, dim_v>(params, stream);
    });
    if (status != cudaSuccess || !has_splits(params)) return status;
    return combine_splits(params, stream, /*pdl=*/true);
}

// From here on the parts are heads of K and V.
void split_heads(BackwardPlan& plan, Parts parts) {
    BackwardParams& params = plan.params;
    params.parts = parts.groups * parts.queries;
    if (params.parts == 1) return;
    params.query_parts = parts.queries;
    params.heads_k *= params.parts;
    const int64_t rows = int64_t{tensor_batches(params)} * params.seqlen_k * params.heads_k;
    plan.workspace.reserve(params.dk_parts, rows * params.head_dim);
    plan.workspace.reserve(params.dv_parts, rows * params.head_dim_v);
}

void plan_fa3_backward(BackwardPlan& plan, const Device& device) {
    BackwardParams& params = plan.params;
    params.may_have_large_lse = params.softcap == 0.f;
    const HeadDims dims = tuning::fa3_backward_head_dims(head_dims(params));
    const int key_tiles =
        tile_numbers(params, params.seqlen_k, tuning::fa3_backward_block_kv(dims));
    const bool wide = tuning::is_fa3_backward_wide(dims);
    split_heads(plan, choose_parts(params, key_tiles, wide, device.multiprocessors));
    if (!wide) {
        const tuning::Fa3Backward tuned = tuning::fa3_backward(
            dims, features_of(params), mean_queries(params) >= tuning::kManyQueries);
        reserve_rows(plan, dims.qk);
        if (tuned.steps().by_matmul) {
            const int64_t rows = workspace_rows(params);
            plan.workspace.reserve(params.lse_rows, rows);
            plan.workspace.reserve(params.delta_rows, rows);
        }
    } else {
        reserve_rows(plan, /*dq_accum_cols=*/0);
        plan.workspace.reserve(params.tile_count_semaphore, 2);
        params.ds_bytes = ds_workspace_bytes(params);
        if (params.ds_bytes > 0) plan.workspace.reserve(params.ds, params.ds_bytes);
    }
}

// The gradient of a part, as that of a head: a float in the place of two elements.
TensorView parts_view(const BackwardParams& params, float* parts, int64_t cols) {
    const int64_t row = params.heads_k * 2 * cols;
    return {parts, params.seqlen_k * row, row, 2 * cols};
}

cudaError_t run_fa3_backward(const BackwardParams& call, cudaStream_t stream) {
    BackwardParams params = call;
    if (params.parts > 1) {
        params.dk = parts_view(params, params.dk_parts, params.head_dim);
        params.dv = parts_view(params, params.dv_parts, params.head_dim_v);
    }
    const cudaError_t status = dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        constexpr HeadDims kDims = tuning::fa3_backward_head_dims({dim, dim_v});
        if constexpr (tuning::is_fa3_backward_wide(kDims)) {
            return fa3_backward_wide<kDims.qk, kDims.v>(params, stream);
        } else {
            return fa3_backward<kDims.qk, kDims.v>(params, stream);
        }
    });
    return status != cudaSuccess || params.parts == 1 ? status : sum_parts(call, stream);
}

// --- The table, in the order of Variant ---

constexpr VariantRow kTable[] = {
    {.name = name_of(Variant::kFa1),
     .unsupported_reason = fa1_unsupported_reason,
     .stand_in = std::nullopt,
     .plan_forward = plan_fa1_forward,
     .plan_backward = plan_fa1_backward,
     .forward = run_fa1_forward,
     .backward = run_fa1_backward},
    {.name = name_of(Variant::kFa2),
     .unsupported_reason = fa2_unsupported_reason,
     .stand_in = std::nullopt,
     .plan_forward = plan_fa2_forward,
     .plan_backward = plan_fa2_backward,
     .forward = run_fa2_forward,
     .backward = run_fa2_backward},
    {.name = name_of(Variant::kFa3),
     .unsupported_reason = fa3_unsupported_reason,
     .stand_in = Variant::kFa2,
     .plan_forward = plan_fa3_forward,
     .plan_backward = plan_fa3_backward,
     .forward = run_fa3_forward,
     .backward = run_fa3_backward},
};
static_assert(std::size(kTable) == kVariants);

}  // namespace

const VariantRow& row_of(Variant variant) { return kTable[static_cast<int>(variant)]; }

}  // namespace flash_ext
