#include <algorithm>

#include "plan/steps.h"
#include "plan/transposed_v.cuh"
#include "plan/tuning_backward.h"

namespace flash_ext {
namespace {

// With which lse is never large, see kernels/common/large_lse.cuh.
constexpr double kMaxFa3Softcap = 2048;

// Why TMA cannot load the bias, nor a copy of it; empty where it can.
std::string bias_reason(const AttentionParams& params) {
    const Bias& bias = params.bias;
    if (bias.data == nullptr) return "";
    if (is_varlen(params)) return "has no bias with sequences of different lengths";
    if (std::ranges::count(bias.sizes, 0) > 0) return "has no empty bias";
    const HeadDims dims = head_dims(params);
    if (bias.type == BiasType::kFloat32 && max_of(dims.qk, dims.v) > tuning::kFa3Float32BiasHeadDim)
        return text("has no float32 bias above head dimension ", tuning::kFa3Float32BiasHeadDim);
    return "";
}

// Makes rows of `row` elements adjacent. Returns the number of all elements.
int64_t set_strides(TiledBias& tiled, int64_t row) {
    int64_t elements = row;
    for (const int dim : {2, 1, 0}) {
        tiled.strides[dim] = elements;
        elements *= tiled.sizes[dim];
    }
    return elements;
}

// The bias as TMA loads it: as it is, or as a copy in the workspace.
template <class Plan>
void plan_bias(Plan& plan) {
    const Bias& bias = plan.params.bias;
    TiledBias& tiled = plan.kernel.bias;
    if (bias.data == nullptr) return;
    tiled.element_bytes = bias.type == BiasType::kFloat32 ? 4 : 2;
    bool as_it_is = bias.type != BiasType::kBool &&
                    reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 && bias.sizes[2] > 1 &&
                    bias.sizes[3] > 1;
    for (int dim = 0; dim < 4; ++dim) {
        tiled.broadcast[dim] = bias.sizes[dim] == 1;
        tiled.sizes[dim] = bias.sizes[dim];
        if (dim == 3) continue;
        tiled.strides[dim] = bias.strides[dim];
        const int64_t bytes = tiled.element_bytes * bias.strides[dim];
        as_it_is = as_it_is && (tiled.broadcast[dim] || (bytes > 0 && bytes % 16 == 0));
    }
    tiled.is_copy = !as_it_is;
    if (as_it_is) {
        tiled.data = const_cast<void*>(bias.data);
        return;
    }
    if (tiled.broadcast[2]) tiled.sizes[2] = kBiasTile;
    tiled.sizes[3] = tiled.broadcast[3] ? kBiasTile : ceil_div(bias.sizes[3], 8) * 8;
    plan.workspace.reserve(tiled.data, tiled.element_bytes * set_strides(tiled, tiled.sizes[3]));
}

// Can the backward itself write dbias, and where?
void plan_dbias(BackwardPlan& plan) {
    const BackwardParams& params = plan.params;
    const Bias& bias = params.bias;
    BackwardKernel& kernel = plan.kernel;
    if (params.dbias == nullptr || bias.sizes[2] != params.seqlen_q ||
        bias.sizes[3] != params.seqlen_k)
        return;
    // Three terms would be added in any order. For terms in float32 there are no registers.
    const int terms = params.batch / bias.sizes[0] * (params.heads_q / bias.sizes[1]);
    if (terms > (kernel.bias.element_bytes == 4 ? 1 : 2)) return;
    kernel.stored_dbias = terms == 1 ? StoredDBias::kStored : StoredDBias::kAdded;
    kernel.zeroes_dbias = terms == 1 && !plan.mask.sees_all;
    TiledBias& dbias = kernel.dbias;
    dbias.element_bytes = kernel.bias.element_bytes;
    const int64_t chunk = 16 / dbias.element_bytes;
    for (int dim = 0; dim < 4; ++dim) {
        dbias.broadcast[dim] = bias.sizes[dim] == 1;
        dbias.sizes[dim] = bias.sizes[dim];
    }
    const int64_t elements = set_strides(dbias, ceil_div<int64_t>(bias.sizes[3], chunk) * chunk);
    const bool elsewhere =
        bias.sizes[3] % chunk != 0 || reinterpret_cast<uintptr_t>(params.dbias) % 16 != 0;
    dbias.is_copy = elsewhere || params.dbias_factor != 1.f;
    dbias.data = params.dbias;
    if (elsewhere) plan.workspace.reserve(dbias.data, dbias.element_bytes * elements);
}

// Of the call with its rows in aligned copies.
OptionSet aligned_options(const AttentionParams& params) {
    constexpr unsigned kUnaligned = static_cast<unsigned>(OptionSet::kUnaligned);
    return static_cast<OptionSet>(static_cast<unsigned>(options_of(params)) & ~kUnaligned);
}

// Why the bits of a row would depend on other rows, or on the number of queries; empty where they
// do not. A sink is there before the first key, so that it matters which tile comes first. Kernels
// for other options have no pages, or other tiles with them.
std::string invariant_reason(const AttentionParams& params) {
    if (!params.batch_invariant) return "";
    const OptionSet options = options_of(params);
    if (params.sink == nullptr && !visits_elements(options) && !contains(options, OptionSet::kMask))
        return "";
    return "is batch-invariant without sink, softcap, ALiBi, bias, mask, dropout and a scale that "
           "is not positive";
}

// Why the kernels do not run a forward with pages, whose rows cannot be copied.
std::string paged_reason(const Call& call) {
    for (const Operand& x : call.operands)
        if (!x.is_aligned() && !call.may_copy(x))
            return text("needs pages of ", x.name,
                        " with rows that start and end on 16-byte boundaries");
    if (decodes(call)) return "";
    const std::string reason =
        table_reason(call, aligned_options(call.params), tuning::kFa3Forward);
    return reason.empty() ? pages_reason(call.params) : reason;
}

std::string fa3_unsupported_reason(const Call& call, Pass pass) {
    if (call.gpu.major != 9)
        return text("needs a Hopper GPU (compute capability 9.0), this one has ", call.gpu.major,
                    ".", call.gpu.minor);
#ifndef FLASH_EXT_SM90A
    return "was not built: add 90a to FLASH_EXT_CUDA_ARCHS";
#endif
    const AttentionParams& params = call.params;
    const bool fp8 = has_8_bit_keys(params);
    const bool backward = pass == Pass::kBackward;
    if (fp8 && backward) return "has no backward for 8-bit inputs";
    for (const Operand& x : call.operands) {
        // A tensor map needs memory.
        if (backward && std::ranges::count(x.sizes, 0) > 0)
            return text("has no backward for an empty ", x.name);
        if (x.is_reached_by_tma() || (!fp8 && !call.may_copy(x))) continue;
        if (fp8 && !x.is_aligned())
            return text("needs rows of ", x.name, " that start and end on 16-byte boundaries");
        if (fp8)
            return text("needs rows of ", x.name,
                        " that are not one row repeated, within 32 GiB of memory");
        if (!x.aligned_copy().is_reached_by_tma())
            return text("needs less than 32 GiB for a copy of ", x.name, " in aligned memory");
    }
    if (params.v_transposed && params.head_dim_v % 16 != 0)
        return "needs a head dimension of v that is a multiple of 16";
    if (const std::string why = bias_reason(params); !why.empty()) return why;
    if (const std::string why = backward ? "" : invariant_reason(params); !why.empty()) return why;
    const OptionSet needed = aligned_options(params);
    const bool paged = params.pages.table != nullptr && !backward && !fp8;
    const std::string reason =
        paged      ? paged_reason(call)
        : backward ? table_reason(call, needed, tuning::kFa3Backward, tuning::kFa3BackwardWide)
        : has_8_bits(params) ? table_reason(call, needed, tuning::kFa3ForwardFp8)
        : fp8                ? table_reason(call, needed, tuning::kFa3Decode8Bits)
                             : table_reason(call, needed, tuning::kFa3Forward);
    if (!reason.empty()) return reason;
    if (params.softcap > kMaxFa3Softcap) return "has no softcap above 2048";
    // The limit of epoch_counter.cuh, with the smallest tiles.
    const int rows = backward ? tuning::kFa3BackwardWideBlock : tuning::kForwardBlockQ;
    const auto tiles = [&](int heads, int length) {
        return int64_t{heads} * tensor_batches(params) * tile_numbers(params, length, rows);
    };
    const int64_t keys = backward ? tiles(params.heads_k, params.seqlen_k) : 0;
    if (std::max(keys, tiles(params.heads_q, params.seqlen_q)) >= int64_t{1} << 24)
        return text("needs fewer than 2^24 tiles of ", rows, " rows");
    return "";
}

// The call by which tiles and splits are chosen. Where short sequences are another kernel's, one
// prompt is supposed beside them: the mean of all lengths would fit neither.
AttentionParams expected_call(const ForwardPlan& plan) {
    AttentionParams params = plan.params;
    if (plan.few_queries) {
        params.seqlen_q = max_of(params.seqlen_q - (params.batch - 1), 1);
        params.batch = 1;
        params.cu_seqlens_q = nullptr;
    }
    return params;
}

// Does a batch-invariant call have keys for several splits?
bool has_fixed_splits(const AttentionParams& params) {
    if (!params.batch_invariant) return false;
    const auto* row = tuning::find_row(tuning::kFa3Forward, head_dims(params), options_of(params));
    const int block_kv = tuning::fa3_forward_shape(row->head_dims, tuning::kVarlenSplits,
                                                   tuning::Fa3ForwardTile::kSmallQ)
                             .block_kv;
    return params.seqlen_k > fixed_split_tiles(block_kv) * block_kv;
}

// Splits of a batch-invariant call. The CTA that has all of a Q tile merges them in memory of its
// own; otherwise they are stored, as other splits are.
void plan_fixed_splits(ForwardPlan& plan, int block_kv, const QueryTiles& q_tiles) {
    ForwardParams& params = plan.params;
    const int dim_v = plan.kernel.head_dims.v;
    const GpuModel& gpu = plan.kernel.gpu;
    const int64_t tiles = tile_count(params, q_tiles);
    params.num_splits =
        max_of(ceil_div(params.seqlen_k, fixed_split_tiles(block_kv) * block_kv), 1);
    params.split_ctas =
        fixed_split_ctas(params, tiles, params.heads_q / max_of(q_tiles.heads, 1), dim_v, gpu);
    if (params.split_ctas > 1) {
        reserve_splits(plan);
    } else if (params.num_splits > 1) {
        plan.workspace.reserve(params.o_partial, std::min<int64_t>(tiles, gpu.sms) *
                                                     tuning::kForwardBlockQ * (dim_v + 8));
    }
}

void plan_fa3_forward(ForwardPlan& plan) {
    ForwardParams& params = plan.params;
    ForwardKernel& kernel = plan.kernel;
    const GpuModel& gpu = kernel.gpu;
    const bool may_pack_gqa = may_pack_gqa_of(params);
    // Few queries of many heads are short sequences, too, unless a group's heads share their keys.
    const bool many_heads = int64_t{params.batch} * params.heads_q > gpu.sms &&
                            (!may_pack_gqa || group_or_one(params) < 4);
    if (many_heads && plan_short_forward(plan)) return;
    if (plan_fa3_decode(plan.workspace, params, kernel, plan.mask, may_pack_gqa)) return;
    if (plan_short_forward(plan)) return;
    plan_few_queries(plan, may_pack_gqa);
    plan_bias(plan);

    // Splits and packed GQA, by the smallest Q tiles.
    const AttentionParams expected = expected_call(plan);
    const QueryTiles small_q =
        query_tiles(expected, plan.mask, tuning::kForwardBlockQ, may_pack_gqa);
    const int64_t tiles = tile_count(params, small_q);
    const int64_t expected_tiles = tile_count(expected, small_q);
    params.num_splits = forced("FLASH_EXT_FORCE_SPLITS")
                            .value_or(num_splits(expected, plan.mask, expected_tiles,
                                                 params.heads_q / std::max(small_q.heads, 1),
                                                 gpu.sms, tuning::kFa3SplitKeys));
    if (params.bias.data != nullptr || params.batch_invariant) params.num_splits = 1;
    params.pack_gqa_log2 = small_q.pack_gqa_log2;
    const bool splits =
        params.num_splits > 1 || params.pack_gqa_log2 > 0 || has_fixed_splits(params);

    // The kernel and its tile.
    const OptionSet needed = options_of(params) | only_if(splits, OptionSet::kSplits);
    const bool fp8 = has_8_bits(params);
    fp8 ? choose_kernel(plan, tuning::kFa3ForwardFp8, needed)
        : choose_kernel(plan, tuning::kFa3Forward, needed);
    const HeadDims dims = kernel.head_dims;
    if (tuning::Fa3ForwardRow::has_tile(kernel.options, tuning::Fa3ForwardTile::kUsual)) {
        const auto tile = forced("FLASH_EXT_FORCE_TILE");
        // Only the smallest tile has a float32 bias.
        kernel.tile =
            params.batch_invariant || kernel.bias.element_bytes == 4
                ? tuning::Fa3ForwardTile::kSmallQ
            : tile ? static_cast<tuning::Fa3ForwardTile>(*tile)
                   : fa3_forward_tile(dims, expected, plan.mask, expected_tiles <= gpu.sms, gpu);
        if (!tuning::Fa3ForwardRow::has_tile(kernel.options, kernel.tile)) {
            choose_kernel(plan, tuning::kFa3Forward, needed | OptionSet::kSplits);
            kernel.tile = tuning::Fa3ForwardTile::kSmallQ;
        }
    }
    const tuning::Fa3ForwardShape shape =
        fp8 ? tuning::fa3_forward_fp8_shape(dims, kernel.tile)
            : tuning::fa3_forward_shape(dims, kernel.options, kernel.tile);
    const bool fixed = params.batch_invariant && splits;
    if (fixed) plan_fixed_splits(plan, shape.block_kv, small_q);
    const int ctas = fixed ? params.split_ctas : params.num_splits;  // of a tile
    TileOrder order = forward_tile_order(
        params, plan.mask, {small_q.heads, 64 * shape.consumers >> params.pack_gqa_log2}, dims, 1,
        gpu, ctas, /*may_take_whole_heads=*/true);
    if (params.tile_mask.kv_tiles != nullptr && !contains(kernel.options, OptionSet::kSplits))
        order.first = longest_first(order);
    params.tile_order = order;

    if (fp8 && !shape.transposes_v && !params.v_transposed) {
        kernel.row_major_v = params.v;
        params.v_transposed = true;
        params.v = transposed_view(
            nullptr, params.heads_k, params.head_dim_v,
            transposed_keys(params.seqlen_k, params.batch, params.cu_seqlens_k != nullptr));
        plan.workspace.reserve(params.v.data, tensor_batches(params) * params.v.batch_stride);
    }
    // Packed GQA goes the way of splits, unless a CTA has one tile (store_tile()).
    if (!fixed && (params.num_splits > 1 || (splits && tiles > gpu.sms))) reserve_splits(plan);
    if (tiles * ctas > gpu.sms) plan.workspace.reserve(params.counters, 1);
}

cudaError_t run_fa3_forward(const ForwardPlan& plan, cudaStream_t stream) {
    const ForwardParams& params = plan.params;
    const ForwardKernel& kernel = plan.kernel;
    if (has_8_bits(params)) {
        if (kernel.row_major_v)
            if (const cudaError_t status = transpose_v(params, *kernel.row_major_v, stream);
                status != cudaSuccess)
                return status;
        return dispatch_head_dims<tuning::kFa3ForwardFp8>(
            kernel.head_dims, [&](auto dim, auto dim_v) {
                return fa3_forward_fp8<dim, dim_v>(params, kernel, stream);
            });
    }
    if (has_8_bit_keys(params))
        return dispatch_head_dims<tuning::kFa3Decode8Bits>(
            kernel.head_dims, [&](auto dim, auto dim_v) {
                return fa3_decode_8_bits<dim, dim_v>(params, kernel, stream);
            });
    if (kernel.decode_tile) return run_fa3_decode(params, kernel, stream);
    return dispatch_head_dims<tuning::kFa3Forward>(kernel.head_dims, [&](auto dim, auto dim_v) {
        return fa3_forward<dim, dim_v>(params, kernel, stream);
    });
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
WideTileOrders wide_tile_orders(const BackwardParams& params, const MaskSummary& mask,
                                HeadDims dims, int ds_heads, const GpuModel& gpu) {
    const bool masked = mask.is_masked();
    const int group = group_of(params);
    const int64_t bytes = element_bytes(params.element_type);
    const int64_t q_do_bytes = row_pair_bytes(params, dims) * params.seqlen_q * group;
    const TileOrder keys = make_tile_order(
        tile_numbers(params, params.seqlen_k, tuning::kFa3BackwardWideBlock),
        ds_heads > 0 ? ds_heads : params.heads_k, ds_heads > 0 ? 1 : tensor_batches(params),
        masked || params.cu_seqlens_q != nullptr, q_do_bytes, 1, gpu,
        l2_group_waves(params, masked));
    if (ds_heads == 0)
        return {keys, forward_tile_order(params, mask, {params.heads_q, tuning::kFa3DQBlockQ}, dims,
                                         1, gpu)};
    return {keys, make_tile_order(ceil_div(params.seqlen_q, tuning::kFa3DQBlockQ), ds_heads * group,
                                  1, masked, bytes * dims.qk * params.seqlen_k / group, 1, gpu)};
}

// Parts are heads of `params`.
void plan_wide_backward(BackwardPlan& plan, const BackwardParams& params) {
    BackwardKernel& kernel = plan.kernel;
    const HeadDims dims = kernel.head_dims;
    const GpuModel& gpu = kernel.gpu;
    plan.workspace.reserve(plan.params.tile_count_semaphore, 2);
    kernel.ds_tiles = DSWorkspaceTiles(params, plan.mask);
    kernel.ds_heads = ds_heads_at_a_time(params, kernel.ds_tiles);
    kernel.wide = wide_tile_orders(params, plan.mask, dims, kernel.ds_heads, gpu);
    if (kernel.ds_heads == 0) return;
    plan.workspace.reserve(kernel.ds, kernel.ds_heads * ds_head_bytes(params, kernel.ds_tiles));
    const int last = params.heads_k * params.batch % kernel.ds_heads;
    if (last > 0) kernel.last_wide = wide_tile_orders(params, plan.mask, dims, last, gpu);
}

void plan_fa3_backward(BackwardPlan& plan) {
    if (plan_short_backward(plan)) return;
    BackwardParams& params = plan.params;
    BackwardKernel& kernel = plan.kernel;
    const GpuModel& gpu = kernel.gpu;
    kernel.many_queries = mean_queries(params) >= tuning::kManyQueries;
    params.may_have_large_lse = params.softcap == 0.f;
    const bool wide = !choose_kernel(plan, tuning::kFa3Backward, options_of(params)) &&
                      choose_kernel(plan, tuning::kFa3BackwardWide, options_of(params));
    const HeadDims dims = kernel.head_dims;
    plan_bias(plan);
    plan_dbias(plan);
    const int block_kv = wide ? tuning::kFa3BackwardWideBlock : tuning::kFa3BackwardBlockKV;
    Parts parts = params.tile_mask.kv_tiles == nullptr
                      ? choose_parts(params, plan.mask,
                                     tile_numbers(params, params.seqlen_k, block_kv), wide, gpu)
                      : masked_parts(params);
    // A CTA zeroes what it has no Q tiles for: then they are all that see its keys.
    if (kernel.zeroes_dbias) parts.queries = 1;
    split_heads(plan, parts);
    reserve_rows(plan, wide ? 0 : dims.qk);
    const BackwardParams of_parts = with_parts_as_heads(params);
    if (wide) return plan_wide_backward(plan, of_parts);
    TileOrder order = backward_tile_order(of_parts, plan.mask, block_kv, dims, 1, gpu);
    if (params.tile_mask.kv_tiles != nullptr) {  // a Q tile may be in no list
        order.first = params.deterministic ? 0 : longest_first(order);
    } else {
        kernel.lead = lead_of(of_parts, plan.mask, order, dims, gpu);
        params.dq_accum_zeroed = kernel.lead == 0 && !params.deterministic;
    }
    params.tile_order = order;
    if (tuning::fa3_backward_shape(dims, kernel.options, kernel.many_queries).by_matmul()) {
        const int64_t rows = workspace_rows(params);
        plan.workspace.reserve(params.lse_rows, rows);
        plan.workspace.reserve(params.delta_rows, rows);
    }
}

cudaError_t run_fa3_backward(const BackwardPlan& plan, cudaStream_t stream) {
    const BackwardParams& params = plan.params;
    const HeadDims dims = plan.kernel.head_dims;
    cudaError_t status = dispatch_head_dims<tuning::kFa3Backward>(dims, [&](auto dim, auto dim_v) {
        return fa3_backward<dim, dim_v>(params, plan.kernel, stream);
    });
    if (status == kNoKernel)
        status = dispatch_head_dims<tuning::kFa3BackwardWide>(dims, [&](auto dim, auto dim_v) {
            return fa3_backward_wide<dim, dim_v>(params, plan.kernel, stream);
        });
    if (status == cudaSuccess && plan.kernel.dbias.is_copy)
        status = copy_dbias(params, plan.kernel.dbias, stream);
    if (status != cudaSuccess || params.parts == 1) return status;
    return sum_parts(params, plan.dk, plan.dv, stream);
}

}  // namespace

std::optional<BiasGradientKernel> fa3_bias_gradient_kernel(const BackwardParams& params,
                                                           std::span<const Operand> operands,
                                                           const GpuModel& gpu) {
#ifndef FLASH_EXT_SM90A
    return std::nullopt;
#endif
    const auto* row =
        tuning::find_row(tuning::kFa3BiasGradient, head_dims(params), options_of(params));
    if (gpu.major != 9 || row == nullptr) return std::nullopt;
    for (const Operand& x : operands)
        if (!x.is_reached_by_tma() || std::ranges::count(x.sizes, 0) > 0) return std::nullopt;
    const auto is_small = [&](int dim, int length, int block) {
        const int size = params.bias.sizes[dim];
        return (size == 1 ? length : size) <= block;
    };
    BiasGradientKernel kernel{row->head_dims};
    kernel.small_tiles = is_small(2, params.seqlen_q, row->small.block_q) &&
                         is_small(3, params.seqlen_k, row->small.block_kv);
    const tuning::Fa3BiasGradientShape tile = kernel.small_tiles ? row->small : row->usual;
    kernel.ctas = dbias_ctas(params, tile.block_q, tile.block_kv, gpu);
    return kernel;
}

cudaError_t run_fa3_bias_gradient(const BackwardPlan& plan, cudaStream_t stream) {
    return dispatch_head_dims<tuning::kFa3BiasGradient>(
        plan.kernel.bias_gradient->head_dims, [&](auto dim, auto dim_v) {
            return fa3_bias_gradient<dim, dim_v>(plan.params, plan.kernel, stream);
        });
}

constexpr VariantRow kFa3Row{fa3_unsupported_reason, Variant::kFa2,   plan_fa3_forward,
                             plan_fa3_backward,      run_fa3_forward, run_fa3_backward,
                             /*copies_rows=*/true};

}  // namespace flash_ext
