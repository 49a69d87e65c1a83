// Thread-block clusters: CTAs that run at the same time on neighboring SMs and reach each other's
// shared memory. PTX ISA, "Cluster". For sm_90 and later.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

// This CTA's number in the cluster.
__device__ __forceinline__ uint32_t cta_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
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

// An address of this CTA's shared memory as the same place of another CTA's.
__device__ __forceinline__ uint32_t address_in_cta(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Stores to a CTA's shared memory. Its mbarrier counts the bytes, once they are there.
__device__ __forceinline__ void st_async(uint32_t target, uint32_t value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(target),
        "r"(value), "r"(barrier)
        : "memory");
}

}  // namespace flash_ext::ptx
