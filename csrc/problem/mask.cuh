// Which keys a query sees. A mask is two functions, key_range(query) and query_range(key), both
// half-open intervals of positions within the sequence. Tile ranges, whether a tile needs masking,
// and the masking of scores, forward (rows are queries) and backward (rows are keys), all follow
// from these two.
#pragma once

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

struct Interval {
    int begin;
    int end;

    FLASH_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
};

// Full, causal, sliding-window and tail masks in one: with offset = seqlen_k - seqlen_q (which
// aligns the mask bottom-right), query i sees key j iff
//     i + offset - window_left <= j <= i + offset + window_right,  0 <= j < seqlen_k.
// Causal is window_right = 0; kUnlimited lifts a bound. Both interval ends never decrease with the
// row, so the union over consecutive rows is the interval from the first begin to the last end.
struct BandMask {
    // Larger than any sequence, and far enough from INT_MAX that sums of three do not overflow.
    static constexpr int kUnlimited = 1 << 29;

    int seqlen_q;
    int seqlen_k;
    int window_left;
    int window_right;

    FLASH_HOST_DEVICE constexpr int offset() const { return seqlen_k - seqlen_q; }

    FLASH_HOST_DEVICE constexpr Interval key_range(int query) const {
        const int diagonal = query + offset();
        return {max_of(diagonal - window_left, 0), min_of(diagonal + window_right + 1, seqlen_k)};
    }

    FLASH_HOST_DEVICE constexpr Interval query_range(int key) const {
        const int diagonal = key - offset();
        const bool exists = key < seqlen_k;
        return {max_of(diagonal - window_right, 0),
                exists ? min_of(diagonal + window_left + 1, seqlen_q) : 0};
    }

    // Keys seen by at least one of the queries in `queries`.
    FLASH_HOST_DEVICE constexpr Interval keys_of(Interval queries) const {
        return {key_range(queries.begin).begin, key_range(min_of(queries.end, seqlen_q) - 1).end};
    }

    // Queries that see at least one of the keys in `keys`.
    FLASH_HOST_DEVICE constexpr Interval queries_of(Interval keys) const {
        return {query_range(keys.begin).begin, query_range(min_of(keys.end, seqlen_k) - 1).end};
    }

    // Does every query in `queries` see every key in `keys`? Then the tile needs no masking.
    // Queries past the sequence do not count, since their results are never stored.
    FLASH_HOST_DEVICE constexpr bool is_full(Interval queries, Interval keys) const {
        return key_range(min_of(queries.end, seqlen_q) - 1).begin <= keys.begin &&
               keys.end <= key_range(queries.begin).end;
    }
};

FLASH_HOST_DEVICE constexpr BandMask mask_of(const AttentionParams& params,
                                             const Sequence& sequence) {
    return {sequence.seqlen_q, sequence.seqlen_k, params.window_left, params.window_right};
}

// What the host asks about the mask of a call. A plan makes it once; nothing else of plan/ or
// schedule/ knows what kind of mask there is.
struct MaskSummary {
    int keys_seen;       // the most keys that a query sees; with varlen on average
    bool hides_earlier;  // by the lengths, may queries not see the first keys, ...
    bool hides_later;    // ... or the last ones? Then tiles differ in how much they see.
    bool sees_all;       // dense: does every query see every key?
    bool is_triangle;    // dense: does no query i see a key after key i?

    constexpr bool is_masked() const { return hides_earlier || hides_later; }
};

inline MaskSummary summary_of(const AttentionParams& params) {
    const int queries = params.seqlen_q;
    const int keys = params.seqlen_k;
    if (params.tile_mask.kv_tiles != nullptr)  // in memory: any tile may be hidden
        return {keys, true, true, false, false};
    const BandMask mask = mask_of(params, sequence_of<false>(params, 0));
    return {.keys_seen = min_of(mean_keys(params), mask.window_left + mask.window_right + 1),
            .hides_earlier = mask.window_left < queries,
            .hides_later = mask.window_right < keys,
            .sees_all = mask.is_full({0, queries}, {0, keys}),
            .is_triangle = mask.window_right <= -mask.offset()};
}

inline void lift_mask(AttentionParams& params) {
    params.window_left = params.window_right = BandMask::kUnlimited;
}

FLASH_HOST_DEVICE constexpr Interval tile_interval(int tile, int block) {
    return {tile * block, (tile + 1) * block};
}

// The tiles that a tile sees, or that see it, in ascending order of their numbers, as indices begin
// to end - 1. Under an interval mask the index of a tile is its number; of a list of tiles
// (tile_mask.cuh) whoever loads a tile reads its number.
struct VisibleTiles {
    int begin;
    int end;

    // The tiles of `block` keys of which some of `queries` see a key ...
    template <bool kMayBeEmpty = true>
    FLASH_HOST_DEVICE static constexpr VisibleTiles of_queries(const BandMask& mask,
                                                               Interval queries, int block) {
        return touched<kMayBeEmpty>(mask.keys_of(queries), block);
    }
    // ... and of `block` queries that see some of `keys`. kMayBeUnused: all may be past seqused_k.
    template <bool kMayBeUnused>
    FLASH_HOST_DEVICE static constexpr VisibleTiles of_keys(const BandMask& mask, Interval keys,
                                                            int block) {
        Interval queries = mask.queries_of(keys);
        if (kMayBeUnused && keys.begin >= mask.seqlen_k) queries.end = 0;
        return touched<true>(queries, block);
    }

    FLASH_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
    FLASH_HOST_DEVICE constexpr int count() const { return end - begin; }
    FLASH_HOST_DEVICE static constexpr int tile(int i) { return i; }
    FLASH_HOST_DEVICE constexpr VisibleTiles within(Interval tiles) const {
        return {max_of(tiles.begin, begin), min_of(tiles.end, end)};
    }

    // Of KV tiles: the last one that some of the queries see, and those of which all queries see
    // every key.
    FLASH_HOST_DEVICE static constexpr int last_seen_by(const BandMask& mask, Interval queries,
                                                        int block) {
        return (mask.keys_of(queries).end - 1) / block;
    }
    FLASH_HOST_DEVICE static constexpr Interval full_for(const BandMask& mask, Interval queries,
                                                         int block) {
        const int last_query = min_of(queries.end - 1, mask.seqlen_q - 1);
        return {ceil_div(mask.key_range(last_query).begin, block),
                mask.key_range(queries.begin).end / block};
    }
    // Of Q tiles: those whose queries all see every key in `keys`.
    FLASH_HOST_DEVICE static constexpr Interval seeing_all(const BandMask& mask, Interval keys,
                                                           int block) {
        const Interval first = mask.query_range(keys.begin);
        const Interval last = mask.query_range(keys.end - 1);
        const int end = min_of(first.end, last.end);
        return {ceil_div(last.begin, block),
                end == mask.seqlen_q ? ceil_div(end, block) : end / block};
    }

 private:
    // The tiles that an interval of positions touches.
    template <bool kMayBeEmpty>
    FLASH_HOST_DEVICE static constexpr VisibleTiles touched(Interval positions, int block) {
        return kMayBeEmpty && positions.empty()
                   ? VisibleTiles{0, 0}
                   : VisibleTiles{positions.begin / block, ceil_div(positions.end, block)};
    }
};

}  // namespace flash_ext
