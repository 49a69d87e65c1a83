// Online softmax over the rows of a warp's score tiles (FlashAttention-2, algorithm 1, line 9),
// in base 2: e^(scale s - m) = 2^(scale log2(e) s - m log2(e)), one FMA and one ex2 an element.
#pragma once

#include <type_traits>

#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// Natural logarithm of the sum of e^s over scores s with the maximum `max`, from the sum of 2^((s -
// max) scale); scale includes log2(e). Only a row without keys has the sum 0: in any other row the
// maximum contributes 1. A NaN stays a NaN.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale) {
    return sum == 0.f ? -INFINITY : max * (scale * kLn2) + log2f(sum) * kLn2;
}

// Reductions over all lanes.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 2; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return quad_max(x);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 2; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return quad_sum(x);
}

// A row without keys has no maximum; any finite number prevents -inf - max from becoming NaN.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// Exponents are one FMA each, s scale - scaled_max. The product scaled_max = max scale is rounded,
// by up to 2^-23 of itself. Up to this bound, far beyond the scores of a working model, that is an
// error below 2^-11 in the exponent; for scores in the millions it would give zeros. Beyond the
// bound the maximum is subtracted first: (s - max) scale has no such error.
inline constexpr float kLargeExponent = 4096.f;

// The scale of scores that include it.
struct Unscaled {
    __device__ __forceinline__ constexpr operator float() const { return 1.f; }
};

// Rounded up: no exponent is above (s - max) scale. So P of finite scores is finite, whatever the
// maximum, and 0 times it is 0 when a far larger maximum follows. Only NaN and infinite scores make
// a row NaN.
template <class Scale>
__device__ __forceinline__ float scaled_max(float max, Scale scale) {
    if constexpr (std::is_same_v<Scale, Unscaled>) {
        return finite_max(max);
    } else {
        return __fmul_ru(finite_max(max), scale);
    }
}

__device__ __forceinline__ bool is_large(float exponent) {
    return fabsf(exponent) > kLargeExponent;
}

template <int kRows>
struct OnlineSoftmax {
    static constexpr int kM = kRows / 16;
    // O is rescaled only when scores exceed the stale maximum by this many powers of two. The
    // result is the same, since numerator and denominator share it, and most tiles need no
    // rescaling.
    static constexpr float kRescaleThreshold = 8.f;

    float row_max[kM][2];  // -inf until the row has seen a key
    float row_sum[kM][2];  // this lane's share

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                row_max[m][i] = -INFINITY;
                row_sum[m][i] = 0.f;
            }
    }

    // A score that every row has before its first key, with the value 0: it counts only in the sum.
    __device__ __forceinline__ void begin_with(float score) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) begin_with(score, m, i);
    }
    // The same for row 16 m + lane_row() + 8 i.
    __device__ __forceinline__ void begin_with(float score, int m, int i) {
        row_max[m][i] = score;
        row_sum[m][i] = lane_col() == 0 ? 1.f : 0.f;
    }

    // Replaces scores s by p = 2^(s * scale - row_max * scale), and updates O and the sums.
    // kRelative: with the exponent (s - row_max) * scale, and never with a stale maximum.
    template <bool kRelative = false, class Scores, class Output, class Scale>
    __device__ __forceinline__ void update(Scores& s, Output& o, Scale scale) {
        float tile_max[kM][2];
        bool rescale = false;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                tile_max[m][i] = s.row_max(m, i);
                rescale |= (tile_max[m][i] - row_max[m][i]) * scale >
                           (kRelative ? 0.f : kRescaleThreshold);
            }
        if (__any_sync(0xffffffff, rescale)) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float new_max = fmaxf(row_max[m][i], tile_max[m][i]);
                    const float factor = ptx::ex2((row_max[m][i] - finite_max(new_max)) * scale);
                    row_max[m][i] = new_max;
                    row_sum[m][i] *= factor;
#pragma unroll
                    for (int n = 0; n < Output::kN; ++n) {
                        o.v[m][n][2 * i] *= factor;
                        o.v[m][n][2 * i + 1] *= factor;
                    }
                }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float max_scaled = scaled_max(row_max[m][i], scale);
#pragma unroll
                for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s.v[m][n][2 * i + e];
                        x = ptx::ex2(kRelative ? (x - finite_max(row_max[m][i])) * scale
                                               : x * scale - max_scaled);
                        row_sum[m][i] += x;
                    }
            }
    }

    // After the last tile: row_sum becomes that of the whole row, in every lane of its quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) row_sum[m][i] = quad_sum(row_sum[m][i]);
    }

    // Of row 16 m + lane_row() + 8 i, where i need not be a compile-time constant.
    __device__ __forceinline__ float max(int m, int i) const {
        return i == 0 ? row_max[m][0] : row_max[m][1];
    }
    __device__ __forceinline__ float sum(int m, int i) const {
        return i == 0 ? row_sum[m][0] : row_sum[m][1];
    }
    __device__ __forceinline__ float lse(int m, int i, float scale) const {
        return log_sum_exp(max(m, i), sum(m, i), scale);
    }

    __device__ __forceinline__ float inverse_sum(int m, int i) const {
        return row_sum[m][i] == 0.f ? 0.f : ptx::rcp(row_sum[m][i]);
    }
};

}  // namespace flash_ext
