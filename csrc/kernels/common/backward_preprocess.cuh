// The preprocess pass of all variants' backward, a CTA per Q tile: delta = rowsum(dO * O) - dlse
// (FlashAttention-2, algorithm 2, line 4; the gradient of the logsumexp enters here, because
// d lse / d S = P), and lse in base 2; for kernels that add them by a matmul also as rows of terms
// (StatisticsRow). Where dQ is summed in HBM also zeros in params.dq_semaphore
// and, with params.dq_accum_zeroed, in dq_accum. Where lse is large, references (large_lse.cuh).
#pragma once

#include "kernels/common/backward_math.cuh"
#include "kernels/common/large_lse.cuh"
#include "kernels/common/launch.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

// Eight elements of a row, from `col` on. Elements past the row's end are zeros.
template <class Element>
FLASH_DEVICE uint4 load_chunk(const GlobalTile<const Element>& tile, int row, int col,
                              bool aligned) {
    const Element* x = tile.data + row * tile.row_stride + col;
    return aligned ? *reinterpret_cast<const uint4*>(x) : load_8(x, tile.cols - col);
}

// -x, halved, since a RowNumbers operand counts it twice.
FLASH_DEVICE StatisticsRow negated_row(float x) {
    const auto truncated = [](float y) { return __uint_as_float(__float_as_uint(y) & 0xffff0000); };
    const float number = -0.5f * x;
    const float first = truncated(number);
    const float second = truncated(number - first);
    const float third = number - first - second;
    return {ptx::pack<__nv_bfloat16>(first, second), ptx::pack<__nv_bfloat16>(third, 0.f), 0, 0};
}

FLASH_DEVICE void store_statistics(const BackwardParams& params, int64_t row,
                                   const RowStatistics& x) {
    params.lse_log2[row] = x.lse_log2;
    params.minus_delta[row] = -x.delta;
    params.reference[row] = 0.f;
    if (params.lse_rows == nullptr) return;
    constexpr float kLargest = 0x1.fep127f;  // of bfloat16; infinity would become NaN
    params.lse_rows[row] =
        negated_row(x.lse_log2 == INFINITY ? kLargest : x.lse_log2 / params.scale_log2);
    params.delta_rows[row] = negated_row(x.delta);
}

struct PreprocessParams : BackwardParams {
    int block_q;
};

// The rows of the workspace that a CTA writes, from query `first_query` on. With the last Q tile of
// a sequence come all rows before the next sequence, so that none is left out.
FLASH_DEVICE int rows_to_store(const BackwardParams& params, const Sequence& s, int first_query,
                               int block_q) {
    if (first_query + block_q < s.seqlen_q) return block_q;
    if (first_query > 0 && first_query >= s.seqlen_q) return 0;  // a padding tile
    const int groups = params.cu_seqlens_q == nullptr
                           ? params.row_groups
                           : first_row_group(s.q_begin + s.seqlen_q, s.seq_idx + 1) -
                                 first_row_group(s.q_begin, s.seq_idx);
    return groups * kWorkspaceRows - first_query;
}

inline constexpr int kPreprocessThreads = 256;

// The lanes of a row, each with 16 bytes.
constexpr int preprocess_lanes(int head_dim_v) {
    return head_dim_v <= 32 ? 4 : head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32;
}

