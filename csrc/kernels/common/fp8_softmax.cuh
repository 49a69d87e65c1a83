// Online softmax with P in FP8 (FlashAttention-3, section 3.3).
//
// e4m3 holds 2^-9 to 448. P is 2^(S scale - m + 7), where m begins two above the maximum: so P is
// at most 32 then, and scores may grow by almost four powers of two before P would be 448. The
// factor of P is in O and in l, and cancels.
//
// As in optimistic_softmax.cuh an iteration first uses the stale m, and is retried with the maximum
// where it must be: where a P is 448, and where one key may have most of a row's weight. With m two
// above this key's score its P is a power of two, and not rounded. With a stale m it would have the
// full error of e4m3, up to 6 %, and so would out. So a lane's sum over the tile must not exceed
// kDominant of the row's l. Where scores vary much that would retry most iterations: after one with
// a new maximum the next ones find theirs at once, until m grows slowly (docs/notes/016-fp8.md).
//
// Without kOptimistic m is the maximum so far in every iteration, and P is 256 there.
//
// The factor of the scores differs between tiles (block quantization), so m includes it.
//
// m is rounded, and exponents are one FMA each: if m is large, far beyond the scores of a working
// model, all exponents of a row are off by more than P has room for. Then the row is cooled: m and
// the factor of its scores are divided by a power of two. Keys within a millionth of the maximum
// then count as much as it does, which 8 bits do not tell apart. In the end m is multiplied again.
#pragma once

#include <numeric>

#include "kernels/common/optimistic_softmax.cuh"
#include "problem/params.h"

namespace flash_ext {

// What the registers of scores hold.
struct FloatScores {
    static FLASH_DEVICE float value(float x) { return x; }
    static FLASH_DEVICE float bits(float x) { return x; }
    static FLASH_DEVICE float larger(float x, float y) { return fmaxf(x, y); }
};
struct IntegerScores {
    static FLASH_DEVICE float value(int x) { return static_cast<float>(x); }
    static FLASH_DEVICE int larger(int x, int y) { return max(x, y); }
};
struct FloatScoresAsBits {
    static FLASH_DEVICE float value(int x) { return __int_as_float(x); }
    static FLASH_DEVICE int bits(float x) { return __float_as_int(x); }
    static FLASH_DEVICE int larger(int x, int y) {
        return __float_as_int(fmaxf(value(x), value(y)));
    }
};

// From -126 to 127.
FLASH_DEVICE float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

template <int kCols, bool kOptimistic>
struct Fp8Softmax : OnlineSoftmax<16> {
    static constexpr float kOffset = kOptimistic ? 7.f : 8.f;
    static constexpr float kFactor = kOptimistic ? 128.f : 256.f;  // 2^kOffset
    static constexpr float kHeadroom = kOptimistic ? 2.f : 0.f;    // of m above the maximum
    static constexpr float kDominant = 0.375f;
    // No P of a lane becomes 448 where all of them add up to less: 432 is the least that is rounded
    // to it, and the sum itself is rounded.
    static constexpr float kSaturating = 428.f;
    static constexpr float kSlowGrowth = 0.5f;   // of m in an iteration, in powers of two
    static constexpr float kLargeMax = 0x1p22f;  // is rounded by up to a quarter

    // Blocks of keys that share a descale begin and end at multiples of this many n.
    static constexpr int kScaleN = std::gcd(kCols, kDescaleRows) / 8;

    using Rescaling = RowRescaling;
    using Probabilities = RegisterOperand<kCols, 1>;

    float limit[2];        // of a lane's sum over a tile with a stale m
    bool careful = false;  // must the next iteration find its maximum? For all rows of the warp

    // As OptimisticSoftmax::step(). A score is Form::value(s.v[0][n][i]) * scale(n, i / 2).
    template <class Form, class Scores, class Scale>
    FLASH_DEVICE Rescaling step(const Scores& s, Probabilities& p, Scale scale, bool fresh) {
        Rescaling rescaling;
        float sum[2];
        bool proven = !kOptimistic || fresh || careful;
        while (true) {
            if (proven) rescaling = advance<Form>(s, scale);
            exponentiate<Form>(s, p, sum, scale);
            if (proven) break;
            const auto exceeds = [&](float bound) {
                return sum[0] > min_of(limit[0], bound) || sum[1] > min_of(limit[1], bound);
            };
            if (!__any_sync(0xffffffff, exceeds(kSaturating))) [[likely]]
                break;
            proven = __any_sync(0xffffffff, exceeds(INFINITY) || has_saturated(p));
            if (!proven) break;
        }
        row_sum[0][0] += sum[0];
        row_sum[0][1] += sum[1];
        if (kOptimistic && proven)
#pragma unroll
            for (int i = 0; i < 2; ++i) limit[i] = kDominant * quad_sum(row_sum[0][i]);
        return rescaling;
    }

