// A copy of a bias that TMA can load in tiles, see kernels/fa3/bias_tiles.cuh; a thread has eight
// numbers of a row. And dbias from rows that TMA has stored, which may be dbias itself; a CTA has a
// row. Memory is the limit.
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
    return copy.sizes[0] * copy.sizes[1] * copy.sizes[2] * (copy.sizes[3] / 8);
}

template <class Number, class Given>
__global__ void __launch_bounds__(kTileBiasThreads)
    tile_bias_kernel(const __grid_constant__ TileBiasParams params) {
    const TiledBias& copy = params.copy;
    const int64_t index = int64_t{blockIdx.x} * kTileBiasThreads + threadIdx.x;
    if (index >= tile_bias_chunks(copy)) return;
    const int chunks = copy.sizes[3] / 8;
    const int col = index % chunks * 8;
    const int row = index / chunks % copy.sizes[2];
    const int head = index / chunks / copy.sizes[2] % copy.sizes[1];
    const int batch = index / chunks / copy.sizes[2] / copy.sizes[1];
    const Bias& bias = params.given;
    const auto* given = static_cast<const Given*>(bias.data) + batch * bias.strides[0] +
                        head * bias.strides[1] + row * bias.strides[2];
    struct alignas(16) Chunk {
        Number numbers[8];
    } chunk;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int key = bias.sizes[3] == 1 ? 0 : col + i;
        const Given x = key < bias.sizes[3] ? given[key] : Given{};
        if constexpr (std::is_same_v<Given, bool>) {
            chunk.numbers[i] = ptx::from_float<Number>(x ? 0.f : -INFINITY);
        } else {
            chunk.numbers[i] = x;
        }
    }
    auto* const rows = static_cast<Number*>(copy.data) + batch * copy.strides[0] +
                       head * copy.strides[1] + row * copy.strides[2];
    *reinterpret_cast<Chunk*>(rows + col) = chunk;
}

cudaError_t tile_bias(const Bias& bias, ElementType type, const TiledBias& copy,
                      cudaStream_t stream) {
    return dispatch_element(type, [&](auto element) {
        const auto launch = [&](auto number, auto given) {
            return launch_kernel<tile_bias_kernel<decltype(number), decltype(given)>>(
                ceil_div<int64_t>(tile_bias_chunks(copy), kTileBiasThreads), kTileBiasThreads, 0,
                TileBiasParams{bias, copy}, stream);
        };
        return bias.type == BiasType::kFloat32 ? launch(float{}, float{})
               : bias.type == BiasType::kBool  ? launch(element, bool{})
                                               : launch(element, element);
    });
}

struct CopyDBiasParams {
    const void* stored;
    int64_t stored_row;  // its stride
    void* dbias;
    int cols;
    float factor;
};

template <class Number>
__global__ void __launch_bounds__(kTileBiasThreads)
    copy_dbias_kernel(const __grid_constant__ CopyDBiasParams params) {
    const auto* from = static_cast<const Number*>(params.stored) + blockIdx.x * params.stored_row;
    auto* to = static_cast<Number*>(params.dbias) + int64_t{blockIdx.x} * params.cols;
#pragma unroll 4
    for (int col = threadIdx.x; col < params.cols; col += kTileBiasThreads) {
        to[col] = ptx::from_float<Number>(ptx::to_float(from[col]) * params.factor);
    }
}

cudaError_t copy_dbias(const BackwardParams& params, const TiledBias& stored, cudaStream_t stream) {
    const int (&sizes)[4] = params.bias.sizes;
    return dispatch_element(params.element_type, [&](auto element) {
        const auto launch = [&](auto number) {
            return launch_kernel<copy_dbias_kernel<decltype(number)>>(
                int64_t{sizes[0]} * sizes[1] * sizes[2], kTileBiasThreads, 0,
                CopyDBiasParams{stored.data, stored.strides[2], params.dbias, sizes[3],
                                params.dbias_factor},
                stream);
        };
        return stored.element_bytes == 4 ? launch(float{}) : launch(element);
    });
}

}  // namespace flash_ext
