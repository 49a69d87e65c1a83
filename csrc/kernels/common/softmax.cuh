// Online softmax over the rows of a warp's score tiles (FlashAttention-2, algorithm 1, line 9),
// in base 2: P = 2^(s scale - m), one FMA and one ex2 an element, where scale includes log2(e).
//
// m is the maximum of s scale, rounded up. P, l, O and lse have the same m, so that its rounding
// cancels: P of the maximum is 2^-d, with a d below the unit in the last place of m. From kLargeMax
// on, far beyond the scores of a working model, 2^-d would leave the range of P. But there one unit
// is eight powers of two: only scores that are rounded to m count, and all alike (center_large).
#pragma once

#include <type_traits>

#include "problem/score.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// Natural logarithm of 2^max sum, where `sum` is the sum of P. Only a row without keys has the sum
// 0. A NaN stays a NaN.
FLASH_DEVICE float log_sum_exp(float max, float sum) {
    return sum == 0.f ? -INFINITY : max * kLn2 + log2f(sum) * kLn2;
}

FLASH_DEVICE float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 2; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return quad_max(x);
}

FLASH_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 2; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return quad_sum(x);
}

// A row without keys has no maximum; any finite number prevents -inf - max from becoming NaN.
FLASH_DEVICE float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// Rounded up: no P is above 1, so P of finite scores is finite. Only NaN and infinite scores make a
// row NaN.
template <class Scale>
FLASH_DEVICE float round_up(float score, Scale scale) {
    if constexpr (std::is_same_v<Scale, Unscaled>) {
        return score;
    } else {
        return __fmul_ru(score, scale);
    }
}

// Below it P of the maximum is at least 2^-8, which fp16, too, holds without loss.
inline constexpr float kLargeMax = 0x1p27f;

// Must scores be centered before the FMA? Also true for a row that has seen no key, whose m is
// -inf.
FLASH_DEVICE bool is_large(float max) { return !(fabsf(max) < kLargeMax); }

// What the FMA of P subtracts: m, or 0 from centered scores.
FLASH_DEVICE float subtrahend(float max) { return is_large(max) ? 0.f : max; }

// The same for scores that may exceed m and are not centered. -inf if they must be: then P is
// infinite or NaN, which tells the caller.
FLASH_DEVICE float stale_subtrahend(float max) { return is_large(max) ? -INFINITY : max; }

// In place of a score of a row with a large m: 0 if it counts, or else a number whose P is 0.
template <class Scale>
FLASH_DEVICE float centered(float score, float max, Scale scale) {
    return (round_up(score, scale) - finite_max(max)) * 0x1p100f;  // by far more than 1 / scale
}

// The same for row 16 m + lane_row() + 8 i, if its m is large.
template <class Scores, class Scale>
FLASH_DEVICE void center_large(Scores& s, int m, int i, float max, Scale scale) {
    if (!is_large(max)) [[likely]]
        return;
    s.map_row(m, i, [&](float x) { return centered(x, max, scale); });
}

// Row 16 m + lane_row() + 8 i of P from its scores: 2^(s scale - subtracted). Returns `sum` and the
// sum of this lane's P.
template <class Scores, class Scale>
FLASH_DEVICE float exponentiate_row(Scores& s, int m, int i, Scale scale, float subtracted,
                                    float sum) {
    s.map_row(m, i, [&](float x) {
        const float p = ptx::ex2(x * scale - subtracted);
        sum += p;
        return p;
    });
    return sum;
}

// Dropout, for tiles whose rows are queries: P becomes 0, or p_factor P; by pairs
// (drops_pairs()) P stays as it is.
template <OptionSet kOptions, class Scores>
FLASH_DEVICE void drop(Scores& p, const AttentionParams& params, const Sequence& sequence, int head,
                       int first_query, int first_key) {
    if constexpr (contains(kOptions, OptionSet::kDropout)) {
        if (params.rng_state == nullptr) return;
        const float factor = drops_pairs(kOptions) ? 1.f : params.p_factor;
        for_each_keep<kOptions, Rows::kQueries, Scores>(dropout_mask(params, sequence, head),
                                                        first_query, first_key,
                                                        [&](int m, int n, int i, bool keep) {
                                                            float& x = p.v[m][n][i];
                                                            x = keep ? x * factor : 0.f;
                                                        });
    }
}

