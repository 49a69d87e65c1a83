#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

uint32_t shared_address(const void* pointer);
template <class T>
void ld_shared(T& x, uint32_t address) {
    note(Event::kRead, address, sizeof(x));
    std::memset(&x, 0, sizeof(x));
}
inline int ld_shared(uint32_t address) {
    note(Event::kRead, address, 4);
    return 0;
}
inline uint16_t ld_shared_u16(uint32_t address) {
    note(Event::kRead, address, 2);
    return 0;
}
inline void ld_shared_v2(float (&v)[2], uint32_t address) { ld_shared(v, address); }
template <class T>
void ld_shared_v4(T (&v)[4], uint32_t address) {
    ld_shared(v, address);
}
inline void st_shared(uint32_t address, uint32_t value) {
    note(Event::kWrite, address, 4);
    std::memcpy(device::storage + address, &value, 4);
}
inline void st_shared_v2(uint32_t address, uint32_t, uint32_t) { note(Event::kWrite, address, 8); }
template <class T>
void st_shared_v4(uint32_t address, const T (&)[4]) {
    note(Event::kWrite, address, 16);
}

}  // namespace flash_ext::ptx
