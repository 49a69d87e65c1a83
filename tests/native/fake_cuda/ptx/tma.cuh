#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "device.h"

namespace flash_ext::ptx {

inline void tma_load_4d(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y,
                        int z, int w) {
    const auto pair = [](int low, int high) {
        return uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low);
    };
    note(Event::kLoad, shared, map.box_bytes(), barrier, pair(x, y), pair(z, w));
}
inline void bulk_load(uint32_t shared, const void*, int bytes, uint32_t barrier) {
    note(Event::kLoad, shared, bytes, barrier);
}
inline void fence_proxy_async() { note(Event::kProxyFence); }
inline void fence_proxy_async_global() {}
inline void bulk_store(float*, uint32_t shared, int bytes) { note(Event::kStore, shared, bytes); }
inline void bulk_add(float*, uint32_t shared, int bytes) { note(Event::kStore, shared, bytes); }
inline void tma_store_4d(const CUtensorMap& map, uint32_t shared, int, int, int, int) {
    note(Event::kStore, shared, map.box_bytes());
}
inline void tma_add_4d(const CUtensorMap& map, uint32_t shared, int, int, int, int) {
    note(Event::kStore, shared, map.box_bytes());
}
inline void bulk_wait_read() { note(Event::kStoreWait); }
template <int kPending>
void bulk_wait() {
    if (kPending == 0) note(Event::kStoreWait);  // releases of memory wait for all
}
inline void bulk_commit() {}
inline void tma_prefetch_4d(const CUtensorMap&, int, int, int, int) {}
inline void prefetch_tensor_map(const CUtensorMap&) {}

}  // namespace flash_ext::ptx
