// A counter in global memory that needs no initialization: its upper bits are the epoch of the
// launch that it counts for. Whoever finds another epoch there starts the count.
#pragma once

#include <cstdint>

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

}  // namespace flash_ext
