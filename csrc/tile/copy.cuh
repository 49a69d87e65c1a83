// Tiles between global memory, shared memory and registers. Rows past the sequence and columns past
// the head dim are never read; they arrive as zeros.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"
#include "tile/tensor_view.h"

namespace flash_ext {

// The CTA's dynamic shared memory, aligned for swizzled tiles.
FLASH_DEVICE char* dynamic_shared() {
    extern __shared__ __align__(1024) char storage[];
    return storage;
}

template <class Storage>
FLASH_DEVICE Storage& shared_storage() {
    return *reinterpret_cast<Storage*>(dynamic_shared());
}

// A row of a (batch, row, head) tensor.
template <class Element>
FLASH_DEVICE Element* row_pointer(const TensorView& view, int batch, int64_t row, int head) {
    return static_cast<Element*>(view.data) + batch * view.batch_stride + row * view.row_stride +
           head * view.head_stride;
}

template <class Element>
struct GlobalTile {
    Element* data;  // row 0, column 0
    int64_t row_stride;
    int rows;  // valid ones, may be <= 0
    int cols;
};

template <class Element>
FLASH_DEVICE GlobalTile<Element> global_tile(const TensorView& view, int batch, int64_t row,
                                             int head, int rows, int cols) {
    return {row_pointer<Element>(view, batch, row, head), view.row_stride, rows, cols};
}

// Eight elements of 16 bits from any address. Those from `valid` on are not read, and are 0.
FLASH_DEVICE uint4 load_8(const void* source, int valid = 8) {
    const auto* x = static_cast<const uint16_t*>(source);
    const auto at = [&](int i) { return i < valid ? uint32_t{x[i]} : 0; };
    const auto pair = [&](int i) { return at(i) | at(i + 1) << 16; };
    return {pair(0), pair(2), pair(4), pair(6)};
}

// How kThreads threads share a tile's 16-byte chunks: neighbours take the chunks of a row (within
// an atom), then the next row, so that global accesses coalesce and shared ones miss no bank.
template <class Tile, int kThreads, int kRows = Tile::kRows>
struct ChunkWalk {
    static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
    static constexpr int kPasses = ceil_div(kRows, kRowsPerPass);
    static constexpr bool kRagged = kRows % kRowsPerPass != 0;  // the last pass has idle threads

    int row;
    int chunk;

    FLASH_DEVICE explicit ChunkWalk(int thread)
        : row(thread / Tile::kChunksPerRow), chunk(thread % Tile::kChunksPerRow) {}

    // visit(row, column, byte offset in the shared tile)
    template <class Visit>
    FLASH_DEVICE void for_each(Visit visit) const {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            if (kRagged && pass == kPasses - 1 && row + pass * kRowsPerPass >= kRows) continue;
#pragma unroll
            for (int atom = 0; atom < Tile::kAtoms; ++atom)
                visit(row + pass * kRowsPerPass, atom * Tile::kAtomCols + chunk * Tile::kChunk,
                      atom * Tile::kAtomBytes + Tile::offset(row + pass * kRowsPerPass, chunk));
        }
    }
};

// Global to shared, asynchronously where rows are 16-byte aligned: the caller commits and waits as
// for any cp.async. `aligned` counts only with kMayBeUnaligned; elements of unaligned rows are
// copied one by one.
template <class Tile, int kThreads, bool kMayBeUnaligned, class Element>
FLASH_DEVICE void load_tile(uint32_t shared, const GlobalTile<const Element>& tile, bool aligned) {
    const ChunkWalk<Tile, kThreads> walk(threadIdx.x % kThreads);
    if (!kMayBeUnaligned || aligned) {
        walk.for_each([&](int row, int col, int offset) {
            ptx::cp_async_16(shared + offset, tile.data + row * tile.row_stride + col,
                             row < tile.rows && col < tile.cols);
        });
        return;
    }
    // Not unrolled: this path is for rare layouts, and would double the code.
    const int row_chunks = Tile::kCols / Tile::kChunk;
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < Tile::kRows * row_chunks; i += kThreads) {
        const int row = i / row_chunks;
        const int chunk = i % row_chunks;
        const int col = chunk * Tile::kChunk;
        const uint4 x =
            load_8(tile.data + row * tile.row_stride + col, row < tile.rows ? tile.cols - col : 0);
        ptx::st_shared_v4(shared + Tile::offset(row, chunk), {x.x, x.y, x.z, x.w});
    }
}

