// mbarrier: a barrier in shared memory whose phases complete after a set number of arrivals, so
// that arriving and waiting are separate steps. PTX ISA, "Parallel synchronization and
// communication instructions: mbarrier".
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

FLASH_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

FLASH_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
                 : "memory");
}

// This thread arrives for others, too.
FLASH_DEVICE void mbarrier_arrive(uint32_t barrier, int arrivals) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(arrivals)
                 : "memory");
}

// One arrival if `active`, by a predicate and not by a branch.
FLASH_DEVICE void mbarrier_arrive_if(bool active, uint32_t barrier) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 state; setp.ne.b32 p, %0, 0; "
        "@p mbarrier.arrive.shared.b64 state, [%1]; }" ::"r"(int{active}),
        "r"(barrier)
        : "memory");
}

// This thread arrives. The phase also waits until TMA has brought this number of bytes.
FLASH_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}

// Makes the barriers that this thread has initialized visible to TMA.
FLASH_DEVICE void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// This thread arrives when all cp.async that it has issued so far have written their bytes.
FLASH_DEVICE void mbarrier_arrive_after_cp_async(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Has the phase of this parity ended?
FLASH_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
    return ended != 0;
}

// Waits for the end of the phase of this parity. Parities alternate, 0 first. On a fresh barrier
// the phase of parity 1 counts as ended.
FLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t ended;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
            "p; }"
            : "=r"(ended)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (ended == 0);
#else
    while (!mbarrier_test(barrier, parity)) {
    }
#endif
}

// This thread arrives, unless x is y. It does so when x is known.
FLASH_DEVICE void mbarrier_arrive_unless(float x, float y, uint32_t barrier) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 state; setp.neu.f32 p, %0, %1; "
        "@p mbarrier.arrive.shared.b64 state, [%2]; }" ::"f"(x),
        "f"(y), "r"(barrier)
        : "memory");
}

}  // namespace flash_ext::ptx
