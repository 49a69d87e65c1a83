// Rows whose scores are too large for P's one FMA (kLargeExponent), again: from global memory, by a
// warp, with P = 2^((S - m) scale). Slow, but no model that works has such scores.
//
// A kernel that finds such a row where it cannot do it again leaves a mark in place of its
// statistics, and does it at its end or leaves it to the next.
#pragma once

#include "kernels/common/packed.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/gemm.cuh"
#include "tile/global_operand.cuh"

namespace flash_ext {

// The mark of a warp: a NaN that no arithmetic makes. `warp` tells those apart that look for theirs
// in the same place.
inline constexpr uint32_t kMark = 0x7fd00000, kMarkWarps = 1 << 16;

__device__ __forceinline__ float mark_of(int warp) { return __uint_as_float(kMark + warp); }

__device__ __forceinline__ bool is_marked(float statistic) {
    return __float_as_uint(statistic) - kMark < kMarkWarps;
}

// Must a row with this maximum and lse be done again? One without keys need not; the lse may be
// infinite or no number because of a maximum that is not large any more.
__device__ __forceinline__ bool needs_recomputing(float max, float lse) {
    return !(fabsf(lse) <= kLargeExponent * kLn2) && max != -INFINITY;
}

// The 16 x 16 scores of queries and keys that begin there.
template <class Element, class Params>
__device__ __forceinline__ RegisterTile<16, 16> scores_of_rows(const Params& params,
                                                               const Sequence& sequence, int head,
                                                               int first_query, int first_key) {
    const int head_k = head / (params.heads_q / params.heads_k);
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

// out and lse of those of 16 rows whose bits are set in `wanted`. Not for the general kernels,
// whose scores include the scale: m scale is m, and not rounded.
template <class Element>
__device__ __forceinline__ void recompute_rows(const ForwardParams& params,
                                               const Sequence& sequence, int head, int first_query,
                                               uint32_t wanted) {
    const BandMask mask{sequence.seqlen_q, sequence.seqlen_k, params.window_left,
                        params.window_right};
    const float scale = params.scale_log2;
    const Interval keys = mask.keys_of({first_query, first_query + 16});
    constexpr int kCols = 16;  // of O at a time: registers are the kernel's
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
            auto gV =
                global_tile<const Element>(params.v, sequence.batch, sequence.k_begin + key,
                                           head / (params.heads_q / params.heads_k),
                                           sequence.seqlen_k - key, params.head_dim_v - first_col);
            gV.data += first_col;
            gemm<Element, 16>(rO, AFromRegisters<Element, decltype(rS)>{rS},
                              BFromGlobalColumns<Element>{gV});
            // Where nothing but NaN can come, as from inputs that have NaN, it comes soon.
            const auto is_lost = [&](int i) {
                return softmax.row_sum[0][i] != softmax.row_sum[0][i] ||
                       !(wanted >> (lane_row() + 8 * i) & 1);
            };
            if (__all_sync(0xffffffff, is_lost(0) && is_lost(1))) break;
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
            const int begin = packed_begin(params.cu_seqlens_q, middle, params.seqlen_q);
            (begin <= row ? number : end) = middle;
        }
    }
    return sequence_of<true>(params, number);
}

// Of `rows` rows of a head, 16 at most, those that this warp has marked. Here packed sequences are
// one: `row` counts from the tensors' first.
template <class Element>
__device__ __noinline__ void recompute_marked(const ForwardParams& params, int flat_head, int row,
                                              int rows, int warp) {
    __syncwarp();  // its lanes have written all results
    const float* lse = params.lse + int64_t{flat_head} * params.seqlen_q + row;
    const int lane = lane_id();
    const bool marked = lane < rows && __float_as_uint(lse[lane]) == __float_as_uint(mark_of(warp));
    uint32_t left = __ballot_sync(0xffffffff, marked);
#pragma unroll 1
    while (left != 0) {  // the rows of one sequence at a time
        const int first = __ffs(left) - 1;
        const Sequence sequence =
            warp_uniform<true>(sequence_at(params, flat_head / params.heads_q, row + first));
        const int end = min_of(sequence.q_begin + sequence.seqlen_q - row, 16);
        const uint32_t own = left & ((1u << end) - 1);
        recompute_rows<Element>(params, sequence, flat_head % params.heads_q,
                                row + first - sequence.q_begin, own >> first);
        left ^= own;
    }
}

// Of the whole call, by a warp at its end. A function of its own, which leaves the kernel its
// registers.
template <class Element>
__device__ __noinline__ void recompute_all_marked(const ForwardParams& params, int warp) {
    const int heads = params.heads_q * tensor_batches(params);
#pragma unroll 1
    for (int flat_head = 0; flat_head < heads; ++flat_head)
#pragma unroll 1
        for (int row = 0; row < params.seqlen_q; row += 16)
            recompute_marked<Element>(params, flat_head, row, min_of(params.seqlen_q - row, 16),
                                      warp);
}

}  // namespace flash_ext