// Loads the tiles of a tensor one after another. It keeps the address of this thread's first
// chunk: so a tile costs one addition instead of the products of its position and the strides.
template <class Tile, int kThreads, bool kMayBeUnaligned, class Element>
struct TileCursor {
    using Walk = ChunkWalk<Tile, kThreads>;

    const Element* source;

    FLASH_DEVICE void start(const GlobalTile<const Element>& tile) {
        source = tile.data + thread_offset(tile.row_stride);
    }

    // kAllRows: the tile ends within the sequence. Otherwise it has `rows` valid ones. The next
    // tile is `step` elements from this one.
    template <bool kAllRows>
    FLASH_DEVICE void load(uint32_t shared, int64_t row_stride, int rows, int cols, bool aligned,
                           int64_t step) {
        if constexpr (kMayBeUnaligned) {
            const GlobalTile<const Element> tile{source - thread_offset(row_stride), row_stride,
                                                 kAllRows ? Tile::kRows : rows, cols};
            load_tile<Tile, kThreads, true>(shared, tile, aligned);
        } else {
            // Positions in the tile are recomputed for each tile: stored, they take registers that
            // the matmuls need.
            const Walk walk(ptx::not_hoisted(threadIdx.x) % kThreads);
            walk.for_each([&](int row, int col, int offset) {
                ptx::cp_async_16(
                    shared + offset,
                    source + (row - walk.row) * row_stride + col - walk.chunk * Tile::kChunk,
                    (kAllRows || row < rows) && col < cols);
            });
        }
        source += step;
    }

 private:
    static FLASH_DEVICE int64_t thread_offset(int64_t row_stride) {
        const Walk walk(threadIdx.x % kThreads);
        return walk.row * row_stride + walk.chunk * Tile::kChunk;
    }
};

// Registers to shared, rounded to Element. Row 0 of the registers goes to `first_row`; 16-column
// block n of the registers goes to block first_col_block + n * kColStep of the tile.
template <class Element, class Tile, int kColStep = 1, class Accumulator>
FLASH_DEVICE void store_to_shared(uint32_t shared, const Accumulator& acc, int first_row,
                                  int first_col_block = 0) {
    const uint32_t within_chunk = 2 * lane_col();
    acc.for_each_pair([&](float x, float y, int row, int col) {
        const int chunk = 2 * (first_col_block + col / 16 * kColStep) + col / 8 % 2;
        ptx::st_shared(shared + Tile::offset(first_row + row + lane_row(), chunk) + within_chunk,
                       ptx::pack<Element>(x, y));
    });
}

// Shared to global by kThreads threads, kRows rows from `first_row` (a multiple of 8, the swizzle's
// period) of the shared tile on; row 0 of `tile` is that first row.
template <class Tile, int kThreads, int kRows, bool kMayBeUnaligned, class Element>
FLASH_DEVICE void store_tile(const GlobalTile<Element>& tile, uint32_t shared, int first_row,
                             bool aligned) {
    const int thread = threadIdx.x % kThreads;
    if (!kMayBeUnaligned || aligned) {
        const ChunkWalk<Tile, kThreads, kRows> walk(thread);
        walk.for_each([&](int row, int col, int offset) {
            if (row >= tile.rows || col >= tile.cols) return;
            uint32_t packed[4];
            ptx::ld_shared_v4(packed, shared + first_row * Tile::kPitch + offset);
            *reinterpret_cast<uint4*>(tile.data + row * tile.row_stride + col) = {
                packed[0], packed[1], packed[2], packed[3]};
        });
        return;
    }
    // Not unrolled, as in load_tile.
    const int rows = min_of(kRows, tile.rows);
#pragma unroll 1
    for (int i = thread; i < rows * Tile::kCols; i += kThreads) {
        const int row = i / Tile::kCols;
        const int col = i % Tile::kCols;
        if (col >= tile.cols) continue;
        const int within_chunk = col % Tile::kChunk * sizeof(Element);
        reinterpret_cast<uint16_t*>(tile.data + row * tile.row_stride)[col] = ptx::ld_shared_u16(
            shared + Tile::offset(first_row + row, col / Tile::kChunk) + within_chunk);
    }
}

