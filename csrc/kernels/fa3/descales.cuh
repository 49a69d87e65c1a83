// Where the descales of a head are.
#pragma once

#include "problem/params.h"
#include "problem/sequences.cuh"

namespace flash_ext {

static __device__ const float kNoDescale = 1.f;

// The descales of a query head, or of its KV head. 1 for a sequence without keys, which may have
// none.
FLASH_DEVICE const float* descales_of(const ForwardParams& params, const Descale& x,
                                      const Sequence& sequence, int head_q) {
    if (x.data == nullptr || sequence.seqlen_k == 0) return &kNoDescale;
    const int head = x.by_query_head ? head_q : key_head(params, head_q);
    return x.data + sequence.index() * x.batch_stride + head * x.head_stride;
}

// The last block of descales, 0 if there are no blocks. Wrong offsets of sequences must not read
// beyond it.
FLASH_DEVICE int last_block(const float* descales, const Descale& x) {
    return descales == &kNoDescale ? 0 : x.last_block;
}

}  // namespace flash_ext
