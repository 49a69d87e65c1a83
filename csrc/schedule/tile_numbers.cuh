// Tiles of `block` rows are numbered per head: in a dense batch separately for each batch, in
// varlen tensors across all sequences, so that the host needs no lengths. (A kernel may have
// `block` as a PowerOfTwo.) Sequence `seq_idx`, whose rows begin at `begin`, has the numbers from
// begin / block + seq_idx on: at least as many as it has tiles. Grids and workspaces use these
// numbers.
#pragma once

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/host_device.h"

namespace flash_ext {

template <class Number>
FLASH_HOST_DEVICE constexpr int first_tile(int begin, int seq_idx, Number block) {
    return begin / block + seq_idx;
}

// Numbers per head (and, in a dense batch, per batch).
FLASH_HOST_DEVICE constexpr int tile_numbers(const AttentionParams& params, int rows, int block) {
    return params.cu_seqlens_q == nullptr ? ceil_div(rows, block)
                                          : first_tile(rows, params.batch + 1, block) + 1;
}

// The Q tiles of a forward pass: each has `queries` queries of one of `heads` heads. The rows of a
// tile are queries of one query head. With packed GQA, for few queries whose heads share keys, a
// query has 2^pack_gqa_log2 rows instead: the first ones are the heads of its group, and K and V
// are loaded once for all of them.
struct QueryTiles {
    int heads = 0;
    int queries = 0;
    int pack_gqa_log2 = 0;
};

// The number of Q tiles of all heads and batches.
inline int64_t tile_count(const AttentionParams& params, const QueryTiles& tiles) {
    return int64_t{tiles.heads} * tensor_batches(params) *
           tile_numbers(params, params.seqlen_q, tiles.queries);
}

// The varlen sequence that a number belongs to: the last one whose first number, first_of(seq_idx),
// is not above it.
template <class FirstOf>
FLASH_HOST_DEVICE int find_sequence(int batch, int number, FirstOf first_of) {
    int low = 0;
    int high = batch + 2;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (first_of(middle) <= number ? low : high) = middle;
    }
    return low;
}
// The same for tile numbers.
template <class Number>
FLASH_HOST_DEVICE int find_sequence(const int* cu_seqlens, int batch, int total, Number block,
                                    int number) {
    return find_sequence(batch, number, [&](int seq_idx) {
        return first_tile(varlen_begin(cu_seqlens, seq_idx, total), seq_idx, block);
    });
}

// A tile number as sequence and tile. Padding tiles are past the end of the sequence.
struct SequenceTile {
    Sequence sequence;
    int tile;
};

template <bool kMayBeVarlen, Rows kRows, bool kPages = false, class Number>
FLASH_HOST_DEVICE SequenceTile tile_of(const AttentionParams& params, int batch, int number,
                                       Number block) {
    constexpr bool kQueries = kRows == Rows::kQueries;
    const int* cu_seqlens = kQueries ? params.cu_seqlens_q : params.cu_seqlens_k;
    if (!kMayBeVarlen || cu_seqlens == nullptr)
        return {sequence_of<kMayBeVarlen, kPages>(params, batch), number};
    const int total = kQueries ? params.seqlen_q : params.seqlen_k;
    const Sequence sequence = sequence_of<kMayBeVarlen, kPages>(
        params, find_sequence(cu_seqlens, params.batch, total, block, number));
    const int begin = kQueries ? sequence.q_begin : sequence.k_begin;
    return {sequence, number - first_tile(begin, sequence.seq_idx, block)};
}

}  // namespace flash_ext
