// Reductions over the rows of a head, column by column: maxima of what is finite, over
// kSumDivisor, and the mean.
//
// One CTA has kColumnRows rows of a head and 2 D threads. A thread has eight columns and every 16th
// row, so a warp reads 512 bytes at a time, and has eight such loads in flight; with 1024 threads
// an SM has 128 KB. The 16 results of a column meet in shared memory. Sums of several CTAs are
// added by a second kernel, in a fixed order: means repeat bit by bit.
#pragma once

#include "kernels/fp8/tile_stream.cuh"
#include "plan/launchers.h"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

inline constexpr int kRowGroups = 16;

enum class Columns { kAmax, kSum };

// The factor of rows in sums for a mean: with it no sum overflows. A power of two, less than
// 1 / length but at least half of it.
FLASH_DEVICE float share_of(int length) { return __uint_as_float((95 + __clz(length)) << 23); }

template <class Element, Columns kColumns>
__global__ void __launch_bounds__(kMaxQuantizeThreads, 2)
    columns_kernel(const __grid_constant__ QuantizeParams params) {
    __shared__ __align__(16) float partial[kRowGroups * kMaxQuantizeDim];  // (row group, D)
    const RowTile tile = row_tile(params, blockIdx.x, kColumnRows);

    const int vectors = params.head_dim / 8;
    const int group = threadIdx.x / vectors;
    const int column = threadIdx.x % vectors * 8;
    const Element* x = static_cast<const Element*>(params.x.data) +
                       tile.batch * params.x.batch_stride + tile.head * params.x.head_stride +
                       column + (tile.begin + group) * params.x.row_stride;
    const int rows = tile.used - group;  // from x on
    const float share = share_of(tile.length);
    float found[8] = {};
    const auto include = [&](const uint4& raw) {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float2 pair = ptx::unpack<Element>(words[e / 2]);
            const float value = e % 2 == 0 ? pair.x : pair.y;
            if constexpr (kColumns == Columns::kSum) {
                found[e] = fmaf(value, share, found[e]);
            } else if (fabsf(value) <= FLT_MAX) {
                found[e] = fmaxf(found[e], fabsf(value));
            }
        }
    };
    constexpr int kTogether = 8;  // rows whose loads are in flight
    for (int first = 0; first < rows; first += kRowGroups * kTogether) {
        uint4 raw[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int r = first + kRowGroups * i;
            raw[i] = uint4{0, 0, 0, 0};
            if (r < rows)
                raw[i] = __ldg(reinterpret_cast<const uint4*>(x + r * params.x.row_stride));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) include(raw[i]);
    }
    ptx::wait_for_grid_before();  // for zeros in amax
    ptx::launch_dependents();     // which know then that the kernels before this one have ended
    float4* target = reinterpret_cast<float4*>(&partial[group * params.head_dim + column]);
    target[0] = {found[0], found[1], found[2], found[3]};
    target[1] = {found[4], found[5], found[6], found[7]};
    __syncthreads();  // the results of all row groups are complete
    const int d = threadIdx.x;
    if (d >= params.head_dim) return;
    float result = partial[d];
#pragma unroll
    for (int i = 1; i < kRowGroups; ++i) {
        const float other = partial[i * params.head_dim + d];
        result = kColumns == Columns::kSum ? result + other : fmaxf(result, other);
    }
    if constexpr (kColumns == Columns::kSum) {
        params.sums[int64_t{blockIdx.x} * params.head_dim + d] = result;
    } else if (tile.used > 0) {
        atomicMax(reinterpret_cast<uint32_t*>(params.amax) +
                      tile.scale_head(params) * params.head_dim + d,
                  __float_as_uint(result * (1.f / kSumDivisor)));
    }
}

// One CTA of kMeanGroups D threads for each sequence and head; group g has every kMeanGroups-th
// tile.
inline constexpr int kMeanGroups = 4;
__global__ void __launch_bounds__(kMeanGroups* kMaxQuantizeDim)
    mean_kernel(const __grid_constant__ QuantizeParams params) {
    __shared__ float partial[kMeanGroups * kMaxQuantizeDim];  // (group, D)
    ptx::launch_dependents();
    const int sequence = blockIdx.x / params.heads;
    const int head = blockIdx.x % params.heads;
    const int group = threadIdx.x / params.head_dim;
    const int d = threadIdx.x % params.head_dim;
    int first = sequence * row_tiles(params, kColumnRows);
    int length = params.rows;
    if (params.cu_seqlens != nullptr) {
        const int begin = varlen_begin(params.cu_seqlens, sequence + 1, params.rows);
        first = first_tile(begin, sequence + 1, kColumnRows);
        length = clamp(params.cu_seqlens[sequence + 1], begin, params.rows) - begin;
    }
    const float share = share_of(length);
    if (params.seqused != nullptr) length = clamp(params.seqused[sequence], 0, length);
    ptx::wait_for_grid_before();  // for the sums
    float sum = 0.f;
    const int tiles = ceil_div(length, kColumnRows);
#pragma unroll 8
    for (int i = group; i < tiles; i += kMeanGroups)
        sum += params.sums[(int64_t{first + i} * params.heads + head) * params.head_dim + d];
    partial[threadIdx.x] = sum;
    __syncthreads();  // the sums of all groups are complete
    if (group > 0) return;
#pragma unroll
    for (int i = 1; i < kMeanGroups; ++i) sum += partial[i * params.head_dim + d];
    params.mean_out[int64_t{blockIdx.x} * params.head_dim + d] =
        length > 0 ? sum / (share * static_cast<float>(length)) : 0.f;
}

template <Columns kColumns>
cudaError_t reduce_columns(const QuantizeParams& params, cudaStream_t stream, bool pdl) {
    const int64_t ctas = row_tile_count(params, kColumnRows);
    const int threads = kRowGroups * params.head_dim / 8;
    return dispatch_element(params.element_type, [&](auto element) {
        return launch_kernel<columns_kernel<decltype(element), kColumns>>(ctas, threads, 0, params,
                                                                          stream, {.pdl = pdl});
    });
}

cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream, bool pdl) {
    const cudaError_t status = reduce_columns<Columns::kSum>(params, stream, pdl);
    if (status != cudaSuccess) return status;
    return launch_kernel<mean_kernel>(int64_t{params.batch} * params.heads,
                                      kMeanGroups * params.head_dim, 0, params, stream,
                                      {.pdl = true});
}

}  // namespace flash_ext
