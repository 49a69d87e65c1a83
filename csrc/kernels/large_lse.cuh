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

namespace flash_ext {

// Of the lane's rows of 16: the maximum and sum of their softmax.
template <class Element, bool kGeneral>
__device__ __forceinline__ OnlineSoftmax<16> softmax_of_rows(const BackwardParams& params,
                                                             const Sequence& sequence, int head,
                                                             int first_query) {
    const BandMask mask{sequence.seqlen_q, sequence.seqlen_k, params.window_left,
                        params.window_right};
    const float scale = kGeneral ? 1.f : params.scale_log2;
    const int head_k = head / (params.heads_q / params.heads_k);
    OnlineSoftmax<16> softmax;
    if (params.sink != nullptr) softmax.begin_with(params.sink[head] * kLog2e / scale);
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
static_assert(kLargeLseThreads == kWorkspaceRows);

// A thread for each row of a block of the workspace.
template <class Element, bool kGeneral>
__global__ void __launch_bounds__(kLargeLseThreads)
    large_lse_kernel(const __grid_constant__ BackwardParams params) {
    ptx::launch_dependents();
    const auto [tile, head] = q_tile_index<true, kWorkspaceRows>(params, blockIdx.x);
    const Sequence& sequence = tile.sequence;
    const int64_t offset = statistics_offset(params, sequence, head);
    const int first_query = tile.tile * kWorkspaceRows + threadIdx.x / 32 * 32;
    const int query = first_query + lane_id();
    bool large = false;
    if (query < sequence.seqlen_q) {
        const float lse = params.lse[offset + query];
        large = lse != -INFINITY && is_large(lse * kLog2e);
        params.relative_lse[offset + query] = {};
    }
    const uint32_t large_rows = __ballot_sync(0xffffffff, large);
    if (large_rows == 0) [[likely]]
        return;
    if (lane_id() == 0) *params.large_lse.word = params.large_lse.name;
#pragma unroll 1
    for (int first = 0; first < 32; first += 16) {
        if ((large_rows >> first & 0xffff) == 0) continue;
        const OnlineSoftmax<16> softmax =
            softmax_of_rows<Element, kGeneral>(params, sequence, head, first_query + first);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + lane_row() + 8 * i;
            if (lane_col() == 0 && (large_rows >> row & 1) != 0)
                params.relative_lse[offset + first_query + row] = {softmax.row_max[0][i],
                                                                   log2f(softmax.row_sum[0][i])};
        }
        __syncwarp();
    }
}

cudaError_t split_large_lse(BackwardParams params, cudaStream_t stream) {
    params.q_blocks = tile_numbers(params, params.seqlen_q, kWorkspaceRows);
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kPacked, Features::kGeneral>(
        params, [&](auto element, auto features) {
            constexpr bool kGeneral = features == Features::kGeneral;
            status = launch_kernel<large_lse_kernel<decltype(element), kGeneral>>(
                workspace_rows(params) / kWorkspaceRows, kLargeLseThreads, 0, params, stream);
        });
    return status;
}

}  // namespace flash_ext
