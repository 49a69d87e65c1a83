// A dense mask, a byte for each query and key, as bits (problem/tile_mask.cuh), and the kind of
// each block of 128 queries and 128 keys. Memory is the limit: the mask is read once, and only
// blocks of mixed bits are written.
//
// A CTA has a block. A warp has 16 of its rows, four at a time, and of a row a lane has the 16 keys
// from 16 t on (t = lane % 8): of each of the row's four words it has the bits 4 t to 4 t + 3.
// Neighbors join theirs to bytes of all words, and shuffles bring the bytes of a word together.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/make_mask.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kPackThreads = 256;
inline constexpr int kKeysOfLane = 16;
inline constexpr int kLanesOfRow = kMaskBlock / kKeysOfLane;
inline constexpr int kPackPasses = kMaskBlock / (kPackThreads / kLanesOfRow);
static_assert(kPackPasses % 2 == 0);

enum class KeyLayout {
    kAligned,   // side by side, from multiples of 16 bytes on
    kAdjacent,  // side by side
    kStrided,
};

// The bytes of a lane's 16 keys, four in a word. Nothing outside the row is read: `before` of its
// bytes come before the first of these keys, and `left` are these keys or come after them.
template <KeyLayout kLayout>
FLASH_DEVICE uint4 load_keys(const uint8_t* keys, int64_t stride, int before, int left) {
    constexpr int kWords = kKeysOfLane / 4;
    alignas(16) uint32_t words[kWords] = {};
    if constexpr (kLayout == KeyLayout::kAligned)
        if (left >= kKeysOfLane) return __ldcs(reinterpret_cast<const uint4*>(keys));
    const int shift = reinterpret_cast<uintptr_t>(keys) % 4;
    if (kLayout == KeyLayout::kAdjacent && before >= shift && left >= kKeysOfLane + 3) {
        const auto* aligned = reinterpret_cast<const uint32_t*>(keys - shift);
        uint32_t low = __ldcs(aligned);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const uint32_t high = __ldcs(aligned + i + 1);
            words[i] = __funnelshift_r(low, high, 8 * shift);
            low = high;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kKeysOfLane; ++i)
            if (i < left) words[i / 4] |= uint32_t{keys[i * stride]} << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
}

// Bit 0 of each byte that is not 0.
FLASH_DEVICE uint32_t is_not_zero(uint32_t bytes) {
    constexpr uint32_t kLow = 0x7f7f7f7f;
    return (((bytes & kLow) + kLow | bytes) & ~kLow) >> 7;
}

// Word t / 2 of the row, from the bytes of all its lanes.
FLASH_DEVICE uint32_t word_of_row(uint4 keys, int t) {
    // The four bits of each of two words, in the bytes 0 and 2: of a pair of keys one word has bits
    // 0 and 1, the next pair is the next word's.
    const auto bits = [](uint32_t low, uint32_t high) {
        const uint32_t both = is_not_zero(low) | is_not_zero(high) << 2;
        return (both | both >> 7) & 0x000f000f;
    };
    // In the order of bytes: words 0, 2, 1, 3.
    uint32_t x = bits(keys.x, keys.z) | bits(keys.y, keys.w) << 8;
    uint32_t other = __shfl_xor_sync(0xffffffff, x, 1);
    x = t % 2 == 0 ? x | other << 4 : x << 4 | other;  // byte t / 2 of all words
    other = __shfl_xor_sync(0xffffffff, x, 4);
    x = ptx::byte_permute(x, other, t < 4 ? 0x6240 : 0x3715);  // two bytes of two words
    other = __shfl_xor_sync(0xffffffff, x, 2);
    return ptx::byte_permute(x, other, t / 2 % 2 == 0 ? 0x5140 : 0x3726);
}

template <KeyLayout kLayout>
__global__ void __launch_bounds__(kPackThreads)
    pack_mask_kernel(const __grid_constant__ MakeMaskParams params) {
    const int64_t block = blockIdx.x;
    const int kv_block = static_cast<int>(block % params.kv_blocks);
    const int64_t row_of_blocks = block / params.kv_blocks;
    const int q_block = static_cast<int>(row_of_blocks % params.q_blocks);
    const int matrix = static_cast<int>(row_of_blocks / params.q_blocks);
    const int t = threadIdx.x % kLanesOfRow;
    const int first_key = kv_block * kMaskBlock + t * kKeysOfLane;
    const int first_row = threadIdx.x / kLanesOfRow;
    constexpr int kRowsOfPass = kPackThreads / kLanesOfRow;

    uint4 keys[kPackPasses];
#pragma unroll
    for (int i = 0; i < kPackPasses; ++i) {
        const int query = q_block * kMaskBlock + first_row + i * kRowsOfPass;
        keys[i] = {};
        if (query >= params.seqlen_q || first_key >= params.seqlen_k) continue;
        const int64_t stride = kLayout == KeyLayout::kStrided ? params.dense.strides[3] : 1;
        keys[i] = load_keys<kLayout>(
            params.dense.row(matrix / params.heads, matrix % params.heads, query) +
                first_key * stride,
            stride, first_key, params.seqlen_k - first_key);
    }

    uint32_t words[kPackPasses];
    bool any = false, all = true;
#pragma unroll
    for (int i = 0; i < kPackPasses; ++i) {
        const int query = q_block * kMaskBlock + first_row + i * kRowsOfPass;
        words[i] = word_of_row(keys[i], t);
        any = any || words[i] != 0;
        all = all && (words[i] == ~uint32_t{0} || query >= params.seqlen_q);
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    const BlockKind kind = !any ? BlockKind::kHidden : all ? BlockKind::kFull : BlockKind::kPartial;
    if (threadIdx.x == 0) params.new_kinds[block] = static_cast<uint8_t>(kind);
    if (kind != BlockKind::kPartial) return;
    // Two lanes have the same word: one stores the even passes', the other one the odd ones'.
    uint32_t* block_words = params.words + block * kMaskBlock * kMaskWords + t / 2;
#pragma unroll
    for (int i = 0; i < kPackPasses; i += 2) {
        const int row = first_row + (i + t % 2) * kRowsOfPass;
        block_words[row * kMaskWords] = t % 2 == 0 ? words[i] : words[i + 1];
    }
}

inline KeyLayout layout_of(const MakeMaskParams& params) {
    const int64_t (&strides)[4] = params.dense.strides;
    if (strides[3] != 1) return KeyLayout::kStrided;
    const uint64_t bytes =
        reinterpret_cast<uintptr_t>(params.dense.data) | strides[0] | strides[1] | strides[2];
    return bytes % 16 == 0 ? KeyLayout::kAligned : KeyLayout::kAdjacent;
}

inline cudaError_t pack_mask(const MakeMaskParams& params, cudaStream_t stream) {
    const int64_t blocks =
        int64_t{params.batch} * params.heads * params.q_blocks * params.kv_blocks;
    const auto launch = [&](auto layout) {
        return launch_kernel<pack_mask_kernel<layout>>(blocks, kPackThreads, 0, params, stream);
    };
    switch (layout_of(params)) {
        case KeyLayout::kAligned:
            return launch(std::integral_constant<KeyLayout, KeyLayout::kAligned>{});
        case KeyLayout::kAdjacent:
            return launch(std::integral_constant<KeyLayout, KeyLayout::kAdjacent>{});
        default:
            return launch(std::integral_constant<KeyLayout, KeyLayout::kStrided>{});
    }
}

}  // namespace flash_ext
