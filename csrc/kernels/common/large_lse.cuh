// Part of the preprocess pass: rows whose lse is too large for P = 2^(S scale - lse), see
// kLargeExponent. lse itself is then rounded too much to give P: an lse of 10^8 is known to within
// 4. Such a row gets a reference r, the maximum of its scores, and an lse relative to it,
//
//     lse' = log2 sum_j 2^((S_j - r) scale),    P = 2^((S - r) scale - lse')
//
// For these its Q K^T is computed once more, by the same sums of products as in the backward, so
// that S - r is exact where it counts. A flag tells the backward kernels that there are such rows:
// they subtract the references where they mask scores, and treat every tile as masked.
//
// Not for fa3 with softcap: its kernels have no register for the reference where they recompute
// tanh, and accept only caps that keep scores small.
#pragma once

#include "kernels/common/recompute_rows.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "tile/any_half.cuh"

namespace flash_ext {

// For an lse in base 2. That of a row without keys is infinite.
__device__ __forceinline__ bool is_large_lse(float lse_log2) {
    return is_large(lse_log2) && fabsf(lse_log2) != INFINITY;
}

// The maximum and sum of the softmax of 16 rows; a lane has two of them.
template <class Element, bool kGeneral>
__device__ __forceinline__ OnlineSoftmax<16> softmax_of_rows(const BackwardParams& params,
                                                             const Sequence& sequence, int head,
                                                             int first_query) {
    const BandMask mask = mask_of(params, sequence);
    const float scale = kGeneral ? 1.f : params.scale_log2;
    OnlineSoftmax<16> softmax;
    if (params.sink != nullptr) softmax.begin_with(params.sink[head] * kLog2e * ptx::rcp(scale));
    RegisterTile<16, 8> none;  // no output
    none.clear();
    const Interval keys = mask.keys_of({first_query, first_query + 16});
#pragma unroll 1
    for (int key = keys.begin / 16 * 16; key < keys.end; key += 16) {
        RegisterTile<16, 16> rS;
        with_element<Element>(params.element_type, [&](auto element) {
            rS = scores_of_rows<decltype(element)>(params, sequence, head, first_query, key);
        });
        if constexpr (kGeneral)
            ScoreFunction<Element, Rows::kQueries, tuning::kAllOptions>{params, sequence, head}
                .apply(rS, first_query, key);
        mask_scores(rS, key, [&](int row) { return mask.key_range(first_query + row); });
        softmax.template update<true>(rS, none, scale);
    }
    softmax.finish();
    return softmax;
}

// Finds the reference and the relative lse of the CTA's queries whose lse is large, at the end of
// the preprocess pass. It recomputes everything from the CTA's index: values kept in registers
// would lower the occupancy of the whole pass.
template <class Element, bool kGeneral>
__device__ __forceinline__ void split_large_lse(const BackwardParams& params, int block_q) {
    if (threadIdx.x == 0) *params.large_lse.word = params.large_lse.epoch;
#pragma unroll 1
    for (int row = 16 * warp_id(); row < block_q; row += blockDim.x / 2) {
        const int linear = ptx::not_hoisted(blockIdx.x);
        const auto [tile, head] = q_tile_index<true>(params, linear, block_q);
        const Sequence sequence = warp_uniform<true>(tile.sequence);
        const int first_query = ptx::warp_uniform(tile.tile * block_q + row);
        const auto is_large_row = [&](int i) {
            const int query = first_query + lane_row() + 8 * i;
            return query < sequence.seqlen_q &&
                   is_large_lse(params.lse[statistics_offset(params, sequence, head) + query] *
                                kLog2e);
        };
        if (!__any_sync(0xffffffff, is_large_row(0) || is_large_row(1))) continue;
        const OnlineSoftmax<16> softmax =
            softmax_of_rows<Element, kGeneral>(params, sequence, head, first_query);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (lane_col() != 0 || !is_large_row(i)) continue;
            const int r = lane_row() + 8 * i;
            const int64_t index = workspace_row(params, sequence, head, first_query + r);
            params.lse_log2[index] = log2f(softmax.row_sum[0][i]);
            params.reference[index] = softmax.row_max[0][i];
            if (params.lse_rows != nullptr) params.lse_rows[index] = {};
        }
    }
}

}  // namespace flash_ext
