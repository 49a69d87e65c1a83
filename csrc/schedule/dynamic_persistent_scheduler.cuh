// Hands out tiles to the CTAs of a persistent grid, whoever is free first.
#pragma once

#include <cstdint>

#include "schedule/launch_epoch.h"

namespace flash_ext {

// A counter in global memory that needs no initialisation: its upper bits name the launch that it
// counts for. A CTA that finds another name there starts the count. After the last fetch the count
// is 0 again, for the replays of a CUDA graph.
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

    // The next tile; tiles < gridDim.x are each CTA's first, without a fetch. Every CTA fetches
    // until it gets one >= total, at least once: that makes `total` fetches, and at the last no CTA
    // has still to start. total < kMaxTiles.
    __device__ __forceinline__ int fetch(int total) const {
        if (word == nullptr) return total;
        const auto count = static_cast<int>(atomicAdd(word, 1ull) & (kMaxTiles - 1));
        if (count == total - 1) atomicExch(word, epoch);
        return count + static_cast<int>(gridDim.x);
    }
};

// Of a launch in this process.
inline DynamicPersistentScheduler make_dynamic_scheduler(unsigned long long* word) {
    static_assert(DynamicPersistentScheduler::kCountBits == 24);  // which a name leaves free
    return {word, launch_epoch()};
}

}  // namespace flash_ext
