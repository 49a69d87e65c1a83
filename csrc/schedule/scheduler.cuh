// Which tile a CTA works on, and where its sequence lies.
//
// CTAs start in the order of their linear index. Heads (of all batches, flattened) are cut into
// sections; within a section the longest tiles of all heads come first, so that no long causal tile
// starts last, and a section's K and V (or Q and dO) together fit in L2. With one head per section
// the tiles of a head are neighbours and share its K and V, the best order when all are equally
// long.
#pragma once

#include <cmath>
#include <cstdint>

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

struct WorkTile {
    int rank;  // 0 is the longest tile of its head
    int head;
    int batch;
};

// A grid has fewer than 2^31 CTAs, so 32 bits do.
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const Schedule& schedule) {
    const int section_tiles = schedule.tiles * schedule.section_heads;
    const int section = linear / section_tiles;
    const int within = linear % section_tiles;
    const int first_head = section * schedule.section_heads;
    const int heads_here =
        min_of(schedule.section_heads, schedule.heads * schedule.batch - first_head);
    const int flat_head = first_head + within % heads_here;
    return {within / heads_here, flat_head % schedule.heads, flat_head / schedule.heads};
}

FLASH_HOST_DEVICE constexpr int cta_count(const Schedule& schedule) {
    return schedule.tiles * schedule.heads * schedule.batch;
}

// Host side: heads per section, from the bytes that one head's shared operands take. But a section
// fills a GPU about `fillings` times, or its last tiles would leave much of it idle.
inline Schedule make_schedule(int tiles, int heads, int batch, bool tiles_differ,
                              int64_t bytes_per_head, int ctas_per_sm, int fillings = 2) {
    constexpr int64_t kL2Share = 32 << 20;  // of 50 MB on an H100 or H200, 40 MB on an A100
    const int64_t section_tiles = 128 * fillings * ctas_per_sm;
    const int64_t total_heads = static_cast<int64_t>(heads) * batch;
    const int64_t fitting = max_of(kL2Share / max_of<int64_t>(bytes_per_head, 1),
                                   ceil_div<int64_t>(section_tiles, max_of(tiles, 1)));
    const int64_t section = tiles_differ ? min_of(fitting, max_of<int64_t>(total_heads, 1)) : 1;
    return {tiles, heads, batch, static_cast<int>(section)};
}

// Do KV tiles see unlike numbers of queries?
FLASH_HOST_DEVICE constexpr bool is_masked(const AttentionParams& params) {
    return params.window_right < params.seqlen_k || params.window_left < params.seqlen_q;
}

// Packed sequences under a mask want larger sections than others: most of a section's work may be
// a long sequence's, whose longest tiles are a large part of the whole run.
FLASH_HOST_DEVICE constexpr int section_fillings(const AttentionParams& params, bool masked) {
    return masked && params.cu_seqlens_q != nullptr ? 4 : 2;
}

// --- Numbers of tiles ---
// Tiles of `block` rows are numbered per head: in a dense batch for each batch anew, in packed
// tensors through all sequences, so that the host needs no lengths: sequence `order`, whose rows
// begin at `begin`, has the numbers from begin / block + order on, which is at least as many as it
// has tiles. Grids and workspaces go by these numbers.

FLASH_HOST_DEVICE constexpr int first_tile(int begin, int order, int block) {
    return begin / block + order;
}

// Numbers per head (and, in a dense batch, per batch).
FLASH_HOST_DEVICE constexpr int tile_numbers(const AttentionParams& params, int rows, int block) {
    return params.cu_seqlens_q == nullptr ? ceil_div(rows, block)
                                          : first_tile(rows, params.batch + 1, block) + 1;
}

// The Q tiles of a forward pass: `queries` of one of `heads` heads each. The rows of a tile are
// queries of a query head; or, where heads share keys and queries are few, tiles are folded: a
// query has 2^fold rows, the first of which are the heads of a group, and K and V are loaded once
// for all of them.
struct QueryTiles {
    int heads;
    int queries;
    int fold = 0;
};

// How many there are, of all heads and batches.
inline int64_t tile_count(const AttentionParams& params, const QueryTiles& tiles) {
    return int64_t{tiles.heads} * tensor_batches(params) *
           tile_numbers(params, params.seqlen_q, tiles.queries);
}

// Keys that a query sees, at most; of packed sequences on average.
inline int keys_seen(const AttentionParams& params) {
    const int sequences = params.cu_seqlens_k == nullptr ? 1 : max_of(params.batch, 1);
    return min_of(params.seqlen_k / sequences, params.window_left + params.window_right + 1);
}

