#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "ptx/float8.cuh"

namespace flash_ext::ptx {

// A warp does these at a time. Its lane 0 notes them.
inline bool notes_for_warp() { return threadIdx.x % 32 == 0; }

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

inline void wgmma_fence() {}
inline void wgmma_commit() {
    if (notes_for_warp()) note(Event::kCommit);
}
template <int kPending>
void wgmma_wait() {
    if (notes_for_warp()) note(Event::kMatmulWait, kPending);
}
inline void warpgroup_fence_operand(float&) {}
inline void warpgroup_fence_operand(int&) {}

// All products are 0.
template <class Element, int kN, bool kTransposeB, class Number = float>
struct Wgmma {
    using Sum = Number[kN / 2];
    static void mma(Sum& d, uint64_t a, uint64_t b, int) { multiply(d, a, b, false); }
    static void mma_mn_major(Sum& d, uint64_t a, uint64_t b, int) { multiply(d, a, b, true); }
    static void mma(Sum& d, const uint32_t (&)[4], uint64_t b, int) { multiply(d, 0, b, false); }

 private:
    static void multiply(Sum& d, uint64_t a, uint64_t b, bool a_is_mn_major) {
        if (notes_for_warp()) note(Event::kMatmul, a, b, kN, a_is_mn_major, kTransposeB);
        for (Number& x : d) x = 0;
    }
};

}  // namespace flash_ext::ptx
