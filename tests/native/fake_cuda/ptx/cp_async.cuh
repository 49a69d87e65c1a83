#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void cp_async_16(uint32_t shared, const void* source, bool valid) {
    note(Event::kCopy, shared, 16, reinterpret_cast<uint64_t>(source), valid);
}
inline void cp_async_up_to_16(uint32_t shared, const void* source, int bytes) {
    cp_async_16(shared, source, bytes > 0);  // zeros follow, up to 16
}
inline void cp_async_commit() { note(Event::kCopyCommit); }
template <int kPending>
void cp_async_wait() {
    note(Event::kCopyWait, kPending);
}

}  // namespace flash_ext::ptx
