// Attention over some keys added to the results so far: the parameters of its kernel.
#pragma once

#include <cstdint>

#include "tile/tensor_view.h"

namespace flash_ext {

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

struct CombinePartialParams {
    int batch;
    int rows;  // S
    int heads;
    int head_dim;          // Dv
    bool aligned = false;  // does every row start on a boundary of four elements?

    ResultView before;           // (B, S, H, Dv), the results so far
    ResultView out;              // (B, S, H, Dv), the result; it may be `before`
    StatisticsView lse;          // (B, H, S), also the result
    ResultView o_partial;        // (B, S, H, Dv)
    StatisticsView lse_partial;  // (B, H, S)
};

}  // namespace flash_ext
