// A pipeline of stages in shared memory that all threads of the CTA fill with cp.async and all of
// its warps read. Each stage has two mbarriers, "full" and "empty". So a warp waits for data and
// for the readers of the stage that it overwrites, but never for all warps to reach the same point.
// As tile/pipeline.cuh, but its state is the number of an iteration, which takes fewer registers
// where the loop has that number anyway.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace flash_ext {

// Iterations are counted from 0; iteration i has stage i % kStages.
template <int kStages, int kStageBytes, int kThreads>
struct CpAsyncPipeline {
    // A member of a kernel's SharedStorage.
    struct Storage {
        char stages[kStages][kStageBytes];
        uint64_t full_empty[kStages][2];
    };

    uint32_t stages;  // the address of a Storage

    // By one thread, before any other uses the pipeline.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(full(i), kThreads);
            ptx::mbarrier_init(empty(i), kThreads);
        }
    }

    __device__ __forceinline__ uint32_t stage(uint32_t i) const {
        return stages + i % kStages * kStageBytes;
    }

    // A producer waits until all threads have released the stage, ...
    __device__ __forceinline__ void producer_acquire(uint32_t i) const {
        ptx::mbarrier_wait(empty(i), i / kStages % 2 ^ 1);
    }
    // ... and commits it: after its cp.async copies (asynchronous), or after its plain stores.
    __device__ __forceinline__ void producer_commit(uint32_t i, bool asynchronous) const {
        if (asynchronous) {
            ptx::mbarrier_arrive_after_cp_async(full(i));
        } else {
            ptx::mbarrier_arrive(full(i));
        }
    }

    // A consumer waits until the stage is full, ...
    __device__ __forceinline__ void consumer_wait(uint32_t i) const {
        ptx::mbarrier_wait(full(i), i / kStages % 2);
    }
    // ... and releases it after reading.
    __device__ __forceinline__ void consumer_release(uint32_t i) const {
        ptx::mbarrier_arrive(empty(i));
    }

 private:
    __device__ __forceinline__ uint32_t full(uint32_t i) const {
        return stages + kStages * kStageBytes + i % kStages * 16;
    }
    __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(i) + 8; }
};

}  // namespace flash_ext
