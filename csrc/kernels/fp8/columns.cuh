// Reductions over the rows of a head: maxima of columns, from which those of a head or of the
// tensor follow, and the mean.
//
// One CTA has kColumnRows rows of a head and 2 D threads. A thread has eight columns and every 16th
// row, so a warp reads 512 bytes at a time, and has eight such loads in flight; with 1024 threads
// an SM has 128 KB. The 16 results of a column meet in shared memory. Sums of several CTAs are
// added by a second kernel, in a fixed order: means repeat bit by bit.
#pragma once

#include "kernels/fp8/packed_max.cuh"
#include "kernels/fp8/rotate.cuh"
#include "plan/quantize.h"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

inline constexpr int kRowGroups = 16;

enum class Columns { kAmax, kAmaxWithoutMean, kSum };

// The factor of rows in sums for a mean: with it no sum overflows. A power of two, less than
// 1 / length but at least half of it.
__device__ __forceinline__ float share_of(int length) {
    return __uint_as_float((95 + __clz(length)) << 23);
}

// Of a thread's eight columns, over its rows: maxima over kSumDivisor, or sums of shares.
template <class Element, Columns kColumns>
class ColumnResults {
 public:
    // `mean`: of these columns. `share`: of a row.
    __device__ ColumnResults(const float* mean, float share) : share_(share) {
        if constexpr (kColumns == Columns::kAmaxWithoutMean)
#pragma unroll
            for (int e = 0; e < 8; ++e) mean_[e] = mean == nullptr ? 0.f : kFactor * mean[e];
    }

    // A row in use.
    __device__ void include(const uint4& x) {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (kColumns == Columns::kAmax) {
                packed_[w].include(words[w]);
                continue;
            }
            const float2 pair = ptx::unpack<Element>(words[w]);
            const float values[2] = {pair.x, pair.y};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& result = of_column_[2 * w + e];
                if constexpr (kColumns == Columns::kSum) {
                    result = fmaf(values[e], share_, result);
                } else {
                    const float value = fabsf(fmaf(values[e], kFactor, -mean_[2 * w + e]));
                    if (value <= FLT_MAX) result = fmaxf(result, value);
                }
            }
        }
    }

    // All that `include` had so far. Of packed maxima, infinite where an element is.
    __device__ void get(float (&results)[8]) const {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            float2 pair{of_column_[e], of_column_[e + 1]};
            if constexpr (kColumns == Columns::kAmax) pair = packed_[e / 2].values();
            const float scale = kColumns == Columns::kSum    ? 1.f
                                : kColumns == Columns::kAmax ? 1.f / kSumDivisor
                                                             : 1.f / (kFactor * kSumDivisor);
            results[e] = pair.x * scale;
            results[e + 1] = pair.y * scale;
        }
    }

 private:
    static constexpr float kFactor = 1.f / kDifferenceDivisor;

    float of_column_[8] = {};
    float mean_[8] = {};  // times kFactor
    float share_;
    PackedMax<Element> packed_[4];
};

template <class Element, Columns kColumns>
__global__ void __launch_bounds__(kMaxQuantizeThreads, 2)
    columns_kernel(const __grid_constant__ QuantizeParams params) {
    __shared__ __align__(16) float partial[kRowGroups * kMaxQuantizeDim];  // (row group, D)
    __shared__ uint32_t maxima[32];
    ptx::launch_dependents();
    const int tiles = row_tiles(params, kColumnRows);
    const int tile_idx = blockIdx.x / params.heads;
    const int head = blockIdx.x - tile_idx * params.heads;
    const int batch = tile_idx / tiles;
    const RowTile tile = row_tile(params, batch, tile_idx - batch * tiles, kColumnRows);

    const int vectors = params.head_dim / 8;
    const int group = threadIdx.x / vectors;
    const int column = threadIdx.x % vectors * 8;
    const Element* x = static_cast<const Element*>(params.x.data) +
                       tile.batch * params.x.batch_stride + head * params.x.head_stride + column +
                       (tile.begin + group) * params.x.row_stride;
    const int rows = tile.used - group;  // from x on
    const int64_t scale_head = int64_t{tile.sequence} * params.heads + head;
    const float* mean = params.mean == nullptr || tile.used == 0
                            ? nullptr
                            : params.mean + scale_head * params.head_dim + column;

    const auto reduce = [&](auto& results, auto load) {
        constexpr int kTogether = 8;  // rows whose loads are in flight
        for (int first = 0; first < rows; first += kRowGroups * kTogether) {
            uint4 raw[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int r = first + kRowGroups * i;
                raw[i] = uint4{0, 0, 0, 0};
                if (r < rows) raw[i] = load(x + r * params.x.row_stride);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (first + kRowGroups * i < rows) results.include(raw[i]);
        }
    };
    const auto load = [](const Element* p) { return __ldg(reinterpret_cast<const uint4*>(p)); };
    const auto reduce_rows = [&](auto& results) {
        if (params.aligned) {
            reduce(results, load);
        } else {
            reduce(results, [](const Element* p) { return load_8(p); });
        }
    };
    float found[8];
    const float share = share_of(tile.length);
    ColumnResults<Element, kColumns> results(mean, share);
    reduce_rows(results);
    results.get(found);
    if constexpr (kColumns == Columns::kAmax) {
        float largest = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = fmaxf(largest, found[e]);
        if (largest > FLT_MAX) {  // again, one by one
            ColumnResults<Element, Columns::kAmaxWithoutMean> finite(nullptr, share);
            reduce_rows(finite);
            finite.get(found);
        }
    }

    if constexpr (kColumns != Columns::kSum) ptx::wait_for_grid_before();  // for zeros in amax
    if (kColumns != Columns::kSum && params.scales != Scales::kChannel) {
        float largest = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = fmaxf(largest, found[e]);
        largest = cta_max(largest, maxima);
        if (threadIdx.x > 0 || tile.used == 0) return;
        atomicMax(reinterpret_cast<uint32_t*>(params.amax) +
                      (params.scales == Scales::kHead ? scale_head : 0),
                  __float_as_uint(largest));
        return;
    }
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
        params.sums[(int64_t{tile_idx} * params.heads + head) * params.head_dim + d] = result;
    } else if (tile.used > 0) {
        atomicMax(reinterpret_cast<uint32_t*>(params.amax) + scale_head * params.head_dim + d,
                  __float_as_uint(result));
    }
}

// One CTA of kMeanGroups D threads for each sequence and head; group g has every kMeanGroups-th
// tile.
inline constexpr int kMeanGroups = 4;
__global__ void __launch_bounds__(kMeanGroups* kMaxQuantizeDim)
    mean_kernel(const __grid_constant__ QuantizeParams params) {
    __shared__ float partial[kMeanGroups * kMaxQuantizeDim];  // (group, D)
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
    const int64_t ctas = tiles_of_heads(params, kColumnRows);
    const int threads = kRowGroups * params.head_dim / 8;
    return params.element_type == ElementType::kFloat16
               ? launch_kernel<columns_kernel<__half, kColumns>>(ctas, threads, 0, params, stream,
                                                                 {.pdl = pdl})
               : launch_kernel<columns_kernel<__nv_bfloat16, kColumns>>(ctas, threads, 0, params,
                                                                        stream, {.pdl = pdl});
}

}  // namespace flash_ext
