// Rows of several tensors added up in one pass over memory; or, with an lse each, attention over
// some keys each, O_p and lse_p, made into that over all of them:
//
//     lse = log(sum_p e^lse_p),    O = sum_p e^(lse_p - lse) O_p
//
// Between GPUs every step of a method is a whole call with results of its own. (combine.cuh is for
// the splits of one call, with maxima and sums in place of lse.) Bound by memory: each row is read
// and written once. Tensors may have 16 or 32 bits each; that types are looked up at run time costs
// nothing here. A row has 8, 16 or 32 lanes with four columns each; heads are next to each other in
// memory, so a warp's rows are too.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/sum_rows.h"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kSumRowsThreads = 256;
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

// A row of the sequence in a part.
struct PartRow {
    bool has;      // is there anything to add?
    int64_t row;   // of the part
    float weight;  // e^lse_p, over e^max
};

__device__ __forceinline__ PartRow part_row(const RowsPart& part, bool weighted, int batch,
                                            int64_t row, int head, float max) {
    PartRow found{row >= part.first && row < part.first + part.rows, row - part.first, 1.f};
    if (!weighted || !found.has) return found;
    const StatisticsView& lse = part.lse;
    const float here = lse.data[batch * lse.batch_stride + head * lse.head_stride + found.row];
    found.has = here != -INFINITY;  // without any key there may be anything in a result
    found.weight = ptx::ex2((here - max) * kLog2e);
    return found;
}

__global__ void __launch_bounds__(kSumRowsThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
    constexpr int kAtOnce = 4;  // parts whose loads are under way together
    const int lanes = lanes_per_row(params.head_dim);
    const int64_t thread = int64_t{blockIdx.x} * kSumRowsThreads + threadIdx.x;
    const int64_t index = thread / lanes;
    const int lane = static_cast<int>(thread % lanes);
    const bool valid = index < int64_t{params.batch} * params.rows * params.heads;
    // Threads without a row stay until the warp has met below.
    const int64_t flat_row = valid ? index / params.heads : 0;
    const int head = valid ? static_cast<int>(index % params.heads) : 0;
    const int batch = static_cast<int>(flat_row / params.rows);
    const int64_t row = flat_row % params.rows;
    const int64_t source = params.index ? params.index[row] : row;
    const bool weighted = params.lse.data != nullptr;

    // lse_p is read again for each column, rather than kept.
    float max = 0.f;
    float sum = 1.f;
    if (weighted) {
        max = -INFINITY;
        for (int p = 0; p < params.parts; ++p) {
            const RowsPart& part = params.part[p];
            if (source < part.first || source >= part.first + part.rows) continue;
            const StatisticsView& lse = part.lse;
            max = fmaxf(
                max,
                lse.data[batch * lse.batch_stride + head * lse.head_stride + source - part.first]);
        }
        sum = 0.f;
        for (int p = 0; p < params.parts; ++p) {
            const PartRow x = part_row(params.part[p], true, batch, source, head, max);
            if (x.has) sum += x.weight;
        }
    }

    for (int column = valid ? lane * kColumnsPerLane : params.head_dim; column < params.head_dim;
         column += lanes * kColumnsPerLane) {
        const int columns = params.head_dim - column;
        float4 total{};
        for (int first = 0; first < params.parts; first += kAtOnce) {
            uint4 bits[kAtOnce]{};
            float weight[kAtOnce]{};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i >= params.parts) continue;
                const RowsPart& part = params.part[first + i];
                const PartRow x = part_row(part, weighted, batch, source, head, max);
                if (!x.has) continue;
                weight[i] = x.weight / sum;
                bits[i] = load_four(columns_of(part.x, batch, x.row, head, column), part.x.type,
                                    params.aligned, columns);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i >= params.parts) continue;
                const float4 x = to_floats(bits[i], params.part[first + i].x.type);
                total = {total.x + weight[i] * x.x, total.y + weight[i] * x.y,
                         total.z + weight[i] * x.z, total.w + weight[i] * x.w};
            }
        }
        store_four(columns_of(params.out, batch, row, head, column), params.out.type,
                   params.aligned, columns, total);
    }

    __syncwarp();  // all lanes of the row have read what may be the same lse
    if (valid && weighted && lane == 0)
        params.lse.data[batch * params.lse.batch_stride + head * params.lse.head_stride + row] =
            max == -INFINITY ? max : max + logf(sum);
}

cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream) {
    const int64_t rows = int64_t{params.batch} * params.rows * params.heads;
    const int64_t ctas = ceil_div<int64_t>(rows * lanes_per_row(params.head_dim), kSumRowsThreads);
    return launch_kernel<sum_rows_kernel>(ctas, kSumRowsThreads, 0, params, stream);
}

}  // namespace flash_ext
