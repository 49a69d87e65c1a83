// A thread's 64 or 128 elements of a tile in registers, and what is done before rounding: the mean
// is subtracted, and rows may be rotated (incoherent processing, FlashAttention-3, section 3.3):
// x -> x diag(signs) H, where H is an orthonormal Hadamard matrix. q and k with the same rotation
// have the same products, and outliers are spread over the columns. Without a rotation H is 1 and
// a unit is a vector.
//
// Where D is no power of two, H is block-diagonal. A *unit* is the part of a row that one block of
// H rotates: all of the row, or one of D / kDim parts. A unit belongs to kLanes neighboring lanes,
// and lane l holds of it the elements
//
//     8 (kLanes j + l) + e      j < kVectors, e < 8
//
// A lane's units are in different rows, but in the same columns. H is a product of log2(kDim)
// butterflies between elements at distance 1, 2, 4 (same vector), 8, ... (another lane),
// 8 kLanes, ... (another vector of the same lane). Only distances between lanes cost shuffles, of
// which an SM does 32 lanes a clock: as much time as four other instructions. With 64
// elements there are none up to kDim 64. Beyond that a thread has 128: none at 128, one for each
// element at 256.
//
// The butterflies have the order of the CPU kernels, so that results are the same bit by bit.
// Tensor cores would add in another one.
#pragma once

#include "kernels/fp8/scales.cuh"
#include "kernels/fp8/tile_stream.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

// kHadamardDim: 0 without a rotation.
template <class Element, int kHadamardDim>
class TileRows {
 public:
    static constexpr bool kRotates = kHadamardDim > 0;
    static constexpr int kDim = kRotates ? kHadamardDim : 8;
    static constexpr int kMeanDivisor = kRotates ? kSumDivisor : kDifferenceDivisor;
    // Of what prepare() makes.
    static __device__ float divisor(const QuantizeParams& params) {
        return kRotates || params.mean != nullptr ? kMeanDivisor : 1;
    }
    static constexpr int kThreadVectors = kDim > 64 ? 16 : 8;
    static constexpr int kLanes = kDim <= 8 * kThreadVectors ? 1 : kDim / (8 * kThreadVectors);
    static constexpr int kVectors = kDim / 8 / kLanes;
    static constexpr int kUnits = kThreadVectors / kVectors;  // per thread
    static constexpr int kElements = 8 * kVectors;            // of a unit
    static_assert(kLanes * kVectors * 8 == kDim && kUnits * kVectors == kThreadVectors);
    // A unit's vectors, and pairs of its results' pieces, for a swizzle.
    using Layout = TileLayout<kThreadVectors, kVectors == 16 ? 4 : 3,
                              kVectors == 16 && kLanes == 2 ? 4 : 3, kDim == 256 ? 2 : 1>;
    static constexpr int kUnitStep = 32 / kLanes * (kDim / 8);  // vectors between a lane's units
    static constexpr int kUnitRows = Layout::kVectorRows * (kUnitStep / 32);
    static_assert(kUnitStep % 32 == 0);  // so they are in the same columns
    // An SM has registers for this many threads, half of them or more for elements. (Code for sm_80
    // needs a few more of them.)
    static constexpr int kSmThreads = kThreadVectors == 16 ? 384 : 512;
    static constexpr int kRegisters = kThreadVectors == 16 ? 168 : 128;

    __device__ TileRows(const QuantizeParams& params)
        : at_(params, static_cast<int>(first_of(threadIdx.x % 32))) {
        if constexpr (kRotates) load_signs(params);
    }

    __device__ void read(const WarpRows<Layout>& rows) {
        const uint32_t of_lane =
            ptx::shared_address(&rows.x[Layout::swizzled(first_of(ptx::lane_not_hoisted()))]);
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
                ptx::ld_shared_v4(raw_[n][j], Layout::vector_address(of_lane, vector(n, j)));
    }

