// FA3's backward where KV tiles are few. A CTA has a KV tile and goes over all queries of its head:
// those of all query heads of a group. Where such CTAs are too few for the GPU, or too unequal,
// groups are cut into equal parts; and where that does not suffice and all queries see all keys
// (cross attention to few keys), the Q tiles of each head. For the kernels each part is a KV head,
// with the same K and V as the other parts (shared_key_rows()) and with gradients of its own. These
// are summed afterwards, always in the same order (kernels/common/sum_parts.cuh).
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/tile_order.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// The parts from 1 to `most` that divide `whole` with which all `tiles` (of K and V, with whole
// heads or groups) take the least time on `sms` multiprocessors. The unit is the mean time of a
// tile. Without a mask tiles are equal, and a wave of them takes as long as one. With a mask the
// longest takes twice the mean; long ones come first, so that at the end CTAs wait for half a tile.
// A part costs 1 %: it reads K and V, and writes its dK and dV.
constexpr int best_parts(int64_t tiles, int64_t most, int whole, bool masked, int sms) {
    if (tiles == 0) return 1;
    int best = 1;
    double least = 0;
    for (int parts = 1; parts == 1 || parts <= most; ++parts) {
        if (whole % parts != 0) continue;
        const double waves = static_cast<double>(tiles * parts) / sms;
        const auto rounds = static_cast<double>(ceil_div<int64_t>(tiles * parts, sms));
        const double time = (masked ? max_of(2., waves + .5) : rounds) / parts * (1 + .01 * parts);
        if (parts == 1 || time < least * .97) {
            best = parts;
            least = time;
        }
    }
    return best;
}

struct Parts {
    int groups;   // into which a group is cut
    int queries;  // and the queries of each head
};

// The parts of this call, with `key_tiles` of a head. A part of few queries has too little to do.
// may_cut_queries: can the kernels do that?
inline Parts choose_parts(const BackwardParams& params, int64_t key_tiles, bool may_cut_queries,
                          int sms) {
    constexpr int kLeastRows = 512;  // of Q, of a part
    const int group = params.heads_q / params.heads_k;
    const bool masked = is_masked(params) || params.cu_seqlens_q != nullptr;
    const int64_t tiles = key_tiles * params.heads_k * tensor_batches(params);
    const int64_t most = int64_t{group} * mean_queries(params) / kLeastRows;
    const int groups = best_parts(tiles, min_of<int64_t>(most, group), group, masked, sms);
    if (masked || !may_cut_queries || tiles * groups >= sms) return {groups, 1};
    // Any number divides the Q tiles well enough.
    return {groups, best_parts(tiles * groups, min_of<int64_t>(most / groups, sms), 0, false, sms)};
}

}  // namespace flash_ext
