// What happens to a tile of scores between Q K^T and the softmax (and back): masking and dropout,
// for tiles whose rows are queries (forward) and tiles whose rows are keys (backward).
#pragma once

#include "dropout.cuh"
#include "mask.cuh"
#include "params.h"
#include "tile/fragment.cuh"

namespace flash_ext {

// Hides all but the columns in range_of_row(row), an interval of positions; the tile's columns
// begin at first_col. Rows count from the warp's first.
template <class Scores, class RangeOfRow>
__device__ __forceinline__ void mask_scores(Scores& s, int first_col, RangeOfRow range_of_row) {
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Interval range = range_of_row(ptx::not_hoisted(16 * m + lane_row() + 8 * i));
            // Relative to this lane, so that each element compares with a compile-time constant.
            const int begin = range.begin - first_col - lane_col();
            const int end = range.end - first_col - lane_col();
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < begin || 8 * n + e >= end) s.v[m][n][2 * i + e] = -INFINITY;
        }
}

__device__ __forceinline__ DropoutMask dropout_mask(const AttentionParams& params, int batch,
                                                    int head) {
    return DropoutMask(params.rng_state[0], params.rng_state[1],
                       static_cast<int64_t>(batch) * params.heads_q + head, params.keep_threshold);
}

// visit(m, n, i, keep) for every element of a tile whose rows are queries and columns keys.
// first_query and first_key are multiples of 16.
template <class Scores, class Visit>
__device__ __forceinline__ void for_each_keep(const DropoutMask& mask, int first_query,
                                              int first_key, Visit visit) {
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int block = 0; block < Scores::kN / 2; ++block) {
            const Philox4 random =
                mask.block(first_query + 16 * m + lane_row(), first_key + 16 * block + lane_col());
#pragma unroll
            for (int idx = 0; idx < 8; ++idx)  // DropoutMask::index: row half, column half, parity
                visit(m, 2 * block + idx / 2 % 2, idx / 4 * 2 + idx % 2,
                      random.half(idx) < mask.keep_threshold);
        }
}

// The same for a tile whose rows are keys and columns queries.
template <class Scores, class Visit>
__device__ __forceinline__ void for_each_keep_transposed(const DropoutMask& mask, int first_key,
                                                         int first_query, Visit visit) {
    const int key_parity = lane_row() % 2;
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int block = 0; block < Scores::kN / 2; ++block)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const Philox4 random = mask.block(first_query + 16 * block + lane_col() + e,
                                                  first_key + 16 * m + lane_row());
#pragma unroll
                for (int query_half = 0; query_half < 2; ++query_half)
#pragma unroll
                    for (int key_half = 0; key_half < 2; ++key_half) {
                        const int idx = query_half * 4 + key_half * 2;
                        const uint32_t number =
                            key_parity == 0 ? random.half(idx) : random.half(idx + 1);
                        visit(m, 2 * block + query_half, 2 * key_half + e,
                              number < mask.keep_threshold);
                    }
            }
}

}  // namespace flash_ext
