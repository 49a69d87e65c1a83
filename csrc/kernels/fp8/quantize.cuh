// x -> x_8bit and descale, with x = x_8bit * descale up to rounding and the rotation of rotate.cuh.
//
// A tile has 128 rows of a head. With block scales these are what shares a scale: the rows are
// loaded once, stay in registers between maximum and rounding, and are stored once. Other scales
// need the maximum of more than a CTA has, so another kernel computes maxima first. They meet in
// atomicMax, whose result does not depend on the order. The second pass begins with the rows that
// the first one has left in L2, the last ones.
//
// With a the maximum before the factor `norm` of the rotation:
//
//     x_8bit = e4m3(v * (448 / a)),   descale = a * norm / 448        (1 where a = 0)
//
// and with 127 for int8, which has no NaN: where a number of the tile is not finite, descale is
// NaN. v and a are divided by powers of two (problem/quantize.h), which cancel.
#pragma once

#include "kernels/fp8/plain.cuh"
#include "kernels/fp8/rotate.cuh"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

__device__ __forceinline__ float descale_of(const QuantizeParams& params, float amax) {
    if (!(amax > 0.f)) return amax + 1.f;  // of 0 and NaN
    amax = fmaxf(amax, params.least_amax);
    return static_cast<float>(amax * params.descale_of_1);  // in float32 it might overflow
}

// How many values amax and descale have; not for block scales.
FLASH_HOST_DEVICE int64_t scale_count(const QuantizeParams& params) {
    if (params.scales == Scales::kTensor) return 1;
    const int64_t heads = int64_t{params.batch} * params.heads;
    return params.scales == Scales::kHead ? heads : heads * params.head_dim;
}

// Of descales of blocks, CTAs with rows write their own, and the first of a sequence those that the
// sequence does not reach.
template <class Layout>
__device__ __forceinline__ void store_block_descales(const QuantizeParams& params,
                                                     const StreamTile& work, float amax) {
    const RowTile& tile = work.rows;
    if (tile.sequence < 0) return;
    float* descale = params.descale + work.scale_head(params) * params.blocks;
    if (Layout::thread() == 0 && tile.rows > 0 && tile.tile < params.blocks)
        descale[tile.tile] = descale_of(params, amax);
    if (tile.tile > 0) return;
    for (int i = ceil_div(tile.length, kScaleRows) + Layout::thread(); i < params.blocks;
         i += Layout::kCtas * blockDim.x)
        descale[i] = 1.f;
}

// The maximum of a tile's tensor or head, which an earlier kernel has found.
__device__ __forceinline__ float load_amax(const QuantizeParams& params, const StreamTile& work) {
    if (work.rows.sequence < 0) return 0.f;
    return params.amax[params.scales == Scales::kHead ? work.scale_head(params) : 0];
}

// Stores a warp's results: a lane stores those of the vectors 64 i + 2 lane, the first of them at
// `at`, and of the next ones. Rows that are not in use become 0, but not -0.
template <class Layout>
__device__ __forceinline__ void store_results(const QuantizeParams& params,
                                              const TilePosition<Layout>& at,
                                              const WarpRowsAndResults<Layout>& results,
                                              const StreamTile& work) {
    const RowTile& tile = work.rows;
    const int64_t row_bytes = int64_t{params.heads} * params.head_dim;
    uint8_t* target = params.x_8bit +
                      (int64_t{tile.batch} * params.rows + tile.begin + at.row()) * row_bytes +
                      work.head * params.head_dim + at.column();
    const uint32_t of_lane =
        ptx::shared_address(&results.x_8bit[Layout::swizzled_piece(2 * ptx::lane_not_hoisted())]);
#pragma unroll
    for (int i = 0; i < Layout::kThreadVectors / 2; ++i) {
        const int row = at.row() + 2 * Layout::kVectorRows * i;
        uint32_t x[4];
        ptx::ld_shared_v4(x, Layout::piece_address(of_lane, 64 * i));
        if (row >= tile.used) x[0] = x[1] = x[2] = x[3] = 0;
        if (row < tile.rows) *reinterpret_cast<uint4*>(target) = {x[0], x[1], x[2], x[3]};
        target += 2 * Layout::kVectorRows * row_bytes;
    }
}

