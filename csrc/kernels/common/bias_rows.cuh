// Tiles of a bias in 16 bits on their way to shared memory, for kernels whose rows are as long as
// cp.async needs (has_bias_tiles). A row or a head that is for all has stride 0.
#pragma once

#include "problem/score.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

// A member of SharedStorage, empty in kernels without such tiles.
template <bool kBias, class Tile, int kStages = 1>
struct BiasRowsStorage {
    alignas(1024) char tiles[kStages][Tile::kBytes];
};
template <class Tile, int kStages>
struct BiasRowsStorage<false, Tile, kStages> {};

// kRows rows of tiles whose rows are queries, by kThreads threads, one tile after another. It keeps
// the address of this thread's first 16 bytes.
template <class Tile, int kThreads, int kRows>
struct BiasCursor {
    using Element = typename Tile::Element;
    using Walk = ChunkWalk<Tile, kThreads, kRows>;

    const Element* source;

    // The first rows of a tile.
    FLASH_DEVICE void start(const AttentionParams& params, int batch, int head, int first_query,
                            int first_key) {
        const Bias& bias = params.bias;
        const Walk walk(threadIdx.x % kThreads);
        source = static_cast<const Element*>(bias.data) + batch * bias.strides[0] +
                 head * bias.strides[1] + (first_query + walk.row) * bias.strides[2] + first_key +
                 walk.chunk * Tile::kChunk;
    }

    // Rows and keys from these numbers on arrive as zeros; kAllKeys: there are none of the keys.
    // The next tile's first key is `step` from this one's.
    template <bool kAllKeys>
    FLASH_DEVICE void load(uint32_t shared, int64_t row_stride, int rows, int keys, int step) {
        const Walk walk(ptx::not_hoisted(threadIdx.x) % kThreads);
        walk.for_each([&](int row, int col, int offset) {
            const int bytes = kAllKeys ? 16 : clamp(int{sizeof(Element)} * (keys - col), 0, 16);
            ptx::cp_async_up_to_16(
                shared + offset,
                source + (row - walk.row) * row_stride + col - walk.chunk * Tile::kChunk,
                row < rows ? bytes : 0);
        });
        source += step;
    }
};

}  // namespace flash_ext
