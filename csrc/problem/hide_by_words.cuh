// Hides the scores that a mask of tiles does not show.
#pragma once

#include "problem/score.cuh"
#include "problem/tile_mask.cuh"

namespace flash_ext {

using MaskWords = uint32_t[kMaskWords];

// The columns of a lane, 0, 1, 8, 9, 16, ..., that an interval has, as bits.
FLASH_DEVICE uint32_t lane_columns(int begin, int end) {
    const int from = columns_before(begin);
    return ptx::bit_range(from, max_of(columns_before(end) - from, 0));
}

// Hides what the words of its query do not show of each row, words_of(row), in a tile whose columns
// are the keys from first_key on. `bits`: of the whole block of keys. none: they show nothing.
template <class Scores, class WordsOf>
FLASH_DEVICE void hide_keys(Scores& s, WordsOf words_of, bool bits, bool none, int first_key) {
    static_assert(2 * Scores::kN <= 32);
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const MaskWords& row = words_of(ptx::not_hoisted(16 * m + lane_row() + 8 * i));
            uint32_t visible;
            if (bits) {
                visible = row[lane_id() % 4] >> first_key % kMaskBlock / 4;
            } else {
                const int first = first_key + lane_col();
                const auto columns = [&](int at) {
                    return lane_columns(static_cast<int>(row[at]) - first,
                                        static_cast<int>(row[at + 1]) - first);
                };
                visible = columns(0) | columns(2);
            }
            if (none) visible = 0;
#pragma unroll
            for (int j = 0; j < 2 * Scores::kN; ++j)
                if (!(visible >> j & 1)) s.v[m][j / 2][2 * i + j % 2] = -INFINITY;
        }
}

// If rows are keys, the elements of this lane that are visible, as bits: of eight columns of a warp
// a lane's, in the order of a fragment, have four bits of a word.
template <class Scores>
struct VisibleElements {
    uint32_t of_columns[Scores::kM][ceil_div(Scores::kN, 8)];
};

// What the words of queries show of a tile whose columns they are. A warp's rows are the keys from
// first_key on.
template <class Scores>
FLASH_DEVICE VisibleElements<Scores> visible_elements(const MaskWords* words, bool bits,
                                                      int first_key) {
    const int key = first_key + lane_row();
    const int bit = first_key % kMaskBlock / 4 + lane_row() % 2;
    VisibleElements<Scores> found{};
#pragma unroll
    for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const MaskWords& query = words[8 * n + lane_col() + e];
#pragma unroll
            for (int m = 0; m < Scores::kM; ++m) {
                uint32_t two = 0;  // bits 0 and 2: of two rows
                if (bits) {
                    two = query[lane_row() / 2] >> (bit + 4 * m) & 5;
                } else {
                    const auto within = [&](int row, int at) {
                        return static_cast<uint32_t>(key + 16 * m + row) - query[at] <
                               query[at + 1] - query[at];
                    };
                    two = (within(0, 0) || within(0, 2) ? 1 : 0) |
                          (within(8, 0) || within(8, 2) ? 4 : 0);
                }
                found.of_columns[m][n / 8] |= two << (n % 8 * 4 + e);
            }
        }
    return found;
}

// Hides the others.
template <class Scores>
FLASH_DEVICE void hide_queries(Scores& s, const VisibleElements<Scores>& visible) {
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(visible.of_columns[m][n / 8] >> (n % 8 * 4 + i) & 1))
                    s.v[m][n][i] = -INFINITY;
}

// Hides what the mask in memory does not show of queries and keys within a block.
template <class Scores>
FLASH_DEVICE void hide_by_words(Scores& s, const AttentionParams& params, const Sequence& sequence,
                                int head, int first_query, int first_key) {
    const int block = first_key / kMaskBlock;
    const BlockKind kind =
        kind_of(runs_of_q_block(params, sequence.batch, head, first_query / kMaskBlock), block);
    if (kind == BlockKind::kFull) return;
    if (kind == BlockKind::kHidden) {
        s.for_each([](float& x, int, int) { x = -INFINITY; });
        return;
    }
    const auto words = [&](int row) -> const MaskWords& {
        return *reinterpret_cast<const MaskWords*>(
            words_of(params, sequence.batch, head, first_query + row, block));
    };
    hide_keys(s, words, params.tile_mask.bits, /*none=*/false, first_key);
}

}  // namespace flash_ext
