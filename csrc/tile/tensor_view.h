// The layout of a tensor in memory, for both the host and the kernels.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class ElementType { kFloat16, kBFloat16 };

// A (batch, row, head, column) tensor with a contiguous last dimension. Packed sequences
// (total rows, head, column) have batch_stride 0.
struct TensorView {
    void* data = nullptr;  // (B, S, H, D)
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

}  // namespace flash_ext
