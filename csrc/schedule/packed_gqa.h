// Packed GQA: heads that share keys as rows of one tile, which then loads K and V once for all of
// them.
#pragma once

#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// A single query, as in decoding: the heads that share a key head become the rows of one tile, by
// strides alone. Only where no option differs between these heads or rows.
inline void pack_gqa_view(ForwardParams& params) {
    const int group = params.heads_q / max_of(params.heads_k, 1);
    const bool alike = params.alibi_slopes == nullptr && params.bias.data == nullptr &&
                       params.sink == nullptr && params.rng_state == nullptr &&
                       !params.q_descale.by_query_head;
    const bool sees_all_keys = params.window_left >= params.seqlen_k;
    if (params.seqlen_q != 1 || params.cu_seqlens_q != nullptr || group < 2 || !alike ||
        !sees_all_keys || params.q.head_stride == 0)
        return;
    for (TensorView* view : {&params.q, &params.out}) {
        view->row_stride = view->head_stride;
        view->head_stride *= group;
    }
    params.seqlen_q = group;  // and lse (B, Hq, 1) is lse (B, Hk, group)
    params.heads_q = params.heads_k;
    params.window_right = BandMask::kUnlimited;
}

// The Q tiles of a forward pass: each has `queries` queries of one of `heads` heads. The rows of a
// tile are queries of one query head. With packed GQA, for few queries whose heads share keys, a
// query has 2^pack_gqa_log2 rows instead: the first ones are the heads of its group, and K and V
// are loaded once for all of them.
struct QueryTiles {
    int heads = 0;
    int queries = 0;
    int pack_gqa_log2 = 0;
};

// The number of Q tiles of all heads and batches.
inline int64_t tile_count(const AttentionParams& params, const QueryTiles& tiles) {
    return int64_t{tiles.heads} * tensor_batches(params) *
           tile_numbers(params, params.seqlen_q, tiles.queries);
}

// Tiles of block_q rows. GQA is packed if that at least halves their number and saves more bytes of
// K and V than its results cost, which are written in float32 and read again (combine.cuh).
inline QueryTiles query_tiles(const AttentionParams& params, int block_q, bool may_pack_gqa) {
    const QueryTiles one_head{params.heads_q, block_q};
    const int group = params.heads_q / max_of(params.heads_k, 1);
    if (!may_pack_gqa || group < 2 || group > block_q) return one_head;
    int pack_gqa_log2 = 3;  // a load takes eight rows
    while (1 << pack_gqa_log2 < group) ++pack_gqa_log2;
    const QueryTiles packed{params.heads_k, block_q >> pack_gqa_log2, pack_gqa_log2};
    const int64_t many = tile_count(params, one_head);
    const int64_t few = tile_count(params, packed);
    const int64_t results = int64_t{params.heads_q} * tensor_batches(params) * params.seqlen_q;
    const int64_t saved_bytes = (many - few) * keys_seen(params) *
                                (params.head_dim + params.head_dim_v) *
                                element_bytes(params.element_type);
    return 2 * few <= many && results * params.head_dim_v * 8 <= saved_bytes ? packed : one_head;
}

// The queries of a sequence that decode.cuh takes.
inline int few_queries(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr ? params.seqlen_q : 1;
}

// Tiles for few queries: of up to block_q rows, which hold all queries and the heads of their
// group. None (0 heads) where there are more. Packed sequences have one query, or some of them
// none: otherwise some may be long.
inline QueryTiles few_query_tiles(const AttentionParams& params, int block_q, bool may_pack_gqa) {
    const int group = may_pack_gqa ? params.heads_q / max_of(params.heads_k, 1) : 1;
    int pack_gqa_log2 = 0;
    while (1 << pack_gqa_log2 < group) ++pack_gqa_log2;
    if (params.cu_seqlens_q != nullptr && params.seqlen_q > params.batch) return {};
    if (int64_t{few_queries(params)} << pack_gqa_log2 > block_q) return {};
    return {group > 1 ? params.heads_k : params.heads_q, block_q >> pack_gqa_log2, pack_gqa_log2};
}

// The order of Q tiles. The tiles of a head share K and V, `head_dims` numbers a key. A persistent
// grid has up to `ctas` CTAs.
inline Schedule forward_schedule(const AttentionParams& params, const QueryTiles& tiles,
                                 int head_dims, int ctas_per_sm, int ctas = 0) {
    const bool masked = params.window_right < params.seqlen_k;
    const int64_t bytes_per_head = int64_t{element_bytes(params.element_type)} * head_dims *
                                   params.seqlen_k * params.heads_k / max_of(tiles.heads, 1);
    const Schedule schedule =
        make_schedule(tile_numbers(params, params.seqlen_q, tiles.queries), tiles.heads,
                      tensor_batches(params), masked || params.cu_seqlens_q != nullptr,
                      bytes_per_head, ctas_per_sm, l2_group_waves(params, masked));
    return masked && !is_varlen(params) ? with_whole_heads(schedule, bytes_per_head, ctas)
                                        : schedule;
}

}  // namespace flash_ext
