// Adds attention over some keys, O_p and lse_p, to the results so far, O and lse:
//
//     lse' = log(e^lse + e^lse_p),    O' = e^(lse - lse') O + e^(lse_p - lse') O_p
//
// The steps of a ring over several GPUs come one after the other, each a whole forward pass with
// its own O and lse. (combine.cuh is for the splits of one pass: all at once, with maxima and sums
// in place of lse.) Bound by memory: a row is read and written once. O, O' and O_p may each have
// 16 or 32 bits; that types are looked up at run time costs nothing here. A row has 8, 16 or 32
// lanes with four columns each; heads are next to each other in memory, so a warp's rows are too.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/combine_partial.h"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kCombinePartialThreads = 256;
inline constexpr int kColumnsPerLane = 4;

// Lanes of a row: the first power of two from 8 on that holds the row at four columns a lane,
// or 32.
FLASH_HOST_DEVICE constexpr int lanes_per_row(int head_dim) {
    int lanes = 8;
    while (lanes < 32 && lanes * kColumnsPerLane < head_dim) lanes *= 2;
    return lanes;
}

// A row's columns from `column` on.
__device__ __forceinline__ char* columns_of(const ResultView& view, int batch, int64_t row,
                                            int head, int column) {
    const TensorView& x = view.tensor;
    const int64_t element =
        batch * x.batch_stride + row * x.row_stride + head * x.head_stride + column;
    return static_cast<char*>(x.data) + element * (view.type == ResultType::kFloat32 ? 4 : 2);
}

// Four columns as they are in memory: in all words, or two of 16 bits in each of the first two.
// They are converted later, so that no load waits for another.
__device__ __forceinline__ uint4 load_four(const char* source, ResultType type, bool aligned,
                                           int valid) {
    uint4 bits{};
    if (type == ResultType::kFloat32) {
        const auto* x = reinterpret_cast<const uint32_t*>(source);
        if (aligned) return *reinterpret_cast<const uint4*>(x);
        bits.x = x[0];
        if (valid > 1) bits.y = x[1];
        if (valid > 2) bits.z = x[2];
        if (valid > 3) bits.w = x[3];
    } else {
        const auto* x = reinterpret_cast<const uint16_t*>(source);
        if (aligned) {
            const uint2 pairs = *reinterpret_cast<const uint2*>(x);
            return {pairs.x, pairs.y, 0, 0};
        }
        bits.x = x[0];
        if (valid > 1) bits.x |= uint32_t{x[1]} << 16;
        if (valid > 2) bits.y = x[2];
        if (valid > 3) bits.y |= uint32_t{x[3]} << 16;
    }
    return bits;
}

__device__ __forceinline__ float4 to_floats(const uint4& bits, ResultType type) {
    if (type == ResultType::kFloat32) return reinterpret_cast<const float4&>(bits);
    float2 low, high;
    if (type == ResultType::kFloat16) {
        low = __half22float2(reinterpret_cast<const __half2&>(bits.x));
        high = __half22float2(reinterpret_cast<const __half2&>(bits.y));
    } else {
        low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.x));
        high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.y));
    }
    return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ void store_four(char* target, ResultType type, bool aligned, int valid,
                                           const float4& x) {
    if (type == ResultType::kFloat32) {
        auto* out = reinterpret_cast<float*>(target);
        if (aligned) {
            *reinterpret_cast<float4*>(out) = x;
            return;
        }
        out[0] = x.x;
        if (valid > 1) out[1] = x.y;
        if (valid > 2) out[2] = x.z;
        if (valid > 3) out[3] = x.w;
        return;
    }
    uint2 bits;
    if (type == ResultType::kFloat16) {
        reinterpret_cast<__half2&>(bits.x) = __floats2half2_rn(x.x, x.y);
        reinterpret_cast<__half2&>(bits.y) = __floats2half2_rn(x.z, x.w);
    } else {
        reinterpret_cast<__nv_bfloat162&>(bits.x) = __floats2bfloat162_rn(x.x, x.y);
        reinterpret_cast<__nv_bfloat162&>(bits.y) = __floats2bfloat162_rn(x.z, x.w);
    }
    auto* out = reinterpret_cast<uint16_t*>(target);
    if (aligned) {
        *reinterpret_cast<uint2*>(out) = bits;
        return;
    }
    out[0] = static_cast<uint16_t>(bits.x);
    if (valid > 1) out[1] = static_cast<uint16_t>(bits.x >> 16);
    if (valid > 2) out[2] = static_cast<uint16_t>(bits.y);
    if (valid > 3) out[3] = static_cast<uint16_t>(bits.y >> 16);
}

