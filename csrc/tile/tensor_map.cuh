// Tensor maps: the descriptions of tensors that TMA needs, encoded on the host at every call
// (encode_tensor_map() in kernels/common/launch.cuh).
//
// Rows past the end of a sequence must arrive as zeros, even if another sequence follows in memory.
// TMA fills with zeros only past the bounds of a map, and one map serves all sequences. So the row
// dimension has a fixed bound kRowBound, and every sequence is addressed so that it ends at this
// bound: row i of n has the coordinate kRowBound - n + i. Two more dimensions correct the address,
// modulo 2^64:
//
//     dimension   stride in bytes    coordinate
//     column      element size       first column
//     row         r, the row stride  kRowBound - n + i
//     offset      16                 (offset of the row after the sequence's last) / 16
//     shift       2^34 - r           2^30 = kRowBound: adds 2^64 - kRowBound r
//
// So the same map serves dense batches and varlen, with any strides that are multiples of 16 bytes.
#pragma once

#include "ptx/tma.cuh"
#include "tile/swizzle.cuh"
#include "tile/tensor_view.h"

namespace flash_ext {

inline constexpr int kRowBound = 1 << 30;

// The row stride in bytes. It may be 0 where there is a single row, but TMA needs a positive one.
template <class Element>
FLASH_HOST_DEVICE int64_t row_stride_bytes(const TensorView& view) {
    return max_of<int64_t>(view.row_stride * sizeof(Element), 16);
}

// A map of a transposed tensor, whose rows are channels, does so with the columns: column i of n
// has the coordinate kRowBound - n + i, where n is rounded up to a multiple of 16. Its dimensions
// are
//
//     dimension   stride in bytes    coordinate
//     column      1                  kRowBound - n + i
//     row         row stride         first row
//     offset      16                 (offset of the column after the sequence's last) / 16
//     shift       2^38 - 16          2^26: adds 2^64 - kRowBound
inline constexpr int kColumnShift = 1 << 26;

// The columns of one head of one sequence.
struct TensorColumns {
    int offset;
    int first;  // the coordinate of column 0

    // Loads all rows of a tile, from column `column` on; `barrier` counts Tile::kBytes.
    template <class Tile>
    FLASH_DEVICE void load(const CUtensorMap& map, uint32_t shared, uint32_t barrier,
                           int column) const {
#pragma unroll
        for (int atom = 0; atom < Tile::kAtoms; ++atom)
            ptx::tma_load_4d(shared + atom * Tile::kAtomBytes, map, barrier,
                             first + column + atom * Tile::kAtomCols, 0, offset, kColumnShift);
    }
};

// The rows of one head of one sequence, as TMA addresses them.
struct TensorRows {
    int offset;
    int first;  // the coordinate of row 0

    // Prefetches a box of each swizzle atom to L2.
    template <class Tile>
    FLASH_DEVICE void prefetch(const CUtensorMap& map, int row) const {
#pragma unroll
        for (int atom = 0; atom < Tile::kAtoms; ++atom)
            ptx::tma_prefetch_4d(map, atom * Tile::kAtomCols, first + row, offset, kRowBound);
    }

    // Loads a box of each swizzle atom; `barrier` counts the bytes.
    template <class Tile>
    FLASH_DEVICE void load_boxes(const CUtensorMap& map, uint32_t shared, uint32_t barrier,
                                 int row) const {
#pragma unroll
        for (int atom = 0; atom < Tile::kAtoms; ++atom)
            ptx::tma_load_4d(shared + atom * Tile::kAtomBytes, map, barrier, atom * Tile::kAtomCols,
                             first + row, offset, kRowBound);
    }

    // Loads a whole tile; `barrier` counts Tile::kBytes.
    template <class Tile, int kBoxRows = Tile::kRows>
    FLASH_DEVICE void load(const CUtensorMap& map, uint32_t shared, uint32_t barrier,
                           int row) const {
        static_assert(Tile::kRows % kBoxRows == 0);
#pragma unroll
        for (int i = 0; i < Tile::kRows; i += kBoxRows)
            load_boxes<Tile>(map, shared + i * Tile::kPitch, barrier, row + i);
    }
};

// `count` columns, the first of which is at byte `begin` of the tensor's first row.
FLASH_DEVICE TensorColumns tensor_columns(int64_t begin, int count) {
    const int rounded = ceil_div(count, 16) * 16;
    return {static_cast<int>((begin + rounded) / 16), kRowBound - rounded};
}

// All loads get the location of rows from this function. A sequence begins at row `begin` of the
// tensor and has `rows` rows.
template <class Element>
FLASH_DEVICE TensorRows tensor_rows(const TensorView& view, int batch, int head, int begin,
                                    int rows) {
    const int64_t elements = batch * view.batch_stride + head * view.head_stride;
    const int64_t bytes = elements * static_cast<int>(sizeof(Element)) +
                          (int64_t{begin} + rows) * row_stride_bytes<Element>(view);
    return {static_cast<int>(bytes / 16), kRowBound - rows};
}

}  // namespace flash_ext
