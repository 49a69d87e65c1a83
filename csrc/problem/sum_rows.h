// Sums of rows, and of attention over some keys each, for one tensor or several: the parameters of
// their kernel.
#pragma once

#include <cstdint>

#include "tile/host_device.h"
#include "tile/tensor_view.h"

namespace flash_ext {

inline constexpr int kMaxParts = 8;
inline constexpr int kMaxOuts = 16;

enum class ResultType { kFloat16, kBFloat16, kFloat32 };

// A (batch, row, head, column) tensor of a type that is known at run time.
struct ResultView {
    TensorView tensor;
    ResultType type = ResultType::kFloat32;
};

// A (batch, head, row) tensor of float32 with adjacent rows.
struct StatisticsView {
    float* data = nullptr;  // (B, H, S)
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

// What is added to rows [first, first + rows).
struct RowsPart {
    ResultView x;        // (B, rows, H, D)
    StatisticsView lse;  // (B, H, rows)
    int64_t first = 0;
    int64_t rows = 0;
};

struct SumRowsParams {
    int batch;
    int rows;  // S
    int heads;
    int head_dim;        // D
    bool whole = false;  // eight columns at a time, on boundaries of 16 bytes?

    ResultView out;                  // (B, S, H, D); it may be a part
    int outs = 1;                    // tensors with the same rows, out the first of them
    int64_t distance[kMaxOuts]{};    // of each from out, in bytes: their strides are out's
    StatisticsView lse;              // (B, H, S); it may be a part's. Without it rows only add up
    const int32_t* index = nullptr;  // (S), the row that each row of out is; without it, itself
    int parts = 0;
    RowsPart part[kMaxParts];  // those beyond `parts` have no rows

    FLASH_HOST_DEVICE int64_t all_rows() const { return int64_t{batch} * rows * heads; }
};

}  // namespace flash_ext