__global__ void __launch_bounds__(kCombinePartialThreads)
    combine_partial_kernel(const __grid_constant__ CombinePartialParams params) {
    const int lanes = lanes_per_row(params.head_dim);
    const int64_t thread = int64_t{blockIdx.x} * kCombinePartialThreads + threadIdx.x;
    const int64_t index = thread / lanes;
    const int lane = static_cast<int>(thread % lanes);
    const bool valid = index < int64_t{params.batch} * params.rows * params.heads;
    // Threads without a row stay until the warp has met below.
    const int64_t flat_row = valid ? index / params.heads : 0;
    const int head = valid ? static_cast<int>(index % params.heads) : 0;
    const int batch = static_cast<int>(flat_row / params.rows);
    const int64_t row = flat_row % params.rows;
    const auto statistic = [&](const StatisticsView& view) {
        return view.data + batch * view.batch_stride + head * view.head_stride + row;
    };

    float* const lse_at = statistic(params.lse);
    const float lse = valid ? *lse_at : -INFINITY;
    const float lse_partial = valid ? *statistic(params.lse_partial) : -INFINITY;
    __syncwarp();  // all lanes of the row have read lse, which one of them writes
    if (!valid) return;
    // Without any key there may be anything in a result. All lanes of a row agree.
    const bool has_before = lse != -INFINITY;
    const bool adds = lse_partial != -INFINITY;
    if (has_before && !adds && params.before.tensor.data == params.out.tensor.data) return;
    const float max = fmaxf(lse, lse_partial);
    const float share = ptx::ex2((lse - max) * kLog2e);
    const float share_partial = ptx::ex2((lse_partial - max) * kLog2e);
    const float sum = share + share_partial;
    const float weight = adds ? share / sum : 1.f;
    const float weight_partial = adds ? share_partial / sum : 0.f;
    if (adds && lane == 0) *lse_at = max + logf(sum);

    for (int column = lane * kColumnsPerLane; column < params.head_dim;
         column += lanes * kColumnsPerLane) {
        const auto place = [&](const ResultView& view) {
            return columns_of(view, batch, row, head, column);
        };
        const auto load = [&](const ResultView& view) {
            return load_four(place(view), view.type, params.aligned, params.head_dim - column);
        };
        const uint4 bits = has_before ? load(params.before) : uint4{};
        const uint4 bits_partial = adds ? load(params.o_partial) : uint4{};
        const float4 x = to_floats(bits, params.before.type);
        const float4 y = to_floats(bits_partial, params.o_partial.type);
        store_four(place(params.out), params.out.type, params.aligned, params.head_dim - column,
                   {weight * x.x + weight_partial * y.x, weight * x.y + weight_partial * y.y,
                    weight * x.z + weight_partial * y.z, weight * x.w + weight_partial * y.w});
    }
}

cudaError_t combine_partial(const CombinePartialParams& params, cudaStream_t stream) {
    const int64_t rows = int64_t{params.batch} * params.rows * params.heads;
    const int64_t ctas =
        ceil_div<int64_t>(rows * lanes_per_row(params.head_dim), kCombinePartialThreads);
    return launch_kernel<combine_partial_kernel>(ctas, kCombinePartialThreads, 0, params, stream);
}

}  // namespace flash_ext
