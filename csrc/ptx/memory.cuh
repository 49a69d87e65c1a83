// Global reductions, and the acquire / release accesses that order CTAs.
#pragma once

#include <cstdint>

#include "ptx/device.h"

namespace flash_ext::ptx {

// *p += x for two or four consecutive floats (aligned to as many), without returning the old
// values.
template <int kFloats>
FLASH_DEVICE void red_add(float* p, const float (&x)[kFloats]) {
    static_assert(kFloats == 2 || kFloats == 4);
#if __CUDA_ARCH__ >= 900
    if constexpr (kFloats == 4) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p),
                     "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
    } else {
        asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x[0]),
                     "f"(x[1])
                     : "memory");
    }
#else
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + i), "f"(x[i]) : "memory");
#endif
}

// Two adjacent elements (aligned to both of them) in one load.
template <class Element>
FLASH_DEVICE void load_pair(Element (&pair)[2], const Element* p) {
    if constexpr (sizeof(Element) == 4) {
        *reinterpret_cast<uint2*>(pair) = *reinterpret_cast<const uint2*>(p);
    } else if constexpr (sizeof(Element) == 2) {
        *reinterpret_cast<uint32_t*>(pair) = *reinterpret_cast<const uint32_t*>(p);
    } else {
        *reinterpret_cast<uint16_t*>(pair) = *reinterpret_cast<const uint16_t*>(p);
    }
}

// Sixteen bytes in one store.
FLASH_DEVICE void st_global_v4(void* p, const uint32_t (&v)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

FLASH_DEVICE int load_acquire(const int* p) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

// For a fence that is shared: load_relaxed() and then fence_acq_rel() is an acquire,
// fence_acq_rel() and then red_add_relaxed() a release.
FLASH_DEVICE int load_relaxed(const int* p) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
FLASH_DEVICE void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
FLASH_DEVICE void red_add_relaxed(int* p, int value) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Waits until *p, to which other CTAs add with red_add_release, has reached `count`. What they
// wrote before is then visible. Sleeps this long between polls.
FLASH_DEVICE void wait_for_count(const int* p, int count, int nanoseconds) {
    while (load_acquire(p) < count) __nanosleep(nanoseconds);
}

// Adds, and returns the old value. What this thread has seen before is visible to whoever finds the
// new one, and what others added with it.
FLASH_DEVICE unsigned long long atom_add_acq_rel(unsigned long long* p, unsigned long long value) {
    unsigned long long before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(p), "l"(value)
                 : "memory");
    return before;
}

FLASH_DEVICE void red_add_release(int* p, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

}  // namespace flash_ext::ptx
