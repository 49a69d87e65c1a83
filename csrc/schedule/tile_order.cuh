// The order of tiles: which one a CTA works on.
//
// CTAs start in the order of their linear index. Heads (of all batches, flattened) are divided into
// L2 swizzle groups, whose K and V (or Q and dO) together fit in L2. Within a group the longest
// tiles of all heads come first, so that no long causal tile starts last. With one head per group
// the tiles of a head are neighbors and share its K and V: the best order if all tiles are equally
// long.
#pragma once

#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

struct WorkTile {
    int tile_index;  // 0 is the longest tile of its head
    int head;
    int batch;
};

// A grid has fewer than 2^31 CTAs, so 32 bits do.
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const TileOrder& order) {
    const int l2_group_tiles = order.tiles * order.l2_group_heads;
    const int l2_group = linear / l2_group_tiles;
    const int within = linear % l2_group_tiles;
    const int first_head = l2_group * order.l2_group_heads;
    const int heads_here = min_of(order.l2_group_heads, order.heads * order.batch - first_head);
    const int flat_head = first_head + within % heads_here;
    return {within / heads_here, flat_head % order.heads, flat_head / order.heads};
}

// If the first `first` tiles of all heads come before all others, which then are as above.
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, TileOrder order, int first) {
    const int heads = order.heads * order.batch;
    if (linear < first * heads) {
        const int flat_head = linear % heads;
        return {linear / heads, flat_head % order.heads, flat_head / order.heads};
    }
    order.tiles -= first;
    WorkTile work = work_tile(linear - first * heads, order);
    work.tile_index += first;
    return work;
}

FLASH_HOST_DEVICE constexpr int work_tile_count(const TileOrder& order) {
    return order.tiles * order.heads * order.batch;
}

}  // namespace flash_ext
