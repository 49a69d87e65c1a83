// What happens to a tile of scores between Q K^T and the softmax, and in the backward: scale,
// softcap, ALiBi, bias, mask and dropout, for tiles whose rows are queries (forward) and tiles
// whose rows are keys (backward). All kernels of all variants use this code.
#pragma once

#include <type_traits>

#include "problem/dropout.cuh"
#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/uniform.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// The scale of scores that include it.
struct Unscaled {
    FLASH_DEVICE constexpr operator float() const { return 1.f; }
};

// The scale of scores from which ALiBi has not been subtracted, on one side of the diagonal, where
// its distances are linear in the key: of an element x in this lane's column `col` and row 8 i the
// score is scale x + slope col + first[i]. By default scores are complete.
struct LinearScale {
    float scale = 1.f;
    float slope = 0.f;
    float first[2] = {0.f, 0.f};

    // Of scores which are now complete.
    FLASH_DEVICE Unscaled complete() {
        *this = {};
        return {};
    }
    // See OptimisticSoftmax::exponents().
    FLASH_DEVICE auto exponents(const float (&subtracted)[2]) const {
        const float from[2] = {first[0] - subtracted[0], first[1] - subtracted[1]};
        return [=, *this](float x, int i, int column) {
            return fmaf(x, scale, fmaf(slope, static_cast<float>(column), from[i]));
        };
    }
};

// The scale of scores that a softcap has not changed yet, but will change little: of a score x it
// is factor[0] + t (factor[1] + t factor[2]), a series of tanh, with t = x^2 + offset. Scores are
// near enough if all t, as bits, are below the limit: there another exponent begins.
struct TanhSeries {
    float offset;
    float factor[3];
    float cap;  // the scale of complete scores
    uint32_t limit;
    uint32_t& bits;  // of all t
    bool& far;       // are scores of the Q tile not near enough?

    FLASH_DEVICE bool is_far() const { return bits >= limit; }

    FLASH_DEVICE float complete() {
        offset = factor[1] = factor[2] = 0.f;
        factor[0] = cap;
        return cap;
    }
    FLASH_DEVICE auto exponents(const float (&subtracted)[2]) const {
        return [=, *this, &subtracted](float x, int i, int) {
            const float t = fmaf(x, x, offset);
            bits |= __float_as_uint(t);
            const float scale = fmaf(t, fmaf(t, factor[2], factor[1]), factor[0]);
            return fmaf(x, scale, -subtracted[i]);
        };
    }
};

// The factor from scores to exponents of 2. A kernel that changes scores multiplies them before it
// masks them (the scale may be zero or negative), the others inside the exponent.
template <OptionSet kOptions>
FLASH_DEVICE auto exponent_scale(const AttentionParams& params) {
    if constexpr (only_softcap(kOptions)) {
        return params.softcap_log2;
    } else if constexpr (changes_scores(kOptions)) {
        return Unscaled{};
    } else {
        return params.scale_log2;
    }
}

// The score of (query i, key j) is, in this order and in base 2,
//     s = scale q_i k_j,  s = c tanh(s / c) with softcap c,
//     s -= slope |i + seqlen_k - seqlen_q - j| with ALiBi,  s += bias_ij.
// For kernels whose options change scores. Elements are addressed by position within the sequence:
// a tile's row 0 and column 0 are at first_row and first_col.
// kExactTanh: to a few units in the last place, or to 2^-11.
template <class Element, Rows kRows, OptionSet kOptions, bool kExactTanh = true>
struct ScoreFunction {
    const AttentionParams& params;
    const Sequence& sequence;
    int head;

    // ALiBi's, in base 2.
    FLASH_DEVICE float alibi_slope() const {
        const int64_t batch = sequence.index();
        return kLog2e * params.alibi_slopes[batch * params.alibi_batch_stride + head];
    }

    template <class Scores>
    FLASH_DEVICE void apply(Scores& s, int first_row, int first_col) const {
        if constexpr (only_softcap(kOptions)) {
            s.map([&](float x) { return approximate_tanh(x); });
        } else if (contains(kOptions, OptionSet::kSoftcap) && params.softcap != 0.f) {
            if constexpr (kExactTanh) {
                apply_softcap(s);
            } else {
                s.map([&](float x) { return params.softcap_log2 * approximate_tanh(x); });
            }
        } else {
            s.scale(params.scale_log2);
        }
        add_offsets(s, first_row, first_col, 1.f);
    }

