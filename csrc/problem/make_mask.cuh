// Masks of blocks (tile_mask.cuh) from dense masks, intervals of keys, documents and kinds of
// blocks: the parameters of their kernels, what a query sees of its document, and what the
// intervals of 128 queries show of each KV block.
#pragma once

#include <bit>
#include <cstdint>

#include "problem/params.h"
#include "problem/tile_mask.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// A tensor of bytes or ints that the caller gives, in any strides.
template <class T>
struct MaskInput {
    const T* data = nullptr;
    int64_t strides[4] = {0, 0, 0, 0};

    FLASH_HOST_DEVICE const T* row(int batch, int head, int64_t i) const {
        return data + batch * strides[0] + head * strides[1] + i * strides[2];
    }
};

// Two intervals of keys, half-open. An empty one is 0, 0.
struct alignas(16) KeyIntervals {
    int begin_0 = 0, end_0 = 0;
    int begin_1 = 0, end_1 = 0;
};

// The same within [0, seqlen_k), in ascending order, and one if they touch.
FLASH_HOST_DEVICE constexpr KeyIntervals tidy(KeyIntervals x, int seqlen_k) {
    int begin_0 = max_of(x.begin_0, 0), end_0 = min_of(x.end_0, seqlen_k);
    int begin_1 = max_of(x.begin_1, 0), end_1 = min_of(x.end_1, seqlen_k);
    const bool has_0 = begin_0 < end_0, has_1 = begin_1 < end_1;
    if (!has_0 && !has_1) return {};
    if (!has_0) return {begin_1, end_1, 0, 0};
    if (!has_1) return {begin_0, end_0, 0, 0};
    if (max_of(begin_0, begin_1) <= min_of(end_0, end_1))
        return {min_of(begin_0, begin_1), max_of(end_0, end_1), 0, 0};
    if (begin_0 < begin_1) return {begin_0, end_0, begin_1, end_1};
    return {begin_1, end_1, begin_0, end_0};
}

// The keys of a query's document, and the query's position among all keys.
struct Document {
    int begin = 0;
    int end = 0;
    int position = 0;
    int first_keys = 0;  // how many of them every query sees
};

// What the queries of documents see: a window about the query's position, and the first keys.
struct DocumentMask {
    int window_left;  // never negative, as of BandMask
    int window_right;
    bool first_keys_in_window;  // are first keys beyond the window's right side hidden?

    FLASH_HOST_DEVICE constexpr KeyIntervals intervals(const Document& x) const {
        const int low = max_of(x.position - window_left, x.begin);
        const int high = min_of(x.position + window_right + 1, x.end);
        const int first = min_of(x.begin + x.first_keys, first_keys_in_window ? high : x.end);
        return {x.begin, first, max_of(low, first), high};
    }
};

// The first and the last token of a block of 128 with which a document begins; without one past all
// tokens, and -1.
struct FirstTokens {
    int first;
    int last;
};

// Where documents are: each stretch of equal ids is one, but tokens of negative ids see nothing; or
// sequences have offsets; or all tokens are one document.
struct Documents {
    const void* ids = nullptr;  // (Bm, S)
    bool ids_have_64_bits = false;
    int64_t ids_strides[2] = {0, 0};
    FirstTokens* first_tokens = nullptr;  // (Bm, blocks), of ids

    const int* cu_seqlens_q = nullptr;  // (count + 1)
    const int* cu_seqlens_k = nullptr;
    int count = 0;

    const int* first_keys = nullptr;  // of each document, each matrix, or all
    int64_t first_keys_stride = 0;
    DocumentMask mask{};
};

// Blocks begin to end - 1. Rows of none begin past all others.
struct BlockRange {
    static constexpr int kNone = kMostMaskBlocks;

    uint16_t begin = kNone;
    uint16_t end = kNone;

    FLASH_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
    FLASH_HOST_DEVICE constexpr bool has(int block) const { return begin <= block && block < end; }
};
FLASH_HOST_DEVICE constexpr BlockRange block_range(int begin, int end) {
    if (end <= begin) return {};
    return {static_cast<uint16_t>(begin), static_cast<uint16_t>(end)};
}

// Two ranges, in ascending order, and one if they touch.
struct BlockRanges {
    BlockRange first, second;

