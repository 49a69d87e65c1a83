// Named barriers: bar.sync with an id of 1 to 15 and the number of threads that take part.
// PTX ISA, "Parallel synchronization and communication instructions: bar".
#pragma once

#include "ptx/device.h"

namespace flash_ext::ptx {

FLASH_DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
FLASH_DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_ext::ptx
