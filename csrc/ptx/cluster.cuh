// Thread-block clusters: CTAs that run at the same time on neighboring SMs and reach each other's
// shared memory. PTX ISA, "Cluster". For sm_90 and later; on other targets a cluster is one CTA.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t cta_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// The barrier of all threads of the cluster. What they wrote before is visible to all of them.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

// A store to the same place of another CTA's shared memory.
__device__ __forceinline__ void st_shared_of_cta(uint32_t address, uint32_t rank, uint32_t value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 target;\n"
        "mapa.shared::cluster.u32 target, %0, %1;\n"
        "st.shared::cluster.b32 [target], %2; }" ::"r"(address),
        "r"(rank), "r"(value)
        : "memory");
#endif
}

}  // namespace flash_ext::ptx
