// The tiles of kernels that read one tensor, row by row: quantization and means. They are numbered
// as in tile_numbers.cuh.
#pragma once

#include "problem/quantize.h"
#include "problem/sequences.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// A tile of rows of one sequence. Packed rows before the first sequence and after the last have
// tiles too, of no sequence.
struct RowTile {
    int batch;     // of the tensor
    int sequence;  // 0 to B - 1; -1: none
    int tile;      // in the sequence
    int begin;     // first row, in the tensor
    int rows;      // 0 for padding tiles
    int used;      // rows in use, the others become zeros
    int length;    // of the sequence
};

// Tiles per head (and, in a dense batch, per batch). At least one, which writes what belongs to an
// empty sequence.
FLASH_HOST_DEVICE constexpr int row_tiles(const QuantizeParams& params, int block) {
    return params.cu_seqlens == nullptr ? max_of(ceil_div(params.rows, block), 1)
                                        : first_tile(params.rows, params.batch + 1, block) + 1;
}

FLASH_HOST_DEVICE RowTile row_tile(const QuantizeParams& params, int batch, int number, int block) {
    RowTile found{batch, batch < params.batch ? batch : -1, number, 0, 0, 0, params.rows};
    int begin = 0;
    if (params.cu_seqlens != nullptr) {
        const int seq_idx =
            find_sequence(params.cu_seqlens, params.batch, params.rows, block, number);
        begin = varlen_begin(params.cu_seqlens, seq_idx, params.rows);
        const int end = seq_idx <= params.batch
                            ? clamp(params.cu_seqlens[seq_idx], begin, params.rows)
                            : params.rows;
        const bool owned = seq_idx > 0 && seq_idx <= params.batch;
        found = {0,
                 owned ? seq_idx - 1 : -1,
                 number - first_tile(begin, seq_idx, block),
                 0,
                 0,
                 0,
                 end - begin};
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

// The tiles of all heads that one CTA has: every gridDim.x-th one. Heads are adjacent in memory, so
// they are the fastest index. `reverse` begins with the last tile of all, which is what a pass has
// left in L2. A step adds without divisions.
class RowTileCursor {
 public:
    FLASH_HOST_DEVICE RowTileCursor(const QuantizeParams& params, int block, uint32_t cta,
                                    uint32_t ctas, bool reverse)
        : tiles_(row_tiles(params, block)), step_(split(ctas, params.heads)), reverse_(reverse) {
        const int batches = params.cu_seqlens == nullptr ? max_of(params.batch, 1) : 1;
        last_ = {batches - 1, tiles_ - 1, params.heads - 1};
        at_ = split(cta, params.heads);
    }

    FLASH_HOST_DEVICE bool is_valid() const { return at_.batch <= last_.batch; }

    FLASH_HOST_DEVICE void advance() {
        at_.head += step_.head;
        at_.tile += step_.tile;
        at_.batch += step_.batch;
        if (at_.head > last_.head) {
            at_.head -= last_.head + 1;
            ++at_.tile;
        }
        if (at_.tile >= tiles_) {
            at_.tile -= tiles_;
            ++at_.batch;
        }
    }

    FLASH_HOST_DEVICE int batch() const { return reverse_ ? last_.batch - at_.batch : at_.batch; }
    FLASH_HOST_DEVICE int tile() const { return reverse_ ? last_.tile - at_.tile : at_.tile; }
    FLASH_HOST_DEVICE int head() const { return reverse_ ? last_.head - at_.head : at_.head; }

 private:
    // A number of heads, with `head` below the heads and `tile` below the tiles.
    struct Digits {
        int batch, tile, head;
    };

    FLASH_HOST_DEVICE Digits split(uint32_t linear, int heads) const {
        const uint32_t above = linear / heads;
        const uint32_t batch = above / tiles_;
        return {static_cast<int>(batch), static_cast<int>(above - batch * tiles_),
                static_cast<int>(linear - above * heads)};
    }

    int tiles_;
    Digits step_, last_{}, at_{};
    bool reverse_;
};

}  // namespace flash_ext
