// A ring of tiles in shared memory that one thread fills by TMA and warps read, or the other way
// round. A slot has two mbarriers: "full" counts the bytes that come in, or the warps that have
// written; "empty" those who have read.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace flash_ext {

// A place in a ring: each side steps through the slots with one of its own.
template <int kSlots>
struct RingCursor {
    uint32_t slot = 0;
    uint32_t round = 0;  // parity

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) {
            slot = 0;
            round ^= 1;
        }
    }
};

template <int kSlots_, int kSlotBytes_>
struct TmaRing {
    static constexpr int kSlots = kSlots_;
    static constexpr int kSlotBytes = kSlotBytes_;
    static constexpr int kBarrierBytes = kSlots * 16;
    using Cursor = RingCursor<kSlots>;

    uint32_t slots;
    uint32_t barriers;  // (full, empty) of each slot

    // By one thread, before any other uses the ring.
    __device__ __forceinline__ void init(int readers, int writers = 1) const {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            ptx::mbarrier_init(barriers + 16 * i, writers);
            ptx::mbarrier_init(barriers + 16 * i + 8, readers);
        }
    }

    __device__ __forceinline__ uint32_t tile(const Cursor& c) const {
        return slots + c.slot * kSlotBytes;
    }
    __device__ __forceinline__ uint32_t full(const Cursor& c) const {
        return barriers + 16 * c.slot;
    }
    __device__ __forceinline__ uint32_t empty(const Cursor& c) const { return full(c) + 8; }

    // The writer: waits until the readers are done with the slot.
    __device__ __forceinline__ void acquire(const Cursor& c) const {
        ptx::mbarrier_wait(empty(c), c.round ^ 1);
    }
    // Says that it is full; by as many threads as init() was told.
    __device__ __forceinline__ void publish(const Cursor& c) const {
        ptx::mbarrier_arrive(full(c));
    }
    // The readers: wait until the slot is full, ...
    __device__ __forceinline__ void wait(const Cursor& c) const {
        ptx::mbarrier_wait(full(c), c.round);
    }
    // ... which they may have asked before, ...
    __device__ __forceinline__ bool ready(const Cursor& c) const {
        return ptx::mbarrier_test(full(c), c.round);
    }
    __device__ __forceinline__ void wait(const Cursor& c, bool ready) const {
        if (!ready) wait(c);
    }
    // ... and let go of it; by as many threads as init() was told.
    __device__ __forceinline__ void release(const Cursor& c) const {
        ptx::mbarrier_arrive(empty(c));
    }
};

}  // namespace flash_ext
