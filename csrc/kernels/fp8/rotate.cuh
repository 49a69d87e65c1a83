// A thread's 64 elements of a tile in registers, as both quantization kernels have them, and what
// is done before rounding: the mean is subtracted, and rows are rotated (incoherent processing,
// FlashAttention-3, section 3.3): x -> x diag(signs) H, where H is an orthonormal Hadamard matrix.
// q and k with the same rotation have the same products, and outliers are spread over the columns.
//
// Where D is no power of two, H is block-diagonal. A *unit* is the part of a row that one block of
// H rotates: all of the row, or one of D / kDim parts. A unit belongs to kLanes neighboring lanes,
// and lane l holds of it the elements
//
//     8 (kLanes j + l) + e      j < kVectors, e < 8
//
// H is a product of log2(kDim) butterflies between elements at distance 1, 2, 4 (same vector),
// 8, ... (another lane), 8 kLanes, ... (another vector of the same lane). Only distances between
// lanes cost shuffles: none up to D 64, one for each element at D 128, two at D 256.
//
// The order of the butterflies is that of the CPU kernels, so that results are the same bit by bit.
// Tensor cores would add in another one.
#pragma once

#include <cuda_fp8.h>
#include <math_constants.h>

#include <cfloat>
#include <utility>

#include "kernels/fp8/tile_stream.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

// Not finite, or NaN.
__device__ __forceinline__ float or_nan(float x) { return fabsf(x) <= FLT_MAX ? x : CUDART_NAN_F; }

__device__ __forceinline__ float inverse_of(float amax) {
    return kMaxFloat8 / fmaxf(amax, kMinAmax);
}

// Eight numbers times their factors, rounded to e4m3. Numbers beyond 448 become 448; a NaN stays
// one. Before sm_89 this is no instruction.
__device__ __forceinline__ uint2 scaled_e4m3(const float (&x)[8], const float (&factors)[8]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] =
            __nv_cvt_float2_to_fp8x2({x[2 * i] * factors[2 * i], x[2 * i + 1] * factors[2 * i + 1]},
                                     __NV_SATFINITE, __NV_E4M3);
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

template <class Element, int kHadamardDim>
class RotatedRows {
 public:
    static constexpr int kDim = kHadamardDim;
    static constexpr int kLanes = kDim <= 64 ? 1 : kDim / 64;
    static constexpr int kVectors = kDim / 8 / kLanes;
    static constexpr int kUnits = kThreadVectors / kVectors;  // per thread
    static constexpr int kUnitStep = 32 / kLanes;             // between the units of a lane
    static_assert(kLanes * kVectors * 8 == kDim && kUnits * kVectors == kThreadVectors);
    // An SM has registers for 512 threads, 64 of them for elements.
    static constexpr int kSmThreads = 512, kRegisters = 128;

    __device__ RotatedRows(const QuantizeParams& params)
        : RotatedRows(params, std::make_integer_sequence<int, kUnits>{}) {}

    __device__ void read(const WarpRows& rows) {
        const uint32_t of_lane =
            ptx::shared_address(&rows.x[swizzled(first_of(ptx::lane_not_hoisted()))]);
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
                ptx::ld_shared_v4(raw_[n][j], vector_address(of_lane, vector(n, j)));
    }

    // To v: the elements as float, without the mean, rotated, but not divided by sqrt(kDim). With
    // kLast = false without the butterflies of the largest distance.
    template <bool kLast>
    __device__ void prepare(const QuantizeParams& params, const WorkTile& work) {
        uint32_t signs[kSignWords];
        reload(signs);
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t bits = signs_of(signs, n, j, i) & 0x80008000;
                    const float2 pair = ptx::unpack<Element>(raw_[n][j][i] ^ bits);
                    v_[n][j][2 * i] = pair.x;
                    v_[n][j][2 * i + 1] = pair.y;
                }
            }
        if (params.mean != nullptr) subtract_mean(params, work);
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if ((e & distance) == 0) butterfly(v_[n][j][e], v_[n][j][e + distance]);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const float sign = (threadIdx.x & distance) == 0 ? 1.f : -1.f;
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float own = v_[n][j][e];
                        const float other = __shfl_xor_sync(0xffffffff, own, distance);
                        v_[n][j][e] = fmaf(own, sign, other);  // the product is exact
                    }
            }
