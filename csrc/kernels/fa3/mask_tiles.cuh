// A mask of tiles (problem/tile_mask.cuh) in FA3's kernels. The producer that walks over the tiles
// writes to shared memory where each is, and TMA brings the words of partial ones.
#pragma once

#include "problem/hide_by_words.cuh"
#include "problem/params.h"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

// A member of SharedStorage, empty without such a mask. In the forward: of the stages of Q the
// words of 128 queries, of the stages of K the words of a partial block and the first key.
template <bool kMask, int kQStages, int kKStages>
struct ForwardMaskStorage {
    alignas(16) MaskWords intervals[kQStages][kMaskBlock];
    alignas(16) MaskWords bits[kKStages][kMaskBlock];
    int first_keys[kKStages];
};
template <int kQStages, int kKStages>
struct ForwardMaskStorage<false, kQStages, kKStages> {};

// In the backward: of the stages of Q the words of its queries and the first query.
template <bool kMask, int kStages, int kRows>
struct BackwardMaskStorage {
    alignas(16) MaskWords words[kStages][kRows];
    int first_queries[kStages];
};
template <int kStages, int kRows>
struct BackwardMaskStorage<false, kStages, kRows> {};

// A Q tile in the order of the mask's rows, or the KV tile of a head of K and V.
FLASH_DEVICE WorkTile longest_first(const ForwardParams& params, int linear) {
    WorkTile work = work_tile_with_first(linear, params.tile_order);
    const int block = runs_of_q_block(params, work.batch, work.head, work.tile_index).in_order();
    work.tile_index = params.tile_order.tiles - 1 - block;  // describe() has the last one first
    return work;
}
FLASH_DEVICE WorkTile longest_first(const BackwardParams& params, int linear) {
    WorkTile work = work_tile_with_first(linear, params.tile_order);
    const int head = work.head * (params.heads_q / params.heads_k);
    if (!params.deterministic)  // otherwise tiles add in ascending order
        work.tile_index = runs_of_kv_block(params, work.batch, head, work.tile_index).in_order();
    return work;
}

// Loads the words of so many queries.
FLASH_DEVICE void load_words(MaskWords* target, const uint32_t* source, int queries,
                             uint32_t full) {
    ptx::bulk_load(ptx::shared_address(target), source, queries * int{sizeof *target}, full);
}

}  // namespace flash_ext
