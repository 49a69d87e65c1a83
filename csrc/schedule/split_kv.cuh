// Split-KV: the keys of a Q tile in splits, each the work of a CTA, as in Flash-Decoding.
#pragma once

#include "problem/mask.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// One of `splits` about equal splits of the visible tiles. It may be empty. by_splits: the same
// number, perhaps as a Divisor.
template <class Number>
FLASH_HOST_DEVICE constexpr VisibleTiles split_of(VisibleTiles all, int split, int splits,
                                                  Number by_splits) {
    const int least = (all.end - all.begin) / by_splits;
    const int longer = all.end - all.begin - least * splits;  // the first ones, by one
    const int begin = all.begin + split * least + min_of(split, longer);
    return {begin, begin + least + (split < longer)};
}
FLASH_HOST_DEVICE constexpr VisibleTiles split_of(VisibleTiles all, int split, int splits) {
    return split_of(all, split, splits, splits);
}

// Fixed splits, of batch-invariant calls: they begin at the same keys whatever the call is, so what
// the parts of a row's sum are, and in which order they are added, depends on its keys alone. The
// splits of a Q tile are the work of `ctas` CTAs; each takes every ctas-th, from the last one down.
inline constexpr int kFixedSplitKeys = 2048;
FLASH_HOST_DEVICE constexpr int fixed_split_tiles(int block_kv) {
    return kFixedSplitKeys / block_kv;
}
// The splits that have some of these tiles; if there are none the first one.
FLASH_HOST_DEVICE constexpr Interval fixed_splits(VisibleTiles tiles, int split_tiles) {
    if (tiles.empty()) return {0, 1};
    return {tiles.begin / split_tiles, ceil_div(tiles.end, split_tiles)};
}
// The CTA's split after this one, or -1 ...
FLASH_HOST_DEVICE constexpr int next_fixed_split(Interval splits, int split, int ctas) {
    return split - ctas >= splits.begin ? split - ctas : -1;
}
// ... and its first one, if it is number `cta`.
FLASH_HOST_DEVICE constexpr int last_fixed_split(Interval splits, int cta, int ctas) {
    return next_fixed_split(splits, cta + ceil_div(max_of(splits.end - cta, 0), ctas) * ctas, ctas);
}

inline constexpr int kMaxClusterSplits = 8;  // the largest portable cluster
inline constexpr int kMaxClusters = 15;      // of a tile, each of as many splits

// Splits by length (split_by_length.cuh), in blocks of keys.
// What the host decides: so many clusters would the sequences have, per head, at equal lengths.
struct SplitsByLength {
    int clusters = 0;  // 0: splits do not depend on lengths
    int least = 1;     // blocks of keys of a cluster, if its tile has several
    int most_queries = BandMask::kUnlimited;  // sequences with more are another kernel's

    // The blocks of a cluster, if all sequences have `total`. A float is exact up to 2^24 blocks,
    // and beyond them near enough.
    FLASH_HOST_DEVICE int length(float total) const {
        return max_of(static_cast<int>(total / static_cast<float>(clusters)), least);
    }
    // The clusters of a tile that sees so many blocks: of `length` blocks, or up to twice as many.
    // Of equal lengths that `clusters` is a multiple of, each has an equal number.
    FLASH_HOST_DEVICE static constexpr int of_tile(int blocks, int length) {
        return max_of(blocks / length, 1);
    }
    // The most clusters of a head, of all tiles that have several: `clusters`, and what rounding
    // `length` down adds.
    FLASH_HOST_DEVICE constexpr int most() const { return clusters + clusters / least + 1; }
};

// Of a row of a result of decode.cuh: O, eight words so that the rows that a warp stores at a time
// are in all banks, the maximum and the sum.
FLASH_HOST_DEVICE constexpr int decode_row_floats(int head_dim_v) { return head_dim_v + 8 + 2; }

}  // namespace flash_ext
