// The layout of a tensor in memory, for both the host and the kernels.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace flash_ext {

// kFloat8: e4m3. kInt8: of q and k, with v in e4m3.
enum class ElementType { kFloat16, kBFloat16, kFloat8, kInt8 };

FLASH_HOST_DEVICE constexpr int element_bytes(ElementType type) {
    switch (type) {
        case ElementType::kFloat16:
        case ElementType::kBFloat16:
            return 2;
        case ElementType::kFloat8:
        case ElementType::kInt8:
            return 1;
    }
    return 0;
}

// A (batch, row, head, column) tensor with a contiguous last dimension. Varlen sequences
// (total rows, head, column) have batch_stride 0.
struct TensorView {
    void* data = nullptr;  // (B, S, H, D)
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

}  // namespace flash_ext
