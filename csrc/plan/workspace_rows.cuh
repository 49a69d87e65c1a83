// Where workspaces have their rows, by tile numbers: the host knows how many there are, whatever
// the lengths of sequences. And where the backward of wide heads has its dS.
#pragma once

#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// Where Q tile `tile` of a sequence lies in a workspace of (batch, head, tiles per head).
FLASH_HOST_DEVICE constexpr int64_t workspace_tile(const AttentionParams& params,
                                                   const Sequence& sequence, int head, int tile,
                                                   int tiles_per_head, int block) {
    return (static_cast<int64_t>(sequence.batch) * params.heads_q + head) * tiles_per_head +
           first_tile(sequence.q_begin, sequence.seq_idx, block) + tile;
}

// Workspaces in groups of rows: a sequence begins with a group, and its length is rounded up. The
// index of the group with which sequence `seq_idx` begins, whose first row is row `begin` of the
// tensors. The next sequence begins after the last group of this one.
FLASH_HOST_DEVICE constexpr int first_group(int begin, int seq_idx, int rows) {
    return (begin + (rows - 1) * seq_idx) / rows;
}

// The backward's workspaces have a row for each query: dQ's sum and statistics. A sequence begins
// at a multiple of 8 rows, and its length is rounded up to 8. So a varlen sequence, however short,
// costs at most 7 rows more than its queries, and the host needs only the number of sequences. The
// last Q tile of a sequence is stored only up to its last 8 rows: the next ones belong to another
// sequence.
inline constexpr int kWorkspaceRows = 8;

FLASH_HOST_DEVICE constexpr int first_row_group(int begin, int seq_idx) {
    return first_group(begin, seq_idx, kWorkspaceRows);
}

// Groups of a head (and, in a dense batch, of a batch element).
constexpr int row_groups(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr ? ceil_div(params.seqlen_q, kWorkspaceRows)
                                          : first_row_group(params.seqlen_q, params.batch + 2);
}

// After the rows of all heads come the rows of a Q tile without queries. Their lse is +inf, which
// makes P zero. dQ's sum has no such rows.
inline constexpr int kPaddingRows = 128;

inline int64_t padding_row(const BackwardParams& params) {
    return int64_t{params.row_groups} * kWorkspaceRows * params.heads_q * tensor_batches(params);
}
inline int64_t workspace_rows(const BackwardParams& params) {
    return params.padding_row + kPaddingRows;
}

// The index, over all heads, of the group that holds query 0 of a sequence.
FLASH_HOST_DEVICE constexpr int row_group(const BackwardParams& params, const Sequence& sequence,
                                          int head) {
    return (sequence.batch * params.heads_q + head) * params.row_groups +
           first_row_group(sequence.q_begin, sequence.seq_idx);
}

FLASH_HOST_DEVICE constexpr int64_t workspace_row(const BackwardParams& params,
                                                  const Sequence& sequence, int head, int query) {
    return int64_t{row_group(params, sequence, head)} * kWorkspaceRows + query;
}

// The rows of a tile from query `first_query` on that are in the workspace.
template <int kBlockQ>
FLASH_HOST_DEVICE constexpr int stored_rows(const Sequence& sequence, int first_query) {
    const int rows = ceil_div(sequence.seqlen_q - first_query, kWorkspaceRows) * kWorkspaceRows;
    return clamp(rows, 0, kBlockQ);
}

// The Q tile of a CTA of the preprocess or postprocess pass, by its tile number
// (schedule/tile_numbers.cuh).
struct QTileIndex {
    SequenceTile tile;
    int head;
};

template <bool kMayBeVarlen>
FLASH_HOST_DEVICE QTileIndex q_tile_index(const BackwardParams& params, int linear, int block_q) {
    const int tiles = tile_numbers(params, params.seqlen_q, block_q);
    const int flat_head = linear / tiles;
    return {tile_of<kMayBeVarlen, Rows::kQueries>(params, flat_head / params.heads_q,
                                                  linear % tiles, block_q),
            flat_head % params.heads_q};
}

FLASH_HOST_DEVICE constexpr int64_t q_tile_count(const BackwardParams& params, int block_q) {
    return int64_t{tile_numbers(params, params.seqlen_q, block_q)} * params.heads_q *
           tensor_batches(params);
}

// The rows of a CTA in the preprocess pass of FA1 and FA2. They need not match the Q tiles: nothing
// that the pass writes depends on the tile size. A CTA of FA3's pass has at least as many rows.
inline constexpr int kPreprocessRows = 64;

// Where the dS of one query head of a dense batch lies in memory (fa3/backward_dq_gemm.cuh): in
// tiles of 64 x 64 elements, Q tile by Q tile. Tiles above the diagonal have no memory where a mask
// hides them all.
struct DSWorkspaceTiles {
    static constexpr int kElements = 64 * 64;

    int q_tiles = 0;
    int kv_tiles = 0;
    bool triangle = false;

    DSWorkspaceTiles() = default;
    DSWorkspaceTiles(const AttentionParams& params, const MaskSummary& mask)
        : q_tiles(ceil_div(params.seqlen_q, 64)),
          kv_tiles(ceil_div(params.seqlen_k, 64)),
          triangle(mask.is_triangle) {}

    FLASH_HOST_DEVICE constexpr int of_row(int q_tile) const {
        return triangle ? q_tile + 1 : kv_tiles;
    }
    // The number of a Q tile's first tile; first(q_tiles) is the number of all tiles.
    FLASH_HOST_DEVICE constexpr int64_t first(int q_tile) const {
        return triangle ? int64_t{q_tile} * (q_tile + 1) / 2 : int64_t{q_tile} * kv_tiles;
    }
};

// The dS of a head of K and V, or of a part: of all its query heads.
inline int64_t ds_head_bytes(const AttentionParams& params, const DSWorkspaceTiles& tiles) {
    return max_of<int64_t>(tiles.first(tiles.q_tiles) * DSWorkspaceTiles::kElements *
                               element_bytes(params.element_type) *
                               (params.heads_q / params.heads_k),
                           1);
}

}  // namespace flash_ext