#pragma unroll
            for (int distance = 1; distance < kVectors / 2; distance *= 2)
                vector_butterflies(n, distance);
        }
        if constexpr (kLast) last_butterflies();
    }

    __device__ void last_butterflies() {
#pragma unroll
        for (int n = 0; n < kUnits; ++n) vector_butterflies(n, kVectors / 2);
    }

    // The maximum of the magnitudes after the last butterflies, of which it comes before: of a + b
    // and a - b, rounded, the larger magnitude is |a| + |b|, rounded. Not finite where one of a and
    // b is not, or the sum overflows.
    __device__ float amax_before_last() const {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors / 2; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    largest =
                        fmaxf(largest, fabsf(v_[n][j][e]) + fabsf(v_[n][j + kVectors / 2][e]));
        return largest;
    }

    // NaN has no part in it. Infinite where an element is.
    __device__ float amax() const {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(v_[n][j][e]));
        return largest;
    }

    // What is not finite becomes NaN.
    __device__ void spoil() {
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) v_[n][j][e] = or_nan(v_[n][j][e]);
    }

    // Rounds to e4m3.
    __device__ void write(WarpRowsAndResults& rows, float inverse) const {
        const uint32_t of_lane =
            ptx::shared_address(&rows.x_fp8[swizzled_piece(first_of(ptx::lane_not_hoisted()))]);
        const float factors[8] = {inverse, inverse, inverse, inverse,
                                  inverse, inverse, inverse, inverse};
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                const uint2 x = scaled_e4m3(v_[n][j], factors);
                ptx::st_shared_v2(piece_address(of_lane, vector(n, j)), x.x, x.y);
            }
    }

 private:
    static constexpr int kSignWords = kThreadVectors / 4;

    template <int... kUnit>
    __device__ RotatedRows(const QuantizeParams& params, std::integer_sequence<int, kUnit...>)
        : at_{{params, static_cast<int>(first_of(threadIdx.x % 32) + vector(kUnit, 0))}...} {
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                const uint2 bytes = *reinterpret_cast<const uint2*>(params.signs + at_[n].column() +
                                                                    8 * kLanes * j);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int word = 4 * (kVectors * n + j) + i;
                    // The two bytes to the high bytes of both halves.
                    const uint32_t pair = ptx::byte_permute(i < 2 ? bytes.x : bytes.y, 0,
                                                            i % 2 == 0 ? 0x1404 : 0x3424);
                    signs_[word / 16] |= (pair & 0x80008000) >> word % 16;
                }
            }
    }

    // A lane's first vector in the warp's part, and the others, relative to it. They share no bit.
    static __device__ constexpr uint32_t first_of(uint32_t lane) {
        return lane / kLanes * (kDim / 8) + lane % kLanes;
    }
    static __device__ constexpr uint32_t vector(int n, int j) {
        return n * kUnitStep * (kDim / 8) + kLanes * j;
    }

    __device__ void reload(uint32_t (&signs)[kSignWords]) const {
#pragma unroll
        for (int w = 0; w < kSignWords; ++w) signs[w] = ptx::not_hoisted(signs_[w]);
    }

    // In bits 15 and 31, of the two elements of word i of a vector.
    static __device__ uint32_t signs_of(const uint32_t (&signs)[kSignWords], int n, int j, int i) {
        const int word = 4 * (kVectors * n + j) + i;
        return signs[word / 16] << word % 16;
    }
    static __device__ float with_sign(float x, uint32_t sign) {
        return __uint_as_float(__float_as_uint(x) ^ (sign & 0x80000000));
    }

    // Both have their signs, as the CPU kernels have it.
    __device__ void subtract_mean(const QuantizeParams& params, const WorkTile& work) {
        const int used = work.rows.used;
        if (used == 0) return;
        uint32_t signs[kSignWords];
        reload(signs);
        const float* mean = params.mean + work.scale_head(params) * params.head_dim;
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
            const float* means = mean + at_[n].column();
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                __syncwarp();  // bounds the loads that are in flight, which take registers
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const float4 m =
                        *reinterpret_cast<const float4*>(means + 8 * kLanes * j + 2 * i);
                    const uint32_t low = signs_of(signs, n, j, i);
                    const uint32_t high = signs_of(signs, n, j, i + 1);
                    float* x = &v_[n][j][2 * i];
                    x[0] -= with_sign(m.x, low << 16);
                    x[1] -= with_sign(m.y, low);
                    x[2] -= with_sign(m.z, high << 16);
                    x[3] -= with_sign(m.w, high);
                }
            }
        }
        if (used == kScaleRows) return;
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
            if (at_[n].row() < used) continue;
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) v_[n][j][e] = 0.f;
        }
    }

    static __device__ void butterfly(float& a, float& b) {
        const float difference = a - b;
        a += b;
        b = difference;
    }

    __device__ void vector_butterflies(int n, int distance) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
            if ((j & distance) == 0)
#pragma unroll
                for (int e = 0; e < 8; ++e) butterfly(v_[n][j][e], v_[n][j + distance][e]);
    }

    TilePosition at_[kUnits];  // of the first vectors of units

    // -1 is 1. Bits 15 - i and 31 - i of word w are of the elements of word 16 w + i.
    uint32_t signs_[kSignWords] = {};

    uint32_t raw_[kUnits][kVectors][4];
    float v_[kUnits][kVectors][8];
};

}  // namespace flash_ext
