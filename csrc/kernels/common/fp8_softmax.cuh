// Online softmax with P in FP8 (FlashAttention-3, section 3.3).
//
// e4m3 holds 2^-9 to 448. P is 2^(S scale - m + 8) with m the maximum so far: at the maximum it is
// 256, and probabilities down to 2^-17 of it remain. The factor 2^8 is in O and in l, and cancels.
//
// Unlike optimistic_softmax.cuh this never uses a stale m: so where one key has nearly all of the
// weight, its P is a power of two and not rounded. With a stale m it would have the full error of
// e4m3 (docs/notes/016-fp8.md).
//
// The factor of the scores differs between tiles (block quantization), so m includes it.
#pragma once

#include <numeric>

#include "kernels/common/optimistic_softmax.cuh"
#include "problem/params.h"

namespace flash_ext {

template <int kCols>
struct Fp8Softmax : OnlineSoftmax<16> {
    static constexpr float kOffset = 8.f;
    static constexpr float kFactor = 256.f;  // 2^kOffset

    // Blocks of keys that share a descale begin and end at multiples of this many n.
    static constexpr int kScaleN = std::gcd(kCols, kDescaleRows) / 8;

    using Rescaling = RowRescaling;
    using Scores = RegisterTile<16, kCols>;
    using Probabilities = RegisterOperand<kCols, 1>;

    // From scores to P. Adds to l, and returns the factor of O. scale(n, i) is the factor of scores
    // s.v[0][n] of row i of a lane's two.
    template <class Scale>
    __device__ __forceinline__ Rescaling step(const Scores& s, Probabilities& p, Scale scale) {
        Rescaling rescaling;
        bool grows = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float new_max = fmaxf(row_max[0][i], quad_max(row_maximum(s, i, scale)));
            rescaling.factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
            grows |= new_max > row_max[0][i];
            row_max[0][i] = new_max;
            row_sum[0][i] *= rescaling.factor[i];
        }
        rescaling.needed = __any_sync(0xffffffff, grows);
        exponentiate(s, p, scale);
        return rescaling;
    }

    __device__ __forceinline__ void begin_with(float score, int m, int i) {
        OnlineSoftmax<16>::begin_with(score, m, i);
        row_sum[m][i] *= kFactor;
    }
    __device__ __forceinline__ void finish() {
        OnlineSoftmax<16>::finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) row_sum[0][i] *= 1.f / kFactor;
    }
    __device__ __forceinline__ float inverse_sum(int m, int i) const {
        return OnlineSoftmax<16>::inverse_sum(m, i) * (1.f / kFactor);
    }

 private:
    // This lane's share of the maximum of row i.
    template <class Scale>
    static __device__ __forceinline__ float row_maximum(const Scores& s, int i, Scale scale) {
        float max = -INFINITY;
#pragma unroll
        for (int n = 0; n < Scores::kN; n += kScaleN) {
            float x = fmaxf(s.v[0][n][2 * i], s.v[0][n][2 * i + 1]);
#pragma unroll
            for (int k = n + 1; k < n + kScaleN; ++k)
                x = fmaxf(x, fmaxf(s.v[0][k][2 * i], s.v[0][k][2 * i + 1]));
            max = fmaxf(max, x * scale(n, i));
        }
        return max;
    }

    template <class Scale>
    __device__ __forceinline__ void exponentiate(const Scores& s, Probabilities& p, Scale scale) {
        float shift[2];
        float sums[2][2];  // four chains of additions
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shift[i] = kOffset - finite_max(row_max[0][i]);
            sums[i][0] = sums[i][1] = 0.f;
        }
        // Group g is what becomes one register of P: of an A fragment the row half j % 2 and the
        // key half j / 2, with j = g % 4. The exponentials of a group, one every eight cycles, are
        // issued between the products of the next one and the sums of the one before: left to
        // itself the compiler issues them in pairs and waits.
        constexpr int kGroups = kCols / 8;
        float x[3][4];  // of groups g - 1, g and g + 1
        const auto multiply = [&](int g, int e) {
            const int k = g / 4, j = g % 4, i = j % 2;
            const int n = 4 * k + 2 * (j / 2) + e / 2;
            x[g % 3][e] =
                ptx::fma(s.v[0][n][2 * i + e % 2], scale(n / kScaleN * kScaleN, i), shift[i]);
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
            p.v[(g - 1) / 4][(g - 1) % 4] = ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) row_sum[0][i] += sums[i][0] + sums[i][1];
    }
};

}  // namespace flash_ext
