// Online softmax with P in FP8 (FlashAttention-3, section 3.3).
//
// e4m3 holds 2^-9 to 448. P is 2^(S scale - m + 8), at most 256: the factor is in O and in l, and
// cancels. m is the maximum so far in every iteration. So the key of the most weight has a power of
// two for P, which is not rounded: with an m that is not its score, P would have e4m3's error, up
// to 6 %, and so would out.
//
// A lane has two rows. Exponentials are stored in the place of the scores, and the maximum of the
// second row is found beside the exponentials of the first one: the exponentials take 8 cycles
// each, and everything else has to fit between them (docs/notes/016-fp8.md).
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

// What both forms share. P is 2^(S scale - m + kOffset).
template <int kCols, int kOffset_>
struct Fp8SoftmaxBase : OnlineSoftmax<16> {
    static constexpr float kOffset = kOffset_;
    static constexpr float kFactor = 1 << kOffset_;
    // Is rounded by up to a quarter. Without descales, and with the scale 1 / sqrt(D), scores stay
    // below 4.7 million.
    static constexpr float kLargeMax = 0x1.8p22f;

    // Blocks of keys that share a descale begin and end at multiples of this many n.
    static constexpr int kScaleN = std::gcd(kCols, kDescaleRows) / 8;

    using Probabilities = RegisterOperand<kCols, 1>;

    // The maximum of a row, by blocks that share a descale.
    template <class Form, class Scores>
    struct RowMax {
        typename Scores::Number of_block[Scores::kN / kScaleN];

        FLASH_DEVICE void add(const Scores& s, int n, int i) {
            auto& max = of_block[n / kScaleN];
            const auto x = s.v[0][n][2 * i], y = s.v[0][n][2 * i + 1];
            max = n % kScaleN == 0 ? Form::larger(x, y) : Form::larger(max, Form::larger(x, y));
        }
        template <class Scale>
        FLASH_DEVICE float of_quad(const Scale& scale, int i) const {
            float max = Form::value(of_block[0]) * scale(0, i);
#pragma unroll
            for (int n = kScaleN; n < Scores::kN; n += kScaleN)
                max = fmaxf(max, Form::value(of_block[n / kScaleN]) * scale(n, i));
            return quad_max(max);
        }
    };

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
    static FLASH_DEVICE float max_of_tile(const Scores& s, const Scale& scale, int i) {
        RowMax<Form, Scores> max;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) max.add(s, n, i);
        return max.of_quad(scale, i);
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
};

template <int kCols>
struct Fp8Softmax : Fp8SoftmaxBase<kCols, 8> {
    using Base = typename Fp8Softmax::Fp8SoftmaxBase;
    using Base::kOffset, Base::kScaleN, Base::row_max, Base::row_sum;
    using typename Base::Probabilities;
    template <class Form, class Scores>
    using RowMax = typename Base::template RowMax<Form, Scores>;

    // Replaces the scores by P, and packs P. Returns the factors of O in float32.
    //
    // A score is Form::value(s.v[0][n][i]) * scale(n, i / 2), and P Stored::value() of the same
    // register. turn: begins before the exponentials, and ends when a quarter of them is left.
    template <class Form, class Stored, class Scores, class Scale, class Turn>
    FLASH_DEVICE void step(Scores& s, Probabilities& p, float (&factor)[2], const Scale& scale,
                           Turn& turn, bool) {
        RowMax<Form, Scores> max;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) max.add(s, n, 0);
        turn.begin();
        float shift = turn.pin(advance(max.of_quad(scale, 0), 0, factor));
        float last = 0.f;
        const auto exponentiate = [&](int n, int i) {
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; ++e) {
                last = ptx::ex2(
                    __fmaf_rn(Form::value(s.v[0][n][e]), scale(n / kScaleN * kScaleN, i), shift));
                s.v[0][n][e] = Stored::bits(last);
            }
        };
        max = {};
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            exponentiate(n, 0);
            max.add(s, n, 1);
        }
        shift = turn.pin(advance(max.of_quad(scale, 1), 1, factor));
        float sums[2][4] = {};  // of a row, in chains
        const auto add = [&](int n, int i) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                sums[i][2 * (n % 2) + e] += Stored::value(s.v[0][n][2 * i + e]);
        };
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            exponentiate(n, 1);
            add(n, 0);
            // Alone the other exponentials would wait for each other's results.
            if (n == Scores::kN / 2 - 1) turn.end(last);
        }
        // One register of P, of an A fragment, is of row j % 2 and keys 8 (j / 2) to 8 (j / 2) + 15
        // of 32.
#pragma unroll
        for (int k = 0; k < kCols / 32; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int n = 4 * k + 2 * (j / 2), i = j % 2;
                const auto x = [&](int e) {
                    return Stored::value(s.v[0][n + e / 2][2 * i + e % 2]);
                };
                p.v[k][j] = ptx::pack_e4m3(x(0), x(1), x(2), x(3));
                if (i == 1) {
                    add(n, 1);
                    add(n + 1, 1);
                }
            }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row_sum[0][i] = __fmaf_rn(row_sum[0][i], factor[i],
                                      (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
    }

 private:
    // Raises m of row i. Sets the factor of what has the old one, and returns what the exponents
    // of P add to the scores.
    FLASH_DEVICE float advance(float max, int i, float (&factor)[2]) {
        const float new_max = fmaxf(row_max[0][i], max);
        factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
        row_max[0][i] = new_max;
        return kOffset - finite_max(new_max);
    }
};

}  // namespace flash_ext
