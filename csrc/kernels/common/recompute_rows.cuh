// Recomputes rows whose scores are too large for P's one FMA (kLargeExponent): from global memory,
// by one warp, with P = 2^((S - m) scale). Slow, but no working model has such scores.
//
// A kernel finds such a row when it stores it. It stores a mark in place of the row's lse, and
// recomputes the row after its last tile. Rows of splits are recomputed by the combine kernel.
#pragma once

#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/gemm.cuh"
#include "tile/global_operand.cuh"

namespace flash_ext {

// The mark of a warp: a NaN that no arithmetic produces. A warp recomputes only rows with its own
// mark, since others may not have been stored yet.
__device__ __forceinline__ float mark_of(int warp) { return __uint_as_float(0x7fd00000 + warp); }

// Must a row with this maximum and lse be recomputed? Not a row without keys, nor one that is NaN:
// recomputing it would change nothing (scaled_max). -inf may be that of a row whose P are all 0.
__device__ __forceinline__ bool needs_recomputing(float max, float lse) {
    return fabsf(lse) > kLargeExponent * kLn2 && max != -INFINITY;
}

// Q K^T of 16 queries and 16 keys, from these two on.
template <class Element, class Params>
__device__ __forceinline__ RegisterTile<16, 16> scores_of_rows(const Params& params,
                                                               const Sequence& sequence, int head,
                                                               int first_query, int first_key) {
    const int head_k = key_head(params, head);
    RegisterTile<16, 16> rS;
    rS.clear();
#pragma unroll 1
    for (int col = 0; col < params.head_dim; col += 16) {
        const auto block = [&](const TensorView& view, int64_t row, int of_head, int rows) {
            auto tile = global_tile<const Element>(view, sequence.batch, row, of_head, rows,
                                                   params.head_dim - col);
            tile.data += col;
            return tile;
        };
        gemm<Element, 16>(rS,
                          AFromGlobalRows<Element>{block(params.q, sequence.q_begin + first_query,
                                                         head, sequence.seqlen_q - first_query)},
                          BFromGlobalRows<Element>{block(params.k, sequence.k_begin + first_key,
                                                         head_k, sequence.seqlen_k - first_key)});
    }
    return rS;
}

// Computes out and lse of those of 16 rows whose bits are set in `wanted`. Not for the general
// kernels: their scores include the scale, so the exponent needs no product that is rounded.
template <class Element>
__device__ __forceinline__ void recompute_rows(const ForwardParams& params,
                                               const Sequence& sequence, int head, int first_query,
                                               uint32_t wanted) {
    const BandMask mask = mask_of(params, sequence);
    const float scale = params.scale_log2;
    const Interval keys = mask.keys_of({first_query, first_query + 16});
    constexpr int kCols = 16;  // of O at a time, to save registers
#pragma unroll 1
    for (int first_col = 0; first_col < params.head_dim_v; first_col += kCols) {
        RegisterTile<16, kCols> rO;
        rO.clear();
        OnlineSoftmax<16> softmax;
        if (params.sink != nullptr && sequence.is_owned(params))
            softmax.begin_with(params.sink[head] * kLog2e / scale);
#pragma unroll 1
        for (int key = keys.begin / 16 * 16; key < keys.end; key += 16) {
            auto rS = scores_of_rows<Element>(params, sequence, head, first_query, key);
            mask_scores(rS, key, [&](int row) { return mask.key_range(first_query + row); });
            softmax.template update<true>(rS, rO, scale);
            auto gV = global_tile<const Element>(params.v, sequence.batch, sequence.k_begin + key,
                                                 head / group_of(params), sequence.seqlen_k - key,
                                                 params.head_dim_v - first_col);
            gV.data += first_col;
            gemm<Element, 16>(rO, AFromRegisters<Element, decltype(rS)>{rS},
                              BFromGlobalColumns<Element>{gV});
        }
        softmax.finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane_row() + 8 * i;
            if (!(wanted >> row & 1)) continue;
            const float factor = softmax.inverse_sum(0, i);
            Element* target = row_pointer<Element>(params.out, sequence.batch,
                                                   sequence.q_begin + first_query + row, head);
#pragma unroll
            for (int n = 0; n < rO.kN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int col = first_col + 8 * n + lane_col() + e;
                    if (col < params.head_dim_v)
                        target[col] = ptx::from_float<Element>(rO.v[0][n][2 * i + e] * factor);
                }
            if (first_col == 0 && lane_col() == 0)
                params.lse[statistics_offset(params, sequence, head) + first_query + row] =
                    softmax.lse(0, i, scale);
        }
    }
}