// Sixteen rows from a warp's registers straight to global memory, rounded to Element, in 8-byte
// stores: neighboring lanes exchange pairs of columns, after which each has four adjacent columns,
// and the four lanes that hold a row fill a sector of 32 bytes.
template <class Element, class Accumulator>
FLASH_DEVICE void store_rows(const GlobalTile<Element>& tile, const Accumulator& acc) {
    const int lane = lane_id() % 4;
    const bool odd = lane % 2;
    const int first_col = 8 * odd + 4 * (lane / 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane_row() + 8 * i;
        Element* target = tile.data + row * tile.row_stride + first_col;
        const int cols = row < tile.rows ? tile.cols - first_col : 0;
#pragma unroll
        for (int n = 0; n < Accumulator::kN; n += 2) {
            const auto pair = [&](int n) {
                return ptx::pack<Element>(acc.v[0][n][2 * i], acc.v[0][n][2 * i + 1]);
            };
            const uint32_t x = pair(n), y = pair(n + 1);
            const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? x : y, 1);
            if (8 * n < cols)
                *reinterpret_cast<uint2*>(target + 8 * n) = odd ? uint2{got, y} : uint2{x, got};
        }
    }
}

// The same in float32.
template <class Accumulator>
FLASH_DEVICE void store_rows(const GlobalTile<float>& tile, const Accumulator& acc) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane_row() + 8 * i;
        float* target = tile.data + row * tile.row_stride + lane_col();
        const int cols = row < tile.rows ? tile.cols : 0;
        acc.for_each_pair_of_row(0, i, [&](float x, float y, int col) {
            if (col < cols) *reinterpret_cast<float2*>(target + col) = {x, y};
        });
    }
}

// All of a warp's rows in float32, all columns: to row index_of(row) of `target`, unless that is
// negative.
template <class Accumulator, class IndexOf>
FLASH_DEVICE void store_rows(float* target, const Accumulator& acc, IndexOf index_of) {
#pragma unroll
    for (int m = 0; m < Accumulator::kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t index = index_of(16 * m + lane_row() + 8 * i);
            if (index < 0) continue;
            float* row = target + index * Accumulator::kCols + lane_col();
            acc.for_each_pair_of_row(m, i, [&](float x, float y, int col) {
                *reinterpret_cast<float2*>(row + col) = {x, y};
            });
        }
}

// Sixteen rows that need not be adjacent: pointer_of(row) is where each is, or null.
template <class Accumulator, class PointerOf>
FLASH_DEVICE void store_apart(const Accumulator& acc, int cols, PointerOf pointer_of) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        auto* row = pointer_of(lane_row() + 8 * i);
        if (row == nullptr) continue;
#pragma unroll
        for (int n = 0; n < Accumulator::kN; ++n)
            if (8 * n < cols)  // a multiple of 8
                *reinterpret_cast<uint32_t*>(row + 8 * n + lane_col()) =
                    ptx::pack<std::remove_pointer_t<decltype(row)>>(acc.v[0][n][2 * i],
                                                                    acc.v[0][n][2 * i + 1]);
    }
}

}  // namespace flash_ext
