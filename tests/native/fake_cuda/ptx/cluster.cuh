#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "ptx/shared.cuh"

namespace flash_ext::ptx {

// A cluster of one CTA.
inline uint32_t cta_rank() { return 0; }
inline uint32_t cluster_id() { return blockIdx.x; }
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { __syncthreads(); }
inline void cluster_sync() { __syncthreads(); }
inline uint32_t address_in_cta(uint32_t address, uint32_t) { return address; }
template <class T>
void ld_cluster(T& x, uint32_t address) {
    ld_shared(x, address);
}
inline void st_async(uint32_t, uint32_t, uint32_t) { std::abort(); }

}  // namespace flash_ext::ptx
