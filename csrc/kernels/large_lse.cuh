// Before a backward: rows whose lse is too large for P = 2^(S scale - lse), see kLargeExponent. lse
// itself is rounded so much then that it no longer tells P: that of 10^8 is known to 4. Such a row
// gets a reference r, the maximum of its scores, and an lse relative to it,
//
//     lse' = log2 sum_j 2^((S_j - r) scale),    P = 2^((S - r) scale - lse')
//
// for which its Q K^T is computed once more, by the same sums of products as in the backward, so
// that S - r is exact where it counts. Where no row has one, as usual, a flag tells the backward
// kernels, and costs them a branch for each tile.
//
// Not for fa3 with softcap: its kernels have no register for the reference where they find tanh
// again, and take caps only that keep scores small.
#pragma once

#include "../mask.cuh"
#include "../ptx/grid_dependency.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../tile/gemm.cuh"
#include "../tile/global_operand.cuh"
#include "launch.cuh"
#include "packed.cuh"

namespace flash_ext {

// Of 16 rows, of which a lane has two: the maximum and sum of their softmax.
template <class Element, bool kGeneral>
__device__ __forceinline__ OnlineSoftmax<16> softmax_of_rows(const BackwardParams& params,
                                                             const Sequence& sequence, int head,
                                                             int first_query) {
    const BandMask mask{sequence.seqlen_q, sequence.seqlen_k, params.window_left,
                        params.window_right};
    const float scale = kGeneral ? 1.f : params.scale_log2;
    const int head_k = head / (params.heads_q / params.heads_k);
    OnlineSoftmax<16> softmax;
    if (params.sink != nullptr) softmax.begin_with(params.sink[head] * kLog2e * ptx::rcp(scale));
    RegisterTile<16, 8> none;  // no output
    none.clear();
    const Interval keys = mask.keys_of({first_query, first_query + 16});
#pragma unroll 1
    for (int key = keys.begin / 16 * 16; key < keys.end; key += 16) {
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
            gemm<Element, 16>(
                rS,
                AFromGlobalRows<Element>{block(params.q, sequence.q_begin + first_query, head,
                                               sequence.seqlen_q - first_query)},
                BFromGlobalRows<Element>{
                    block(params.k, sequence.k_begin + key, head_k, sequence.seqlen_k - key)});
        }
        if constexpr (kGeneral)
            ScoreFunction<Element, Rows::kQueries>{params, sequence, head}.apply(rS, first_query,
                                                                                 key);
        mask_scores(rS, key, [&](int row) { return mask.key_range(first_query + row); });
        softmax.template update<true>(rS, none, scale);
    }
    softmax.finish();
    return softmax;
}

inline constexpr int kLargeLseThreads = 128;
inline constexpr int kLargeLseBlock = 1024;

// Of query `position` of (batch, head) number flat_head, or of packed tensors, by a whole warp.
template <class Element, bool kGeneral>
__device__ __forceinline__ RelativeLse relative_lse(const BackwardParams& params, int flat_head,
                                                    int position) {
    int number = flat_head / params.heads_q;
    if (params.cu_seqlens_q != nullptr) {
        int end = sequence_count(params);
        for (number = 0; end - number > 1;) {
            const int middle = (number + end) / 2;
            const int begin = packed_begin(params.cu_seqlens_q, middle, params.seqlen_q);
            (begin <= position ? number : end) = middle;
        }
    }
    const Sequence sequence = warp_uniform<true>(sequence_of<true>(params, number));
    const OnlineSoftmax<16> softmax = softmax_of_rows<Element, kGeneral>(
        params, sequence, flat_head % params.heads_q, position - sequence.q_begin);
    return {softmax.row_max[0][0], log2f(softmax.row_sum[0][0])};  // lane 0 has the first row
}

// A CTA for every kLargeLseBlock queries of a head.
template <class Element, bool kGeneral>
__global__ void __launch_bounds__(kLargeLseThreads, 1)
    large_lse_kernel(const __grid_constant__ BackwardParams params) {
    ptx::launch_dependents();
    const int blocks = ceil_div(params.seqlen_q, kLargeLseBlock);
    const int flat_head = blockIdx.x / blocks;
    const int64_t head_rows = int64_t{flat_head} * params.seqlen_q;
    const float* lse = params.lse + head_rows;
    RelativeLse* relative = params.relative_lse + head_rows;
    const auto is_large_row = [&](int row) {
        const float x = row < params.seqlen_q ? lse[row] : 0.f;
        return x != -INFINITY && is_large(x * kLog2e);
    };
    constexpr int kWarpRows = kLargeLseBlock / (kLargeLseThreads / 32);
    const int first = blockIdx.x % blocks * kLargeLseBlock + warp_id() * kWarpRows;
    bool large = false;
#pragma unroll
    for (int i = 0; i < kWarpRows; i += 32) {
        const int row = first + i + lane_id();
        large |= is_large_row(row);
        if (row < params.seqlen_q) relative[row] = {};
    }
    if (!__any_sync(0xffffffff, large)) [[likely]]
        return;
    if (lane_id() == 0) *params.large_lse.word = params.large_lse.name;
#pragma unroll 1
    for (int i = 0; i < kWarpRows; i += 32) {
        uint32_t left = __ballot_sync(0xffffffff, is_large_row(first + i + lane_id()));
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
            const int row = first + i + __ffs(left) - 1;
            const RelativeLse x = relative_lse<Element, kGeneral>(params, flat_head, row);
            if (lane_id() == 0) relative[row] = x;
        }
    }
}

cudaError_t split_large_lse(const BackwardParams& params, cudaStream_t stream) {
    const int64_t heads = int64_t{params.heads_q} * tensor_batches(params);
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kPacked, Features::kGeneral>(params, [&](auto element,
                                                                       auto features) {
        constexpr bool kGeneral = features == Features::kGeneral;
        status = launch_kernel<large_lse_kernel<decltype(element), kGeneral>>(
            heads * ceil_div(params.seqlen_q, kLargeLseBlock), kLargeLseThreads, 0, params, stream);
    });
    return status;
}

}  // namespace flash_ext
