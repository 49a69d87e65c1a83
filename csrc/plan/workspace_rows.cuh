// The rows of workspaces, by tile numbers: the host knows how many there are, whatever the lengths
// of sequences.
#pragma once

#include <cstdint>

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

// The backward's workspaces have rows for queries: dQ's sum and statistics. A sequence begins at a
// multiple of 8 rows, and its length is rounded up to 8. So packed sequences, however short, take 7
// rows each more than their queries, and the host needs only their number. What does not fill its
// Q tile is stored as far as it goes: the rows that follow belong to another sequence.
inline constexpr int kWorkspaceRows = 8;

// The group of 8 rows, among those of a head, at which sequence `seq_idx` begins, whose first query
// is row `begin` of the tensors. From one sequence to the next there are at least as many rows as
// stored_rows() says.
FLASH_HOST_DEVICE constexpr int first_row_group(int begin, int seq_idx) {
    return (begin + (kWorkspaceRows - 1) * seq_idx) / kWorkspaceRows;
}

// Groups of a head (and, in a dense batch, of a batch element).
constexpr int row_groups(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr ? ceil_div(params.seqlen_q, kWorkspaceRows)
                                          : first_row_group(params.seqlen_q, params.batch + 2);
}

// Behind the rows of all heads come those of a Q tile without queries: lse is +inf, which makes P
// zero. dQ's sum has none.
inline constexpr int kPaddingRows = 128;

inline int64_t padding_row(const BackwardParams& params) {
    return int64_t{params.row_groups} * kWorkspaceRows * params.heads_q * tensor_batches(params);
}
inline int64_t workspace_rows(const BackwardParams& params) {
    return params.padding_row + kPaddingRows;
}

// The group of query 0, among those of all heads.
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

// The CTAs of the preprocess and postprocess passes have Q tiles by their numbers, as in
// schedule/tile_numbers.cuh.
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

// The rows of a CTA of FA1's and FA2's preprocess pass. It need not be that of Q tiles: nothing
// that it leaves in HBM depends on these. FA3's passes have no fewer rows.
inline constexpr int kPreprocessRows = 64;

}  // namespace flash_ext
