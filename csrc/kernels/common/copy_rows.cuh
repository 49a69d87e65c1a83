// Rows that TMA cannot address, to copies in the workspace that it can, and results from such
// copies to where they belong. Memory is the limit.
//
// A CTA has rows of one tensor, and a thread the same 16 bytes, a chunk, of some of them. At the
// given tensor these are units of 8, 4 or 2 bytes: the largest to whose multiples all rows begin
// and end. So nothing outside of a row is read or written.
#pragma once

#include "kernels/common/launch.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kCopyThreads = 256;
inline constexpr int kCopyPasses = 4;  // chunks of a thread, which it loads before it stores them

struct CopyRowsParams : RowCopies {
    uint4* copies[std::extent_v<decltype(RowCopies::all)>];
};

FLASH_HOST_DEVICE uint32_t chunks_of_row(const RowCopy& x) { return ceil_div(x.cols, 8); }
FLASH_HOST_DEVICE uint32_t rows_of_pass(const RowCopy& x) {
    return kCopyThreads / chunks_of_row(x);
}
// Of fa3's tensors, which have fewer than 2^31.
FLASH_HOST_DEVICE uint32_t all_rows(const RowCopy& x) {
    return static_cast<uint32_t>(x.batch) * x.rows * x.heads;
}

// The bytes of a unit: 2, 4 or 8.
FLASH_HOST_DEVICE int unit_bytes(const RowCopy& x) {
    const TensorView& view = x.given;
    const uint64_t elements = view.batch_stride | view.row_stride | view.head_stride | x.cols;
    const uint64_t bytes = reinterpret_cast<uintptr_t>(view.data) | 2 * elements;
    return bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

template <class Unit, bool kBack>
FLASH_DEVICE void copy_rows_of(const RowCopy& x, uint4* copy, uint32_t block) {
    constexpr int kUnits = 16 / sizeof(Unit);
    struct alignas(16) Chunk {
        Unit units[kUnits];
    };
    const uint32_t chunks = chunks_of_row(x);
    const uint32_t rows = rows_of_pass(x);
    const uint32_t chunk = threadIdx.x % chunks;
    const uint32_t first = block * kCopyPasses * rows + threadIdx.x / chunks;
    const int units = 2 * (x.cols - 8 * chunk) / sizeof(Unit);  // of the row, from this chunk on
    Chunk value[kCopyPasses];
    Unit* given[kCopyPasses];  // null where the thread has no chunk
#pragma unroll
    for (int i = 0; i < kCopyPasses; ++i) {
        const uint32_t row = first + i * rows;
        given[i] = nullptr;
        if (threadIdx.x >= rows * chunks || row >= all_rows(x)) continue;
        const uint32_t position = row / x.heads;
        given[i] = reinterpret_cast<Unit*>(
            row_pointer<uint16_t>(x.given, position / x.rows, position % x.rows, row % x.heads) +
            8 * chunk);
        if constexpr (kBack) {
            value[i] = reinterpret_cast<const Chunk*>(copy)[int64_t{row} * chunks + chunk];
        } else {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) value[i].units[j] = j < units ? given[i][j] : Unit{};
        }
    }
#pragma unroll
    for (int i = 0; i < kCopyPasses; ++i) {
        if (given[i] == nullptr) continue;
        if constexpr (kBack) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j)
                if (j < units) given[i][j] = value[i].units[j];
        } else {
            const uint32_t row = first + i * rows;
            reinterpret_cast<Chunk*>(copy)[int64_t{row} * chunks + chunk] = value[i];
        }
    }
}

template <bool kBack>
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(const __grid_constant__ CopyRowsParams params) {
    const int tensor = blockIdx.x % params.count;
    const uint32_t block = blockIdx.x / params.count;
    const RowCopy& x = params.all[tensor];
    switch (unit_bytes(x)) {
        case 8:
            return copy_rows_of<uint2, kBack>(x, params.copies[tensor], block);
        case 4:
            return copy_rows_of<uint32_t, kBack>(x, params.copies[tensor], block);
        default:
            return copy_rows_of<uint16_t, kBack>(x, params.copies[tensor], block);
    }
}

cudaError_t copy_rows(const RowCopies& copies, bool back, cudaStream_t stream) {
    CopyRowsParams params{copies};
    int64_t blocks = 0;  // of the tensor with the most
    for (int i = 0; i < copies.count; ++i) {
        const RowCopy& x = copies.all[i];
        params.copies[i] = static_cast<uint4*>(x.copy->data);
        blocks = max_of(blocks, ceil_div<int64_t>(all_rows(x), kCopyPasses * rows_of_pass(x)));
    }
    const auto kernel = back ? launch_kernel<copy_rows_kernel<true>, CopyRowsParams>
                             : launch_kernel<copy_rows_kernel<false>, CopyRowsParams>;
    return kernel(blocks * copies.count, kCopyThreads, 0, params, stream, {});
}

}  // namespace flash_ext
