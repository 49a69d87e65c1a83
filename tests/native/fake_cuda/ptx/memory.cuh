#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

template <int kFloats>
void red_add(float* p, const float (&x)[kFloats]) {
    for (int i = 0; i < kFloats; ++i) p[i] += x[i];
}
template <class Element>
void load_pair(Element (&pair)[2], const Element* p) {
    std::memcpy(pair, p, sizeof(pair));
}
// Other CTAs have counted.
inline void wait_for_count(const int*, int, int) {}
inline int load_relaxed(const int*) { return 1 << 30; }
inline void fence_acq_rel() {}
inline void red_add_relaxed(int* p, int value) { atomicAdd(p, value); }
inline unsigned long long atom_add_acq_rel(unsigned long long* p, unsigned long long value) {
    return atomicAdd(p, value);
}
inline void red_add_release(int* p, int value) { atomicAdd(p, value); }

}  // namespace flash_ext::ptx
