// A pipeline of stages in shared memory that one thread fills by TMA and warps read, or the other
// way round. Each stage has two mbarriers: "full" counts the bytes that come in, or the threads
// that have written; "empty" those that have read.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace flash_ext {

// A place in a pipeline. Each side steps through the stages with a state of its own.
template <int kStages>
struct PipelineState {
    uint32_t stage = 0;
    uint32_t phase = 0;  // parity of the number of times that the stage was filled before

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <int kStages_, int kStageBytes_>
struct Pipeline {
    static constexpr int kStages = kStages_;
    static constexpr int kStageBytes = kStageBytes_;
    using State = PipelineState<kStages>;

    // Members of a kernel's SharedStorage.
    struct Stages {
        char bytes[kStages][kStageBytes];
    };
    struct Barriers {
        uint64_t full_empty[kStages][2];
    };

    uint32_t stages;
    uint32_t barriers;

    __device__ __forceinline__ Pipeline(const Stages& stages_, const Barriers& barriers_)
        : stages(ptx::shared_address(&stages_)), barriers(ptx::shared_address(&barriers_)) {}

    // By one thread, before any other uses the pipeline: how many threads release and commit.
    __device__ __forceinline__ void init(int consumers, int producers = 1) const {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(barriers + 16 * i, producers);
            ptx::mbarrier_init(barriers + 16 * i + 8, consumers);
        }
    }

    __device__ __forceinline__ uint32_t stage(const State& s) const {
        return stages + s.stage * kStageBytes;
    }
    __device__ __forceinline__ uint32_t full(const State& s) const {
        return barriers + 16 * s.stage;
    }
    __device__ __forceinline__ uint32_t empty(const State& s) const { return full(s) + 8; }

    // A producer waits until the consumers are done with the stage ...
    __device__ __forceinline__ void producer_acquire(const State& s) const {
        ptx::mbarrier_wait(empty(s), s.phase ^ 1);
    }
    // ... and says that it has filled it, or that so many bytes will come by TMA.
    __device__ __forceinline__ void producer_commit(const State& s) const {
        ptx::mbarrier_arrive(full(s));
    }
    __device__ __forceinline__ void producer_expect(const State& s, int bytes) const {
        ptx::mbarrier_arrive_expect(full(s), bytes);
    }

    // A consumer waits until the stage is full, which it may have tested before, ...
    __device__ __forceinline__ bool consumer_test(const State& s) const {
        return ptx::mbarrier_test(full(s), s.phase);
    }
    __device__ __forceinline__ void consumer_wait(const State& s, bool is_full = false) const {
        if (!is_full) ptx::mbarrier_wait(full(s), s.phase);
    }
    // ... and says that it has read it.
    __device__ __forceinline__ void consumer_release(const State& s) const {
        ptx::mbarrier_arrive(empty(s));
    }
};

}  // namespace flash_ext
