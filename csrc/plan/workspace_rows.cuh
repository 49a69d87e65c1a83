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

// The backward's workspaces have rows for queries, in blocks of whole Q tiles, so that every
// sequence begins with a whole tile. Workspaces hold dQ, D numbers a row, and statistics.
inline constexpr int kWorkspaceRows = 128;

// The blocks of a kernel with Q tiles of that size.
constexpr int workspace_block(int block_q) {
    return kWorkspaceRows % block_q == 0 ? kWorkspaceRows : block_q;
}

template <int kBlock = kWorkspaceRows>
FLASH_HOST_DEVICE constexpr int64_t workspace_row(const BackwardParams& params,
                                                  const Sequence& sequence, int head, int query) {
    const int block = (sequence.batch * params.heads_q + head) * params.q_blocks +
                      first_tile(sequence.q_begin, sequence.seq_idx, kBlock);
    return static_cast<int64_t>(block) * kBlock + query;
}

// The Q tile of a CTA of the preprocess or postprocess pass: CTAs take the workspace's rows in
// order.
struct QTileIndex {
    SequenceTile tile;
    int head;
};

template <bool kMayBeVarlen>
FLASH_HOST_DEVICE QTileIndex q_tile_index(const BackwardParams& params, int linear, int block_rows,
                                          int block_q) {
    const int tiles = block_rows / block_q;
    const int block = linear / tiles;
    const int flat_head = block / params.q_blocks;
    SequenceTile tile = tile_of<kMayBeVarlen, Rows::kQueries>(params, flat_head / params.heads_q,
                                                              block % params.q_blocks, block_rows);
    tile.tile = tile.tile * tiles + linear % tiles;
    return {tile, flat_head % params.heads_q};
}

// The rows of the backward's workspaces.
FLASH_HOST_DEVICE constexpr int64_t workspace_rows(const BackwardParams& params,
                                                   int block = kWorkspaceRows) {
    return int64_t{params.q_blocks} * block * params.heads_q * tensor_batches(params);
}

}  // namespace flash_ext
