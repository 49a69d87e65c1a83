// Adds attention over some keys, O_p and lse_p, to the results so far, O and lse, in place:
//
//     lse' = log(e^lse + e^lse_p),    O' = e^(lse - lse') O + e^(lse_p - lse') O_p
//
// The steps of a ring over several GPUs come one after the other, each a whole forward pass with
// its own O and lse. (combine.cuh is for the splits of one pass: all at once, with maxima and sums
// in place of lse.) Bound by memory: a row is read and written once. A row has 8, 16 or 32 lanes
// with four columns each; heads are next to each other in memory, so a warp's rows are too.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/combine_partial.h"
#include "ptx/math.cuh"
#include "tile/copy.cuh"

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

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The columns [0, valid) of four.
template <bool kAligned, class Element>
__device__ __forceinline__ void load_four(float (&x)[4], const Element* source, int valid) {
    struct alignas(4 * sizeof(Element)) Four {
        Element x[4];
    };
    if constexpr (kAligned) {
        const Four four = *reinterpret_cast<const Four*>(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = to_float(four.x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = i < valid ? to_float(source[i]) : 0.f;
    }
}

template <bool kAligned>
__device__ __forceinline__ void store_four(float* target, const float (&x)[4], int valid) {
    if constexpr (kAligned) {
        *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < valid) target[i] = x[i];
    }
}

template <class Element, bool kAligned>
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
    if (lse_partial == -INFINITY) return;  // nothing to add; of all lanes of a row, or of none
    const float max = fmaxf(lse, lse_partial);
    const float share = ptx::ex2((lse - max) * kLog2e);
    const float share_partial = ptx::ex2((lse_partial - max) * kLog2e);
    const float sum = share + share_partial;
    const float weight = share / sum, weight_partial = share_partial / sum;
    if (lane == 0) *lse_at = max + logf(sum);

    float* const out = row_pointer<float>(params.out, batch, row, head);
    const Element* const partial = row_pointer<Element>(params.o_partial, batch, row, head);
    for (int column = lane * kColumnsPerLane; column < params.head_dim;
         column += lanes * kColumnsPerLane) {
        float x[4], y[4];
        const int columns = params.head_dim - column;
        load_four<kAligned>(x, out + column, columns);
        load_four<kAligned>(y, partial + column, columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = weight * x[i] + weight_partial * y[i];
        store_four<kAligned>(out + column, x, columns);
    }
}

cudaError_t combine_partial(const CombinePartialParams& params, cudaStream_t stream) {
    const int64_t rows = int64_t{params.batch} * params.rows * params.heads;
    const int64_t ctas =
        ceil_div<int64_t>(rows * lanes_per_row(params.head_dim), kCombinePartialThreads);
    const auto launch = [&](auto element) {
        using Element = decltype(element);
        return params.aligned ? launch_kernel<combine_partial_kernel<Element, true>>(
                                    ctas, kCombinePartialThreads, 0, params, stream)
                              : launch_kernel<combine_partial_kernel<Element, false>>(
                                    ctas, kCombinePartialThreads, 0, params, stream);
    };
    switch (params.partial_type) {
        case PartialType::kFloat16:
            return launch(__half{});
        case PartialType::kBFloat16:
            return launch(__nv_bfloat16{});
        default:
            return launch(float{});
    }
}

}  // namespace flash_ext
