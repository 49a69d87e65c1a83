// Combines the results of splits of the keys into one, as in Flash-Decoding (Dao et al. 2023):
//
//     m = max_p m_p,    l = sum_p 2^(m_p - m) l_p,    lse = (m + log2(l)) ln(2)
//     O = sum_p 2^(m_p - m) l_p / l O_p
//
// Split p is attention over some of the keys, in float32, with the row maxima m_p and sums l_p of
// its softmax. A split in which a row sees no key has l_p = 0 and does not count.
//
// Fixed splits, of batch-invariant calls, are merged one after another instead (merge_splits.cuh).
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/merge_splits.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineRows = 2;  // of a warp, which waits for both at once
inline constexpr int kCombineRowsOfCta = kCombineWarps * kCombineRows;

// What this kernel needs of a call.
struct CombineParams {
    int rows;  // of statistics; memory has no room for the partial results of 2^31
    int num_splits;
    int heads_q;
    int seqlen_q;
    int head_dim_v;
    const float* o_partial;
    const PartialStatistics* statistics_partial;
    float* lse;
    TensorView out;
};

// Where a row of statistics lies in the tensors, across varlen sequences.
struct RowPlace {
    int batch, head, row;
};
FLASH_DEVICE RowPlace place_of_row(const CombineParams& params, int row) {
    const int flat_head = row / params.seqlen_q;
    return {flat_head / params.heads_q, flat_head % params.heads_q, row % params.seqlen_q};
}

// Stores columns `col` and `col` + 1 of a row of O, as far as they exist.
template <class Element>
FLASH_DEVICE void store_pair(Element* row, int col, int head_dim_v, float2 x) {
    if (col >= head_dim_v) return;
    const uint32_t pair = ptx::pack<Element>(x.x, x.y);
    if (head_dim_v % 2 == 0) {
        *reinterpret_cast<uint32_t*>(row + col) = pair;
    } else {  // every other row begins inside a pair
        auto* bits = reinterpret_cast<uint16_t*>(row + col);
        bits[0] = static_cast<uint16_t>(pair);
        if (col + 1 < head_dim_v) bits[1] = static_cast<uint16_t>(pair >> 16);
    }
}

