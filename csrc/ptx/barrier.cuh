// Named barriers: bar.sync with an id of 1 to 15 and the number of threads that take part.
// PTX ISA, "Parallel synchronization and communication instructions: bar".
#pragma once

namespace flash_ext::ptx {

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_ext::ptx
