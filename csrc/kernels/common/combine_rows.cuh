// Combines the results of splits of the keys into one, as in Flash-Decoding (Dao et al. 2023):
//
//     m = max_p m_p,    l = sum_p 2^((m_p - m) scale) l_p,    lse = m scale + log(l)
//     O = sum_p 2^((m_p - m) scale) l_p / l O_p
//
// Split p is attention over some of the keys, in float32, with the row maxima m_p and sums l_p of
// its softmax. A split in which a row sees no key has l_p = 0 and does not count.
#pragma once

#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/sequences.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

// By one warp: kRows rows at a time, since each takes several waits for loads. The results of row
// i, with index rows[i] among the statistics, go to targets[i], unless that is null. Returns bit i
// for a row that is marked and must be recomputed. kAnyCols: head_dim_v may be odd.
template <class Element, int kHeadDimV, bool kAnyCols, int kRows>
__device__ __forceinline__ uint32_t combine_rows(const ForwardParams& params,
                                                 const int64_t (&rows)[kRows],
                                                 Element* const (&targets)[kRows]) {
    const int lane = lane_id();
    const int64_t stride = statistics_rows(params);
    const float scale = exponent_scale(params);
    float max[kRows], sum[kRows], shares[kRows];
    uint32_t marked = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) max[i] = -INFINITY;
    const auto statistics = [&](int split, int i) {
        return params.statistics_partial[split * stride + rows[i]];
    };
#pragma unroll 1
    for (int split = lane; split < params.num_splits; split += 32)
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float split_max = statistics(split, i).max;
            max[i] = fmaxf(max[i], split_max);
            if (is_marked(split_max)) marked |= 1 << i;
        }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        max[i] = finite_max(warp_max(max[i]));
        sum[i] = 0.f;
    }
    marked = __reduce_or_sync(0xffffffff, marked);
    // A lane has pairs of adjacent columns.
    constexpr int kPairs = ceil_div(kHeadDimV, 64);
    float2 out[kRows][kPairs] = {};
#pragma unroll 1
    for (int first = 0; first < params.num_splits; first += 32) {
        const int splits = min_of(params.num_splits - first, 32);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {  // the weight of a split: 2^((m_p - m) scale) l_p
            shares[i] = 0.f;
            if (lane >= splits) continue;
            const PartialStatistics partial = statistics(first + lane, i);
            shares[i] = ptx::ex2((partial.max - max[i]) * scale) * partial.sum;
            sum[i] += shares[i];
        }
#pragma unroll 8
        for (int split = 0; split < splits; ++split)
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float weight = __shfl_sync(0xffffffff, shares[i], split);
                const float2* source =
                    reinterpret_cast<const float2*>(
                        params.o_partial + ((first + split) * stride + rows[i]) * kHeadDimV) +
                    lane;
#pragma unroll
                for (int j = 0; j < kPairs; ++j) {
                    if (kHeadDimV % 64 != 0 && j * 32 + lane >= kHeadDimV / 2) continue;
                    const float2 x = source[j * 32];
                    out[i][j].x += weight * x.x;
                    out[i][j].y += weight * x.y;
                }
            }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        sum[i] = warp_sum(sum[i]);
        if (targets[i] == nullptr || marked >> i & 1) continue;
        const float inverse = sum[i] == 0.f ? 0.f : 1.f / sum[i];
        if (lane == 0) params.lse[rows[i]] = log_sum_exp(max[i], sum[i], scale);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int col = 2 * (j * 32 + lane);
            const uint32_t pair = ptx::pack<Element>(out[i][j].x * inverse, out[i][j].y * inverse);
            if (col >= params.head_dim_v) continue;
            if (!kAnyCols || params.head_dim_v % 2 == 0) {
                *reinterpret_cast<uint32_t*>(targets[i] + col) = pair;
            } else {  // every other row begins inside a pair
                auto* bits = reinterpret_cast<uint16_t*>(targets[i] + col);
                bits[0] = static_cast<uint16_t>(pair);
                if (col + 1 < params.head_dim_v) bits[1] = static_cast<uint16_t>(pair >> 16);
            }
        }
    }
    return marked;
}

}  // namespace flash_ext
