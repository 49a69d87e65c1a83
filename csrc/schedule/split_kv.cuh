// Split-KV: the keys of a Q tile in splits, each the work of a CTA, as in Flash-Decoding.
#pragma once

#include <cmath>
#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// One of `splits` about equal splits of the visible tiles. It may be empty.
FLASH_HOST_DEVICE constexpr VisibleTiles split_of(VisibleTiles all, int split, int splits) {
    const int least = (all.end - all.begin) / splits;
    const int longer = (all.end - all.begin) % splits;  // the first ones, by one
    const int begin = all.begin + split * least + min_of(split, longer);
    return {begin, begin + least + (split < longer)};
}

// The splits of a Q tile as the CTAs of a thread-block cluster, which combine their results through
// distributed shared memory: each CTA gets, from all splits, the statistics of all rows and some of
// the columns, in blocks of 8.
struct SplitCluster {
    static constexpr int kMaxSplits = 16;  // the most CTAs of a cluster
    static constexpr int kMaxRows = 64;    // of a Q tile: those of one consumer
    static constexpr int kBytes = 32 * 1024;

    int splits;
    int head_dim_v;

    // Blocks of a CTA. The last CTAs may have fewer, or none.
    FLASH_HOST_DEVICE constexpr int blocks() const { return ceil_div(head_dim_v / 8, splits); }
    FLASH_HOST_DEVICE constexpr int blocks_of(int cta) const {
        return max_of(min_of(blocks(), head_dim_v / 8 - cta * blocks()), 0);
    }
    // Of a row of one split in a CTA with `blocks` blocks: columns and statistics in float32.
    static FLASH_HOST_DEVICE constexpr int row_bytes(int blocks) { return blocks * 32 + 8; }

    FLASH_HOST_DEVICE constexpr bool has_memory_for(int rows) const {
        return splits <= kMaxSplits && rows <= kMaxRows &&
               rows * splits * row_bytes(blocks()) <= kBytes;
    }
};

// What splits cost where there are few rows, in keys that a CTA passes in the same time.
struct SplitCosts {
    int least_keys;  // of a split
    int kernel;      // that combines them
    int cluster;     // in which they combine themselves
};

// The number of splits of the keys of each Q tile, so that few tiles fill a GPU that works on
// `at_once` of them at a time (Flash-Decoding): the smallest number whose time is near the minimum.
// Splits have a least number of keys: the more queries have partial results and the more splits run
// one after another, the larger it is. Where there are few rows, splits must gain more than they
// cost, and fewer may be faster, as a cluster: may_be_cluster(splits).
template <class MayBeCluster>
int num_splits(const AttentionParams& params, int64_t tiles, int heads_per_tile, int at_once,
               const SplitCosts& costs, MayBeCluster may_be_cluster) {
    const int queries = mean_queries(params);
    const int keys = keys_seen(params);
    if (tiles == 0 || queries == 0 || keys == 0) return 1;
    const bool whole_tiles = int64_t{queries} * heads_per_tile >= 64;
    // The mean share of the keys that a tile sees: under a causal mask the first queries see few.
    const double share = whole_tiles && params.window_right < params.seqlen_k
                             ? 1. - 0.5 * min_of(queries, keys) / max_of(queries, keys)
                             : 1.;
    const int least_keys = !whole_tiles ? costs.least_keys : 2 * tiles <= at_once ? 1024 : 2048;
    const auto most =
        static_cast<int>(min_of<int64_t>(keys / least_keys, ceil_div<int64_t>(2 * at_once, tiles)));
    // In units of the time of the longest tile.
    const auto time = [&](int splits) {
        const double rounds = share * tiles * splits / at_once;
        const double price = whole_tiles && splits > 1 ? 1.3 : 1.;
        return price * (share < 1. ? max_of(rounds, 1.) : std::ceil(rounds)) / splits;
    };
    if (share * tiles >= at_once) return 1;
    double least = time(1);
    for (int splits = 2; splits <= most; ++splits) least = min_of(least, time(splits));
    int splits = 1;
    while (0.95 * time(splits) > least) ++splits;
    if (whole_tiles || splits == 1) return splits;

    int in_cluster = splits;
    while (in_cluster > 1 && !may_be_cluster(in_cluster)) --in_cluster;
    const double cluster_time = keys * time(in_cluster) + (in_cluster > 1 ? costs.cluster : 0);
    const double kernel_time = keys * time(splits) + costs.kernel;
    if (min_of(cluster_time, kernel_time) >= keys * time(1)) return 1;
    return cluster_time <= kernel_time ? in_cluster : splits;
}

}  // namespace flash_ext
