// Tiles of rows in registers, as both quantization kernels have them, and what is done before
// rounding: the mean is subtracted, and rows are rotated (incoherent processing, FlashAttention-3,
// section 3.3): x -> x diag(signs) H, where H is an orthonormal Hadamard matrix. q and k with the
// same rotation have the same products, and outliers are spread over the columns.
//
// Where D is no power of two, H is block-diagonal. A *unit* is the part of a row that one block of
// H rotates: all of the row, or one of D / kDim parts. A unit belongs to kLanes neighboring lanes,
// and lane l holds of it the elements
//
//     8 (kLanes j + l) + e      j < kVectors, e < 8
//
// so each load takes 16 bytes, and the loads of a unit's lanes are adjacent. H is a product of
// log2(kDim) butterflies between elements at distance 1, 2, 4 (same vector), 8, ... (another lane),
// 8 kLanes, ... (another vector of the same lane). Few lanes mean few shuffles, which would
// otherwise take longer than memory.
//
// A CTA has 4 D threads, and each holds 32 elements of 128 rows. With at most 64 registers a
// thread, an SM has all of its 64 KB of rows in registers or on the way, as two CTAs at D 128.
#pragma once

#include <math_constants.h>

#include <cfloat>

#include "kernels/common/launch.cuh"
#include "problem/quantize.h"
#include "ptx/math.cuh"
#include "schedule/row_tiles.cuh"

namespace flash_ext {

inline constexpr int kMaxQuantizeThreads = 1024;  // 4 D; also the bound on registers

template <int kHadamardDim>
struct RotatedRows {
    static constexpr int kDim = kHadamardDim;
    static constexpr int kLanes = kDim == 16 ? 2 : kDim == 256 ? 8 : 4;
    static constexpr int kVectors = kDim / 8 / kLanes;
    static constexpr int kUnits = 4 / kVectors;  // per thread, of different rows
    static constexpr int kRowStep = kScaleRows / kUnits;
    static_assert(kLanes * kVectors * 8 == kDim && kUnits * kVectors == 4);

    int row;     // of the first unit, in the tile
    int lane;    // in the unit
    int column;  // of the unit

    uint4 raw[kUnits][kVectors];
    float v[kUnits][kVectors][8];

    __device__ explicit RotatedRows(const QuantizeParams& params) {
        const int units_per_row = params.head_dim / kDim;
        const int unit = threadIdx.x / kLanes;
        row = unit / units_per_row;
        column = unit % units_per_row * kDim;
        lane = threadIdx.x % kLanes;
    }

    __device__ int row_of(int n) const { return row + kRowStep * n; }
    __device__ int column_of(int j) const { return column + 8 * (kLanes * j + lane); }

    // Rows that are not in use are zeros.
    template <class Element>
    __device__ void load(const QuantizeParams& params, const RowTile& tile, int head) {
        const Element* x = static_cast<const Element*>(params.x.data) +
                           tile.batch * params.x.batch_stride + head * params.x.head_stride;
        if (params.aligned) {
#pragma unroll
            for (int n = 0; n < kUnits; ++n)
#pragma unroll
                for (int j = 0; j < kVectors; ++j) {
                    const int r = row_of(n);
                    raw[n][j] = uint4{0, 0, 0, 0};
                    if (r < tile.used)
                        raw[n][j] = __ldg(reinterpret_cast<const uint4*>(
                            x + (tile.begin + r) * params.x.row_stride + column_of(j)));
                }
        } else {
            load_unaligned(params, tile, reinterpret_cast<const uint16_t*>(x));
        }
    }

    // To v: the elements as float, without the mean, rotated, but not divided by sqrt(kDim). What
    // is not finite becomes NaN, which has no part in a maximum.
    template <class Element>
    __device__ void rotate(const QuantizeParams& params, const RowTile& tile, int head) {
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                const uint32_t words[4] = {raw[n][j].x, raw[n][j].y, raw[n][j].z, raw[n][j].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = ptx::unpack<Element>(words[i]);
                    v[n][j][2 * i] = pair.x;
                    v[n][j][2 * i + 1] = pair.y;
                }
            }
        if (params.mean != nullptr) subtract_mean(params, tile, head);
        if (params.signs != nullptr) {
            change_signs(params);
            butterflies();
        }
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    v[n][j][e] = fabsf(v[n][j][e]) <= FLT_MAX ? v[n][j][e] : CUDART_NAN_F;
    }

