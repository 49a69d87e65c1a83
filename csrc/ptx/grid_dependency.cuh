// Programmatic dependent launch: a kernel begins before the one that it follows in its stream has
// ended. PTX ISA, "Parallel synchronization and communication instructions: griddepcontrol".
#pragma once

namespace flash_ext::ptx {

// The kernel behind this one may begin, as soon as all CTAs have come here or ended.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_grid_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_ext::ptx
