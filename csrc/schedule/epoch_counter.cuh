// A counter in global memory that needs no initialization: its upper bits are the epoch of the
// launch that it counts for. Whoever finds another epoch there starts the count. And the scheduler
// of persistent grids, which is one.
#pragma once

#include "ptx/memory.cuh"
#include "schedule/launch_epoch.h"

namespace flash_ext {

struct EpochCounter {
    static constexpr int kCountBits = 24;  // which an epoch leaves free
    static constexpr int kMaxCount = 1 << kCountBits;

    unsigned long long* word;
    unsigned long long epoch;  // the lower kCountBits are 0

    // Before the first next(), by one thread of each CTA that counts.
    FLASH_DEVICE void start() const {
        unsigned long long found = *static_cast<volatile unsigned long long*>(word);
        while (found >> kCountBits != epoch >> kCountBits) {
            const unsigned long long before = atomicCAS(word, found, epoch);
            if (before == found) return;
            found = before;
        }
    }

    // How many calls came before, of `total` in all. After the last one, before which every CTA
    // has started, the count is 0 again, for the replays of a CUDA graph. total < kMaxCount.
    // kOrdered: what was written before any earlier call is then visible.
    template <bool kOrdered = false>
    FLASH_DEVICE int next(int total) const {
        const auto before = kOrdered ? ptx::atom_add_acq_rel(word, 1) : atomicAdd(word, 1ull);
        const auto count = static_cast<int>(before & (kMaxCount - 1));
        if (count == total - 1) atomicExch(word, epoch);
        return count;
    }
};

// Hands out the tiles of a persistent grid: the CTA that is idle first gets the next tile.
struct DynamicPersistentScheduler {
    EpochCounter fetched;  // word null: there are no more tiles than CTAs, so nothing to fetch

    // By one thread of each CTA, before its first fetch.
    FLASH_DEVICE void start() const {
        if (fetched.word != nullptr) fetched.start();
    }

    // The next tile. Tiles below gridDim.x are the CTAs' first ones and need no fetch. Every CTA
    // fetches until it gets a tile >= total, so at least once: that makes `total` fetches.
    FLASH_DEVICE int fetch(int total) const {
        if (fetched.word == nullptr) return total;
        return fetched.next(total) + static_cast<int>(gridDim.x);
    }
};

inline DynamicPersistentScheduler make_dynamic_scheduler(unsigned long long* word) {
    return {{word, launch_epoch()}};
}

}  // namespace flash_ext
