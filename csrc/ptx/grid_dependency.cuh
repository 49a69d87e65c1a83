// Programmatic dependent launch: a kernel begins before the one that it follows in its stream has
// ended. PTX ISA, "Parallel synchronization and communication instructions: griddepcontrol". For
// sm_90 and later; no operation on other targets, where no kernel begins early.
#pragma once

#include "ptx/device.h"

namespace flash_ext::ptx {

// The next kernel may begin once all CTAs have reached this point or ended.
FLASH_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its writes are visible.
FLASH_DEVICE void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
