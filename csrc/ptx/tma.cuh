// TMA: copies of tiles between global and shared memory by the copy engine, described by a tensor
// map. PTX ISA, "Data movement and conversion instructions: asynchronous copy".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_ext::ptx {

// A box of the tensor at coordinates (x, y, z, w), innermost first, to shared memory; the barrier
// counts its bytes.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const CUtensorMap& map,
                                            uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Consecutive bytes, a multiple of 16 at addresses that are multiples of 16, to shared memory.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Adds consecutive floats in shared memory to those in global memory; part of a bulk group.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

// Closes a group of the bulk copies out of shared memory that this thread has issued so far.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until shared memory has been read by all but the latest kPending groups.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the latest kPending groups are done.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// What this thread has written to shared memory by ordinary stores, for the copy engine and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace flash_ext::ptx
