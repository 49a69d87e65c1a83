// The order of tiles: which one a CTA works on.
//
// CTAs start in the order of their linear index. Heads (of all batches, flattened) are divided into
// L2 swizzle groups, whose K and V (or Q and dO) together fit in L2. Within a group the longest
// tiles of all heads come first, so that no long causal tile starts last. With one head per group
// the tiles of a head are neighbors and share its K and V: the best order if all tiles are equally
// long.
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

struct WorkTile {
    int tile_index;  // 0 is the longest tile of its head
    int head;
    int batch;
};

// A grid has fewer than 2^31 CTAs, so 32 bits do.
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const Schedule& schedule) {
    const int l2_group_tiles = schedule.tiles * schedule.l2_group_heads;
    const int l2_group = linear / l2_group_tiles;
    const int within = linear % l2_group_tiles;
    const int first_head = l2_group * schedule.l2_group_heads;
    const int heads_here =
        min_of(schedule.l2_group_heads, schedule.heads * schedule.batch - first_head);
    const int flat_head = first_head + within % heads_here;
    return {within / heads_here, flat_head % schedule.heads, flat_head / schedule.heads};
}

FLASH_HOST_DEVICE constexpr int cta_count(const Schedule& schedule) {
    return schedule.tiles * schedule.heads * schedule.batch;
}

// The bytes that stay in L2: 32 MiB. An H100 or H200 has 50 MB, an A100 40 MB.
inline constexpr int64_t kL2Share = 32 << 20;

// Where a head has so few tiles, memory is the limit, and not how well the tiles of a group fill
// the GPU. Groups are then smaller, presumably since each half of an H100's L2 serves half of the
// SMs, so what all SMs read takes room in both (docs/notes/022-short-sequences.md).
inline constexpr int kFewTilesPerHead = 8;
inline constexpr int64_t kSmallL2Share = 8 << 20;

// Host side: the heads of an L2 swizzle group, from the bytes of the operands that the tiles of a
// head share. A group has tiles for about `waves` waves of CTAs (one where heads have few tiles),
// and for half as many at least: with fewer, its last tiles would leave much of the GPU idle.
inline Schedule make_schedule(int tiles, int heads, int batch, bool tiles_differ,
                              int64_t bytes_per_head, int ctas_per_sm, int waves = 2) {
    const bool few_tiles = tiles <= kFewTilesPerHead;
    const int64_t l2_group_tiles = 128 * (few_tiles ? 1 : waves) * ctas_per_sm;
    const int64_t total_heads = static_cast<int64_t>(heads) * batch;
    const int64_t l2_share = few_tiles ? kSmallL2Share : kL2Share;
    const int64_t fitting = max_of(l2_share / max_of<int64_t>(bytes_per_head, 1),
                                   ceil_div<int64_t>(l2_group_tiles, max_of(tiles, 1)));
    // Groups of equal size: a small last one would leave much of the GPU idle, too.
    const int64_t groups = max_of<int64_t>(ceil_div(total_heads, fitting), 1);
    const int64_t l2_group_heads =
        tiles_differ ? max_of<int64_t>(ceil_div(total_heads, groups), 1) : 1;
    return {tiles, heads, batch, static_cast<int>(l2_group_heads)};
}

// Under a mask, where heads have few tiles and nearly every CTA of a persistent grid has one head,
// it takes all tiles of that head, so that the first one brings K and V to L2 for the others. All
// heads are then worked on at the same time: not where their K and V exceed half of an H100's L2.
// Without a mask it gains little, and loses where K and V are not in L2 before (note 022).
inline constexpr int kMostTilesAtOnce = 3;
inline constexpr int64_t kHalfOfL2 = 24 << 20;

inline Schedule with_whole_heads(Schedule schedule, int64_t bytes_per_head, int ctas) {
    const int64_t heads = int64_t{schedule.heads} * schedule.batch;
    if (schedule.tiles > 1 && schedule.tiles <= kMostTilesAtOnce && heads <= ctas &&
        8 * heads >= 7 * int64_t{ctas} && heads * bytes_per_head <= kHalfOfL2) {
        schedule.l2_group_heads = 1;
        schedule.tiles_at_once = schedule.tiles;
    }
    return schedule;
}

// Do KV tiles see different numbers of queries?
FLASH_HOST_DEVICE constexpr bool is_masked(const AttentionParams& params) {
    return params.window_right < params.seqlen_k || params.window_left < params.seqlen_q;
}

// Packed sequences under a mask need larger groups: most of a group's work may belong to one long
// sequence, whose longest tiles are a large part of the whole run.
FLASH_HOST_DEVICE constexpr int l2_group_waves(const AttentionParams& params, bool masked) {
    return masked && params.cu_seqlens_q != nullptr ? 4 : 2;
}

// What a query of a backward has in L2: its rows of Q and dO, and of dQ in float32.
constexpr int64_t bytes_of_q_do_dq(ElementType type, int head_dim, int head_dim_v) {
    return int64_t{element_bytes(type)} * (head_dim + head_dim_v) + int64_t{4} * head_dim;
}

}  // namespace flash_ext
