// x -> x_fp8 and descale, with x = x_fp8 * descale up to rounding and the rotation of rotate.cuh.
//
// One CTA has 128 rows of a head. With block scales these are what shares a scale: the rows are
// loaded once, stay in registers between maximum and rounding, and are stored once. Other scales
// need the maximum of more than a CTA has, so another kernel computes maxima first. They meet in
// atomicMax, whose result does not depend on the order.
//
// With a the maximum before the factor `norm` of the rotation:
//
//     x_fp8 = e4m3(v * (448 / a)),   descale = a * norm / 448        (1 where a = 0)
#pragma once

#include <cuda_fp8.h>

#include "kernels/fp8/rotate.cuh"
#include "plan/quantize.h"

namespace flash_ext {

__device__ __forceinline__ float inverse_of(float amax) {
    return kMaxFloat8 / fmaxf(amax, kMinAmax);
}

__device__ __forceinline__ float descale_of(float amax, float norm) {
    return amax > 0.f ? fmaxf(amax, kMinAmax) * norm / kMaxFloat8 : 1.f;
}

// How many values amax and descale have; not for block scales.
FLASH_HOST_DEVICE int64_t scale_count(const QuantizeParams& params) {
    if (params.scales == Scales::kTensor) return 1;
    const int64_t heads = int64_t{params.batch} * params.heads;
    return params.scales == Scales::kHead ? heads : heads * params.head_dim;
}

// Of descales of blocks, CTAs with rows write their own, and the first of a sequence those that the
// sequence does not reach.
__device__ __forceinline__ void store_block_descales(const QuantizeParams& params,
                                                     const RowTile& tile, int head, float amax) {
    if (tile.sequence < 0) return;
    float* descale =
        params.descale + (int64_t{tile.sequence} * params.heads + head) * params.blocks;
    if (threadIdx.x == 0 && tile.rows > 0 && tile.tile < params.blocks)
        descale[tile.tile] = descale_of(amax, params.norm);
    if (tile.tile > 0) return;
    for (int i = ceil_div(tile.length, kScaleRows) + threadIdx.x; i < params.blocks;
         i += blockDim.x)
        descale[i] = 1.f;
}

template <class Element, int kHadamardDim>
__global__ void __launch_bounds__(kMaxQuantizeThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
    using Rows = RotatedRows<kHadamardDim>;
    __shared__ __align__(16) float inverses[256];  // by column, of channel scales
    const auto [tile, head, tile_idx] = tile_of_head(params, kScaleRows);
    Rows rows(params);
    rows.template load<Element>(params, tile, head);

    float inverse = 0.f;  // rows of no sequence become zeros
    const int64_t scale_head = int64_t{tile.sequence} * params.heads + head;
    if (params.scales == Scales::kChannel) {
        if (threadIdx.x < params.head_dim)
            inverses[threadIdx.x] =
                tile.sequence < 0
                    ? 0.f
                    : inverse_of(params.amax[scale_head * params.head_dim + threadIdx.x]);
        __syncthreads();  // `inverses` is complete
    } else if (params.scales != Scales::kBlock && tile.sequence >= 0) {
        inverse = inverse_of(params.amax[params.scales == Scales::kHead ? scale_head : 0]);
    }

    rows.template rotate<Element>(params, tile, head);
    if (params.scales == Scales::kBlock) {
        const float amax = cta_max(rows.amax());
        inverse = inverse_of(amax);
        store_block_descales(params, tile, head, amax);
    } else {
        const int64_t step = int64_t{gridDim.x} * blockDim.x;
        for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < scale_count(params);
             i += step)
            params.descale[i] = descale_of(params.amax[i], params.norm);
    }

#pragma unroll
    for (int n = 0; n < Rows::kUnits; ++n) {
        const int r = rows.row_of(n);
        if (r >= tile.rows) continue;
        const int64_t row = int64_t{tile.batch} * params.rows + tile.begin + r;
        uint8_t* target = params.x_fp8 + (row * params.heads + head) * params.head_dim;
#pragma unroll
        for (int j = 0; j < Rows::kVectors; ++j) {
            uint32_t words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 factor{inverse, inverse};
                if (params.scales == Scales::kChannel)
                    factor = *reinterpret_cast<float2*>(&inverses[rows.column_of(j) + 2 * i]);
                const float2 pair{rows.v[n][j][2 * i] * factor.x,
                                  rows.v[n][j][2 * i + 1] * factor.y};
                const uint32_t packed = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
                words[i / 2] |= packed << 16 * (i % 2);
            }
            const bool used = r < tile.used;  // otherwise 0, but not -0
            *reinterpret_cast<uint2*>(target + rows.column_of(j)) =
                uint2{used ? words[0] : 0, used ? words[1] : 0};
        }
    }
}

// The maximum of 128 rows, to the amax of the tensor or of the head.
template <class Element, int kHadamardDim>
__global__ void __launch_bounds__(kMaxQuantizeThreads)
    amax_kernel(const __grid_constant__ QuantizeParams params) {
    const auto [tile, head, tile_idx] = tile_of_head(params, kScaleRows);
    if (tile.used == 0) return;
    RotatedRows<kHadamardDim> rows(params);
    rows.template load<Element>(params, tile, head);
    rows.template rotate<Element>(params, tile, head);
    const float amax = cta_max(rows.amax());
    if (threadIdx.x > 0) return;
    const int64_t index =
        params.scales == Scales::kHead ? int64_t{tile.sequence} * params.heads + head : 0;
    atomicMax(reinterpret_cast<int*>(params.amax) + index, __float_as_int(amax));
}

}  // namespace flash_ext