template <class Rows>
__device__ __forceinline__ void quantize_tiles(const QuantizeParams& params) {
    using Layout = typename Rows::Layout;
    __shared__ TileMaxima<Layout> maxima;
    maxima.init();
    const bool second_pass = params.scales != Scales::kBlock;
    TileStream<WarpRowsAndResults<Layout>, Rows> stream(params, second_pass);
    const TilePosition<Layout> results_at(params, 2 * (threadIdx.x % 32));
    Rows rows(params);
    rows.load_mean(params, stream.next(), stream.storage.mean);  // while the rows are on their way
    maxima.wait_for_init();

    if (second_pass) {
        ptx::wait_for_grid_before();  // for the maxima
        const int64_t step = int64_t{gridDim.x} * blockDim.x;
        for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < scale_count(params);
             i += step)
            params.descale[i] = descale_of(params, params.amax[i]);
    }

    for (bool more = true; more;) {
        const StreamTile& work = stream.read(params, rows);
        rows.prepare(params, work, stream.storage.mean);
        float largest = rows.amax_before_last();
        rows.last_butterflies();
        if (__any_sync(0xffffffff, !(largest <= FLT_MAX))) {
            if (stream.repeat()) continue;
            if constexpr (!Rows::kRepeats) rows.spoil();
            largest = params.to_int8 ? CUDART_NAN_F : rows.amax();
        }
        if (params.scales == Scales::kBlock) {
            const float amax =
                maxima.reduce(largest * (work.divisor / kSumDivisor), stream.number());
            store_block_descales<Layout>(params, work, amax);
            const float factor = factor_of(params, amax) * work.divisor;
            if (params.to_int8) {
                rows.template write<Int8>(stream.storage, factor);
            } else {
                rows.template write<Float8>(stream.storage, factor);
            }
        } else if (Rows::kDim > 0 || params.scales != Scales::kChannel) {
            const float factor = factor_of(params, load_amax(params, work)) * work.divisor;
            rows.template write<Float8>(stream.storage, factor);
        } else if constexpr (Rows::kDim == 0) {
            float amax[8] = {};
            if (work.rows.sequence >= 0) {
                const float4* source = reinterpret_cast<const float4*>(
                    params.amax + work.scale_head(params) * params.head_dim + rows.column());
                const float4 low = source[0], high = source[1];
                amax[0] = low.x, amax[1] = low.y, amax[2] = low.z, amax[3] = low.w;
                amax[4] = high.x, amax[5] = high.y, amax[6] = high.z, amax[7] = high.w;
            }
            float factors[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) factors[e] = factor_of(params, amax[e]) * work.divisor;
            rows.write(stream.storage, factors);
        }
        __syncwarp();  // the warp's results are complete
        store_results(params, results_at, stream.storage, work);
        more = stream.next().is_valid;
    }
}

template <class Rows>
__global__ void __maxnreg__(Rows::kRegisters)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
    if constexpr (kCudaArch >= 900) quantize_tiles<Rows>(params);
}

// Zeros for atomicMax. A kernel, since the next one may begin early after a kernel, but not after a
// memset.
inline constexpr int kZeroThreads = 256;
__global__ void __launch_bounds__(kZeroThreads)
    zero_amax_kernel(const __grid_constant__ QuantizeParams params) {
    ptx::launch_dependents();
    const int64_t i = int64_t{blockIdx.x} * kZeroThreads + threadIdx.x;
    if (i < scale_count(params)) params.amax[i] = 0.f;
}

// The maxima of rotated rows, to the amax of the tensor or of the heads.
template <class Rows>
__device__ __forceinline__ void amax_of_tiles(const QuantizeParams& params) {
    __shared__ uint32_t maxima[32];
    TileStream<WarpRows<typename Rows::Layout>, Rows> stream(params, false);
    Rows rows(params);
    rows.load_mean(params, stream.next(), stream.storage.mean);  // while the rows are on their way
    if (threadIdx.x % 32 == 0) stream.storage.amax = 0;
    ptx::wait_for_grid_before();  // for zeros in amax
    for (bool more = true; more;) {
        const StreamTile& work = stream.read(params, rows);
        rows.prepare(params, work, stream.storage.mean);
        float largest = rows.amax_before_last();
        if (__any_sync(0xffffffff, !(largest <= FLT_MAX))) {
            if (stream.repeat()) continue;
            rows.last_butterflies();
            largest = rows.amax();
        }
        more = stream.next().is_valid;
        largest *= work.divisor / kSumDivisor;
        const uint32_t of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
        if (threadIdx.x % 32 > 0 || work.rows.used == 0) continue;
        if (params.scales == Scales::kHead) {
            atomicMax(reinterpret_cast<uint32_t*>(params.amax) + work.scale_head(params), of_warp);
        } else {
            stream.storage.amax = max(stream.storage.amax, of_warp);
        }
    }
    ptx::launch_dependents();
    if (params.scales == Scales::kHead) return;
    __syncwarp();  // lane 0 has stored the warp's maximum
    const float amax = cta_max(__uint_as_float(stream.storage.amax), maxima);
    if (threadIdx.x == 0)
        atomicMax(reinterpret_cast<uint32_t*>(params.amax), __float_as_uint(amax));
}

template <class Rows>
__global__ void __maxnreg__(Rows::kRegisters)
    amax_kernel(const __grid_constant__ QuantizeParams params) {
    if constexpr (kCudaArch >= 900) amax_of_tiles<Rows>(params);
}

}  // namespace flash_ext