// Tiles of block_q rows, folded if that makes half of them or fewer, and saves more bytes of K and
// V than results cost, which leave folded tiles in float32 and are read again (combine.cuh).
inline QueryTiles query_tiles(const AttentionParams& params, int block_q, bool may_fold) {
    const QueryTiles unfolded{params.heads_q, block_q};
    const int group = params.heads_q / max_of(params.heads_k, 1);
    if (!may_fold || group < 2 || group > block_q) return unfolded;
    int fold = 3;  // a load takes eight rows
    while (1 << fold < group) ++fold;
    const QueryTiles folded{params.heads_k, block_q >> fold, fold};
    const int64_t many = tile_count(params, unfolded);
    const int64_t few = tile_count(params, folded);
    const int64_t results = int64_t{params.heads_q} * tensor_batches(params) * params.seqlen_q;
    const int64_t saved_bytes =
        (many - few) * keys_seen(params) * (params.head_dim + params.head_dim_v) * 2;
    return 2 * few <= many && results * params.head_dim_v * 8 <= saved_bytes ? folded : unfolded;
}

// Their order. Heads share K and V, `head_dims` numbers a key.
inline Schedule forward_schedule(const AttentionParams& params, const QueryTiles& tiles,
                                 int head_dims, int ctas_per_sm) {
    const bool masked = params.window_right < params.seqlen_k;
    const int64_t bytes_per_head =
        int64_t{2} * head_dims * params.seqlen_k * params.heads_k / max_of(tiles.heads, 1);
    return make_schedule(tile_numbers(params, params.seqlen_q, tiles.queries), tiles.heads,
                         tensor_batches(params), masked || params.cu_seqlens_q != nullptr,
                         bytes_per_head, ctas_per_sm, section_fillings(params, masked));
}

// Into how many parts the keys of each Q tile are cut, so that few tiles fill the GPU (as in
// Flash-Decoding), which works on `at_once` of them at a time: the fewest that come near the least
// time. Parts of few keys do not pay, the less so the more queries have partial results and the
// more parts are worked on one after another.
inline int key_parts(const AttentionParams& params, int64_t tiles, int heads_per_tile,
                     int at_once) {
    const int queries = mean_queries(params);
    const int keys = keys_seen(params);
    if (tiles == 0 || queries == 0 || keys == 0) return 1;
    const bool whole_tiles = int64_t{queries} * heads_per_tile >= 64;
    // What a tile sees of them in the mean: under a causal mask the first queries see few.
    const double share = whole_tiles && params.window_right < params.seqlen_k
                             ? 1. - 0.5 * min_of(queries, keys) / max_of(queries, keys)
                             : 1.;
    const int least_keys = !whole_tiles ? 512 : 2 * tiles <= at_once ? 1024 : 2048;
    const auto most =
        static_cast<int>(min_of<int64_t>(keys / least_keys, ceil_div<int64_t>(2 * at_once, tiles)));
    // In units of the longest tile's.
    const auto time = [&](int parts) {
        const double rounds = share * tiles * parts / at_once;
        const double price = whole_tiles && parts > 1 ? 1.3 : 1.;
        return price * (share < 1. ? max_of(rounds, 1.) : std::ceil(rounds)) / parts;
    };
    if (share * tiles >= at_once) return 1;
    double least = time(1);
    for (int parts = 2; parts <= most; ++parts) least = min_of(least, time(parts));
    int parts = 1;
    while (0.95 * time(parts) > least) ++parts;
    return parts;
}

