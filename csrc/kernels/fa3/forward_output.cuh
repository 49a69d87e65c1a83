// How the FA3 forward stores O and lse: as results, or as those of splits, also with
// packed GQA.
#pragma once

#include "kernels/common/recompute_rows.cuh"
#include "kernels/fa3/forward.cuh"

namespace flash_ext {

// Is this row of the tile one of its sequence and group?
template <class Config>
__device__ __forceinline__ bool Fa3Forward<Config>::is_valid(const QueryTile& tile, int row) const {
    return query_of(tile, row) < tile.sequence.seqlen_q && head_of(row) < group();
}

// The index of a valid row among the statistics.
template <class Config>
__device__ __forceinline__ int64_t Fa3Forward<Config>::statistics_index(const QueryTile& tile,
                                                                        int row) const {
    return statistics_offset(params, tile.sequence, tile.head) +
           int64_t{head_of(row)} * params.seqlen_q + query_of(tile, row);
}

// A valid row of the output, of any 16-bit type, and two columns of it.
template <class Config>
__device__ __forceinline__ uint16_t* Fa3Forward<Config>::out_row(const QueryTile& tile,
                                                                 int row) const {
    const Sequence& s = tile.sequence;
    return row_pointer<uint16_t>(params.out, s.batch, s.q_begin + query_of(tile, row),
                                 tile.head + head_of(row));
}

template <class Config>
__device__ __forceinline__ uint32_t Fa3Forward<Config>::pack_out(float x, float y) const {
    if constexpr (!kFp8) {
        return ptx::pack<Element>(x, y);
    } else {
        const uint32_t half = ptx::pack<__half>(x, y);
        const uint32_t bfloat16 = ptx::pack<__nv_bfloat16>(x, y);
        return params.out_type == ElementType::kFloat16 ? half : bfloat16;
    }
}

// O / l, and descaled.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::normalize(Output& rO, Softmax& softmax,
                                                              const QueryTile& tile) const {
    softmax.finish();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float factor = softmax.inverse_sum(0, i);
#pragma unroll
        for (int n = 0; n < Output::kN; ++n) {
            rO.v[0][n][2 * i] *= factor;
            rO.v[0][n][2 * i + 1] *= factor;
        }
    }
    if constexpr (kFp8) descale_output(rO, tile);
}

// Stores O / l and lse to HBM, or the results of a split.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::store(Output& rO, Softmax& softmax,
                                                          const QueryTile& tile) const {
    normalize(rO, softmax, tile);
    const Sequence& s = tile.sequence;
    // A logarithm takes a hundred cycles: of the four lanes of two rows, two compute one each.
    const int i = lane_id() % 2;
    const int row = lane_row() + 8 * i;
    const bool has_row = lane_id() % 4 < 2;
    const int64_t statistics = statistics_offset(params, s, tile.head);
    if (has_splits()) {
        const int64_t split = tile.split * statistics_rows(params) + statistics;
        const int first_row = warp_row();
        const auto index_of = [&](int row) -> int64_t {
            const int query = query_of(tile, first_row + row);
            const int head = head_of(first_row + row);
            if (query >= s.seqlen_q || head >= group()) return -1;
            return split + int64_t{head} * params.seqlen_q + query;
        };
        const int64_t index = index_of(row);
        if (has_row && index >= 0)
            params.statistics_partial[index] = {softmax.max(0, i), softmax.sum(0, i)};
        store_rows(params.o_partial, rO, index_of);
    } else {
        const int first_row = tile.first_query + warp_row();
        const int rows = s.seqlen_q - first_row;
        float lse = softmax.lse(0, i, exponent_scale());
        if (is_to_be_marked(softmax.max(0, i), lse)) [[unlikely]] {
            lse = mark_of(warp_number());
            has_marked() = true;
        }
        if (has_row && row < rows) params.lse[statistics + first_row + row] = lse;
        const auto store_as = [&](auto element) {
            store_rows(global_tile<decltype(element)>(params.out, s.batch, s.q_begin + first_row,
                                                      tile.head, rows, params.head_dim_v),
                       rO);
        };
        if constexpr (!kFp8) {
            store_as(Element{});
        } else if (params.out_type == ElementType::kFloat16) {
            store_as(__half{});
        } else {
            store_as(__nv_bfloat16{});
        }
    }
}

// With packed GQA, where no keys are split and each CTA has one tile: stores O / l and lse without
// a detour. In store(), which the loop contains, this would cost splits time.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::store_group(Output& rO, Softmax& softmax,
                                                                const QueryTile& tile) const {
    normalize(rO, softmax, tile);
    const int first_row = warp_row();
    uint32_t left = 0;  // rows to be recomputed
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + lane_row() + 8 * i;
        if (!is_valid(tile, row)) continue;
        const float lse = softmax.lse(0, i, exponent_scale());
        if (is_to_be_marked(softmax.max(0, i), lse)) left |= 1 << (lane_row() + 8 * i);
        if (lane_col() == 0) params.lse[statistics_index(tile, row)] = lse;
        uint16_t* target = out_row(tile, row) + lane_col();
#pragma unroll
        for (int n = 0; n < Output::kN; ++n)
            if (8 * n < params.head_dim_v)  // a multiple of 8
                *reinterpret_cast<uint32_t*>(target + 8 * n) =
                    pack_out(rO.v[0][n][2 * i], rO.v[0][n][2 * i + 1]);
    }
    if constexpr (!Config::kGeneral && !kFp8) {
        left = __reduce_or_sync(0xffffffff, left);
        __syncwarp();  // these rows are written again, by other lanes
        for (; left != 0; left &= left - 1) {
            const int row = first_row + __ffs(left) - 1;
            recompute_row<Element>(params, tile.sequence, tile.head + head_of(row),
                                   query_of(tile, row));
        }
    }
}

}  // namespace flash_ext
