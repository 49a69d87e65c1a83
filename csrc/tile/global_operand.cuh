// Operands of gemm() straight from global memory, element by element. For rare cases: they need
// neither shared memory nor another warp. Elements outside the tensor are zeros.
#pragma once

#include "tile/copy.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// Elements x[row][col] and x[row][col + 1], packed; or with kAlongRows x[row][col] and
// x[row + 1][col].
template <bool kAlongRows, class Element>
__device__ __forceinline__ uint32_t global_pair(const GlobalTile<const Element>& x, int row,
                                                int col) {
    const auto at = [&](int r, int c) {
        return r < x.rows && c < x.cols ? ptx::to_float(x.data[r * x.row_stride + c]) : 0.f;
    };
    return ptx::pack<Element>(at(row, col), kAlongRows ? at(row + 1, col) : at(row, col + 1));
}

template <class Element>  // A stored [m][k]
struct AFromGlobalRows {
    GlobalTile<const Element> x;
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = global_pair<false>(x, 16 * m + lane_row() + i % 2 * 8,
                                      16 * k + lane_col() + i / 2 * 8);
    }
};

template <class Element>  // B stored [n][k], as K in Q K^T
struct BFromGlobalRows {
    GlobalTile<const Element> x;
    __device__ __forceinline__ void load_b(uint32_t (&b)[4], int n, int k) const {
        __syncwarp();  // separates the loads of one block from those of the next, to save registers
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i] = global_pair<false>(x, 16 * n + lane_row() + i / 2 * 8,
                                      16 * k + lane_col() + i % 2 * 8);
    }
};

template <class Element>  // B stored [k][n], as V in P V
struct BFromGlobalColumns {
    GlobalTile<const Element> x;
    __device__ __forceinline__ void load_b(uint32_t (&b)[4], int n, int k) const {
        __syncwarp();  // separates the loads of one block from those of the next, to save registers
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i] = global_pair<true>(x, 16 * k + lane_col() + i % 2 * 8,
                                     16 * n + lane_row() + i / 2 * 8);
    }
};

}  // namespace flash_ext
