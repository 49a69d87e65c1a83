// Tensor maps: the descriptions of tensors that TMA needs, encoded on the host at every call.
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

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "ptx/tma.cuh"
#include "tile/swizzle.cuh"
#include "tile/tensor_view.h"

namespace flash_ext {

inline constexpr int kRowBound = 1 << 30;

// The row stride in bytes. It may be 0 where there is a single row, but TMA needs a positive one.
template <class Element>
FLASH_HOST_DEVICE int64_t row_bytes(const TensorView& view) {
    return max_of<int64_t>(view.row_stride * sizeof(Element), 16);
}

template <class Element>
inline constexpr CUtensorMapDataType kTensorMapType =
    sizeof(Element) == 1              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
    : std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// A box is what one instruction loads: kBoxRows rows of an atom.
template <class Tile, int kBoxRows = Tile::kRows>
cudaError_t encode_tensor_map(CUtensorMap& map, const TensorView& view, int head_dim) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                             cudaEnableDefault, &found) != cudaSuccess ||
            found != cudaDriverEntryPointSuccess)
            function = nullptr;
        return reinterpret_cast<Encode>(function);
    }();
    constexpr CUtensorMapSwizzle kSwizzle = Tile::kPitch == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                            : Tile::kPitch == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                 : CU_TENSOR_MAP_SWIZZLE_32B;
    if (encode == nullptr) return cudaErrorNotSupported;
    constexpr uint64_t kNoBound = 0x7fffffff;
    const uint64_t row = row_bytes<typename Tile::Element>(view);
    const cuuint64_t sizes[4] = {static_cast<uint64_t>(head_dim), kRowBound, kNoBound, kNoBound};
    const cuuint64_t strides[3] = {row, 16, (uint64_t{1} << 34) - row};
    const cuuint32_t box[4] = {Tile::kAtomCols, kBoxRows, 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const auto try_to_encode = [&] {
        return encode(&map, kTensorMapType<typename Tile::Element>, 4, view.data, sizes, strides,
                      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
                      kBoxRows < Tile::kRows ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                             : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = try_to_encode();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        // This thread has not used the device yet (autograd has threads of its own). The driver
        // needs a context, which the runtime otherwise creates at the launch.
        int device = 0;
        cudaGetDevice(&device);
        cudaSetDevice(device);
        result = try_to_encode();
    }
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

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

// All loads get the location of rows from this function. A sequence begins at row `begin` of the
// tensor and has `rows` rows.
template <class Element>
FLASH_DEVICE TensorRows tensor_rows(const TensorView& view, int batch, int head, int begin,
                                    int rows) {
    const int64_t elements = batch * view.batch_stride + head * view.head_stride;
    const int64_t bytes = elements * static_cast<int>(sizeof(Element)) +
                          (int64_t{begin} + rows) * row_bytes<Element>(view);
    return {static_cast<int>(bytes / 16), kRowBound - rows};
}

}  // namespace flash_ext
