// Part of the preprocess pass: rows whose lse is rounded too much to give P = 2^(S scale - lse). An
// lse of 10^8 is known to within 4. Such a row gets a reference r, the maximum of its scores, and
// an lse relative to it,
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

#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/hide_by_words.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

// For an lse in base 2, which is rounded by up to 2^-12 here. Rows without keys have an infinite
// lse.
FLASH_DEVICE bool is_large_lse(float lse_log2) {
    return fabsf(lse_log2) > 4096.f && fabsf(lse_log2) != INFINITY;
}

// 16 rows of a tensor, from column `col` on, as an operand of gemm(). Read element by element,
// which needs neither shared memory nor another warp. Elements outside the tensor are zeros.
template <class Element>
struct GlobalRows {
    GlobalTile<const Element> x;
    int col;

    FLASH_DEVICE void load_a(uint32_t (&a)[4], int, int) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = pair(lane_row() + i % 2 * 8, i / 2 * 8);
    }
    FLASH_DEVICE void load_b(uint32_t (&b)[4], int, int) const {
        __syncwarp();  // separates these loads from A's, to save registers
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = pair(lane_row() + i / 2 * 8, i % 2 * 8);
    }

 private:
    FLASH_DEVICE uint32_t pair(int row, int offset) const {
        const auto at = [&](int c) {
            return row < x.rows && c < x.cols ? ptx::to_float(x.data[row * x.row_stride + c]) : 0.f;
        };
        const int first = col + lane_col() + offset;
        return ptx::pack<Element>(at(first), at(first + 1));
    }
};

// Q K^T of 16 queries and 16 keys, from these two on.
template <class Element>
FLASH_DEVICE RegisterTile<16, 16> scores_of_rows(const BackwardParams& params, const Sequence& s,
                                                 int head, int first_query, int first_key) {
    const auto q = query_rows<const Element>(params.q, s, head, first_query, params.head_dim);
    const auto k = key_rows(params, s).tile<Element>(params.k, key_head(params, head), first_key,
                                                     params.head_dim);
    RegisterTile<16, 16> rS;
    rS.clear();
#pragma unroll 1
    for (int col = 0; col < params.head_dim; col += 16)
        gemm<Element, 16>(rS, GlobalRows<Element>{q, col}, GlobalRows<Element>{k, col});
    return rS;
}

// The reference and the relative lse of 16 rows, for those whose lse is large. A lane has two rows.
template <class Element, bool kChangesScores>
FLASH_DEVICE void split_large_lse_of_rows(const BackwardParams& params, const Sequence& sequence,
                                          int head, int first_query) {
    const auto is_large_row = [&](int i) {
        const int query = first_query + lane_row() + 8 * i;
        return query < sequence.seqlen_q &&
               is_large_lse(params.lse[statistics_offset(params, sequence, head) + query] * kLog2e);
    };
    if (!__any_sync(0xffffffff, is_large_row(0) || is_large_row(1))) return;
    const BandMask mask = mask_of(params, sequence);
    const float scale = kChangesScores ? 1.f : params.scale_log2;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    if (params.sink != nullptr) {  // one lane of a row counts it
        max[0] = max[1] = params.sink[head] * kLog2e * ptx::rcp(scale);
        sum[0] = sum[1] = lane_col() == 0 ? 1.f : 0.f;
    }
    const Interval keys = mask.keys_of({first_query, first_query + 16});
#pragma unroll 1
    for (int key = keys.begin / 16 * 16; key < keys.end; key += 16) {
        RegisterTile<16, 16> rS = scores_of_rows<Element>(params, sequence, head, first_query, key);
        if constexpr (kChangesScores)
            ScoreFunction<Element, Rows::kQueries, tuning::kAllOptions>{params, sequence, head}
                .apply(rS, first_query, key);
        mask_scores(rS, key, [&](int row) { return mask.key_range(first_query + row); });
        if (params.tile_mask.kv_tiles != nullptr)
            hide_by_words(rS, params, sequence, head, first_query, key);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float new_max = fmaxf(max[i], rS.row_max(0, i));
            const float reference = finite_max(new_max);
            sum[i] *= ptx::ex2((max[i] - reference) * scale);
            max[i] = new_max;
            rS.map_row(0, i, [&](float x) {
                sum[i] += ptx::ex2((x - reference) * scale);
                return x;
            });
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] = quad_sum(sum[i]);
        if (lane_col() != 0 || !is_large_row(i)) continue;
        const int64_t index =
            workspace_row(params, sequence, head, first_query + lane_row() + 8 * i);
        params.lse_log2[index] = log2f(sum[i]);
        params.reference[index] = max[i];
        if (params.lse_rows != nullptr) params.lse_rows[index] = {};
    }
}

// The same for the CTA's queries, at the end of the preprocess pass. It recomputes everything from
// the CTA's index: values kept in registers would lower the occupancy of the whole pass.
template <class Element, bool kChangesScores>
FLASH_DEVICE void split_large_lse(const BackwardParams& params, int block_q) {
    if (threadIdx.x == 0) *params.large_lse.word = params.large_lse.epoch;
#pragma unroll 1
    for (int row = 16 * warp_id(); row < block_q; row += blockDim.x / 2) {
        const auto [tile, head] = q_tile_index<true>(params, ptx::not_hoisted(blockIdx.x), block_q);
        split_large_lse_of_rows<Element, kChangesScores>(
            params, warp_uniform<true>(tile.sequence), head,
            ptx::warp_uniform(tile.tile * block_q + row));
    }
}

}  // namespace flash_ext
