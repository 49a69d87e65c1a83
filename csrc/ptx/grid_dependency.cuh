// Programmatic dependent launch: a kernel begins before the one that it follows in its stream has
// ended. PTX ISA, "Parallel synchronization and communication instructions: griddepcontrol".
// For sm_90 and later; nothing elsewhere, where kernels never begin early.
#pragma once

namespace flash_ext::ptx {

// The kernel behind this one may begin, as soon as all CTAs have come here or ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
