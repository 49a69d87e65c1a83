// Named barriers: bar.sync with an id of 1 to 15 and the number of threads that take part.
// PTX ISA, "Parallel synchronization and communication instructions: bar".
#pragma once

namespace flash_ext::ptx {

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Also tells all of them whether any thread says so.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool here) {
    int any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; "
        "selp.s32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(static_cast<int>(here)), "r"(id), "r"(threads)
        : "memory");
    return any != 0;
}

// Arrives without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_ext::ptx
