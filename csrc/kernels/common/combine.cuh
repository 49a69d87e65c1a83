// Combines the results of splits of the keys into one, as in Flash-Decoding (Dao et al. 2023):
//
//     m = max_p m_p,    l = sum_p 2^((m_p - m) scale) l_p,    lse = m scale + log(l)
//     O = sum_p 2^((m_p - m) scale) l_p / l O_p
//
// Split p is attention over some of the keys, in float32, with the row maxima m_p and sums l_p of
// its softmax. A split in which a row sees no key has l_p = 0 and does not count. A warp computes a
// row.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "plan/head_dims.h"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kCombineWarps = 4;

template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(32 * kCombineWarps, 6)
    combine_kernel(const __grid_constant__ ForwardParams params) {
    // Memory has no room for the partial results of 2^31 rows.
    const int row = static_cast<int>(blockIdx.x) * kCombineWarps + warp_id();
    const int64_t rows = statistics_rows(params);
    if (row >= rows) return;
    const int lane = lane_id();
    const float scale = exponent_scale(params);
    const auto statistics = [&](int split) {
        return params.statistics_partial[split * rows + row];
    };
    ptx::wait_for_grid_before();

    PartialStatistics partial{-INFINITY, 0.f};  // of the lane's first split
    if (lane < params.num_splits) partial = statistics(lane);
    float max = partial.max;
    bool marked = is_marked(max);
#pragma unroll 1
    for (int split = lane + 32; split < params.num_splits; split += 32) {
        const float split_max = statistics(split).max;
        max = fmaxf(max, split_max);
        marked |= is_marked(split_max);
    }
    // The row of the tensors, across packed sequences.
    const int flat_head = row / params.seqlen_q;
    const int batch = flat_head / params.heads_q;
    const int head = flat_head % params.heads_q;
    const int query = row % params.seqlen_q;
    if (__any_sync(0xffffffff, marked)) [[unlikely]] {
        const Sequence sequence = sequence_at(params, batch, query);
        return recompute_rows<Element>(params, sequence, head, query - sequence.q_begin, 1);
    }
    max = finite_max(warp_max(max));

    constexpr int kPairs = ceil_div(kHeadDimV, 64);  // of adjacent columns, that a lane has
    float2 out[kPairs] = {};
    float sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < params.num_splits; first += 32) {
        const int splits = min_of(params.num_splits - first, 32);
        if (first > 0 && lane < splits) partial = statistics(first + lane);
        // Of the lane's split in the sum: 2^((m_p - m) scale) l_p.
        const float share =
            lane < splits ? ptx::ex2((partial.max - max) * scale) * partial.sum : 0.f;
        sum += share;
#pragma unroll 8
        for (int split = 0; split < splits; ++split) {
            const float weight = __shfl_sync(0xffffffff, share, split);
            const auto* source =
                reinterpret_cast<const float2*>(params.o_partial +
                                                ((first + split) * rows + row) * kHeadDimV) +
                lane;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                if (kHeadDimV % 64 != 0 && j * 32 + lane >= kHeadDimV / 2) continue;
                const float2 x = source[j * 32];
                out[j].x += weight * x.x;
                out[j].y += weight * x.y;
            }
        }
    }
    sum = warp_sum(sum);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    if (lane == 0) params.lse[row] = log_sum_exp(max, sum, scale);
    Element* const target = row_pointer<Element>(params.out, batch, query, head);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const int col = 2 * (j * 32 + lane);
        const uint32_t pair = ptx::pack<Element>(out[j].x * inverse, out[j].y * inverse);
        if (col >= params.head_dim_v) continue;
        if (params.head_dim_v % 2 == 0) {
            *reinterpret_cast<uint32_t*>(target + col) = pair;
        } else {  // every other row begins inside a pair
            auto* bits = reinterpret_cast<uint16_t*>(target + col);
            bits[0] = static_cast<uint16_t>(pair);
            if (col + 1 < params.head_dim_v) bits[1] = static_cast<uint16_t>(pair >> 16);
        }
    }
}

cudaError_t combine_splits(ForwardParams params, cudaStream_t stream, bool pdl) {
    cudaError_t status = cudaSuccess;
    const HeadDims padded =
        pad_head_dims({params.head_dim, params.head_dim_v}, params.element_type);
    dispatch_head_dims(padded, [&](auto, auto dim_v) {
        dispatch_element(params.out_type, [&](auto element) {
            status = launch_kernel<combine_kernel<decltype(element), dim_v.value>>(
                ceil_div<int64_t>(statistics_rows(params), kCombineWarps), 32 * kCombineWarps, 0,
                params, stream, {.pdl = pdl});
        });
    });
    return status;
}

}  // namespace flash_ext
