// V^T in FP8: of each head of K and V the channels, one after another, each with its keys side by
// side. quantize() writes it, or a kernel before a forward that is given V (B, Sk, Hk, Dv).
//
// A group of 16 keys has the order of tile/transpose.cuh, so that P needs no permutation. The last
// group of a sequence is filled up with zeros; packed sequences each begin with a group.
#pragma once

#include <cstdint>

#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "tile/host_device.h"
#include "tile/tensor_view.h"

namespace flash_ext {

inline constexpr int kKeyGroup = 16;

// The keys of a channel, the zeros too, for `rows` keys of all sequences of a batch element.
FLASH_HOST_DEVICE constexpr int transposed_keys(int rows, int batch, bool varlen) {
    const int groups = varlen ? first_group(rows, batch + 2, kKeyGroup) : ceil_div(rows, kKeyGroup);
    return groups * kKeyGroup;
}

// (B, H, D, keys), contiguous, whose rows are channels.
inline TensorView transposed_view(void* data, int heads, int channels, int keys) {
    const int64_t head = int64_t{channels} * keys;
    return {data, heads * head, keys, head};
}

// The byte of channel 0 and key 0.
FLASH_HOST_DEVICE int64_t transposed_v_offset(const TensorView& v, const Sequence& s, int head) {
    return s.batch * v.batch_stride + head * v.head_stride +
           int64_t{first_group(s.k_begin, s.seq_idx, kKeyGroup)} * kKeyGroup;
}

}  // namespace flash_ext