    __device__ float amax() const {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(v[n][j][e]));
        return largest;
    }

 private:
    __device__ void load_unaligned(const QuantizeParams& params, const RowTile& tile,
                                   const uint16_t* x) {
#pragma unroll
        for (int n = 0; n < kUnits; ++n)
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                const int r = row_of(n);
                uint32_t words[4] = {0, 0, 0, 0};
                if (r < tile.used) {
                    const uint16_t* p = x + (tile.begin + r) * params.x.row_stride + column_of(j);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        words[i] = p[2 * i] | static_cast<uint32_t>(p[2 * i + 1]) << 16;
                }
                raw[n][j] = uint4{words[0], words[1], words[2], words[3]};
            }
    }

    __device__ void subtract_mean(const QuantizeParams& params, const RowTile& tile, int head) {
        if (tile.used == 0) return;
        const float* mean =
            params.mean + (int64_t{tile.sequence} * params.heads + head) * params.head_dim;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 m =
                    __ldg(reinterpret_cast<const float4*>(mean + column_of(j) + 4 * half));
#pragma unroll
                for (int n = 0; n < kUnits; ++n) {
                    if (row_of(n) >= tile.used) continue;
                    float* x = &v[n][j][4 * half];
                    x[0] -= m.x;
                    x[1] -= m.y;
                    x[2] -= m.z;
                    x[3] -= m.w;
                }
            }
    }

    __device__ void change_signs(const QuantizeParams& params) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(params.signs + column_of(j)));
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32_t sign = (e < 4 ? bytes.x : bytes.y) << (24 - e % 4 * 8) & 0x80000000;
#pragma unroll
                for (int n = 0; n < kUnits; ++n)
                    v[n][j][e] = __uint_as_float(__float_as_uint(v[n][j][e]) ^ sign);
            }
        }
    }

    static __device__ void butterfly(float& a, float& b) {
        const float difference = a - b;
        a += b;
        b = difference;
    }

    // In the order of distances, as flash_ext/cpu/quantize.py has it: so results are the same.
    __device__ void butterflies() {
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if ((e & distance) == 0) butterfly(v[n][j][e], v[n][j][e + distance]);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const bool second = (lane & distance) != 0;
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float own = v[n][j][e];
                        const float other = __shfl_xor_sync(0xffffffff, own, distance);
                        v[n][j][e] = other + (second ? -own : own);
                    }
            }
#pragma unroll
            for (int distance = 1; distance < kVectors; distance *= 2)
#pragma unroll
                for (int j = 0; j < kVectors; ++j)
                    if ((j & distance) == 0)
#pragma unroll
                        for (int e = 0; e < 8; ++e) butterfly(v[n][j][e], v[n][j + distance][e]);
        }
    }
};

// The maximum of a CTA's values, none of them negative, in all threads. Bits of such floats are in
// the order of their values.
__device__ __forceinline__ float cta_max(float x) {
    __shared__ uint32_t maxima[32];
    const uint32_t of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(x));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = of_warp;
    __syncthreads();  // the maxima of all warps are complete
    const uint32_t lane = threadIdx.x % 32;
    return __uint_as_float(
        __reduce_max_sync(0xffffffff, lane < blockDim.x / 32 ? maxima[lane] : 0));
}

// Calls launch(element tag, constant hadamard_dim).
template <class Launch>
cudaError_t dispatch_rotation(const QuantizeParams& params, Launch launch) {
    const auto with_element = [&](auto dim) {
        return params.element_type == ElementType::kFloat16 ? launch(__half{}, dim)
                                                            : launch(__nv_bfloat16{}, dim);
    };
    switch (params.hadamard_dim) {
        case 16:
            return with_element(std::integral_constant<int, 16>{});
        case 32:
            return with_element(std::integral_constant<int, 32>{});
        case 64:
            return with_element(std::integral_constant<int, 64>{});
        case 128:
            return with_element(std::integral_constant<int, 128>{});
        case 256:
            return with_element(std::integral_constant<int, 256>{});
    }
    return cudaErrorInvalidValue;
}

// A CTA's tile and head. Heads are adjacent in memory, so they are the fastest index.
struct TileOfHead {
    RowTile tile;
    int head;
    int tile_idx;  // among all tiles of a head
};

__device__ __forceinline__ TileOfHead tile_of_head(const QuantizeParams& params, int block) {
    const int tile_idx = blockIdx.x / params.heads;
    const int head = blockIdx.x - tile_idx * params.heads;
    const int tiles = row_tiles(params, block);
    const int batch = tile_idx / tiles;
    return {row_tile(params, batch, tile_idx - batch * tiles, block), head, tile_idx};
}

inline int64_t tiles_of_heads(const QuantizeParams& params, int block) {
    const int batches = params.cu_seqlens == nullptr ? max_of(params.batch, 1) : 1;
    return int64_t{batches} * row_tiles(params, block) * params.heads;
}

}  // namespace flash_ext
