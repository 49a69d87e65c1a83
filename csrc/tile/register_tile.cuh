// Matrices in a warp's registers, and operations on their elements, rows and columns.
//
// Accumulator layout of mma.m16n8k16 and of wgmma (lane = 4 g + c, g 0..7, c 0..3): element
// v[m][n][2 i + e] is row 16 m + g + 8 i, column 8 n + 2 c + e. So a lane has rows (m, i), which
// begin at lane_row(), and columns (n, e), which begin at lane_col(); four lanes share a row.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flash_ext {

FLASH_DEVICE int lane_id() { return threadIdx.x % 32; }
FLASH_DEVICE int warp_id() { return threadIdx.x / 32; }
FLASH_DEVICE int lane_row() { return lane_id() / 4; }
FLASH_DEVICE int lane_col() { return 2 * (lane_id() % 4); }

// Reductions over the four lanes that share a row.
FLASH_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
FLASH_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// A lane's rows of a tile of kRows rows: visit(m, i, row).
template <int kRows, class Visit>
FLASH_DEVICE void for_each_row(Visit visit) {
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) visit(m, i, 16 * m + lane_row() + 8 * i);
}

template <int kRows_, int kCols_, class Number_ = float>
struct RegisterTile {
    using Number = Number_;
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kM = kRows / 16;
    static constexpr int kN = kCols / 8;

    Number v[kM][kN][4];

    // x = f(x, others...) for all elements, with the elements of other tiles in the same place.
    template <class Function, class... Others>
    FLASH_DEVICE void map(Function f, const Others&... others) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) v[m][n][i] = f(v[m][n][i], others.v[m][n][i]...);
    }

    // visit(x, row, col) for all elements, where row and col count from lane_row() and lane_col().
    template <class Visit>
    FLASH_DEVICE void for_each(Visit visit) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) visit(v[m][n][i], 16 * m + i / 2 * 8, 8 * n + i % 2);
    }
    // visit(x, y, row, col) for all pairs of adjacent elements of a lane, ...
    template <class Visit>
    FLASH_DEVICE void for_each_pair(Visit visit) const {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    visit(v[m][n][2 * i], v[m][n][2 * i + 1], 16 * m + 8 * i, 8 * n);
    }
    // ... and visit(x, y, col) for the pairs of one row.
    template <class Visit>
    FLASH_DEVICE void for_each_pair_of_row(int m, int i, Visit visit) const {
#pragma unroll
        for (int n = 0; n < kN; ++n) visit(v[m][n][2 * i], v[m][n][2 * i + 1], 8 * n);
    }

    FLASH_DEVICE void clear() {
        map([](Number) { return Number{0}; });
    }
    FLASH_DEVICE void scale(float factor) {
        map([&](float x) { return x * factor; });
    }

    // The maximum of a row, in each of the lanes that share it.
    FLASH_DEVICE float row_max(int m, int i) const {
        float max = fmaxf(v[m][0][2 * i], v[m][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < kN; ++n) max = fmaxf(max, fmaxf(v[m][n][2 * i], v[m][n][2 * i + 1]));
        return quad_max(max);
    }

    template <class Function>
    FLASH_DEVICE void map_row(int m, int i, Function f) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; ++e) v[m][n][e] = f(v[m][n][e]);
    }

    // Two adjacent elements of a row, rounded.
    template <class Element>
    FLASH_DEVICE uint32_t pack(int m, int n, int i) const {
        return ptx::pack<Element>(v[m][n][2 * i], v[m][n][2 * i + 1]);
    }

    // The kPiece columns from `first` on, of a tile of 16 rows.
    template <int kPiece>
    FLASH_DEVICE RegisterTile<16, kPiece, Number>& columns(int first) {
        static_assert(kM == 1);
        return reinterpret_cast<RegisterTile<16, kPiece, Number>&>(v[0][first / 8]);
    }
};

}  // namespace flash_ext
