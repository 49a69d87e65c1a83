// V (B, Sk, Hk, Dv) of FP8 -> V^T (plan/transposed_v.cuh), before a forward. 8-bit wgmma reads both
// operands K-major, so P V needs the keys of a channel side by side.
//
// A thread transposes 16 keys x 16 channels in registers. A warp has eight such blocks along the
// keys and four along the channels: what it reads of a row, and what it writes of a channel, are
// whole sectors of 32 bytes. What is past the end of a sequence becomes zeros.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/transposed_v.cuh"
#include "problem/key_rows.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "schedule/tile_numbers.cuh"

namespace flash_ext {

struct TransposeParams : AttentionParams {
    uint8_t* v_transposed;
};

inline constexpr int kTransposeKeys = 128;  // of a CTA, which has all channels of a head

// The bytes of four channels, of four keys, become four keys of four channels each.
FLASH_DEVICE void transpose_4x4(uint32_t (&x)[4]) {
    const uint32_t low01 = ptx::byte_permute(x[0], x[1], 0x5140);
    const uint32_t low23 = ptx::byte_permute(x[2], x[3], 0x5140);
    const uint32_t high01 = ptx::byte_permute(x[0], x[1], 0x7362);
    const uint32_t high23 = ptx::byte_permute(x[2], x[3], 0x7362);
    x[0] = ptx::byte_permute(low01, low23, 0x5410);
    x[1] = ptx::byte_permute(low01, low23, 0x7632);
    x[2] = ptx::byte_permute(high01, high23, 0x5410);
    x[3] = ptx::byte_permute(high01, high23, 0x7632);
}

__global__ void transpose_v_kernel(const __grid_constant__ TransposeParams params) {
    ptx::launch_dependents();
    const int tiles = tile_numbers(params, params.seqlen_k, kTransposeKeys);
    const int matrix = blockIdx.x / tiles;  // of a batch element and head
    const int head = matrix % params.heads_k;
    const SequenceTile tile = tile_of<true, Rows::kKeys>(params, matrix / params.heads_k,
                                                         blockIdx.x % tiles, kTransposeKeys);
    const int key = tile.tile * kTransposeKeys + threadIdx.x % 32 / 4 * 16;
    const int channel = (threadIdx.x / 32 * 4 + threadIdx.x % 4) * 16;
    const int keys = tile.sequence.seqlen_k - key;
    if (keys <= 0 || channel >= params.head_dim_v) return;

    const KeyRows rows = key_rows(params, tile.sequence);
    const GlobalTile<const uint8_t> source =
        rows.tile<uint8_t>(params.v, head, key, params.head_dim_v);
    uint4 x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        x[i] = i < keys ? __ldg(reinterpret_cast<const uint4*>(source.data + channel +
                                                               i * source.row_stride))
                        : uint4{0, 0, 0, 0};
    const int64_t channel_stride = channel_bytes(params);
    uint8_t* target = params.v_transposed + transposed_v_offset(params, tile.sequence, head) +
                      channel * channel_stride + key;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        // Word t of the four channels from 4c on: keys 2t, 2t + 1, 8 + 2t and 9 + 2t.
        uint32_t y[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int key_of[4] = {2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                y[t][i] = reinterpret_cast<const uint32_t (&)[4]>(x[key_of[i]])[c];
            transpose_4x4(y[t]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i, target += channel_stride)
            *reinterpret_cast<uint4*>(target) = {y[0][i], y[1][i], y[2][i], y[3][i]};
    }
}

cudaError_t transpose_v(const ForwardParams& params, uint8_t* v_transposed, cudaStream_t stream) {
    const int64_t ctas = int64_t{tile_numbers(params, params.seqlen_k, kTransposeKeys)} *
                         params.heads_k * tensor_batches(params);
    const int threads = 32 * ceil_div(params.head_dim_v, 64);
    return launch_kernel<transpose_v_kernel>(ctas, threads, 0,
                                             TransposeParams{params, v_transposed}, stream);
}

}  // namespace flash_ext
