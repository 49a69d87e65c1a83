// Hands out the tiles of a persistent grid: the CTA that is idle first gets the next tile.
#pragma once

#include "schedule/epoch_counter.cuh"

namespace flash_ext {

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

// For one launch.
inline DynamicPersistentScheduler make_dynamic_scheduler(unsigned long long* word) {
    return {{word, launch_epoch()}};
}

}  // namespace flash_ext
