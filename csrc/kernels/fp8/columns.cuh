// Reductions over the rows of a head, column by column: maxima for channel scales, and the mean.
//
// One CTA has kColumnRows rows of a head and 4 D threads. A thread has eight columns and every
// 32nd row, so a warp reads 512 bytes at a time. The 32 results of a column meet in shared memory.
// Sums of several CTAs are added by a second kernel, in a fixed order: means repeat bit by bit.
#pragma once

#include "kernels/fp8/rotate.cuh"
#include "plan/quantize.h"

namespace flash_ext {

inline constexpr int kRowGroups = 32;

enum class Columns { kAmax, kSum };

template <class Element, Columns kColumns>
__global__ void __launch_bounds__(kMaxQuantizeThreads)
    columns_kernel(const __grid_constant__ QuantizeParams params) {
    __shared__ __align__(16) float partial[kRowGroups * 256];  // (row group, D)
    const auto [tile, head, tile_idx] = tile_of_head(params, kColumnRows);
    const int vectors = params.head_dim / 8;
    const int group = threadIdx.x / vectors;
    const int column = threadIdx.x % vectors * 8;
    const Element* x = static_cast<const Element*>(params.x.data) +
                       tile.batch * params.x.batch_stride + head * params.x.head_stride + column;

    float mean[8] = {};
    if (params.mean != nullptr && tile.used > 0) {
        const float* source =
            params.mean + (int64_t{tile.sequence} * params.heads + head) * params.head_dim + column;
#pragma unroll
        for (int e = 0; e < 8; ++e) mean[e] = source[e];
    }

    float found[8] = {};
    constexpr int kTogether = 4;  // rows whose loads are in flight
    for (int first = group; first < tile.used; first += kRowGroups * kTogether) {
        uint32_t words[kTogether][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int r = min_of(first + kRowGroups * i, tile.used - 1);
            const Element* p = x + (tile.begin + r) * params.x.row_stride;
            if (params.aligned) {
                const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
                words[i][0] = raw.x;
                words[i][1] = raw.y;
                words[i][2] = raw.z;
                words[i][3] = raw.w;
            } else {
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    words[i][w] = halves[2 * w] | static_cast<uint32_t>(halves[2 * w + 1]) << 16;
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (first + kRowGroups * i >= tile.used) continue;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float2 pair = ptx::unpack<Element>(words[i][w]);
                const float values[2] = {pair.x, pair.y};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& result = found[2 * w + e];
                    if constexpr (kColumns == Columns::kSum) {
                        result += values[e];
                    } else {
                        const float value = fabsf(values[e] - mean[2 * w + e]);
                        if (value <= FLT_MAX) result = fmaxf(result, value);
                    }
                }
            }
        }
    }

    float4* target = reinterpret_cast<float4*>(&partial[group * params.head_dim + column]);
    target[0] = {found[0], found[1], found[2], found[3]};
    target[1] = {found[4], found[5], found[6], found[7]};
    __syncthreads();  // the results of all row groups are complete
    const int d = threadIdx.x;
    if (d >= params.head_dim) return;
    float result = partial[d];
    for (int i = 1; i < kRowGroups; ++i) {
        const float other = partial[i * params.head_dim + d];
        result = kColumns == Columns::kSum ? result + other : fmaxf(result, other);
    }
    if constexpr (kColumns == Columns::kSum) {
        params.sums[(int64_t{tile_idx} * params.heads + head) * params.head_dim + d] = result;
    } else if (tile.used > 0) {
        const int64_t scale_head = int64_t{tile.sequence} * params.heads + head;
        atomicMax(reinterpret_cast<int*>(params.amax) + scale_head * params.head_dim + d,
                  __float_as_int(result));
    }
}

// One CTA of D threads for each sequence and head.
__global__ void mean_kernel(const __grid_constant__ QuantizeParams params) {
    const int sequence = blockIdx.x / params.heads;
    const int head = blockIdx.x % params.heads;
    int first = sequence * row_tiles(params, kColumnRows);
    int length = params.rows;
    if (params.cu_seqlens != nullptr) {
        const int begin = varlen_begin(params.cu_seqlens, sequence + 1, params.rows);
        first = first_tile(begin, sequence + 1, kColumnRows);
        length = clamp(params.cu_seqlens[sequence + 1], begin, params.rows) - begin;
    }
    if (params.seqused != nullptr) length = clamp(params.seqused[sequence], 0, length);
    float sum = 0.f;
    const int tiles = ceil_div(length, kColumnRows);
#pragma unroll 8
    for (int i = 0; i < tiles; ++i)
        sum +=
            params.sums[(int64_t{first + i} * params.heads + head) * params.head_dim + threadIdx.x];
    params.mean_out[int64_t{blockIdx.x} * params.head_dim + threadIdx.x] =
        length > 0 ? sum / static_cast<float>(length) : 0.f;
}

template <Columns kColumns>
cudaError_t reduce_columns(const QuantizeParams& params, cudaStream_t stream) {
    const int64_t ctas = tiles_of_heads(params, kColumnRows);
    const int threads = 4 * params.head_dim;
    return params.element_type == ElementType::kFloat16
               ? launch_kernel<columns_kernel<__half, kColumns>>(ctas, threads, 0, params, stream)
               : launch_kernel<columns_kernel<__nv_bfloat16, kColumns>>(ctas, threads, 0, params,
                                                                        stream);
}

}  // namespace flash_ext
