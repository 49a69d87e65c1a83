// Hands out tiles to the CTAs of a persistent grid, whoever is free first.
#pragma once

#include <cstdint>

#include "schedule/launch_name.h"

namespace flash_ext {

// A counter in global memory that needs no initialisation: its upper bits name the launch that it
// counts for. A CTA that finds another name there starts the count. After the last draw the count
// is 0 again, for the replays of a CUDA graph.
struct TileCounter {
    static constexpr int kCountBits = 24;
    static constexpr int kMaxTiles = 1 << kCountBits;

    unsigned long long* word;  // null: there are no more tiles than CTAs, so nothing to draw
    unsigned long long name;   // the lower kCountBits are 0

    // By one thread of each CTA, before its first draw.
    __device__ __forceinline__ void start() const {
        if (word == nullptr) return;
        unsigned long long found = *static_cast<volatile unsigned long long*>(word);
        while (found >> kCountBits != name >> kCountBits) {
            const unsigned long long before = atomicCAS(word, found, name);
            if (before == found) return;
            found = before;
        }
    }

    // The next tile; tiles < gridDim.x are each CTA's first, without a draw. Every CTA draws until
    // it gets one >= total, at least once: that makes `total` draws, and at the last no CTA has
    // still to start. total < kMaxTiles.
    __device__ __forceinline__ int draw(int total) const {
        if (word == nullptr) return total;
        const auto count = static_cast<int>(atomicAdd(word, 1ull) & (kMaxTiles - 1));
        if (count == total - 1) atomicExch(word, name);
        return count + static_cast<int>(gridDim.x);
    }
};

// Of a launch in this process.
inline TileCounter new_count(unsigned long long* word) {
    static_assert(TileCounter::kCountBits == 24);  // which a name leaves free
    return {word, launch_name()};
}

}  // namespace flash_ext
