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

// A tile of a head of all batches, flattened.
FLASH_HOST_DEVICE constexpr WorkTile work_tile_of(int tile_index, int flat_head,
                                                  const PreparedTileOrder& order) {
    const int batch = flat_head / order.by_heads;
    return {tile_index, flat_head - batch * order.heads, batch};
}

// A tile after the `first` ones of every head. A grid has fewer than 2^31 CTAs, so 32 bits do.
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const PreparedTileOrder& order) {
    const int l2_group = linear / order.by_l2_group_tiles;
    const int within = linear - l2_group * order.l2_group_tiles;
    const int first_head = l2_group * order.l2_group_heads;
    const int heads_left = order.heads * order.batch - first_head;
    const bool is_whole = order.l2_group_heads <= heads_left;
    const int heads = is_whole ? order.l2_group_heads : heads_left;
    const int tile = within / (is_whole ? order.by_l2_group_heads : order.by_last_heads);
    return work_tile_of(order.first + tile, first_head + within - tile * heads, order);
}

// A tile of all: the `first` ones of every head come before the others.
FLASH_HOST_DEVICE constexpr WorkTile work_tile_with_first(int linear,
                                                          const PreparedTileOrder& order) {
    const int heads = order.heads * order.batch;
    if (linear >= order.first * heads) return work_tile(linear - order.first * heads, order);
    const int tile = linear / order.by_all_heads;
    return work_tile_of(tile, linear - tile * heads, order);
}

FLASH_HOST_DEVICE constexpr int work_tile_count(const TileOrder& order) {
    return order.tiles * order.heads * order.batch;
}

}  // namespace flash_ext
