// Scratch memory of a call: one allocation, cut into regions.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <span>

#include "tile/host_device.h"

namespace flash_ext {

// First the plan reserves regions, by the pointers that will point to them. When the memory has
// been allocated, assign() sets the pointers. They must not move in between.
class Workspace {
 public:
    // The alignment that torch's allocator gives a tensor.
    static constexpr int64_t kAlignment = 512;

    struct Region {
        void* pointer;   // the address of the pointer to it
        int64_t offset;  // in bytes
        int64_t bytes;
    };

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    template <class T>
    void reserve(T*& pointer, int64_t count) {
        add(&pointer, count * static_cast<int64_t>(sizeof(T)));
    }
    void reserve(void*& pointer, int64_t bytes) { add(&pointer, bytes); }

    int64_t bytes() const { return bytes_; }
    std::span<const Region> regions() const { return {regions_, static_cast<size_t>(count_)}; }

    // `memory`: of bytes(), aligned to kAlignment.
    void assign(void* memory) const {
        for (const Region& region : regions()) {
            void* address = static_cast<char*>(memory) + region.offset;
            std::memcpy(region.pointer, &address, sizeof address);
        }
    }

 private:
    static constexpr int kMaxRegions = 16;

    void add(void* pointer, int64_t bytes) {
        assert(count_ < kMaxRegions);
        regions_[count_++] = {pointer, bytes_, bytes};
        bytes_ += ceil_div(bytes, kAlignment) * kAlignment;
    }

    Region regions_[kMaxRegions];
    int count_ = 0;
    int64_t bytes_ = 0;
};

}  // namespace flash_ext