// P of a row's maximum is 2^kPowers, up to 7, by an m that is smaller by as much. (A large m is
// rounded by more: then it is 1.)
template <int kRows, int kPowers = 0>
struct OnlineSoftmax {
    static constexpr int kM = kRows / 16;
    // O is rescaled only when scores of the row exceed the stale maximum by this many powers of
    // two. The result is the same, since numerator and denominator share it, and most tiles need no
    // rescaling.
    static constexpr float kRescaleThreshold = 8.f + kPowers;

    float row_max[kM][2];  // m; -inf until the row has seen a key
    float row_sum[kM][2];  // this lane's share

    template <class Visit>
    FLASH_DEVICE static void for_each_row(Visit visit) {
        flash_ext::for_each_row<kRows>(visit);
    }

    FLASH_DEVICE OnlineSoftmax() {
        for_each_row([&](int m, int i, int) {
            row_max[m][i] = -INFINITY;
            row_sum[m][i] = 0.f;
        });
    }

    // A score that every row has before its first key, with the value 0: it counts only in the sum.
    FLASH_DEVICE void begin_with(float score) {
        for_each_row([&](int m, int i, int) { begin_with(score, m, i); });
    }
    // The same for row 16 m + lane_row() + 8 i.
    FLASH_DEVICE void begin_with(float score, int m, int i) {
        row_max[m][i] = score;
        row_sum[m][i] = lane_col() == 0 ? 1.f : 0.f;
    }

    // m as it becomes with scores up to `score`; returns the factor of what has the old m.
    template <class Scale>
    FLASH_DEVICE float raise_max(float score, int m, int i, Scale scale) {
        const float old = row_max[m][i];
        row_max[m][i] = fmaxf(old, round_up(score, scale) - static_cast<float>(kPowers));
        const float factor = old == row_max[m][i] ? 1.f : ptx::ex2(old - row_max[m][i]);
        row_sum[m][i] *= factor;
        return factor;
    }

    // Replaces scores s by P, and updates O and the sums.
    template <class Scores, class Output, class Scale>
    FLASH_DEVICE void update(Scores& s, Output& o, Scale scale) {
        float tile_max[kM][2], subtracted[kM][2];
        bool rescale = false;
        // Rows decide each for itself, so that no row changes the bits of another.
        const auto exceeds = [&](float max, float old_max) {
            return !(max * scale - stale_subtrahend(old_max) <= kRescaleThreshold);
        };
        for_each_row([&](int m, int i, int) {
            tile_max[m][i] = s.row_max(m, i);
            subtracted[m][i] = stale_subtrahend(row_max[m][i]);
            rescale |= exceeds(tile_max[m][i], row_max[m][i]);
        });
        if (__any_sync(0xffffffff, rescale))
            for_each_row([&](int m, int i, int) {
                const float max = tile_max[m][i];
                const float factor =
                    raise_max(exceeds(max, row_max[m][i]) ? max : -INFINITY, m, i, scale);
                subtracted[m][i] = subtrahend(row_max[m][i]);
                center_large(s, m, i, row_max[m][i], scale);
                o.map_row(m, i, [&](float x) { return x * factor; });
            });
        for_each_row([&](int m, int i, int) {
            row_sum[m][i] = exponentiate_row(s, m, i, scale, subtracted[m][i], row_sum[m][i]);
        });
    }

    // After the last tile: row_sum becomes the whole row's, in every lane of its quad.
    FLASH_DEVICE void finish() {
        for_each_row([&](int m, int i, int) { row_sum[m][i] = quad_sum(row_sum[m][i]); });
    }

    // Of row 16 m + lane_row() + 8 i, where i need not be a compile-time constant.
    FLASH_DEVICE float max(int m, int i) const { return i == 0 ? row_max[m][0] : row_max[m][1]; }
    FLASH_DEVICE float sum(int m, int i) const { return i == 0 ? row_sum[m][0] : row_sum[m][1]; }
    FLASH_DEVICE float lse(int m, int i) const { return lse_of(max(m, i), sum(m, i)); }
    // As if P of the maximum were 1: then the logarithm is no larger than lse.
    static FLASH_DEVICE float lse_of(float max, float sum) {
        if constexpr (kPowers == 0) return log_sum_exp(max, sum);
        return log_sum_exp(max + kPowers, sum * (1.f / (1 << kPowers)));
    }

    FLASH_DEVICE float inverse_sum(int m, int i) const {
        return row_sum[m][i] == 0.f ? 0.f : ptx::rcp(row_sum[m][i]);
    }
};

}  // namespace flash_ext