    // The same with a tile of the bias in shared memory, and no other option: bias.load_a(a, m, k)
    // fetches the elements that lie as an operand A's do.
    template <class Scores, class BiasBlocks>
    FLASH_DEVICE void apply(Scores& s, const BiasBlocks& bias) const {
        static_assert((kOptions & (OptionSet::kRareScale | OptionSet::kSoftcap |
                                   OptionSet::kAlibi)) == OptionSet::kNone);
        const float scale = params.scale_log2;
#pragma unroll
        for (int k = 0; k < Scores::kN / 2; ++k)
#pragma unroll
            for (int m = 0; m < Scores::kM; ++m) {
                uint32_t packed[4];
                bias.load_a(packed, m, k);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float* x = s.v[m][2 * k + i / 2] + i % 2 * 2;
                    const float2 b = ptx::unpack<Element>(packed[i]);
                    x[0] = __fmaf_rz(kLog2e, b.x, x[0] * scale);
                    x[1] = __fmaf_rz(kLog2e, b.y, x[1] * scale);
                }
            }
    }

    // ds becomes the gradient of scale q k, by the factor 1 - tanh^2. p is the softmax's value,
    // from which tanh is recomputed: log2(p) + lse_of(query) is what apply() returned, with the
    // query's row or column in the tile.
    template <class Scores, class LseOfQuery>
    FLASH_DEVICE void softcap_gradient(Scores& ds, const Scores& p, int first_row, int first_col,
                                       LseOfQuery lse_of) const {
#pragma unroll
        for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
                RegisterTile<16, 8> t;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int query = kRows == Rows::kQueries ? 16 * m + lane_row() + i / 2 * 8
                                                              : 8 * n + lane_col() + i % 2;
                    t.v[0][0][i] = ptx::lg2(p.v[m][n][i]) + lse_of(query);
                }
                add_offsets(t, first_row + 16 * m, first_col + 8 * n, -1.f);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float tanh = t.v[0][0][i] * params.inverse_softcap_log2;
                    float& x = ds.v[m][n][i];
                    x = p.v[m][n][i] == 0.f ? 0.f : x * (1.f - tanh * tanh);
                }
            }
    }

 private:
    // tanh(scale q k / c) by one instruction. Its relative error is at most 2^-11, and so the
    // absolute one of a score c / 2^11 (docs/notes/031-options.md).
    FLASH_DEVICE float approximate_tanh(float x) const { return ptx::tanh(params.tanh_scale * x); }

    // c tanh(scale q k / c) = c (1 - 2 / (1 + 2^x)), accurate to a few units in the last place:
    // near 0, where that cancels, by the series of tanh(x / kTwoLog2e).
    template <class Scores>
    FLASH_DEVICE void apply_softcap(Scores& s) const {
        constexpr float kTwoLog2e = 2.f * kLog2e;
        const float exponent = kTwoLog2e * params.tanh_scale;
        const float cap = params.softcap_log2;
        const float first = cap / kTwoLog2e;
        const float third = first * (-1.f / 3.f / (kTwoLog2e * kTwoLog2e));
        const float fifth = third * (-2.f / 5.f / (kTwoLog2e * kTwoLog2e));
        s.for_each([&](float& score, int, int) {
            const float x = exponent * score;
            const float y = x * x;
            const float near = x * (first + y * (third + y * fifth));
            const float far = cap - cap * ptx::rcp(0.5f + 0.5f * ptx::ex2(x));
            score = y < 0.004f * (kTwoLog2e * kTwoLog2e) ? near : far;
        });
    }

    // s += sign (ALiBi + bias)
    template <class Scores>
    FLASH_DEVICE void add_offsets(Scores& s, int first_row, int first_col, float sign) const {
        if (contains(kOptions, OptionSet::kAlibi) && params.alibi_slopes != nullptr) {
            const float slope = sign * alibi_slope();
            const int offset = sequence.seqlen_k - sequence.seqlen_q;
            if constexpr (kRows == Rows::kQueries) {
                // query + offset - key of this lane's first score. As a float, exact up to 2^24, so
                // that not every distance is converted (docs/notes/007-options.md).
                const float first = first_row + lane_row() + offset - first_col - lane_col();
                s.for_each([&](float& x, int row, int col) {
                    x -= slope * fabsf(first + static_cast<float>(row - col));
                });
            } else {
                // For that ptxas has no registers in FA3's backward at head dim 64.
                const int first = first_col + offset - first_row;
                s.for_each([&](float& x, int row, int col) {
                    const int distance = first + (col + lane_col()) - (row + lane_row());
                    x -= slope * fabsf(static_cast<float>(distance));
                });
            }
        }
        if constexpr (contains(kOptions, OptionSet::kBias)) {
            if (params.bias.data == nullptr) return;
            const BiasTile tile = bias_tile(first_row, first_col);
            switch (params.bias.type) {
                case BiasType::kElement:
                    add_bias<Element>(s, tile, sign * kLog2e);
                    break;
                case BiasType::kFloat32:
                    add_bias<float>(s, tile, sign * kLog2e);
                    break;
                case BiasType::kBool:
                    add_bias<bool>(s, tile, 1.f);
                    break;
            }
            // Positions of the sequence that are outside the bias are hidden.
            if (tile.rows < Scores::kRows || tile.cols < Scores::kCols) {
                const int rows = tile.rows - lane_row();
                const int cols = tile.cols - lane_col();
                s.for_each([&](float& x, int row, int col) {
                    if (row >= rows || col >= cols) x = -INFINITY;
                });
            }
        }
    }

    // The bias of a tile, in elements: the offset of its first row and column, its strides, and how
    // many of the tile's rows and columns it has (may be <= 0).
    struct BiasTile {
        int64_t offset;
        int64_t row_stride;
        int64_t col_stride;
        int rows;
        int cols;
    };

    FLASH_DEVICE BiasTile bias_tile(int first_row, int first_col) const {
        constexpr int kRowDim = kRows == Rows::kQueries ? 2 : 3;
        constexpr int kColDim = 5 - kRowDim;
        const Bias& bias = params.bias;
        const auto reach = [&](int dim) {
            const int length = dim == 2 ? sequence.seqlen_q : sequence.seqlen_k;
            return bias.sizes[dim] == 1 ? length : min_of(length, bias.sizes[dim]);
        };
        const int64_t row_stride = bias.strides[kRowDim];
        const int64_t col_stride = bias.strides[kColDim];
        return {sequence.index() * bias.strides[0] + head * bias.strides[1] +
                    first_row * row_stride + first_col * col_stride,
                row_stride, col_stride, reach(kRowDim) - first_row, reach(kColDim) - first_col};
    }

    template <class BiasElement, class Scores>
    FLASH_DEVICE void add_bias(Scores& s, const BiasTile& tile, float factor) const {
        const auto* first = static_cast<const BiasElement*>(params.bias.data) + tile.offset;
        // Computed again: over the loop of the kernel they would take registers.
        const int lane_row = ptx::not_hoisted(flash_ext::lane_row());
        const int lane_col = ptx::not_hoisted(flash_ext::lane_col());
        const auto add = [&](float& x, BiasElement b) {
            if constexpr (std::is_same_v<BiasElement, bool>) {
                if (!b) x = -INFINITY;
            } else {
                // Rounded towards zero, so that finite numbers stay finite in base 2, such as the
                // most negative one, which masks use.
                x = __fmaf_rz(factor, ptx::to_float(b), x);
            }
        };
        // Inside the bias, and with contiguous keys, addresses differ by constants, so that many
        // loads are in flight.
        constexpr bool kByQuery = kRows == Rows::kQueries;
        const bool inside = tile.rows >= Scores::kRows && tile.cols >= Scores::kCols &&
                            (kByQuery ? tile.col_stride : tile.row_stride) == 1;
        if (kByQuery && inside && params.bias.paired) {
            const BiasElement* element = first + lane_row * tile.row_stride + lane_col;
#pragma unroll
            for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const BiasElement* row = element + (16 * m + 8 * i) * tile.row_stride;
                    BiasElement b[Scores::kN][2];
#pragma unroll
                    for (int n = 0; n < Scores::kN; ++n) ptx::load_pair(b[n], row + 8 * n);
#pragma unroll
                    for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) add(s.v[m][n][2 * i + e], b[n][e]);
                }
        } else if (!kByQuery && inside) {
            const BiasElement* element = first + lane_row + lane_col * tile.col_stride;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
                BiasElement b[2][Scores::kM][2];
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            b[e][m][i] = element[(8 * n + e) * tile.col_stride + 16 * m + 8 * i];
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                        for (int i = 0; i < 2; ++i) add(s.v[m][n][2 * i + e], b[e][m][i]);
            }
        } else if (tile.rows > 0 && tile.cols > 0) {
            // In place of an element outside the nearest one inside is read: no branches. Keys lie
            // side by side, or there is one for all.
            const auto row_at = [](int index) { return index / 2 * 16 + index % 2 * 8; };
            const auto col_at = [](int index) { return index / 2 * 8 + index % 2; };
            const int last_query = (kByQuery ? tile.rows : tile.cols) - 1;
            const int last_key =
                params.bias.sizes[3] == 1 ? 0 : (kByQuery ? tile.cols : tile.rows) - 1;
            const int64_t query_stride = params.bias.strides[2];
#pragma unroll
            for (int q = 0; q < 2 * (kByQuery ? Scores::kM : Scores::kN); ++q) {
                const int query = kByQuery ? lane_row + row_at(q) : lane_col + col_at(q);
                const BiasElement* row = first + min_of(query, last_query) * query_stride;
                const int lane_key = ptx::not_hoisted(kByQuery ? lane_col : lane_row);
#pragma unroll
                for (int k = 0; k < 2 * (kByQuery ? Scores::kN : Scores::kM); ++k) {
                    const int key = lane_key + (kByQuery ? col_at(k) : row_at(k));
                    float& x = kByQuery ? s.v[q / 2][k / 2][2 * (q % 2) + k % 2]
                                        : s.v[k / 2][q / 2][2 * (k % 2) + q % 2];
                    add(x, row[min_of(key, last_key)]);
                }
            }
        }
    }
};

