// Grouped-query attention with few KV tiles, in FA3's backward. A CTA has a KV tile and goes over
// all query heads of its group. Where such CTAs are too few for the GPU, or too unequal, groups are
// cut into equal parts. For the kernels each part is a KV head, with the same K and V as the other
// parts (shared_key_rows()) and with gradients of its own. These are summed afterwards, always in
// the same order (kernels/common/sum_parts.cuh).
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/tile_order.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// The parts, at most `most`, with which all `tiles` (of K and V, with whole groups) take the least
// time on `sms` multiprocessors. The unit is the mean time of a tile. Without a mask tiles are
// equal, and a wave of them takes as long as one. With a mask the longest takes twice the mean;
// long ones come first, so that at the end CTAs wait for half a tile. A part costs 1 %: it reads K
// and V, and writes its dK and dV.
constexpr int best_group_parts(int64_t tiles, int group, int64_t most, bool masked, int sms) {
    if (tiles == 0) return 1;
    int best = 1;
    double least = 0;
    for (int parts = 1; parts <= group; ++parts) {
        if (group % parts != 0 || (parts > 1 && parts > most)) continue;
        const double waves = static_cast<double>(tiles * parts) / sms;
        const auto whole = static_cast<double>(ceil_div<int64_t>(tiles * parts, sms));
        const double time = (masked ? max_of(2., waves + .5) : whole) / parts * (1 + .01 * parts);
        if (parts == 1 || time < least * .97) {
            best = parts;
            least = time;
        }
    }
    return best;
}

// The parts of this call, with `key_tiles` of a head. A part of few queries has too little to do.
inline int choose_group_parts(const BackwardParams& params, int64_t key_tiles, int sms) {
    constexpr int kLeastRows = 512;  // of Q, of a part
    const int group = params.heads_q / params.heads_k;
    const bool masked = is_masked(params) || params.cu_seqlens_q != nullptr;
    return best_group_parts(key_tiles * params.heads_k * tensor_batches(params), group,
                            int64_t{group} * mean_queries(params) / kLeastRows, masked, sms);
}

}  // namespace flash_ext
