#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) { note(Event::kInit, barrier, arrivals); }
inline void mbarrier_arrive(uint32_t barrier, int arrivals = 1) {
    note(Event::kArrive, barrier, arrivals);
}
inline void mbarrier_arrive_if(bool active, uint32_t barrier) {
    if (active) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
    note(Event::kExpect, barrier, bytes);
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive_after_cp_async(uint32_t barrier) { note(Event::kArriveLate, barrier); }
// "Not yet": then the usual wait follows.
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    note(Event::kTest, barrier, parity);
    return false;
}
inline void mbarrier_arrive_unless(float, float, uint32_t barrier) { mbarrier_arrive(barrier); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    note(Event::kWait, barrier, parity);
}

}  // namespace flash_ext::ptx
