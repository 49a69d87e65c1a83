// Merges splits of the keys in a fixed order, one after another: with the row maxima m and sums l
// of the splits so far and of the next one (primed),
//
//     M = max(m, m'),    L = 2^(m - M) l + 2^(m' - M) l'
//     O := (2^(m - M) l O + 2^(m' - M) O') / L
//
// where O is divided by l already and O' is not. O and l are 0 before the first split. One without
// keys changes no bit. Operations are given one by one, so that every kernel has the same bits.
#pragma once

#include "problem/params.h"
#include "ptx/math.cuh"

namespace flash_ext {

// The factors of O and O'.
struct MergeWeights {
    float before, added;

    FLASH_DEVICE float operator()(float x, float x_added) const {
        return fmaf(added, x_added, __fmul_rn(before, x));
    }
};

// Adds a split to the statistics of a row.
FLASH_DEVICE MergeWeights merge_statistics(PartialStatistics& all, const PartialStatistics& split) {
    // By selects: the lanes of a warp stay in step.
    const bool empty = split.sum == 0.f;
    const bool first = all.sum == 0.f;
    const float max = empty ? all.max : first ? split.max : fmaxf(all.max, split.max);
    const float before = first ? 0.f : __fmul_rn(ptx::ex2(all.max - max), all.sum);
    const float added = ptx::ex2(split.max - max);
    const float sum = empty ? all.sum : __fadd_rn(before, __fmul_rn(added, split.sum));
    const float inverse = ptx::rcp(sum);
    all = {max, sum};
    return {empty ? 1.f : __fmul_rn(before, inverse), empty ? 0.f : __fmul_rn(added, inverse)};
}

}  // namespace flash_ext
