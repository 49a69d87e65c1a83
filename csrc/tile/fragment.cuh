// Matrices in a warp's registers, and the operands that ldmatrix fetches from a SharedTile.
//
// Accumulator layout of mma.m16n8k16 (lane = 4 g + c, g 0..7, c 0..3): element v[m][n][2 i + e] is
// row 16 m + g + 8 i, column 8 n + 2 c + e. A 16-bit A operand has the same layout, which is why
// P can go from the scores' accumulators into the next matmul without leaving the registers.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/not_hoisted.cuh"
#include "ptx/shared.cuh"
#include "tile/swizzle.cuh"

namespace flash_ext {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_row() { return lane_id() / 4; }
__device__ __forceinline__ int lane_col() { return 2 * (lane_id() % 4); }

template <int kRows_, int kCols_, class Number_ = float>
struct RegisterTile {
    using Number = Number_;
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kM = kRows / 16;
    static constexpr int kN = kCols / 8;

    Number v[kM][kN][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) v[m][n][i] = 0.f;
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) v[m][n][i] *= factor;
    }
};

// How the four 8x8 matrices of an ldmatrix.x4 tile a 16x16 block: by rows first or columns first.
enum class Order { kRowsFirst, kColumnsFirst };

// 16x16 blocks of a SharedTile as ldmatrix fragments. One address per lane; a block is reached by
// an XOR within the atom (the swizzle never carries) and an immediate offset. Columns advance by
// kColStep blocks, so that several warps can share the columns, every kColStep-th block each.
template <class Tile, Order kOrder, bool kTranspose, int kColStep = 1>
struct SharedBlocks {
    uint32_t lane_address;

    __device__ __forceinline__ SharedBlocks(uint32_t tile_address, int first_row = 0,
                                            int first_col_block = 0, int chunk_xor = 0) {
        static_assert(Tile::kBlocksPerAtom % kColStep == 0);
        const int lane = lane_id();
        const bool rows_first = kOrder == Order::kRowsFirst;
        const int row = first_row + (rows_first ? lane % 16 : lane % 8 + lane / 16 * 8);
        const int half = rows_first ? lane / 16 : lane / 8 % 2;
        // One address stays in a register over a loop, not one for each XOR pattern.
        lane_address = ptx::not_hoisted(
            tile_address + Tile::offset(row, (2 * first_col_block + half) ^ chunk_xor));
    }

    __device__ __forceinline__ void load(uint32_t (&fragment)[4], int row_block,
                                         int col_block) const {
        const int block = col_block * kColStep;
        const int within_atom = block % Tile::kBlocksPerAtom;
        const int atom = block / Tile::kBlocksPerAtom;
        ptx::ldmatrix_x4<kTranspose>(fragment, (lane_address ^ (within_atom * 32)) +
                                                   atom * Tile::kAtomBytes +
                                                   row_block * 16 * Tile::kPitch);
    }
};

// The operands of C(m x n) += A(m x k) B(k x n), named after how the tile is stored.
template <class Tile>  // A stored [m][k]
struct AFromRows : SharedBlocks<Tile, Order::kRowsFirst, false> {
    using SharedBlocks<Tile, Order::kRowsFirst, false>::SharedBlocks;
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
        this->load(a, m, k);
    }
};

template <class Tile, int kColStep = 1>  // A stored [k][m]
struct AFromColumns : SharedBlocks<Tile, Order::kColumnsFirst, true, kColStep> {
    using SharedBlocks<Tile, Order::kColumnsFirst, true, kColStep>::SharedBlocks;
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
        this->load(a, k, m);
    }
};

template <class Tile>  // B stored [n][k], as K in Q K^T
struct BFromRows : SharedBlocks<Tile, Order::kColumnsFirst, false> {
    using SharedBlocks<Tile, Order::kColumnsFirst, false>::SharedBlocks;
    __device__ __forceinline__ void load_b(uint32_t (&b)[4], int n, int k) const {
        this->load(b, n, k);
    }
};

template <class Tile, int kColStep = 1>  // B stored [k][n], as V in P V
struct BFromColumns : SharedBlocks<Tile, Order::kRowsFirst, true, kColStep> {
    using SharedBlocks<Tile, Order::kRowsFirst, true, kColStep>::SharedBlocks;
    __device__ __forceinline__ void load_b(uint32_t (&b)[4], int n, int k) const {
        this->load(b, k, n);
    }
};

// Another B without its first kSkipped 16-column blocks.
template <class B, int kSkipped>
struct BSkipping {
    const B& b;
    __device__ __forceinline__ void load_b(uint32_t (&fragment)[4], int n, int k) const {
        b.load_b(fragment, kSkipped + n, k);
    }
};

// A from an accumulator, rounded to Element as it is used.
template <class Element, class Accumulator>
struct AFromRegisters {
    const Accumulator& acc;
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
        a[0] = ptx::pack<Element>(acc.v[m][2 * k][0], acc.v[m][2 * k][1]);
        a[1] = ptx::pack<Element>(acc.v[m][2 * k][2], acc.v[m][2 * k][3]);
        a[2] = ptx::pack<Element>(acc.v[m][2 * k + 1][0], acc.v[m][2 * k + 1][1]);
        a[3] = ptx::pack<Element>(acc.v[m][2 * k + 1][2], acc.v[m][2 * k + 1][3]);
    }
};

// A kept in registers for many matmuls (Q of the forward, where it fits).
template <int kRows, int kCols>
struct AInRegisters {
    uint32_t fragments[kRows / 16][kCols / 16][4];

    template <class A>
    __device__ __forceinline__ void fetch(const A& source) {
#pragma unroll
        for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
            for (int k = 0; k < kCols / 16; ++k) source.load_a(fragments[m][k], m, k);
    }
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = fragments[m][k][i];
    }
};

// An A whose first kCachedCols columns stay in registers for many matmuls. The rest is fetched each
// time.
template <class Source, int kRows, int kCachedCols>
struct ACached {
    static constexpr int kCached = kCachedCols / 16;

    Source source;
    uint32_t fragments[kRows / 16][kCached == 0 ? 1 : kCached][4];

    __device__ __forceinline__ explicit ACached(const Source& a) : source(a) {}

    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
            for (int k = 0; k < kCached; ++k) source.load_a(fragments[m][k], m, k);
    }
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
        if (k < kCached) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[m][k][i];
        } else {
            source.load_a(a, m, k);
        }
    }
};

}  // namespace flash_ext