    // By how many powers of two a row with this maximum is to be cooled, in addition to those by
    // which it is. Less than 0 if a large negative maximum has become a small one.
    static FLASH_DEVICE int powers_to_cool(float max, int powers) {
        if (max == -INFINITY) return 0;
        const float size = fabsf(max);
        const int needed = ((__float_as_int(size) - __float_as_int(kLargeMax)) >> 23) + 2;
        if (size > kLargeMax) return powers < 128 ? needed : 0;  // an infinite sink stays infinite
        return size < kLargeMax / 4 ? max_of(needed, -min_of(powers, 126)) : 0;
    }

    // The maximum of the scores of row i.
    template <class Form, class Scores, class Scale>
    static FLASH_DEVICE float max_of_tile(const Scores& s, Scale scale, int i) {
        float max = -INFINITY;
#pragma unroll
        for (int n = 0; n < Scores::kN; n += kScaleN) {
            auto x = Form::larger(s.v[0][n][2 * i], s.v[0][n][2 * i + 1]);
#pragma unroll
            for (int k = n + 1; k < n + kScaleN; ++k)
                x = Form::larger(x, Form::larger(s.v[0][k][2 * i], s.v[0][k][2 * i + 1]));
            max = fmaxf(max, Form::value(x) * scale(n, i));
        }
        return quad_max(max);
    }

    FLASH_DEVICE void begin_with(float score, int m, int i) {
        OnlineSoftmax<16>::begin_with(score, m, i);
        row_sum[m][i] *= kFactor;
    }
    FLASH_DEVICE void finish() {
        OnlineSoftmax<16>::finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) row_sum[0][i] *= 1.f / kFactor;
    }
    FLASH_DEVICE float inverse_sum(int m, int i) const {
        return OnlineSoftmax<16>::inverse_sum(m, i) * (1.f / kFactor);
    }

 private:
    // Raises m to the maximum of the scores, with headroom.
    template <class Form, class Scores, class Scale>
    FLASH_DEVICE Rescaling advance(const Scores& s, Scale scale) {
        Rescaling rescaling;
        bool grows = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float new_max = fmaxf(row_max[0][i], max_of_tile<Form>(s, scale, i) + kHeadroom);
            rescaling.factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
            // Also while the row has seen no key, and the difference is no number.
            grows |= !(new_max - row_max[0][i] <= (kOptimistic ? kSlowGrowth : 0.f));
            row_max[0][i] = new_max;
            row_sum[0][i] *= rescaling.factor[i];
        }
        careful = __any_sync(0xffffffff, grows);
        rescaling.needed = kOptimistic || careful;
        return rescaling;
    }

    // Has any P of this lane become 448?
    static FLASH_DEVICE bool has_saturated(const Probabilities& p) {
        uint32_t largest = 0;
#pragma unroll
        for (int k = 0; k < kCols / 32; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) largest |= p.v[k][j] + 0x02020202;  // 448 is 0x7e
        return (largest & 0x80808080) != 0;
    }

    template <class Form, class Scores, class Scale>
    FLASH_DEVICE void exponentiate(const Scores& s, Probabilities& p, float (&sum)[2],
                                   Scale scale) const {
        float shift[2];
        float sums[2][2];  // four chains of additions
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shift[i] = kOffset - finite_max(row_max[0][i]);
            sums[i][0] = sums[i][1] = 0.f;
        }
        // Each exponent is one FMA, not a product and a sum: the compiler would keep all products
        // for the retry. Group g is what becomes one register of P: of an A fragment the row half j
        // % 2 and the key half j / 2, with j = g % 4. The exponentials of a group, one every eight
        // cycles, are issued between the products of the next one and the sums of the one before:
        // left to itself the compiler issues them in pairs and waits.
        constexpr int kGroups = kCols / 8;
        float x[3][4];  // of groups g - 1, g and g + 1
        const auto multiply = [&](int g, int e) {
            const int k = g / 4, j = g % 4, i = j % 2;
            const int n = 4 * k + 2 * (j / 2) + e / 2;
            x[g % 3][e] = ptx::fma(Form::value(s.v[0][n][2 * i + e % 2]),
                                   scale(n / kScaleN * kScaleN, i), shift[i]);
        };
#pragma unroll
        for (int e = 0; e < 4; ++e) multiply(0, e);
#pragma unroll
        for (int g = 0; g <= kGroups; ++g) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (g < kGroups) x[g % 3][e] = ptx::ex2_in_order(x[g % 3][e]);
                if (g + 1 < kGroups) multiply(g + 1, e);
                if (g > 0) ptx::add_to(sums[(g - 1) % 2][e % 2], x[(g - 1) % 3][e]);
            }
            if (g == 0) continue;
            const float (&y)[4] = x[(g - 1) % 3];
            uint32_t& packed = p.v[(g - 1) / 4][(g - 1) % 4];
            packed = ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = sums[i][0] + sums[i][1];
            // Here, beside the exponentials, and not after the retry, up to which all of them would
            // be kept.
            if (kOptimistic) ptx::warpgroup_fence_operand(sum[i]);
        }
    }
};

}  // namespace flash_ext
