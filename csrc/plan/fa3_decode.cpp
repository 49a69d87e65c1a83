#include <algorithm>

#include "plan/steps.h"

namespace flash_ext {
namespace {

// The order of the tiles of the kernel for few queries, and the memory of its splits, if they are
// more than a cluster. Splits by length: the grid and the memory are for the most clusters.
void plan_decode_splits(Workspace& workspace, ForwardParams& params, const ForwardKernel& kernel,
                        const QueryTiles& q_tiles, int rows) {
    const SplitsByLength& by_length = kernel.by_length;
    const int numbers = tile_numbers(params, params.seqlen_q, q_tiles.queries);
    const int ctas = kernel.decode_cluster;
    const int clusters = params.num_splits / ctas;
    const int64_t tiles = tile_count(params, q_tiles);
    params.tile_order =
        TileOrder{numbers * params.num_splits, q_tiles.heads, tensor_batches(params)};
    int64_t stored = clusters > 1 ? tiles * clusters : 0;
    int64_t counters = clusters > 1 ? tiles : 0;
    if (by_length.clusters > 0) {
        params.tile_order = TileOrder{(numbers * tensor_batches(params) + by_length.most()) * ctas,
                                      q_tiles.heads, 1};
        stored = counters = int64_t{q_tiles.heads} * by_length.most();
    }
    if (stored == 0) return;
    workspace.reserve(params.o_partial, stored * rows * decode_row_floats(kernel.head_dims.v));
    workspace.reserve(params.counters, counters * ctas);
}

}  // namespace

// Can TMA load the pages of K and V, of 16 bits? A box has eight rows of a page or a multiple.
std::string pages_reason(const AttentionParams& params) {
    if (params.pages.size % 8 != 0)
        return text("loads pages for many queries if their size is a multiple of 8, this one is ",
                    params.pages.size);
    for (const auto& [view, cols] :
         {std::pair(params.k, params.head_dim), std::pair(params.v, params.head_dim_v)})
        if (!operand_of(params, view, Rows::kKeys, cols).is_reached_by_tma())
            return "loads pages for many queries if they are not one row repeated, within 32 GiB "
                   "of memory";
    return "";
}

// By the kernel for few queries, if they are, or if k and v alone have 8 bits. The splits of a tile
// are a cluster, or several. beside: of a batch's sequences it has those with few queries.
bool plan_fa3_decode(Workspace& workspace, ForwardParams& params, ForwardKernel& kernel,
                     const MaskSummary& mask, bool may_pack_gqa, bool beside) {
    using enum tuning::Fa3DecodeTile;
    const GpuModel& gpu = kernel.gpu;
    if (has_8_bits(params) || params.batch_invariant) return false;
    const bool bytes = has_8_bit_keys(params);
    const OptionSet options = options_of(params);
    const auto* row = bytes ? tuning::find_row(tuning::kFa3Decode8Bits, head_dims(params), options)
                            : tuning::find_row(tuning::kFa3Decode, head_dims(params), options);
    if (row == nullptr) return false;
    const auto shape_of = [&](tuning::Fa3DecodeTile tile) {
        return tuning::fa3_decode_shape(*row, tile);
    };
    const auto q_tiles_of = [&](tuning::Fa3DecodeTile tile) {
        const int rows = shape_of(tile).rows;
        const QueryTiles few = few_query_tiles(params, rows, may_pack_gqa);
        return bytes && tile == kManyRows && few.heads == 0
                   ? any_query_tiles(params, rows, may_pack_gqa)
                   : few;
    };
    const auto has_few_rows = [&](tuning::Fa3DecodeTile t) { return q_tiles_of(t).heads > 0; };
    const auto tile = has_few_rows(kFewRows)    ? kFewRows
                      : has_few_rows(kManyKeys) ? kManyKeys
                                                : kManyRows;
    QueryTiles q_tiles = q_tiles_of(tile);
    if (q_tiles.heads == 0) return false;
    const int64_t tiles = tile_count(params, q_tiles);
    // Many tiles with many rows: not only memory is the limit.
    const bool only_here =
        bytes || (params.pages.table != nullptr && !pages_reason(params).empty());
    if (tile == kManyRows && (beside || (2 * tiles > gpu.sms && !only_here))) return false;

    DecodeSplits splits = decode_splits(params, mask, tiles, tile, shape_of(tile).ctas_per_sm, gpu);
    if (const auto count = forced("FLASH_EXT_FORCE_SPLITS"))
        splits = {*count, min_of(*count, kMaxClusterSplits)};
    kernel.head_dims = row->head_dims;
    kernel.options = row->options.set_for(options);
    params.changes_scores = changes_scores(options);  // a branch at run time
    params.pack_gqa_log2 = q_tiles.pack_gqa_log2;
    params.num_splits = splits.splits;
    kernel.decode_cluster = splits.cluster;
    const bool by_length =
        tile != kManyRows && (beside || (!forced("FLASH_EXT_FORCE_SPLITS") &&
                                         lengths_may_matter(params, mask, kernel.decode_cluster)));
    const bool one_cta_per_sm = tiles * splits.splits <= sms_of_clusters(splits.cluster, gpu);
    const bool many_keys =
        keys_of_16_bits(params, mask.keys_seen) > tuning::kFewDecodeKeys * splits.splits;
    kernel.decode_tile = by_length                                         ? kByLength
                         : tile == kFewRows && one_cta_per_sm && many_keys ? kManyKeys
                                                                           : tile;
    const tuning::Fa3DecodeShape shape = shape_of(*kernel.decode_tile);
    q_tiles = q_tiles_of(*kernel.decode_tile);
    if (by_length)
        kernel.by_length =
            splits_by_length(params, q_tiles, kernel.decode_cluster, shape.ctas_per_sm, gpu);
    if (beside) kernel.by_length.most_queries = q_tiles.queries;
    plan_decode_splits(workspace, params, kernel, q_tiles, shape.rows);
    return true;
}

// ALiBi, biases, dropout and some masks of tiles differ between heads, and TMA needs a positive
// stride between them.
bool may_pack_gqa_of(const AttentionParams& params) {
    return params.alibi_slopes == nullptr && params.bias.data == nullptr &&
           !has_masks_within_groups(params) && params.rng_state == nullptr &&
           params.q.head_stride > 0;
}

// Will the plan of the call be by the kernel for few queries? It has pages of any size, and all
// options of the scores with them.
bool decodes(const Call& call) {
    ForwardPlan plan{};
    static_cast<AttentionParams&>(plan.params) = call.params;
    plan.params.aligned = true;  // in the copies of rows
    begin_plan(plan, call.gpu);
    return plan_fa3_decode(plan.workspace, plan.params, plan.kernel, plan.mask,
                           may_pack_gqa_of(plan.params));
}

// Of prompts and decoding steps in one batch the steps are for the kernel for few queries: of a Q
// tile of another kernel they would have one row. That is so for pages, which such batches have.
// Where no sequence has few queries, its launch costs a few us: none if sequences are long.
void plan_few_queries(ForwardPlan& plan, bool may_pack_gqa) {
    constexpr int kManyQueries = 2048;
    ForwardParams& params = plan.params;
    if (params.pages.table == nullptr || params.cu_seqlens_q == nullptr || params.batch < 2 ||
        params.batch_invariant || mean_queries(params) > kManyQueries)
        return;
    FewQueries& few = plan.few_queries.emplace(params, plan.kernel);
    few.params.seqlen_q = params.batch;  // at most: one of each sequence
    if (!plan_fa3_decode(plan.workspace, few.params, few.kernel, summary_of(few.params),
                         may_pack_gqa, /*beside=*/true))
        return plan.few_queries.reset();
    few.params.seqlen_q = params.seqlen_q;
    params.few_queries = few.kernel.by_length.most_queries;
}

cudaError_t run_fa3_decode(const ForwardParams& params, const ForwardKernel& kernel,
                           cudaStream_t stream) {
    return dispatch_head_dims<tuning::kFa3Decode>(kernel.head_dims, [&](auto dim, auto dim_v) {
        return fa3_decode<dim, dim_v>(params, kernel, stream);
    });
}

cudaError_t run_fa3_few_queries(const ForwardPlan& plan, cudaStream_t stream) {
    ForwardParams params = plan.few_queries->params;
    params.q = plan.params.q;  // which may be copies
    params.out = plan.params.out;
    return run_fa3_decode(params, plan.few_queries->kernel, stream);
}

}  // namespace flash_ext
