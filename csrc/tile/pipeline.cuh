// A pipeline of stages in shared memory. Producers fill a stage, one thread by TMA or several by
// plain stores, and consumers read it. Each stage has two mbarriers: "full" counts the bytes that
// TMA brings and the producers that have arrived, "empty" the consumers that have read.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace flash_ext {

// A position in a pipeline: a stage and its phase. Producers and consumers each have their own.
template <int kStages>
struct PipelineState {
    uint32_t stage = 0;
    uint32_t phase = 0;  // parity of the number of earlier passes through the pipeline

    FLASH_DEVICE void advance() {
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

    FLASH_DEVICE Pipeline(const Stages& stages_, const Barriers& barriers_)
        : stages(ptx::shared_address(&stages_)), barriers(ptx::shared_address(&barriers_)) {}

    // By one thread, before any other uses the pipeline. The numbers of threads that release a
    // stage and that commit one.
    FLASH_DEVICE void init(int consumers, int producers = 1) const {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(barriers + 16 * i, producers);
            ptx::mbarrier_init(barriers + 16 * i + 8, consumers);
        }
    }

    FLASH_DEVICE uint32_t stage(const State& s) const { return stages + s.stage * kStageBytes; }
    FLASH_DEVICE uint32_t full(const State& s) const { return barriers + 16 * s.stage; }
    FLASH_DEVICE uint32_t empty(const State& s) const { return full(s) + 8; }

    // A producer waits until all consumers have released the stage ...
    FLASH_DEVICE void producer_acquire(const State& s) const {
        ptx::mbarrier_wait(empty(s), s.phase ^ 1);
    }
    // ... and commits it: either it has filled it, or TMA will bring this number of bytes.
    FLASH_DEVICE void producer_commit(const State& s) const { ptx::mbarrier_arrive(full(s)); }
    FLASH_DEVICE void producer_expect(const State& s, int bytes) const {
        ptx::mbarrier_arrive_expect(full(s), bytes);
    }

    // A consumer waits until the stage is full, unless an earlier test has shown that it is, ...
    FLASH_DEVICE bool consumer_test(const State& s) const {
        return ptx::mbarrier_test(full(s), s.phase);
    }
    FLASH_DEVICE void consumer_wait(const State& s, bool is_full = false) const {
        if (!is_full) ptx::mbarrier_wait(full(s), s.phase);
    }
    // ... and releases it after reading.
    FLASH_DEVICE void consumer_release(const State& s) const { ptx::mbarrier_arrive(empty(s)); }
    FLASH_DEVICE void consumer_release(const State& s, int consumers) const {
        ptx::mbarrier_arrive(empty(s), consumers);
    }
    FLASH_DEVICE void consumer_release_if(bool active, const State& s) const {
        ptx::mbarrier_arrive_if(active, empty(s));
    }
};

// A pipeline that all threads of the CTA fill with cp.async and read. Its state is the number of an
// iteration, counted from 0: fewer registers if the loop has that number anyway.
template <int kStages, int kStageBytes, int kThreads>
struct CpAsyncPipeline {
    struct Storage {
        char stages[kStages][kStageBytes];
        uint64_t full_empty[kStages][2];
    };

    uint32_t stages;  // the address of a Storage

    FLASH_DEVICE void init() const {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(full(i), kThreads);
            ptx::mbarrier_init(empty(i), kThreads);
        }
    }

    FLASH_DEVICE uint32_t stage(uint32_t i) const { return stages + i % kStages * kStageBytes; }
    FLASH_DEVICE uint32_t full(uint32_t i) const {
        return stages + kStages * kStageBytes + i % kStages * 16;
    }
    FLASH_DEVICE uint32_t empty(uint32_t i) const { return full(i) + 8; }

    FLASH_DEVICE void producer_acquire(uint32_t i) const {
        ptx::mbarrier_wait(empty(i), i / kStages % 2 ^ 1);
    }
    // After cp.async copies (asynchronous), or after plain stores.
    FLASH_DEVICE void producer_commit(uint32_t i, bool asynchronous) const {
        if (asynchronous) {
            ptx::mbarrier_arrive_after_cp_async(full(i));
        } else {
            ptx::mbarrier_arrive(full(i));
        }
    }
    FLASH_DEVICE void consumer_wait(uint32_t i) const {
        ptx::mbarrier_wait(full(i), i / kStages % 2);
    }
    FLASH_DEVICE void consumer_release(uint32_t i) const { ptx::mbarrier_arrive(empty(i)); }
};

}  // namespace flash_ext
