// What the kernels of FA3's backward share: tensor maps, the order of the inner loop, and P from S.
#pragma once

#include <type_traits>

#include "kernels/common/backward_math.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/score.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

struct Fa3BackwardMaps : BackwardParams {
    CUtensorMap q_map;
    CUtensorMap do_map;
    CUtensorMap k_map;
    CUtensorMap v_map;

    template <class Kernel>
    cudaError_t encode() {
        for (cudaError_t status :
             {encode_tensor_map<typename Kernel::QTile>(q_map, q, head_dim),
              encode_tensor_map<typename Kernel::DOTile>(do_map, dout, head_dim_v),
              encode_tensor_map<typename Kernel::KTile>(k_map, k, head_dim),
              encode_tensor_map<typename Kernel::VTile>(v_map, v, head_dim_v)})
            if (status != cudaSuccess) return status;
        return cudaSuccess;
    }
};

// The position of the inner loop: Q tile and query head.
struct QTilePosition {
    int i;  // of the Q tile among the visible ones
    int head;

    FLASH_DEVICE void advance(const VisibleTiles& q_tiles) {
        if (++i == q_tiles.end) {
            i = q_tiles.begin;
            ++head;
        }
    }
    FLASH_DEVICE QTilePosition before(const VisibleTiles& q_tiles) const {
        return i > q_tiles.begin ? QTilePosition{i - 1, head}
                                 : QTilePosition{q_tiles.end - 1, head - 1};
    }
};

// The indices of the Q tiles that see all of the 64 keys from first_key on, so that scores need
// neither mask nor reference.
FLASH_DEVICE Interval full_q_tiles(const BackwardParams& params, const KeyTile& tile, int first_key,
                                   int block_q) {
    if (tile.large_lse) return {0, 0};
    return tile.q_tiles.seeing_all(mask_of(params, tile.sequence), {first_key, first_key + 64},
                                   block_q);
}

// A warp's rows of dQ, from row `row` of the Q tile on.
template <class Element>
FLASH_DEVICE GlobalTile<Element> dq_rows(const BackwardParams& params, const QueryTile& tile,
                                         int row) {
    const Sequence& s = tile.sequence;
    const int first = tile.first_query + row;
    return global_tile<Element>(params.dq, s.batch, s.q_begin + first, tile.head,
                                s.seqlen_q - first, params.head_dim);
}

// Waits until matmuls are complete: all but kPending groups that were started after them.
template <int kPending = 0, class... Accumulators>
FLASH_DEVICE void finish(Accumulators&... accumulators) {
    ptx::wgmma_wait<kPending>();
    (warpgroup_fence(accumulators), ...);
}

// The scores of a warp's 16 rows and a tile of the other operand, from position first_row and
// first_col of the sequence on. Rows are keys, or queries in backward_dq.cuh.
template <class Element, Rows kRows, OptionSet kOptions>
struct WarpScores {
    const BackwardParams& params;
    const Sequence& sequence;
    int head;  // of Q
    int first_row;
    int first_col;

    using Function = ScoreFunction<Element, kRows, kOptions>;

    // From S to tanh, with a softcap alone.
    template <class Scores>
    FLASH_DEVICE void cap(Scores& s, bool masked) const {
        Function{params, sequence, head}.apply(s, first_row, first_col);
        if (!masked) [[likely]]
            return;
        hide(s);
        keep_finite(s);
    }

    // From S to P, with lse of each query. With a bias the scores are in base 2, and have it. With
    // StatisticsRows, lse / scale has been subtracted by a matmul. masked: do the scores need the
    // mask? If large_lse, they count as masked.
    template <class Scores, class Statistic>
    FLASH_DEVICE void probabilities(Scores& s, const Statistic* lse, bool masked,
                                    bool large_lse) const {
        if constexpr (only_alibi(kOptions))
            if (!masked && linear_probabilities(s, lse)) return;
        if constexpr (changes_scores(kOptions) && !contains(kOptions, OptionSet::kBias)) {
            // In pieces of 32 columns, since softcap takes registers.
            using Piece = RegisterTile<16, 32>;
#pragma unroll
            for (int n = 0; n < Scores::kN; n += Piece::kN)
                Function{params, sequence, head}.apply(reinterpret_cast<Piece&>(s.v[0][n]),
                                                       first_row, first_col + 8 * n);
        }
        constexpr bool kByMatmul = std::is_same_v<Statistic, StatisticsRow>;
        const auto subtract = [&] {
            const int query = kRows == Rows::kKeys ? first_col : first_row;
            const int64_t row = workspace_row(params, sequence, head, query);
            subtract_references<kRows>(s, params.reference + row,
                                       kByMatmul ? params.lse_log2 + row : nullptr,
                                       params.scale_log2);
        };
        // ptxas 13.0: with options there are no registers for references beside the mask.
        constexpr bool kReferencesLast = changes_scores(kOptions) && kRows == Rows::kKeys;
        if (masked) [[unlikely]] {
            if (!kReferencesLast && large_lse) [[unlikely]]
                subtract();
            hide(s);
        }
        if (kReferencesLast && large_lse) [[unlikely]]
            subtract();
        if constexpr (kByMatmul) {
            exponentiate(s, params.scale_log2);
        } else {
            exponentiate<kRows>(s, lse, exponent_scale<kOptions>(params));
        }
    }

    // Hides what the mask does not show.
    template <class Scores>
    FLASH_DEVICE void hide(Scores& s) const {
        const BandMask mask = mask_of(params, sequence);
        mask_scores(s, first_col, [&](int row) {
            return kRows == Rows::kKeys ? mask.query_range(first_row + row)
                                        : mask.key_range(first_row + row);
        });
    }

    // P with ALiBi, without a mask, if all keys are on one side of the diagonal: there its
    // distances are linear. False: they are not.
    template <class Scores>
    FLASH_DEVICE bool linear_probabilities(Scores& s, const float* lse) const {
        constexpr bool kKeys = kRows == Rows::kKeys;
        constexpr int kQueries = kKeys ? Scores::kCols : 16, kNumKeys = kKeys ? 16 : Scores::kCols;
        const int first_query = kKeys ? first_col : first_row;
        const int first_key = kKeys ? first_row : first_col;
        const int first = first_query + sequence.seqlen_k - sequence.seqlen_q - first_key;
        const bool before = first >= kNumKeys - 1, after = first <= 1 - kQueries;
        if (!before && !after) [[unlikely]]
            return false;
        const float slope = (before ? 1.f : -1.f) * Function{params, sequence, head}.alibi_slope();
        const auto distance =
            static_cast<float>(first + (kKeys ? lane_col() - lane_row() : lane_row() - lane_col()));
        for_each_with_query<kRows, Scores>(lse, [&](int m, int n, int i, float lse_of_query) {
            const int row = 16 * m + i / 2 * 8, col = 8 * n + i % 2;
            const float query = kKeys ? col : row, key = kKeys ? row : col;
            const float offset = fmaf(-slope, distance + query, -lse_of_query);
            float& x = s.v[m][n][i];
            x = ptx::ex2(
                fmaf(x, params.scale_log2, key == 0.f ? offset : fmaf(slope, key, offset)));
        });
        return true;
    }

    // From the gradient of the scores after softcap to the gradient of the scores before it.
    template <class Scores, class LseOfQuery>
    FLASH_DEVICE void softcap_gradient(Scores& ds, const Scores& p, LseOfQuery lse_of) const {
        Function{params, sequence, head}.softcap_gradient(ds, p, first_row, first_col, lse_of);
    }
};

}  // namespace flash_ext
