// A thread's 64 elements of a tile in registers, as RotatedRows, without a rotation. They stay in
// 16 bits: fewer registers, and maxima of two elements at a time.
#pragma once

#include "kernels/fp8/packed_max.cuh"
#include "kernels/fp8/rotate.cuh"

namespace flash_ext {

template <class Element>
class PlainRows {
 public:
    using Type = Element;
    static constexpr int kDim = 0;
    static constexpr int kMeanDivisor = kDifferenceDivisor;  // of numbers less their mean
    static constexpr bool kRepeats = false;                  // nothing is added up
    using Layout = TileLayout<8, 3, 3>;
    using Position = TilePosition<Layout>;
    static constexpr int kThreadVectors = Layout::kThreadVectors;
    // An SM has registers for 768 threads, 32 of them for elements.
    static constexpr int kSmThreads = 768, kRegisters = 80;

    __device__ PlainRows(const QuantizeParams& params) : at_(params, threadIdx.x % 32) {}

    __device__ void read(const WarpRows<Layout>& rows) {
        const uint32_t of_lane =
            ptx::shared_address(&rows.x[Layout::swizzled(ptx::lane_not_hoisted())]);
#pragma unroll
        for (int i = 0; i < kThreadVectors; ++i)
            ptx::ld_shared_v4(raw_[i], Layout::vector_address(of_lane, 32 * i));
    }

    __device__ void load_mean(const QuantizeParams&, const StreamTile&, WarpMean&) {}

    __device__ void prepare(const QuantizeParams& params, const StreamTile& work, const WarpMean&) {
        rows_ = work.rows.used - at_.row();
        mean_ = nullptr;
        if (params.mean != nullptr && work.rows.used > 0)
            mean_ = params.mean + work.scale_head(params) * params.head_dim + at_.column();
    }

    __device__ void last_butterflies() {}
    // NaN where an element is.
    __device__ float amax_before_last() const { return largest_magnitude<true>(); }
    // NaNs are ignored.
    __device__ float amax() const { return largest_magnitude<false>(); }

    __device__ void spoil() {
        constexpr uint32_t kNaN = 0x7fff;  // of both types
#pragma unroll
        for (int i = 0; i < kThreadVectors; ++i) {
            float v[8];
            values(i, v);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (!(fabsf(v[e]) <= FLT_MAX)) raw_[i][e / 2] |= kNaN << 16 * (e % 2);
        }
    }

    // Rounds.
    template <class Result>
    __device__ void write(WarpRowsAndResults<Layout>& rows, float factor) const {
        const float factors[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
        write_scaled<Result>(rows, factors);
    }

    // To e4m3, with factors of these columns.
    __device__ void write(WarpRowsAndResults<Layout>& rows, const float (&factors)[8]) const {
        write_scaled<Float8>(rows, factors);
    }

    __device__ int column() const { return at_.column(); }

 private:
    // Infinite where an element is.
    template <bool kNaN>
    __device__ float largest_magnitude() const {
        if (mean_ == nullptr) {
            PackedMax<Element, kNaN> largest;
#pragma unroll
            for (int i = 0; i < kThreadVectors; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) largest.include(raw_[i][w]);
            return largest.value();
        }
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < kThreadVectors; ++i) {
            float v[8];
            values(i, v);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float size = fabsf(v[e]);
                largest = kNaN ? ptx::max_nan(largest, size) : fmaxf(largest, size);
            }
        }
        return largest;
    }

    // As float, without the mean. Less a mean they are divided by kMeanDivisor.
    __device__ void values(int i, float (&v)[8]) const {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = ptx::unpack<Element>(raw_[i][w]);
            v[2 * w] = pair.x;
            v[2 * w + 1] = pair.y;
        }
        if (mean_ == nullptr) return;
        __syncwarp();  // reads the mean again, which would take registers
        if (Layout::kVectorRows * i >= rows_) return;
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
            const float4 m = *reinterpret_cast<const float4*>(mean_ + e);
            constexpr float kFactor = 1.f / kMeanDivisor;
            v[e] = fmaf(v[e], kFactor, -kFactor * m.x);
            v[e + 1] = fmaf(v[e + 1], kFactor, -kFactor * m.y);
            v[e + 2] = fmaf(v[e + 2], kFactor, -kFactor * m.z);
            v[e + 3] = fmaf(v[e + 3], kFactor, -kFactor * m.w);
        }
    }

    template <class Result>
    __device__ void write_scaled(WarpRowsAndResults<Layout>& rows,
                                 const float (&factors)[8]) const {
        const uint32_t of_lane =
            ptx::shared_address(&rows.x_8bit[Layout::swizzled_piece(ptx::lane_not_hoisted())]);
#pragma unroll
        for (int i = 0; i < kThreadVectors; ++i) {
            float v[8];
            values(i, v);
            const uint2 x = scaled(Result{}, v, factors);
            ptx::st_shared_v2(Layout::piece_address(of_lane, 32 * i), x.x, x.y);
        }
    }

    Position at_;        // of the first vector; others have the same columns
    const float* mean_;  // of these columns
    int rows_;           // in use, from the first vector on
    uint32_t raw_[kThreadVectors][4];
};

}  // namespace flash_ext