    FLASH_HOST_DEVICE constexpr bool has(int block) const {
        return first.has(block) || second.has(block);
    }
};
FLASH_HOST_DEVICE constexpr BlockRanges join(BlockRange a, BlockRange b) {
    const BlockRange low = a.begin <= b.begin ? a : b;
    const BlockRange high = a.begin <= b.begin ? b : a;
    if (high.begin > low.end) return {low, high};
    return {block_range(low.begin, max_of(low.end, high.end)), {}};
}

// What the intervals of the queries of a Q block show: all KV blocks of which any query sees a key
// are in `seen` (and maybe others between them). Of those in `full` every query sees all.
struct alignas(16) BlockHulls {
    BlockRanges seen;
    BlockRanges full;

    FLASH_HOST_DEVICE constexpr BlockKind kind(int kv_block) const {
        if (full.has(kv_block)) return BlockKind::kFull;
        return seen.has(kv_block) ? BlockKind::kPartial : BlockKind::kHidden;
    }
};

// Calls visit(range, kind) for the full blocks, then for the others in ascending order: at most 2
// and 4 ranges that are not empty.
template <class Visit>
FLASH_HOST_DEVICE constexpr void for_each_range(const BlockHulls& hulls, Visit visit) {
    const BlockRange first = hulls.full.first, second = hulls.full.second;
    visit(first, BlockKind::kFull);
    visit(second, BlockKind::kFull);
    const auto visit_others = [&](BlockRange seen) {
        visit(block_range(seen.begin, min_of(seen.end, first.begin)), BlockKind::kPartial);
        visit(block_range(max_of(seen.begin, first.end), min_of(seen.end, second.begin)),
              BlockKind::kPartial);
        visit(block_range(max_of(seen.begin, second.end), seen.end), BlockKind::kPartial);
    };
    visit_others(hulls.seen.first);
    visit_others(hulls.seen.second);
}

// The most runs of a mask of intervals: of a Q block (see above), and of a KV block.
inline constexpr int kIntervalRunsOfQueries = 6;
inline constexpr int kIntervalRunsOfKeys = 4;

// A row of runs as it is written.
struct RowWriter {
    int* row;
    int full = 0;
    int partial = 0;
    int runs = 0;

    FLASH_HOST_DEVICE constexpr void add(BlockRange range, BlockKind kind) {
        if (range.empty()) return;
        const int count = range.end - range.begin;
        (kind == BlockKind::kFull ? full : partial) += count;
        row[kMaskHeader + runs++] = static_cast<int>(mask_run(range.begin, count));
    }
    FLASH_HOST_DEVICE constexpr void write_header() {
        row[0] = full;
        row[1] = partial;
        row[2] = runs;
        row[3] = 0;
    }
};

// The longer a row, the lower its class, of kLengthClasses; rows of one class are about equally
// long. By the exponent and two bits of the mantissa of the number of its blocks.
inline constexpr int kLengthClasses = 64;

FLASH_HOST_DEVICE constexpr int length_class(int blocks) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(blocks)) >> 21;
    return blocks == 0 ? kLengthClasses - 1
                       : max_of(kLengthClasses + 506 - static_cast<int>(bits), 0);
}

struct MakeMaskParams {
    int batch;     // Bm: B or 1
    int heads;     // Hm: Hq, Hk or 1
    int seqlen_q;  // of dense masks and intervals
    int seqlen_k;
    int q_blocks;
    int kv_blocks;

    MaskInput<uint8_t> dense;     // (Bm, Hm, Sq, Sk) bools, or null
    MaskInput<int> intervals;     // (Bm, Hm, Sq, 4), or null
    Documents documents;          // in place of intervals if it has first_keys
    MaskInput<uint8_t> kinds;     // (Bm, Hm, Q blocks, KV blocks), or null. With intervals: 0 hides
    uint8_t* new_kinds;           // the same of a dense mask, contiguous
    BlockHulls* hulls = nullptr;  // (Bm, Hm, Q blocks), of intervals and documents

    int* kv_tiles;    // (Bm, Hm, Q blocks, kv_row)
    int* q_tiles;     // (Bm, Hm, KV blocks, q_row)
    uint32_t* words;  // as in TileMask
    int kv_row;
    int q_row;
};

}  // namespace flash_ext
