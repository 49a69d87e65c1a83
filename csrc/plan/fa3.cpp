#include "plan/steps.h"

namespace flash_ext {
namespace {

// With which lse is never large, see kernels/common/large_lse.cuh.
constexpr double kMaxFa3Softcap = 2048;

std::string fa3_unsupported_reason(const Call& call, Pass pass) {
    if (call.device.major != 9)
        return text("needs a Hopper GPU (compute capability 9.0), this one has ", call.device.major,
                    ".", call.device.minor);
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
        if (backward && x.is_empty()) return text("has no backward for an empty ", x.name);
        if (!x.is_aligned())
            return text("needs rows of ", x.name, " that start and end on 16-byte boundaries");
        if (!x.is_reached_by_tma())
            return text("needs rows of ", x.name,
                        " that are not one row repeated, within 32 GiB of memory");
    }
    // The limit of dynamic_persistent_scheduler.cuh, with the smallest tiles.
    const int rows = backward ? tuning::kMinFa3BackwardBlock : tuning::kForwardBlockQ;
    const auto tiles = [&](int64_t heads, int64_t length) {
        return heads * sizes.tensor_batches() *
               (length / rows + 1 + (sizes.varlen ? sizes.batch + 1 : 0));
    };
    const int64_t keys = backward ? tiles(sizes.heads_k, sizes.seqlen_k) : 0;
    if (std::max(keys, tiles(sizes.heads_q, sizes.seqlen_q)) >= int64_t{1} << 24)
        return text("needs fewer than 2^24 tiles of ", rows, " rows");
    return "";
}

// By the kernel for few queries, if they are. The splits of a tile are a cluster, or several.
bool plan_fa3_decode(ForwardPlan& plan, bool may_pack_gqa, const GpuModel& gpu) {
    using enum tuning::Fa3ForwardTile;
    ForwardParams& params = plan.params;
    if (element_bytes(params.element_type) == 1) return false;
    const HeadDims dims = head_dims(params);
    const auto q_tiles_of = [&](tuning::Fa3ForwardTile tile) {
        return few_query_tiles(params, tuning::fa3_decode(dims, tile).rows, may_pack_gqa);
    };
    const auto tile = q_tiles_of(kFewRows).heads > 0 ? kFewRows : kManyRows;
    const QueryTiles q_tiles = q_tiles_of(tile);
    if (q_tiles.heads == 0) return false;
    const int64_t tiles = tile_count(params, q_tiles);
    // Many tiles with many rows: not only memory is the limit.
    if (tile == kManyRows && 2 * tiles > gpu.sms) return false;

    const tuning::Fa3DecodeShape shape = tuning::fa3_decode(dims, tile);
    const int splits = decode_splits(params, tiles, tile, shape.ctas_per_sm, gpu);
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits = splits;
    params.schedule = {tile_numbers(params, params.seqlen_q, q_tiles.queries) * splits,
                       q_tiles.heads, tensor_batches(params)};
    if (decode_clusters(splits) > 1) {
        const int64_t rows = tiles * decode_clusters(splits) * shape.rows;
        plan.workspace.reserve(params.o_partial, rows * decode_row_floats(dims.v));
        plan.workspace.reserve(params.counters, tiles * kMostClusterSplits);
    }
    const bool one_cta_per_sm = tiles * splits <= sms_of_clusters(splits, gpu);
    const bool many_keys = keys_seen(params) > tuning::kFewDecodeKeys * splits;
    plan.kernel.tile = tile == kFewRows && one_cta_per_sm && many_keys ? kManyKeys : tile;
    return true;
}

// The rows of a Q tile.
int block_q_of(const ForwardParams& params, const ForwardKernel& kernel) {
    const HeadDims dims = head_dims(params);
    return 64 * (element_bytes(params.element_type) == 1
                     ? tuning::fa3_forward_fp8(dims, kernel.tile)
                     : tuning::fa3_forward(dims, kernel.form, kernel.tile))
                    .consumers;
}

void plan_fa3_forward(ForwardPlan& plan, const GpuModel& gpu) {
    ForwardParams& params = plan.params;
    ForwardKernel& kernel = plan.kernel;
    kernel.form = features_of(params);
    kernel.sms = gpu.sms;
    // ALiBi differs between heads, and TMA needs a positive stride between them.
    const bool may_pack_gqa = params.alibi_slopes == nullptr && params.q.head_stride > 0;
    if (plan_fa3_decode(plan, may_pack_gqa, gpu)) return;
    const HeadDims dims = head_dims(params);
    const int64_t tiles = plan_splits(plan, may_pack_gqa, gpu.sms, tuning::kFa3SplitKeys);
    if (tiles * params.num_splits > gpu.sms) plan.workspace.reserve(params.counters, 1);
    const bool packed = params.pack_gqa_log2 > 0;
    kernel.tile = params.num_splits > 1 || packed
                      ? tuning::Fa3ForwardTile::kSplits
                      : fa3_forward_tile(dims, params, tiles <= gpu.sms, gpu);
    const QueryTiles q_tiles{packed ? params.heads_k : params.heads_q,
                             block_q_of(params, kernel) >> params.pack_gqa_log2};
    params.schedule = forward_schedule(params, q_tiles, dims, 1, gpu, params.num_splits,
                                       /*may_take_whole_heads=*/true);
}

cudaError_t run_fa3_forward(const ForwardPlan& plan, cudaStream_t stream) {
    const ForwardParams& params = plan.params;
    const ForwardKernel& kernel = plan.kernel;
    const cudaError_t status = dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        const auto run_8_bits = [&](auto type) {
            if constexpr (has_kernels({dim, dim_v}, type)) {
                return fa3_forward_fp8<type, dim, dim_v>(params, kernel, stream);
            } else {
                return kNoKernel;
            }
        };
        if (element_bytes(params.element_type) == 1)
            return dispatch<ElementType::kFloat8, ElementType::kInt8>(params.element_type,
                                                                      run_8_bits);
        if (tuning::is_decoding(kernel.tile)) return fa3_decode<dim, dim_v>(params, kernel, stream);
        return fa3_forward<dim, dim_v>(params, kernel, stream);
    });
    if (status != cudaSuccess || !kernel.has_splits) return status;
    return combine_splits(params, stream, /*pdl=*/true);
}

