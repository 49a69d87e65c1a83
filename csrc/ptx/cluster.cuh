// Thread-block clusters: CTAs that run at the same time on neighboring SMs and reach each other's
// shared memory. PTX ISA, "Cluster". For sm_90 and later.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// This CTA's number in the cluster; 0 on other targets.
__device__ __forceinline__ uint32_t cta_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// The barrier of all threads of the cluster. Orders no memory accesses but initialized mbarriers
// (mbarrier_fence_init): a release waits for all that the thread has stored to global memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Stores to the same place of a CTA's shared memory. Its mbarrier counts the four bytes, once they
// are there.
__device__ __forceinline__ void st_async_to_cta(uint32_t address, uint32_t rank, uint32_t value,
                                                uint32_t barrier) {
    asm volatile(
        "{ .reg .b32 target, counter;\n"
        "mapa.shared::cluster.u32 target, %0, %1;\n"
        "mapa.shared::cluster.u32 counter, %3, %1;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [target], %2, [counter]; }" ::
            "r"(address),
        "r"(rank), "r"(value), "r"(barrier)
        : "memory");
}

}  // namespace flash_ext::ptx
