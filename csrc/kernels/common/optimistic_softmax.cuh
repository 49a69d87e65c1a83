// Online softmax with a stale maximum, retried with the current one where it must be.
//
// Any m near the row's maximum gives the same result, since P, l and O share it
// (OnlineSoftmax::kRescaleThreshold). So an iteration first uses the stale m: P = 2^(S scale - m).
// Then it checks the sum of P, which l needs anyway. If that is at most kLimit no element was far
// above m, and the maximum of the tile, with its comparisons and shuffles, was not needed.
// Otherwise, or if m is large, the iteration is retried with the maximum; S is still there. A row's
// m depends on its own scores alone: the rows beside it in a warp are retried with their stale m.
#pragma once

#include "kernels/common/softmax.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

// The factor of O after a change of row_max.
struct RowRescaling {
    bool needed = false;  // by any row of the warp
    float factor[2];

    template <class Output>
    FLASH_DEVICE void apply(Output& o) const {
        if (!needed) [[likely]]
            return;
        o.for_each([&](float& x, int row, int) { x *= factor[row / 8]; });
    }
};

// kRowsAlone: as said above. Otherwise a retry raises the m of all rows of the warp, which saves a
// register.
template <class Element, int kCols, bool kRowsAlone>
struct OptimisticSoftmax : OnlineSoftmax<16> {
    // Then no P exceeds it, and fp16 holds it.
    static constexpr float kLimit = 4096.f;

    float subtracted[2] = {-INFINITY, -INFINITY};  // by the FMA of P; stale_subtrahend() of m

    struct Nothing {
        FLASH_DEVICE void operator()() const {}
    };
    using Rescaling = RowRescaling;
    using Probabilities = RegisterOperand<kCols>;

    // From scores to P. Adds to l, and returns the factor of O. `fresh`: m is not known yet, or not
    // to be tried. If the scale is of incomplete scores, complete() then makes them complete.
    template <class Scale, class Complete = Nothing>
    FLASH_DEVICE Rescaling step(RegisterTile<16, kCols>& s, RegisterOperand<kCols>& p, Scale scale,
                                bool fresh, Complete complete = {}) {
        Rescaling rescaling;
        float sum[2];
        bool raises[2] = {true, true};
        for (bool proven = false;; proven = true) {
            if (fresh || proven) [[unlikely]] {
                if constexpr (!std::is_same_v<Complete, Nothing>) {
                    complete();
                    rescaling = advance(s, raises, scale.complete());
                } else {
                    rescaling = advance(s, raises, scale);
                }
            }
            exponentiate(s, p, sum, scale);
            if (fresh || proven) {
#pragma unroll
                for (int i = 0; i < 2; ++i) subtracted[i] = stale_subtrahend(row_max[0][i]);
                break;
            }
            bool doubtful = exceeds(sum[0]) || exceeds(sum[1]);
            if constexpr (kSeries<Scale>) doubtful |= scale.is_far();
            if (!__any_sync(0xffffffff, doubtful)) [[likely]]
                break;
            if constexpr (kSeries<Scale>) scale.far |= __any_sync(0xffffffff, scale.is_far());
#pragma unroll
            for (int i = 0; i < 2; ++i) raises[i] = !kRowsAlone || any_of_row(exceeds(sum[i]));
        }
        row_sum[0][0] += sum[0];
        row_sum[0][1] += sum[1];
        return rescaling;
    }

    // The same, never fresh, with a scale that is of incomplete scores only. The loop above would
    // take registers.
    template <class Scale, class Complete>
    FLASH_DEVICE Rescaling step_incomplete(RegisterTile<16, kCols>& s, RegisterOperand<kCols>& p,
                                           const Scale& scale, Complete complete) {
        Rescaling rescaling;
        float sum[2];
        exponentiate(s, p, sum, scale);
        if (__any_sync(0xffffffff, exceeds(sum[0]) || exceeds(sum[1]))) [[unlikely]] {
            bool raises[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) raises[i] = !kRowsAlone || any_of_row(exceeds(sum[i]));
            complete();
            rescaling = advance(s, raises, Unscaled{});
            exponentiate(s, p, sum, Unscaled{});
#pragma unroll
            for (int i = 0; i < 2; ++i) subtracted[i] = stale_subtrahend(row_max[0][i]);
        }
        row_sum[0][0] += sum[0];
        row_sum[0][1] += sum[1];
        return rescaling;
    }

 private:
    template <class Scale>
    static constexpr bool kSeries = std::is_same_v<Scale, TanhSeries>;

    static FLASH_DEVICE bool exceeds(float sum) { return !(sum <= kLimit); }

    static FLASH_DEVICE bool any_of_row(bool x) {
        return (__ballot_sync(0xffffffff, x) >> (lane_id() & ~3) & 0xf) != 0;
    }

    // Updates row_max and row_sum to the maximum of the scores, in rows that it `raises`.
    template <class Scale>
    FLASH_DEVICE Rescaling advance(RegisterTile<16, kCols>& s, const bool (&raises)[2],
                                   Scale scale) {
        Rescaling rescaling;
        rescaling.needed = true;
        const float max[2] = {s.row_max(0, 0), s.row_max(0, 1)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rescaling.factor[i] = raise_max(raises[i] ? max[i] : -INFINITY, 0, i, scale);
            subtracted[i] = subtrahend(row_max[0][i]);
        }
        // One branch for both rows: the operations above overlap.
        if (is_large(row_max[0][0]) || is_large(row_max[0][1])) [[unlikely]]
#pragma unroll
            for (int i = 0; i < 2; ++i) center_large(s, 0, i, row_max[0][i], scale);
        return rescaling;
    }

    // The exponent of P from an element in row 8 i and a column of this lane: one FMA, or some
    // more.
    template <class Scale>
    FLASH_DEVICE auto exponents(const Scale& scale) const {
        if constexpr (std::is_convertible_v<Scale, float>) {
            return [=, this](float x, int i, int) { return x * scale - subtracted[i]; };
        } else {
            return scale.exponents(subtracted);
        }
    }

    template <class Scale>
    FLASH_DEVICE void exponentiate(const RegisterTile<16, kCols>& s, RegisterOperand<kCols>& p,
                                   float (&sum)[2], Scale scale) const {
        auto exponent = exponents(scale);
        float sums[2][2];  // four chains of additions
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i][0] = sums[i][1] = 0.f;
#pragma unroll
        for (int k = 0; k < kCols / 16; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // of an A fragment: row half j % 2, column half j / 2
                const float (&pair)[4] = s.v[0][2 * k + j / 2];
                const int i = j % 2;
                const int column = 16 * k + j / 2 * 8;
                const float low = ptx::ex2(exponent(pair[2 * i], i, column));
                const float high = ptx::ex2(exponent(pair[2 * i + 1], i, column + 1));
                sums[i][0] += low;
                sums[i][1] += high;
                p.v[k][j] = ptx::pack<Element>(low, high);
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = sums[i][0] + sums[i][1];
    }
};

}  // namespace flash_ext
