// The parameters of the kernel for few queries (decode.cuh).
#pragma once

#include "plan/launchers.h"
#include "problem/params.h"
#include "schedule/launch_epoch.h"
#include "schedule/split_by_length.cuh"

namespace flash_ext {

struct Fa3DecodeParams : ForwardParams {
    unsigned long long epoch;  // of the counters
    float exponent_scale;
    int cluster;  // splits of one; with 16 bits all or kMaxClusterSplits
    SplitsByLength by_length;
    int clusters;  // of a tile, unless splits are by length
    int heads;     // of tiles
    int tiles;     // of a head
    // Divisions would take a large part of a short call.
    Divisor by_splits, by_clusters, by_heads, by_tiles;
};

inline Fa3DecodeParams decode_params(const ForwardParams& call, const ForwardKernel& kernel) {
    const int cluster = kernel.decode_cluster, splits = call.num_splits;
    const int clusters = ceil_div(splits, cluster);
    const int heads = call.pack_gqa_log2 > 0 ? call.heads_k : call.heads_q;
    const int tiles = call.cu_seqlens_q ? 1 : max_of(call.tile_order.tiles / splits, 1);
    return {call,
            launch_epoch(),
            exponent_scale(call),
            cluster,
            kernel.by_length,
            clusters,
            heads,
            tiles,
            Divisor(splits),
            Divisor(clusters),
            Divisor(heads),
            Divisor(tiles)};
}

}  // namespace flash_ext
