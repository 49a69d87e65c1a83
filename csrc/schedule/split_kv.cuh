// Split-KV: the keys of a Q tile in splits, each the work of a CTA, as in Flash-Decoding.
#pragma once

#include "problem/mask.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// One of `splits` about equal splits of the visible tiles. It may be empty.
FLASH_HOST_DEVICE constexpr VisibleTiles split_of(VisibleTiles all, int split, int splits) {
    const int least = (all.end - all.begin) / splits;
    const int longer = (all.end - all.begin) % splits;  // the first ones, by one
    const int begin = all.begin + split * least + min_of(split, longer);
    return {begin, begin + least + (split < longer)};
}

inline constexpr int kMaxClusterSplits = 8;  // the largest portable cluster
inline constexpr int kMaxClusters = 15;      // of a tile, each of as many splits

// The clusters of a tile with so many splits: one, or full ones.
FLASH_HOST_DEVICE constexpr int decode_clusters(int splits) {
    return ceil_div(splits, kMaxClusterSplits);
}

// Of a row of a result of decode.cuh: O, eight words so that the rows that a warp stores at a time
// are in all banks, the maximum and the sum.
FLASH_HOST_DEVICE constexpr int decode_row_floats(int head_dim_v) { return head_dim_v + 8 + 2; }

}  // namespace flash_ext
