// What K and V of 8 bits add to decode.cuh: Q in halves, and the scales.
#pragma once

#include "kernels/common/softmax.cuh"
#include "kernels/fa3/descales.cuh"
#include "problem/params.h"
#include "ptx/shared.cuh"
#include "tile/bytes.cuh"

namespace flash_ext {

// The descales of a head of a sequence, 1 where there are none. A sequence without keys may have no
// descales.
struct HeadDescales {
    const float* data;
    int64_t stride;
    int last;  // block; 0 unless there are blocks

    FLASH_DEVICE static HeadDescales of(const Descale& x, const Sequence& sequence, int head) {
        const bool some = x.data != nullptr && sequence.seqlen_k > 0;
        if (!some) return {&kNoDescale, 0, 0};
        return {x.data + sequence.index() * x.batch_stride + head * x.head_stride, x.last_stride,
                x.last_block};
    }

    FLASH_DEVICE float at(int i) const { return __ldg(data + i * stride); }
    // Lengths and offsets that are wrong must not read beyond them.
    FLASH_DEVICE float of_key(int key) const { return at(min_of(key / kDescaleRows, last)); }
};

// The factors from sums of halves of Q and numbers of K to scores. They are in shared memory, lest
// they take registers over the loop. A warp's blocks of keys have one descale each, which is loaded
// before Q K^T, and used after it.
template <int kRows>
struct ScoreFactors {
    HeadDescales of_keys;
    float of_rows[kRows];

    FLASH_DEVICE float of_block(int first_key) const { return of_keys.of_key(first_key); }
    // First the product of both factors: one may be as large as the other is small.
    template <class Softmax, class Scores>
    FLASH_DEVICE void apply(Scores& s, float of_block) const {
        Softmax::for_each_row([&](int m, int i, int row) {
            const float factor = of_rows[row] * of_block;
            Softmax::map_row(s, m, i, [&](float x) { return x * factor; });
        });
    }
};

// With 16 bits sums are scores.
struct NoScoreFactors {
    static constexpr int of_keys = 0;
    FLASH_DEVICE float of_block(int) const { return 1.f; }
    template <class Softmax, class Scores>
    FLASH_DEVICE void apply(Scores&, float) const {}
};

// From -126 to 127.
FLASH_DEVICE float to_power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// The power of two that brings the largest magnitude of a row of Q up to, but not to, 2^16. Then
// all but elements below 2^-32 of it are exact as halves. At most 2^126, whose inverse is a normal
// number; 1 for rows of halves near the largest, 65,504.
FLASH_DEVICE int power_to_halves(float largest) {
    return min_of(15 - ((__float_as_int(largest) >> 23) - 127), 126);
}

// A row of Q by a warp, a lane for 4 of 128 elements.
template <class QTile>
struct RowToHalves {
    static constexpr int kPasses = ceil_div(QTile::kCols, 128);
    uint2 packed[kPasses];

    FLASH_DEVICE static int col(int pass) { return 128 * pass + 4 * lane_id(); }

    // 16-bit elements; columns from `cols` on are zeros.
    FLASH_DEVICE void load(const __half* source, bool is_valid, int cols) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            packed[pass] = is_valid && col(pass) < cols
                               ? __ldg(reinterpret_cast<const uint2*>(source + col(pass)))
                               : uint2{0, 0};
    }

    // visit(two adjacent elements, their column)
    template <class Element, class Visit>
    FLASH_DEVICE void for_each_pair(Visit visit) const {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            visit(ptx::unpack<Element>(packed[pass].x), col(pass));
            visit(ptx::unpack<Element>(packed[pass].y), col(pass) + 2);
        }
    }

    // The largest magnitude of this lane's elements.
    template <class Element>
    FLASH_DEVICE float largest() const {
        float found = 0.f;
        for_each_pair<Element>(
            [&](float2 x, int) { found = fmaxf(found, fmaxf(fabsf(x.x), fabsf(x.y))); });
        return found;
    }

    // Stores the row times 2^power.
    template <class Element>
    FLASH_DEVICE void store(uint32_t q, int row, int power) const {
        const float factor = to_power_of_two(power);
        for_each_pair<Element>([&](float2 x, int col) {
            if (col >= QTile::kCols) return;
            ptx::st_shared(q + QTile::offset(row, place_beside_bytes(col)),
                           ptx::pack<__half>(x.x * factor, x.y * factor));
        });
    }
};

// The rows of Q that the CTA has, kWarps at a time, with a factor of each.
template <class QTile, int kWarps, class Given, class SourceOf, class IsValid>
FLASH_DEVICE void rows_to_halves(uint32_t q, float (&factors)[QTile::kRows], int cols,
                                 SourceOf source_of, IsValid is_valid) {
    constexpr int kRowsOfWarp = ceil_div(QTile::kRows, kWarps);
    const auto row_at = [](int i) { return warp_id() + i * kWarps; };
    RowToHalves<QTile> rows[kRowsOfWarp];
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i)  // all loads before their first use
        rows[i].load(source_of(row_at(i)), is_valid(row_at(i)), cols);
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
        if (row_at(i) >= QTile::kRows) break;
        const int power = power_to_halves(warp_max(rows[i].template largest<Given>()));
        rows[i].template store<Given>(q, row_at(i), power);
        factors[row_at(i)] = to_power_of_two(-power);
    }
}

}  // namespace flash_ext
