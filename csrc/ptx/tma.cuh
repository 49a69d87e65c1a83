// TMA: asynchronous copies between global and shared memory; a tensor map describes the tensor. PTX
// ISA, "Data movement and conversion instructions: asynchronous copy".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// A box of the tensor at coordinates (x, y, z, w), innermost first, to shared memory; the barrier
// counts its bytes.
FLASH_DEVICE void tma_load_4d(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x,
                              int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Consecutive bytes, a multiple of 16 at addresses that are multiples of 16, to shared memory.
FLASH_DEVICE void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Orders this thread's ordinary accesses with accesses by TMA and wgmma: to shared memory,
FLASH_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// ... and to global memory.
FLASH_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Consecutive floats from shared to global memory.
FLASH_DEVICE void bulk_store(float* global, uint32_t shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

// Adds them to what is there.
FLASH_DEVICE void bulk_add(float* global, uint32_t shared, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
        "r"(shared), "r"(bytes)
        : "memory");
}

// A box from shared memory to the tensor at these coordinates. What lies past its bounds is left
// out.
FLASH_DEVICE void tma_store_4d(const CUtensorMap& map, uint32_t shared, int x, int y, int z,
                               int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(&map),
        "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Adds it to what is there, element by element.
FLASH_DEVICE void tma_add_4d(const CUtensorMap& map, uint32_t shared, int x, int y, int z, int w) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
        "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Makes a group of this thread's bulk operations since the last one.
FLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's groups have read shared memory, ...
FLASH_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// ... and until all but the last kPending of them are done.
template <int kPending>
FLASH_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// A tile to L2 only.
FLASH_DEVICE void tma_prefetch_4d(const CUtensorMap& map, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
        "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

FLASH_DEVICE void prefetch_tensor_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace flash_ext::ptx
