// A copy of a bias that TMA can load in tiles, see kernels/fa3/bias_tiles.cuh. A thread has eight
// numbers of a row. Memory is the limit.
#pragma once

#include "kernels/common/launch.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kTileBiasThreads = 256;

struct TileBiasParams {
    Bias given;
    TiledBias copy;
};

FLASH_HOST_DEVICE int64_t tile_bias_chunks(const TiledBias& copy) {
    return copy.sizes[0] * (copy.sizes[1] / copy.parts) * copy.sizes[2] * (copy.sizes[3] / 8);
}

// The nearest number of 16 bits that is not farther from zero, so that finite numbers stay finite.
template <class Element>
FLASH_DEVICE Element rounded_towards_zero(float x) {
    if constexpr (std::is_same_v<Element, __half>) {
        return __float2half_rz(x);
    } else {
        return __float2bfloat16_rz(x);
    }
}

template <class Element, class Given>
__global__ void __launch_bounds__(kTileBiasThreads)
    tile_bias_kernel(const __grid_constant__ TileBiasParams params) {
    const TiledBias& copy = params.copy;
    const int64_t index = int64_t{blockIdx.x} * kTileBiasThreads + threadIdx.x;
    if (index >= tile_bias_chunks(copy)) return;
    const int chunks = copy.sizes[3] / 8;
    const int heads = copy.sizes[1] / copy.parts;
    const int col = index % chunks * 8;
    const int row = index / chunks % copy.sizes[2];
    const int head = index / chunks / copy.sizes[2] % heads;
    const int batch = index / chunks / copy.sizes[2] / heads;
    const Bias& bias = params.given;
    const auto* given = static_cast<const Given*>(bias.data) + batch * bias.strides[0] +
                        head * bias.strides[1] + row * bias.strides[2];
    union {
        Element numbers[8];
        uint4 chunk;
    } parts[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int key = bias.sizes[3] == 1 ? 0 : col + i;
        const bool exists = key < bias.sizes[3];
        const Given x = exists ? given[key] : Given{};
        if constexpr (std::is_same_v<Given, float>) {
            const Element high = rounded_towards_zero<Element>(x);
            const float rest = isinf(x) ? 0.f : x - ptx::to_float(high);
            parts[0].numbers[i] = high;
            parts[1].numbers[i] = ptx::from_float<Element>(rest);
        } else if constexpr (std::is_same_v<Given, bool>) {
            parts[0].numbers[i] = ptx::from_float<Element>(x ? 0.f : -INFINITY);
        } else {
            parts[0].numbers[i] = x;
        }
    }
    auto* first = static_cast<Element*>(copy.data) + batch * copy.strides[0] +
                  int64_t{head} * copy.parts * copy.strides[1] + row * copy.strides[2] + col;
    constexpr int kParts = std::is_same_v<Given, float> ? 2 : 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
        *reinterpret_cast<uint4*>(first + part * copy.strides[1]) = parts[part].chunk;
}

cudaError_t tile_bias(const Bias& bias, ElementType type, const TiledBias& copy,
                      cudaStream_t stream) {
    return dispatch_element(type, [&](auto element) {
        using Element = decltype(element);
        const auto launch = [&](auto given) {
            return launch_kernel<tile_bias_kernel<Element, decltype(given)>>(
                ceil_div<int64_t>(tile_bias_chunks(copy), kTileBiasThreads), kTileBiasThreads, 0,
                TileBiasParams{bias, copy}, stream);
        };
        return bias.type == BiasType::kFloat32 ? launch(float{})
               : bias.type == BiasType::kBool  ? launch(bool{})
                                               : launch(element);
    });
}

}  // namespace flash_ext