// The packed sequence that a tile number belongs to: the last whose first number is not beyond it.
FLASH_HOST_DEVICE int find_sequence(const int* cu_seqlens, int batch, int total, int block,
                                    int number) {
    int low = 0;
    int high = batch + 2;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_tile(packed_begin(cu_seqlens, middle, total), middle, block) <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// A tile number taken apart. Tiles past the sequence's end exist where numbers are spare.
struct SequenceTile {
    Sequence sequence;
    int tile;
};

template <bool kMayBePacked, Rows kRows>
FLASH_HOST_DEVICE SequenceTile tile_of(const AttentionParams& params, int batch, int number,
                                       int block) {
    constexpr bool kQueries = kRows == Rows::kQueries;
    const int* cu_seqlens = kQueries ? params.cu_seqlens_q : params.cu_seqlens_k;
    if (!kMayBePacked || cu_seqlens == nullptr)
        return {sequence_of<kMayBePacked>(params, batch), number};
    const int total = kQueries ? params.seqlen_q : params.seqlen_k;
    const Sequence sequence = sequence_of<kMayBePacked>(
        params, find_sequence(cu_seqlens, params.batch, total, block, number));
    const int begin = kQueries ? sequence.q_begin : sequence.k_begin;
    return {sequence, number - first_tile(begin, sequence.order, block)};
}

// Where Q tile `tile` of a sequence lies in a workspace of (batch, head, tiles per head).
FLASH_HOST_DEVICE constexpr int64_t workspace_tile(const AttentionParams& params,
                                                   const Sequence& sequence, int head, int tile,
                                                   int tiles_per_head, int block) {
    return (static_cast<int64_t>(sequence.batch) * params.heads_q + head) * tiles_per_head +
           first_tile(sequence.q_begin, sequence.order, block) + tile;
}

// The backward's workspaces have rows for queries, in blocks of which a Q tile is a part, so that
// every sequence begins with a whole tile. Workspaces hold dQ, D numbers a row, and statistics.
inline constexpr int kWorkspaceRows = 128;

// The blocks of a kernel with Q tiles of that size.
constexpr int workspace_block(int block_q) {
    return kWorkspaceRows % block_q == 0 ? kWorkspaceRows : block_q;
}

template <int kBlock = kWorkspaceRows>
FLASH_HOST_DEVICE constexpr int64_t workspace_row(const BackwardParams& params,
                                                  const Sequence& sequence, int head, int query) {
    const int block = (sequence.batch * params.heads_q + head) * params.q_blocks +
                      first_tile(sequence.q_begin, sequence.order, kBlock);
    return static_cast<int64_t>(block) * kBlock + query;
}

// A CTA of the passes before and after the backward, which takes the Q tile of its index, and so
// the workspace's rows in their order.
struct QTileIndex {
    SequenceTile tile;
    int head;
};

template <bool kMayBePacked, int kBlockQ>
FLASH_HOST_DEVICE QTileIndex q_tile_index(const BackwardParams& params, int linear) {
    constexpr int kBlock = workspace_block(kBlockQ);
    constexpr int kTiles = kBlock / kBlockQ;
    const int block = linear / kTiles;
    const int flat_head = block / params.q_blocks;
    SequenceTile tile = tile_of<kMayBePacked, Rows::kQueries>(params, flat_head / params.heads_q,
                                                              block % params.q_blocks, kBlock);
    tile.tile = tile.tile * kTiles + linear % kTiles;
    return {tile, flat_head % params.heads_q};
}

// How many of them there are.
FLASH_HOST_DEVICE constexpr int64_t workspace_rows(const BackwardParams& params,
                                                   int block = kWorkspaceRows) {
    return int64_t{params.q_blocks} * block * params.heads_q * tensor_batches(params);
}

// Where in memory the dS of one query head of a dense batch is kept (fa3/backward_product.cuh): in
// tiles of 64 x 64 of 16-bit numbers, Q tile by Q tile. Without those above the diagonal, where a
// mask hides them all.
struct KeptTiles {
    static constexpr int kBytes = 64 * 64 * 2;

    int q_tiles = 0;
    int kv_tiles = 0;
    bool triangle = false;

    KeptTiles() = default;
    FLASH_HOST_DEVICE constexpr explicit KeptTiles(const AttentionParams& params)
        : q_tiles(ceil_div(params.seqlen_q, 64)),
          kv_tiles(ceil_div(params.seqlen_k, 64)),
          triangle(params.window_right <= params.seqlen_q - params.seqlen_k) {}

    FLASH_HOST_DEVICE constexpr int of_row(int q_tile) const {
        return triangle ? q_tile + 1 : kv_tiles;
    }
    // The number of a Q tile's first; that of number q_tiles is how many there are.
    FLASH_HOST_DEVICE constexpr int64_t first(int q_tile) const {
        return triangle ? int64_t{q_tile} * (q_tile + 1) / 2 : int64_t{q_tile} * kv_tiles;
    }
};

// The dS of a head of K and V, and so of its group.
FLASH_HOST_DEVICE constexpr int64_t kept_ds_bytes(const AttentionParams& params) {
    const KeptTiles tiles(params);
    return max_of<int64_t>(
        tiles.first(tiles.q_tiles) * KeptTiles::kBytes * (params.heads_q / params.heads_k), 1);
}

// Memory that a call wants for it: that of all heads, or of equal parts of them, so many at a time
// as fit into as much as q, out and their gradients take, which is linear in the sequence, or a set
// size; 0 where one does not, or where sequences are packed, whose lengths the host does not know.
FLASH_HOST_DEVICE constexpr int64_t ds_workspace_bytes(const AttentionParams& params) {
    constexpr int64_t kMost = int64_t{576} << 20;
    const int64_t heads_q = int64_t{params.heads_q} * params.batch;
    const int64_t most =
        min_of(kMost, heads_q * params.seqlen_q * (params.head_dim + params.head_dim_v) * 8);
    const int64_t bytes = kept_ds_bytes(params);
    if (params.cu_seqlens_q != nullptr || bytes > most) return 0;
    const int64_t heads = max_of<int64_t>(int64_t{params.heads_k} * params.batch, 1);
    const int64_t parts = ceil_div(heads, min_of(most / bytes, heads));
    return ceil_div(heads, parts) * bytes;
}

// Parts of a head's rows in the sum of sink's gradient.
inline constexpr int kSinkParts = 32;

}  // namespace flash_ext
