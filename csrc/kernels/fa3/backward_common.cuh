// What the kernels of FA3's backward share: tensor maps, the order of the inner loop, and P from S.
#pragma once

#include <type_traits>

#include "kernels/common/backward_math.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {

struct Fa3BackwardMaps : BackwardParams {
    CUtensorMap q_map;
    CUtensorMap do_map;
    CUtensorMap k_map;
    CUtensorMap v_map;

    template <class Config>
    cudaError_t encode() {
        for (cudaError_t status :
             {encode_tensor_map<typename Config::QTile>(q_map, q, head_dim),
              encode_tensor_map<typename Config::DOTile>(do_map, dout, head_dim_v),
              encode_tensor_map<typename Config::KTile>(k_map, k, head_dim),
              encode_tensor_map<typename Config::VTile>(v_map, v, head_dim_v)})
            if (status != cudaSuccess) return status;
        return cudaSuccess;
    }
};

// The position of the inner loop: Q tile and query head.
struct QTilePosition {
    int i;  // of the Q tile among the visible ones
    int head;

    __device__ __forceinline__ void advance(const VisibleTiles& q_tiles) {
        if (++i == q_tiles.end) {
            i = q_tiles.begin;
            ++head;
        }
    }
};

// The Q tiles of which every query sees all of `keys`, so that scores need neither mask nor
// reference. Queries past the end of the sequence do not count.
__device__ __forceinline__ VisibleTiles full_q_tiles(const KeyTile& tile, const BandMask& mask,
                                                     const Interval& keys, int block_q) {
    if (tile.large_lse) return {0, 0};
    const Interval first = mask.query_range(keys.begin);
    const Interval last = mask.query_range(keys.end - 1);
    const int end = min_of(first.end, last.end);
    return {ceil_div(last.begin, block_q),
            end == mask.seqlen_q ? ceil_div(end, block_q) : end / block_q};
}

// S^T to P^T, of a warp's 16 keys and a Q tile of kBlockQ queries. With StatisticsRows, lse / scale
// has been subtracted by a matmul.
template <class Element, bool kGeneral, int kBlockQ, class Statistic, class Scores>
__device__ __forceinline__ void compute_p(Scores& s, const BackwardParams& params,
                                          const KeyTile& tile, int head, int first_key,
                                          int first_query, bool masked, const Statistic* lse) {
    constexpr bool kByMatmul = std::is_same_v<Statistic, StatisticsRow>;
    const Sequence& sequence = tile.sequence;
    const auto subtract = [&] {
        const int64_t row = workspace_row(params, sequence, head, first_query);
        if constexpr (kByMatmul) {
            subtract_references<Rows::kKeys>(s, params.reference + row, params.lse_log2 + row,
                                             params.scale_log2);
        } else {
            subtract_references<Rows::kKeys>(s, params.reference + row);
        }
    };
    if constexpr (kGeneral) {
        // In pieces of 32 columns, since softcap takes registers.
        using Piece = RegisterTile<16, 32>;
#pragma unroll
        for (int n = 0; n < Scores::kN; n += Piece::kN)
            ScoreFunction<Element, Rows::kKeys, false>{params, sequence, head}.apply(
                reinterpret_cast<Piece&>(s.v[0][n]), first_key, first_query + 8 * n);
    }
    if (masked) [[unlikely]] {
        if (!kGeneral && tile.large_lse) [[unlikely]]
            subtract();
        const BandMask mask = mask_of(params, sequence);
        mask_scores(s, first_query, [&](int row) { return mask.query_range(first_key + row); });
    }
    if (kGeneral && tile.large_lse) [[unlikely]]  // above, ptxas would run out of registers
        subtract();
    if constexpr (kByMatmul) {
        exponentiate(s, params.scale_log2);
    } else {
        exponentiate<Rows::kKeys>(s, lse, kGeneral ? 1.f : params.scale_log2);
    }
}

}  // namespace flash_ext
