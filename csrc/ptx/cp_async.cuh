// cp.async: 16-byte copies from global to shared memory that bypass the registers. PTX ISA, "Data
// movement and conversion instructions: cp.async".
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// Copies this number of bytes, at most 16, and writes zeros after them up to 16.
FLASH_DEVICE void cp_async_up_to_16(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(bytes)
                 : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes and reads nothing when `valid` is false.
FLASH_DEVICE void cp_async_16(uint32_t shared, const void* global, bool valid) {
    cp_async_up_to_16(shared, global, valid ? 16 : 0);
}

FLASH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are still in flight.
template <int kPending>
FLASH_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
