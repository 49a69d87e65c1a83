// A mask as lists of the blocks of 128 queries and 128 keys that it shows.
//
// Each Q block has a row of runs of the KV blocks that it sees, and each KV block one of the Q
// blocks that see it:
//
//     number of full blocks, number of partial ones, number of runs, order, run, run, ...
//
// The order of row i is the index of the row that comes as number i if the longest ones come first.
// A run is its first block | its number of blocks << 16. In a full block every query sees every
// key. Runs of full blocks come first, then runs of partial ones, both in ascending order. Of a
// partial block a query sees what its 16 bytes of `words` say:
//
//     bits        of the keys of this block: bit b of word w is key 8 (b / 2) + 2 w + b % 2, since
//                 these are the columns of lane w of four in a fragment (tile/fragment.cuh)
//     intervals   of all keys, two: begin, end, begin, end
#pragma once

#include <climits>
#include <cstdint>

#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
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
    FLASH_HOST_DEVICE int in_order() const { return row[3]; }
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

// From the first block of the row to the last one.
FLASH_HOST_DEVICE Interval blocks_hull(const BlockRuns& runs) {
    Interval hull{0, 0};
    for (int i = 0; i < runs.runs(); ++i) {
        const BlockRun run = block_run(runs.first_run()[i]);
        hull.begin = i == 0 ? run.first : min_of(hull.begin, run.first);
        hull.end = max_of(hull.end, run.first + run.count);
    }
    return hull;
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
    return int64_t{batch} * mask.batch_stride + head / mask.by_group;
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
// what is before the first one is not used. Tile 0 if there is none.
template <int kPerBlock>
struct TilesDown {
    const int* run;
    uint32_t ahead;
    int next = 0;
    int left = 0;

    FLASH_HOST_DEVICE explicit TilesDown(const BlockRuns& runs)
        : run(runs.first_run() + runs.runs() - 1), ahead(runs.runs() == 0 ? 0 : *run) {}

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

// The KV tiles of a Q tile in a kernel that may have such a mask, from the last one to the first:
// as VisibleTiles has them, or by a row of runs. Only the tile where the loop is and the two before
// it have numbers; step() goes on to the one before.
template <int kPerBlock>
struct ListedTiles {
    static constexpr int begin = 0;  // indices count from the first of those that it goes over
    int end;
    int first_partial;  // tiles from this index on are of partial blocks
    int run;            // of ahead[2]; without a list unused
    int ahead[3];       // tile i, tile i - 1, tile i - 2

    FLASH_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
    FLASH_HOST_DEVICE constexpr bool is_partial(int i) const { return i >= first_partial; }

    FLASH_HOST_DEVICE static ListedTiles of_band(const VisibleTiles& tiles) {
        const int last = tiles.end - 1;
        return {tiles.count(), INT_MAX, 0, {last, last - 1, last - 2}};
    }

    // Of all tiles of the row that begin before `seqlen_k`: the others are the last ones, since a
    // block that the sequence does not fill is a partial one. share_of(all): those to go over.
    template <class ShareOf>
    FLASH_HOST_DEVICE static ListedTiles of_runs(const BlockRuns& runs, int seqlen_k, int block,
                                                 ShareOf share_of) {
        ListedTiles tiles{0, 0, runs.runs(), {}};
        if (runs.runs() == 0) return tiles;
        const BlockRun last = block_run(runs.first_run()[runs.runs() - 1]);
        const int past = (last.first + last.count) * kPerBlock - ceil_div(seqlen_k, block);
        const int all = runs.count() * kPerBlock - max_of(past, 0);
        const VisibleTiles share = share_of(VisibleTiles{0, all});
        tiles.end = share.count();
        tiles.first_partial = runs.full() * kPerBlock - share.begin;
        int skipped = runs.count() * kPerBlock - share.end;
        while (true) {  // to the run of the last tile
            const BlockRun found = block_run(runs.first_run()[--tiles.run]);
            tiles.ahead[2] = (found.first + found.count) * kPerBlock - 1 - skipped;
            if (skipped < found.count * kPerBlock || tiles.run == 0) break;
            skipped -= found.count * kPerBlock;
        }
        tiles.step(runs);
        tiles.step(runs);
        return tiles;
    }

    FLASH_HOST_DEVICE void step() {
        ahead[0] = ahead[1];
        ahead[1] = ahead[2];
        --ahead[2];
    }
    // By the row of runs; what comes before its first tile is never used.
    FLASH_HOST_DEVICE void step(const BlockRuns& runs) {
        const bool first_of_run = ahead[2] == block_run(runs.first_run()[run]).first * kPerBlock;
        step();
        if (!first_of_run || run == 0) return;
        const BlockRun found = block_run(runs.first_run()[--run]);
        ahead[2] = (found.first + found.count) * kPerBlock - 1;
    }
};

// The Q tiles that see a KV tile in such a kernel, for one query head of the group after another,
// each by the list of its head; without a mask those of the band. A place in that order:
struct ListedQTile {
    int head;  // -1: after the last one
    int tile;
    int left;  // tiles of this head, from this one on
    int run;   // of the list
    bool partial;
};

template <int kPerBlock>
struct QTileList {
    const BackwardParams& params;
    const Sequence& sequence;
    VisibleTiles band;
    int head_k;
    int kv_block;

    FLASH_HOST_DEVICE bool listed() const { return params.tile_mask.kv_tiles != nullptr; }
    FLASH_HOST_DEVICE BlockRuns runs(int head) const {
        return runs_of_kv_block(params, sequence.batch, head, kv_block);
    }

    // The first tile of the query heads from this one on.
    FLASH_HOST_DEVICE ListedQTile first(int head) const {
        const int end = (head_k + 1) * (params.heads_q / params.heads_k);
        if (!listed())
            return {band.empty() || head == end ? -1 : head, band.begin, band.count(), 0, false};
        for (; head < end; ++head) {
            const BlockRuns list = runs(head);
            if (list.count() > 0)
                return {head, block_run(*list.first_run()).first * kPerBlock,
                        list.count() * kPerBlock, 0, list.full() == 0};
        }
        return {-1};
    }
    FLASH_HOST_DEVICE ListedQTile first() const {
        return first(head_k * (params.heads_q / params.heads_k));
    }

    FLASH_HOST_DEVICE ListedQTile after(ListedQTile x) const {
        if (x.head < 0) return x;
        if (--x.left == 0) return first(x.head + 1);
        ++x.tile;
        if (!listed()) return x;
        const BlockRuns list = runs(x.head);
        const BlockRun run = block_run(list.first_run()[x.run]);
        if (x.tile == (run.first + run.count) * kPerBlock)
            x.tile = block_run(list.first_run()[++x.run]).first * kPerBlock;
        x.partial = x.left <= (list.count() - list.full()) * kPerBlock;
        return x;
    }
    // Without tiles past the sequence, which the last block may have.
    FLASH_HOST_DEVICE ListedQTile next(ListedQTile x) const {
        do {
            x = after(x);
        } while (x.head >= 0 && x.tile * (kMaskBlock / kPerBlock) >= sequence.seqlen_q);
        return x;
    }
};

}  // namespace flash_ext
