// A mask as lists of the blocks of 128 queries and 128 keys that it shows.
//
// Each Q block has a row of runs of the KV blocks that it sees, and each KV block one of the Q
// blocks that see it:
//
//     number of full blocks, number of partial ones, number of runs, 0, run, run, ...
//
// A run is its first block | its number of blocks << 16. In a full block every query sees every
// key. Runs of full blocks come first, then runs of partial ones, both in ascending order. Of a
// partial block a query sees what its 16 bytes of `words` say:
//
//     bits        of the keys of this block: bit b of word w is key 8 (b / 2) + 2 w + b % 2, since
//                 these are the columns of lane w of four in a fragment (tile/fragment.cuh)
//     intervals   of all keys, two: begin, end, begin, end
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

inline constexpr int kMaskHeader = 4;  // ints before the runs
inline constexpr int kMaskWords = 4;   // of a query

struct BlockRun {
    int first;
    int count;
};
FLASH_HOST_DEVICE constexpr BlockRun block_run(uint32_t run) {
    return {static_cast<int>(run & 0xffff), static_cast<int>(run >> 16)};
}
FLASH_HOST_DEVICE constexpr uint32_t mask_run(int first, int count) {
    return static_cast<uint32_t>(first) | static_cast<uint32_t>(count) << 16;
}

// A row of runs.
struct BlockRuns {
    const int* row;

    FLASH_HOST_DEVICE int full() const { return row[0]; }
    FLASH_HOST_DEVICE int count() const { return row[0] + row[1]; }
    FLASH_HOST_DEVICE int runs() const { return row[2]; }
    FLASH_HOST_DEVICE const int* first_run() const { return row + kMaskHeader; }
};

enum class BlockKind : uint8_t { kHidden, kFull, kPartial };

FLASH_HOST_DEVICE BlockKind kind_of(const BlockRuns& runs, int block) {
    int before = 0;
    for (int i = 0; i < runs.runs(); ++i) {
        const BlockRun run = block_run(runs.first_run()[i]);
        if (block >= run.first && block < run.first + run.count)
            return before < runs.full() ? BlockKind::kFull : BlockKind::kPartial;
        before += run.count;
    }
    return BlockKind::kHidden;
}

// How many blocks of the row come before this one.
FLASH_HOST_DEVICE int blocks_before(const BlockRuns& runs, int block) {
    int before = 0;
    for (int i = 0; i < runs.runs(); ++i) {
        const BlockRun run = block_run(runs.first_run()[i]);
        before += min_of(max_of(block - run.first, 0), run.count);
    }
    return before;
}

// The mask that a query head of a batch element has, among those of `params`.
FLASH_HOST_DEVICE int64_t mask_index(const AttentionParams& params, int batch, int head) {
    const TileMask& mask = params.tile_mask;
    const int64_t heads = mask.by_head ? params.heads_q : 1;
    return (mask.by_batch ? batch * heads : 0) + (mask.by_head ? head : 0);
}

FLASH_HOST_DEVICE BlockRuns runs_of_q_block(const AttentionParams& params, int batch, int head,
                                            int block) {
    const TileMask& mask = params.tile_mask;
    return {mask.kv_tiles +
            (mask_index(params, batch, head) * mask.q_blocks + block) * mask.kv_row};
}
FLASH_HOST_DEVICE BlockRuns runs_of_kv_block(const AttentionParams& params, int batch, int head,
                                             int block) {
    const TileMask& mask = params.tile_mask;
    return {mask.q_tiles + (mask_index(params, batch, head) * mask.kv_blocks + block) * mask.q_row};
}

// The words of a query, and of those that follow within its Q block. With bits: of a KV block.
FLASH_HOST_DEVICE const uint32_t* words_of(const AttentionParams& params, int batch, int head,
                                           int query, int kv_block) {
    const TileMask& mask = params.tile_mask;
    int64_t block = mask_index(params, batch, head) * mask.q_blocks + query / kMaskBlock;
    if (mask.bits) block = block * mask.kv_blocks + kv_block;
    return mask.words + (block * kMaskBlock + query % kMaskBlock) * kMaskWords;
}

// Goes over the tiles of a row of runs, of which a block has kPerBlock, from the first one to the
// last ...
template <int kPerBlock>
struct TilesUp {
    const int* run;  // the next one
    int next = 0;
    int left = 0;  // of this run

    FLASH_HOST_DEVICE explicit TilesUp(const BlockRuns& runs) : run(runs.first_run()) {}

    FLASH_HOST_DEVICE int tile(int /*i*/) {
        if (left == 0) {
            const BlockRun found = block_run(*run++);
            next = found.first * kPerBlock;
            left = found.count * kPerBlock;
        }
        --left;
        return next++;
    }
};

// ... or from the last one to the first. Runs are read one ahead, lest a producer waits for memory;
// before the first one is the header's 0. Tile 0 if there is none.
template <int kPerBlock>
struct TilesDown {
    const int* run;
    uint32_t ahead;
    int next = 0;
    int left = 0;

    FLASH_HOST_DEVICE explicit TilesDown(const BlockRuns& runs)
        : run(runs.first_run() + runs.runs() - 1), ahead(*run) {}

    // Leaves out the last `tiles`.
    FLASH_HOST_DEVICE void skip(int tiles) {
        for (; tiles > 0; tiles -= left, left = 0) {
            tile(0);
            ++left;
            if (tiles < left) {
                left -= tiles;
                next -= tiles - 1;
                return;
            }
        }
    }

    FLASH_HOST_DEVICE int tile(int /*i*/) {
        if (left == 0) {
            const BlockRun found = block_run(ahead);
            next = max_of((found.first + found.count) * kPerBlock - 1, 0);
            left = found.count * kPerBlock;
            ahead = *--run;
        }
        --left;
        return next--;
    }
};

}  // namespace flash_ext