// How many of a lane's columns, 0, 1, 8, 9, 16, 17, ..., are before a column.
FLASH_DEVICE int columns_before(int column) {
    const uint32_t x = max_of(column, 0);
    return static_cast<int>((x + 7) / 8 + (x + 6) / 8);
}

// Hides all but the columns in range_of_row(row), an interval of positions; the tile's columns
// begin at first_col. Rows count from the warp's first.
//
// The visible columns of a lane's row are a run, so they are first written as bits of a word: from
// these the compiler makes seven predicates with one instruction (R2P), where comparisons take two
// instructions each. But R2P needs all predicates, and a warp of 32 rows has no registers for the
// values that they hold then.
template <class Scores, class RangeOfRow>
FLASH_DEVICE void mask_scores(Scores& s, int first_col, RangeOfRow range_of_row) {
    constexpr int kColumns = 2 * Scores::kN;  // a lane's
#pragma unroll
    for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Interval range = range_of_row(ptx::not_hoisted(16 * m + lane_row() + 8 * i));
            // Relative to this lane, so that each column compares with a compile-time constant.
            const int begin = range.begin - first_col - lane_col();
            const int end = range.end - first_col - lane_col();
            const auto score = [&](int column) -> float& {
                return s.v[m][column / 2][2 * i + column % 2];
            };
            if constexpr (Scores::kM == 1) {
#pragma unroll
                for (int first = 0; first < kColumns; first += 32) {
                    const int from = max_of(columns_before(begin) - first, 0);
                    const int until = max_of(columns_before(end) - first, from);
                    const uint32_t visible = ptx::bit_range(from, until - from);
#pragma unroll
                    for (int j = 0; j < min_of(kColumns - first, 32); ++j)
                        if (!(visible >> j & 1)) score(first + j) = -INFINITY;
                }
            } else {
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const int column = c / 2 * 8 + c % 2;
                    if (column < begin || column >= end) score(c) = -INFINITY;
                }
            }
        }
}

