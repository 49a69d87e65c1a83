// Online softmax with P in FP8 (FlashAttention-3, section 3.3).
//
// e4m3 holds 2^-9 to 448. P is 2^(S scale - m + 7), where m begins two above the maximum: so P is
// at most 32 then, and scores may grow by almost four powers of two before P would be 448. As in
// optimistic_softmax.cuh an iteration first uses the stale m, and is retried where a P is 448. The
// factor of P is in O and in the sums, and cancels.
//
// There are two sums. l, of P before it is rounded, is for lse. O is divided by the sum of the
// rounded P, which tensor cores form beside P V (Fa3Forward::add_output). So the weights of v add
// up to 1. Where one key has nearly all of the weight, out is its v, however its P was rounded, by
// up to 6 %; with l only a P that is a power of two would give that, and m would have to be the
// maximum, always (docs/notes/016-fp8.md).
//
// The factor of the scores differs between tiles (block quantization), so m includes it.
#pragma once

#include <numeric>

#include "kernels/common/optimistic_softmax.cuh"
#include "problem/params.h"

namespace flash_ext {

template <int kCols>
struct Fp8Softmax : OnlineSoftmax<16> {
    static constexpr float kOffset = 7.f;
    static constexpr float kFactor = 128.f;  // 2^kOffset
    static constexpr float kHeadroom = 2.f;  // of m above the maximum

    // Blocks of keys that share a descale begin and end at multiples of this many n.
    static constexpr int kScaleN = std::gcd(kCols, kDescaleRows) / 8;

    using Rescaling = RowRescaling;
    using Scores = RegisterTile<16, kCols>;
    using Probabilities = RegisterOperand<kCols, 1>;
    using RoundedSums = RegisterTile<16, 8>;  // all columns are alike

    float rounded_sum[2]{};  // of the whole row, in every lane

    // As OptimisticSoftmax::step(). scale(n, i) is the factor of scores s.v[0][n] of row i of a
    // lane's two.
    template <class Scale>
    __device__ __forceinline__ Rescaling step(const Scores& s, Probabilities& p, Scale scale,
                                              bool fresh) {
        Rescaling rescaling;
        float sum[2];
        for (bool proven = false;; proven = true) {
            if (fresh || proven) [[unlikely]]
                rescaling = advance(s, scale);
            const bool saturated = exponentiate(s, p, sum, scale);
            if (fresh || proven) break;
            const bool doubtful =
                saturated || row_max[0][0] == -INFINITY || row_max[0][1] == -INFINITY;
            if (!__any_sync(0xffffffff, doubtful)) [[likely]]
                break;
        }
        row_sum[0][0] += sum[0];
        row_sum[0][1] += sum[1];
        return rescaling;
    }

    __device__ __forceinline__ void add_rounded(const RoundedSums& sums) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rounded_sum[i] += sums.v[0][0][2 * i];
    }

    __device__ __forceinline__ void begin_with(float score, int m, int i) {
        OnlineSoftmax<16>::begin_with(score, m, i);
        row_sum[m][i] *= kFactor;
        rounded_sum[i] = kFactor;
    }
    __device__ __forceinline__ void finish() {
        OnlineSoftmax<16>::finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) row_sum[0][i] *= 1.f / kFactor;
    }
    __device__ __forceinline__ float inverse_sum(int, int i) const {
        return rounded_sum[i] == 0.f ? 0.f : ptx::rcp(rounded_sum[i]);
    }

 private:
    template <class Scale>
    __device__ __forceinline__ Rescaling advance(const Scores& s, Scale scale) {
        Rescaling rescaling;
        rescaling.needed = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float max = -INFINITY;
#pragma unroll
            for (int n = 0; n < Scores::kN; n += kScaleN) {
                float x = fmaxf(s.v[0][n][2 * i], s.v[0][n][2 * i + 1]);
#pragma unroll
                for (int k = n + 1; k < n + kScaleN; ++k)
                    x = fmaxf(x, fmaxf(s.v[0][k][2 * i], s.v[0][k][2 * i + 1]));
                max = fmaxf(max, x * scale(n, i));
            }
            const float new_max = fmaxf(row_max[0][i], quad_max(max) + kHeadroom);
            rescaling.factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
            row_max[0][i] = new_max;
            row_sum[0][i] *= rescaling.factor[i];
            rounded_sum[i] *= rescaling.factor[i];
        }
        return rescaling;
    }

    // Has any P of this lane become 448?
    template <class Scale>
    __device__ __forceinline__ bool exponentiate(const Scores& s, Probabilities& p, float (&sum)[2],
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
        uint32_t largest = 0;
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
            uint32_t& packed = p.v[(g - 1) / 4][(g - 1) % 4];
            packed = ptx::pack_e4m3(y[0], y[1], y[2], y[3]);
            largest |= packed + 0x02020202;  // 448 is 0x7e
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = sums[i][0] + sums[i][1];
            // Here, beside the exponentials, and not after the retry, up to which all of them would
            // be kept.
            ptx::warpgroup_fence_operand(sum[i]);
        }
        return (largest & 0x80808080) != 0;
    }
};

}  // namespace flash_ext
