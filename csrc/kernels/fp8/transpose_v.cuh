// V (B, S, H, D) -> V^T in e4m3 (plan/transposed_v.cuh): from 16 bits as the second pass of
// quantization, or from 8 bits before a forward. 8-bit wgmma reads both operands K-major, so P V
// needs the keys of a channel side by side.
//
// A thread transposes a group of 16 keys and as many channels as 16 bytes have, in registers. A
// warp has eight such blocks along the keys and four along the channels: what it reads of a row
// are whole sectors of 32 bytes, and what it writes of a channel are whole lines. All of V^T is
// written: what is past the end of a sequence becomes zeros.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fp8/scales.cuh"
#include "plan/transposed_v.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kTransposeKeys = 128;  // of a CTA, which has all channels of a head

// A group of keys as rows of the tensor.
struct KeyGroup {
    int sequence = -1;  // -1: none
    int row = 0;
    int rows = 0;  // in use, from `row` on
};

// Group `index` of the tensor's batch element, by the sequence that it belongs to.
FLASH_HOST_DEVICE KeyGroup key_group(const QuantizeParams& params, int batch, int index) {
    const int* offsets = params.cu_seqlens;
    KeyGroup found{batch};
    int begin = 0, length = params.rows;
    if (offsets != nullptr) {
        const auto first_of = [&](int seq_idx) {
            return first_group(varlen_begin(offsets, seq_idx, params.rows), seq_idx, kKeyGroup);
        };
        const int seq_idx = find_sequence(params.batch, index, first_of);
        begin = varlen_begin(offsets, seq_idx, params.rows);
        length = varlen_rows(offsets, seq_idx, params.batch, params.rows, begin);
        index -= first_of(seq_idx);
        found.sequence = seq_idx > params.batch ? -1 : seq_idx - 1;
        if (found.sequence < 0) length = 0;
    }
    if (params.seqused != nullptr && found.sequence >= 0)
        length = clamp(params.seqused[found.sequence], 0, length);
    found.row = begin + index * kKeyGroup;
    found.rows = clamp(length - index * kKeyGroup, 0, kKeyGroup);
    return found;
}

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

// Eight numbers of 16 bits, rounded. What is not finite becomes NaN: infinity times 0 is.
template <class Element>
FLASH_DEVICE uint2 rounded(const uint4& raw, const float (&factors)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack<Element>(words[i]);
        x[2 * i] = fmaf(pair.x, 0.f, pair.x);
        x[2 * i + 1] = fmaf(pair.y, 0.f, pair.y);
    }
    return scaled(Float8{}, x, factors);
}

// The factors of eight channels of a group of keys, with scales of any kind.
FLASH_DEVICE void load_factors(float (&factors)[8], const QuantizeParams& params,
                               const KeyGroup& group, int head, int channel) {
    if (group.sequence < 0) return;
    const int64_t scale_head = int64_t{group.sequence} * params.heads + head;
    if (params.scales == Scales::kChannel)
        return load_channel_factors(factors, params, scale_head, channel);
    const float factor = factor_of(params, amax_of(params, scale_head));
#pragma unroll
    for (int e = 0; e < 8; ++e) factors[e] = factor;
}

template <class Element>
__global__ void __launch_bounds__(kMaxQuantizeDim)
    transpose_kernel(const __grid_constant__ QuantizeParams params) {
    constexpr bool kRounds = sizeof(Element) > 1;
    constexpr int kChannels = 16 / sizeof(Element);
    ptx::launch_dependents();
    const int keys = transposed_keys(params.rows, params.batch, params.cu_seqlens != nullptr);
    const int tiles = max_of(ceil_div(keys, kTransposeKeys), 1);
    // From the last tile on: the pass for the maxima has left these rows in L2.
    const int number = gridDim.x - 1 - blockIdx.x;
    const int head = number % params.heads, batch = number / params.heads / tiles;
    const int first_key = number / params.heads % tiles * kTransposeKeys;
    const int key = first_key + threadIdx.x % 32 / 4 * kKeyGroup;
    const int channel = (threadIdx.x / 32 * 4 + threadIdx.x % 4) * kChannels;
    const bool inside = key < keys && channel < params.head_dim;
    const KeyGroup group = inside ? key_group(params, batch, key / kKeyGroup) : KeyGroup{};

    const Element* source = row_pointer<const Element>(params.x, batch, group.row, head) + channel;
    uint4 raw[kKeyGroup];
#pragma unroll
    for (int i = 0; i < kKeyGroup; ++i, source += params.x.row_stride)
        raw[i] = i < group.rows ? __ldg(reinterpret_cast<const uint4*>(source)) : uint4{};
    uint32_t x[kKeyGroup][kChannels / 4];  // e4m3
    if constexpr (kRounds) {
        ptx::wait_for_grid_before();  // for the maxima
        store_descales(params);
        float factors[8] = {};
        load_factors(factors, params, group, head, channel);
#pragma unroll
        for (int i = 0; i < kKeyGroup; ++i) {
            const uint2 all = rounded<Element>(raw[i], factors);
            x[i][0] = all.x;
            x[i][1] = all.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kKeyGroup; ++i) {
            const uint32_t all[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int c = 0; c < 4; ++c) x[i][c] = all[c];
        }
    }
    if (!inside) return;

    const int64_t step = params.transposed.row_stride;
    uint8_t* target = row_pointer<uint8_t>(params.transposed, batch, channel, head) + key;
#pragma unroll
    for (int c = 0; c < kChannels / 4; ++c) {
        // Word t of the four channels from 4c on: keys 2t, 2t + 1, 8 + 2t and 9 + 2t.
        uint32_t y[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int key_of[4] = {2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t};
#pragma unroll
            for (int i = 0; i < 4; ++i) y[t][i] = x[key_of[i]][c];
            transpose_4x4(y[t]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i, target += step)
            *reinterpret_cast<uint4*>(target) = {y[0][i], y[1][i], y[2][i], y[3][i]};
    }
}

template <class Element>
cudaError_t launch_transpose(const QuantizeParams& params, cudaStream_t stream) {
    const bool varlen = params.cu_seqlens != nullptr;
    const int keys = transposed_keys(params.rows, params.batch, varlen);
    // At least one CTA, which stores the descales of an empty tensor.
    const int64_t ctas = int64_t{max_of(ceil_div(keys, kTransposeKeys), 1)} * params.heads *
                         (varlen ? 1 : max_of(params.batch, 1));
    constexpr int kWarpChannels = 4 * 16 / sizeof(Element);
    return launch_kernel<transpose_kernel<Element>>(
        ctas, 32 * ceil_div(params.head_dim, kWarpChannels), 0, params, stream,
        {.pdl = sizeof(Element) > 1});
}

// The second pass of quantization.
inline cudaError_t transpose_rows(const QuantizeParams& params, cudaStream_t stream) {
    return dispatch_element(params.element_type, [&](auto element) {
        return launch_transpose<decltype(element)>(params, stream);
    });
}

cudaError_t transpose_v(const ForwardParams& call, const TensorView& row_major,
                        cudaStream_t stream) {
    QuantizeParams params{};
    params.batch = call.batch;
    params.rows = call.seqlen_k;
    params.heads = call.heads_k;
    params.head_dim = call.head_dim_v;
    params.x = row_major;
    params.transposed = call.v;
    params.cu_seqlens = call.cu_seqlens_k;
    params.seqused = call.seqused_k;
    return launch_transpose<Float8>(params, stream);
}

}  // namespace flash_ext
