#pragma once

#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void cp_async_16(uint32_t shared, const void*, bool) { note(Event::kCopy, shared, 16); }
inline void cp_async_commit() { note(Event::kCopyCommit); }
template <int kPending>
void cp_async_wait() {
    note(Event::kCopyWait, kPending);
}

}  // namespace flash_ext::ptx