// dK and dV of parts in the workspace, with a float in the place of two elements.
void split_heads(BackwardPlan& plan, Parts parts) {
    BackwardParams& params = plan.params;
    params.parts = parts.groups * parts.queries;
    params.query_parts = parts.queries;
    if (params.parts == 1) return;
    const auto replace = [&](TensorView& view, TensorView& given, int64_t cols) {
        const int64_t row = params.heads_k * params.parts * 2 * cols;
        given = view;
        view = {nullptr, params.seqlen_k * row, row, 2 * cols};
        plan.workspace.reserve(view.data, tensor_batches(params) * params.seqlen_k * row * 2);
    };
    replace(params.dk, plan.dk, params.head_dim);
    replace(params.dv, plan.dv, params.head_dim_v);
}

// The orders of tiles with the dS of `ds_heads` heads of K and V, or without any of all heads.
// Parts are heads of params.
WideSchedules wide_schedules(const BackwardParams& params, HeadDims dims, int ds_heads,
                             const GpuModel& gpu) {
    const bool masked = is_masked(params);
    const int group = group_of(params);
    const int64_t bytes = element_bytes(params.element_type);
    const int kv_tiles = tile_numbers(params, params.seqlen_k, tuning::kFa3BackwardWideBlock);
    const int64_t q_do_bytes = bytes * (dims.qk + dims.v) * params.seqlen_q * group;
    if (ds_heads == 0)
        return {make_schedule(kv_tiles, params.heads_k, tensor_batches(params),
                              masked || params.cu_seqlens_q != nullptr, q_do_bytes, 1, gpu,
                              l2_group_waves(params, masked)),
                forward_schedule(params, {params.heads_q, tuning::kFa3DQBlockQ}, dims, 1, gpu)};
    return {make_schedule(kv_tiles, ds_heads, 1, masked, q_do_bytes, 1, gpu),
            make_schedule(ceil_div(params.seqlen_q, tuning::kFa3DQBlockQ), ds_heads * group, 1,
                          masked, bytes * dims.qk * params.seqlen_k / group, 1, gpu)};
}

