// A ring of slots in shared memory: all threads of the CTA fill them with cp.async, all of its
// warps read them. A slot has two mbarriers, "full" and "empty", so that a warp waits for its data
// and for the readers that are still in its way, but never for all the others to be where it is.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace flash_ext {

// Fillings are counted from 0; filling i lies in slot i % kSlots.
template <int kSlots, int kSlotBytes, int kThreads>
struct Ring {
    static constexpr int kBarrierBytes = kSlots * 16;
    static constexpr int kBytes = kSlots * kSlotBytes + kBarrierBytes;

    uint32_t slots;  // followed by (full, empty) of each

    // By one thread, before any other uses the ring.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            ptx::mbarrier_init(full(slot), kThreads);
            ptx::mbarrier_init(empty(slot), kThreads);
        }
    }

    __device__ __forceinline__ uint32_t slot(uint32_t i) const {
        return slots + i % kSlots * kSlotBytes;
    }

    // The writers: waits until all threads have released the slot, ...
    __device__ __forceinline__ void acquire(uint32_t i) const {
        ptx::mbarrier_wait(empty(i), i / kSlots % 2 ^ 1);
    }
    // ... and this thread's copies are under way (asynchronous) or its stores done (otherwise).
    __device__ __forceinline__ void publish(uint32_t i, bool asynchronous) const {
        if (asynchronous) {
            ptx::mbarrier_arrive_after_cp_async(full(i));
        } else {
            ptx::mbarrier_arrive(full(i));
        }
    }

    // The readers: waits until filling i is there, ...
    __device__ __forceinline__ void wait(uint32_t i) const {
        ptx::mbarrier_wait(full(i), i / kSlots % 2);
    }
    // ... and this thread has read it.
    __device__ __forceinline__ void release(uint32_t i) const { ptx::mbarrier_arrive(empty(i)); }

 private:
    __device__ __forceinline__ uint32_t full(uint32_t i) const {
        return slots + kSlots * kSlotBytes + i % kSlots * 16;
    }
    __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(i) + 8; }
};

}  // namespace flash_ext
