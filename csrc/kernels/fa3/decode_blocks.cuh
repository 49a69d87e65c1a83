// What decode.cuh computes of a block of keys: scores, P and O, with queries as the rows of the
// matmuls, or as their columns.
//
// An mma has 16 rows and 8 columns. With K and V of 8 bits instructions are what limits a CTA, and
// there are rarely more than eight queries or heads of a group. So keys are rows, and columns of V:
//
//     S^T = K Q^T,    O^T = V^T P^T
//
// is half as many mma, scores and exponentials, and O takes half of the registers. P^T comes from
// S^T by a transposition of 8x8 blocks in registers.
#pragma once

#include "kernels/common/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "tile/bytes.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

// The rows of a tile of queries are in groups of kRowsOfGroup (m), of which a lane has two (i).
template <class Element, class QTile, class KTile, class VTile>
struct QueriesAsRows {
    static constexpr int kRows = QTile::kRows;
    static constexpr int kKeys = KTile::kRows;
    static constexpr int kRowsOfGroup = 16;
    static constexpr bool kSpareRegisters = false;
    using Scores = RegisterTile<kRows, kKeys>;
    using Output = RegisterTile<kRows, VTile::kCols>;
    using Softmax = OnlineSoftmax<kRows>;

    AFromRows<QTile> q;

    FLASH_DEVICE explicit QueriesAsRows(uint32_t q_address) : q(q_address) {}

    FLASH_DEVICE static int row_of_lane(int i) { return lane_row() + 8 * i; }
    FLASH_DEVICE static bool is_first_of_row() { return lane_col() == 0; }

    FLASH_DEVICE void multiply_k(Scores& s, uint32_t k) const {
        gemm<Element, QTile::kCols>(s, q, BFromRows<KTile>(k));
    }
    FLASH_DEVICE static void multiply_v(Output& o, const Scores& p, uint32_t v) {
        gemm<Element, kKeys>(o, AFromRegisters<Element, Scores>{p}, BFromColumns<VTile>(v));
    }
    template <OptionSet kOptions>
    FLASH_DEVICE static void apply_options(Scores& s, const AttentionParams& params,
                                           const Sequence& sequence, int head, int first_query,
                                           int first_key) {
        ScoreFunction<Element, Rows::kQueries, kOptions>{params, sequence, head}.apply(
            s, first_query, first_key);
    }
    template <class RangeOfRow>
    FLASH_DEVICE static void mask(Scores& s, int first_key, RangeOfRow range_of_row) {
        mask_scores(s, first_key, range_of_row);
    }
    // visit(two elements, the first one's column) for a lane's elements of a row of O.
    template <class Visit>
    FLASH_DEVICE static void for_each_pair_of_row(const Output& o, int m, int i, Visit visit) {
        o.for_each_pair_of_row(m, i,
                               [&](float x, float y, int col) { visit(x, y, col + lane_col()); });
    }
};

// As OnlineSoftmax, for tiles whose columns are queries: column 8 m + lane_col() + i is row (m, i).
template <int kRows, int kPowers>
struct ColumnSoftmax {
    static constexpr int kM = kRows / 8;
    static constexpr float kRescaleThreshold = 8.f + kPowers;

    float row_max[kM][2];
    float row_sum[kM][2];  // this lane's share

