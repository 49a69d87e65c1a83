// The forward for short sequences (tile.cuh): the softmax of whole rows, in one pass.
//
//     for each head of the walk:
//         S = Q K^T                           tensor cores, S in registers
//         m = rowmax(S) scale
//         P = 2^(S scale - m),  l = rowsum(P)
//         O = P V / l,  lse = (m + log2(l)) ln(2)
//
// Shared memory: kStages x (Q, K, V [64][D]), swizzled; the bias. O leaves through Q's rows.
#pragma once

#include "kernels/short/tile.cuh"

namespace flash_ext {

template <class Element, int kHeadDim, OptionSet kOptions>
struct ShortForward : ShortTile<Element, kHeadDim, kOptions, ShortParams<ForwardParams>, true> {
    using Base = ShortTile<Element, kHeadDim, kOptions, ShortParams<ForwardParams>, true>;
    using Base::kRows, Base::params, Base::warp_row;
    using typename Base::Head, typename Base::Output, typename Base::Scores, typename Base::Tile;

    static constexpr tuning::ShortShape kTuning =
        row_of(tuning::kShort, {kHeadDim, kHeadDim}).forward;
    static constexpr int kStages = kTuning.stages;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;

    struct SharedStorage {
        char stages[kStages][3][Tile::kBytes];
        typename Base::BiasStorage bias;
    };
    static constexpr int kSharedBytes = sizeof(SharedStorage);
    static_assert(kSharedBytes <= tuning::short_shared_bytes({kHeadDim, kHeadDim}, false));

    FLASH_DEVICE explicit ShortForward(const typename Base::Params& p) : Base(p) {}

    static FLASH_DEVICE SharedStorage& storage() { return shared_storage<SharedStorage>(); }
    FLASH_DEVICE uint32_t stage(int n) const {
        return ptx::shared_address(storage().stages[n % kStages]);
    }

    FLASH_DEVICE void begin() const { Base::load_bias(storage().bias); }
    FLASH_DEVICE void end() const {}

    FLASH_DEVICE void load(const Head& x, uint32_t stage) const {
        Base::load_queries(stage, params.q, x, params.head_dim);
        Base::load_keys(stage + Tile::kBytes, params.k, x, params.head_dim);
        Base::load_keys(stage + 2 * Tile::kBytes, params.v, x, params.head_dim_v);
    }

    FLASH_DEVICE void compute(const Head& x, uint32_t stage) const {
        if (warp_row() >= x.sequence.seqlen_q) return;
        Scores rS;
        Base::score(rS, stage, stage + Tile::kBytes, storage().bias);
        const auto scale = exponent_scale<kOptions>(params);
        OnlineSoftmax<kRows> softmax;
        for_each_row<kRows>([&](int m, int i, int) {
            const float max = round_up(rS.row_max(m, i), scale);
            softmax.row_max[m][i] = max;
            center_large(rS, m, i, max, scale);
            softmax.row_sum[m][i] = exponentiate_row(rS, m, i, scale, subtrahend(max), 0.f);
        });
        Output rO;
        rO.clear();
        gemm<Element, Base::kBlock>(rO, AFromRegisters<Element, Scores>{rS},
                                    BFromColumns<Tile>(stage + 2 * Tile::kBytes));
        softmax.finish();
        float* const lse = params.lse + statistics_offset(params, x.sequence, x.head);
        for_each_row<kRows>([&](int m, int i, int row_of_warp) {
            const float factor = softmax.inverse_sum(m, i);
            rO.map_row(m, i, [&](float o) { return o * factor; });
            const float lse_of_row = softmax.lse(m, i);
            const int row = warp_row() + row_of_warp;
            if (lane_col() == 0 && row < x.sequence.seqlen_q) lse[row] = lse_of_row;
        });
        Base::store(
            query_rows<Element>(params.out, x.sequence, x.head, warp_row(), params.head_dim_v), rO,
            stage);
    }
};

template <int kHeadDim, int kHeadDimV>
cudaError_t short_forward(const ForwardParams& params, const ForwardKernel& kernel,
                          cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kShort, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        return launch_short<ShortForward<decltype(element), kHeadDim, options.value>>(
            {params, kernel.ctas_per_bias}, stream);
    });
}

}  // namespace flash_ext
