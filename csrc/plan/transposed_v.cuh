// The workspace for V^T in FP8: of each head of K and V the channels (Dv), one after another, each
// with its keys side by side.
//
// In a group of 16 keys these are in the order in which a lane's scores lie in its registers: lane
// t of a row has the columns 2t, 2t + 1, 8 + 2t and 9 + 2t, which become bytes 4t to 4t + 3 of the
// A operand. So byte 4t + 2b + c of a group is key 8b + 2t + c, and P needs no permutation.
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

inline constexpr int kKeyGroup = 16;

// The index, within a channel, of the group with which sequence `seq_idx` begins; its first key is
// row `begin` of the tensors. The next sequence begins after the last group of this one.
FLASH_HOST_DEVICE constexpr int first_key_group(int begin, int seq_idx) {
    return (begin + (kKeyGroup - 1) * seq_idx) / kKeyGroup;
}

// The bytes from one channel to the next.
FLASH_HOST_DEVICE constexpr int64_t channel_bytes(const AttentionParams& params) {
    const int groups = params.cu_seqlens_k == nullptr
                           ? ceil_div(params.seqlen_k, kKeyGroup)
                           : first_key_group(params.seqlen_k, params.batch + 2);
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
           int64_t{first_key_group(s.k_begin, s.seq_idx)} * kKeyGroup;
}

}  // namespace flash_ext
