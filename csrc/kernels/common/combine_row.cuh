// Combines the results of splits of the keys into one, as in Flash-Decoding (Dao et al. 2023):
//
//     m = max_p m_p,    l = sum_p 2^((m_p - m) scale) l_p,    lse = m scale + log(l)
//     O = sum_p 2^((m_p - m) scale) l_p / l O_p
//
// Split p is attention over some of the keys, in float32, with the row maxima m_p and sums l_p of
// its softmax. A split in which a row sees no key has l_p = 0 and does not count. Rows that a split
// has marked are recomputed (recompute_rows.cuh).
#pragma once

#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/sequences.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

// A row of the results, found by its index among the statistics. `query` counts from the first row
// of the tensors, across packed sequences.
struct ResultRow {
    int batch, head, query;

    __device__ __forceinline__ ResultRow(const AttentionParams& params, int64_t index) {
        const int64_t flat_head = index / params.seqlen_q;
        batch = static_cast<int>(flat_head / params.heads_q);
        head = static_cast<int>(flat_head % params.heads_q);
        query = static_cast<int>(index % params.seqlen_q);
    }
};

// By one warp. `row` is an index of statistics.
template <class Element, int kHeadDimV, bool kMayBeMarked = true>
__device__ __forceinline__ void combine_row(const ForwardParams& params, int64_t row) {
    const int lane = lane_id();
    const int64_t rows = statistics_rows(params);
    const float scale = exponent_scale(params);
    float max = -INFINITY;
    bool marked = false;
    for (int split = lane; split < params.num_splits; split += 32) {
        const float split_max = params.statistics_partial[split * rows + row].max;
        max = fmaxf(max, split_max);
        marked |= is_marked(split_max);
    }
    if constexpr (kMayBeMarked) {
        if (__any_sync(0xffffffff, marked)) [[unlikely]] {
            const ResultRow at(params, row);
            const Sequence sequence = sequence_at(params, at.batch, at.query);
            recompute_rows<Element>(params, sequence, at.head, at.query - sequence.q_begin, 1);
            return;
        }
    }
    max = finite_max(warp_max(max));
    // The weight of a split: 2^((m_p - m) scale) l_p.
    const auto share = [&](int64_t index) {
        const PartialStatistics partial = params.statistics_partial[index];
        return ptx::ex2((partial.max - max) * scale) * partial.sum;
    };
    float sum = 0.f;
    for (int split = lane; split < params.num_splits; split += 32) sum += share(split * rows + row);
    sum = warp_sum(sum);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;

    // A lane has pairs of adjacent columns.
    constexpr int kPairs = ceil_div(kHeadDimV, 64);
    float2 out[kPairs] = {};
#pragma unroll 8
    for (int split = 0; split < params.num_splits; ++split) {
        const int64_t index = split * rows + row;
        const float weight = share(index) * inverse;
        const float2* source =
            reinterpret_cast<const float2*>(params.o_partial + index * kHeadDimV);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (kHeadDimV % 64 != 0 && i * 32 + lane >= kHeadDimV / 2) continue;
            const float2 x = source[i * 32 + lane];
            out[i].x += weight * x.x;
            out[i].y += weight * x.y;
        }
    }

    if (lane == 0) params.lse[row] = log_sum_exp(max, sum, scale);
    const ResultRow at(params, row);
    Element* target = row_pointer<Element>(params.out, at.batch, at.query, at.head);
    const bool paired =
        params.head_dim_v % 2 == 0;  // otherwise every other row begins inside a pair
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int col = 2 * (i * 32 + lane);
        const uint32_t pair = ptx::pack<Element>(out[i].x, out[i].y);
        if (col >= params.head_dim_v) continue;
        if (paired) {
            *reinterpret_cast<uint32_t*>(target + col) = pair;
        } else {
            auto* bits = reinterpret_cast<uint16_t*>(target + col);
            bits[0] = static_cast<uint16_t>(pair);
            if (col + 1 < params.head_dim_v) bits[1] = static_cast<uint16_t>(pair >> 16);
        }
    }
}

}  // namespace flash_ext
