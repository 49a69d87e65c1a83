// The form of fp8_softmax.cuh up to head dim 96, where matmuls are short and the instructions of an
// exact maximum are not hidden.
//
// m begins two above the maximum, and P is 2^(S scale - m + 7): so P is at most 32 then, and scores
// may grow by almost four powers of two before P would be 448.
//
// As in optimistic_softmax.cuh an iteration first uses the stale m. It is retried with the maximum
// if a P is 448, or if one key may have most of a row's weight. With m two above this key's score
// its P is a power of two, and not rounded. With a stale m it would have the full error of e4m3, up
// to 6 %, and so would out. So a lane's sum over the tile must not exceed kDominant of the row's l.
// If scores vary much, that would retry most iterations: after one with a new maximum the next ones
// find theirs at once, until m grows slowly (docs/notes/016-fp8.md).
#pragma once

#include "kernels/common/fp8_softmax.cuh"

namespace flash_ext {

template <int kCols>
struct OptimisticFp8Softmax : Fp8SoftmaxBase<kCols, 7> {
    using Base = typename OptimisticFp8Softmax::Fp8SoftmaxBase;
    using Base::kOffset, Base::kScaleN, Base::row_max, Base::row_sum;
    using typename Base::Probabilities;
    static constexpr float kHeadroom = 2.f;  // of m above the maximum
    static constexpr float kDominant = 0.375f;
    // No P of a lane becomes 448 where all of them add up to less: 432 is the least that is rounded
    // to it, and the sum itself is rounded.
    static constexpr float kSaturating = 428.f;
    static constexpr float kSlowGrowth = 0.5f;  // of m in an iteration, in powers of two

    float limit[2];        // of a lane's sum over a tile with a stale m
    bool careful = false;  // must the next iteration find its maximum? For all rows of the warp

    // As Fp8Softmax::step(); the scores stay, for the retry. fresh: m is not known yet.
    template <class Form, class Stored, class Scores, class Scale, class Turn>
    FLASH_DEVICE void step(const Scores& s, Probabilities& p, float (&factor)[2],
                           const Scale& scale, const Turn&, bool fresh) {
        factor[0] = factor[1] = 1.f;
        float sum[2];
        bool proven = fresh || careful;
        while (true) {
            if (proven) advance<Form>(s, scale, factor);
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
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row_sum[0][i] += sum[i];
            if (proven) limit[i] = kDominant * quad_sum(row_sum[0][i]);
        }
    }

 private:
    // Raises m to the maximum of the scores, with headroom.
    template <class Form, class Scores, class Scale>
    FLASH_DEVICE void advance(const Scores& s, const Scale& scale, float (&factor)[2]) {
        bool grows = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float max = Base::template max_of_tile<Form>(s, scale, i);
            const float new_max = fmaxf(row_max[0][i], max + kHeadroom);
            factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
            // Also while the row has seen no key, and the difference is no number.
            grows |= !(new_max - row_max[0][i] <= kSlowGrowth);
            row_max[0][i] = new_max;
            row_sum[0][i] *= factor[i];
        }
        careful = __any_sync(0xffffffff, grows);
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
                                   const Scale& scale) const {
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
            ptx::warpgroup_fence_operand(sum[i]);
        }
    }
};

}  // namespace flash_ext