    // The mean of the tile's head, divided, with signs as the elements have them, to shared memory,
    // unless it is there: a lane has eight columns. From there they are read without waiting for
    // each other.
    __device__ void load_mean(const QuantizeParams& params, const RowTile& tile, WarpMean& mean) {
        const int64_t head = tile.scale_head(params);
        if (params.mean == nullptr || tile.used == 0 || mean.head == head) return;
        __syncwarp();  // all lanes have compared
        const int column = 8 * ptx::lane_not_hoisted();
        if (column == 0) mean.head = head;
        if (column < params.head_dim) {
            const float4* source =
                reinterpret_cast<const float4*>(params.mean + head * params.head_dim + column);
            uint2 signs{0, 0};
            if constexpr (kRotates) signs = *reinterpret_cast<const uint2*>(params.signs + column);
            const float4 low = source[0], high = source[1];
            float4* target = reinterpret_cast<float4*>(&mean.of_columns[mean_index(column)]);
            target[0] = divided_with_signs(low, signs.x);
            target[1] = divided_with_signs(high, signs.y);
        }
        __syncwarp();  // all columns are there
    }

    // To v: the elements as float, without the mean, rotated, but not divided by sqrt(kDim), and
    // without the butterflies of the largest distance. They are divided by divisor(): less a mean
    // at no cost, otherwise in the first butterflies.
    __device__ void prepare(const QuantizeParams& params, const RowTile& tile, WarpMean& mean) {
        load_mean(params, tile, mean);
        uint32_t signs[kSignWords];
#pragma unroll
        for (int w = 0; w < kSignWords; ++w) signs[w] = ptx::not_hoisted(signs_[w]);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // In bits 15 and 31, of the two elements of word i.
                const int word = 4 * j + i;
                const uint32_t bits = signs[word / 16] << word % 16;
#pragma unroll
                for (int n = 0; n < kUnits; ++n) {
                    const float2 pair = ptx::unpack<Element>(
                        kRotates ? raw_[n][j][i] ^ (bits & 0x80008000) : raw_[n][j][i]);
                    v_[n][2 * word] = pair.x;
                    v_[n][2 * word + 1] = pair.y;
                }
            }
        if (params.mean != nullptr && tile.used > 0) subtract(tile, mean);
        if constexpr (kRotates) first_butterflies(params.mean == nullptr ? 1.f / kSumDivisor : 1.f);
    }

    __device__ void last_butterflies() {
        if constexpr (kRotates)
#pragma unroll
            for (int n = 0; n < kUnits; ++n) butterflies(n, kElements / 2);
    }

    // The largest magnitude after the last butterflies, found before they are made: of a + b and
    // a - b, rounded, the larger magnitude is |a| + |b|, rounded. Infinite or NaN where one of
    // a and b is, or the sum overflows. Floats without a sign have the order of their bits,
    // of which one instruction has the maximum of three (on sm_90).
    __device__ float amax_before_last() const {
        constexpr int kHalf = kRotates ? kElements / 2 : kElements;
        int largest = 0;
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int k = 0; k < kHalf; k += 2) {
                const auto size = [&](int k) {
                    const float x = fabsf(v_[n][k]);
                    return __float_as_int(kRotates ? x + fabsf(v_[n][k + kHalf % kElements]) : x);
                };
                largest = __vimax3_s32(largest, size(k), size(k + 1));
            }
        return __int_as_float(largest);
    }

    // After them, of what is finite. The others become NaN.
    __device__ float finite_amax() {
        float largest = 0.f;
        for_each([&](float& x) {
            if (!(fabsf(x) <= FLT_MAX)) x = CUDART_NAN_F;
            largest = fmaxf(largest, fabsf(x));  // not of NaN
        });
        return largest;
    }

    __device__ void multiply(float factor) {
        for_each([&](float& x) { x *= factor; });
    }

    template <class Result>
    __device__ void write(WarpRows<Layout>& rows, float factor) const {
        const float factors[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
        write<Result>(rows, factors);
    }

    // With a factor for each column of a vector, of which a unit without a rotation has one.
    template <class Result>
    __device__ void write(WarpRows<Layout>& rows, const float (&factors)[8]) const {
        const uint32_t of_lane = ptx::shared_address(
            &rows.x_8bit[Layout::swizzled_piece(first_of(ptx::lane_not_hoisted()))]);
        constexpr int kTogether = kLanes == 1 && kVectors > 1 ? 2 : 1;  // adjacent ones
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; j += kTogether) {
                const uint32_t target = Layout::piece_address(of_lane, vector(n, j));
                const uint2 x = scaled(Result{}, &v_[n][8 * j], factors);
                if constexpr (kTogether == 1) {
                    ptx::st_shared_v2(target, x.x, x.y);
                } else {
                    const uint2 y = scaled(Result{}, &v_[n][8 * j + 8], factors);
                    ptx::st_shared_v4(target, {x.x, x.y, y.x, y.y});
                }
            }
    }

    __device__ int column() const { return at_.column(); }

 private:
    static constexpr int kSignWords = ceil_div(kVectors, 4);

    // A lane's first vector in the warp's part, and the others, relative to it. They share no bit.
    static __device__ constexpr uint32_t first_of(uint32_t lane) {
        return lane / kLanes * (kDim / 8) + lane % kLanes;
    }
    static __device__ constexpr uint32_t vector(int n, int j) { return n * kUnitStep + kLanes * j; }

    // Where the mean of a column is: lanes that read one of different units use different banks.
    static __device__ constexpr int mean_index(int column) { return column + column / 32 * 4; }

    __device__ void load_signs(const QuantizeParams& params) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint2 bytes =
                *reinterpret_cast<const uint2*>(params.signs + at_.column() + 8 * kLanes * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int word = 4 * j + i;
                // The two bytes to the high bytes of both halves.
                const uint32_t pair =
                    ptx::byte_permute(i < 2 ? bytes.x : bytes.y, 0, i % 2 == 0 ? 0x1404 : 0x3424);
                signs_[word / 16] |= (pair & 0x80008000) >> word % 16;
            }
        }
    }

    // `signs`: a byte for each number.
    static __device__ float4 divided_with_signs(float4 x, uint32_t signs) {
        const auto with_sign = [&](float y, int byte) {
            return __uint_as_float(__float_as_uint(y / kMeanDivisor) ^
                                   (signs << (24 - 8 * byte) & 0x80000000));
        };
        return {with_sign(x.x, 0), with_sign(x.y, 1), with_sign(x.z, 2), with_sign(x.w, 3)};
    }

    // Both have their signs, as the CPU kernels have it. Rows that are not in use stay 0.
    __device__ void subtract(const RowTile& tile, const WarpMean& mean) {
        const uint32_t of_lane = ptx::shared_address(&mean.of_columns[mean_index(at_.column())]);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
#pragma unroll
            for (int e = 0; e < 8; e += 4) {
                float m[4];
                ptx::ld_shared_v4(m, of_lane + 4 * (mean_index(8 * kLanes * j) + e));
#pragma unroll
                for (int n = 0; n < kUnits; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        v_[n][8 * j + e + i] =
                            fmaf(v_[n][8 * j + e + i], 1.f / kMeanDivisor, -m[i]);
            }
        const int used = tile.used;
        if (used == kScaleRows) return;
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
            if (at_.row() + kUnitRows * n < used) continue;
#pragma unroll
            for (int k = 0; k < kElements; ++k) v_[n][k] = 0.f;
        }
    }

    // All but the butterflies of the largest distance. `factor` is a power of two.
    __device__ void first_butterflies(float factor) {
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
#pragma unroll
            for (int k = 0; k < kElements; k += 2) {
                float& a = v_[n][k];
                float& b = v_[n][k + 1];
                const float product = b * factor;  // exact, as the one with a is
                b = fmaf(a, factor, -product);
                a = fmaf(a, factor, product);
            }
#pragma unroll
            for (int distance = 2; distance < 8; distance *= 2) butterflies(n, distance);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const float sign = (threadIdx.x & distance) == 0 ? 1.f : -1.f;
#pragma unroll
                for (int k = 0; k < kElements; ++k) {
                    const float own = v_[n][k];
                    const float other = __shfl_xor_sync(0xffffffff, own, distance);
                    v_[n][k] = fmaf(own, sign, other);  // the product is exact
                }
            }
#pragma unroll
            for (int distance = 8; distance < kElements / 2; distance *= 2)
                butterflies(n, distance);
        }
    }

    // Those between elements of this lane.
    __device__ void butterflies(int n, int distance) {
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
            if ((k & distance) != 0) continue;
            const float difference = v_[n][k] - v_[n][k + distance];
            v_[n][k] += v_[n][k + distance];
            v_[n][k + distance] = difference;
        }
    }

    template <class Visit>
    __device__ void for_each(Visit visit) {
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int k = 0; k < kElements; ++k) visit(v_[n][k]);
    }

    TilePosition<Layout> at_;  // of the first vector

    // A set bit means -1. Bits 15 - i and 31 - i of word w are of the elements of word 16 w + i of
    // a unit.
    uint32_t signs_[kSignWords] = {};

    uint32_t raw_[kUnits][kVectors][4];
    float v_[kUnits][kElements];
};

}  // namespace flash_ext