// Parts are heads of `params`.
void plan_wide_backward(BackwardPlan& plan, const BackwardParams& params, HeadDims dims,
                        const GpuModel& gpu) {
    BackwardKernel& kernel = plan.kernel;
    plan.workspace.reserve(plan.params.tile_count_semaphore, 2);
    kernel.ds_heads = ds_heads_at_a_time(params);
    kernel.wide = wide_schedules(params, dims, kernel.ds_heads, gpu);
    if (kernel.ds_heads == 0) return;
    plan.workspace.reserve(kernel.ds, kernel.ds_heads * ds_head_bytes(params));
    const int last = params.heads_k * params.batch % kernel.ds_heads;
    if (last > 0) kernel.last_wide = wide_schedules(params, dims, last, gpu);
}

void plan_fa3_backward(BackwardPlan& plan, const GpuModel& gpu) {
    BackwardParams& params = plan.params;
    BackwardKernel& kernel = plan.kernel;
    kernel.form = features_of(params);
    kernel.sms = gpu.sms;
    kernel.many_queries = mean_queries(params) >= tuning::kManyQueries;
    params.may_have_large_lse = params.softcap == 0.f;
    const HeadDims dims = tuning::fa3_backward_head_dims(head_dims(params));
    const int block_kv = tuning::fa3_backward_block_kv(dims);
    const bool wide = tuning::is_fa3_backward_wide(dims);
    split_heads(plan,
                choose_parts(params, tile_numbers(params, params.seqlen_k, block_kv), wide, gpu));
    reserve_rows(plan, wide ? 0 : dims.qk);
    const BackwardParams of_parts = with_parts_as_heads(params);
    if (wide) return plan_wide_backward(plan, of_parts, dims, gpu);
    params.schedule = backward_schedule(of_parts, block_kv, dims, 1, gpu);
    kernel.lead = lead_of(of_parts, params.schedule, dims, gpu);
    params.dq_accum_zeroed = kernel.lead == 0 && !params.deterministic;
    if (tuning::fa3_backward(dims, kernel.form, kernel.many_queries).by_matmul()) {
        const int64_t rows = workspace_rows(params);
        plan.workspace.reserve(params.lse_rows, rows);
        plan.workspace.reserve(params.delta_rows, rows);
    }
}

cudaError_t run_fa3_backward(const BackwardPlan& plan, cudaStream_t stream) {
    const BackwardParams& params = plan.params;
    const cudaError_t status = dispatch_head_dims(head_dims(params), [&](auto dim, auto dim_v) {
        constexpr HeadDims kDims = tuning::fa3_backward_head_dims({dim, dim_v});
        if constexpr (tuning::is_fa3_backward_wide(kDims)) {
            return fa3_backward_wide<kDims.qk, kDims.v>(params, plan.kernel, stream);
        } else {
            return fa3_backward<kDims.qk, kDims.v>(params, plan.kernel, stream);
        }
    });
    if (status != cudaSuccess || params.parts == 1) return status;
    return sum_parts(params, plan.dk, plan.dv, stream);
}

}  // namespace

constexpr VariantRow kFa3Row{fa3_unsupported_reason, Variant::kFa2,   plan_fa3_forward,
                             plan_fa3_backward,      run_fa3_forward, run_fa3_backward};

}  // namespace flash_ext
