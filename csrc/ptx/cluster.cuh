// Thread-block clusters: CTAs that run at the same time on neighboring SMs and reach each other's
// shared memory. PTX ISA, "Cluster". For sm_90 and later.
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// This CTA's number in the cluster.
FLASH_DEVICE uint32_t cta_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The cluster's number in the grid.
FLASH_DEVICE uint32_t cluster_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

// The barrier of all threads of the cluster. Orders no memory accesses but initialized mbarriers
// (mbarrier_fence_init): a release waits for all that the thread has stored to global memory.
FLASH_DEVICE void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
FLASH_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same barrier, after which all that was stored before is visible to all.
FLASH_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    cluster_wait();
}

// An address of this CTA's shared memory as the same place of another CTA's.
FLASH_DEVICE uint32_t address_in_cta(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Loads from a CTA's shared memory, also this one's.
FLASH_DEVICE void ld_cluster(float& x, uint32_t address) {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
}
FLASH_DEVICE void ld_cluster(float4& x, uint32_t address) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
}

// Stores to a CTA's shared memory. Its mbarrier counts the bytes, once they are there.
FLASH_DEVICE void st_async(uint32_t target, uint32_t value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(target),
        "r"(value), "r"(barrier)
        : "memory");
}

}  // namespace flash_ext::ptx
