// The scales of quantization, and rounding with them.
#pragma once

#include <cstdint>

#include "problem/quantize.h"
#include "ptx/float8.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

// The factor from numbers to results, from the maximum over kSumDivisor.
FLASH_DEVICE float factor_of(const QuantizeParams& params, float amax) {
    return params.numerator / fmaxf(amax, params.least_amax);
}

FLASH_DEVICE float descale_of(const QuantizeParams& params, float amax) {
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

// By all threads of the grid.
FLASH_DEVICE void store_descales(const QuantizeParams& params) {
    const int64_t step = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < scale_count(params);
         i += step)
        params.descale[i] = descale_of(params, params.amax[i]);
}

// The maximum of the tensor or of a head; not for scales of blocks and channels.
FLASH_DEVICE float& amax_of(const QuantizeParams& params, int64_t scale_head) {
    return params.amax[params.scales == Scales::kHead ? scale_head : 0];
}

// The factors of eight columns from `column` on, of a scale for each.
FLASH_DEVICE void load_channel_factors(float (&factors)[8], const QuantizeParams& params,
                                       int64_t scale_head, int column) {
    const auto* amax =
        reinterpret_cast<const float4*>(params.amax + scale_head * params.head_dim + column);
    const float4 low = amax[0], high = amax[1];
    const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) factors[e] = factor_of(params, all[e]);
}

// Eight numbers times their factors, rounded to int8, ties to even. They are at most 127 units in
// magnitude; what a NaN becomes does not matter, as its scale is NaN.
FLASH_DEVICE uint2 scaled(Int8, const float* x, const float (&factors)[8]) {
    // Added to a number, has its units in the low bits.
    constexpr float kOneAndAHalf = 0x1.8p23f * kInt8Unit;
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        bits[i] = __float_as_uint(__fmul_rn(x[i], factors[i]) + kOneAndAHalf);
    const auto pack = [&](int i) {
        return ptx::byte_permute(ptx::byte_permute(bits[i], bits[i + 1], 0x0040),
                                 ptx::byte_permute(bits[i + 2], bits[i + 3], 0x0040), 0x5410);
    };
    return {pack(0), pack(4)};
}

// The same, rounded to e4m3.
FLASH_DEVICE uint2 scaled(Float8, const float* x, const float (&factors)[8]) {
    const auto pack = [&](int i) {
        return ptx::pack_e4m3(x[i] * factors[i], x[i + 1] * factors[i + 1],
                              x[i + 2] * factors[i + 2], x[i + 3] * factors[i + 3]);
    };
    return {pack(0), pack(4)};
}

}  // namespace flash_ext