template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(32 * kCombineWarps, 6)
    combine_kernel(const __grid_constant__ CombineParams params) {
    const int rows = params.rows;
    const int first_row =
        static_cast<int>(blockIdx.x) * kCombineRowsOfCta + warp_id() * kCombineRows;
    if (first_row >= rows) return;
    const int lane = lane_id();
    const auto clamped = [&](int r) { return min_of(first_row + r, rows - 1); };
    const auto statistics = [&](int split, int r) {
        return params.statistics_partial[int64_t{split} * rows + clamped(r)];
    };
    ptx::wait_for_grid_before();

    PartialStatistics partial[kCombineRows];  // of the lane's first split
    float max[kCombineRows];
#pragma unroll
    for (int r = 0; r < kCombineRows; ++r) {
        partial[r] = {-INFINITY, 0.f};
        if (lane < params.num_splits) partial[r] = statistics(lane, r);
        max[r] = partial[r].max;
    }
#pragma unroll 1
    for (int split = lane + 32; split < params.num_splits; split += 32) {
#pragma unroll
        for (int r = 0; r < kCombineRows; ++r) max[r] = fmaxf(max[r], statistics(split, r).max);
    }
    RowPlace place[kCombineRows];
#pragma unroll
    for (int r = 0; r < kCombineRows; ++r) {
        place[r] = place_of_row(params, clamped(r));
        max[r] = warp_max(max[r]);
    }

    constexpr int kPairs = ceil_div(kHeadDimV, 64);  // of adjacent columns, that a lane has
    float2 out[kCombineRows][kPairs] = {};
    float sum[kCombineRows] = {};
#pragma unroll 1
    for (int first = 0; first < params.num_splits; first += 32) {
        const int splits = min_of(params.num_splits - first, 32);
        float share[kCombineRows];  // of the lane's split in the sum: 2^(m_p - m) l_p
#pragma unroll
        for (int r = 0; r < kCombineRows; ++r) {
            if (first > 0 && lane < splits) partial[r] = statistics(first + lane, r);
            share[r] = lane < splits
                           ? ptx::ex2(partial[r].max - finite_max(max[r])) * partial[r].sum
                           : 0.f;
            sum[r] += share[r];
            if (params.num_splits == 1) share[r] = 1.f;  // a row as it is, to the bit
        }
#pragma unroll 4
        for (int split = 0; split < splits; ++split) {
#pragma unroll
            for (int r = 0; r < kCombineRows; ++r) {
                const float weight = __shfl_sync(0xffffffff, share[r], split);
                const int64_t row_of_split = int64_t{first + split} * rows + clamped(r);
                const auto* source =
                    reinterpret_cast<const float2*>(params.o_partial + row_of_split * kHeadDimV) +
                    lane;
#pragma unroll
                for (int j = 0; j < kPairs; ++j) {
                    if (kHeadDimV % 64 != 0 && j * 32 + lane >= kHeadDimV / 2) continue;
                    const float2 x = source[j * 32];
                    out[r][j].x += weight * x.x;
                    out[r][j].y += weight * x.y;
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kCombineRows; ++r) {
        sum[r] = warp_sum(sum[r]);
        const float inverse = sum[r] == 0.f ? 0.f : params.num_splits == 1 ? 1.f : 1.f / sum[r];
        if (lane == 0) params.lse[clamped(r)] = log_sum_exp(max[r], sum[r]);
        auto* const target =
            row_pointer<Element>(params.out, place[r].batch, place[r].row, place[r].head);
#pragma unroll
        for (int j = 0; j < kPairs; ++j)
            store_pair(target, 2 * (j * 32 + lane), params.head_dim_v,
                       {out[r][j].x * inverse, out[r][j].y * inverse});
    }
}

// In a fixed order, as a CTA does that has all splits of a Q tile. A warp has a row.
template <class Element, int kHeadDimV>
__global__ void __launch_bounds__(32 * kCombineWarps)
    merge_splits_kernel(const __grid_constant__ CombineParams params) {
    const int row = static_cast<int>(blockIdx.x) * kCombineWarps + warp_id();
    if (row >= params.rows) return;
    const int lane = lane_id();
    ptx::wait_for_grid_before();

    constexpr int kPairs = ceil_div(kHeadDimV, 64);
    float2 out[kPairs] = {};
    PartialStatistics all{-INFINITY, 0.f};
#pragma unroll 1
    for (int first = (params.num_splits - 1) / 32 * 32; first >= 0; first -= 32) {
        PartialStatistics own{-INFINITY, 0.f};  // of the lane's split
        if (first + lane < params.num_splits)
            own = params.statistics_partial[int64_t{first + lane} * params.rows + row];
        const unsigned with_keys = __ballot_sync(0xffffffff, own.sum != 0.f);
        const int begin = max_of(__ffs(with_keys) - 1, 0), last = 31 - __clz(with_keys);
        MergeWeights weights{};  // of the lane's split
        for (int i = last; i >= begin; --i) {
            const MergeWeights of_split = merge_statistics(
                all, {__shfl_sync(0xffffffff, own.max, i), __shfl_sync(0xffffffff, own.sum, i)});
            if (lane == i) weights = of_split;
        }
        const auto* source =
            reinterpret_cast<const float2*>(params.o_partial +
                                            (int64_t{first} * params.rows + row) * kHeadDimV) +
            lane;
        const int64_t distance = int64_t{params.rows} * (kHeadDimV / 2);  // of splits
#pragma unroll 4
        for (int i = last; i >= begin; --i) {
            const MergeWeights merged{__shfl_sync(0xffffffff, weights.before, i),
                                      __shfl_sync(0xffffffff, weights.added, i)};
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                if (kHeadDimV % 64 != 0 && j * 32 + lane >= kHeadDimV / 2) continue;
                const float2 x = source[i * distance + j * 32];
                out[j] = {merged(out[j].x, x.x), merged(out[j].y, x.y)};
            }
        }
    }
    if (lane == 0) params.lse[row] = log_sum_exp(all.max, all.sum);
    const RowPlace place = place_of_row(params, row);
    auto* const target = row_pointer<Element>(params.out, place.batch, place.row, place.head);
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
        store_pair(target, 2 * (j * 32 + lane), params.head_dim_v, out[j]);
}

// The results are of a kernel of one of these tables.
template <auto&... kTables>
cudaError_t combine_splits_of(const ForwardParams& params, HeadDims dims, cudaStream_t stream,
                              bool pdl) {
    const CombineParams combined{.rows = static_cast<int>(statistics_rows(params)),
                                 .num_splits = params.num_splits,
                                 .heads_q = params.heads_q,
                                 .seqlen_q = params.seqlen_q,
                                 .head_dim_v = params.head_dim_v,
                                 .o_partial = params.o_partial,
                                 .statistics_partial = params.statistics_partial,
                                 .lse = params.lse,
                                 .out = params.out};
    const auto launch = [&](auto, auto dim_v) {
        return dispatch_element(params.out_type, [&](auto element) {
            if (params.split_ctas > 0)
                return launch_kernel<merge_splits_kernel<decltype(element), dim_v.value>>(
                    ceil_div(combined.rows, kCombineWarps), 32 * kCombineWarps, 0, combined, stream,
                    {.pdl = pdl});
            return launch_kernel<combine_kernel<decltype(element), dim_v.value>>(
                ceil_div(combined.rows, kCombineRowsOfCta), 32 * kCombineWarps, 0, combined, stream,
                {.pdl = pdl});
        });
    };
    cudaError_t status = kNoKernel;
    (((status = dispatch_head_dims<kTables>(dims, launch)) != kNoKernel) || ...);
    return status;
}

cudaError_t combine_splits(const ForwardParams& params, HeadDims dims, cudaStream_t stream,
                           bool pdl) {
    using namespace tuning;
    return combine_splits_of<kFa2Forward, kFa3Forward, kFa3ForwardFp8>(params, dims, stream, pdl);
}

}  // namespace flash_ext
