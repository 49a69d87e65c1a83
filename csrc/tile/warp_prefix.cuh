// What the lanes of a warp up to each one add up to.
#pragma once

#include "tile/register_tile.cuh"

namespace flash_ext {

// combine(x of lane 0, ..., x of this lane).
template <class Combine>
FLASH_DEVICE int warp_prefix(int x, Combine combine) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, x, distance);
        if (lane_id() >= distance) x = combine(x, before);
    }
    return x;
}
FLASH_DEVICE int warp_prefix_sum(int x) {
    return warp_prefix(x, [](int a, int b) { return a + b; });
}

}  // namespace flash_ext
