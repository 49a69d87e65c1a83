// A call, as far as the choice of its kernels depends on it: plain data, known before anything is
// allocated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/device.h"
#include "problem/option_set.h"
#include "tile/tensor_view.h"

namespace flash_ext {

// Dense (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim).
struct Sizes {
    bool varlen;
    int64_t batch;
    int64_t seqlen_q;  // all rows when packed
    int64_t seqlen_k;
    int64_t heads_q;
    int64_t heads_k;
    int64_t head_dim;
    int64_t head_dim_v;

    // The shape of q, k, v or out.
    std::vector<int64_t> rows(int64_t seqlen, int64_t heads, int64_t dim) const {
        if (varlen) return {seqlen, heads, dim};
        return {batch, seqlen, heads, dim};
    }
    std::vector<int64_t> statistics() const {
        if (varlen) return {heads_q, seqlen_q};
        return {batch, heads_q, seqlen_q};
    }
    int64_t tensor_batches() const { return varlen ? 1 : batch; }
};

// A tensor whose rows kernels read or write: (B, S, H, D), and (1, total, H, D) where sequences are
// packed.
struct Operand {
    const char* name;  // of the argument
    void* data;
    int64_t sizes[4];
    int64_t strides[4];
    int element_bytes = 2;

    bool is_empty() const;
    // Do all rows start on 16-byte boundaries and end on them?
    bool is_aligned() const;
    // Can TMA address all rows? See tile/tensor_map.cuh.
    bool is_reached_by_tma() const;
    TensorView view() const;

 private:
    // The stride of a dimension of size 1 is never used, and need not be aligned.
    int64_t used_stride(int dim) const { return sizes[dim] == 1 ? 0 : strides[dim]; }
};

struct Call {
    const GpuModel& device;
    Sizes sizes;
    std::span<const Operand> operands;  // q, k, v; out and dout where there are any
    double softcap;
    bool has_bias;
    bool has_dropout;
    bool has_alibi;

    OptionSet options() const;
    // v is in float8_e4m3fn then, q and k in that or int8.
    bool has_8_bits() const { return operands[0].element_bytes == 1; }
};

}  // namespace flash_ext
