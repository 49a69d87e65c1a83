// The tiles of kernels that read one tensor, row by row: quantization and means. Within a head they
// are numbered as in tile_numbers.cuh.
#pragma once

#include "problem/quantize.h"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// A tile of rows of one head and sequence. Varlen rows before the first sequence and after the last
// have tiles too, of no sequence.
struct RowTile {
    bool is_valid = false;  // otherwise there are no more tiles
    int batch = 0;          // of the tensor
    int head = 0;
    int sequence = -1;  // 0 to B - 1; -1: none
    int tile = 0;       // in the sequence
    int begin = 0;      // first row, in the tensor
    int rows = 0;       // 0 for padding tiles
    int used = 0;       // rows in use, the others become zeros
    int length = 0;     // of the sequence

    // Of the scales and means of a head.
    FLASH_HOST_DEVICE int64_t scale_head(const QuantizeParams& params) const {
        return int64_t{sequence} * params.heads + head;
    }
};

// Tiles per head (and, in a dense batch, per batch). At least one, which writes what belongs to an
// empty sequence.
FLASH_HOST_DEVICE constexpr int row_tiles(const QuantizeParams& params, int block) {
    return params.cu_seqlens == nullptr ? max_of(ceil_div(params.rows, block), 1)
                                        : first_tile(params.rows, params.batch + 1, block) + 1;
}

FLASH_HOST_DEVICE constexpr int64_t row_tile_count(const QuantizeParams& params, int block) {
    const int batches = params.cu_seqlens == nullptr ? max_of(params.batch, 1) : 1;
    return int64_t{batches} * row_tiles(params, block) * params.heads;
}

// Tile `number` of all heads and batches. Heads are adjacent in memory, so they are the fastest
// index.
FLASH_HOST_DEVICE RowTile row_tile(const QuantizeParams& params, uint32_t number, int block) {
    RowTile found;
    found.is_valid = number < static_cast<uint32_t>(row_tile_count(params, block));
    if (!found.is_valid) return found;
    const int tiles = row_tiles(params, block);
    const int of_one_head = static_cast<int>(number / params.heads);
    found.head = static_cast<int>(number) - of_one_head * params.heads;
    found.batch = of_one_head / tiles;
    found.tile = of_one_head - found.batch * tiles;
    int begin = 0;
    found.length = params.rows;
    if (params.cu_seqlens == nullptr) {
        if (found.batch < params.batch) found.sequence = found.batch;
    } else {
        const int seq_idx =
            find_sequence(params.cu_seqlens, params.batch, params.rows, block, found.tile);
        begin = varlen_begin(params.cu_seqlens, seq_idx, params.rows);
        found.length = varlen_rows(params.cu_seqlens, seq_idx, params.batch, params.rows, begin);
        if (seq_idx > 0 && seq_idx <= params.batch) found.sequence = seq_idx - 1;
        found.tile -= first_tile(begin, seq_idx, block);
    }
    int used = found.sequence < 0 ? 0 : found.length;
    if (params.seqused != nullptr && found.sequence >= 0)
        used = clamp(params.seqused[found.sequence], 0, found.length);
    const int first = found.tile * block;  // in the sequence
    found.begin = begin + first;
    found.rows = clamp(found.length - first, 0, block);
    found.used = clamp(used - first, 0, block);
    return found;
}

}  // namespace flash_ext