// The sequence of a row of q's tensors.
__device__ __forceinline__ Sequence sequence_at(const AttentionParams& params, int batch, int row) {
    int number = batch;
    if (params.cu_seqlens_q != nullptr) {
        int end = sequence_count(params);
        for (number = 0; end - number > 1;) {
            const int middle = (number + end) / 2;
            const int begin = varlen_begin(params.cu_seqlens_q, middle, params.seqlen_q);
            (begin <= row ? number : end) = middle;
        }
    }
    return sequence_of<true>(params, number);
}

// Recomputes those of `rows` rows of a head, at most 16, that this warp has marked. `row` counts
// from the first row of the tensors, across packed sequences.
template <class Element>
__device__ __noinline__ void recompute_marked(const ForwardParams& params, int flat_head, int row,
                                              int rows, int warp) {
    __syncwarp();  // all lanes have written their results
    const float* lse = params.lse + int64_t{flat_head} * params.seqlen_q + row;
    const int lane = lane_id();
    const bool marked = lane < rows && __float_as_uint(lse[lane]) == __float_as_uint(mark_of(warp));
    uint32_t left = __ballot_sync(0xffffffff, marked);
#pragma unroll 1
    while (left != 0) {  // the rows of one sequence at a time
        const int first = __ffs(left) - 1;
        const Sequence sequence =
            warp_uniform<true>(sequence_at(params, flat_head / params.heads_q, row + first));
        // Beyond `first`: the sequence has the row, whatever cu_seqlens holds.
        const int end = min_of(sequence.q_begin + sequence.seqlen_q - row, 16);
        const uint32_t own = left & ((1u << end) - 1);
        recompute_rows<Element>(params, sequence, flat_head % params.heads_q,
                                row + first - sequence.q_begin, own >> first);
        left ^= own;
    }
}

// The same for all rows of the call, after the warp's last tile. Not inlined, so that the kernel
// keeps its registers. A lane looks at 16 rows at a time, which takes as long as one.
template <class Element>
__device__ __noinline__ void recompute_all_marked(const ForwardParams& params, int warp) {
    constexpr int kLooks = 16;
    const float* const lse = params.lse;
    const uint32_t mark = __float_as_uint(mark_of(warp));
    const int64_t rows = statistics_rows(params);
#pragma unroll 1
    for (int64_t first = 0; first < rows; first += kLooks * 32) {
        uint32_t marked = 0;  // bit i: any of the 32 rows from first + 32 i on
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            const int64_t row = first + 32 * i + lane_id();
            const bool own = row < rows && __float_as_uint(lse[row]) == mark;
            marked |= uint32_t{own} << i;
        }
        marked = __reduce_or_sync(0xffffffff, marked);
#pragma unroll 1
        for (; marked != 0; marked &= marked - 1) {
            int64_t row = first + 32 * (__ffs(marked) - 1);
            const int64_t end = min_of(row + 32, rows);
#pragma unroll 1
            while (row < end) {  // 16 rows of a head at a time
                const auto flat_head = static_cast<int>(row / params.seqlen_q);
                const auto of_head = static_cast<int>(row % params.seqlen_q);
                const int count =
                    min_of(min_of(params.seqlen_q - of_head, 16), static_cast<int>(end - row));
                recompute_marked<Element>(params, flat_head, of_head, count, warp);
                row += count;
            }
        }
    }
}

}  // namespace flash_ext