    // visit(m, i, row)
    template <class Visit>
    FLASH_DEVICE static void for_each_row(Visit visit) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(m, i, 8 * m + lane_col() + i);
    }
    // x = f(x) for a lane's elements of a row.
    template <class Tile, class Function>
    FLASH_DEVICE static void map_row(Tile& tile, int m, int i, Function f) {
#pragma unroll
        for (int k = 0; k < Tile::kM; ++k)
#pragma unroll
            for (int e = i; e < 4; e += 2) tile.v[k][m][e] = f(tile.v[k][m][e]);
    }
    // From all lanes that share a row.
    template <class Function>
    FLASH_DEVICE static float reduce(float x, Function f) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
            x = f(x, __shfl_xor_sync(0xffffffff, x, offset));
        return x;
    }

    FLASH_DEVICE ColumnSoftmax() {
        for_each_row([&](int m, int i, int) {
            row_max[m][i] = -INFINITY;
            row_sum[m][i] = 0.f;
        });
    }

    FLASH_DEVICE void begin_with(float score, int m, int i) {
        row_max[m][i] = score;
        row_sum[m][i] = lane_row() == 0 ? 1.f : 0.f;
    }

    // Replaces scores s by P, and updates O and the sums. Whether O is rescaled, lanes ask for
    // their own scores: the maximum of a row, from eight lanes, is wanted only then.
    template <class Scores, class Output>
    FLASH_DEVICE void update(Scores& s, Output& o, float scale) {
        const auto max_of_lane = [&](int m, int i) {
            float max = -INFINITY;
            map_row(s, m, i, [&](float x) {
                max = fmaxf(max, x);
                return x;
            });
            return max;
        };
        const auto exceeds = [&](float max, float old_max) {
            return !(max * scale - stale_subtrahend(old_max) <= kRescaleThreshold);
        };
        bool rescale = false;
        for_each_row(
            [&](int m, int i, int) { rescale |= exceeds(max_of_lane(m, i), row_max[m][i]); });
        if (__any_sync(0xffffffff, rescale))
            for_each_row([&](int m, int i, int) {
                const float max =
                    reduce(max_of_lane(m, i), [](float x, float y) { return fmaxf(x, y); });
                const float old = row_max[m][i];
                if (exceeds(max, old))
                    row_max[m][i] = fmaxf(old, round_up(max, scale) - float{kPowers});
                const float factor = old == row_max[m][i] ? 1.f : ptx::ex2(old - row_max[m][i]);
                row_sum[m][i] *= factor;
                map_row(o, m, i, [&](float x) { return x * factor; });
                if (is_large(row_max[m][i]))
                    map_row(s, m, i, [&](float x) { return centered(x, row_max[m][i], scale); });
            });
        for_each_row([&](int m, int i, int) {
            const float subtracted = subtrahend(row_max[m][i]);
            map_row(s, m, i, [&](float x) {
                const float p = ptx::ex2(x * scale - subtracted);
                row_sum[m][i] += p;
                return p;
            });
        });
    }

    FLASH_DEVICE void finish() {
        for_each_row([&](int m, int i, int) {
            row_sum[m][i] = reduce(row_sum[m][i], [](float x, float y) { return x + y; });
        });
    }
};

// Q of halves as B. Eight queries stay in registers.
template <class QTile, int kRows>
struct QAsColumns {
    QTile source;

    FLASH_DEVICE explicit QAsColumns(uint32_t q) : source(q) {}
    FLASH_DEVICE void load(uint32_t (&b)[kRows / 8][2], int k) const {
#pragma unroll
        for (int n = 0; n < kRows / 8; n += 2) {
            uint32_t two[4];
            source.load_b(two, n / 2, k);
#pragma unroll
            for (int i = 0; i < 4; ++i) b[n + i / 2][i % 2] = two[i];
        }
    }
};
template <class QTile>
struct QAsColumns<QTile, 8> {
    uint32_t fragments[QTile::kCols / 16][2];

    FLASH_DEVICE explicit QAsColumns(uint32_t q) {
        const QTile source(q);
#pragma unroll
        for (int k = 0; k < QTile::kCols / 16; ++k) {
            uint32_t two[4];  // of 16 queries
            source.load_b(two, 0, k);
#pragma unroll
            for (int i = 0; i < 2; ++i) fragments[k][i] = two[i];
        }
    }
    FLASH_DEVICE void load(uint32_t (&b)[1][2], int k) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) b[0][i] = fragments[k][i];
    }
};

