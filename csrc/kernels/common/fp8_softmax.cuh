// Online softmax with P in FP8 (FlashAttention-3, section 3.3).
//
// e4m3 holds 2^-9 to 448. So P is 2^(S scale - m + 7): at the maximum it is 128, and probabilities
// down to 2^-16 of it remain. The factor 2^7 is in O and in l, and cancels.
//
// As in optimistic_softmax.cuh an iteration first uses the stale m. It may lag by log2(448 / 128) =
// 1.8 before P saturates. Then a byte of P is 448, and the iteration is retried with the maximum.
//
// The factor of the scores differs between tiles (block quantization), so m includes it.
#pragma once

#include "kernels/common/optimistic_softmax.cuh"

namespace flash_ext {

template <int kCols>
struct Fp8Softmax : OnlineSoftmax<16> {
    static constexpr float kOffset = 7.f;
    static constexpr float kFactor = 128.f;  // 2^kOffset

    using Rescaling = RowRescaling;
    using Scores = RegisterTile<16, kCols>;
    using Probabilities = RegisterOperand<kCols, 1>;

    // As OptimisticSoftmax::step(), with a scale for each of a lane's two rows.
    __device__ __forceinline__ Rescaling step(const Scores& s, Probabilities& p,
                                              const float (&scale)[2], bool fresh) {
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
    __device__ __forceinline__ Rescaling advance(const Scores& s, const float (&scale)[2]) {
        Rescaling rescaling;
        rescaling.needed = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float new_max = fmaxf(row_max[0][i], row_maximum(s, 0, i) * scale[i]);
            rescaling.factor[i] = ptx::ex2(row_max[0][i] - finite_max(new_max));
            row_max[0][i] = new_max;
            row_sum[0][i] *= rescaling.factor[i];
        }
        return rescaling;
    }

    // Has any P of this lane become 448?
    __device__ __forceinline__ bool exponentiate(const Scores& s, Probabilities& p, float (&sum)[2],
                                                 const float (&scale)[2]) const {
        float shift[2];
        float sums[2][2];  // four chains of additions
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shift[i] = kOffset - finite_max(row_max[0][i]);
            sums[i][0] = sums[i][1] = 0.f;
        }
        uint32_t largest = 0;
#pragma unroll
        for (int k = 0; k < kCols / 32; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // of an A fragment: row half j % 2, key half j / 2
                const int i = j % 2;
                float x[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float score = s.v[0][4 * k + 2 * (j / 2) + e / 2][2 * i + e % 2];
                    // Not as a product and a sum: the compiler would keep all products for the
                    // retry.
                    x[e] = ptx::ex2(__fmaf_rn(score, scale[i], shift[i]));
                    sums[i][e % 2] += x[e];
                }
                p.v[k][j] = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
                largest |= p.v[k][j] + 0x02020202;  // 448 is 0x7e
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
