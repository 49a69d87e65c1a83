// Which tile a CTA works on, and where its sequence lies.
//
// CTAs start in the order of their linear index. Heads (of all batches, flattened) are cut into
// sections; within a section the longest tiles of all heads come first, so that no long causal tile
// starts last, and a section's K and V (or Q and dO) together fit in L2. With one head per section
// the tiles of a head are neighbours and share its K and V, the best order when all are equally
// long.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"

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

// Q tiles as numbered in the backward's workspaces, (B, Hq, q_tiles), and in the passes before and
// after it, where a CTA takes the tile of its index.
FLASH_HOST_DEVICE constexpr int64_t q_tile_number(const BackwardParams& params, int batch, int head,
                                                  int q_tile) {
    return (static_cast<int64_t>(batch) * params.heads_q + head) * params.q_tiles + q_tile;
}

struct QTileIndex {
    int q_tile;
    int head;
    int batch;
};

FLASH_HOST_DEVICE constexpr QTileIndex q_tile_index(int linear, const BackwardParams& params) {
    const int flat_head = linear / params.q_tiles;
    return {linear % params.q_tiles, flat_head % params.heads_q, flat_head / params.heads_q};
}

// Host side: heads per section, from the bytes that one head's shared operands take.
inline Schedule make_schedule(int tiles, int heads, int batch, bool tiles_differ,
                              int64_t bytes_per_head) {
    constexpr int64_t kL2Share = 32 << 20;  // of 50 MB on an H100 or H200, 40 MB on an A100
    const int64_t total_heads = static_cast<int64_t>(heads) * batch;
    const int64_t fitting = kL2Share / max_of<int64_t>(bytes_per_head, 1);
    const int64_t section = tiles_differ ? min_of(max_of<int64_t>(fitting, 1), total_heads) : 1;
    return {tiles, heads, batch, static_cast<int>(section)};
}

// One sequence of the batch: where its rows lie in the tensors, and how many it has. A dense batch
// is indexed by `batch`; packed sequences share batch 0 and begin at a row of their own.
struct Sequence {
    int batch;
    int q_begin;
    int k_begin;
    int seqlen_q;
    int seqlen_k;
};

// kMayBePacked = false is for kernels that never see packed sequences: there the lengths stay in
// the constant bank and take no registers.
template <bool kMayBePacked>
FLASH_HOST_DEVICE Sequence sequence_of(const AttentionParams& params, int batch) {
    Sequence sequence{batch, 0, 0, params.seqlen_q, params.seqlen_k};
    if constexpr (!kMayBePacked) return sequence;
    if (params.cu_seqlens_q != nullptr) {
        sequence.batch = 0;
        sequence.q_begin = params.cu_seqlens_q[batch];
        sequence.seqlen_q = params.cu_seqlens_q[batch + 1] - sequence.q_begin;
        sequence.k_begin = params.cu_seqlens_k[batch];
        sequence.seqlen_k = params.cu_seqlens_k[batch + 1] - sequence.k_begin;
    }
    if (params.seqused_k != nullptr) {
        sequence.seqlen_k = min_of(sequence.seqlen_k, params.seqused_k[batch]);
    }
    return sequence;
}

// First row of a sequence's (head, query) statistics such as lse: (B, Hq, Sq), or (Hq, total).
FLASH_HOST_DEVICE int64_t statistics_offset(const AttentionParams& params, const Sequence& sequence,
                                            int head) {
    return (static_cast<int64_t>(sequence.batch) * params.heads_q + head) * params.seqlen_q +
           sequence.q_begin;
}

}  // namespace flash_ext
