// Where the sequences of a batch are in the tensors, dense or varlen.
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

// The rows of a tile.
enum class Rows { kQueries, kKeys };

// One sequence of the batch: where its rows are in the tensors, and how many it has. A dense batch
// is indexed by `batch`. Varlen sequences share batch 0 and begin at different rows. The rows of
// varlen tensors before the first sequence and after the last are two more sequences, of index 0
// and B + 1, without keys, so their results are zeros.
struct Sequence {
    int batch;
    int seq_idx;  // 0 in a dense batch; sequence b of varlen ones is number b + 1
    int q_begin;
    int k_begin;
    int seqlen_q;
    int seqlen_k;  // keys in use
    int rows_k;    // rows of K and V, in use or not

    // Its index in the batch, which options such as dropout use.
    FLASH_HOST_DEVICE constexpr int index() const { return seq_idx > 0 ? seq_idx - 1 : batch; }
    // Is it one of the batch? Otherwise it has the rows that belong to no sequence.
    FLASH_HOST_DEVICE constexpr bool is_owned(const AttentionParams& params) const {
        return params.cu_seqlens_q == nullptr || (seq_idx > 0 && seq_idx <= params.batch);
    }
};

FLASH_HOST_DEVICE constexpr int clamp(int x, int low, int high) {
    return min_of(max_of(x, low), high);
}

// Row offset of varlen sequence `seq_idx`. Nothing outside the tensors is accessed, whatever
// cu_seqlens contains.
FLASH_HOST_DEVICE int varlen_begin(const int* cu_seqlens, int seq_idx, int total) {
    return seq_idx == 0 ? 0 : clamp(cu_seqlens[seq_idx - 1], 0, total);
}

// The number of its rows, if it begins at row `begin`.
FLASH_HOST_DEVICE int varlen_rows(const int* cu_seqlens, int seq_idx, int batch, int total,
                                  int begin) {
    return (seq_idx <= batch ? clamp(cu_seqlens[seq_idx], begin, total) : total) - begin;
}

// kMayBeVarlen = false is for kernels that never see varlen sequences: their lengths stay in the
// constant bank and take no registers.
//
// `number` is from 0 to sequence_count() - 1: the batch, or seq_idx of varlen sequences.
// kPages: its keys are in pages, and have no offsets.
template <bool kMayBeVarlen, bool kPages = false>
FLASH_HOST_DEVICE Sequence sequence_of(const AttentionParams& params, int number) {
    Sequence sequence{number, 0, 0, 0, params.seqlen_q, params.seqlen_k, params.seqlen_k};
    if constexpr (!kMayBeVarlen) return sequence;
    if (params.cu_seqlens_q != nullptr) {
        const auto locate = [&](const int* cu_seqlens, int total, int& begin, int& rows) {
            begin = varlen_begin(cu_seqlens, number, total);
            rows = varlen_rows(cu_seqlens, number, params.batch, total, begin);
        };
        sequence.batch = 0;
        sequence.seq_idx = number;
        locate(params.cu_seqlens_q, params.seqlen_q, sequence.q_begin, sequence.seqlen_q);
        if constexpr (!kPages)
            locate(params.cu_seqlens_k, params.seqlen_k, sequence.k_begin, sequence.rows_k);
        sequence.seqlen_k = sequence.is_owned(params) ? sequence.rows_k : 0;
    }
    if (params.seqused_k != nullptr && sequence.is_owned(params))
        sequence.seqlen_k = clamp(params.seqused_k[sequence.index()], 0, sequence.rows_k);
    return sequence;
}

// The number of sequences, including those of rows that belong to none.
FLASH_HOST_DEVICE constexpr int sequence_count(const AttentionParams& params) {
    return params.batch + (params.cu_seqlens_q != nullptr ? 2 : 0);
}

// The number of batches of the tensors: varlen sequences are all in one.
FLASH_HOST_DEVICE constexpr int tensor_batches(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr ? params.batch : 1;
}

// The first row of a sequence's (head, query) statistics such as lse: (B, Hq, Sq), or (Hq, total).
FLASH_HOST_DEVICE int64_t statistics_offset(const AttentionParams& params, const Sequence& sequence,
                                            int head) {
    return (static_cast<int64_t>(sequence.batch) * params.heads_q + head) * params.seqlen_q +
           sequence.q_begin;
}

// The number of rows of statistics.
FLASH_HOST_DEVICE constexpr int64_t statistics_rows(const AttentionParams& params) {
    return int64_t{tensor_batches(params)} * params.heads_q * params.seqlen_q;
}

}  // namespace flash_ext
