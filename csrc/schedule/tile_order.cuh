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

// What work_tile() divides by ...
struct TileDivisions {
    const TileOrder& order;

    FLASH_HOST_DEVICE constexpr int l2_group(int linear) const {
        return linear / (order.tiles * order.l2_group_heads);
    }
    FLASH_HOST_DEVICE constexpr int tile(int within, int heads) const { return within / heads; }
    FLASH_HOST_DEVICE constexpr int batch(int flat_head) const { return flat_head / order.heads; }
};
// ... and the same as the host prepares it.
struct TileDivisors {
    Divisor by_l2_group_tiles, by_l2_group_heads, by_last_heads, by_heads;
    int l2_group_heads = 1;

    TileDivisors() = default;
    explicit constexpr TileDivisors(const TileOrder& order)
        : by_l2_group_tiles(order.tiles * order.l2_group_heads),
          by_l2_group_heads(order.l2_group_heads),
          by_last_heads((max_of(order.heads * order.batch, 1) - 1) % order.l2_group_heads + 1),
          by_heads(order.heads),
          l2_group_heads(order.l2_group_heads) {}

    FLASH_HOST_DEVICE constexpr int l2_group(int linear) const {
        return linear / by_l2_group_tiles;
    }
    FLASH_HOST_DEVICE constexpr int tile(int within, int heads) const {
        return within / (heads == l2_group_heads ? by_l2_group_heads : by_last_heads);
    }
    FLASH_HOST_DEVICE constexpr int batch(int flat_head) const { return flat_head / by_heads; }
};

// A grid has fewer than 2^31 CTAs, so 32 bits do.
template <class Divisions>
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const TileOrder& order,
                                               const Divisions& divisions) {
    const int l2_group = divisions.l2_group(linear);
    const int within = linear - l2_group * order.tiles * order.l2_group_heads;
    const int first_head = l2_group * order.l2_group_heads;
    const int heads_here = min_of(order.l2_group_heads, order.heads * order.batch - first_head);
    const int tile = divisions.tile(within, heads_here);
    const int flat_head = first_head + within - tile * heads_here;
    const int batch = divisions.batch(flat_head);
    return {tile, flat_head - batch * order.heads, batch};
}
FLASH_HOST_DEVICE constexpr WorkTile work_tile(int linear, const TileOrder& order) {
    return work_tile(linear, order, TileDivisions{order});
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
