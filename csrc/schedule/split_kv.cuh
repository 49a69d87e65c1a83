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

inline constexpr int kFewestKeysToSplit = 1024;

// The number of splits of the keys of each Q tile, so that few tiles fill a GPU that works on
// `at_once` of them at a time (Flash-Decoding): the smallest number whose time is near the minimum.
// Splits have a least number of keys: the more queries have partial results and the more splits run
// one after another, the larger it is. `few_keys`: where there are few rows. Then fewer than
// kFewestKeysToSplit keys are not split, since the combination takes longer than they do.
inline int num_splits(const AttentionParams& params, int64_t tiles, int heads_per_tile, int at_once,
                      int few_keys) {
    const int queries = mean_queries(params);
    const int keys = keys_seen(params);
    if (tiles == 0 || queries == 0 || keys == 0) return 1;
    const bool whole_tiles = int64_t{queries} * heads_per_tile >= 64;
    if (!whole_tiles && keys < kFewestKeysToSplit) return 1;
    // The mean share of the keys that a tile sees: under a causal mask the first queries see few.
    const double share = whole_tiles && params.window_right < params.seqlen_k
                             ? 1. - 0.5 * min_of(queries, keys) / max_of(queries, keys)
                             : 1.;
    const int least_keys = !whole_tiles ? few_keys : 2 * tiles <= at_once ? 1024 : 2048;
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
    return splits;
}

inline constexpr int kMostClusterSplits = 8;  // the largest portable cluster
inline constexpr int kMostClusters = 15;      // of a tile: an H200 holds no more at a time

// The clusters of a tile with so many splits: one, or full ones.
FLASH_HOST_DEVICE constexpr int decode_clusters(int splits) {
    return ceil_div(splits, kMostClusterSplits);
}

// Of a row of a result of decode.cuh: O, eight words so that the rows that a warp stores at a time
// are in all banks, the maximum and the sum.
FLASH_HOST_DEVICE constexpr int decode_row_floats(int head_dim_v) { return head_dim_v + 8 + 2; }

// How many CTAs run at a time, one an SM, in clusters of `splits`. The SMs of a GPC are not a
// multiple of four or eight, so some stay idle: 12 of an H200's 132.
inline int most_ctas_in_clusters(int splits, int multiprocessors) {
    return splits <= 2 ? multiprocessors : multiprocessors - multiprocessors / 11;
}

// A forward pass of few queries, as far as its splits depend on it.
struct Decoding {
    int64_t tiles;
    int keys;
    bool in_l2;    // do K and V fit in L2?
    double alone;  // the time of 128 keys in a CTA that nothing but itself limits
    int multiprocessors;
    int ctas_per_sm;
};

// The relative time of decode.cuh with so many splits. Its unit is about that of 128 keys in each
// CTA where every SM has one: then memory is the limit, or L2. Several clusters combine their
// results through global memory. Fitted to the table in docs/notes/019-one-sequence.md.
inline double decoding_time(const Decoding& call, int splits) {
    const int64_t ctas = call.tiles * splits;
    const int64_t at_once =
        int64_t{call.ctas_per_sm} * most_ctas_in_clusters(splits, call.multiprocessors);
    const auto wave = [&](int64_t of_ctas) {
        const double full = static_cast<double>(of_ctas) / call.multiprocessors;
        return of_ctas == 0 ? 0.
                            : 1.2 + ceil_div(call.keys, 128 * splits) *
                                        max_of(call.alone, (call.in_l2 ? 0.6 : 0.95) * full);
    };
    const double combination = splits == 1 ? 0. : decode_clusters(splits) == 1 ? 0.5 : 1.7;
    return static_cast<double>(ctas / at_once) * wave(at_once) + wave(ctas % at_once) + combination;
}

}  // namespace flash_ext
