// The operands of a warp's matmuls: fetched from a SharedTile by ldmatrix, or in registers. A
// 16-bit A operand has the layout of an accumulator (register_tile.cuh), which is why P can go from
// the scores' accumulators into the next matmul without leaving the registers.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/not_hoisted.cuh"
#include "tile/register_tile.cuh"
#include "tile/swizzle.cuh"

namespace flash_ext {

// How the four 8x8 matrices of an ldmatrix.x4 tile a 16x16 block: by rows first or columns first.
enum class Order { kRowsFirst, kColumnsFirst };

// 16x16 blocks of a SharedTile as ldmatrix fragments, of A or B of a matmul. kTranspose: the tile
// is stored [k][m] or [k][n]. One address per lane; a block is reached by an XOR and an immediate
// offset. Columns advance by kColStep blocks, so that several warps can share the columns, every
// kColStep-th block each.
template <class Tile, Order kOrder, bool kTranspose, int kColStep = 1>
struct SharedBlocks {
    uint32_t lane_address;

    FLASH_DEVICE SharedBlocks(uint32_t tile_address, int first_row = 0, int first_col_block = 0) {
        static_assert(Tile::kBlocksPerAtom % kColStep == 0);
        const int lane = lane_id();
        const bool rows_first = kOrder == Order::kRowsFirst;
        const int row = first_row + (rows_first ? lane % 16 : lane % 8 + lane / 16 * 8);
        const int half = rows_first ? lane / 16 : lane / 8 % 2;
        // One address stays in a register over a loop, not one for each XOR pattern.
        lane_address =
            ptx::not_hoisted(tile_address + Tile::offset(row, 2 * first_col_block + half));
    }

    FLASH_DEVICE void load(uint32_t (&fragment)[4], int row_block, int col_block) const {
        ptx::ldmatrix_x4<kTranspose>(fragment,
                                     Tile::block_address(lane_address, col_block * kColStep) +
                                         row_block * 16 * Tile::kPitch);
    }
    FLASH_DEVICE void load_a(uint32_t (&a)[4], int m, int k) const {
        kTranspose ? load(a, k, m) : load(a, m, k);
    }
    FLASH_DEVICE void load_b(uint32_t (&b)[4], int n, int k) const { load_a(b, n, k); }
};

// The operands of C(m x n) += A(m x k) B(k x n), named after how the tile is stored.
template <class Tile>  // A stored [m][k]
using AFromRows = SharedBlocks<Tile, Order::kRowsFirst, false>;
template <class Tile, int kColStep = 1>  // A stored [k][m]
using AFromColumns = SharedBlocks<Tile, Order::kColumnsFirst, true, kColStep>;
template <class Tile>  // B stored [n][k], as K in Q K^T
using BFromRows = SharedBlocks<Tile, Order::kColumnsFirst, false>;
template <class Tile, int kColStep = 1>  // B stored [k][n], as V in P V
using BFromColumns = SharedBlocks<Tile, Order::kRowsFirst, true, kColStep>;

// Another B without its first kSkipped 16-column blocks.
template <class B, int kSkipped>
struct BSkipping {
    const B& b;
    FLASH_DEVICE void load_b(uint32_t (&fragment)[4], int n, int k) const {
        b.load_b(fragment, kSkipped + n, k);
    }
};

// A from an accumulator, rounded to Element as it is used.
template <class Element, class Accumulator>
struct AFromRegisters {
    const Accumulator& acc;
    FLASH_DEVICE void load_a(uint32_t (&a)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = acc.template pack<Element>(m, 2 * k + i / 2, i % 2);
    }
};

// An A whose first kCachedCols columns stay in registers for many matmuls. The rest is fetched each
// time.
template <class Source, int kRows, int kCachedCols>
struct ACached {
    static constexpr int kCached = kCachedCols / 16;

    Source source;
    uint32_t fragments[kRows / 16][kCached == 0 ? 1 : kCached][4];

    FLASH_DEVICE explicit ACached(const Source& a) : source(a) {}

    FLASH_DEVICE void fetch() {
#pragma unroll
        for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
            for (int k = 0; k < kCached; ++k) source.load_a(fragments[m][k], m, k);
    }
    FLASH_DEVICE void load_a(uint32_t (&a)[4], int m, int k) const {
        if (k < kCached) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[m][k][i];
        } else {
            source.load_a(a, m, k);
        }
    }
};

}  // namespace flash_ext
