// FA3's backward where KV tiles are few, or long. A CTA has a KV tile and goes over all queries of
// its head: those of all query heads of a group. Where such CTAs are too few for the GPU, too
// unequal, or have too many rows in L2, groups are cut into equal parts; and where that does not
// suffice and all queries see all keys (cross attention to few keys), the Q tiles of each head. For
// the kernels each part is a KV head, with the same K and V as the other parts (shared_key_rows())
// and with gradients of its own. These are summed afterwards, always in the same order
// (kernels/common/sum_parts.cuh).
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/tile_order.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// The tiles that are to be cut: of K and V, with whole heads or groups.
struct TilesToCut {
    int64_t tiles;
    int64_t rows;  // of Q, of a tile
    int sms;
    bool unequal = false;  // under a mask, or in sequences of several lengths
    // Of unequal tiles:
    double waiting = 0;    // how long a CTA waits at the end, in mean times of a tile
    int64_t l2_bytes = 0;  // causal: of Q, dO and dQ's sums, for the tiles at work at a time
    double l2_cost = 0;    // of each 64 MB beyond the first ones
    int64_t heads = 0;     // deterministic: KV heads of all batches; a head's tiles add in turn
};

// The time with each tile in so many parts; the unit is the mean time of a tile. A part costs
// 1.2 %, and the time of 300 rows: it writes its dK and dV in float32, which are then read again.
//
// Equal tiles come in waves, which take as long as one. Of unequal ones the longest takes twice the
// mean, and long ones come first. Under a causal mask the CTAs of a head get out of step, and share
// its rows only while they are in L2: each 64 MB beyond the first costs 8 %, with more than 32,768
// keys 3 %. In deterministic mode they keep in step, as they add in turn: few heads wait for each
// other, many have too many rows at work. Fitted to the tables in docs/notes/018-few-kv-heads.md.
constexpr double time_in_parts(const TilesToCut& x, int parts) {
    constexpr double kInL2 = 64 << 20;
    const double cost = 1 + parts * (.012 + 300. / static_cast<double>(x.rows));
    if (!x.unequal)
        return cost * static_cast<double>(ceil_div<int64_t>(x.tiles * parts, x.sms)) / parts;
    const double waves = static_cast<double>(x.tiles * parts) / x.sms;
    const double time = cost * max_of(2., waves + x.waiting) / parts;
    if (x.heads > 0) {
        const auto heads = static_cast<double>(x.heads * parts);
        return time * (1 + .6 / heads + .2 * max_of(0., heads / 16 - 1));
    }
    const double in_l2 = static_cast<double>(x.l2_bytes) / (kInL2 * parts);
    return time * (1 + x.l2_cost * max_of(0., in_l2 - 1));
}

// The parts from 1 to `most` that divide `whole` with which the tiles take the least time, to 3 %.
constexpr int best_parts(const TilesToCut& x, int64_t most, int whole) {
    int best = 1;
    if (x.tiles == 0) return best;
    for (int parts = 2; parts <= most; ++parts)
        if (whole % parts == 0 && time_in_parts(x, parts) < .97 * time_in_parts(x, best))
            best = parts;
    return best;
}

struct Parts {
    int groups;   // into which a group is cut
    int queries;  // and the queries of each head
};

// The parts of this call, with `key_tiles` of a head. A part of few queries has too little to do.
// wide: for the kernels of wide heads, which do not add to dQ in memory, and cannot cut queries.
inline Parts choose_parts(const BackwardParams& params, int64_t key_tiles, bool wide, int sms) {
    constexpr int kLeastRows = 512;  // of Q, of a part
    const int group = params.heads_q / params.heads_k;
    const bool packed = params.cu_seqlens_q != nullptr;
    const int64_t heads = int64_t{params.heads_k} * tensor_batches(params);
    TilesToCut x{.tiles = key_tiles * heads,
                 .rows = int64_t{group} * mean_queries(params),
                 .sms = sms,
                 .unequal = is_masked(params) || packed,
                 .waiting = packed ? .5 : .1};
    constexpr int64_t kKeysAtWork = 2 * 128 * 128;  // two waves of tiles of 128 keys
    if (params.deterministic && !wide) {
        x.heads = heads;  // of packed sequences those of one, as measured
    } else if (is_masked(params) && params.window_left >= params.seqlen_q) {
        const int64_t heads_at_work = ceil_div<int64_t>(kKeysAtWork, max_of(mean_keys(params), 1));
        const int64_t rows = min_of<int64_t>(heads_at_work * mean_queries(params), kKeysAtWork);
        const int64_t row_bytes =
            wide ? int64_t{element_bytes(params.element_type)} *
                       (params.head_dim + params.head_dim_v)
                 : bytes_of_q_do_dq(params.element_type, params.head_dim, params.head_dim_v);
        x.l2_bytes = rows * group * row_bytes;
        x.l2_cost = mean_keys(params) <= kKeysAtWork ? .08 : .03;
    }
    const int64_t most = int64_t{group} * mean_queries(params) / kLeastRows;
    const int groups = best_parts(x, min_of<int64_t>(most, group), group);
    if (x.unequal || wide || x.tiles * groups >= sms) return {groups, 1};
    x.tiles *= groups;
    x.rows /= groups;
    // Any number divides the Q tiles well enough.
    return {groups, best_parts(x, min_of<int64_t>(most / groups, sms), 0)};
}

}  // namespace flash_ext
