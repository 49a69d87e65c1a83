// The workspace for V^T in FP8: of each head of K and V the channels (Dv), one after another, each
// with its keys side by side.
//
// A group of 16 keys has the order of tile/transpose.cuh, so that P needs no permutation.
#pragma once

#include <cstdint>

#include "plan/workspace_rows.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

inline constexpr int kKeyGroup = 16;

// The bytes from one channel to the next.
FLASH_HOST_DEVICE constexpr int64_t channel_bytes(const AttentionParams& params) {
    const int groups = params.cu_seqlens_k == nullptr
                           ? ceil_div(params.seqlen_k, kKeyGroup)
                           : first_group(params.seqlen_k, params.batch + 2, kKeyGroup);
    return int64_t{groups} * kKeyGroup;
}

inline int64_t transposed_v_bytes(const AttentionParams& params) {
    return channel_bytes(params) * params.head_dim_v * params.heads_k * tensor_batches(params);
}

// The byte of channel 0 and key 0.
FLASH_HOST_DEVICE int64_t transposed_v_offset(const AttentionParams& params, const Sequence& s,
                                              int head) {
    const int64_t channel = (int64_t{s.batch} * params.heads_k + head) * params.head_dim_v;
    return channel * channel_bytes(params) +
           int64_t{first_group(s.k_begin, s.seq_idx, kKeyGroup)} * kKeyGroup;
}

}  // namespace flash_ext