FLASH_DEVICE DropoutMask dropout_mask(const AttentionParams& params, const Sequence& sequence,
                                      int head) {
    return DropoutMask(params.rng_state[0], params.rng_state[1],
                       static_cast<int64_t>(sequence.index()) * params.heads_q + head,
                       params.drop_threshold);
}

// The same in uniform registers, to keep it over a loop: there dropout_mask() would read HBM each
// time, which takes as long as an iteration.
FLASH_DEVICE DropoutMask uniform_dropout_mask(const AttentionParams& params,
                                              const Sequence& sequence, int head) {
    DropoutMask mask = dropout_mask(params, sequence, head);
    mask.key_low = ptx::warp_uniform(mask.key_low);
    mask.key_high = ptx::warp_uniform(mask.key_high);
    return mask;
}

// The numbers of the elements in these rows and columns of keep(): in the lower half by word
// `first`, in the upper one by `second`.
FLASH_DEVICE uint32_t pair_of(uint32_t first, uint32_t second, int row_half, int col_half) {
    // The upper halves of the words, rotated by 8 (2 row half + column half).
    constexpr uint32_t kBytes[4] = {0x7632, 0x6521, 0x5410, 0x4703};
    return ptx::byte_permute(first, second, kBytes[2 * row_half + col_half]);
}

