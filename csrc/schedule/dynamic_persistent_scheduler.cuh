// Hands out the tiles of a persistent grid: the CTA that is idle first gets the next tile.
#pragma once

#include <cstdint>

#include "schedule/launch_epoch.h"

namespace flash_ext {

// A counter in global memory that needs no initialization: its upper bits are the epoch of the
// launch that it counts for. A CTA that finds another epoch there starts the count. After the last
// fetch the count is 0 again, for the replays of a CUDA graph.
struct DynamicPersistentScheduler {
    static constexpr int kCountBits = 24;
    static constexpr int kMaxTiles = 1 << kCountBits;

    unsigned long long* word;  // null: there are no more tiles than CTAs, so nothing to fetch
    unsigned long long epoch;  // the lower kCountBits are 0

    // By one thread of each CTA, before its first fetch.
    __device__ __forceinline__ void start() const {
        if (word == nullptr) return;
        unsigned long long found = *static_cast<volatile unsigned long long*>(word);
        while (found >> kCountBits != epoch >> kCountBits) {
            const unsigned long long before = atomicCAS(word, found, epoch);
            if (before == found) return;
            found = before;
        }
    }

    // The next tile. Tiles below gridDim.x are the CTAs' first ones and need no fetch. Every CTA
    // fetches until it gets a tile >= total, so at least once: that makes `total` fetches, and at
    // the last one every CTA has started. total < kMaxTiles.
    __device__ __forceinline__ int fetch(int total) const {
        if (word == nullptr) return total;
        const auto count = static_cast<int>(atomicAdd(word, 1ull) & (kMaxTiles - 1));
        if (count == total - 1) atomicExch(word, epoch);
        return count + static_cast<int>(gridDim.x);
    }
};

// For one launch.
inline DynamicPersistentScheduler make_dynamic_scheduler(unsigned long long* word) {
    static_assert(DynamicPersistentScheduler::kCountBits == 24);  // which an epoch leaves free
    return {word, launch_epoch()};
}

}  // namespace flash_ext