// K and V of 8 bits, Q of halves: of its tile the first kRows, where there are no more.
template <class QTile, class KTile, class VTile, int kRows_>
struct QueriesAsColumns {
    static constexpr int kRows = kRows_;
    static constexpr int kKeys = KTile::kRows;
    static constexpr int kRowsOfGroup = 8;
    static constexpr bool kSpareRegisters = kRows == 8;  // for what need not be computed each time
    using Scores = RegisterTile<kKeys, kRows>;
    using Output = RegisterTile<VTile::kCols, kRows>;
    // Halves hold P from 2^-31 on, relative to the maximum's.
    using Softmax = ColumnSoftmax<kRows, 7>;

    QAsColumns<QTile, kRows> q;

    FLASH_DEVICE explicit QueriesAsColumns(uint32_t q_address) : q(q_address) {}

    FLASH_DEVICE static int row_of_lane(int i) { return lane_col() + i; }
    FLASH_DEVICE static bool is_first_of_row() { return lane_row() == 0; }

    FLASH_DEVICE void multiply_k(Scores& s, uint32_t k_address) const {
        const AFromByteRows<KTile> k(k_address);
#pragma unroll
        for (int two = 0; two < KTile::kCols / 32; ++two)
#pragma unroll
            for (int m = 0; m < Scores::kM; ++m) {
                uint32_t bytes[4];
                k.load_bytes(bytes, m, two);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    uint32_t a[4], b[Scores::kN][2];
                    k.to_a(a, bytes, step);
                    q.load(b, 2 * two + step);
                    multiply(s.v[m], a, b);
                }
            }
    }

    FLASH_DEVICE static void multiply_v(Output& o, const Scores& p, uint32_t v_address) {
        const AFromByteColumns<VTile> v(v_address);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            uint32_t b[Scores::kN][2];
            transpose(b, p, k);
#pragma unroll
            for (int two = 0; two < VTile::kCols / 32; ++two) {
                uint32_t bytes[4];
                v.load_bytes(bytes, two, k);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    uint32_t a[4];
                    v.to_a(a, bytes, m);
                    multiply(o.v[2 * two + m], a, b);
                }
            }
        }
    }

    // P^T of 16 keys as B.
    FLASH_DEVICE static void transpose(uint32_t (&b)[Scores::kN][2], const Scores& p, int k) {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                b[n][i] = ptx::movmatrix_transposed(p.template pack<__half>(k, n, i));
    }

    template <OptionSet kOptions>
    FLASH_DEVICE static void apply_options(Scores& s, const AttentionParams& params,
                                           const Sequence& sequence, int head, int first_query,
                                           int first_key) {
        ScoreFunction<__half, Rows::kKeys, kOptions, false>{params, sequence, head}.apply(
            s, first_key, first_query);
    }
    template <class RangeOfRow>
    FLASH_DEVICE static void mask(Scores& s, int first_key, RangeOfRow range_of_row) {
        Softmax::for_each_row([&](int m, int i, int row) {
            const Interval range = range_of_row(ptx::not_hoisted(row));
            const int begin = range.begin - first_key - lane_row();
            const int end = range.end - first_key - lane_row();
            int key = 0;  // relative to this lane's first
            Softmax::map_row(s, m, i, [&](float x) {
                const bool hidden = key < begin || key >= end;
                key += 8;
                return hidden ? -INFINITY : x;
            });
        });
    }
    template <class Visit>
    FLASH_DEVICE static void for_each_pair_of_row(const Output& o, int m, int i, Visit visit) {
#pragma unroll
        for (int k = 0; k < Output::kM; ++k)
            visit(o.v[k][m][i], o.v[k][m][2 + i], 16 * k + 2 * lane_row());
    }

 private:
    FLASH_DEVICE static void multiply(float (&c)[Scores::kN][4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[Scores::kN][2]) {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) ptx::mma_m16n8k16<__half>(c[n], a, b[n][0], b[n][1]);
    }
};

}  // namespace flash_ext