// Bits of ones in the halves for elements that are kept. Not for p above 31/32.
FLASH_DEVICE uint32_t keep_pair(const DropoutMask& mask, uint32_t first, uint32_t second,
                                int row_half, int col_half) {
    return ptx::halves_from(pair_of(first, second, row_half, col_half), mask.drop_threshold);
}

// visit(j, keep) for the two elements that words 0 and 1 decide in these rows and columns.
template <OptionSet kOptions, class Visit>
FLASH_DEVICE void visit_pair(const DropoutMask& mask, const uint32_t (&words)[2], int row_half,
                             int col_half, Visit visit) {
    bool keep[2];
    if constexpr (drops_pairs(kOptions)) {
        ptx::are_halves_from(pair_of(words[0], words[1], row_half, col_half), mask.drop_threshold,
                             keep[0], keep[1]);
    } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) keep[j] = mask.keep(words[j], row_half, col_half);
    }
    visit(0, keep[0]);
    visit(1, keep[1]);
}

// The words of a lane's columns 2 c and 2 c + 1 of a 16x16 block; a `step` leads from one to the
// next.
FLASH_DEVICE void draw_words(uint32_t (&words)[2], const DropoutMask& mask, uint32_t place,
                             uint32_t step) {
    words[0] = mask.word(place);
    words[1] = mask.word(place + step);
}

// Dropout of P as the operand of P V, by pairs. place: of this lane's first word.
template <int kCols, class Operand>
FLASH_DEVICE void drop_pairs(Operand& p, const DropoutMask& mask, uint32_t place) {
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
        uint32_t words[2];
        draw_words(words, mask, place + 8 * n * DropoutMask::kColStep, DropoutMask::kColStep);
#pragma unroll
        for (int j = 0; j < 4; ++j)  // of an A fragment: row half j % 2, column half j / 2
            p.v[n][j] &= keep_pair(mask, words[0], words[1], j % 2, j / 2);
    }
}

// visit(m, n, i, keep) for every element of a tile whose rows are kRows, and columns the others.
// Both begin at multiples of 16.
template <OptionSet kOptions, Rows kRows, class Scores, class Visit>
FLASH_DEVICE void for_each_keep(const DropoutMask& mask, int first_query, int first_key,
                                Visit visit) {
    static_assert(Scores::kN % 2 == 0);
    constexpr bool kByQuery = kRows == Rows::kQueries;
    constexpr uint32_t kRowStep = kByQuery ? DropoutMask::kRowStep : DropoutMask::kColStep;
    constexpr uint32_t kColStep = kByQuery ? DropoutMask::kColStep : DropoutMask::kRowStep;
    const int row = lane_row(), col = lane_col();
    const uint32_t place =
        mask.place(static_cast<uint32_t>(first_query) / 2 + (kByQuery ? row : col),
                   static_cast<uint32_t>(first_key) / 2 + (kByQuery ? col : row));
#pragma unroll
    for (int n = 0; n < Scores::kN; n += 2)
#pragma unroll
        for (int m = 0; m < Scores::kM; ++m) {
            uint32_t words[2];
            draw_words(words, mask, place + 8 * m * kRowStep + 4 * n * kColStep, kColStep);
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int col = 0; col < 2; ++col)
                    visit_pair<kOptions>(
                        mask, words, kByQuery ? row : col, kByQuery ? col : row,
                        [&](int parity, bool keep) { visit(m, n + col, 2 * row + parity, keep); });
        }
}

// O and dV get the rest of 1 / (1 - p): P may have had a part of it when it was rounded.
template <OptionSet kOptions>
FLASH_DEVICE float late_factor(const AttentionParams& params) {
    if constexpr (!contains(kOptions, OptionSet::kDropout)) return 1.f;
    return drops_pairs(kOptions) ? params.p_factor * params.late_factor : params.late_factor;
}

}  // namespace flash_ext