template <class Element, bool kChangesScores, int kLanes>
__global__ void __launch_bounds__(kPreprocessThreads, kChangesScores ? 2 : 4)
    backward_preprocess_kernel(const __grid_constant__ PreprocessParams params) {
    constexpr int kRowsPerPass = kPreprocessThreads / kLanes;
    constexpr int kPasses = kLanes == 4 ? 2 : 4;  // whose loads run side by side
    ptx::launch_dependents();
    const int block_q = params.block_q;
    const auto [tile, head] = q_tile_index<true>(params, blockIdx.x, block_q);
    const auto [sequence, q_tile] = tile;
    const int first_query = q_tile * block_q;
    const int64_t first = workspace_row(params, sequence, head, first_query);
    const int stored = rows_to_store(params, sequence, first_query, block_q);
    const int lane_in_row = threadIdx.x % kLanes;
    const int first_col = lane_in_row * 8;
    const int rows = min_of(sequence.seqlen_q - first_query, block_q);
    const auto gO =
        query_rows<const Element>(params.out, sequence, head, first_query, params.head_dim_v);
    const auto gdO =
        query_rows<const Element>(params.dout, sequence, head, first_query, params.head_dim_v);
    const int64_t index = statistics_offset(params, sequence, head) + first_query;

    if (params.dq_accum_cols > 0) {
        int* const of_tiles = params.dq_semaphore + 1;
        if (threadIdx.x < stored / kWorkspaceRows)
            of_tiles[first / kWorkspaceRows + threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            if (blockIdx.x == 0) params.dq_semaphore[0] = 0;
            of_tiles[params.padding_row / kWorkspaceRows + blockIdx.x] = 0;  // tiles_done()
        }
        if (params.dq_accum_zeroed) {
            auto* accum = reinterpret_cast<float4*>(params.dq_accum + first * params.dq_accum_cols);
            const int chunks = stored / 4 * params.dq_accum_cols;
#pragma unroll 2
            for (int chunk = threadIdx.x; chunk < chunks; chunk += kPreprocessThreads)
                accum[chunk] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < kPaddingRows)
        store_statistics(params, params.padding_row + threadIdx.x, {INFINITY, 0.f});
    bool large = false;
#pragma unroll 1
    for (int row = threadIdx.x / kLanes; row < stored; row += kPasses * kRowsPerPass) {
        // What is done once per row is done for all passes at the same time, in different lanes.
        const int own_row = row + lane_in_row * kRowsPerPass;
        const bool owns_row = lane_in_row < kPasses && own_row < stored;
        float own_dot = 0.f, own_lse = -INFINITY, own_dlse = 0.f;
        if (owns_row && own_row < rows) {
            own_lse = params.lse[index + own_row];
            if (params.dlse != nullptr) own_dlse = params.dlse[index + own_row];
        }
        uint4 o[kPasses], d_o[kPasses];
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int r = row + i * kRowsPerPass;
            o[i] = d_o[i] = make_uint4(0, 0, 0, 0);
            if (r >= rows || first_col >= params.head_dim_v) continue;
            o[i] = load_chunk(gO, r, first_col, !kChangesScores || params.aligned);
            d_o[i] = load_chunk(gdO, r, first_col, !kChangesScores || params.aligned);
        }
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            float sum = dot<Element>(o[i], d_o[i]);
#pragma unroll
            for (int offset = kLanes / 2; offset > 0; offset /= 2)
                sum += __shfl_xor_sync(0xffffffff, sum, offset);
            if (lane_in_row == i) own_dot = sum;
        }
        if (!owns_row) continue;
        const RowStatistics statistics =
            statistics_of(own_dot, own_lse, own_dlse, params.inverse_ds_factor);
        store_statistics(params, first + own_row, statistics);
        large |= is_large_lse(statistics.lse_log2);
    }
    if (params.may_have_large_lse && __syncthreads_or(large)) [[unlikely]]
        split_large_lse<Element, kChangesScores>(params, block_q);
}

cudaError_t backward_preprocess(const BackwardParams& params, int block_q, cudaStream_t stream) {
    const int lanes = preprocess_lanes(params.head_dim_v);
    const int64_t ctas = q_tile_count(params, block_q);
    const auto launch = [&](auto element, auto is_general, auto row_lanes) {
        return launch_kernel<backward_preprocess_kernel<decltype(element), is_general, row_lanes>>(
            ctas, kPreprocessThreads, 0, PreprocessParams{params, block_q}, stream);
    };
    return dispatch_element(params.element_type, [&](auto element) {
        if (params.changes_scores)  // these take long to compile: two suffice
            return dispatch<16, 32>(max_of(lanes, 16), [&](auto row_lanes) {
                return launch(element, std::true_type{}, row_lanes);
            });
        return dispatch<4, 8, 16, 32>(
            lanes, [&](auto row_lanes) { return launch(element, std::false_type{}, row_lanes); });
    });
}

}  // namespace flash_ext
